"""What the policy gradients are compared with: REINFORCE as it is usually written, with Adam, and Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from trainwright.solvers.policy import SoftmaxMLP

BATCH, HORIZON = 16, 200
Trained = tuple[list[float], nn.Module]
"""Returns of the trajectories seen in training, and the policy at the end."""


def adam_reinforce(step: float, num_trajectories: int, seed: int) -> Trained:
    """Rewards to go of a batch, centred and scaled, times log-probabilities; Adam."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=BATCH, vectorization_mode="vector_entry_point")
    generator = torch.Generator().manual_seed(seed)
    policy = SoftmaxMLP(4, 2, seed=seed)
    adam = torch.optim.Adam(policy.parameters(), lr=step)
    seen: list[float] = []
    while len(seen) < num_trajectories:
        observations, actions, rewards, mask = _batch(env, policy, generator, seed + len(seen))
        togo = torch.zeros_like(rewards)
        for time in reversed(range(len(rewards))):
            togo[time] = rewards[time] + (0.99 * togo[time + 1] if time + 1 < len(rewards) else 0)
        advantages = (togo[mask] - togo[mask].mean()) / (togo[mask].std() + 1e-8)
        loss = -(policy.log_prob(observations[mask], actions[mask]) * advantages).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        seen += rewards.sum(0).tolist()
    return seen, policy


def _batch(env: Any, policy: SoftmaxMLP, generator: torch.Generator, seed: int) -> tuple[Tensor, ...]:
    current, _ = env.reset(seed=seed)
    alive, steps = np.ones(BATCH, dtype=bool), []
    while alive.any() and len(steps) < HORIZON:
        observations = torch.as_tensor(current, dtype=torch.float32)
        with torch.no_grad():
            actions = policy.sample(observations, generator)
        current, rewards, ended, cut, _ = env.step(actions.numpy())
        steps.append((observations, actions, torch.as_tensor(rewards * alive), torch.as_tensor(alive)))
        alive = alive & ~(ended | cut)
    observations, actions, rewards, mask = (torch.stack(entries) for entries in zip(*steps))
    return observations, actions, rewards.float(), mask


def stable_baselines(name: str, **options: Any) -> Callable[[float, int, int], Trained]:
    """A2C or PPO on 16 copies with a 32-32 network for policy and value each, until as many trajectories have ended."""

    def run(step: float, num_trajectories: int, seed: int) -> Trained:
        import stable_baselines3
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_vec_env

        class Watch(BaseCallback):
            def _on_step(self) -> bool:
                seen.extend(float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info)
                return len(seen) < num_trajectories

        seen: list[float] = []
        env = make_vec_env("CartPole-v1", n_envs=BATCH, seed=seed, env_kwargs={"max_episode_steps": HORIZON})
        make = getattr(stable_baselines3, name)
        model = make(
            "MlpPolicy", env, learning_rate=step, seed=seed, device="cpu", policy_kwargs={"net_arch": [32, 32]}, **options
        )  # fmt: skip
        model.learn(10**9, callback=Watch())
        return seen[:num_trajectories], _Acting(model.policy)

    return run


class _Acting(nn.Module):
    """A policy of Stable-Baselines3 with the method that `evaluate` calls."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def sample(self, observations: Tensor, generator: torch.Generator) -> Tensor:
        actions: Tensor = self.policy(observations)[0]
        return actions

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        found: Tensor = self.policy.evaluate_actions(observations, actions)[1]
        return found
