"""What every family does at its ends: Ctrl-C, StopIteration, time, no iterations; kinds and dtypes kept; no global randomness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse import linalg as sparse_linalg

from trainwright.selection import CRAIG, Reselection
from trainwright.solvers import consensus, constrained, online, policy
from trainwright.solvers.bilevel import BOREP, BSVRB, bilevel
from trainwright.solvers.convex_nets import ReLUClassifier, enumerate_patterns, solve_relu_programme
from trainwright.solvers.linear import DirectionNet, dcdm, solve_dcdm, solve_sor, solve_ssor_pcg, sor, ssor_pcg
from trainwright.solvers.minimax import GDA, SpiderGDA, minimax
from trainwright.solvers.outcome import Result, Status
from trainwright.solvers.transport import sinkhorn, solve_sinkhorn, solve_sns

SIZE = 12
MATRIX = sparse.diags_array([-1.0, 2.1, -1.0], offsets=[-1, 0, 1], shape=(SIZE, SIZE)).tocsr()
RIGHT = np.linspace(1, 3, SIZE)
COST = torch.rand(9, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
INPUTS = torch.randn(14, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.3
TARGETS = torch.tensor([[1.0], [3.0]], dtype=torch.float64)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def two_levels(method: Any, *, inner: Any = None, max_iterations: int = 30, **options: Any) -> Any:
    lower = inner or (lambda x, y, blocks, batch: ((y - x) ** 2).sum(1) / 2)
    upper = lambda x, y, blocks, batch: ((y - TARGETS[blocks]) ** 2).sum(1) / 2  # noqa: E731
    y0 = torch.zeros(2, 1, dtype=torch.float64)
    return bilevel(upper, lower, vector(0), y0, method=method, max_iterations=max_iterations, **options)


def bsvrb(version: int = 2) -> BSVRB:
    return BSVRB(step_x=0.1, step_y=0.5, num_sampled=2, version=version)


class Levers:
    """An environment of one step: lever 1 pays."""

    num_envs = 4

    def __init__(self, reward: float = 1.0, observation: float = 1.0) -> None:
        self.reward, self.observations = reward, np.full((4, 1), observation)

    def reset(self, seed: int | None = None) -> Any:
        return self.observations, {}

    def step(self, actions: np.ndarray) -> Any:
        over = np.ones(4, dtype=bool)
        return self.observations, self.reward * (actions == 1), over, over, {}


def learned(env: Any = None, num_actions: int = 2, observation_dim: int = 1, **options: Any) -> Any:
    given: dict[str, Any] = {"max_iterations": 30, "batch_size": 4, **options}
    net = policy.SoftmaxMLP(observation_dim, num_actions, hidden=())
    return policy.learn(env or Levers(), net, method=policy.REINFORCE(0.1), **given)


def saddle(method: Any = None, max_iterations: int = 30, **options: Any) -> Any:
    fun = lambda x, y, i: x @ x + x @ y - y @ y  # noqa: E731
    start = vector(1, 2)
    return minimax(fun, start, start, 4, method=method or GDA(0.1, 0.1), max_iterations=max_iterations, **options)


def played(max_iterations: int = 30, **options: Any) -> Any:
    environment = lambda t, x: (((x - 0.5) ** 2).sum(-1) / 2, x - 0.5)  # noqa: E731
    return online.play(
        online.OGD(online.Ball(2), gradient_bound=3.0), environment, max_iterations=max_iterations, **options
    )


def constrained_run(max_iterations: int = 30, **options: Any) -> Any:
    start, plane = vector(3, 1), lambda x: x[:1] + x[1:] - 1
    return constrained.solve_ai_sqp(lambda x: (x**4).sum(), start, plane, max_iterations=max_iterations, **options)


def network(max_iterations: int = 30, **options: Any) -> Any:
    patterns, y = enumerate_patterns(INPUTS), INPUTS[:, 0].abs()
    return solve_relu_programme(INPUTS, y, patterns, 0.1, max_iterations=max_iterations, check_every=1, **options)


def tight(options: dict[str, Any]) -> dict[str, Any]:
    """Without the relative tolerance where an absolute one is asked for."""
    return {"rtol": 0.0, **options} if "atol" in options else options


RUNS: dict[str, Callable[..., Result]] = {
    "minimax": saddle,
    "minimax, variance reduced": lambda **o: saddle(SpiderGDA(0.05, 0.05, batch_size=2), check_every=1, **o),
    "bilevel, version 2": lambda **o: two_levels(bsvrb(), **o),
    "bilevel, version 1": lambda **o: two_levels(bsvrb(1), **o),
    "bilevel, normalised": lambda **o: two_levels(BOREP(0.05, 0.3, 0.3, refine_steps=2), **o),
    "policy": learned,
    "online": played,
    "consensus": lambda **o: consensus.minimize(lambda x: (x**2).sum(1), [(-1, 2)] * 2, **{"max_iterations": 30, **o}),
    "transport": lambda **o: solve_sns([], [], COST, 1e-3, **{"max_iterations": 30, "atol": 1e-14, **o}),
    "transport, baseline": lambda max_iterations=30, **o: solve_sinkhorn([], [], COST, 1e-3, max_iterations=max_iterations, **o),
    "linear, SOR": lambda max_iterations=30, **o: solve_sor(MATRIX, RIGHT, max_iterations=max_iterations, **tight(o)),
    "linear, SSOR-PCG": lambda max_iterations=30, **o: solve_ssor_pcg(MATRIX, RIGHT, max_iterations=max_iterations, **tight(o)),
    "linear, DCDM": lambda **o: solve_dcdm(MATRIX, RIGHT, lambda r: r, **{"max_iterations": 30, **tight(o)}),
    "constrained": constrained_run,
    "convex nets": network,
}  # fmt: skip
families = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def raises_after(num: int, error: type[BaseException]) -> Callable[[Any], None]:
    calls: list[int] = []

    def callback(moment: Any) -> None:
        calls.append(1)
        if len(calls) == num:
            raise error

    return callback


def random_states() -> tuple[bytes, bytes]:
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state(legacy=False)["state"]["key"].tobytes()


@families
@pytest.mark.parametrize("error", [StopIteration, KeyboardInterrupt])
def test_a_callback_that_raises_stops_with_the_iterate_so_far(run: Any, error: type[BaseException]) -> None:
    before = random_states()
    result = run(callback=raises_after(3, error))
    assert result.status is Status.STOPPED
    assert result.nit == 2
    assert "Ctrl-C" in result.message
    assert random_states() == before
    names = {field.name for field in dataclasses.fields(result)}
    assert names >= {"x", "fun", "success", "status", "message", "nit", "nfev"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.nit = 0


WITH_A_TOLERANCE = ("transport", "linear", "constrained", "convex nets")
"""Families that have one by default."""


@pytest.mark.parametrize("name", RUNS)
def test_a_budget_that_was_asked_for_is_a_success_only_where_no_tolerance_was(name: str) -> None:
    """Of iterations, of evaluations, of seconds: all three alike, in every family."""
    run, tolerant = RUNS[name], name.startswith(WITH_A_TOLERANCE)
    for limit, spent, status in (
        ("max_seconds", 0.0, Status.MAX_SECONDS),
        ("max_evaluations", 1, Status.MAX_EVALUATIONS),
        ("max_iterations", 1, Status.MAX_ITERATIONS),
    ):
        result = run(**{limit: spent})
        assert result.status is (status if tolerant else Status.COMPLETED), limit
        assert result.success is not tolerant
        assert result.nit <= 1
        assert limit in result.message or not tolerant
    if run is not played:  # no round is no game
        assert run(max_iterations=0).nit == 0


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("policy", "online")])
def test_a_tolerance_that_was_not_met_is_no_success(name: str) -> None:
    found = RUNS[name](atol=1e-300, max_iterations=2)
    assert (found.status, found.success) == (Status.MAX_ITERATIONS, False)


@families
def test_progress_tells_where_the_run_is(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("trainwright.solvers.driver.time.monotonic", lambda: float(next(clock)))
    told: list[str] = []
    run(max_iterations=3, progress=told.append)
    assert told
    assert all(line.startswith("iteration ") for line in told)


@pytest.mark.parametrize("method", [bsvrb(), bsvrb(1), BOREP(0.05, 0.3, 0.3, refine_steps=2)])
def test_without_iterations_the_upper_level_does_not_move(method: Any) -> None:
    result = two_levels(method, max_iterations=0)
    assert result.x.tolist() == [0.0]
    assert result.nfev == 0


def test_a_direction_that_vanishes_at_the_start_is_no_convergence() -> None:
    """v = 0 at first, and f does not depend on x: version 2's first direction is zero, 2 is the solution."""
    result = two_levels(bsvrb(), max_iterations=300, atol=1e-4)
    assert result.status is Status.CONVERGED
    assert float(result.x) == pytest.approx(2.0, abs=1e-2)
    limited = two_levels(bsvrb(), max_iterations=300, atol=1e-12, max_evaluations=1600)
    assert limited.status is Status.MAX_EVALUATIONS
    assert float(limited.x) == pytest.approx(2.0, abs=1e-2)


