"""`Method`: the one driver of every optimizer of ours; an algorithm says what it keeps and writes one update of lists.

    step        closure, checks, then each group                      `Method.step`
    gather      parameters with gradients → batches of equal step      `Method._batches`
    update      in place on lists of tensors, in the working dtype     `Method._update`, the algorithm
    write back  where the working copy is not the parameter itself     `Batch.write_back`

The same update runs in three forms: one parameter at a time (`foreach=False`), whole lists (`foreach=True`; `None` is
that on a GPU alone), or one parameter at a time compiled into a single pass over memory (`fused=True`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .batch import Batch, Lists, plain, working_dtype
from .compiled import Update, compiled

__all__ = [
    "Lists",
    "Method",
    "Tensors",
    "add_quotients",
    "check_common",
    "check_dense",
    "check_range",
    "how_keywords",
    "plain",
    "working_dtype",
]

Tensors = list[Tensor] | tuple[Tensor, ...]


class Method(torch.optim.Optimizer):
    """An optimizer whose step is one in-place update of lists of tensors; abstract.

    An algorithm defines `_state_names` (tensors of the parameter's shape, zero at first, fp32 for bf16 and fp16
    parameters) and the static method `_update(params, grads, states, step, lr, options)`, where `params` are updated
    in place, `grads` may not be written to, `states` holds a list a name, `step` counts from 1 (a float, or a tensor
    without dimensions when compiled or capturable, like `lr`) and `options` is the group's other settings.
    Parameters may be real or complex (taken as pairs of reals), sharded (`DTensor`: each rank updates its shard) and
    of low precision (updated in fp32, then rounded). With `fused` the settings are compiled in, all but lr: a schedule
    that changes another every step (OneCycleLR's momentum) costs a program a step, and after eight is not compiled. A
    capturable step takes one parameter after the other, whatever `foreach` says.
    """

    updates_alone: bool = False
    """Whether each parameter's update reads nothing of any other: a run may then take parameters one at a time."""
    forms: ClassVar[tuple[str, ...]] = ("fused", "foreach", "loop")
    """The forms of the step that the method has, fastest first; one that has no `fused` form refuses the setting."""
    _state_names: ClassVar[tuple[str, ...]] = ()
    _fused_in_torch: ClassVar[bool] = True
    """True where the fused form is compiled by torch, which takes numbers that change as tensors."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **how: Any) -> None:
        """`how`: maximize, foreach, capturable (the step is counted on the parameter's device), fused."""
        super().__init__(params, {**defaults, **_checked_how(how)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, each as checked as the constructor's."""
        settings = {**self.defaults, **param_group} if isinstance(param_group, dict) else self.defaults
        self._check_settings(settings)
        super().add_param_group(param_group)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        """Raise `UserError` for a group's settings out of range."""

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
                check_dense(param.grad, type(self).__name__)
        self._prepare()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _prepare(self) -> None:
        """Read all gradients together, where a method needs that before the first update."""

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

    def _names_of(self, param: Tensor, group: dict[str, Any]) -> Iterable[str]:
        """Return the states of one parameter that reach `_update`, and without which it cannot go on."""
        return self._names(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        options = self._options(group)
        update = self._fused_update() if group["fused"] else type(self)._update
        how = {"maximize": group["maximize"]} if group["fused"] else {}
        for batch in self._batches(group):
            step, lr = _scalars(batch.step, group)
            found = self._step_numbers(step, lr, options)
            if group["fused"] and self._fused_in_torch:
                step, lr, found = _as_tensor(step), _as_tensor(lr), {key: _as_tensor(found[key]) for key in found}
            update(batch.params, batch.grads, batch.states, step, lr, {**options, **found, **how})
            batch.write_back()
            del batch  # its working copies go before the next ones come

    @staticmethod
    def _step_numbers(step: Any, lr: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers that depend on step and lr, for `_update` to find in its options.

        They are computed once a step, where `_update` compiled would compute them for each element.
        """
        return {}

    def _fused_update(self) -> Update:
        """Return `_update` as a single pass over memory, for what `compiled.taking_any` takes."""
        return compiled(type(self)._update)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return what `_update` gets beside the learning rate: the group's settings, and what a method adds."""
        return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}

    def _batches(self, group: dict[str, Any]) -> Iterator[Batch]:
        """Yield what one update takes: one parameter, or with `foreach` all of one device, dtype and step."""
        together: dict[Any, Batch] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            step = self._advance(param, group)
            names = tuple(self._names_of(param, group))
            if _in_lists(param, group):
                key = (param.device, param.dtype, step, names)
                together.setdefault(key, Batch(step)).add(param, self.state[param], names, group)
            else:
                alone = Batch(step, as_they_are=group["fused"])
                alone.add(param, self.state[param], names, group)
                yield alone
                del alone
        for key in list(together):
            yield together.pop(key)

    def _advance(self, param: Tensor, group: dict[str, Any]) -> float | Tensor:
        """Count the step of one parameter, from 1; its state is made at its first gradient."""
        state = self._state_of(param, group)
        state["step"] += 1
        # In fp32, 1 - beta2**step would keep four digits.
        return state["step"].double() if group["capturable"] else state["step"].item()

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            new = self._new_state(param, group)
            device = param.device if group["capturable"] else "cpu"
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device=device)
            state.update(new)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same method, in the dtypes it was saved in; `UserError`, with nothing changed, if not."""
        given: dict[str, Any] = {}

        def check(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
            self._check_state_dict(found)
            given.update(found)
            # torch would cast every tensor to its parameter's dtype, which rounds fp32 and widens bytes.
            return {**found, "state": {}}

        last = self.register_load_state_dict_pre_hook(check)  # sees what earlier hooks made of it
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for group, param, saved in self._saved_states(given):
            self.state[param] = {name: _restored(name, value, param, group) for name, value in saved.items()}

    def _saved_states(self, state_dict: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
        """Yield the group (as saved, with its defaults), the parameter and the state of each that has one."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for param, key in zip(group["params"], saved["params"]):
                if key in state_dict["state"]:
                    yield {**self.defaults, **saved}, param, state_dict["state"][key]

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        owner = type(self).__name__
        if {"state", "param_groups"} - set(state_dict):
            raise UserError(
                f"{owner} needs a state dict with `state` and `param_groups`; got {sorted(state_dict)}; "
                "give what state_dict() returned"
            )
        for group, param, state in self._saved_states(state_dict):
            self._check_state(param, group, state)
        for saved in state_dict["param_groups"]:
            if unset := sorted(set(self.defaults) - set(_HOW) - set(saved)):
                raise UserError(
                    f"{owner} needs groups with its own settings; {', '.join(unset)} is missing; "
                    "load the state into the optimizer that saved it"
                )

    def _check_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        owner, known = type(self).__name__, {"step", *self._state_keys()}
        if strange := sorted(set(saved) - known):
            raise UserError(
                f"{owner} needs its own state, {', '.join(sorted(known))}; got {', '.join(strange)}; "
                "load it into the optimizer that saved it"
            )
        if missing := sorted({"step", *self._names_of(param, group)} - set(saved)):
            raise UserError(
                f"{owner} needs its own state; {', '.join(missing)} is missing; "
                "load a state saved by the same optimizer with the same options"
            )

    def _state_keys(self) -> tuple[str, ...]:
        """Return every key that a parameter's state may have beside `step`."""
        return self._state_names


def add_quotients(params: Tensors, numerators: Tensors, denominators: Tensors, scale: float | Tensor) -> None:
    """params ← params + scale · numerators / denominators, in one pass where `scale` is a number.

    >>> params = [torch.ones(2)]
    >>> add_quotients(params, [torch.tensor([1.0, 2.0])], [torch.full((2,), 4.0)], -2.0)
    >>> params
    [tensor([0.5000, 0.0000])]
    """
    if isinstance(scale, Tensor):
        updates = torch._foreach_div(numerators, denominators)
        torch._foreach_mul_(updates, scale)
        torch._foreach_add_(params, updates)
    else:
        torch._foreach_addcdiv_(params, numerators, denominators, scale)


def check_common(
    owner: str, lr: Any, betas: tuple[float, ...] = (), eps: float = 0.0, weight_decay: float = 0.0
) -> None:
    """Check the settings that most methods share."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise UserError(f"{owner} needs lr of one element; got shape {tuple(lr.shape)}; give groups rates of their own")
    check_range(
        owner,
        lr=(lr, "of at least 0", lambda value: float(value) >= 0.0),
        eps=(eps, "of at least 0", lambda value: value >= 0.0),
        weight_decay=(weight_decay, "of at least 0", lambda value: value >= 0.0),
    )
    for index, beta in enumerate(betas):
        check_range(owner, **{f"betas[{index}]": (beta, "in [0, 1)", lambda value: 0.0 <= value < 1.0)})


_HOW: dict[str, bool | None] = {"maximize": False, "foreach": None, "capturable": False, "fused": False}
_NOT_OPTIONS = {"params", "lr", "initial_lr", "param_names", *_HOW}


def how_keywords() -> tuple[str, ...]:
    """Return the keywords that every method takes beside its own settings."""
    return tuple(_HOW)


def _in_lists(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether the parameter is updated together with others: not while steps are counted where no one reads them."""
    if group["fused"] or group["capturable"]:
        return False
    return bool(param.is_cuda if group["foreach"] is None else group["foreach"])


def _checked_how(how: dict[str, Any]) -> dict[str, Any]:
    if unknown := set(how) - set(_HOW):
        raise TypeError(f"unexpected option {', '.join(sorted(unknown))}; there are {', '.join(_HOW)}")
    chosen = {name: default if how.get(name) is None else bool(how[name]) for name, default in _HOW.items()}
    if chosen["foreach"] and chosen["fused"]:
        raise UserError("one form of the step is needed; got foreach=True and fused=True; choose one")
    return chosen


def check_dense(grad: Tensor | None, owner: str) -> None:
    """Raise `UserError` for a sparse gradient."""
    if grad is not None and grad.layout is not torch.strided:
        raise UserError(
            f"{owner} needs dense gradients; got layout {grad.layout}; use sparse=False in the embedding, "
            "or torch.optim.SparseAdam for its weight"
        )


def _restored(name: str, value: Any, param: Tensor, group: dict[str, Any]) -> Any:
    """Return a saved value as it was, on the device where it is kept; a step saved as a number, as a tensor."""
    if name == "step" and isinstance(value, (int, float)):
        value = torch.tensor(float(value), dtype=torch.float32)
    if not isinstance(value, Tensor):
        return value
    on_host = name == "step" and not group["capturable"]
    return value.detach().clone().to(device="cpu" if on_host else param.device)


def _scalars(step: float | Tensor, group: dict[str, Any]) -> tuple[Any, Any]:
    """Return step and learning rate as tensors where they may not be read, else as numbers."""
    lr = group["lr"]
    return step, lr.item() if isinstance(lr, Tensor) and not group["capturable"] else lr


def _as_tensor(value: Any) -> Tensor:
    """Of a compiled update, a new value must be no new program."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
