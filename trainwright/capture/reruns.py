"""Which part of a region the backward runs once more: the pure sub-graph that rederives what the plan does not keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .buckets import Bucket
from .local import Instruction, LocalProgram, Ref
from .reshard import Route

Producers = Mapping[int, Instruction]


@dataclass(eq=False)
class Rerun:
    """The sub-graph that rederives what one region does not keep."""

    wanted: set[int] = field(default_factory=set)
    """Values that are not kept."""
    internals: set[int] = field(default_factory=set)
    """Instructions whose saved internals are not kept."""
    instructions: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    """Values from which the sub-graph starts."""
    last_use: dict[int, int] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    """Where the sub-graph communicates: the instructions that make the region's results, and those results."""
    gathers: dict[Bucket, dict[int, int]] = field(default_factory=dict)
    """The parameters that the sub-graph gathers again: by bucket, index → value to start from."""


def reruns_of(local: LocalProgram) -> dict[int, Rerun]:
    """Return what the backward of each region reruns; nothing is wanted of a region that keeps everything."""
    producers = {value: instruction for instruction in local.instructions for value in instruction.outputs}
    reruns: dict[int, Rerun] = {}
    for instruction in local.instructions:
        rerun = reruns.setdefault(instruction.region, Rerun())
        rerun.wanted |= {value for value in instruction.outputs if local.values[value].recomputed}
        if instruction.internal_recomputed:
            rerun.internals.add(instruction.index)
    for region, rerun in reruns.items():
        _trace_back(local, producers, region, rerun)
        if any(_communicates(local.instructions[index]) for index in rerun.instructions):
            rerun.ends = _results(local, region)
    return reruns


def _communicates(instruction: Instruction) -> bool:
    """Whether the ranks meet in what the backward runs again of it."""
    if instruction.is_borrowed:
        instruction = instruction.again
    if instruction.bucket is not None:
        index = instruction.args[0]
        return isinstance(index, int) and instruction.bucket.members[index].there.moves
    if instruction.op is None:
        return any(isinstance(arg, Route) and arg.moves for arg in instruction.args[1:2])
    return instruction.function is not instruction.op.node.target


def _results(local: LocalProgram, region: int) -> dict[int, list[int]]:
    """The values of `region` that are read elsewhere, by the instruction that makes them."""
    inside = {value: i.index for i in local.instructions if i.region == region for value in i.outputs}
    read = {value for i in local.instructions if i.region != region for value in i.again.inputs}
    read |= {found.value for found in local.outputs if isinstance(found, Ref)}
    results: dict[int, list[int]] = {}
    for value, index in inside.items():
        if value in read:
            results.setdefault(index, []).append(value)
    return results


def _trace_back(local: LocalProgram, producers: Producers, region: int, rerun: Rerun) -> None:
    """Collect, from the wanted values backwards, the instructions to rerun and the kept values to start from."""
    needed = set(rerun.wanted)
    for instruction in reversed(local.instructions):
        if instruction.region != region:
            continue
        asked = any(value in needed for value in instruction.outputs) or instruction.index in rerun.internals
        if not asked:
            continue
        rerun.instructions.insert(0, instruction.index)
        if instruction.bucket is not None and _communicates(instruction):
            rerun.gathers.setdefault(instruction.bucket, {})[instruction.args[0]] = instruction.inputs[0]
        for value in instruction.again.inputs:
            if local.values[value].recomputed or _is_view(local, producers, value, region):
                needed.add(value)
            else:
                rerun.sources.add(value)
    made = {value for index in rerun.instructions for value in local.instructions[index].outputs}
    rerun.sources -= made
    for index in rerun.instructions:
        for value in local.instructions[index].again.inputs:
            rerun.last_use[value] = index


def _is_view(local: LocalProgram, producers: Producers, value: int, region: int) -> bool:
    """Whether `value` is a view made inside the region of something that is itself rederived."""
    producer = producers.get(value)
    if producer is None or producer.region != region or producer.op is None or producer.op.kind != "view":
        return False
    return any(local.values[v].recomputed or _is_view(local, producers, v, region) for v in producer.inputs)


def gathering_before(reruns: Mapping[int, Rerun], segments: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """For each region whose backward gathers parameters again ahead, the one before it, whose backward comes next."""
    order = [region for region in dict.fromkeys(region for region, _, _ in segments) if region in reruns]
    gathering = [region for region in order if any(bucket.ahead for bucket in reruns[region].gathers)]
    return dict(zip(gathering[1:], gathering))
