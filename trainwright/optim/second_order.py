r"""`CurvatureMethod`: an optimizer that keeps an estimate of the Hessian's diagonal, refreshed every few steps.

    optimizer.step(closure)            the closure returns the loss with its graph, without calling backward(); gradient
                                       and, every `update_period` steps, a Hessian-vector product by `autograd.grad`
    optimizer.update_hessian(closure)  the same refresh by itself, beside an ordinary `loss.backward(); step()`:
                                       for gradient clipping, GradScaler and DistributedDataParallel

Both leave `.grad` as it is. Probes depend on `seed` and the count of refreshes alone, so they agree on all ranks.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import UserError
from ..numerics import hvp
from ..numerics.seeds import seeded
from .base import Method, check_dense, check_range, working_dtype
from .record import StateTensor

HESSIAN_STEP = StateTensor("hessian_step", lambda shape, options: (), dtype=torch.float32)
"""The count of refreshes that every method with curvature keeps for each parameter."""
Grads = list[Tensor | None]
_PROBES = ("rademacher", "gaussian")


class CurvatureMethod(Method):
    """A `Method` with curvature in its state; abstract: an algorithm defines `_refresh` and `_update`.

    With `process_group`, gradients of a closure and curvature are averaged over its ranks, each of which has its own
    part of the batch and whole parameters, as under DistributedDataParallel; `DTensor` parameters need none.
    Curvature is that of the function which the closure computes: in train mode BatchNorm couples the samples, and
    dropout draws another mask than the step's own.
    """

    _first_refresh = 0
    """Whole periods that pass before the first refresh is due."""
    _needs_curvature = False
    """Whether a step with zero curvature would be wrong, not merely uninformed."""
    process_group: dist.ProcessGroup | None = None

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, process_group: dist.ProcessGroup | None = None,
        **how: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, defaults, **how)
        self.process_group = process_group

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "process_group": self.process_group}

    def __deepcopy__(self, memo: dict[int, Any]) -> CurvatureMethod:
        """Copy all but the process group, which is the process's and cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return duplicate

    def _check_settings(self, settings: dict[str, Any]) -> None:
        owner = type(self).__name__
        check_range(owner, update_period=(settings["update_period"], "of at least 1", lambda value: value >= 1))
        if "probe" in settings:
            words = "among " + ", ".join(_PROBES)
            check_range(owner, probe=(settings["probe"], words, lambda value: value in _PROBES))

    @property
    def hessian_due(self) -> bool:
        """Whether the coming step should have fresh curvature: call `update_hessian` first, or give `step` a closure."""
        return self._scheduled() or bool(self._lacking(self._with_gradient()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; with a closure by the gradient of the loss that it returns, else by `.grad`.

        Raises `UserError`, with nothing changed, where no curvature was ever given, the loss has no graph, or an op
        has no second derivative.
        """
        if closure is None:
            self._check_curvature()
            return super().step()
        with torch.enable_grad():
            result = closure()
        loss, grads = self._gradients_and_curvature(result)
        with given(self._params(), grads):
            super().step()
        return loss

    def _gradients_and_curvature(self, result: Any) -> tuple[Tensor, Grads]:
        """Return the loss and the averaged gradients, the curvature refreshed where that is due."""
        due, params = self._scheduled(), self._params()
        lacking = self._lacking(params)
        grads = gradients(self, result, params, create_graph=due, keep_graph=bool(lacking))
        if not due and any(grad is not None and param in lacking for param, grad in zip(params, grads, strict=True)):
            due, grads = True, gradients(self, result, params, create_graph=True)
        if due:
            self._refresh_from(grads)
        return result.detach(), averaged(detached(grads), self.process_group)

    def _refresh_from(self, grads: Grads) -> None:
        """Take one Hessian-vector product of the gradients, whose graph is used up, and refresh with it."""
        pairs = [(param, grad) for param, grad in zip(self._params(), grads, strict=True) if grad is not None]
        params, used = [param for param, _ in pairs], [grad for _, grad in pairs]
        kind = str(self.param_groups[0]["probe"])
        draw = seeded(int(self.param_groups[0]["seed"]), self._num_refreshes())
        probes = hvp.rademacher(params, draw) if kind == "rademacher" else hvp.gaussian(params, draw)
        try:
            products = hvp.hessian_vector(used, params, probes)
        except ValueError as error:
            raise UserError(f"{type(self).__name__}: {error}") from error
        means = averaged(products, self.process_group)
        self._absorb(params, [widened(probe) * widened(mean) for probe, mean in zip(probes, means, strict=True)])

    @torch.no_grad()
    def _absorb(self, params: Sequence[Tensor], estimates: Sequence[Tensor]) -> None:
        """Refresh the state of `params` with estimates of the diagonal, complex ones as pairs of reals."""
        groups = {id(param): group for group in self.param_groups for param in group["params"]}
        for param, estimate in zip(params, estimates, strict=True):
            group = groups[id(param)]
            state = self._state_of(param, group)
            state["hessian_step"] += 1
            self._refresh(param, estimate, state, group)

    @abstractmethod
    def _refresh(self, param: Tensor, estimate: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Take `estimate` of the diagonal, real and of the working dtype, into `state`."""

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"hessian_step": torch.zeros((), dtype=torch.float32), **super()._new_state(param, group)}

    def _state_keys(self) -> tuple[str, ...]:
        return ("hessian_step", *super()._state_keys())

    def _check_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        super()._check_state(param, group, saved)
        if "hessian_step" not in saved:
            raise UserError(
                f"{type(self).__name__} needs its own state; hessian_step is missing; load a state saved by the same "
                "optimizer"
            )

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"] if param.requires_grad]

    def _steps_taken(self) -> int:
        return max((int(state["step"]) for state in self.state.values() if state), default=0)

    def _num_refreshes(self) -> int:
        return max((int(state["hessian_step"]) for state in self.state.values() if state), default=0)

    def _scheduled(self) -> bool:
        steps, period = self._steps_taken(), int(self.param_groups[0]["update_period"])
        return steps % period == 0 and steps >= period * self._first_refresh

    def _lacking(self, params: Iterable[Tensor]) -> set[Tensor]:
        """Return those that were in no refresh yet, for a method that cannot step without."""
        if not self._needs_curvature:
            return set()
        return {param for param in params if not self.state.get(param, {}).get("hessian_step")}

    def _check_curvature(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # nothing may be read back
        if not any(float(group["lr"]) for group in self.param_groups):
            return  # nothing will move: so torch.distributed.checkpoint makes the state that it loads into
        late = self._steps_taken() >= int(self.param_groups[0]["update_period"]) * self._first_refresh
        if (self._num_refreshes() == 0 and late) or self._lacking(self._with_gradient()):
            raise UserError(
                f"{type(self).__name__} needs curvature for every parameter that has a gradient; got a step without a "
                "closure and without it; give step() a closure that returns the loss with its graph, or call "
                "update_hessian(closure) whenever hessian_due"
            )

    def _with_gradient(self) -> list[Tensor]:
        return [param for param in self._params() if param.grad is not None]


def gradients(owner: object, loss: Any, params: Sequence[Tensor], **how: bool) -> Grads:
    """Return the loss's gradients; `UserError` where the loss has none, or they are sparse."""
    name = type(owner).__name__
    try:
        grads = hvp.gradients(loss, params, **how)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    for grad in grads:
        if grad is not None:
            check_dense(grad, name)
    return grads


def detached(grads: Grads) -> Grads:
    return [None if grad is None else grad.detach() for grad in grads]


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers of its working dtype."""
    return hvp.real_view(tensor).to(working_dtype(hvp.real_view(tensor).dtype))


def averaged(tensors: Sequence[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Return the means over the ranks of `group` (`None`: as they are), by one message a dtype; `None`s pass."""
    if group is None:
        return list(tensors)
    results = list(tensors)
    present = [index for index, tensor in enumerate(tensors) if tensor is not None]
    for dtype in sorted({tensors[index].dtype for index in present}, key=str):
        own = [index for index in present if tensors[index].dtype == dtype]
        flat = torch.cat([hvp.real_view(tensors[index]).reshape(-1) for index in own])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for index, part in zip(own, hvp.unflatten(flat, [tensors[index] for index in own]), strict=True):
            results[index] = part
    return results


@contextmanager
def given(params: Sequence[Tensor], grads: Grads) -> Iterator[None]:
    """Let `grads` stand as the parameters' gradients; afterwards every `.grad` is the object that it was."""
    before = [param.grad for param in params]
    try:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
