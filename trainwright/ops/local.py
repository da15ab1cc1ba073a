"""What a local rule is told about the split, and the literal rewrites that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class AxisGroup(Protocol):
    """Ranks that share a split: what an op that communicates inside itself may use."""

    size: int

    def all_reduce(self, tensor: Any, op: str = "sum") -> Any:
        """Return the reduction of `tensor` (`sum` or `max`) over the group; `tensor` may be overwritten."""

    def begin(self, tensor: Any) -> Any:
        """Begin to sum `tensor` over the group; `wait()` of what is returned gives the sum."""

    def all_to_all(self, flat: Any, send: list[int], receive: list[int]) -> Any:
        """Send consecutive runs of `flat` (lengths `send`) to the group's ranks; return what they sent. Of one axis alone."""

    def opposite(self, flat: Any, length: int) -> Any:
        """Send `flat` to the rank as far from the end as this one is from the start; return the `length` numbers it sends.

        Of one axis alone. The rank in the middle of an odd number is its own opposite.
        """


class Rows(NamedTuple):
    """Numbers of rows that depend on the data, as they are planned."""

    planned: list[int]
    even: float
    """The rows that this rank computes where every rank has as many as any other."""
    first: int = 0
    """The index of the first number that counts rows which this rank computes; those before count what it sends."""
    even_sent: float = 0.0
    """The rows that it sends, likewise."""

    def computed(self, numbers: Sequence[int]) -> int:
        """Return the rows that this rank computes, given what was counted."""
        return sum(numbers[self.first :])

    def sent(self, numbers: Sequence[int]) -> int:
        """Return the rows that this rank sends."""
        return sum(numbers[: self.first])

    def factor(self, numbers: Sequence[int]) -> float:
        """Return the rows that this rank sends or computes as a multiple of the even share, the larger of both."""
        pairs = (self.computed(numbers), self.even), (self.sent(numbers), self.even_sent)
        return max(found / even if even else 1.0 for found, even in pairs)

    def excess(self, numbers: Sequence[int]) -> int:
        """Return the rows that are sent or computed beyond those that were planned, the more of both."""
        return max(
            0, self.computed(numbers) - self.computed(self.planned), self.sent(numbers) - self.sent(self.planned)
        )


class Pair(NamedTuple):
    """The ranks of an axis that splits two loops of an op together."""

    group: AxisGroup
    place: int
    """This rank's among them."""
    ranges: tuple[tuple[int, int], ...]
    """Start and stop of each one's part of the second loop."""


class Mirror(NamedTuple):
    """One axis that splits a loop, on the way to the rank that is opposite along all of them."""

    group: AxisGroup
    """The ranks of the axis."""
    range: tuple[int, int]
    """Start and stop of the part of the rank whose rows have come, once those of the axes before have been passed on."""


class LocalContext(Protocol):
    """One call seen from one rank."""

    imbalance: float
    """By how much the fullest rank may have more than its even share, of what depends on the data."""

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

    def mirrors_of(self, loop: str) -> tuple[Mirror, ...]:
        """The axes that split `loop`, outermost first."""

    def pair_of(self, first: str, second: str) -> Pair | None:
        """The ranks of the axis that splits both loops together, if one does."""

    def count(self, numbers: Any, rows: Rows) -> list[int]:
        """Return the values of `numbers`, a tensor that depends on the data; the planned ones where there are no values."""

    def limit(self) -> str:
        """Return what becomes of rows beyond those that were planned, see `expert_limits`."""


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
