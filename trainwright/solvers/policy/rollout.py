"""Trajectories from a vector environment: many at once, each from its reset to its end or the horizon.

An environment is what gymnasium calls a vector environment: `num_envs`, `reset(seed=…) → (observations, info)` and
`step(actions) → (observations, rewards, terminated, truncated, info)`, one row per copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...artifacts import UserError
from ..driver import Ended
from ..outcome import Status


@dataclass(frozen=True)
class Trajectories:
    """The steps of `num` trajectories, flat: `owner` (S,) says whose a step is, `time` (S,) when in it."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    owner: Tensor
    time: Tensor
    num: int

    def per_trajectory(self, values: Tensor) -> Tensor:
        """Sum a value per step, (S,) → (num,)."""
        return torch.zeros(self.num, dtype=values.dtype, device=values.device).index_add(0, self.owner, values)

    def rewards_to_go(self, discount: float) -> Tensor:
        """Return Σ_{l ≥ h} γˡ r_l per step h, discounted from the start of the trajectory: (S,)."""
        table = self.rewards.new_zeros(int(self.time.max()) + 1, self.num)
        table[self.time, self.owner] = self.rewards * discount ** self.time.to(self.rewards)
        return table.flip(0).cumsum(0).flip(0)[self.time, self.owner]

    def returns(self, discount: float = 1.0) -> Tensor:
        """Return Σ_h γʰ r_h per trajectory: (num,)."""
        return self.per_trajectory(self.rewards * discount ** self.time.to(self.rewards))


def rollout(env: Any, policy: nn.Module, num: int, horizon: int, generator: torch.Generator) -> Trajectories:
    """Run `policy` for `num` trajectories of at most `horizon` steps; resets and actions are drawn from `generator`.

    A trajectory ends where the environment terminates or truncates it. Of a copy's later steps, nothing is used.
    """
    like = next(policy.parameters())
    batches = [_batch(env, policy, horizon, generator, like) for _ in range(-(-num // env.num_envs))]
    joined = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name in ("observations", "actions", "rewards", "time")
    }
    owner = torch.cat([batch.owner + place * env.num_envs for place, batch in enumerate(batches)])
    used = owner < num
    return Trajectories(**{name: value[used] for name, value in joined.items()}, owner=owner[used], num=num)


def _batch(env: Any, policy: nn.Module, horizon: int, generator: torch.Generator, like: Tensor) -> Trajectories:
    seed = int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))
    current, _ = env.reset(seed=seed)
    alive = torch.ones(env.num_envs, dtype=torch.bool, device=like.device)
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for _ in range(horizon):
        observations = _observed(current, like)
        actions = _sampled(policy, observations, generator)
        current, rewards, terminated, truncated, _ = _stepped(env, _inside(env, actions))
        steps.append((observations, actions, _rewards(rewards, env, like), alive))
        alive = alive & ~torch.as_tensor(np.asarray(terminated) | np.asarray(truncated), device=like.device)
        if not alive.any():
            break
    observations, actions, rewards, mask = (torch.stack(entries) for entries in zip(*steps))
    time, owner = mask.nonzero(as_tuple=True)
    return Trajectories(observations[mask], actions[mask], rewards[mask], owner, time, env.num_envs)


def _observed(current: Any, like: Tensor) -> Tensor:
    observations = torch.as_tensor(np.asarray(current)).to(like)
    if not torch.isfinite(observations).all():
        raise Ended(Status.NOT_FINITE)
    return observations


def _sampled(policy: nn.Module, observations: Tensor, generator: torch.Generator) -> Tensor:
    try:
        with torch.no_grad():
            return policy.sample(observations, generator)  # type: ignore[operator, no-any-return]
    except RuntimeError as error:
        if "shape" not in str(error):
            raise
        raise UserError(
            f"a policy for observations of shape {tuple(observations.shape[1:])} is needed; it says: {error}; make it of "
            "the environment's sizes"
        ) from error


def _stepped(env: Any, actions: np.ndarray) -> Any:
    found = env.step(actions)
    if not isinstance(found, tuple | list) or len(found) != 5:
        size = len(found) if isinstance(found, tuple | list) else type(found).__name__
        raise UserError(
            "an environment whose step returns (observations, rewards, terminated, truncated, info) is needed; "
            f"got {size} entries; use gymnasium's interface, not that of gym before 0.26"
        )
    return found


def _inside(env: Any, actions: Tensor) -> np.ndarray:
    space: Any = getattr(env, "single_action_space", None)
    if space is not None and hasattr(space, "low") != actions.is_floating_point():
        kinds = ("discrete", "SoftmaxMLP") if not hasattr(space, "low") else ("continuous", "GaussianMLP")
        raise UserError(f"a policy of {kinds[0]} actions is needed for {space}; got another; take {kinds[1]}")
    array = actions.cpu().numpy()
    num_actions = getattr(space, "n", None)
    if num_actions is not None and array.size and int(array.max()) >= num_actions:
        raise UserError(
            f"actions below {num_actions} are needed for {space}; got {int(array.max())}; give the policy as many actions"
        )
    return np.clip(array, space.low, space.high) if hasattr(space, "low") else array


def _rewards(rewards: Any, env: Any, like: Tensor) -> Tensor:
    found = torch.as_tensor(np.asarray(rewards)).to(like)
    if found.shape != (env.num_envs,):
        raise UserError(
            f"one reward per copy, shape ({env.num_envs},), is needed; got {tuple(found.shape)}; give a vector environment"
        )
    return found


def check_env(env: Any) -> Any:
    """Return `env` where it is a vector environment."""
    if isinstance(env, str):
        raise UserError(
            f"a vector environment is needed; got the name {env!r}; make it: gymnasium.make_vec({env!r}, num_envs=16)"
        )
    if not isinstance(getattr(env, "num_envs", None), int):
        raise UserError(
            f"a vector environment (with num_envs) is needed; got {type(env).__name__}; "
            "wrap it: gymnasium.vector.SyncVectorEnv([lambda: env])"
        )
    return env