@pytest.mark.parametrize("version", [1, 2])
def test_a_lower_level_that_is_not_convex_diverges(version: int) -> None:
    result = two_levels(bsvrb(version), inner=lambda x, y, b, _: -((y - x) ** 2).sum(1), max_iterations=300)
    assert result.status is Status.DIVERGED
    assert bool(torch.isfinite(result.x).all())


def test_linear_dialects_are_scipys() -> None:
    exact = sparse_linalg.spsolve(MATRIX.tocsc(), RIGHT)
    for solve in (
        lambda **o: sor(MATRIX, RIGHT, omega=1.2, **o),
        lambda **o: ssor_pcg(MATRIX, RIGHT, omega=1.2, **o),
        lambda **o: dcdm(sparse_linalg.aslinearoperator(MATRIX), RIGHT, model=lambda r: r, **o),
    ):
        seen: list[Any] = []
        x, info = solve(rtol=1e-6, callback=seen.append)
        assert info == 0
        assert np.linalg.norm(RIGHT - MATRIX @ x) <= 1e-6 * np.linalg.norm(RIGHT)
        assert isinstance(seen[0], np.ndarray)
        np.testing.assert_array_equal(seen[-1], x)
        again, info = solve(x0=exact)  # against b's norm, as there: nothing is left to do
        assert info == 0
        np.testing.assert_array_equal(again, exact)


