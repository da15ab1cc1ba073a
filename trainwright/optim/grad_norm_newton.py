r"""Newton steps regularised by the gradient's norm, with a radius γ that the function's own smoothness sets.

λ = ‖g‖_*/γ;  (H + λB) δ = -g                                       `shifted_systems`
accept x + δ iff f - f⁺ ≥ ‖g⁺‖²_*/(8λ), else γ ← γ/2 and again      `GradNormSmoothNewton._search`
then γ ← max(2γ, γ_min)                                             `GradNormSmoothNewton.step`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError
from ..numerics import hvp
from .base import Method, check_common, check_range, plain, working_dtype
from .record import STEP, ExtraPass, OptimizerRecord, Options, Shape, StateTensor
from .second_order import gradients
from .shifted_systems import Dense, FirstOrder, LowRank, MatrixFree, Metric, ShiftedSystem

_SOLVERS = ("dense", "low_rank", "cg", "gradient")
_ONCE = ("gamma", "rejected", "value", "norm")
Closure = Callable[[], Tensor]


class GradNormSmoothNewton(Method):
    r"""Newton's method that adapts its regularisation to the smoothness it meets, for exact or approximate Hessians.

    For deterministic objectives (full batch, dropout off), in float64 for high accuracy: every accepted step satisfies
    f - f⁺ ≥ ‖g⁺‖²_*/(8λ), so f falls monotonically.

    `step(closure, hessian=None)`: the closure returns the loss with its graph, without backward(), and is called once
    for the step and once a trial; `step` returns the loss before. solver: how (H + λB)δ = -g is solved, and what
    `hessian()`, called once a step, returns:
        "dense"     [d, d]; without it the exact Hessian by d products; d² memory, d³/3 a trial
        "low_rank"  U [d, r] with H = UUᵀ: a Fisher or Gauss-Newton factor; O(dr)
        "cg"        a product v ↦ Hv on flat vectors; without it exact Hessian-vector products; a few vectors
        "gradient"  nothing: H = 0, a gradient method with the same test
    `status` says how the last step ended: "accepted"; "stationary", the gradient is zero; "rejected", max_trials radii in
    vain, and the next step goes on with smaller ones; or "stalled", no radius that is left moves the parameters: at
    rounding error, where f - f⁺ is noise. Then a step costs one gradient, until loss or gradient are others.

    d counts all parameters of the group in order (complex ones as pairs). A shift under which H + λB is not positive
    definite is a rejected trial.

    lr: shortens the accepted step (below 1) or is 1. metric: B, `None` (identity), [d] or [d, d] positive definite. gamma,
    min_gamma: the first radius and the least after a success. max_trials: rejections in one step after which the
    parameters are left where they were. cg_rtol, cg_max_steps: of "cg". Raises `UserError` for settings out of
    range, several groups, a missing closure or Hessian, a loss without a graph, and a NaN loss or gradient at the start.
    Not for minibatch noise, which the test mistakes for curvature.

    >>> weight = torch.nn.Parameter(torch.tensor([-2.0, 2.0], dtype=torch.float64))
    >>> optimizer = GradNormSmoothNewton([weight])
    >>> for _ in range(60):
    ...     loss = optimizer.step(lambda: (1 - weight[0]) ** 2 + 100 * (weight[1] - weight[0] ** 2) ** 2)
    >>> bool(loss < 1e-8)
    True

    Source: Semenov, Jaggi & Doikov 2025, Gradient-Normalized Smoothness for Optimization with Approximate Hessians, and
    the authors' code. Departs: a failed factorisation and the last of max_trials are rejections (the code re-applies an
    old step, or accepts untested); λ = ‖g‖_*/γ without the code's 1e-8.
    """

    forms = ("loop",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, solver: str = "dense", metric: Tensor | None = None,
        gamma: float = 1.0, min_gamma: float = 1e-9, max_trials: int = 40, cg_rtol: float = 1e-8,
        cg_max_steps: int | None = None, **how: Any,
    ) -> None:  # fmt: skip
        own = {"lr": lr, "solver": solver, "metric": metric, "gamma": gamma, "min_gamma": min_gamma}
        super().__init__(
            params, {**own, "max_trials": max_trials, "cg_rtol": cg_rtol, "cg_max_steps": cg_max_steps}, **how
        )
        Metric(metric, sum(hvp.real_view(param).numel() for param in self.param_groups[0]["params"]))

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("GradNormSmoothNewton", settings["lr"])
        check_range(
            "GradNormSmoothNewton",
            solver=(settings["solver"], "among " + ", ".join(_SOLVERS), lambda value: value in _SOLVERS),
            gamma=(settings["gamma"], "above 0", lambda value: value > 0.0),
            min_gamma=(settings["min_gamma"], "above 0", lambda value: value > 0.0),
            max_trials=(settings["max_trials"], "of at least 1", lambda value: value >= 1),
            cg_rtol=(settings["cg_rtol"], "in (0, 1)", lambda value: 0.0 < value < 1.0),
            fused=(settings["fused"], "False, for its step is a linear solve", lambda value: not value),
            capturable=(settings["capturable"], "False, for its step reads numbers back", lambda value: not value),
        )
        if self.param_groups:
            raise UserError("GradNormSmoothNewton needs one group, for its system couples all parameters; got several")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, hessian: Callable[[], Any] | None = None
    ) -> Tensor | None:
        """Take one accepted step, by as many trials as that takes; returns the loss before it."""
        group = self.param_groups[0]
        if closure is None and not float(
            group["lr"]
        ):  # so torch.distributed.checkpoint makes the state that it loads into
            self._count(group, 0)
            return None
        if closure is None:
            raise UserError(
                "GradNormSmoothNewton needs a closure, called once and again for each trial; got none; give one that "
                "returns the loss with its graph"
            )
        params, (loss, exact) = group["params"], self._at_start(closure, group)
        metric = Metric(group["metric"], len(exact.gradient))
        value, norm = _signed(loss, group), metric.dual_norm(exact.gradient)
        system = _system(group, exact, metric, hessian) if norm > 0.0 and not self._stalled_at(value, norm) else None
        self._count(group, 1)
        self._state["value"].fill_(value)
        self._state["norm"].fill_(norm)
        if system is not None:
            start = [param.detach().clone() for param in params]
            try:
                self._search(closure, system, metric, start, value, norm)
            except BaseException:
                _move(params, start, None)
                raise
        return loss

    @property
    def status(self) -> str:
        """How the last step ended: `accepted`, `stationary`, `rejected` or `stalled`; `new` before the first.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = GradNormSmoothNewton([weight])
        >>> loss = optimizer.step(lambda: (weight**2).sum())
        >>> optimizer.status
        'stationary'
        """
        if math.isnan(float(self._state.get("norm", math.nan))):
            return "new"
        if float(self._state["norm"]) == 0.0:
            return "stationary"
        if float(self._state["gamma"]) == 0.0:
            return "stalled"
        return "rejected" if self._state["rejected"] >= self.param_groups[0]["max_trials"] else "accepted"

    @property
    def _state(self) -> dict[str, Any]:
        """What is kept once, with the first parameter."""
        return self.state[self.param_groups[0]["params"][0]]

    def _stalled_at(self, value: float, norm: float) -> bool:
        """Whether this is where the last search ended without any radius left; elsewhere, begin with the first again."""
        if not self._state or float(self._state["gamma"]) > 0.0:
            return False
        if (float(self._state["value"]), float(self._state["norm"])) == (value, norm):
            return True
        self._state["gamma"].fill_(self.param_groups[0]["gamma"])
        return False

    def _at_start(self, closure: Closure, group: dict[str, Any]) -> tuple[Tensor, _Exact]:
        """Return the loss, and its gradient and Hessian at the parameters; `UserError` where they are not finite."""
        exact = _Exact(self, closure, group)
        if not math.isfinite(float(_signed(exact.loss, group))) or not bool(torch.isfinite(exact.gradient).all()):
            raise UserError(
                "GradNormSmoothNewton needs a finite loss and gradient to start from; "
                f"got loss {_signed(exact.loss, group)}; change the parameters, nothing was done"
            )
        return exact.loss, exact

    def _search(
        self, closure: Closure, system: ShiftedSystem, metric: Metric, start: list[Tensor], value: float, norm: float
    ) -> None:
        """Halve γ until a trial is accepted; leave the parameters at the accepted point, else at the start.

        γ stays where a search in vain has left it, and is 0 where it has become too small to move anything.
        """
        group, state = self.param_groups[0], self._state
        params, gamma = group["params"], float(state["gamma"])
        for trial in range(int(group["max_trials"])):
            shift = norm / gamma
            change = system.solve(shift)
            if change is not None and not _moves(start, change):
                gamma = 0.0
                break
            if change is not None and self._accepts(closure, metric, start, change, value, shift):
                _move(params, start, float(group["lr"]) * change)
                state["gamma"].fill_(max(2 * gamma, group["min_gamma"]))
                state["rejected"].fill_(trial)
                return
            gamma /= 2
            _move(params, start, None)
            system.restart()
        state["gamma"].fill_(gamma)
        state["rejected"].fill_(int(group["max_trials"]))

    def _accepts(
        self, closure: Closure, metric: Metric, start: list[Tensor], change: Tensor, value: float, shift: float
    ) -> bool:
        group = self.param_groups[0]
        _move(group["params"], start, change)
        with torch.enable_grad():
            loss = closure()
        after = _flat(gradients(self, loss, group["params"], create_graph=False), group)
        return value - _signed(loss, group) >= metric.dual_norm(after) ** 2 / (8 * shift)

    def _count(self, group: dict[str, Any], num_steps: int) -> None:
        """Count in every parameter's state, for torch.distributed.checkpoint wants one of each."""
        for param in group["params"]:
            self._state_of(param, group)["step"] += num_steps

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if param is not group["params"][0]:
            return {}
        first = {"gamma": float(group["gamma"]), "rejected": 0.0, "value": math.nan, "norm": math.nan}
        return {name: torch.tensor(first[name], dtype=torch.float64) for name in _ONCE}

    def _state_keys(self) -> tuple[str, ...]:
        return _ONCE


