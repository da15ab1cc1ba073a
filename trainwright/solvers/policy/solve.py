"""`learn` a policy in a vector environment, and `evaluate` one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...artifacts import UserError
from ..driver import Callback, Ended, Limits, Measured, drive
from ..methods import need_method
from ..outcome import Result
from ..seeds import as_generator, need_count
from .ascent import Ascent, Method
from .baseline import LinearBaseline
from .estimators import Estimator
from .rollout import check_env, rollout

T = TypeVar("T")


@dataclass(frozen=True)
class PolicyResult(Result):
    """A `Result` whose `x` are the parameters by name, and `policy` a copy of the module with them.

    `fun` is minus the mean discounted return of the last batch, `mean_return` its mean undiscounted one. `ntraj`, `nsteps`, `nhvp`:
    trajectories, steps of the environment, Hessian-vector products.
    """

    policy: nn.Module
    mean_return: float
    ntraj: int
    nsteps: int
    nhvp: int


def learn(
    env: Any,
    policy: nn.Module,
    *,
    method: Method,
    max_iterations: int,
    batch_size: int = 1,
    horizon: int = 200,
    discount: float = 0.99,
    use_baseline: bool = False,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    seed: int | torch.Generator = 0,
    callback: Callback | None = None,
    keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> PolicyResult:
    """Maximise J(θ) = E Σ_{h < horizon} discountʰ r_h over the parameters θ of a stochastic policy.

    `env`: a vector environment of gymnasium (`gymnasium.make_vec(name, num_envs=16)`), or any object with its
    `num_envs`, `reset` and `step`. `policy`: a module with `sample` and `log_prob`, such as `SoftmaxMLP`; it is not
    changed. `batch_size`: trajectories an estimate (theory: 1; best a multiple of `num_envs`). `use_baseline`: subtract a
    linear value of the state.

    The history has `mean_return` per iteration. Iterations end at `max_iterations` or `max_evaluations` (trajectories). The
    estimates are noisy: the last iterate is the result, or the last finite one where parameters or returns became NaN (NOT_FINITE).
    Needs gymnasium (extra `solvers-policy`) only to make its environments. Not for data of another policy, nor where a
    critic pays: see PPO and its kin.

    >>> from trainwright.solvers.policy import NPGIGT, SoftmaxMLP
    >>> class Bandit:
    ...     num_envs = 8
    ...     def reset(self, seed=None):
    ...         return torch.ones(8, 1).numpy(), {}
    ...     def step(self, actions):
    ...         over = torch.ones(8, dtype=torch.bool).numpy()
    ...         return torch.ones(8, 1).numpy(), (actions == 1).astype("float64"), over, over, {}
    >>> result = learn(Bandit(), SoftmaxMLP(1, 2, hidden=()), method=NPGIGT(step=1.0), max_iterations=30, batch_size=8)
    >>> result.mean_return > 0.9, result.ntraj
    (True, 248)
    """
    _check(policy, batch_size, horizon, discount)
    need_method(method, Method, "such as NPGIGT(…)", "make one with its step")
    generator = as_generator(seed, next(policy.parameters()).device)
    baseline = LinearBaseline(discount) if use_baseline else None
    oracle = Estimator(check_env(env), policy, batch_size=batch_size, horizon=horizon, discount=discount,
                       baseline=baseline, generator=generator)  # fmt: skip
    run = drive(
        _first(lambda: method.start(oracle, oracle.start)),
        lambda state: method.advance(oracle, state),
        _measure,
        Limits(max_iterations, max_evaluations=max_evaluations, max_seconds=max_seconds),
        counts=oracle.counts,
        callback=callback,
        keep_history=keep_history,
        progress=progress,
    )
    counts = run.counts
    return PolicyResult(
        x={name: value.clone() for name, value in oracle.packing.unpack(run.last.theta).items()},
        policy=copy.deepcopy(oracle.load(run.last.theta)),
        fun=-run.last.discounted,
        mean_return=run.last.undiscounted,
        success=run.status.success,
        status=run.status,
        message=run.message,
        nit=run.nit,
        nfev=counts["nfev"],
        ntraj=counts["ntraj"],
        nsteps=counts["nsteps"],
        nhvp=counts["nhvp"],
        history=run.history,
    )


def evaluate(
    env: Any, policy: nn.Module, *, num_trajectories: int, horizon: int = 200, seed: int | torch.Generator = 0
) -> Tensor:
    """Return the undiscounted returns (num_trajectories,) of fresh trajectories under the policy.

    `env` and `policy` as in `learn`. The policy acts at random as it was trained to; returns stand in their own order.
    """
    need_count("num_trajectories", num_trajectories, 1)
    need_count("horizon", horizon, 1)
    generator = as_generator(seed, next(policy.parameters()).device)
    return _first(lambda: rollout(check_env(env), policy, num_trajectories, horizon, generator)).returns()


def _first(call: Callable[[], T]) -> T:
    """Return what the first trajectories give: where they cannot be had, there is no iterate to return."""
    try:
        return call()
    except Ended as ended:
        raise UserError(
            "finite observations and parameters are needed from the first reset on; got NaN or infinity; check the "
            "environment's reset and the policy's parameters"
        ) from ended


def _measure(state: Ascent) -> Measured:
    finite = bool(torch.isfinite(state.theta).all() and torch.isfinite(state.direction).all())
    fun = -state.discounted if finite else torch.inf
    return Measured(
        torch.nan, fun, {"mean_return": state.undiscounted, "direction_norm": float(state.direction.norm())}
    )


def _check(policy: nn.Module, batch_size: int, horizon: int, discount: float) -> None:
    missing = [name for name in ("sample", "log_prob") if not callable(getattr(policy, name, None))]
    if missing or next(policy.parameters(), None) is None:
        raise UserError(
            f"a policy module with parameters, sample and log_prob is needed; got {type(policy).__name__} "
            f"without {missing or 'parameters'}; see SoftmaxMLP"
        )
    need_count("batch_size", batch_size, 1)
    need_count("horizon", horizon, 1)
    if not 0 < discount <= 1:
        raise UserError(f"a discount in (0, 1] is needed; got {discount}; start with 0.99")