def test_of_two_tolerances_the_looser_one_ends_a_linear_solve() -> None:
    """max(atol, rtol · ‖b‖), as SciPy: where both are equal no step fewer is taken than with one of them."""
    size = float(np.linalg.norm(RIGHT))
    for solve in (sor, ssor_pcg):
        ends = [
            solve(MATRIX, RIGHT, omega=1.2, rtol=rtol, atol=atol)[0]
            for rtol, atol in ((1e-6, 0.0), (0.0, 1e-6 * size), (1e-6, 1e-6 * size), (1e-9, 1e-6 * size))
        ]
        for other in ends[1:]:
            np.testing.assert_array_equal(ends[0], other)


def test_dtypes_are_kept() -> None:
    for single in (RIGHT.astype(np.float32), torch.from_numpy(RIGHT).float()):
        for result in (
            solve_sor(MATRIX, single),
            solve_ssor_pcg(MATRIX, single),
            solve_dcdm(MATRIX, single, lambda r: r),
        ):
            assert type(result.x) is type(single)
            assert result.x.dtype == single.dtype
    assert solve_sor(MATRIX, np.arange(SIZE)).x.dtype == np.float64
    start = torch.tensor([3.0, 1.0])
    found = constrained.minimize(
        lambda x: (x**2).sum(), start, constraints={"type": "eq", "fun": lambda x: x.sum() - 1}
    )
    assert found.x.dtype == found.jac.dtype == torch.float64  # its tolerance is beyond what float32 can hold
    for cost in (COST.float(), COST.half()):
        plan, log = sinkhorn([], [], cost, 0.05, log=True)
        assert plan.dtype == log["alpha"].dtype == cost.dtype
    assert sinkhorn([], [], COST.float().numpy(), torch.tensor(0.05)).dtype == np.float32
    half = torch.full((9,), 1 / 9).half()
    assert sinkhorn(half, [], COST.half(), 0.05).sum() == pytest.approx(1.0, abs=1e-2)
    assert (
        consensus.minimize(lambda x: (x**2).sum(1), x0=[1.0, 2.0], spread=1.0, max_iterations=2).x.dtype
        == torch.float64
    )


