"""Plans pipeline stages: chooses cuts of the model and what each stage rematerialises, judged by simulated schedules.

events     computes the seconds of a step from every stage's actions
table      holds seconds and bytes of the units between cuts, and finds the least rematerialisation that fits
measure    measures such a table for one choice of layouts
program    proposes cuts by a small mixed-integer program, and gives a lower bound over all cuts
cuts       improves cuts by moves of single blocks, judged by the simulated step
recipes    gives the textbook cuts: even, balanced and pipeline-dp
search     searches over numbers of stages, meshes and micro-batches
"""
