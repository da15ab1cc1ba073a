"""Puts parameters' reshards into buckets: `Open` issues a bucket early, a `Close` for each parameter stands where it is
read.

`travel` has the rule by which reshards share a bucket, and where the bucket opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ops import find
from ..program.decisions import Overlap
from ..program.layout import local_shape
from .buckets import Bucket, Member
from .instructions import Close, Compute, Instruction, Open, Reshard, Value
from .travel import opening_region, regions_ahead

Readers = dict[int, list[tuple[Instruction, int]]]
Travels = list[tuple[Reshard, Member]]


def in_buckets(instructions: Sequence[Instruction], values: list[Value], overlap: Overlap) -> list[Instruction]:
    """Return the instructions with the parameters' changes of layout in buckets; adds the values that this takes."""
    travels = {} if overlap == "none" else _travels(instructions, values, _readers(instructions))
    if not travels:
        return list(instructions)
    starts = _starts(instructions)
    opened_at: dict[int, list[Instruction]] = {}
    closing: dict[int, Close] = {}
    for region, found in travels.items():
        opening, closed = _bucket(found, values, ahead=regions_ahead(overlap) > 0)
        opened_at.setdefault(starts[opening_region(list(starts), region, overlap)], []).append(opening)
        closing.update(closed)
    ordered: list[Instruction] = []
    for instruction in instructions:
        ordered += opened_at.get(instruction.index, [])
        ordered.append(closing.get(instruction.index, instruction))
    return [replace(instruction, index=index) for index, instruction in enumerate(ordered)]


def _travels(instructions: Sequence[Instruction], values: list[Value], readers: Readers) -> dict[int | None, Travels]:
    """Return the parameters' reshards that communicate, in order, by region; those that only sum stand under None."""
    found: dict[int | None, Travels] = {}
    for instruction in instructions:
        if not isinstance(instruction, Reshard) or instruction.region < 0:
            continue
        if values[instruction.source].tensor.role == "param":
            member = _member(instruction, values, readers)
            if member.travel.moves:
                region = None if member.travel.is_whole_sum else instruction.region
                found.setdefault(region, []).append((instruction, member))
    return found


def _starts(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return the index of each region's first instruction, in the order in which regions begin."""
    starts: dict[int, int] = {}
    for instruction in instructions:
        if instruction.region >= 0:
            starts.setdefault(instruction.region, instruction.index)
    return starts


def _bucket(travels: Travels, values: list[Value], ahead: bool) -> tuple[Open, dict[int, Close]]:
    """Return the instruction that opens the bucket, and those that take the place of the reshards."""
    found = [reshard for reshard, _ in travels]
    first, bucket = found[0], Bucket([member for _, member in travels], ahead)
    tokens = [
        replace(values[reshard.source], index=len(values) + place, key=f"{reshard.key}.underway")
        for place, reshard in enumerate(found)
    ]
    values += tokens
    opening = Open(
        index=first.index, key=f"{first.path}:open", path=first.path, region=first.region, bucket=bucket,
        params=tuple(reshard.source for reshard in found), tokens=tuple(token.index for token in tokens),
    )  # fmt: skip
    closed = {
        reshard.index: Close(
            index=reshard.index, key=reshard.key, path=reshard.path, region=reshard.region, bucket=bucket,
            place=place, token=token.index, result=reshard.result,
        )
        for place, (reshard, token) in enumerate(zip(found, tokens))
    }  # fmt: skip
    return opening, closed


def _readers(instructions: Sequence[Instruction]) -> Readers:
    """Return the instructions that read each value, each with the position of the operand."""
    found: Readers = {}
    for instruction in instructions:
        for place, value in enumerate(instruction.inputs):
            found.setdefault(value, []).append((instruction, place))
    return found


def _makes_gradient(instruction: Instruction, place: int) -> bool:
    """Return True if the gradient of the operand is a new tensor, which no other operand's gradient shares."""
    return isinstance(instruction, Compute) and find(instruction.op.name).fresh_gradient == place


def _member(reshard: Reshard, values: Sequence[Value], readers: Readers) -> Member:
    tensor, copy = values[reshard.source].tensor, values[reshard.result]
    mesh, coords = reshard.there.communicator.mesh, reshard.there.communicator.coords
    size = tensor.dtype.itemsize
    for entries in local_shape(tensor.shape, tensor.slots, copy.layout, mesh, coords):
        size *= entries
    found = readers.get(reshard.result, [])  # nobody reads what is only handed out
    is_new = bool(found) and all(_makes_gradient(*reader) for reader in found)
    return Member(reshard.there, reshard.back, tensor.requires_grad, tensor.dtype, size, reshard.region, is_new)