def test_minimise_takes_what_scipys_does() -> None:
    calls: list[Any] = []

    def both(x: np.ndarray, target: float) -> tuple[float, np.ndarray]:
        calls.append(x)
        return float(((x - target) ** 2).sum()), 2 * (x - target)

    plane = constrained.minimize.__globals__["LinearConstraint"](sparse.csr_array([[1.0, 1.0]]), 1, 1)
    result = constrained.minimize(both, [3.0, 1.0], args=2.0, jac=True, constraints=plane, tol=None)
    assert result.success
    np.testing.assert_allclose(result.x, [0.5, 0.5], atol=1e-7)
    assert len(calls) <= result.nfev


def test_what_no_point_meets_is_infeasible_and_a_stall_names_the_violation() -> None:
    options = {"sketch": "exact"}
    sphere = {"type": "eq", "fun": lambda x: (x**2).sum() + 1}
    result = constrained.minimize(lambda x: (x**2).sum(), vector(3, 1), constraints=sphere, options=options)
    assert result.status is Status.INFEASIBLE
    assert bool(torch.isfinite(result.x).all())
    apart = [{"type": "ineq", "fun": lambda x: x[0] - 5}, {"type": "ineq", "fun": lambda x: 1 - x[0]}]
    result = constrained.minimize(
        lambda x: (x**2).sum(), vector(3, 1), constraints=apart, options={**options, "maxiter": 40}
    )
    assert not result.success
    assert result.status is Status.INFEASIBLE or "violated by" in result.message


def test_an_oracle_may_write_to_its_points() -> None:
    result = consensus.minimize(lambda x: ((x - 1) ** 2).sum(1) + 0 * x.mul_(0).sum(1), [(-4, 4)], max_iterations=60)
    assert float(result.best_fun) == pytest.approx(float((result.best_x - 1).square().sum()))


def test_environments_that_do_not_fit_are_named() -> None:
    from trainwright.artifacts import UserError

    class OldStep(Levers):
        def step(self, actions: np.ndarray) -> Any:
            return super().step(actions)[:4]

    class Space:
        n = 2

    few = Levers()
    few.single_action_space = Space()  # type: ignore[attr-defined]
    for call, message in (
        (lambda: learned(OldStep()), "step returns .* got 4 entries"),
        (lambda: learned(observation_dim=3), r"a policy for observations of shape \(1,\) is needed"),
        (lambda: learned(few, num_actions=9), "actions below 2 are needed"),
        (lambda: learned(Levers(observation=np.nan)), "finite observations and parameters are needed"),
        (lambda: learned(batch_size=2.5), "batch_size of at least 1"),
        (
            lambda: policy.evaluate(Levers(), policy.SoftmaxMLP(1, 2), num_trajectories=0),
            "num_trajectories of at least 1",
        ),
    ):
        with pytest.raises(UserError, match=message):
            call()
    assert learned(Levers(reward=np.nan)).status is Status.NOT_FINITE


def test_seeds_of_numpy_and_names_as_labels() -> None:
    assert torch.equal(saddle(SpiderGDA(0.1, 0.1), seed=np.int64(3)).x, saddle(SpiderGDA(0.1, 0.1), seed=3).x)
    assert CRAIG(0.3, greedy="stochastic", seed=np.int64(3)).fit(INPUTS).indices_.tolist()
    X, names = INPUTS.numpy(), np.where(INPUTS[:, 0] > 0.3, "right", "left")
    classifier = ReLUClassifier(1e-2, num_patterns=8, max_iterations=40).fit(X, names)
    assert classifier.score(X, names) == np.mean(classifier.predict(X) == names) > 0.8
    found = solve_relu_programme(X, X[:, 0], enumerate_patterns(X), 0.1, max_iterations=3)
    assert found.nit == 3


def test_networks_and_loaders_draw_nothing_from_the_global_state() -> None:
    before = random_states()
    one, two = (DirectionNet(2, channels=3, bias=True) for _ in range(2))
    for left, right in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Linear(1, 2)
    data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None], torch.arange(8) % 2)
    assert len(list(Reselection(data, model, CRAIG(0.5, normalise=True), batch_size=2))) == 2
    assert random_states() == before
