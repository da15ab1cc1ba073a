"""Policy gradients against exact derivatives of a small decision process, and against their recursions written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainwright.artifacts import UserError
from trainwright.solvers.outcome import Status
from trainwright.solvers.policy import (
    HARPG,
    NPGIGT,
    REINFORCE,
    GaussianMLP,
    LinearBaseline,
    SoftmaxMLP,
    evaluate,
    learn,
    rollout,
)
from trainwright.solvers.policy.estimators import Estimator

NUM_STATES, NUM_ACTIONS, HORIZON, DISCOUNT = 3, 2, 4, 0.9


@dataclass(frozen=True)
class Process:
    """A random decision process: where action a leads from state s (s, a, s'), and what it earns (s, a)."""

    moves: np.ndarray
    rewards: np.ndarray

    @classmethod
    def of(cls, seed: int, concentration: float) -> Process:
        random = np.random.default_rng(seed)
        moves = random.dirichlet(np.full(NUM_STATES, concentration), size=(NUM_STATES, NUM_ACTIONS))
        return cls(moves, random.random((NUM_STATES, NUM_ACTIONS)))


SPREAD, SHARP = Process.of(3, concentration=0.5), Process.of(5, concentration=0.1)


class TableEnv:
    """Copies of a decision process, stepped together; states are seen one-hot, the start is state 0."""

    def __init__(self, num_envs: int, process: Process = SPREAD) -> None:
        self.num_envs, self.process = num_envs, process

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.random, self.state, self.time = np.random.default_rng(seed), np.zeros(self.num_envs, dtype=np.int64), 0
        return self._seen(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        rewards = self.process.rewards[self.state, actions]
        edges = self.process.moves[self.state, actions].cumsum(-1)
        self.state = (self.random.random((self.num_envs, 1)) > edges[:, :-1]).sum(-1)
        self.time += 1
        never = np.zeros(self.num_envs, dtype=bool)
        return self._seen(), rewards, never, never | (self.time == HORIZON), {}

    def _seen(self) -> np.ndarray:
        return np.eye(NUM_STATES)[self.state]


def exact_value(theta: Tensor, process: Process = SPREAD) -> Tensor:
    """J(θ) by carrying the distribution of states along; θ are the logits (actions, states), flat."""
    policy = torch.softmax(theta.view(NUM_ACTIONS, NUM_STATES), 0).T
    moves, rewards = torch.from_numpy(process.moves), torch.from_numpy(process.rewards)
    here, value = torch.zeros(NUM_STATES, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    here[0] = 1
    for h in range(HORIZON):
        joint = here.unsqueeze(-1) * policy
        value = value + DISCOUNT**h * (joint * rewards).sum()
        here = torch.einsum("sa,sat->t", joint, moves)
    return value


def exact_gradient(theta: Tensor, process: Process = SPREAD) -> Tensor:
    return torch.func.grad(exact_value)(theta, process)


def best_value(process: Process) -> float:
    value = np.zeros(NUM_STATES)
    for _ in range(HORIZON):
        value = (process.rewards + DISCOUNT * process.moves @ value).max(-1)
    return float(value[0])


def table_policy() -> nn.Module:
    policy = SoftmaxMLP(NUM_STATES, NUM_ACTIONS, hidden=()).double()
    with torch.no_grad():
        policy.network[0].weight.zero_()
    return policy


def estimator(
    num_envs: int, batch_size: int, seed: int = 0, baseline: LinearBaseline | None = None, process: Process = SPREAD
) -> Estimator:
    return Estimator(
        TableEnv(num_envs, process),
        table_policy(),
        batch_size=batch_size,
        horizon=HORIZON,
        discount=DISCOUNT,
        baseline=baseline,
        generator=torch.Generator().manual_seed(seed),
    )


THETA = torch.tensor([0.5, -0.3, 0.8, -0.2, 0.4, 0.1], dtype=torch.float64)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_the_estimates_are_unbiased() -> None:
    """60,000 trajectories: gradient and Hessian-vector product within some percent; without the score term far off."""
    oracle = estimator(20_000, 60_000)
    trajectories = oracle.sample(THETA)
    vector = torch.tensor([1.0, -2.0, 0.5, 0.3, -1.0, 2.0], dtype=torch.float64)
    hessian = torch.func.hessian(exact_value)(THETA)
    assert relative_error(oracle.gradient(THETA, trajectories), exact_gradient(THETA)) < 0.06
    assert relative_error(oracle.hessian_vector(THETA, trajectories, vector), hessian @ vector) < 0.08
    weights = trajectories.rewards_to_go(DISCOUNT)
    without_score = torch.func.jvp(
        torch.func.grad(lambda at: oracle._sums(at, trajectories, weights)[0].mean()), (THETA,), (vector,)
    )[1]
    assert relative_error(without_score, hessian @ vector) > 1.0
    assert trajectories.returns(DISCOUNT).mean() == pytest.approx(float(exact_value(THETA)), rel=0.01)
    assert oracle.counts == {"nfev": 60_000, "ntraj": 60_000, "nsteps": 240_000, "nhvp": 1}


def test_the_product_with_the_score_is_taken_per_trajectory() -> None:
    """Against one trajectory at a time, each differentiated by itself."""
    oracle = estimator(5, 5)
    trajectories = oracle.sample(THETA)
    vector, weights = torch.arange(6.0, dtype=torch.float64) - 2, trajectories.rewards_to_go(DISCOUNT)
    wanted = torch.zeros(6, dtype=torch.float64)
    for one in range(5):

        def phi(at: Tensor, one: int = one) -> Tensor:
            return oracle._sums(at, trajectories, weights)[0][one]

        def log_prob(at: Tensor, one: int = one) -> Tensor:
            return oracle._sums(at, trajectories, weights)[1][one]

        score = torch.autograd.functional.jacobian(log_prob, THETA)
        slope = torch.autograd.functional.jacobian(phi, THETA)
        curvature = torch.autograd.functional.hessian(phi, THETA)
        wanted += (curvature @ vector + slope * (score @ vector)) / 5
    torch.testing.assert_close(oracle.hessian_vector(THETA, trajectories, vector), wanted)


def test_a_baseline_leaves_the_estimates_unbiased_and_less_noisy() -> None:
    plain, reduced = estimator(5000, 5000), estimator(5000, 5000, baseline=LinearBaseline(DISCOUNT))
    reduced.learn_baseline(reduced.sample(THETA))
    wanted = exact_gradient(THETA)
    for oracle in (plain, reduced):
        assert relative_error(oracle.gradient(THETA, oracle.sample(THETA)), wanted) < 0.3
    trajectories, spreads = rollout(TableEnv(300), plain.load(THETA), 300, HORIZON, plain.generator), []
    for oracle in (plain, reduced):
        weights = oracle._weights(trajectories)
        each = torch.autograd.functional.jacobian(
            lambda at, weights=weights: plain._sums(at, trajectories, weights)[0], THETA, vectorize=True
        )
        spreads.append(float(each.var(0).sum()))
    assert spreads[1] < 0.7 * spreads[0]


@pytest.mark.parametrize(
    "method",
    [
        NPGIGT(step=0.3, momentum=0.8),
        NPGIGT(step=0.3, momentum=0.2, max_ahead=0.05),
        NPGIGT(step=0.3, momentum=0.2, max_ahead=50.0),
        HARPG(step=0.3, momentum=0.8),
        HARPG(step=0.3, momentum=0.8, normalized=True),
        REINFORCE(step=0.3, momentum=0.5, normalized=True),
    ],
)
def test_the_recursions_are_the_ones_written_out(method: Any) -> None:
    oracle = estimator(4, 4, seed=1)
    found = method.start(oracle, THETA)
    for _ in range(3):
        found = method.advance(oracle, found)

    oracle = estimator(4, 4, seed=1)
    theta = before = THETA
    direction = oracle.gradient(theta, oracle.sample(theta))
    normalized = isinstance(method, NPGIGT) or method.normalized
    exponent = {NPGIGT: 1.0, REINFORCE: 0.0, HARPG: 1.0 if normalized else 0.5}[type(method)]
    for t in range(1, 4):
        step = 0.3 * (2 / (t + 1)) ** exponent
        before, theta = theta, theta + step * direction / (direction.norm() if normalized else 1)
        if isinstance(method, HARPG):
            eta = 0.8 * 2 / (t + 2)
            q = torch.rand((), generator=oracle.generator)
            between = q * theta + (1 - q) * before
            carried = oracle.hessian_vector(between, oracle.sample(between), theta - before)
            direction = (1 - eta) * (direction + carried) + eta * oracle.gradient(theta, oracle.sample(theta))
        elif isinstance(method, NPGIGT):
            eta = method.momentum * (2 / (t + 2)) ** 0.8
            way = (1 - eta) / eta * (theta - before)
            if method.max_ahead == 0.05:  # below each way; 50 is above
                way = 0.05 * way / way.norm()
            direction = (1 - eta) * direction + eta * oracle.gradient(theta + way, oracle.sample(theta + way))
        else:
            direction = 0.5 * direction + 0.5 * oracle.gradient(theta, oracle.sample(theta))
    torch.testing.assert_close(found.direction, direction, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.theta, theta, rtol=1e-6, atol=1e-9)
    assert oracle.counts["ntraj"] == (28 if isinstance(method, HARPG) else 16)


def tracking_error(method: Any, process: Process, batch_size: int, num_steps: int, seeds: range) -> float:
    """Mean ‖dₜ − ∇J(θₜ)‖ over the second half of runs on `batch_size` trajectories an estimate, from the uniform policy."""
    errors = []
    for seed in seeds:
        oracle = estimator(batch_size, batch_size, seed, process=process)
        state = method.start(oracle, torch.zeros(6, dtype=torch.float64))
        for t in range(num_steps):
            state = method.advance(oracle, state)
            if t >= num_steps // 2 and t % 10 == 0:
                errors.append(float((state.direction - exact_gradient(state.theta, process)).norm()))
    return float(np.mean(errors))


def tracked(process: Process, momentum: float, **how: Any) -> list[float]:
    """The errors of normalised momentum, transport and curvature at constant step 0.01."""
    options: dict[str, Any] = {"step": 0.01, "momentum": momentum, "step_power": 0.0, "momentum_power": 0.0}
    methods = (REINFORCE(**options, normalized=True), NPGIGT(**options), HARPG(**options, normalized=True))
    return [tracking_error(method, process, **how) for method in methods]


@pytest.mark.slow
def test_transport_and_curvature_track_the_gradient_better_than_momentum() -> None:
    momentum, transport, curvature = tracked(SHARP, momentum=0.01, batch_size=8, num_steps=400, seeds=range(1))
    assert transport < 0.8 * momentum
    assert curvature < 0.85 * momentum


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tracking_in_full() -> None:
    momentum, transport, curvature = tracked(SHARP, momentum=0.01, batch_size=8, num_steps=1000, seeds=range(5))
    assert transport < 0.8 * momentum
    assert curvature < 0.85 * momentum
    momentum, _, curvature = tracked(SPREAD, momentum=0.1, batch_size=8, num_steps=500, seeds=range(5))
    assert curvature < 0.9 * momentum


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transport_tracks_the_gradient_with_single_trajectories() -> None:
    """Curvature's error is that of momentum here, whatever the weight: see docs/log.md."""
    momentum, transport, _ = tracked(SPREAD, momentum=0.01, batch_size=1, num_steps=1500, seeds=range(5))
    assert transport <= 0.8 * momentum


@pytest.mark.parametrize(
    "method", [REINFORCE(step=0.5), NPGIGT(step=0.5), HARPG(step=0.5), HARPG(step=0.5, normalized=True)]
)
def test_every_method_closes_most_of_the_gap(method: Any) -> None:
    result = learn(
        TableEnv(8, SHARP), table_policy(), method=method, max_iterations=150, batch_size=8, horizon=HORIZON,
        discount=DISCOUNT, keep_history=True,
    )  # fmt: skip
    start, best = float(exact_value(torch.zeros(6, dtype=torch.float64), SHARP)), best_value(SHARP)
    reached = float(exact_value(result.x["network.0.weight"].flatten(), SHARP))
    assert (reached - start) / (best - start) > 0.8
    batches = 301 if isinstance(method, HARPG) else 151
    assert (result.ntraj, result.nfev, result.nsteps) == (8 * batches, 8 * batches, 8 * batches * HORIZON)
    assert result.nhvp == (150 if isinstance(method, HARPG) else 0)
    assert result.history["mean_return"][-1] == result.mean_return
    assert result.success


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", [NPGIGT(step=0.5), HARPG(step=0.5), HARPG(step=0.5, normalized=True)])
def test_single_trajectories_close_most_of_the_gap(method: Any) -> None:
    """The median of four runs: single runs may saturate at a wrong action within the first steps."""
    start, best = float(exact_value(torch.zeros(6, dtype=torch.float64), SHARP)), best_value(SHARP)
    options: dict[str, Any] = {"horizon": HORIZON, "discount": DISCOUNT, "max_evaluations": 3000}
    shares = []
    for seed in range(4):
        result = learn(TableEnv(1, SHARP), table_policy(), method=method, max_iterations=3000, seed=seed, **options)
        reached = float(exact_value(result.x["network.0.weight"].flatten(), SHARP))
        shares.append((reached - start) / (best - start))
    assert float(np.median(shares)) > 0.8


class Ragged:
    """Two copies: the first ends after two steps, the second by truncation after four; the reward is the time."""

    num_envs = 2

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.time = 0
        return np.zeros((2, 1)), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.time += 1
        rewards = np.array([self.time, 10.0 * self.time])
        ends, cuts = np.array([self.time == 2, False]), np.array([False, self.time == 4])
        return np.full((2, 1), float(self.time)), rewards, ends, cuts, {}


def test_trajectories_end_each_for_itself() -> None:
    policy = SoftmaxMLP(1, 2, hidden=())
    found = rollout(Ragged(), policy, 3, 10, torch.Generator().manual_seed(0))
    assert found.num == 3
    assert found.returns().tolist() == [3.0, 100.0, 3.0]
    assert found.returns(0.5).tolist() == [1 + 0.5 * 2, 10 + 10 + 7.5 + 5, 2.0]
    assert sorted(found.owner.tolist()) == [0, 0, 1, 1, 1, 1, 2, 2]
    to_go = found.rewards_to_go(0.5)
    wanted = {(0, 0): 2.0, (0, 1): 1.0, (1, 0): 32.5, (1, 1): 22.5, (1, 2): 12.5, (1, 3): 5.0, (2, 0): 2.0, (2, 1): 1.0}
    for owner, time, value in zip(found.owner.tolist(), found.time.tolist(), to_go.tolist()):
        assert value == wanted[owner, time]
    cut = rollout(Ragged(), policy, 2, 1, torch.Generator().manual_seed(0))
    assert cut.returns().tolist() == [1.0, 10.0]


def test_policies_begin_nearly_uniform_and_nearly_at_zero() -> None:
    """The last layer is a hundredth of the rest, so that no action is settled before the first reward."""
    seen = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        probabilities = torch.softmax(SoftmaxMLP(4, 3).network(seen), -1)
        means = GaussianMLP(4, 2).network(seen)
    assert 1e-4 < float((probabilities - 1 / 3).abs().max()) < 0.02
    assert 1e-4 < float(means.abs().max()) < 0.1


def test_policies_are_the_densities_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(50_000, 3, generator=generator)
    softmax = SoftmaxMLP(3, 4, hidden=(5,), seed=1)
    logits = softmax.network(observations)
    actions = softmax.sample(observations, generator)
    torch.testing.assert_close(
        softmax.log_prob(observations, actions), torch.distributions.Categorical(logits=logits).log_prob(actions)
    )
    gaussian = GaussianMLP(3, 2, hidden=(5,), initial_std=0.5, seed=1)
    drawn = gaussian.sample(observations, generator)
    normal = torch.distributions.Normal(gaussian.network(observations), 0.5)
    torch.testing.assert_close(gaussian.log_prob(observations, drawn), normal.log_prob(drawn).sum(-1))
    assert float((drawn - gaussian.network(observations)).std().detach()) == pytest.approx(0.5, rel=0.02)
    frequency = torch.bincount(actions, minlength=4) / len(actions)
    torch.testing.assert_close(frequency, torch.softmax(logits, -1).mean(0), atol=0.01, rtol=0)


class Target:
    """One step, reward −(action − 0.3)² in each of two entries; actions are clipped to [−1.5, 1.5]."""

    num_envs = 64

    class single_action_space:
        low, high = -1.5, 1.5

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.ones((64, 1)), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        assert (np.abs(actions) <= 1.5).all()
        over = np.ones(64, dtype=bool)
        return np.ones((64, 1)), -((actions - 0.3) ** 2).sum(-1), over, over, {}


def test_a_gaussian_policy_finds_its_target() -> None:
    policy = GaussianMLP(1, 2, hidden=(8,), initial_std=0.5)
    options: dict[str, Any] = {"max_iterations": 120, "batch_size": 64, "use_baseline": True}
    result = learn(Target(), policy, method=HARPG(step=0.1, normalized=True), **options)
    mean = result.policy.network(torch.ones(1, 1))  # type: ignore[operator]
    assert (mean - 0.3).abs().max() < 0.1
    before, after = (evaluate(Target(), it, num_trajectories=256).mean() for it in (policy, result.policy))
    assert after > before + 0.2


def test_runs_repeat_and_leave_the_global_state_alone() -> None:
    state = torch.random.get_rng_state()
    policy = SoftmaxMLP(3, 2, seed=3)
    before = [parameter.clone() for parameter in policy.parameters()]
    runs = [
        learn(TableEnv(4), policy, method=HARPG(step=0.3), max_iterations=5, batch_size=6, horizon=HORIZON, seed=7)
        for _ in range(2)
    ]
    assert all(torch.equal(runs[0].x[name], runs[1].x[name]) for name in runs[0].x)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters()))
    assert not torch.equal(runs[0].x["network.2.weight"], policy.network[2].weight)
    assert torch.equal(torch.random.get_rng_state(), state)


class Sour(TableEnv):
    """Rewards turn NaN after some steps."""

    num_steps = 0

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.num_steps += 1
        seen, rewards, *rest = super().step(actions)
        return seen, rewards * (np.nan if self.num_steps > 30 else 1), *rest


def test_what_is_not_finite_ends_with_the_last_good_policy() -> None:
    options: dict[str, Any] = {"max_iterations": 50, "batch_size": 4, "horizon": HORIZON}
    result = learn(Sour(4), table_policy(), method=NPGIGT(step=0.5), **options)
    assert (result.status, result.success) == (Status.NOT_FINITE, False)
    assert torch.isfinite(result.x["network.0.weight"]).all()
    wild = learn(Target(), GaussianMLP(1, 2), method=REINFORCE(step=1e36), **options)
    assert wild.status is Status.NOT_FINITE
    assert all(torch.isfinite(value).all() for value in wild.x.values())


def test_cart_pole_of_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make_vec("CartPole-v1", num_envs=16, vectorization_mode="vector_entry_point")
    policy = SoftmaxMLP(4, 2, seed=0)
    options: dict[str, Any] = {"batch_size": 16, "horizon": 200, "use_baseline": True}
    result = learn(env, policy, method=NPGIGT(step=0.3, step_power=0.5), max_iterations=20, **options)
    before, after = (evaluate(env, it, num_trajectories=32).mean() for it in (policy, result.policy))
    assert before < 40
    assert after > 2 * before


def test_mistakes_are_named() -> None:
    fine: dict[str, Any] = {"method": NPGIGT(step=0.5), "max_iterations": 1}
    with pytest.raises(UserError, match=r"make_vec\('CartPole-v1'"):
        learn("CartPole-v1", table_policy(), **fine)
    with pytest.raises(UserError, match="with num_envs"):
        learn(object(), table_policy(), **fine)
    with pytest.raises(UserError, match="sample and log_prob"):
        learn(TableEnv(2), nn.Linear(2, 2), **fine)
    with pytest.raises(UserError, match="a discount in"):
        learn(TableEnv(2), table_policy(), discount=1.5, **fine)
    with pytest.raises(UserError, match="momentum in"):
        HARPG(step=0.1, momentum=0.0)
    with pytest.raises(UserError, match="step > 0"):
        NPGIGT(step=-1.0)
    with pytest.raises(UserError, match="positive initial_std"):
        GaussianMLP(2, 1, initial_std=0.0)

    class Single(TableEnv):
        def step(self, actions: np.ndarray) -> tuple[Any, ...]:
            seen, rewards, *rest = super().step(actions)
            return seen, rewards.sum(), *rest

    with pytest.raises(UserError, match="one reward per copy"):
        learn(Single(2), table_policy(), **fine)
