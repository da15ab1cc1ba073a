r"""The convex programme of a two-layer ReLU network with scalar output, by ADMM.

minimise  loss(Σ_i D_i X (v_i - w_i), y) + β Σ_i (‖v_i‖ + ‖w_i‖)   so that (2 D_i - I) X v_i ≥ 0, and of w_i
u ← argmin loss(F u) + (ρ/2)(‖u - v + λ‖² + ‖G u - s + ν‖²)        `_Admm.weights` (one solve; else `OutputNewton`, `BlockDescent`)
v_i ← (1 - (β/ρ)/‖u_i + λ_i‖)₊ (u_i + λ_i)                         `_Admm.step`
s ← (G u + ν)₊;   λ ← λ + γ(u - v);   ν ← ν + γ(G u - s)           `_Admm.step`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Callback, Counts, Limits, LoopResult, Measured, drive
from ..outcome import Result, Status
from ..seeds import as_generator
from . import losses
from .blocks import BlockDescent
from .gates import Gates, InverseSystem
from .inputs import as_tensor
from .network import TwoLayerReLU, recover
from .newton import OutputNewton

LOSSES = ("squared", "logistic")
INNER = ("newton", "blocks")


@dataclass(frozen=True)
class AdmmOptions:
    """ρ > 0 (scales with the loss, which is a sum), γ in (0, 1], and how `logistic` takes ADMM's first step.

    inner: `newton` is exact, O(n³) for each of its few steps; `blocks` is the paper's randomised block descent, inexact, for
    more examples than such a system allows.
    """

    rho: float = 0.1
    step: float = 1.0
    inner: str = "newton"
    newton_tolerance: float = 1e-10
    """Of the root mean square of loss'(F u) - g."""
    block_tolerance: float = 1e-8
    """Mean fall of the last ten block steps, relative to the loss at zero."""

    def __post_init__(self) -> None:
        if not (self.rho > 0 and 0 < self.step <= 1 and self.block_tolerance > 0 and self.newton_tolerance > 0):
            raise UserError(
                "rho > 0, step in (0, 1] and tolerances > 0 are needed; "
                f"got {self.rho}, {self.step}, {self.newton_tolerance}, {self.block_tolerance}; give such values"
            )
        if self.inner not in INNER:
            raise UserError(f"inner of {', '.join(INNER)} is needed; got {self.inner!r}; take one of them")


@dataclass(frozen=True)
class ReLUProgrammeResult(Result):
    """`x` is the network, `fun` its own (non-convex) objective; `nfev` counts products with F or G and their transposes."""

    convex_fun: float
    """The programme's objective at v; below its optimum as long as v does not keep to its patterns."""
    v: Tensor
    """(2, P, d)."""
    primal_residual: float
    """√(‖u - v‖² + ‖G u - s‖²)."""
    dual_residual: float
    """‖F' loss'(F u) + ρ (λ + G'ν)‖ / ρ."""
    num_inner: int
    """Newton or block steps inside ADMM's first one, 0 for the squared loss."""


