"""When parameters travel: the changes of layout of a region's parameters become one bucket, issued early, waited for late.

none      every change of layout runs where it is asked for, one at a time
buckets   gathers of a region are issued where it begins, its gradients are reduced together and waited for where its
          backward ends
ahead     besides, gathers are issued one region ahead, in the forward and where the backward gathers again, and
          reductions are waited for one region later

Each of them holds more memory than the one before: `buckets` a region's gradients before they are reduced, `ahead` the
gathered parameters of two regions. Sums that stay whole are reduced in place, in the buffer that then is the gradients:
not to wait for them holds nothing, so under either all of them are one bucket, waited for where the backward ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from .buckets import Bucket, Member, only_sums
from .instructions import Close, Compute, Instruction, Open, Reshard, Value
from .layout import local_shape

Overlap = Literal["none", "buckets", "ahead"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)

Readers = dict[int, list[tuple[Instruction, int]]]
_WEIGHT_OF = {"linear": 1, "linear_io": 1, "embedding": 0, "convolution": 1}
"""Which operand is the weight of an op that makes its gradient anew; sums hand their operands what they were given."""


def in_buckets(instructions: Sequence[Instruction], values: list[Value], overlap: Overlap) -> list[Instruction]:
    """Return the instructions with the parameters' changes of layout in buckets; adds the values that this takes."""
    travels = _travels(instructions, values)
    if overlap == "none" or not travels:
        return list(instructions)
    starts, readers = _starts(instructions), _readers(instructions)
    opened_at: dict[int, list[Instruction]] = {}
    closing: dict[int, Close] = {}
    for region, found in travels.items():
        opening, closed = _bucket(found, values, readers, ahead=overlap == "ahead")
        opened_at.setdefault(_opening(starts, region, overlap), []).append(opening)
        closing.update(closed)
    ordered: list[Instruction] = []
    for instruction in instructions:
        ordered += opened_at.get(instruction.index, [])
        ordered.append(closing.get(instruction.index, instruction))
    return [replace(instruction, index=index) for index, instruction in enumerate(ordered)]


def _travels(instructions: Sequence[Instruction], values: Sequence[Value]) -> dict[int | None, list[Reshard]]:
    """Return the parameters' reshards that move anything, in order, by region; by None those that only sum."""
    found: dict[int | None, list[Reshard]] = {}
    for instruction in instructions:
        match instruction:
            case Reshard(there=there, back=back, region=region) if region >= 0:
                moves = there.moves or (back.moves and instruction.differentiable)
                if moves and values[instruction.source].tensor.role == "param":
                    found.setdefault(None if only_sums(back.steps) and not there.moves else region, []).append(
                        instruction
                    )
    return found


def _starts(instructions: Sequence[Instruction]) -> dict[int, int]:
    """The first instruction of each region, in the order in which regions begin."""
    starts: dict[int, int] = {}
    for instruction in instructions:
        if instruction.region >= 0:
            starts.setdefault(instruction.region, instruction.index)
    return starts


def _opening(starts: dict[int, int], region: int | None, overlap: Overlap) -> int:
    if region is None:
        return min(starts.values())
    order = list(starts)
    place = order.index(region)
    return starts[order[place - 1]] if overlap == "ahead" and place else starts[region]


def _bucket(
    found: Sequence[Reshard], values: list[Value], readers: Readers, ahead: bool
) -> tuple[Open, dict[int, Close]]:
    """Return the instruction that opens the bucket, and those that take the place of the reshards."""
    first = found[0]
    bucket = Bucket([_member(reshard, values, readers) for reshard in found], ahead)
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
    """Who reads each value, and as which of its operands."""
    found: Readers = {}
    for instruction in instructions:
        for place, value in enumerate(instruction.inputs):
            found.setdefault(value, []).append((instruction, place))
    return found


def _makes_gradient(instruction: Instruction, place: int) -> bool:
    """Whether the gradient of an operand is a product, and no view of what other operands' gradients share."""
    return isinstance(instruction, Compute) and _WEIGHT_OF.get(instruction.op.name) == place


def _member(reshard: Reshard, values: Sequence[Value], readers: Readers) -> Member:
    tensor, copy = values[reshard.source].tensor, values[reshard.result]
    mesh, coords = reshard.there.communicator.mesh, reshard.there.communicator.coords
    size = tensor.dtype.itemsize
    for entries in local_shape(tensor.shape, tensor.slots, copy.layout, mesh, coords):
        size *= entries
    found = readers.get(reshard.result, [])  # nobody reads what is only handed out
    is_new = bool(found) and all(_makes_gradient(*reader) for reader in found)
    return Member(reshard.there, reshard.back, tensor.requires_grad, tensor.dtype, size, reshard.region, is_new)


def wider(overlap: Overlap) -> Iterator[Overlap]:
    """Yield the ways that hold no more memory than `overlap`, the fastest first.

    >>> list(wider("buckets"))
    ['buckets', 'none']
    """
    yield from reversed(OVERLAPS[: OVERLAPS.index(overlap) + 1])
