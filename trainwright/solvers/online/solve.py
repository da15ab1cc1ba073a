"""`play`: a learner against an environment for so many rounds, with losses and regret recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Callback, Counts, Ended, Limits, Measured, drive
from ..outcome import Result, Status
from ..seeds import need_count
from .learner import Learner

Environment = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(round from 0, play) → (loss, gradient at the play). The same round must be the same loss, whatever is played."""


@dataclass(frozen=True)
class OnlineResult(Result):
    """A `Result` whose `x` is the last play and `fun` the mean loss; per round (T, …): `losses`, and `regrets` summed up."""

    average: Tensor
    losses: Tensor
    regrets: Tensor | None

    @property
    def regret(self) -> Tensor:
        """The regret after all rounds, per player; a `UserError` where there was no comparator."""
        if self.regrets is None:
            raise UserError("a comparator is needed for the regret; got none; call play(…, comparator=…)")
        return self.regrets[-1]


@dataclass(frozen=True)
class _Round:
    play: Tensor
    total_loss: float
    num: int


def play(
    learner: Learner,
    environment: Environment,
    *,
    max_iterations: int,
    comparator: Tensor | Callable[[int], Tensor] | None = None,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    callback: Callback | None = None,
    keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> OnlineResult:
    """Play T = `max_iterations` rounds: predict xₜ, suffer fₜ(xₜ), update with gₜ; the regret is Σₜ fₜ(xₜ) − fₜ(uₜ).

    `environment(t, x)` → (loss (…), gradient (…, d)), t from 0. Where gradients are noisy, let the loss be the expected
    one, or the one of the same draw, for all x. `comparator`: u (d,), such as `best_in_hindsight`, or a function of t for dynamic
    regret; it costs a second evaluation a round, not counted in `nfev` (one a round).

    A loss or gradient that is not finite ends the run NOT_FINITE, the learner as it was before that round.

    >>> from trainwright.solvers.online import Ball, OGD
    >>> target = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> def environment(t, x):
    ...     return ((x - target) ** 2).sum(-1) / 2, x - target
    >>> result = play(OGD(Ball(2), strong_convexity=1.0), environment, max_iterations=50, comparator=target)
    >>> result.status.name, round(float(result.regret), 4)
    ('COMPLETED', 0.25)
    """
    if not isinstance(learner, Learner):
        raise UserError(f"a learner such as OptimisticOMD(…) is needed; got {learner!r}; make one with its set")
    need_count("max_iterations", max_iterations, 1)
    counts, losses, compared = Counts(nfev=0), [], []
    total = torch.zeros_like(learner.start)

    def step(state: _Round) -> _Round:
        nonlocal total
        x = learner.predict()
        loss, gradient = _answer(environment(state.num, x), x)
        if not (torch.isfinite(loss).all() and torch.isfinite(gradient).all()):
            raise Ended(Status.NOT_FINITE)
        learner.update(gradient)
        counts.add(nfev=1)
        losses.append(loss.detach())
        if comparator is not None:
            point = comparator(state.num) if callable(comparator) else comparator
            compared.append(_answer(environment(state.num, _like_play(point, x)), x)[0])
        total = total + x
        return _Round(x, state.total_loss + float(loss.mean()), state.num + 1)

    def measure(state: _Round) -> Measured:
        return Measured(torch.nan, state.total_loss / max(1, state.num))

    limits = Limits(max_iterations, max_evaluations=max_evaluations, max_seconds=max_seconds)
    run = drive(_Round(learner.predict(), 0.0, 0), step, measure, limits,
                counts=counts, callback=callback, keep_history=keep_history, progress=progress)  # fmt: skip
    num, found = len(losses), torch.stack(losses) if losses else torch.zeros(0)
    return OnlineResult(
        x=run.last.play,
        fun=measure(run.last).fun,
        average=total / max(1, num),
        losses=found,
        regrets=(found - torch.stack(compared)).cumsum(0) if compared else None,
        success=run.status.success,
        status=run.status,
        message=run.message,
        nit=num,
        nfev=counts["nfev"],
        history=run.history,
    )


def _like_play(point: Any, x: Tensor) -> Tensor:
    """Return a comparator as a play of each player."""
    found = torch.as_tensor(point).to(x)
    if found.shape != x.shape and found.shape != x.shape[-1:]:
        raise UserError(
            f"a comparator of shape ({x.shape[-1]},), or of the plays' {tuple(x.shape)}, is needed; got "
            f"{tuple(found.shape)}; give one point of the set"
        )
    return found.expand_as(x)


def _answer(found: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the environment's loss and gradient as tensors."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise UserError(
            f"an environment that returns (loss, gradient) is needed; got {type(found).__name__}; return both"
        )
    loss, gradient = (torch.as_tensor(part) for part in found)
    if loss.shape != x.shape[:-1]:
        raise UserError(
            f"a loss of shape {tuple(x.shape[:-1])}, one number a player, is needed; got {tuple(loss.shape)}; sum it over "
            "the last dimension"
        )
    return loss, gradient
