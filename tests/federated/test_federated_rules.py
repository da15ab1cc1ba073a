"""The update rule with stochastic weights: measured values of the sheet, unbiasedness, limits; a simulated clock throughout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import slow_but
from trainwright.artifacts import UserError
from trainwright.federated import (
    AsyncFedAvg,
    FedAvg,
    FedBuff,
    FedFix,
    Limits,
    Rule,
    Server,
    SimulatedClient,
    digest,
    fedfix_interval_s,
    replay,
    simulate,
)

TIMES_S = {f"client{k}": time_s for k, time_s in enumerate((1.0, 0.8, 0.6, 0.4, 0.2))}
UNTIED_S = dict(zip(TIMES_S, (1.013, 0.829, 0.611, 0.397, 0.2171)))
"""No two of them arrive together, where the order of equals would be a matter of rounding."""
GOALS = {f"client{k}": float(k) for k in range(5)}


def descent(goal: float, num_steps: int = 5, lr: float = 0.05) -> Any:
    """K gradient steps on (x - goal)² / 2."""

    def update(state: Any, arrays: Any, config: Any) -> tuple[Any, Any]:
        x = arrays["x"].copy()
        for _ in range(num_steps):
            x -= lr * (x - goal)
        return {"x": x - arrays["x"]}, state

    return update


def quadratics(rule: Rule, max_s: float = 200.0, times_s: Mapping[str, float] = TIMES_S, **options: Any) -> list[float]:
    """The model after each aggregation of five scalar quadratics with optima 0 to 4."""
    clients = {
        name: SimulatedClient(descent(GOALS[name]), times_s[name], predicted_s=times_s[name]) for name in times_s
    }
    path: list[float] = []
    server = Server({"x": np.full(1, 7.0)}, rule, **options)
    simulate(server, clients, max_s=max_s, callback=lambda server, _: path.append(float(server.arrays["x"][0])))
    return path


def end(path: list[float]) -> float:
    return float(np.mean(path[len(path) // 2 :]))


def surrogate(periods: Mapping[str, float]) -> float:
    """The minimum of Σ f_i / g_i, where an unweighted run goes."""
    return sum(GOALS[name] / periods[name] for name in periods) / sum(1 / period for period in periods.values())


def test_fedavg_reaches_the_minimum() -> None:
    assert quadratics(FedAvg())[-1] == pytest.approx(2.0, abs=1e-9)


def test_fedfix_weighted_and_unweighted() -> None:
    """Measured in the sheet: 2.04 and 2.45 (theory 2.43) at half a second, 2.04 and 2.82 (2.81) at a fifth."""
    path = quadratics(FedFix(0.5))
    assert len(path) == 400
    assert abs(end(path) - 2.0) < 0.08
    assert np.std(path[200:]) == pytest.approx(0.07, abs=0.05)
    for seconds, theory in ((0.5, 2.43), (0.2, 2.81)):
        assert surrogate(FedFix(seconds).periods(TIMES_S)) == pytest.approx(theory, abs=0.005)
        assert abs(end(quadratics(FedFix(seconds, weighted=False))) - theory) < 0.05
        assert abs(end(quadratics(FedFix(seconds))) - 2.0) < 0.08


def test_async_weighted_and_identical() -> None:
    """Measured in the sheet: 2.02 and 2.81. Ours is 2.087 at η_g = 1, and 2.02 at 0.2: what is left falls with the step."""
    theory = surrogate(AsyncFedAvg().periods(TIMES_S))
    assert theory == pytest.approx(2.81, abs=0.005)
    assert abs(end(quadratics(AsyncFedAvg(weighted=False))) - theory) < 0.06
    left = {lr: end(quadratics(AsyncFedAvg(), 400.0, UNTIED_S, server_lr=lr)) - 2.0 for lr in (1.0, 0.2)}
    assert left[0.2] == pytest.approx(0.02, abs=0.005)
    assert left[1.0] == pytest.approx(5 * left[0.2], rel=0.2)


@pytest.mark.parametrize("lr", [1.0, 0.2])
@pytest.mark.parametrize("rule", [FedAvg(), AsyncFedAvg(), FedFix(0.5), FedFix(0.13), FedBuff(2), FedBuff(3)])
def test_what_clients_begin_from_averages_to_the_minimum(rule: Rule, lr: float) -> None:
    """Where the model only swings, Σ_n ω_i(n) Δ_i(n) adds up to nothing; with E ω_i ∝ p_i and Δ_i = c (goal_i - x) that says
    that the models which were *sent*, averaged over each client's work and then by importance, are at the minimum, at every η_g.
    The model after an aggregation need not be: it has just moved towards one client's goal, and fast clients' come oftener."""
    sent: dict[str, list[float]] = {name: [] for name in UNTIED_S}

    def noted(name: str) -> Any:
        def update(state: Any, arrays: Any, config: Any) -> tuple[Any, Any]:
            sent[name].append(float(arrays["x"][0]))
            return descent(GOALS[name])(state, arrays, config)

        return update

    clients = {name: SimulatedClient(noted(name), time_s, predicted_s=time_s) for name, time_s in UNTIED_S.items()}
    simulate(Server({"x": np.full(1, 2.5)}, rule, server_lr=lr), clients, max_s=300.0)
    assert np.mean([end(path) for path in sent.values()]) == pytest.approx(2.0, abs=4e-3)


def test_fedbuff_weighted_and_identical() -> None:
    theory = surrogate(FedBuff(2).periods(TIMES_S))
    assert theory == pytest.approx(2.65, abs=0.01)
    assert abs(end(quadratics(FedBuff(2, weighted=False))) - theory) < 0.06
    assert abs(end(quadratics(FedBuff(2))) - 2.0) < 0.08


def test_a_long_interval_is_fedavg_to_the_bit() -> None:
    expected = quadratics(FedAvg())
    assert quadratics(FedFix(1.0)) == expected
    assert quadratics(FedFix(7.0), max_s=1400.0) == expected
    assert quadratics(FedFix(0.9), max_s=180.0) != expected


@pytest.mark.parametrize("weighted", [True, False])
def test_a_short_interval_is_asynchronous(weighted: bool) -> None:
    """Where no two arrive within one interval, each aggregation holds one change, as at each arrival."""
    times_s = dict(zip(TIMES_S, (0.937, 0.762, 0.595, 0.392, 0.215)))
    asynchronous = quadratics(AsyncFedAvg(weighted=weighted), 20.0, times_s)
    fixed = quadratics(FedFix(1e-3, weighted=weighted), 20.0, times_s, server_lr=1.0 if weighted else 5.0)
    assert abs(len(fixed) - len(asynchronous)) <= 3  # those that fell into one interval
    assert fixed[:30] == pytest.approx(asynchronous[:30], **({"abs": 0.1} if weighted else {"rel": 1e-12}))
    fine, limit = FedFix(1e-5).periods(times_s), AsyncFedAvg().periods(times_s)
    assert [fine[name] for name in times_s] == pytest.approx([limit[name] for name in times_s], rel=1e-3)


def test_quotients_of_times_are_whole_where_they_mean_it() -> None:
    assert 0.6 / 0.2 != 3.0 or 1.2 / 0.4 != 3.0
    assert FedFix(0.2).periods({"a": 0.6, "b": 0.2, "c": 0.61}) == {"a": 3.0, "b": 1.0, "c": 4.0}
    assert FedFix(0.1).periods({"a": 0.6, "b": 0.2}) == {"a": 3.0, "b": 1.0}  # nobody delivers at every other tick


rules = st.one_of(
    st.just(AsyncFedAvg()),
    st.floats(0.05, 3.0).map(FedFix),
    st.integers(1, 7).map(FedBuff),
    st.just(FedAvg()),
)
speeds = st.lists(st.floats(0.1, 3.0), min_size=3, max_size=7)


@pytest.mark.slow  # whole simulated runs, twenty of them
@settings(max_examples=20, deadline=None)
@given(
    rule=rules, times=speeds, importances=st.lists(st.floats(0.1, 5.0), min_size=7, max_size=7), weighted=st.booleans()
)
def test_weights_over_a_run_are_in_proportion_to_importance(
    rule: Rule, times: list[float], importances: list[float], weighted: bool
) -> None:
    """Each client adds one to its own array: after the run the array holds the weights that it was given, added up."""
    rule = dataclasses.replace(rule, weighted=weighted)
    names = [f"c{k}" for k in range(len(times))]
    arrays = {name: np.zeros(1) for name in names}

    def marked(name: str) -> Any:
        return lambda state, arrays, config: ({each: np.full(1, float(each == name)) for each in names}, state)

    clients = {
        name: SimulatedClient(marked(name), time_s, importance, predicted_s=time_s)
        for name, time_s, importance in zip(names, times, importances)
    }
    server = simulate(Server(arrays, rule), clients, max_s=100 * max(times)).server
    given_weights = np.array([server.arrays[name][0] for name in names])
    wanted = np.array(importances[: len(names)])
    if not weighted:
        periods = rule.periods(dict(zip(names, times)))
        wanted = np.array([rule.identical(p, len(names)) for p in wanted / wanted.sum()])
        wanted = wanted / np.array([periods[name] for name in names])
    shares, goals = given_weights / given_weights.sum(), wanted / wanted.sum()
    np.testing.assert_allclose(shares, goals, rtol=0.05)


@pytest.mark.parametrize("rule", slow_but([FedFix(0.4)], [AsyncFedAvg(), FedFix(0.4), FedBuff(3)]))
@pytest.mark.parametrize("trust", [0.0, 5.0])
def test_measured_weights_become_unbiased_where_times_are_random_or_predictions_wrong(rule: Rule, trust: float) -> None:
    names = [f"c{k}" for k in range(6)]
    rng = {name: np.random.default_rng(k) for k, name in enumerate(names)}
    means = {name: 0.3 * 2**k / 4 for k, name in enumerate(names)}

    def marked(name: str) -> Any:
        return lambda state, arrays, config: ({each: np.full(1, float(each == name)) for each in names}, state)

    clients = {
        name: SimulatedClient(
            marked(name), lambda _, name=name: means[name] * float(rng[name].lognormal(0, 0.5)), predicted_s=1.0
        )
        for name in names
    }
    server = Server({name: np.zeros(1) for name in names}, rule, trust=trust)
    simulate(server, clients, max_s=600.0)
    weights = np.array([server.arrays[name][0] for name in names])
    np.testing.assert_allclose(weights / weights.sum(), np.full(6, 1 / 6), rtol=0.12)


def test_partial_rounds_ask_a_fraction_and_weigh_among_those() -> None:
    rule = FedAvg(fraction=0.5, seed=3)
    server = Server({"x": np.zeros(1)}, rule)
    for name, importance in zip("abcd", (1.0, 2.0, 3.0, 4.0)):
        server.enroll(name, importance)
    asked = server.ready()
    assert len(asked) == 2
    assert server.ready() == asked  # of one round, drawn once
    total = sum(server.clients.known[name].importance for name in asked)
    values = dict(zip(asked, (10.0, 20.0)))
    sent = {name: server.send(name) for name in asked}
    assert server.ready() == []
    for name in asked:
        found = server.receive({"x": np.array([values[name]])}, sent[name].version, name)
    assert found is not None
    expected = sum(values[name] * server.clients.known[name].importance / total for name in asked)
    assert found["x"][0] == pytest.approx(expected, rel=1e-15)
    drawn = {tuple(rule.chosen(list("abcd"), version)) for version in range(40)}
    assert len(drawn) == 6


@settings(max_examples=25, deadline=None)
@given(times=speeds, rule=rules, seed=st.integers(0, 2**31))
def test_a_replayed_order_of_arrivals_gives_the_same_bits(times: list[float], rule: Rule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=2)}
    goals = [rng.normal(size=(3, 2)).astype(np.float32) for _ in times]

    def update(goal: np.ndarray) -> Any:
        def run(state: Any, arrays: Any, config: Any) -> Any:
            count = state.get("count", 0)
            return {"w": (goal - arrays["w"]) / (count + 2), "b": 0.1 * arrays["b"]}, {"count": count + 1}

        return run

    updates = {f"c{k}": update(goal) for k, goal in enumerate(goals)}
    clients = {name: SimulatedClient(updates[name], time_s, predicted_s=time_s) for name, time_s in zip(updates, times)}
    recorded = simulate(Server(start, rule, keep_journal=True), clients, max_aggregations=30)
    again = Server(start, rule)
    for name, time_s in zip(updates, times):
        again.enroll(name, predicted_s=time_s)
    assert recorded.server.journal is not None
    states = replay(again, updates, recorded.server.journal)
    assert digest(again.arrays) == digest(recorded.server.arrays)
    assert states == recorded.states


def test_the_interval_that_is_proposed_lets_that_share_of_the_clients_finish() -> None:
    times_s = dict(zip("abcdefghij", range(1, 11)))
    for share in (0.1, 0.5, 0.95, 1.0):
        seconds = fedfix_interval_s(times_s, share)
        assert sum(time_s <= seconds for time_s in times_s.values()) == math.ceil(share * 10)


def test_settings_out_of_range_are_refused() -> None:
    for make in (
        lambda: FedFix(0.0),
        lambda: FedFix(math.inf),
        lambda: FedBuff(0),
        lambda: FedBuff(2.5),  # type: ignore[arg-type]
        lambda: FedAvg(0.0),
        lambda: fedfix_interval_s({"a": 1.0}, 0.0),
        lambda: Limits(ttl_s=0.0),
        lambda: Server({"x": np.zeros(1)}, FedAvg(), server_lr=0.0),
        lambda: Server({"x": np.zeros(1)}, FedAvg(), trust=-1.0),
        lambda: Server({"n": np.zeros(1, np.int64)}, FedAvg()),
        lambda: Server({}, FedAvg()),
        lambda: Server({"x": np.zeros(1)}, FedAvg()).enroll("a", -1.0),
        lambda: Server({"x": np.zeros(1)}, FedAvg()).send("nobody"),
        lambda: simulate(Server({"x": np.zeros(1)}, FedAvg()), {"a": SimulatedClient(descent(0.0))}),
        lambda: simulate(Server({"x": np.zeros(1)}, FedAvg()), {}, max_s=1.0),
        lambda: simulate(Server({"x": np.zeros(1)}, FedAvg()), {"a": SimulatedClient(descent(0.0), -1.0)}, max_s=1.0),
    ):
        with pytest.raises(UserError):
            make()
