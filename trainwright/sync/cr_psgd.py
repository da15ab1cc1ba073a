"""CR-PSGD and CR-PSGD-Catalyst: average gradients rarely, over batches that grow geometrically."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from torch import Tensor

from ..artifacts import check_range
from .local_sgd import DataParallel, reduced_gradient
from .record import Message, StateVector, SyncRecord, each_step
from .replica import Worker
from .requests import Steps

_LARGEST = 1 << 53


class CRPSGD(DataParallel):
    r"""Average gradients once a round, over batches that grow: O(log T) rounds for T examples a worker.

        B_t = ⌊ρ^(t−1) B_1⌋        examples of each worker in round t: `method.batch_size`
        x ← the optimizer's step with the mean gradient of all n·B_t examples

    A loop draws `sync.method.batch_size` examples with replacement, accumulates their mean gradient, calls
    `sync.step(loss, num_samples=…)`, and ends when `sync.method.finished`. Batches may differ between workers: they
    count by their number.

    first_batch: B_1. growth: ρ > 1. budget: T, examples a worker; the last round is clipped to it; `None` for no end.
    largest_batch: where B_t stops growing. The optimizer is SGD with a constant lr, below 1/L for L-smooth losses.

    For losses with a Polyak–Łojasiewicz constant μ, ρ has to be below 1 / (1 − ν), ν = lr·μ·(2 − L·lr); then N·T·(f − f*)
    stays bounded. A larger ρ loses the speed-up of n workers altogether. For networks take 1.02 to 1.1.

    Source: Yu & Jin 2019, On the Computation and Communication Complexity of Parallel SGD with Dynamic Batch Sizes (ICML).
    """

    grows_batches = True

    def __init__(
        self,
        worker: Worker,
        *,
        first_batch: int = 1,
        growth: float = 1.1,
        budget: int | None = None,
        largest_batch: int | None = None,
    ) -> None:
        super().__init__(worker)
        check_range(
            "cr-psgd",
            first_batch=(first_batch, "of at least 1", lambda value: value >= 1),
            growth=(growth, "above 1", lambda value: 1 < value < math.inf),
            budget=(budget, "of at least 1, or None", lambda value: value is None or value >= 1),
            largest_batch=(
                largest_batch,
                "of at least first_batch, or None",
                lambda value: value is None or value >= first_batch,
            ),
        )
        self.first_batch, self.growth = first_batch, Fraction(str(growth))
        self.budget, self.largest_batch = budget, largest_batch
        self.state |= {"num_rounds": 0, "spent": 0}

    @property
    def batch_size(self) -> int:
        """Return the number of examples that each worker draws for the next round; 0 when the budget is spent."""
        grown = grown_batch(self.first_batch, self.growth, int(self.state["num_rounds"]))
        limits = [self.largest_batch, None if self.budget is None else self.budget - int(self.state["spent"])]
        return max(0, min([grown, *(limit for limit in limits if limit is not None)]))

    @property
    def finished(self) -> bool:
        """Tell whether the budget is spent."""
        return self.budget is not None and int(self.state["spent"]) >= self.budget

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        gradient = yield from self._mean_gradient(num_samples)
        self._count(self.batch_size)
        self.replica.write_gradient(gradient)
        self.replica.update()

    def _count(self, drawn: int) -> None:
        """Count the examples of a full round, so that all workers agree on the next one's batch size."""
        self.state["num_rounds"] += 1
        self.state["spent"] += drawn


class CRPSGDCatalyst(CRPSGD):
    r"""CR-PSGD on a sequence of strongly convex problems: for losses that are not convex.

        h_k(x) = f(x) + (θ/2) ‖x − y_{k−1}‖²        k = 1 … ⌊√(nT)⌋
        y_k = CR-PSGD on h_k from y_{k−1}, ⌊√(T/n)⌋ examples a worker, batches from B_1 anew

    theta: θ, above the weak-convexity constant of f (for an L-smooth f, above L). budget: T; without it there is no end.
    Other options as in `cr-psgd`; O(√(nT) log(T/n)) rounds in all. The gradient of the proximal term is added for you.

    Source: Yu & Jin 2019 (ICML), algorithm 2.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        theta: float = 1.0,
        first_batch: int = 1,
        growth: float = 1.1,
        budget: int = 10_000,
        largest_batch: int | None = None,
    ) -> None:
        check_range(
            "cr-psgd-catalyst",
            theta=(theta, "above 0", lambda value: value > 0),
            budget=(budget, f"of at least the {worker.size} workers", lambda value: value >= worker.size),
        )
        super().__init__(
            worker,
            first_batch=first_batch,
            growth=growth,
            budget=math.isqrt(budget // worker.size),
            largest_batch=largest_batch,
        )
        self.theta, self.num_problems = theta, math.isqrt(worker.size * budget)
        self.state["problem"] = 0

    @property
    def finished(self) -> bool:
        """Tell whether all problems are solved."""
        return int(self.state["problem"]) >= self.num_problems

    def start(self) -> Steps[None]:
        self.state["centre"] = self.replica.read()
        yield from ()

    def _mean_gradient(self, num_samples: int) -> Steps[Tensor]:
        gradient = yield from super()._mean_gradient(num_samples)
        return gradient + self.theta * (self.replica.read() - self.state["centre"])

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        yield from super().step(loss, num_samples)
        if super().finished:
            self.state |= {"num_rounds": 0, "spent": 0, "problem": self.state["problem"] + 1}
            self.state["centre"] = self.replica.read()


def grown_batch(first_batch: int, growth: Fraction, num_rounds: int) -> int:
    """Return ⌊growth^num_rounds · first_batch⌋ exactly; at most 2⁵³.

    >>> [grown_batch(1, Fraction("1.5"), t) for t in range(5)], grown_batch(100, Fraction("1.15"), 1)
    ([1, 1, 2, 3, 5], 115)
    """
    if num_rounds * math.log(growth) + math.log(first_batch) > math.log(_LARGEST):
        return _LARGEST
    return math.floor(growth**num_rounds * first_batch)


def rounds_for(budget: int, first_batch: int, growth: float) -> int:
    """Return the number of rounds that spend a worker's budget of examples; the last one is clipped to it.

    >>> rounds_for(2000, 1, 1.3)
    25
    """
    spent, rounds = 0, 0
    while spent < budget:
        spent += grown_batch(first_batch, Fraction(str(growth)), rounds)
        rounds += 1
    return rounds


def _gradients(says: str) -> tuple[Message, ...]:
    return (Message("gradients", "all-reduce", reduced_gradient, each_step, says),)


RECORDS = (
    SyncRecord(
        "cr-psgd",
        CRPSGD,
        "averages gradients of growing batches",
        _gradients("2P a round"),
        promises="O(1/nT) in O(log T) rounds",
        assumes="Polyak–Łojasiewicz, growth below 1/(1−ν)",
        paper="Yu & Jin 2019, ICML",
    ),
    SyncRecord(
        "cr-psgd-catalyst",
        CRPSGDCatalyst,
        "the same on proximal problems",
        _gradients("2P a round"),
        promises="‖∇f‖² of O(1/√nT) in O(√(nT) log(T/n)) rounds",
        assumes="smooth; theta above its constant",
        states=(StateVector("centre"),),
        paper="Yu & Jin 2019, ICML",
    ),
)