class _Exact:
    """The loss, gradient and Hessian of the closure at the parameters' present values, maximisation turned around."""

    def __init__(self, owner: Method, closure: Closure, group: dict[str, Any]) -> None:
        self._owner, self._closure, self._group = owner, closure, group
        self._differentiate()

    def _differentiate(self) -> None:
        twice = self._group["solver"] in ("dense", "cg")
        with torch.enable_grad():
            loss = self._closure()
        grads = gradients(self._owner, loss, self._group["params"], create_graph=twice)
        self.loss, self.gradient, self._grads = loss.detach(), _flat(grads, self._group), _filled(grads, self._group)
        self._usable = True

    def discard(self) -> None:
        """Forget the graph, for the parameters were moved in the meantime, if back; the next product makes it anew."""
        self._usable = False

    def product(self, vector: Tensor) -> Tensor:
        if not self._usable:
            self._differentiate()
        params = self._group["params"]
        parts = hvp.hessian_vector(self._grads, params, hvp.unflatten(vector, params), keep_graph=True)
        return _sign(self._group) * hvp.flatten(parts).to(vector.dtype)

    def matrix(self) -> Tensor:
        return _sign(self._group) * hvp.hessian_matrix(self._grads, self._group["params"])


def _system(group: dict[str, Any], exact: _Exact, metric: Metric, hessian: Callable[[], Any] | None) -> ShiftedSystem:
    """Return the system of this step, with the given Hessian or the exact one."""
    kind, sign = group["solver"], _sign(group)
    if kind == "gradient":
        return FirstOrder(exact.gradient, metric)
    if kind == "dense":
        return Dense(exact.matrix() if hessian is None else sign * hessian(), exact.gradient, metric)
    if kind == "cg":
        limits = group["cg_rtol"], group["cg_max_steps"]
        if hessian is None:
            return MatrixFree(exact.product, exact.gradient, metric, *limits, exact.discard)
        given = hessian()
        return MatrixFree(lambda v: sign * given(v), exact.gradient, metric, *limits)
    if hessian is None:
        raise UserError(
            "solver='low_rank' needs a factor of the Hessian; got none; give step(closure, hessian) a function that "
            "returns U [d, r], H = U Uᵀ, or choose solver='cg'"
        )
    return LowRank(hessian(), exact.gradient, metric)


