"""Functions with a backward of the user's own (`torch.autograd.Function`), each made an op that a graph can hold.

An export follows a Function's forward and would, silently, lose its backward. So while a model is captured, `apply` calls an
op in its place, `autograd_functions::NAME`, made for the class and for whatever it is given beside tensors. The op runs
`apply` itself, with the user's forward, backward and `ctx`: what it saves, and what either costs, is seen as anything
else's. Its loops are found by trying (discover.py). Where no argument needs a gradient, the forward is followed as it is.

A Function is tried once on fakes before it becomes an op: it must be given every tensor that it uses, leave its arguments
as they are, and keep tensors by `ctx.save_for_backward`, where a plan can drop or offload them.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library

from ..artifacts import UserError
from ..torch_internals import private
from ..torch_internals.trees import tensors_in
from .export_errors import NO_MEMORY, ValuesNeeded

NAMESPACE = "autograd_functions"
_APPLY: Any = vars(torch.autograd.Function)["apply"]
_LIBRARY = library.Library(NAMESPACE, "FRAGMENT")
_TENSOR = object()
"""Stands for a tensor among what a Function is given, or gives."""


@contextmanager
def lifted_backwards() -> Iterator[None]:
    """Let `apply` of every `torch.autograd.Function` but torch's and ours call an op, with the same result and backward.

    Raises `UserError` for one whose tensors a graph could not follow.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(("torch.", "trainwright.")):  # ours stand inside ops that a graph holds already
            if cls.__name__ == "CheckpointFunction":
                raise UserError(_REENTRANT)
            return _APPLY.__get__(None, cls)(*args, **kwargs)
        leaves, spec = private.flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return _APPLY.__get__(None, cls)(*args, **kwargs)
        given = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        lifted = _lifted(_Function(cls, given, spec), tensors)
        with private.without_switches():
            return lifted.rebuilt(lifted.op(*tensors))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]


def under_autocast(target: Any, dtype: torch.dtype) -> Any | None:
    """Return the op that runs the Function of `target` under autocast; `None` where `target` is no Function's op.

    What autocast does inside a forward of the user's is not seen from outside: the op's arguments are not converted.
    """
    lifted = _BY_OP.get(target)
    if lifted is None or lifted.function.autocast is not None:
        return None if lifted is None else target
    one = lifted.function
    return _lifted(_Function(one.cls, one.given, one.spec, dtype), lifted.like).op


_REENTRANT = (
    "a forward that export can follow is needed; it calls torch.utils.checkpoint with use_reentrant=True; "
    "say use_reentrant=False, or leave checkpointing to the plan"
)


@dataclass(frozen=True, eq=False)
class _Function:
    """A class and all it is given but the tensors' values."""

    cls: type
    given: tuple[Any, ...]
    """The leaves of `apply`'s arguments, `_TENSOR` in a tensor's place."""
    spec: Any
    autocast: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The class's name, fit for an op."""
        return re.sub(r"\W+", "_", self.cls.__qualname__.rpartition("<locals>.")[2])

    def is_like(self, other: _Function) -> bool:
        """Whether both do the same with the same tensors."""
        if self.cls is not other.cls or self.autocast != other.autocast or self.spec != other.spec:
            return False
        return len(self.given) == len(other.given) and all(map(_is_same, self.given, other.given))

    def overload(self) -> str:
        """What tells this one from others of its name: a digest of its text and what it is given, in any process alike."""
        try:
            text = inspect.getsource(self.cls)
        except (OSError, TypeError):
            text = ""
        given = [re.sub(r" at 0x[0-9a-f]+", "", repr(leaf)) for leaf in self.given if leaf is not _TENSOR]
        places = [place for place, leaf in enumerate(self.given) if leaf is _TENSOR]
        parts = repr((text, given, places, str(self.spec), str(self.autocast)))
        return f"v{hashlib.blake2b(parts.encode(), digest_size=4).hexdigest()}"

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Run it; return the results' leaves, each with memory of its own, and their tree."""
        queue = iter(tensors)
        args = private.unflatten([next(queue) if leaf is _TENSOR else leaf for leaf in self.given], self.spec)
        with self._autocast(tensors[0].device.type):
            leaves, spec = private.flatten(_APPLY.__get__(None, self.cls)(*args))
        known = {private.storage_of(tensor) for tensor in tensors}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # an op's result shares no memory, a Function's often does: `x.view_as(x)` that only turns gradients round
                leaves[place] = leaf.clone() if private.storage_of(leaf) in known else leaf
                known.add(private.storage_of(leaves[place]))
        return leaves, spec

    def _autocast(self, device: str) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device, dtype=self.autocast, cache_enabled=False)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, eq=False)
class _Lifted:
    """A Function's op."""

    function: _Function
    op: Any
    made: tuple[Any, ...]
    """The leaves of its result, `_TENSOR` in a tensor's place."""
    spec: Any
    like: tuple[Tensor, ...]
    """Fakes of the arguments that it was first given."""

    def rebuilt(self, results: Any) -> Any:
        """Return what `apply` would have: the op's tensors among whatever else it gives."""
        queue = iter([results] if isinstance(results, Tensor) else results)
        return private.unflatten([next(queue) if leaf is _TENSOR else leaf for leaf in self.made], self.spec)


_BY_OP: dict[Any, _Lifted] = {}
"""Every op made in this process: one that a program holds stays."""