def solve_relu_programme(
    X: Any, y: Any, patterns: Any, beta: float, *, loss: str = "squared", options: AdmmOptions | None = None,
    max_iterations: int = 2000, rtol: float = 1e-5, atol: float = 0.0, max_evaluations: int | None = None,
    max_seconds: float | None = None, check_every: int = 10,
    seed: int | torch.Generator = 0, callback: Callback | None = None, keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ReLUProgrammeResult:  # fmt: skip
    r"""Return the network that solves min loss(Σ_j relu(X u_j) a_j, y) + (β/2) Σ_j (‖u_j‖² + a_j²) over given patterns.

    Tensors or arrays: X (n, d), with a column of ones for biases; y (n), ±1 for `logistic`; patterns (n, P) boolean
    (`sample_patterns`, `enumerate_patterns`). The loss is a sum: `squared` ½‖·‖², or `logistic`. Runs until the sum of both
    residuals is at most `atol`, or `rtol` of that at zero.
    `max_evaluations` limits products with F or G. Weights are in X's dtype: take float64.

    Over all patterns, and with enough units, the optimum is the network's global one. Over sampled ones it is the best
    with those patterns only, and for more than a handful of features Adam on enough units often finds better ones.

    Memory is O(n P + min(n, P d)²), one factorisation O(min(n, P d)³), then O(n P d) an iteration (`squared`).
    Raises `UserError` for shapes that do not match, values that are not finite, labels other than ±1, β < 0.

    >>> X = torch.tensor([[-1.0, 1], [0, 1], [1, 1], [2, 1]], dtype=torch.float64)
    >>> y = torch.tensor([1.0, 0, 1, 2], dtype=torch.float64)  # |x|
    >>> from trainwright.solvers.convex_nets import enumerate_patterns
    >>> found = solve_relu_programme(X, y, enumerate_patterns(X), 1e-3)
    >>> found.success, [round(value, 2) for value in found.x(X).tolist()]
    (True, [1.0, 0.0, 1.0, 2.0])

    Source: Bai, Gautam & Sojoudi 2022, Efficient Global Optimization of Two-Layer ReLU Networks, SIAM J. Math. Data Sci.
    (arXiv:2201.01965); the programme is Pilanci & Ergen's, 2020. Departures: the linear system is solved in sums and
    differences of v and w (see `gates`); the logistic loss takes a Newton step in the outputs (see `newton`), and the
    paper's block descent, on request, is preconditioned.
    """
    X, y, patterns = (as_tensor(value) for value in (X, y, patterns))
    _check(X, y, patterns, beta, loss)
    options = options or AdmmOptions()
    counts = Counts()
    admm = _Admm(Gates(X, patterns), y, beta, loss, options, counts, as_generator(seed, X.device))
    limits = Limits(max_iterations, rtol, atol, max_evaluations, max_seconds, check_every=check_every)
    run = drive(admm.start(), admm.step, admm.measure, limits, counts=counts, callback=callback,
                keep_history=keep_history, progress=progress)  # fmt: skip
    return _result(admm, run, X)


@dataclass(frozen=True)
class _State:
    u: Tensor
    v: Tensor
    s: Tensor
    lam: Tensor
    nu: Tensor


class _Admm:
    def __init__(self, gates: Gates, y: Tensor, beta: float, loss: str, options: AdmmOptions, counts: Counts,
                 generator: torch.Generator) -> None:  # fmt: skip
        self.gates, self.y, self.beta, self.loss, self.options, self.counts = gates, y, beta, loss, options, counts
        self.system = InverseSystem(gates, options.rho)
        self._pull = gates.output_adjoint(y) / options.rho
        self.inner = self._inner(generator) if loss != "squared" else None

    def _inner(self, generator: torch.Generator) -> OutputNewton | BlockDescent:
        problem, options = (self.gates, self.system, self.y, self.loss, self.options.rho), self.options
        if options.inner == "newton":
            return OutputNewton(*problem, options.newton_tolerance)
        at_zero = float(losses.value(self.loss, torch.zeros_like(self.y), self.y))
        return BlockDescent(*problem, options.block_tolerance * max(at_zero, 1e-300), generator)

    def start(self) -> _State:
        n, num_patterns, d = self.gates.shape
        weights = self.y.new_zeros(2, num_patterns, d)
        margins = self.y.new_zeros(2, n, num_patterns)
        return _State(weights, weights, margins, weights, margins)

    def step(self, state: _State) -> _State:
        options = self.options
        u = self.weights(state)
        shifted = u + state.lam
        norms = shifted.norm(dim=-1, keepdim=True).clamp_min(1e-300 if u.dtype == torch.float64 else 1e-30)
        v = (1 - self.beta / options.rho / norms).clamp_min(0.0) * shifted
        margins = self.gates.margins(u)
        s = (margins + state.nu).clamp_min(0.0)
        self.counts.add(nfev=1)
        return _State(u, v, s, state.lam + options.step * (u - v), state.nu + options.step * (margins - s))

    def weights(self, state: _State) -> Tensor:
        """Return the first step's u: one solve for the squared loss, else a block descent from the u before."""
        centre, margins = state.v - state.lam, state.s - state.nu
        if self.inner is not None:
            u, num_steps = self.inner.minimise(state.u, centre, margins)
            self.counts.add(inner=num_steps)
            return u
        self.counts.add(nfev=3)  # G', and A and A' inside the solve
        return self.system.solve(self._pull + centre + self.gates.margins_adjoint(margins))

    def measure(self, state: _State) -> Measured:
        primal, dual = self.residuals(state)
        return Measured(primal + dual, self.objective(state.v), {"primal": primal, "dual": dual})

    def residuals(self, state: _State) -> tuple[float, float]:
        gates, rho = self.gates, self.options.rho
        apart = (state.u - state.v).square().sum() + (gates.margins(state.u) - state.s).square().sum()
        loss_slope = gates.output_adjoint(losses.slope(self.loss, gates.output(state.u), self.y))
        stationary = loss_slope / rho + state.lam + gates.margins_adjoint(state.nu)
        return float(apart.sqrt()), float(stationary.norm())

    def objective(self, v: Tensor) -> float:
        fit = losses.value(self.loss, self.gates.output(v), self.y)
        return float(fit + self.beta * v.norm(dim=-1).sum())


def _result(admm: _Admm, run: LoopResult[_State], X: Tensor) -> ReLUProgrammeResult:
    network: TwoLayerReLU = recover(run.best.v)
    primal, dual = admm.residuals(run.best)
    return ReLUProgrammeResult(
        x=network, fun=network.objective(X, admm.y, admm.beta, admm.loss), success=run.status.success,
        status=run.status, message=_message(run.status), nit=run.nit, nfev=run.counts["nfev"], history=run.history,
        convex_fun=admm.objective(run.best.v), v=run.best.v, primal_residual=primal, dual_residual=dual,
        num_inner=run.counts["inner"],
    )  # fmt: skip


def _message(status: Status) -> str:
    if status is Status.MAX_ITERATIONS:
        return f"{status.value}; a rho ten times smaller or larger often helps (it goes with the size of the loss)"
    return status.value


def _check(X: Tensor, y: Tensor, patterns: Tensor, beta: float, loss: str) -> None:
    if X.dim() != 2 or not X.is_floating_point() or y.shape != X.shape[:1] or y.dtype != X.dtype or len(X) == 0:
        raise UserError(
            f"X [n, d] and y [n] of one floating dtype are needed; got {list(X.shape)} {X.dtype} and "
            f"{list(y.shape)} {y.dtype}; reshape or convert them"
        )
    if patterns.dim() != 2 or len(patterns) != len(X) or patterns.dtype != torch.bool or patterns.shape[1] == 0:
        raise UserError(
            f"boolean patterns [{len(X)}, P] are needed; got {list(patterns.shape)} {patterns.dtype}; take sample_patterns(X, …)"
        )
    if not bool(X.isfinite().all() & y.isfinite().all()):
        raise UserError("finite X and y are needed; got NaN or infinity; clean them")
    if loss not in LOSSES:
        raise UserError(f"a loss of {', '.join(LOSSES)} is needed; got {loss!r}; take one of them")
    if loss == "logistic" and not bool((y.abs() == 1).all()):
        raise UserError("labels of -1 and 1 are needed for the logistic loss; got others; map the two classes to them")
    if not beta >= 0:
        raise UserError(f"beta of at least 0 is needed; got {beta}; give such a value")
