"""`OptimizerRecord`: what an optimizer costs and needs, stated once beside its class.

The planner prices it, tables and documentation print it, and the tests compare it with what the class really does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ..artifacts import UserError
from .batch import working_dtype

Shape = tuple[int, ...]
Options = Mapping[str, Any]
Temporaries = Callable[[Shape, int, Options], int]
Reads = Literal["element", "block", "row", "matrix", "tensor", "model"]
Groups = Callable[[nn.Module], list[dict[str, Any]]]
_PASSES = {"forward": 1 / 3, "gradient": 1.0, "hessian_vector": 2.0}
"""What a pass costs, in forward and backward passes: a backward is two forwards, a product two gradients."""
_CALLS_OF_TORCH, _CALLS_OF_OURS, _CALLS_COMPILED = 8.0, 10.0, 40.0
"""Measured on a core of a Zen 4 with parameters of 64 elements: in launches of an op that is recorded for the backward."""
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StateTensor:
    """One tensor that the optimizer keeps for each parameter."""

    name: str
    shape: Callable[[Shape, Options], Shape | None]
    """The tensor's shape for a parameter's shape; `None` where the options or the shape call for none."""
    dtype: torch.dtype | None = None
    """`None`: the parameter's own, or for a `number` what torch keeps numbers in."""
    number: bool = False
    wide: bool = False
    """Kept in fp32 where the parameter is bf16 or fp16."""
    once: bool = False
    """Kept once for all parameters together, in the state of the first one."""

    def num_bytes(self, shape: Shape, dtype: torch.dtype, options: Options) -> int:
        """Return the bytes kept for one parameter."""
        own = self.shape(shape, options)
        return 0 if own is None else math.prod(own) * self.dtype_for(dtype).itemsize

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the tensor's dtype for a parameter of `dtype`."""
        if self.number:
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        if self.wide:
            dtype = working_dtype(dtype)
        return self.dtype or dtype


