"""The instructions of one rank's local program: five kinds, told apart by `match`, each with named fields.

    Compute   runs an op of the program on the rank's parts
    Reshard   brings a tensor into another layout, and its gradient back
    Open      issues the gathers of a bucket; its backward waits for the bucket's reductions
    Close     waits for one parameter's gather; its backward hands in that parameter's gradient
    Borrow    hands on the copy that an earlier region's reshard made

All have `index`, `key`, `path` and `region`, the values that they read (`inputs`) and make (`outputs`), and `again`: the
instruction that the backward runs to make the outputs anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..program.layout import Layout
from ..program.program import Op, Tensor
from .buckets import Bucket, Member
from .reshard import Route


@dataclass(frozen=True)
class Ref:
    """Refers to a value, in the arguments of an op or in the outputs of a step."""

    value: int


@dataclass(eq=False)
class Value:
    """One local tensor of the step."""

    index: int
    key: str
    tensor: Tensor
    layout: Layout
    recomputed: bool = False
    offloaded: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class _Numbered:
    index: int
    """The instruction's position in the program."""
    key: str
    path: str
    """Names the module that the op belongs to, or the reader of what is resharded."""
    region: int
    """The index of the region; -1 for an instruction of none (constants, the loss's sum)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Compute(_Numbered):
    """One call of an op of the program, on the rank's parts."""

    op: Op
    function: Callable[..., Any]
    """The function that is called: the op itself, or its local form."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[int, ...] = ()
    """The mesh axes along which its results are parts; its random numbers differ along these alone."""
    internal_recomputed: bool = False
    """True if the backward recomputes what the op saves internally (statistics, masks) by running it again."""
    internal_offloaded: bool = False
    """True if what the op saves internally is offloaded from the device until the backward."""
    sampled: Callable[..., Any] | None = None
    """A training step calls this in place of `function`, of which it is the form that keeps drawn rows; None: `function` itself."""
    rerun: Callable[..., Any] | None = None
    """The backward calls this in place of `function` for an op that writes buffers; it leaves the buffers unchanged."""

    @property
    def gives_several(self) -> bool:
        """Return True if the op returns a tuple or a list."""
        return isinstance(self.op.node.meta["val"], (tuple, list))

    @cached_property
    def again(self) -> Compute:
        """Return the instruction that recomputes the outputs."""
        return self if self.rerun is None else replace(self, function=self.rerun, rerun=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reshard(_Numbered):
    """Changes the layout of a tensor by the route `there`, and that of its gradient by the route `back`."""

    source: int
    result: int
    there: Route
    back: Route
    differentiable: bool
    """True if the reshard passes a gradient back."""

    @property
    def inputs(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.result,)

    @property
    def again(self) -> Reshard:
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class Open(_Numbered):
    """Issues the gathers of all parameters of a bucket; each parameter gives a token that `Close` takes."""

    bucket: Bucket
    params: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.params

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.tokens

    @property
    def again(self) -> Open:
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class Close(_Numbered):
    """Waits for one parameter of a bucket and returns it in the wanted layout."""

    bucket: Bucket
    place: int
    """The parameter's index among the bucket's members."""
    token: int
    result: int

    @property
    def member(self) -> Member:
        """Return the parameter's entry in the bucket."""
        return self.bucket.members[self.place]

    @property
    def inputs(self) -> tuple[int, ...]:
        return (self.token,)

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.result,)

    @property
    def again(self) -> Close:
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class Borrow(_Numbered):
    """Hands a region the copy that an earlier region's reshard made of the same parameter.

    Its backward reshards the parameter anew, so that the lent copy need not be kept until then.
    """

    source: int
    """The parameter at rest, from which the backward makes the copy anew."""
    lent: int
    result: int
    there: Route
    back: Route
    differentiable: bool

    @property
    def inputs(self) -> tuple[int, ...]:
        return (self.source, self.lent)

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.result,)

    @cached_property
    def again(self) -> Reshard:
        """Return the reshard that makes the same copy."""
        return Reshard(
            index=self.index, key=self.key, path=self.path, region=self.region, source=self.source, result=self.result,
            there=self.there, back=self.back, differentiable=self.differentiable,
        )  # fmt: skip


Instruction = Compute | Reshard | Open | Close | Borrow
