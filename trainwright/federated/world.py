"""What federations are like: labels unevenly shared out, clients of different speeds, and how long a planned client takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..artifacts import Plan, UserError, check_range
from .checks import positive, whole


def dirichlet_split(
    labels: Any, num_clients: int, alpha: float, *, seed: int = 0, min_size: int = 1
) -> list[np.ndarray]:
    """Share examples out to clients so that each has classes in proportions drawn from a Dirichlet distribution.

    labels: a class an example. alpha: small for clients with few classes each, large for clients alike. min_size: of each
    client; shares are drawn anew until all have it. Returns the indices of each client, together all, none twice.

    Raises `UserError` where there are too few examples, or no draw of 1000 gives each client `min_size`.

    >>> [len(part) for part in dirichlet_split([0, 0, 0, 1, 1, 1], 2, alpha=100.0)]
    [3, 3]

    Source: Hsu, Qi & Brown 2019, Measuring the Effects of Non-Identical Data Distribution (arXiv:1909.06335).
    """
    labels = np.asarray(labels)
    check_range(
        "dirichlet_split",
        labels=(labels, "of one class an example", lambda value: value.ndim == 1 and value.size > 0),
        num_clients=(num_clients, "whole, of at least 1", whole()),
        alpha=(alpha, "above 0 and finite", positive),
    )
    check_range(
        "dirichlet_split",
        min_size=(
            min_size,
            f"from 0 to {len(labels) // num_clients}",
            lambda value: 0 <= value <= len(labels) // num_clients,
        ),
    )
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        parts = _drawn(labels, num_clients, alpha, rng)
        if min(map(len, parts)) >= min_size:
            return parts
    raise UserError(
        f"{min_size} examples a client are needed; no draw gave all {num_clients} as many; take a larger alpha or fewer clients"
    )


def _drawn(labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for kind in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == kind))
        ends = np.round(np.cumsum(rng.dirichlet(np.full(num_clients, alpha))) * len(places)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(places, ends)):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


@dataclass(frozen=True)
class Speeds:
    """The seconds of one client's pieces of work: `mean_s` times a log-normal number of mean 1.

    sigma: the spread of one piece to the next, 0 for none. A piece's time depends on `seed` and its number alone.

    >>> steady = Speeds(2.0)
    >>> steady(0), steady(1)
    (2.0, 2.0)
    >>> [round(Speeds(1.0, sigma=0.5, seed=1)(number), 2) for number in range(3)]
    [1.05, 1.15, 0.48]
    """

    mean_s: float
    sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(
            "Speeds", mean_s=(self.mean_s, "above 0 and finite", positive),
            sigma=(self.sigma, "of at least 0 and finite", lambda value: 0 <= value < math.inf),
        )  # fmt: skip

    def __call__(self, number: int) -> float:
        if not self.sigma:
            return self.mean_s
        drawn = np.random.default_rng([self.seed, number]).lognormal(-(self.sigma**2) / 2, self.sigma)
        return self.mean_s * float(drawn)

    @classmethod
    def of_federation(
        cls, num_clients: int, *, mean_s: float = 1.0, spread: float = 0.5, stragglers: float = 0.1, slower: float = 10.0,
        sigma: float = 0.0, seed: int = 0,
    ) -> list[Speeds]:  # fmt: skip
        """Return speeds whose means are log-normal with `spread`, a share `stragglers` of them `slower` times slower.

        >>> found = Speeds.of_federation(10, stragglers=0.2)
        >>> sum(speed.mean_s > 4 for speed in found)
        2
        """
        check_range(
            "Speeds.of_federation", num_clients=(num_clients, "whole, of at least 1", whole()),
            spread=(spread, "of at least 0", lambda value: value >= 0), slower=(slower, "above 0 and finite", positive),
            stragglers=(stragglers, "in [0, 1]", lambda value: 0 <= value <= 1), seed=(seed, "whole, of at least 0", whole(0)),
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        means = mean_s * rng.lognormal(-(spread**2) / 2, spread, num_clients)
        slow = rng.permutation(num_clients)[: round(stragglers * num_clients)]
        means[slow] *= slower
        return [cls(float(mean), sigma, seed * 1_000_003 + k) for k, mean in enumerate(means)]


def predicted_work_s(
    plan: Plan, num_steps: int, *, num_bytes: int = 0, bandwidth_bytes_per_s: float | None = None
) -> float:
    """Return how long a client whose model runs by `plan` takes for one piece of work: its steps, and both messages.

    num_steps: local steps. num_bytes: of the arrays that travel, once down and once up, at `bandwidth_bytes_per_s`; without a
    bandwidth messages take no time. Give it to `Server.enroll` as `predicted_s`: weights and Δt then need no measurements.

    >>> import torch, trainwright as tw
    >>> net, batch = torch.nn.Linear(4, 1), (torch.ones(8, 4),)
    >>> plan = tw.plan(net, batch, loss_fn=lambda output: output.mean(), hardware="cpu:1")
    >>> predicted_work_s(plan, num_steps=10) == 10 * plan.predicted.step_s
    True
    """
    check_range(
        "predicted_work_s", num_steps=(num_steps, "whole, of at least 1", whole()),
        plan=(plan, "a Plan", lambda value: isinstance(value, Plan)),
    )  # fmt: skip
    sending_s = 2 * num_bytes / bandwidth_bytes_per_s if bandwidth_bytes_per_s else 0.0
    return num_steps * plan.predicted.step_s + sending_s


def parts_of(data: Sequence[Any], parts: Sequence[np.ndarray]) -> list[tuple[Any, ...]]:
    """Return each client's part of several tensors or arrays.

    >>> parts_of((np.arange(4), np.arange(4) * 2), [np.array([0, 3])])
    [(array([0, 3]), array([0, 6]))]
    """
    return [tuple(each[part] for each in data) for part in parts]
