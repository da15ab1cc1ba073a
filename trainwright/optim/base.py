"""`Method`: the one driver of every optimizer of ours; an algorithm says what it keeps and writes one update of lists.

    step        closure, checks, then each group                      `Method.step`
    gather      parameters with gradients → batches of equal step      `Method._batches`
    update      in place on lists of tensors, in the working dtype     `Method._update`, the algorithm
    write back  where the working copy is not the parameter itself     `_Batch.write_back`

The same update runs in three forms: one parameter at a time (`foreach=False`), whole lists (`foreach=True`), or one
parameter at a time compiled into a single pass over memory (`fused=True`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError

Lists = dict[str, list[Tensor]]
Update = Callable[[list[Tensor], list[Tensor], Lists, Any, Any, dict[str, Any]], None]
_NARROW = (torch.bfloat16, torch.float16)


class Method(torch.optim.Optimizer):
    """An optimizer whose step is one in-place update of lists of tensors; abstract.

    An algorithm defines `_state_names` (tensors of the parameter's shape, zero at first, fp32 for bf16 and fp16
    parameters) and the static method `_update(params, grads, states, step, lr, options)`, where `params` are updated
    in place, `grads` may not be written to, `states` holds a list a name, `step` counts from 1 (a float, or a tensor
    without dimensions when compiled or capturable, like `lr`) and `options` is the group's other settings.
    Parameters may be real or complex (taken as pairs of reals), sharded (`DTensor`: each rank updates its shard) and
    of low precision (updated in fp32, then rounded).
    """

    _state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **how: Any) -> None:
        """`how`: maximize, foreach, capturable, fused."""
        super().__init__(params, {**defaults, **_checked_how(how)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, or `None`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                _check_gradient(param, type(self).__name__)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        raise NotImplementedError

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return what is kept for `param` beside its step; every tensor of it in `_state_names` reaches `_update`."""
        dtype = working_dtype(param.dtype)
        return {name: torch.zeros_like(param, dtype=dtype) for name in self._names(group)}

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the states that the group's settings call for."""
        return self._state_names

    def _step_group(self, group: dict[str, Any]) -> None:
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        update = _compiled(type(self)._update) if group["fused"] else type(self)._update
        for batch in self._batches(group):
            step, lr = batch.step, group["lr"]
            if group["fused"]:
                step, lr = _as_scalar(step), _as_scalar(lr)
            batch.run(update, step, lr, options)

    def _batches(self, group: dict[str, Any]) -> Iterator[_Batch]:
        """Yield what one update takes: one parameter, or with `foreach` all of one device, dtype and step."""
        together: dict[Any, _Batch] = defaultdict(_Batch)
        for index, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            step = self._advance(param, group)
            if not group["foreach"]:
                key: Any = index
            else:
                key = (param.device, param.dtype, step if isinstance(step, float) else None)
            together[key].add(param, self.state[param], self._names(group), step, group["maximize"])
            if not group["foreach"]:
                yield together.pop(key)
        yield from together.values()

    def _advance(self, param: Tensor, group: dict[str, Any]) -> float | Tensor:
        """Count the step of one parameter, from 1; its state is made at its first gradient."""
        state = self.state[param]
        if not state:
            device = param.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state.update(self._new_state(param, group))
        state["step"] += 1
        return state["step"] if group["capturable"] else state["step"].item()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same method, in the dtypes it was saved in; `UserError`, with nothing changed, if not."""
        self._check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        for param, saved in self._saved_states(state_dict):
            for name, value in saved.items():
                if isinstance(value, Tensor) and name != "step":
                    # torch casts floating state to the parameter's dtype, which would round an fp32 state of bf16.
                    self.state[param][name] = value.detach().clone().to(device=param.device)

    def _saved_states(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"]:
                    yield param, state_dict["state"][key]

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        if {"state", "param_groups"} - set(state_dict):
            raise UserError(
                f"{type(self).__name__} needs a state dict with `state` and `param_groups`; got {sorted(state_dict)}; "
                "give what state_dict() returned"
            )
        known = {"step", *self._state_keys()}
        for saved in state_dict["state"].values():
            if strange := sorted(set(saved) - known):
                raise UserError(
                    f"{type(self).__name__} needs its own state, {', '.join(sorted(known))}; got {', '.join(strange)}; "
                    "load it into the optimizer that saved it"
                )
            if missing := sorted(set(self._state_names) - set(saved)):
                raise UserError(
                    f"{type(self).__name__} needs its own state; {', '.join(missing)} is missing; "
                    "load a state saved by the same optimizer with the same options"
                )

    def _state_keys(self) -> tuple[str, ...]:
        """Return every key that a parameter's state may have beside `step`."""
        return self._state_names


