"""FedSpeed: long local work without drift, by a proximal term, a dual that corrects its bias, and a perturbed gradient.

With h_i the client's dual (h_i = -λ ĝ_i in the paper's letters), a piece of work from x^t is K steps of

    x ← x - η ( g̃ + (h_i + x - x^t) / λ ),     g̃ = (1 - α) ∇F_i(x) + α ∇F_i(x + ρ ∇F_i(x) / ‖∇F_i(x)‖),

then h_i ← h_i + x_K - x^t at the client, and at the server, over the clients S that answered and all N,

    x^{t+1} = mean_S x_K + (1/N) Σ_i h_i .

The paper averages x_K + h_i over S alone, which diverges as soon as not all clients answer; the server keeps the one sum of all
duals in its place, as the authors' simulator does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..artifacts import UserError, check_range
from .arrays import Arrays, Sum
from .clock import State
from .local import LocalMethod, is_planned
from .record import StrategyRecord
from .rules import FedAvg

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DUAL, _PENDING, _VERSION = "dual.", "pending.", "pending_version"


@dataclass(frozen=True)
class FedSpeedAverage(FedAvg):
    """The server's half of FedSpeed: x ← mean of what the asked clients reached + the mean of all clients' duals.

    fraction, seed: as for `FedAvg`. All clients count alike. Its clients train with `method=FedSpeed(…)`. Not with batch norm.

    Source: Sun et al. 2023, FedSpeed, ICLR (arXiv:2302.10429).
    """

    weighted: bool = field(default=False, kw_only=True)
    takes_server_lr: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            "FedSpeedAverage", weighted=(self.weighted, "False: all clients count alike", lambda value: not value)
        )

    def combine(
        self, arrays: Arrays, total: Sum, memory: dict[str, Sum], share: float, num_clients: int
    ) -> dict[str, np.ndarray]:
        duals = memory.setdefault("duals", Sum(arrays))
        duals.add(total.values, num_clients)  # `total` is Σ_S Δ_i / N, and each h_i grew by Δ_i
        step = Sum(arrays)
        step.add(total.values, 1.0 / share)
        step.add(duals.values, 1.0 / num_clients)
        return step.added_to(arrays)


class FedSpeed(LocalMethod):
    """The client's half of FedSpeed: the gradient of a local step, and the dual that is kept from one piece of work to the next.

    penalty: λ; the smaller, the more local work is held back. radius: ρ of the perturbation, 0 for the plain gradient
    (half the cost, and no bias of its own). mixing: α. max_grad_norm: to which g̃ is scaled down; the proximal part is not.
    The optimizer of the paper is SGD.

    The dual counts a change only once the server says that it took it, so an answer that was lost or refused
    leaves both in step. A client that has lost its dual is told so by a `UserError`: it has to come back under a new name.
    Raises `UserError` for batch norm, whose statistics a perturbed pass would spoil (use group norm), and for planned modules.
    """

    def __init__(
        self, penalty: float = 10.0, radius: float = 0.1, mixing: float = 1.0, max_grad_norm: float | None = 10.0
    ) -> None:
        check_range(
            "FedSpeed",
            penalty=(penalty, "above 0", lambda value: value > 0),
            radius=(radius, "of at least 0", lambda value: value >= 0),
            mixing=(mixing, "in [0, 1]", lambda value: 0 <= value <= 1),
            max_grad_norm=(max_grad_norm, "above 0, or None", lambda value: value is None or value > 0),
        )
        self.penalty, self.radius, self.mixing, self.max_grad_norm = penalty, radius, mixing, max_grad_norm
        self._names: list[str] = []
        self._start: list[Tensor] = []
        self._dual: list[Tensor] = []

    def check(self, model: nn.Module) -> None:
        found = [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)]
        if found:
            raise UserError(f"a model without batch norm is needed for FedSpeed; {found[0]} is one; use nn.GroupNorm")
        if is_planned(model):
            raise UserError(
                "a model in one process is needed for FedSpeed, whose dual is kept whole; got a planned module; train its client "
                "with Plain()"
            )

    def begin(self, params: Mapping[str, nn.Parameter], state: State, config: Mapping[str, Any]) -> State:
        dual = _settled_dual(state, int(config.get("accepted", -1)), params)
        self._names = list(params)
        self._start = [param.detach().clone() for param in params.values()]
        self._dual = [torch.from_numpy(dual[name]).to(param) for name, param in params.items()]
        kept = {name: value for name, value in state.items() if not name.startswith((_DUAL, "pending"))}
        return kept | {_DUAL + name: value for name, value in dual.items()}

    def gradients(self, loss: Callable[[], Tensor], params: Sequence[nn.Parameter]) -> Tensor:
        value = loss()
        value.backward()
        grads = self._perturbed(loss, params) if self.radius and self.mixing else [param.grad for param in params]
        _clip(grads, self.max_grad_norm)
        for param, grad, start, dual in zip(params, grads, self._start, self._dual):
            own = torch.zeros_like(param) if grad is None else grad
            param.grad = own + (dual + param.detach() - start) / self.penalty
        return value.detach()

    def _perturbed(self, loss: Callable[[], Tensor], params: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return (1 - α) g1 + α g2, with g2 taken a step ρ up the gradient, from which the values come back as they were."""
        first, kept = [param.grad for param in params], [param.detach().clone() for param in params]
        scale = self.radius / (_norm(first) + 1e-7)
        with torch.no_grad():
            for param, grad in zip(params, first):
                if grad is not None:
                    param.add_(grad, alpha=scale)
                param.grad = None
        loss().backward()
        with torch.no_grad():
            for param, value in zip(params, kept):
                param.copy_(value)
        second = [param.grad for param in params]
        return [
            one if two is None else two if one is None else torch.lerp(one, two, self.mixing)
            for one, two in zip(first, second)
        ]

    def end(self, delta: Arrays, state: State, config: Mapping[str, Any]) -> State:
        pending = {_PENDING + name: np.array(delta[name]) for name in self._names}
        return state | pending | {_VERSION: int(config.get("version", 0))}