@dataclass(frozen=True)
class ExtraPass:
    """What a step takes beyond the gradient that it is given: `count` passes of `kind`, every `every` steps."""

    kind: Literal["forward", "gradient", "hessian_vector"]
    count: int = 1
    every: int = 1

    def __str__(self) -> str:
        what = f"{self.count} more {self.kind.replace('_', '-')} pass{'es' if self.count > 1 else ''}"
        return f"{what} every {self.every} steps" if self.every > 1 else f"{what} a step"


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer's class and what it declares.

    `reads` is the largest piece of a parameter that one updated element depends on, hence where a shard may be cut:
    `element` anywhere, `block` between blocks of 256 consecutive elements, `row` between rows, `matrix` not within the
    last two dims, `tensor` not within a parameter, `model` not at all. A number summed or counted over the whole model is
    no such piece: the method adds it up over the ranks itself.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    summary: str
    states: tuple[StateTensor, ...]
    temporaries: Temporaries
    """Peak bytes that the step allocates and frees again for one parameter: of its shape, bytes an element, options."""
    defaults: Options = field(default_factory=dict)
    """Keywords given to `cls` unless the user says otherwise."""
    left_copies: int | Callable[[Options], int] = 0
    """Copies of a parameter that its loop still holds, in variables of its own, while it updates the next one."""
    reads: Reads = "element"
    extra_passes: tuple[ExtraPass, ...] = ()
    model_copies: int = 0
    """As many bytes as all parameters have in fp32 or wider, held at once while it steps beside one's `temporaries`."""
    whole_copies: int = 0
    """The same of vectors that every rank holds whole, however parameters are cut."""
    output_copies: int = 0
    """As many bytes as the model's outputs beside the loss have, held at once while it steps, those outputs themselves included."""
    one_kernel_on_gpu: bool = False
    """True where GPUs' libraries run a parameter's update as one kernel, so that a profile for a GPU counts one call."""
    whole_state: bool = False
    """Whether the state of a piece that a shard cuts is kept whole on every rank."""
    paper: str = ""
    departs: str = ""
    """Where it departs from the paper."""
    not_on_shards: str = ""
    """Why it does not run on the sharded parameters of a plan; empty: it does."""
    real_only: bool = False
    """True where its step refuses complex parameters."""
    reads_numbers: bool = False
    """Whether its step reads numbers off its tensors, as norms."""
    by_tensor: bool = False
    """True where a number of each whole parameter (a norm, a spread) enters its update: parameters joined into one differ."""
    groups: Groups | None = None
    """The parameter groups of a model that the method wants (embeddings not in 8 bits, say); `None`: all alike."""

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the step that there are, fastest first: `fused`, `foreach`, `loop`.

        `fused` is one pass over memory. `foreach` updates all parameters of a group together, which is faster than
        `loop`, one after the other, on a GPU alone, and holds temporaries of the group's size.

        >>> from trainwright.optim import record
        >>> record("adamw").forms, record("adamax").forms, record("mfac").forms
        (('fused', 'foreach', 'loop'), ('foreach', 'loop'), ('loop',))
        """
        own: tuple[str, ...] | None = getattr(self.cls, "forms", None)
        if own is not None:
            return own
        accepted = inspect.signature(self.cls).parameters
        return (*(form for form in ("fused", "foreach") if form in accepted), "loop")

    @property
    def form(self) -> str:
        """The form that the record prices: `loop` unless `with_options` chose another."""
        return next((form for form in ("fused", "foreach") if self.defaults.get(form)), "loop")

    def with_options(self, form: str | None = None, **options: Any) -> OptimizerRecord:
        """Return the record of the method under `options`, in one of `forms`: what it then keeps and allocates.

        >>> from trainwright.optim import record
        >>> record("adan").with_options("fused").step_temporary_bytes((10, 10))
        0
        >>> record("mfac").with_options(num_gradients=2).state_bytes((100,), "fp32") < 1000
        True
        """
        if form is not None and form not in self.forms:
            raise UserError(f"{self.name} has the forms {', '.join(self.forms)}; got {form!r}; choose one of those")
        switches = [name for name in ("foreach", "fused") if form is not None and name in self.forms]
        how: dict[str, Any] = {name: name == form for name in switches}
        return replace(self, defaults={**self.defaults, **options, **how})

    @property
    def calls(self) -> float:
        """The host's work for each parameter beside its kernels, in launches of one: Python, parts of `DTensor`s, checks.

        >>> from trainwright.optim import record
        >>> record("adamw").calls, record("adan").with_options("fused").calls, record("adan").calls
        (8.0, 40.0, 10.0)
        """
        if self.cls.__module__.startswith("torch."):
            return _CALLS_OF_TORCH
        compiled = self.form == "fused" and getattr(self.cls, "_fused_in_torch", False)
        return _CALLS_COMPILED if compiled else float(getattr(self.cls, "calls", _CALLS_OF_OURS))

    @property
    def fused_flops(self) -> float:
        """Arithmetic of the single pass for each element, as so many FLOPs of a product; 0: less than its memory takes."""
        return float(getattr(self.cls, "fused_flops", 0.0))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells the record from others, the options under which it stands included."""
        return self.name, *sorted((name, str(value)) for name, value in self.defaults.items())

    def of(self, key: str) -> OptimizerRecord:
        """Return the record for the parameter `key`: without groups, the same for all."""
        return self

    def on_fakes(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return what holds and allocates as the optimizer does, over parameters without values."""
        from .chosen import on_fakes

        return on_fakes(self, [{"params": list(params)}])

    @property
    def needs_loss(self) -> bool:
        """Whether a step takes the loss with its graph from a closure, and not gradients alone."""
        return bool(self.extra_passes)

    @property
    def differentiates_twice(self) -> bool:
        """True where a step takes Hessian-vector products, for which the graph of the gradient is kept.

        >>> from trainwright.optim import record
        >>> record("sophiah").differentiates_twice, record("sophiag").differentiates_twice
        (True, False)
        """
        return any(extra.kind == "hessian_vector" for extra in self.extra_passes)

    @property
    def updates_alone(self) -> bool:
        """Whether each parameter's update reads nothing of any other, so that its states may be off the device meanwhile.

        >>> from trainwright.optim import record
        >>> record("adamw").updates_alone, record("clippedadam").updates_alone
        (True, False)
        """
        return self.reads != "tensor" and bool(
            getattr(self.cls, "updates_alone", True)
        )  # of torch's own, the others do

    @property
    def needs_values(self) -> bool:
        """Whether a step cannot be followed on shapes alone: it takes the loss, or reads numbers of the whole model."""
        return self.needs_loss or self.reads == "model" or self.reads_numbers

    @property
    def num_passes(self) -> float:
        """Forward and backward passes that a step takes on average, a Hessian-vector product counted as two more.

        >>> from trainwright.optim import record
        >>> record("adamw").num_passes
        1.0
        """
        return 1.0 + sum(_PASSES[extra.kind] * extra.count / extra.every for extra in self.extra_passes)

    def state_bytes(self, shape: Shape, dtype: torch.dtype | str = "fp32", **options: Any) -> int:
        """Return the bytes that the optimizer keeps for a parameter of `shape`, from its first step on (see `once_bytes`).

        >>> from trainwright.optim import record
        >>> record("adamw").state_bytes((10, 10), "bf16")
        404
        """
        kind, merged = as_dtype(dtype), {**self.defaults, **options}
        return sum(state.num_bytes(tuple(shape), kind, merged) for state in self.states if not state.once)

    def once_bytes(self, **options: Any) -> int:
        """Return the bytes that the optimizer keeps once, beside those of each parameter.

        >>> from trainwright.optim import record
        >>> record("mfac").once_bytes(num_gradients=32), record("adamw").once_bytes()
        (8200, 0)
        """
        merged = {**self.defaults, **options}
        return sum(state.num_bytes((), torch.float32, merged) for state in self.states if state.once)

    def step_temporary_bytes(self, shape: Shape, dtype: torch.dtype | str = "fp32", **options: Any) -> int:
        """Return the peak of what a step (`foreach=False`) allocates and frees again for a parameter of `shape`.

        One parameter is updated after the other, so the largest of them counts, not their sum, with what is left of the one
        before (`left_bytes`).

        >>> from trainwright.optim import record
        >>> record("sgd").step_temporary_bytes((10, 10)), record("adamw").step_temporary_bytes((10, 10))
        (0, 800)
        """
        return self.temporaries(tuple(shape), as_dtype(dtype).itemsize, {**self.defaults, **options})

    def left_bytes(self, shape: Shape, dtype: torch.dtype | str = "fp32", **options: Any) -> int:
        """Return what a step in its loop still holds of a parameter of `shape` while it updates the next one.

        >>> from trainwright.optim import record
        >>> record("adamw").left_bytes((10, 10)), record("adamw").with_options("fused").left_bytes((10, 10))
        (400, 0)
        """
        merged = {**self.defaults, **options}
        if merged.get("fused") or merged.get("foreach"):
            return 0
        copies = self.left_copies(merged) if callable(self.left_copies) else self.left_copies
        return copies * math.prod(shape) * as_dtype(dtype).itemsize

    def held_bytes(self, shape: Shape, dtype: torch.dtype | str = "fp32", whole: Shape | None = None) -> int:
        """Return a parameter's part of what a step holds of all parameters at once: vectors of the whole model.

        shape: of the part on a rank. whole: of the parameter, where it is cut.

        >>> from trainwright.optim import record
        >>> record("adamw").held_bytes((10, 10)), record("mfac").held_bytes((10, 10), "bf16")
        (0, 400)
        """
        num_elements = self.model_copies * math.prod(shape)
        num_elements += self.whole_copies * math.prod(shape if whole is None else whole)
        return num_elements * max(4, as_dtype(dtype).itemsize)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype for its short name (`bf16`) or torch's own (`bfloat16`)."""
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype, getattr(torch, dtype, None))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a dtype is needed, one of {', '.join(_DTYPES)}; got {dtype!r}")
    return found


