"""Which linear maps may keep some rows of their operand for the gradient of their weight, and how a split says so.

A linear map is computed in two forms, exact and sampled; a group's split says in which, beside the loops that it splits:
`SampledSplit`. Everything else reads it as the plain split that it is too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..artifacts import UserError
from ..ops import find
from ..ops.sampled import LEAST_ROWS, rows_kept

if TYPE_CHECKING:
    from .groups import Group, Split
    from .program import Op, Program, Tensor


class SampledSplit(tuple[int, ...]):
    """A split whose linear map keeps a share of its rows; it equals no split of the exact form.

    >>> sampled = SampledSplit((0, -1), 0.3)
    >>> sampled == (0, -1), sampled == SampledSplit((0, -1), 0.3), list(sampled), sampled.share
    (False, True, [0, -1], 0.3)
    """

    share: float

    def __new__(cls, loops: Iterable[int], share: float) -> SampledSplit:
        """Return the split of `loops` in the form that keeps `share` of the rows."""
        found = super().__new__(cls, loops)
        found.share = share
        return found

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.share

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampledSplit) and self.share == other.share and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.share))


def share_of(split: Split) -> float:
    """Return the share of the rows that the linear map of a group keeps under `split`; 0 of the exact form.

    >>> share_of((0, 1)), share_of(SampledSplit((0, 1), 0.3))
    (0.0, 0.3)
    """
    return split.share if isinstance(split, SampledSplit) else 0.0


def in_form_of(split: Split, loops: Iterable[int]) -> Split:
    """Return the split of `loops` in the form, exact or sampled, that `split` has."""
    return SampledSplit(loops, split.share) if isinstance(split, SampledSplit) else tuple(loops)


def can_sample(op: Op) -> bool:
    """Tell whether the op keeps its operand for the gradient of a trained weight alone: a linear map of what an op made."""
    if find(op.name).linear_map is None or len(op.inputs) < 2:
        return False
    x, weight = op.inputs[:2]
    return weight.requires_grad and is_of_param(weight) and x.role == "op" and len(x.shape) > 1


def sampled_params(program: Program, splits: Mapping[Group, Split]) -> set[str]:
    """Return the names of the parameters whose gradients are estimates under `splits`."""
    found = set()
    for region_class in program.classes:
        for group in region_class.groups:
            if share_of(splits[group]):
                ops = [op for member in region_class.members for op in (member.ops[own.position] for own in group.ops)]
                found |= {_param_of(op.inputs[1]).key for op in ops if can_sample(op)}
    return found


def _param_of(tensor: Tensor) -> Tensor:
    while tensor.producer is not None:
        tensor = tensor.producer.inputs[0]
    return tensor


def check_sampling(program: Program, share: float) -> None:
    """Raise `UserError` where no linear map of `program` could leave any rows out."""
    found = [op for op in program.ops if not op.constant and can_sample(op)]
    rows = max((math.prod(op.inputs[0].shape[:-1]) for op in found), default=0)
    if not found:
        raise UserError(
            "linear maps of activations by trained weights are needed to keep some of their rows; the model has none; leave "
            "sampled out"
        )
    if share < 1 and rows_kept(rows, share) >= rows:
        raise UserError(
            f"more than {LEAST_ROWS} rows (tokens) are needed to leave some out; the model's linear maps have {rows} at most; "
            "leave sampled out, or take a larger batch"
        )


def is_of_param(tensor: Tensor) -> bool:
    """Tell whether `tensor` is a parameter, or one in another dtype."""
    made = tensor.producer
    if made is None:
        return tensor.role == "param"
    if len(made.inputs) != 1 or not find(made.name).linear:
        return False
    (source,) = made.inputs
    return source.shape == tensor.shape and source.dtype != tensor.dtype and is_of_param(source)