@dataclass
class _Batch:
    """Tensors that one update takes, and where its results go back."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: Lists = field(default_factory=dict)
    step: float | Tensor = 0.0
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(parameter, its working copy), where they differ."""

    def add(self, param: Tensor, state: dict[str, Tensor], names: tuple[str, ...], step: Any, maximize: bool) -> None:
        assert param.grad is not None
        own, grad, dtype = plain(param), plain(param.grad), working_dtype(param.dtype)
        working = _real(own)
        if working.dtype != dtype and not own.is_complex():
            working = own.to(dtype)
            self.copies.append((own, working))
        grad = _real(grad).to(working.dtype)
        self.params.append(working)
        self.grads.append(-grad if maximize else grad)
        for name in names:
            self.states.setdefault(name, []).append(_real(plain(state[name])))
        self.step = step

    def run(self, update: Update, step: Any, lr: Any, options: dict[str, Any]) -> None:
        update(self.params, self.grads, self.states, step, lr, options)
        for param, working in self.copies:
            param.copy_(working)


def plain(tensor: Tensor) -> Tensor:
    """Return the shard that this rank holds of a `DTensor`, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter is updated and its state kept: fp32 at least.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in _NARROW else dtype


def check_range(owner: str, **values: tuple[Any, str, Callable[[Any], bool]]) -> None:
    """Raise `UserError` for the first value outside its range: name=(value, "the range in words", test).

    >>> check_range("SGD", lr=(-1.0, "at least 0", lambda value: value >= 0))
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: SGD needs lr at least 0; got -1.0; give such a value
    """
    for name, (value, words, test) in values.items():
        if not test(value):
            raise UserError(f"{owner} needs {name} {words}; got {value}; give such a value")


def check_common(
    owner: str, lr: Any, betas: tuple[float, ...] = (), eps: float = 0.0, weight_decay: float = 0.0
) -> None:
    """Check the settings that most methods share."""
    check_range(
        owner,
        lr=(lr, "of at least 0", lambda value: float(value) >= 0.0),
        eps=(eps, "of at least 0", lambda value: value >= 0.0),
        weight_decay=(weight_decay, "of at least 0", lambda value: value >= 0.0),
    )
    for index, beta in enumerate(betas):
        check_range(owner, **{f"betas[{index}]": (beta, "in [0, 1)", lambda value: 0.0 <= value < 1.0)})


_HOW = {"maximize": False, "foreach": False, "capturable": False, "fused": False}
_NOT_OPTIONS = {"params", "lr", "initial_lr", "param_names", *_HOW}


def _checked_how(how: dict[str, Any]) -> dict[str, Any]:
    if unknown := set(how) - set(_HOW):
        raise TypeError(f"unexpected option {', '.join(sorted(unknown))}; there are {', '.join(_HOW)}")
    chosen = {name: bool(how.get(name)) for name in _HOW}
    if chosen["foreach"] and chosen["fused"]:
        raise UserError("one form of the step is needed; got foreach=True and fused=True; choose one")
    return chosen


def _check_gradient(param: Tensor, owner: str) -> None:
    if param.grad is not None and param.grad.layout is not torch.strided:
        raise UserError(
            f"{owner} needs dense gradients; got layout {param.grad.layout}; use sparse=False in the embedding, "
            "or torch.optim.SparseAdam for its weight"
        )


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_scalar(value: Any) -> Tensor:
    """A tensor without dimensions, so that a new value is no new program."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


@functools.cache
def _compiled(update: Update) -> Update:
    return _by_flat_tensors(torch.compile(update, dynamic=True))


def _by_flat_tensors(update: Update) -> Update:
    """Give the compiled update flat views, so that one program serves tensors of every shape."""

    def run(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if not all(
            tensor.is_contiguous() for tensor in (*params, *grads, *(t for own in states.values() for t in own))
        ):
            return update(params, grads, states, step, lr, options)
        flat = [tensor.view(-1) for tensor in params]
        update(
            flat,
            [tensor.view(-1) for tensor in grads],
            {name: [tensor.view(-1) for tensor in own] for name, own in states.items()},
            step,
            lr,
            options,
        )
        return None

    return run
