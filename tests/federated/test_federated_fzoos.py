"""FZooS: analytic gradients, one set of features for all, correction of drift, and a real black box."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from trainwright.artifacts import UserError
from trainwright.federated import FZooSClient, FZooSRun, FZooSSettings, GaussianProcess, RandomFeatures
from trainwright.federated.surrogate import default_length_scale, squared_distances


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of a hundred rows are too small for threads, which on a busy machine cost twenty times what they do."""
    with threadpool_limits(1):
        yield


def quadratic(seed: int, dim: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(dim, dim))
    return factor @ factor.T / dim + 0.5 * np.eye(dim), rng.normal(size=dim)


QUADRATICS = [quadratic(seed) for seed in range(4)]
FUNS = [
    lambda x, curve=curve, centre=centre: float(0.5 * (x - centre) @ curve @ (x - centre))
    for curve, centre in QUADRATICS
]


def gap(x: np.ndarray) -> float:
    curve = sum(each for each, _ in QUADRATICS) / 4
    best = np.linalg.solve(curve, sum(each @ centre for each, centre in QUADRATICS) / 4)
    return float(np.mean([fun(x) - fun(best) for fun in FUNS]))


@settings(max_examples=25, deadline=None)
@given(dim=st.integers(1, 6), num=st.integers(2, 12), seed=st.integers(0, 10**6), shift=st.sampled_from([0.0, 3.0]))
def test_gradients_are_those_of_the_mean(dim: int, num: int, seed: int, shift: float) -> None:
    """Against central differences of the means, coordinates that are exactly zero among them."""
    rng = np.random.default_rng(seed)
    points, values, x = rng.normal(size=(num, dim)) + shift, rng.normal(size=num), rng.normal(size=dim)
    x[0] = 0.0
    process, features = GaussianProcess(points, values, 1.5, 1e-3), RandomFeatures(dim, 40, 1.5, seed)
    weights = features.weights(points, values, 1e-3)
    kernel = np.exp(-squared_distances(points, points) / (2 * 1.5**2)) + 1e-3 * np.eye(num)
    standard = (values - values.mean()) / values.std()

    def mean(at: np.ndarray) -> float:
        near = np.exp(-((at - points) ** 2).sum(1) / (2 * 1.5**2))
        return float(values.std() * near @ np.linalg.solve(kernel, standard))

    for fun, gradient in (
        (mean, process.gradient(x)),
        (lambda at: float(features.at(at[None])[0] @ weights), features.gradient(weights, x)),
    ):
        numeric = [(fun(x + 1e-5 * unit) - fun(x - 1e-5 * unit)) / 2e-5 for unit in np.eye(dim)]
        np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-6)


def test_the_gradients_variance_is_the_trace_of_its_covariance() -> None:
    rng = np.random.default_rng(1)
    points, candidates, scale = rng.normal(size=(9, 4)) + 5, rng.normal(size=(6, 4)) + 5, 1.3
    process = GaussianProcess(points, rng.normal(size=9), scale, 1e-2)
    kernel = np.exp(-squared_distances(points, points) / (2 * scale**2)) + 1e-2 * np.eye(9)
    expected = []
    for x in candidates:
        slopes = -(x - points).T / scale**2 * np.exp(-((x - points) ** 2).sum(1) / (2 * scale**2))
        expected.append(np.trace(np.eye(4) / scale**2 - slopes @ np.linalg.solve(kernel, slopes.T)))
    np.testing.assert_allclose(process.gradient_variance(candidates), expected, rtol=1e-9)
    assert process.gradient_variance(points[:1])[0] < process.gradient_variance(points[:1] + 10)[0]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_few_queries_give_the_direction() -> None:
    """Measured in the sheet at q = d + 1: process .991, features .995, differences .625."""
    found: dict[str, list[float]] = {"process": [], "features": [], "differences": []}
    features = RandomFeatures(10, 3000, 2.0)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        (curve, centre), fun = QUADRATICS[seed % 4], FUNS[seed % 4]
        x = rng.normal(size=10)
        points = np.concatenate([x[None], x + 0.3 * np.linalg.qr(rng.normal(size=(10, 10)))[0]])
        values, slope = np.array([fun(point) for point in points]), curve @ (x - centre)
        found["process"].append(cosine(GaussianProcess(points, values, 2.0).gradient(x), slope))
        found["features"].append(cosine(features.gradient(features.weights(points, values), x), slope))
        drawn = rng.normal(size=(10, 10))
        found["differences"].append(cosine(sum((fun(x + 0.01 * u) - fun(x)) * u for u in drawn), slope))
    assert np.mean(found["process"]) > 0.95
    assert np.mean(found["features"]) > 0.95
    assert np.mean(found["differences"]) < 0.8


