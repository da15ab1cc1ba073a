"""What a local rule is told about the split, and the literal rewrites that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class AxisGroup(Protocol):
    """Ranks that share a split: what an op that communicates inside itself may use."""

    size: int

    def all_reduce(self, tensor: Any, op: str = "sum") -> Any:
        """Return the reduction of `tensor` (`sum` or `max`) over the group; `tensor` may be overwritten."""

    def begin(self, tensor: Any) -> Any:
        """Begin to sum `tensor` over the group; `wait()` of what is returned gives the sum."""


class LocalContext(Protocol):
    """One call seen from one rank."""

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """The rank's shape of output `index`."""

    def in_shape(self, index: int) -> tuple[int, ...]:
        """The rank's shape of tensor argument `index`."""

    def global_shape(self, index: int) -> tuple[int, ...]:
        """The whole shape of tensor argument `index`."""

    def split(self, *loops: str) -> bool:
        """Whether any mesh axis splits one of `loops`."""

    def owner(self, *loops: str) -> bool:
        """Whether this rank is the first along every axis that splits one of `loops`."""

    def group_of(self, *loops: str) -> AxisGroup:
        """The ranks over which `loops` are split."""

    def range_of(self, loop: str) -> tuple[int, int]:
        """Start and stop of this rank's part of `loop`."""


class WithSum:
    """A local function `function(total, *args)` whose `total` is a sum over ranks of what some arguments alone say.

    total = Σ part(args[k] for k in places) over the ranks of `group`. Where those arguments are known before the step's
    own work, the sum is begun there, and is there when the function is called: the ranks need not meet for it.
    """

    def __init__(
        self, function: Callable[..., Any], part: Callable[..., Any], places: Sequence[int], group: AxisGroup
    ) -> None:
        self.function, self.part, self.places, self.group = function, part, tuple(places), group

    def __call__(self, *args: Any) -> Any:
        return self.function(self.total(args), *args)

    def total(self, args: Sequence[Any]) -> Any:
        """Return the sum, for which all ranks meet now."""
        return self.group.all_reduce(self._own(args))

    def begin(self, args: Sequence[Any]) -> Any:
        """Begin the sum, given the arguments of which it is made (others may be missing)."""
        return self.group.begin(self._own(args))

    def _own(self, args: Sequence[Any]) -> Any:
        return self.part(*(args[place] for place in self.places))


def replace_arg(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, value: Any):
    """Return (args, kwargs) with the argument at `index`, or by `name`, replaced."""
    if index < len(args):
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: value}


def local_size(index: int, name: str):
    """Make the local rule of an op whose argument `index` is the shape of its output."""

    def localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        args, kwargs = replace_arg(args, kwargs, index, name, list(ctx.out_shape()))
        return target, args, kwargs

    return localize
