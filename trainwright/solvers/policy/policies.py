"""Stochastic policies as modules: `sample(observations, generator)` and `log_prob(observations, actions)`.

Any module with these two methods does; no dropout and no batch norm, whose randomness or coupling spoils second derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...artifacts import UserError
from ..seeds import as_generator


class SoftmaxMLP(nn.Module):
    """π(a|s) = softmax(f(s))ₐ, f a network with tanh; for discrete actions.

    `observation_dim`, `num_actions`; `hidden`: widths, () for a table of logits on one-hot observations (no bias then). Weights
    are drawn by `seed`, a number or a generator; observations (…, observation_dim), actions (…) of int64.

    >>> policy = SoftmaxMLP(4, 2, seed=0)
    >>> observations = torch.zeros(3, 4)
    >>> actions = policy.sample(observations, torch.Generator().manual_seed(0))
    >>> policy.log_prob(observations, actions).shape
    torch.Size([3])
    """

    def __init__(
        self, observation_dim: int, num_actions: int, hidden: Sequence[int] = (32, 32), seed: int | torch.Generator = 0
    ) -> None:
        super().__init__()
        self.network = mlp([observation_dim, *hidden, num_actions], seed)

    def sample(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions, (m, d) → (m,)."""
        probabilities = torch.softmax(self.network(observations), -1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return log π(a|s), one number an action."""
        return torch.log_softmax(self.network(observations), -1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class GaussianMLP(nn.Module):
    """π(·|s) = N(f(s), diag(exp(2 log_std))), f a network with tanh, log_std its own parameter; for continuous actions.

    Actions (…, action_dim); environments get them clipped to their action space, their density is that before the clipping.

    >>> policy = GaussianMLP(3, 1, seed=0)
    >>> observations = torch.zeros(5, 3)
    >>> policy.log_prob(observations, policy.sample(observations, torch.Generator().manual_seed(0))).shape
    torch.Size([5])
    """

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        hidden: Sequence[int] = (64, 64),
        initial_std: float = 1.0,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__()
        if not initial_std > 0:
            raise UserError(f"a positive initial_std is needed; got {initial_std}; start with 1")
        self.network = mlp([observation_dim, *hidden, action_dim], seed)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(initial_std)))

    def sample(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions, (m, d) → (m, action_dim)."""
        mean = self.network(observations)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + self.log_std.exp() * noise

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return the log density, one number an action."""
        scaled = (actions - self.network(observations)) * torch.exp(-self.log_std)
        return -(scaled.square() / 2 + self.log_std + math.log(2 * math.pi) / 2).sum(-1)


def mlp(widths: Sequence[int], seed: int | torch.Generator) -> nn.Sequential:
    """Return linear layers with tanh between; the weights are drawn from a generator of their own."""
    generator = as_generator(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        # built on the meta device, so that the module's own initialisation draws nothing from the global state
        linear = nn.Linear(fan_in, fan_out, bias=len(widths) > 2, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            linear.weight.normal_(0.0, 1 / math.sqrt(fan_in), generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()
        layers += [linear, nn.Tanh()]
    with torch.no_grad():
        layers[-2].weight.mul_(0.01)  # type: ignore[operator, union-attr]  # nearly uniform, or nearly zero, at the start
    return nn.Sequential(*layers[:-1])