def _filled(grads: list[Tensor | None], group: dict[str, Any]) -> list[Tensor]:
    """Give a parameter that the loss does not use a gradient of zeros."""
    pairs = zip(grads, group["params"], strict=True)
    return [torch.zeros_like(param) if grad is None else grad for grad, param in pairs]


def _flat(grads: list[Tensor | None], group: dict[str, Any]) -> Tensor:
    flat = hvp.flatten(_filled(grads, group))
    flat = flat.to(working_dtype(flat.dtype))
    return -flat if group["maximize"] else flat


def _signed(loss: Tensor, group: dict[str, Any]) -> float:
    return _sign(group) * float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def _sign(group: dict[str, Any]) -> float:
    return -1.0 if group["maximize"] else 1.0


def _move(params: list[Tensor], start: list[Tensor], change: Tensor | None) -> None:
    """Set the parameters to start + change."""
    if change is None:
        for param, old in zip(params, start, strict=True):
            param.copy_(old)
        return
    for param, old, part in zip(params, start, hvp.unflatten(change, params), strict=True):
        param.copy_(old + part)


def _moves(start: list[Tensor], change: Tensor) -> bool:
    """Whether start + change is another point than start, in the parameters' precision."""
    pairs = zip(start, hvp.unflatten(change, start), strict=True)
    return any(not torch.equal(plain(old + part), plain(old)) for old, part in pairs)


def _temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """For the dense solver the Hessian, its shift and its factor."""
    return 3 * math.prod(shape) ** 2 * element_bytes if options.get("solver", "dense") == "dense" else 0


RECORD = OptimizerRecord(
    name="gradnormsmoothnewton",
    cls=GradNormSmoothNewton,
    summary="Newton steps regularised by the gradient's norm, each checked against the decrease it promises",
    states=(
        STEP,
        *(StateTensor(name, lambda shape, options: (), dtype=torch.float64, once=True) for name in _ONCE),
    ),
    temporaries=_temporaries,
    model_copies=1,  # where it started
    whole_copies=10,  # the gradient, the vectors of conjugate gradients, a product on its way
    defaults={"solver": "cg"},
    reads="model",
    extra_passes=(ExtraPass("gradient", count=2), ExtraPass("hessian_vector", count=20)),
    paper="Semenov, Jaggi & Doikov 2025, Gradient-Normalized Smoothness",
    departs="failed factorisations and the last trial are rejections",
)
