r"""Sophia: momentum over a cheap diagonal curvature, each coordinate's step clipped at the learning rate.

θ ← θ (1 - ηλ);  m ← β1 m + (1 - β1) g;  θ ← θ - η · clip(m / max(γ h, ε), ±1)          `_Sophia._update`
every k steps  h ← β2 h + (1 - β2) ĥ, no bias correction                               `_Sophia._refresh`
SophiaG  ĥ = B ĝ⊙ĝ, ĝ the gradient of the mean loss against labels drawn from the model `SophiaG.update_hessian`
SophiaH  ĥ = u ⊙ Hu, u ~ N(0, I)                                                       `SophiaH.update_hessian`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..artifacts import UserError
from ..numerics.hvp import real_view
from ..numerics.seeds import seeded
from .base import Lists, check_common, check_range, plain
from .record import STEP, ExtraPass, OptimizerRecord, kept, list_temporaries
from .second_order import HESSIAN_STEP, CurvatureMethod, averaged, detached, gradients, widened


class _Sophia(CurvatureMethod):
    _state_names = ("exp_avg", "hessian")

    def _check_settings(self, settings: dict[str, Any]) -> None:
        owner = type(self).__name__
        check_common(owner, settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])
        check_range(
            owner,
            gamma=(settings["gamma"], "above 0", lambda value: value > 0.0),
            eps=(settings["eps"], "above 0", lambda value: value > 0.0),
        )
        super()._check_settings(settings)

    @torch.no_grad()
    def win_rate(self) -> float:
        """Return the share of coordinates whose last step was not clipped: 0.1 to 0.5 is healthy.

        Near 0 the method is sign descent (gamma too small, or SophiaG's num_loss_terms too small); near 1 nothing is
        clipped (gamma too large).
        """
        inside = total = 0
        for group in self.param_groups:
            for state in (self.state[param] for param in group["params"] if self.state.get(param)):
                means, curvature = (real_view(plain(state[name])) for name in self._state_names)
                inside += int((means.abs() < group["gamma"] * curvature).sum())
                total += means.numel()
        return inside / max(total, 1)

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
        means = states["exp_avg"]
        torch._foreach_lerp_(means, grads, 1 - options["betas"][0])
        updates = torch._foreach_mul(states["hessian"], options["gamma"])
        torch._foreach_clamp_min_(updates, options["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        torch._foreach_clamp_min_(updates, -1.0)
        torch._foreach_clamp_max_(updates, 1.0)
        torch._foreach_mul_(updates, -lr)
        torch._foreach_add_(params, updates)

    def _refresh(self, param: Tensor, estimate: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        curvature = real_view(plain(state["hessian"]))
        curvature.lerp_(plain(estimate), 1 - group["betas"][1])


class SophiaH(_Sophia):
    r"""Sophia with Hutchinson's estimate of the Hessian's diagonal: one Hessian-vector product every `update_period`.

    ĥ = u ⊙ ∇²L u, u standard normal (the paper's; `probe="rademacher"` has less variance). A coordinate with negative
    or no curvature takes a step of exactly lr against the sign of its momentum.

    lr: largest step of one coordinate, in the parameter's unit. betas: of momentum and curvature. gamma: how much of
    the curvature divides; larger clips less. update_period: k; the curvature is refreshed before steps 1, k + 1, ….
    `step(closure)`: the closure returns the loss with its graph. Without a closure, call `update_hessian(closure)`
    whenever `hessian_due`. Raises `UserError` for settings out of range and as `step` says. NaN gradients reach the
    momentum. Not for models with ops that have no second derivative (flash attention: use the math backend), nor where
    memory for the graph of the gradient is missing: SophiaG takes none.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    >>> optimizer = SophiaH([weight], lr=0.5, weight_decay=0.0)
    >>> loss = optimizer.step(lambda: (weight**2).sum())
    >>> weight.tolist()
    [2.5, -3.5]

    Source: Liu, Li, Hall, Liang & Ma 2023, Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
    Pre-training. Its code has SophiaG alone; gamma, betas and eps here are the paper's for SophiaH.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 6e-4, betas: tuple[float, float] = (0.96, 0.99),
        gamma: float = 0.01, eps: float = 1e-12, weight_decay: float = 0.2, update_period: int = 10,
        probe: str = "gaussian", seed: int = 0, process_group: dist.ProcessGroup | None = None, **how: Any,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
        own = {"update_period": update_period, "probe": probe, "seed": seed}
        super().__init__(params, {**defaults, **own}, process_group=process_group, **how)

    def update_hessian(self, closure: Callable[[], Tensor]) -> None:
        """Refresh the curvature by one Hessian-vector product of the loss that `closure` returns with its graph."""
        with torch.enable_grad():
            loss = closure()
        self._refresh_from(gradients(self, loss, self._params(), create_graph=True))

    def _refresh(self, param: Tensor, estimate: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        super()._refresh(param, -estimate if group["maximize"] else estimate, state, group)


class SophiaG(_Sophia):
    r"""Sophia with the Gauss–Newton–Bartlett estimate: one more gradient every `update_period`, never negative.

    ĥ = B ĝ⊙ĝ with ĝ the gradient of the *mean* cross-entropy against labels drawn from the model's own softmax, and B
    the number of loss terms in that mean (tokens, not sequences): unbiased for the Gauss–Newton diagonal. With the
    true labels it would be the empirical Fisher matrix, which is another and a worse one.

        logits = model(tokens); loss = cross_entropy(logits, targets); loss.backward(); optimizer.step()
        if optimizer.hessian_due:
            optimizer.update_hessian(lambda: sampled_cross_entropy(model(tokens)), num_loss_terms=targets.numel())

    Or `step(closure)` with a closure that returns (loss, logits): labels are drawn inside, and the forward is shared.
    As in the authors' script, the first refresh is due after `update_period` steps, which until then are steps of
    momentum's sign; and without bias correction the first h is (1 - β2) ĥ.

    lr, betas, weight_decay: the published 125M run's; gamma (the code's rho): 0.05 at 125M and 770M, 0.08 at 355M; the
    code's default is 0.04, as here. `win_rate` tells whether it fits. Raises `UserError` for settings out of range and
    as `step` says. NaN gradients reach the momentum. Not for losses that are not cross-entropy: there the sampled
    gradient is no Gauss–Newton estimate; use SophiaH.

    >>> weight = torch.nn.Parameter(torch.tensor([[1.0, -1.0]]))
    >>> optimizer = SophiaG([weight], lr=0.1, weight_decay=0.0)
    >>> loss = optimizer.step(lambda: torch.nn.functional.cross_entropy(weight, torch.tensor([1])))
    >>> weight.tolist()
    [[0.8999999761581421, -0.8999999761581421]]

    Source: Liu, Li, Hall, Liang & Ma 2023, Sophia; the authors' code. Departs: the code adds 1e-15 to γh, here γh is
    not let below eps.
    """

    _first_refresh = 1

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 6e-4, betas: tuple[float, float] = (0.965, 0.99),
        gamma: float = 0.04, eps: float = 1e-15, weight_decay: float = 0.2, update_period: int = 10,
        seed: int = 0, process_group: dist.ProcessGroup | None = None, **how: Any,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
        own = {"update_period": update_period, "seed": seed}
        super().__init__(params, {**defaults, **own}, process_group=process_group, **how)

    def update_hessian(self, closure: Callable[[], Tensor], num_loss_terms: int) -> None:
        """Refresh the curvature from the mean loss against sampled labels that `closure` returns with its graph.

        `num_loss_terms`: over how many terms that mean is, over all ranks of `process_group` (whose ranks must each
        draw their own labels).
        """
        check_range("SophiaG", num_loss_terms=(num_loss_terms, "of at least 1", lambda value: value >= 1))
        with torch.enable_grad():
            loss = closure()
        self._refresh_by_sample(loss, num_loss_terms)

    def _refresh_by_sample(self, loss: Tensor, num_loss_terms: int) -> None:
        params = self._params()
        found = averaged(detached(gradients(self, loss, params, create_graph=False)), self.process_group)
        used = [(param, widened(grad)) for param, grad in zip(params, found, strict=True) if grad is not None]
        self._absorb([param for param, _ in used], [num_loss_terms * grad**2 for _, grad in used])

    def _gradients_and_curvature(self, result: Any) -> tuple[Tensor, list[Tensor | None]]:
        loss, logits = result if isinstance(result, tuple) else (result, None)
        due, params = self._scheduled(), self._params()
        if due and logits is None:
            raise UserError(
                "SophiaG needs the logits in a step with fresh curvature; the closure returned the loss alone; return "
                "(loss, logits), or call update_hessian() whenever hessian_due and step() without a closure"
            )
        grads = gradients(self, loss, params, create_graph=False, keep_graph=due)
        if due:
            with torch.enable_grad():
                sampled = sampled_cross_entropy(logits, self._label_generator(logits.device))
            self._refresh_by_sample(sampled, self._num_ranks() * logits[..., 0].numel())
        return loss.detach(), averaged(grads, self.process_group)

    def _label_generator(self, device: torch.device) -> torch.Generator:
        """Each rank draws labels for its own samples."""
        rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
        return seeded(int(self.param_groups[0]["seed"]), self._num_refreshes(), rank, device=device)

    def _num_ranks(self) -> int:
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)


def sampled_cross_entropy(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return the mean cross-entropy of `logits` [..., classes] against labels drawn from their own softmax.

    Positions that the loss ignores (padding) must be left out of `logits`. The generator lives on their device; of logits that are
    a `DTensor`, it has to be at the same state on all ranks.

    >>> logits = torch.tensor([[0.0, 50.0], [50.0, 0.0]], requires_grad=True)
    >>> sampled_cross_entropy(logits, torch.Generator().manual_seed(0)).item()
    0.0
    """
    flat = logits.reshape(-1, logits.shape[-1])
    with torch.no_grad():
        shares = flat.float().softmax(-1)
        whole = shares.full_tensor() if isinstance(shares, DTensor) else shares  # torch 2.11 cannot draw from a DTensor
        labels: Tensor = torch.multinomial(whole, 1, generator=generator)[:, 0]
        if isinstance(shares, DTensor):
            mesh = shares.device_mesh
            labels = DTensor.from_local(labels, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.nn.functional.cross_entropy(flat, labels)


_STATES = (kept("exp_avg"), kept("hessian"), STEP, HESSIAN_STEP)
_PAPER = "Liu, Li, Hall, Liang & Ma 2023, Sophia"
RECORDS = (
    OptimizerRecord(
        "sophiag",
        SophiaG,
        "Clipped momentum over the Gauss-Newton diagonal from sampled labels",
        _STATES,
        list_temporaries(1),
        extra_passes=(ExtraPass("gradient", every=10),),
        paper=_PAPER,
        departs="γh is not let below eps, where the code adds it",
    ),
    OptimizerRecord(
        "sophiah",
        SophiaH,
        "Clipped momentum over the Hessian's diagonal by Hutchinson's estimate",
        _STATES,
        list_temporaries(1),
        extra_passes=(ExtraPass("hessian_vector", every=10),),
        paper=_PAPER,
    ),
)
