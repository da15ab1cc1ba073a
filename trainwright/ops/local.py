"""What a local rule is told about the split, and the literal rewrites that several families share."""

from __future__ import annotations

from typing import Any, Protocol


class AxisGroup(Protocol):
    """Ranks that share a split: what an op that communicates inside itself may use."""

    size: int

    def all_reduce(self, tensor: Any, op: str = "sum") -> Any:
        """Return the reduction of `tensor` (`sum` or `max`) over the group; `tensor` may be overwritten."""


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
