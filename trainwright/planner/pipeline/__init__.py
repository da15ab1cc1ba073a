"""Pipeline stages: where a model is cut, what each stage recomputes, and what a step takes by a simulation of its schedule.

events     the seconds of a step from every stage's actions
table      seconds and bytes of what may be cut, and the least recomputation that fits
measure    such a table for one choice of layouts
program    the cuts by a small mixed-integer program, and what no cuts beat
cuts       moves of single blocks under the simulation
recipes    even, balanced and pipeline-dp, the ways that others take
search     over numbers of stages, meshes and micro-batches
"""