def _lifted(function: _Function, tensors: Sequence[Tensor]) -> _Lifted:
    """Return the op of `function`, made and tried at its first call."""
    for known in _BY_OP.values():
        if known.function.is_like(function):
            return known
    fakes, leaves, spec, is_random = _tried(function, tensors)
    made = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    op = _defined(function, len(tensors), made.count(_TENSOR), is_random)
    _BY_OP[op] = _Lifted(function, op, made, spec, tuple(fakes))
    return _BY_OP[op]


def _defined(function: _Function, num_inputs: int, num_outputs: int, is_random: bool) -> Any:
    """Define an op that runs the function, on every device and on fakes."""
    taken = {str(op) for op in _BY_OP}
    overloads = (
        function.overload() + suffix for suffix in itertools.chain([""], map("_{}".format, itertools.count(2)))
    )
    overload = next(name for name in overloads if f"{NAMESPACE}.{function.name}.{name}" not in taken)
    inputs = ", ".join(f"Tensor x{place}" for place in range(num_inputs))
    outputs = ", ".join(["Tensor"] * num_outputs)
    outputs = outputs if num_outputs == 1 else f"({outputs})"
    tags = (torch.Tag.nondeterministic_seeded,) if is_random else ()
    full = f"{function.name}.{overload}"
    _LIBRARY.define(f"{full}({inputs}) -> {outputs}", tags=tags)

    def run(*tensors: Tensor) -> Any:
        results = [leaf for leaf in function(tensors)[0] if isinstance(leaf, Tensor)]
        return results[0] if num_outputs == 1 else tuple(results)

    _LIBRARY.impl(full, run, "Autograd")
    # where autograd is out of the way: inference
    _LIBRARY.impl(full, torch.no_grad()(run), "CompositeExplicitAutograd")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), function.name), overload)


def _tried(function: _Function, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any], Any, bool]:
    """Run the function forwards and backwards on fakes of its own; `UserError` where it is not one of its arguments alone."""
    with private.without_modes(), private.mode_of(tensors), torch.enable_grad():
        fakes = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            for tensor in tensors
        ]
        watch = _Watch(function.cls, fakes)
        for fake, tensor in zip(fakes, tensors):
            fake.requires_grad_(tensor.requires_grad)
        with watch, _followed(function.cls):
            leaves, spec = function(fakes)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not results:
            raise UserError(f"a Function that gives a tensor is needed; {function.cls.__qualname__} gives none")
        _check_ctx(function.cls, results)
        asked = [fake for fake in fakes if fake.requires_grad]
        differentiable = [result for result in results if result.requires_grad]
        if differentiable:
            with watch, _followed(function.cls):
                given = [torch.empty_like(result) for result in differentiable]
                torch.autograd.grad(differentiable, asked, given, allow_unused=True)
        return fakes, leaves, spec, watch.is_random


@contextmanager
def _followed(cls: type) -> Iterator[None]:
    """Say what to do of a Function that asks for its tensors' memory: a kernel of its own, or numpy."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not any(text in str(error) for text in NO_MEMORY):
            raise
        raise ValuesNeeded(
            f"a Function of torch's ops is needed; {cls.__qualname__} asks for the memory of its tensors, which have "
            "shapes alone while a model is captured; make the part that does a custom_op of torch with register_fake, and call that"
        ) from None


def _check_ctx(cls: type, results: Sequence[Tensor]) -> None:
    contexts = {id(node): node for node in map(_own_node, results) if node is not None}
    for ctx in contexts.values():
        for name, value in vars(ctx).items():
            if tensors_in(value):
                raise UserError(
                    f"a Function that saves tensors with ctx.save_for_backward is needed; {cls.__qualname__} keeps "
                    f"some as ctx.{name}, where no plan can drop or offload them; save them, or leave the Function's work "
                    "to torch's own ops"
                )


def _own_node(result: Tensor) -> Any:
    """The Function's own node of the backward graph, which is its `ctx`."""
    node: Any = result.grad_fn
    while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        node = node.next_functions[0][0]  # the clone of a result that shared memory
    return node


class _Watch(private.TorchDispatchMode):
    """Refuses a tensor from outside, and a write to an argument; notes whether random numbers are drawn."""

    def __init__(self, cls: type, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._cls = cls
        self._inputs = {private.storage_of(tensor) for tensor in inputs}
        self._known = set(self._inputs)
        self._held: list[Tensor] = []
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # `torch.tensor(2.0)` begins as a real tensor
            for tensor in tensors_in((args, kwargs)):
                self._look_at(tensor)
        for name in private.mutated_arguments(func):
            value = private.bound(func, args, kwargs)[name]
            if any(private.storage_of(tensor) in self._inputs for tensor in tensors_in(value)):
                raise UserError(
                    f"a Function that leaves its arguments as they are is needed; {self._cls.__qualname__} writes one "
                    "in place; write a copy of it"
                )
        self.is_random = self.is_random or private.is_random(func)
        results = func(*args, **kwargs)
        for tensor in tensors_in(results):
            self._known.add(private.storage_of(tensor))
            self._held.append(tensor)  # or its storage's place may be another's
        return results

    def _look_at(self, tensor: Tensor) -> None:
        if private.storage_of(tensor) not in self._known:
            raise UserError(
                f"a Function that is given every tensor it uses is needed; {self._cls.__qualname__} uses one of shape "
                f"{list(tensor.shape)} that is not among its arguments; pass it to apply, or, where the Function "
                "checkpoints a part of the model, leave that to the plan"
            )