def _settled_dual(state: State, accepted: int, params: Mapping[str, nn.Parameter]) -> dict[str, np.ndarray]:
    """Return h_i, the last change added where the server took it."""
    known = {name: state[_DUAL + name] for name in params if _DUAL + name in state}
    if accepted >= 0 and len(known) < len(params):
        raise UserError(
            f"this client's dual is needed: the server counts its change of version {accepted}, and its state has none; "
            "keep the state between pieces of work, or join under a new name"
        )
    dual = {
        name: np.array(known[name]) if known else np.zeros(tuple(param.shape), _dtype_of(param))
        for name, param in params.items()
    }
    if state.get(_VERSION, -1) == accepted >= 0:
        dual = {name: value + state[_PENDING + name] for name, value in dual.items()}
    return dual


def _dtype_of(param: Tensor) -> Any:
    return np.float64 if param.dtype == torch.float64 else np.float32


def _norm(grads: Sequence[Tensor | None]) -> float:
    return float(torch.stack([grad.norm() for grad in grads if grad is not None]).norm())


def _clip(grads: Sequence[Tensor | None], max_norm: float | None) -> None:
    if max_norm is not None and (size := _norm(grads)) > max_norm:
        for grad in grads:
            if grad is not None:
                grad.mul_(max_norm / size)


RECORDS = (
    StrategyRecord(
        name="fedspeed", cls=FedSpeedAverage, summary="duals and a proximal term against drift, perturbed gradients",
        server_state="1 P + 16 B/param", client_state="2 P", up="P", down="P", gradients="2",
        assumes="clients that keep their state; no batch norm; clients of much the same speed",
        paper="Sun et al. 2023, arXiv:2302.10429",
        departs="the server adds the mean of all duals, not of those who answered; a dual counts what the server took",
    ),
)  # fmt: skip