def per_element(name: str, option: str | None = None) -> StateTensor:
    """A state of the parameter's own shape; with `option`, only where that option is set."""
    return StateTensor(name, lambda shape, options: shape if option is None or options.get(option) else None)


def scalar(name: str) -> StateTensor:
    """A number kept as a tensor: fp32 whatever the parameter's dtype, fp64 where that is torch's default."""
    return StateTensor(name, lambda shape, options: (), number=True)


def kept(name: str, option: str | None = None) -> StateTensor:
    """A state of the parameter's own shape, in fp32 for bf16 and fp16; with `option`, only where that option is set."""
    return StateTensor(name, lambda shape, options: shape if option is None or options.get(option) else None, wide=True)


STEP = StateTensor("step", lambda shape, options: (), dtype=torch.float32)
"""The count of steps that every method of ours keeps for each parameter."""


def list_temporaries(num_copies: int | Callable[[Options], int]) -> Temporaries:
    """Temporaries of a method of ours whose update holds `num_copies` of the parameter at once.

    Beside them: of a parameter in bf16 or fp16 the working copies of itself and its gradient, of any other the negated
    gradient where it is maximised. One pass over memory (`fused`) holds none of these.

    >>> list_temporaries(2)((10,), 4, {}), list_temporaries(2)((10,), 2, {}), list_temporaries(2)((10,), 2, {"fused": True})
    (80, 160, 0)
    """

    def temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
        if options.get("fused"):
            return 0
        copies = num_copies(options) if callable(num_copies) else num_copies
        copies += 2 if element_bytes < 4 else int(bool(options.get("maximize")))
        return copies * math.prod(shape) * max(element_bytes, 4)

    return temporaries
