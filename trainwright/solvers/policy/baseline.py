"""A linear baseline: the value of a state as a least-squares fit on what earlier trajectories returned."""

from __future__ import annotations

import torch
from torch import Tensor

from .rollout import Trajectories


class LinearBaseline:
    """b(s, h) = w·(s, s², h/100, (h/100)², (h/100)³, 1), fitted by ridge regression to discounted rewards-to-go.

    Fitted on one batch and used on the next, it is independent of what it is subtracted from: no bias. `ridge` ≥ 0.

    >>> baseline = LinearBaseline(discount=0.9, ridge=1e-9)
    >>> rewards, owner, time = torch.ones(2), torch.zeros(2, dtype=torch.long), torch.arange(2)
    >>> steps = Trajectories(torch.zeros(2, 1), torch.zeros(2), rewards, owner, time, num=1)
    >>> float(baseline(steps).sum())
    0.0
    >>> baseline.fit(steps); [round(value, 2) for value in baseline(steps).tolist()]
    [1.9, 1.0]
    """

    def __init__(self, discount: float, ridge: float = 1e-5) -> None:
        self.discount, self.ridge = discount, ridge
        self.weights: Tensor | None = None

    def __call__(self, trajectories: Trajectories) -> Tensor:
        """Return b per step (S,), in units of the reward-to-go counted from that step; 0 before the first fit."""
        if self.weights is None:
            return torch.zeros_like(trajectories.rewards)
        return (_features(trajectories) @ self.weights).to(trajectories.rewards)

    def fit(self, trajectories: Trajectories) -> None:
        """Take the weights that explain these trajectories best."""
        features = _features(trajectories)
        scale = self.discount ** trajectories.time.double()
        targets = trajectories.rewards_to_go(self.discount).double() / scale.clamp_min(1e-30)
        gram = features.T @ features
        shift = self.ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        self.weights = torch.linalg.solve(gram + shift, features.T @ targets)


def _features(trajectories: Trajectories) -> Tensor:
    states = trajectories.observations.double().flatten(1).clamp(-10, 10)
    hours = (trajectories.time.double() / 100).unsqueeze(-1)
    return torch.cat([states, states**2, hours, hours**2, hours**3, torch.ones_like(hours)], -1)