def run(rounds: int = 12, **changed: Any) -> tuple[float, int]:
    options = {
        "optimizer": "sgd",
        "lr": 0.05,
        "num_features": 600,
        "num_fit_queries": 20,
        "length_scale": 2.0,
        **changed,
    }
    going = FZooSRun.begin(np.ones(10), FZooSSettings(**options))
    clients = {f"c{k}": FZooSClient(fun, seed=k) for k, fun in enumerate(FUNS)}
    for _ in going.rounds(clients, rounds):
        pass
    return gap(going.x), sum(len(state["values"]) for state in going.states.values())


@pytest.mark.slow
def test_correction_removes_the_drift() -> None:
    uncorrected, _ = run(correction=0.0)
    decaying, _ = run(decay=True)
    constant, num_queries = run()
    assert decaying < 0.5 * uncorrected
    assert constant < 0.05 * uncorrected
    assert num_queries < 12 * 4 * (10 * 6 + 21) + 4 * 10 + 1


@pytest.mark.slow
def test_at_the_sheets_size() -> None:
    constant, num_queries = run(30)
    assert constant < 1e-3
    assert num_queries < 11_000
    assert constant < 0.01 * run(30, correction=0.0)[0]


def test_features_are_the_same_for_all_or_refused() -> None:
    assert RandomFeatures(3, 5, 1.0, 7).digest == RandomFeatures(3, 5, 1.0, 7).digest
    others = [
        RandomFeatures(3, 5, 1.0, 8),
        RandomFeatures(3, 5, 1.1, 7),
        RandomFeatures(3, 6, 1.0, 7),
        RandomFeatures(4, 5, 1.0, 7),
    ]
    digests = {each.digest for each in others}
    assert len(digests) == 4
    going = FZooSRun.begin(np.ones(2), FZooSSettings(num_features=8))
    going.digest = "0" * 64
    with pytest.raises(UserError, match="the server's random features are needed"):
        going.round({"a": FZooSClient(lambda x: 0.0)})


def test_the_length_scale_grows_with_the_dimension() -> None:
    """Points of the unit box are √(d/6) apart: the kernel between two of them is to be far from 0 and from 1 for every d."""
    for dim in (3, 30, 300, 2000):
        points = np.random.default_rng(0).uniform(size=(20, dim))
        squared = squared_distances(points, points)[np.triu_indices(20, 1)]
        kernel = np.exp(-squared / (2 * default_length_scale(dim) ** 2))
        assert 0.4 < kernel.mean() < 0.95
    points = np.random.default_rng(0).uniform(size=(20, 300))
    assert np.exp(-squared_distances(points, points)[0, 1:] / 2).max() < 1e-6  # ℓ = 1, the authors'


def test_each_client_uploads_one_point_and_one_weight_vector_a_round() -> None:
    going = FZooSRun.begin(np.ones(10), FZooSSettings(num_features=50, num_steps=2, num_candidates=5, num_queries=2))
    going.round({f"c{k}": FZooSClient(fun, seed=k) for k, fun in enumerate(FUNS)})
    assert going.steps.traffic.bytes_up == 4 * 8 * 10
    assert going.fits.traffic.bytes_up == 4 * 8 * 50


