"""Finds the instructions of a region that its backward runs again, to rematerialise what the plan does not keep."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .buckets import Bucket
from .instructions import Borrow, Close, Compute, Instruction, Open, Ref, Reshard
from .local import LocalProgram

Producers = Mapping[int, Instruction]


@dataclass(eq=False)
class Rerun:
    """The instructions that rematerialise what one region does not keep."""

    wanted: set[int] = field(default_factory=set)
    """The values to rematerialise."""
    internals: set[int] = field(default_factory=set)
    """The instructions whose saved internals are rematerialised."""
    instructions: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    """The kept values that the rerun starts from."""
    last_use: dict[int, int] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    """The instructions that make the region's results, with those results; empty where nothing is run again."""
    gathers: dict[Bucket, dict[int, int]] = field(default_factory=dict)
    """The parameters that the rerun gathers again: by bucket, the member → the token to gather from."""


def reruns_of(local: LocalProgram) -> dict[int, Rerun]:
    """Return the rerun of each region; it is empty where the region keeps everything."""
    producers = {value: instruction for instruction in local.instructions for value in instruction.outputs}
    reruns: dict[int, Rerun] = {}
    for instruction in local.instructions:
        rerun = reruns.setdefault(instruction.region, Rerun())
        rerun.wanted |= {value for value in instruction.outputs if local.values[value].recomputed}
        if isinstance(instruction, Compute) and instruction.internal_recomputed:
            rerun.internals.add(instruction.index)
    for region, rerun in reruns.items():
        _trace_back(local, producers, region, rerun)
        if rerun.instructions:
            rerun.ends = _results(local, region)
    return reruns


def _communicates(instruction: Instruction) -> bool:
    """Tell whether a rerun of the instruction makes the ranks meet."""
    match instruction:
        case Compute(function=function, op=op):
            return function is not op.node.target
        case Reshard(there=there) | Borrow(there=there):
            return there.moves
        case Close():
            return instruction.member.there.moves
        case Open():
            return False


def _results(local: LocalProgram, region: int) -> dict[int, list[int]]:
    """Return the values of `region` that are read outside it, by the instruction that makes them.

    Not the tokens of a bucket that opens in it: no gradient comes through them, and autograd would make zeros of their sizes.
    """
    own = (i for i in local.instructions if i.region == region and not isinstance(i, Open))
    inside = {value: i.index for i in own for value in i.outputs}
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
        if isinstance(instruction, Close) and _communicates(instruction):
            rerun.gathers.setdefault(instruction.bucket, {})[instruction.place] = instruction.token
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
    """Return True if `value` is a view, made in the region, of a value that is rematerialised."""
    producer = producers.get(value)
    if not isinstance(producer, Compute) or producer.region != region or producer.op.kind != "view":
        return False
    return any(local.values[v].recomputed or _is_view(local, producers, v, region) for v in producer.inputs)


def gathering_before(reruns: Mapping[int, Rerun], segments: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Return, for each region that gathers parameters again ahead, the one directly before it where that does too.

    Copies that were gathered sooner would be held while the regions between run.
    """
    order = list(dict.fromkeys(region for region, _, _ in segments))
    gathering = {region for region in reruns if any(bucket.ahead for bucket in reruns[region].gathers)}
    return {region: before for before, region in itertools.pairwise(order) if {before, region} <= gathering}