def test_bounds_hold_and_values_that_are_not_finite_are_left_out() -> None:
    seen: list[np.ndarray] = []

    def fun(x: np.ndarray) -> float:
        seen.append(x)
        return float((x**2).sum())

    small = FZooSSettings(num_features=20, num_steps=3, num_candidates=5, num_queries=2, num_fit_queries=3, lr=0.5)
    going = FZooSRun.begin([0.5, 0.5], small)
    going.round({"a": FZooSClient(fun, bounds=(0.4, 1.0))})
    assert min(x.min() for x in seen) >= 0.4
    calls = itertools.count()
    going.round({"a": FZooSClient(lambda x: fun(x) if next(calls) % 3 else float("nan"), bounds=(0.4, 1.0))})
    assert going.states["a"]["num_queries"] > len(going.states["a"]["values"])
    assert np.isfinite(going.states["a"]["values"]).all()
    with pytest.raises(UserError, match="finite values"):
        FZooSRun.begin([0.5, 0.5], small).round({"a": FZooSClient(lambda x: float("nan"))})
    for bad in ({"num_steps": 0}, {"noise": 0.0}, {"num_queries": 200}, {"optimizer": "newton"}, {"correction": -1.0}):
        with pytest.raises(UserError):
            FZooSSettings(**bad)


@pytest.mark.slow
def test_a_metric_of_a_classifier_falls_faster_than_by_random_gradients_or_differences() -> None:
    """1 - macro F1 of a linear classifier of digits, 650 numbers, whose gradient is zero wherever it exists; equal queries."""
    from benchmarks.federated import zeroth_order as methods

    funs, held_out, x0 = methods.metric_problem(num_clients=2)
    settings = {"lr": 0.02, "radius": 0.1, "spread": 0.3, "noise": 1e-2, "nearest": 100, "num_features": 400}
    paths = {
        "fzoos": methods.fzoos(funs, x0, 1300, **settings),
        "drifting": methods.fzoos(funs, x0, 1300, correction=0.0, **settings),
        "random": methods.by_slopes(funs, x0, 1300, methods.random_gradient(20, 0.1), 0.05),
        "differences": methods.by_slopes(funs, x0, 1300, methods.differences(0.1), 0.05, num_steps=1),
    }
    assert all(count >= 1300 for _, count in paths.values())
    assert paths["fzoos"][1] < 1400
    left = {name: np.mean([fun(path[-1]) for fun in funs]) for name, (path, _) in paths.items()}
    start = np.mean([fun(x0) for fun in funs])
    assert left["fzoos"] < 0.65 * start
    assert left["fzoos"] < 0.85 * min(left["drifting"], left["random"], left["differences"])
    assert held_out(paths["fzoos"][0][-1]) < 0.85 * held_out(x0)


def test_on_flower_it_is_the_same_run() -> None:
    from tests.federated_grid import CountedGrid, node
    from trainwright.federated.flower import FZooS, array_record, arrays_of, client_app

    small = FZooSSettings(num_features=60, num_steps=3, num_candidates=8, num_queries=2, num_fit_queries=6, lr=0.05)
    app = client_app(lambda context: FZooSClient(FUNS[int(context.node_id)], seed=int(context.node_id)))
    grid = CountedGrid({number: node(app, number, 0.5 + 0.01 * number) for number in range(4)})
    strategy = FZooS(small, min_available_nodes=4, timing=grid.timing())
    result = strategy.start(grid, array_record({"x": np.ones(10)}), num_rounds=3)
    here = FZooSRun.begin(np.ones(10), small)
    clients = {f"partition-{k}": FZooSClient(fun, seed=k) for k, fun in enumerate(FUNS)}
    for _ in itertools.islice(here.rounds(clients, 3), 3):
        pass
    np.testing.assert_array_equal(arrays_of(result.arrays)["x"], here.x)
    assert strategy.run is not None
    np.testing.assert_array_equal(strategy.run.fits.arrays["w"], here.fits.arrays["w"])
    assert len(result.train_metrics_clientapp) == 3
