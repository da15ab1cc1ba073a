"""Flower's Message API in one process: real messages and apps on a counted clock give the bits that the simulation gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tests.federated_cases import start, towards
from tests.federated_grid import START_S, CountedGrid, Node, node
from trainwright import federated
from trainwright.federated import Limits, Server, SimulatedClient, digest, replay, simulate
from trainwright.federated.flower import AsyncFedAvg, FedAvg, FedBuff, FedFix, ServerStrategy, client_app
from trainwright.federated.flower.content import array_record, arrays_of

SECONDS = {1: 1.01, 2: 0.83, 3: 0.61, 4: 0.37, 5: 0.23}


def app(**described: Any) -> ClientApp:
    return client_app(
        lambda context: towards(int(context.node_config["partition-id"])),
        lambda context: {
            "num-examples": int(context.node_id),
            "predicted-s": SECONDS[int(context.node_id)],
            "name": f"c{context.node_id}",
            **described,
        },
    )


def grid_of(one: Any | None = None, **options: Any) -> CountedGrid:
    return CountedGrid({number: node(one or app(), number, time_s) for number, time_s in SECONDS.items()}, **options)


def run(strategy_of: Any, grid: CountedGrid | None = None, num_rounds: int = 25, **settings: Any) -> ServerStrategy:
    grid = grid or grid_of()
    strategy = strategy_of(timing=grid.timing(), keep_journal=True, min_available_nodes=5, **settings)
    result = strategy.start(grid, array_record(start()), num_rounds=num_rounds, timeout=1e6)
    assert result.arrays is not None
    assert digest(arrays_of(result.arrays)) == digest(strategy.server.arrays)
    return strategy


STRATEGIES = {
    "fedfix": lambda **settings: FedFix(0.4, **settings),
    "fedbuff": lambda **settings: FedBuff(2, **settings),
    "async": lambda **settings: AsyncFedAvg(**settings),
    "fedavg": lambda **settings: FedAvg(**settings),
    "fedavg, half": lambda **settings: FedAvg(0.5, seed=3, **settings),
}
every = pytest.mark.parametrize("name", STRATEGIES)


@every
def test_the_bits_are_those_of_the_simulated_clock(name: str) -> None:
    """The simulation knows nothing of Flower; the recorded order of arrivals is not used either."""
    strategy = run(STRATEGIES[name])
    clients = {
        f"c{number}": SimulatedClient(towards(number), time_s, importance=number, predicted_s=time_s)
        for number, time_s in SECONDS.items()
    }
    simulated = simulate(Server(start(), strategy.rule, trust=20.0), clients, max_aggregations=25)
    assert digest(strategy.server.arrays) == digest(simulated.server.arrays)
    assert digest(strategy.server.arrays) != digest(start())


@every
def test_a_journal_repeats_the_run(name: str) -> None:
    strategy = run(STRATEGIES[name])
    again = Server(start(), strategy.rule, trust=20.0)
    for number, time_s in SECONDS.items():
        again.enroll(f"c{number}", number, time_s)
    replay(again, {f"c{number}": towards(number) for number in SECONDS}, strategy.server.journal)
    assert digest(again.arrays) == digest(strategy.server.arrays)


def test_a_message_has_a_version_and_a_time_to_live() -> None:
    grid = grid_of()
    run(STRATEGIES["fedfix"], grid, limits=Limits(ttl_s=30.0))
    trained = [message for message in grid.pushed if message.metadata.message_type == "train"]
    assert {message.metadata.ttl for message in trained} == {30.0}
    versions = [message.content["config"]["version"] for message in trained]
    assert versions == sorted(versions)
    assert len(set(versions)) > 5
    assert {message.content["config"]["server-round"] for message in trained} == set(versions)
    assert {message.metadata.group_id for message in trained} == set(map(str, versions))


def test_the_interval_follows_from_what_the_nodes_predict(tmp_path: Any) -> None:
    """Three of five finish within 0.61 s; a killed server goes on with the interval that it had chosen."""
    path = tmp_path / "server.safetensors"
    chosen = run(lambda **settings: FedFix(**settings), state_path=path)
    assert chosen.server.rule.interval_s == SECONDS[3]
    assert digest(chosen.server.arrays) == digest(run(lambda **settings: FedFix(0.61, **settings)).server.arrays)
    resumed = run(lambda **settings: FedFix(**settings), num_rounds=27, state_path=path)
    assert (resumed.server.version, resumed.server.rule.interval_s) == (27, SECONDS[3])
    silent = client_app(lambda context: towards(int(context.node_config["partition-id"])))
    with pytest.raises(federated.server.UserError, match="FedFix needs the seconds between two aggregations"):
        run(lambda **settings: FedFix(**settings), grid_of(silent))


def spoil(grid: CountedGrid, at: int, how: Any) -> None:
    """Change the answer of node 3 to version `at`."""

    def tamper(message: Message, reply: Message) -> Message | None:
        is_asked = message.metadata.message_type == "train" and message.metadata.dst_node_id == 3
        if is_asked and message.content["config"]["version"] >= at and not done:
            done.append(1)
            return how(message, reply)
        return reply

    done: list[int] = []
    grid.tamper = tamper


def with_arrays(change: Any) -> Any:
    def how(message: Message, reply: Message) -> Message:
        content = RecordDict(dict(reply.content))
        content["arrays"] = array_record(change(arrays_of(reply.content["arrays"])))
        return Message(content, reply_to=message)

    return how


def with_version(message: Message, reply: Message) -> Message:
    content = RecordDict(dict(reply.content))
    content["config"] = ConfigRecord({**dict(content["config"]), "version": 10_000})
    return Message(content, reply_to=message)


FAULTS = {
    "w holds what is not finite": with_arrays(lambda arrays: {**arrays, "w": arrays["w"] * np.nan}),
    "w has the shape": with_arrays(lambda arrays: {**arrays, "w": np.zeros((2, 2), np.float32)}),
    "its arrays are others": with_arrays(lambda arrays: {"w": arrays["w"]}),
    "b is no array of floating point": with_arrays(lambda arrays: {**arrays, "b": np.zeros(2, np.int64)}),
    "it answers version 10000, which is not the one it was sent": with_version,
}


@pytest.mark.parametrize("reason", FAULTS)
@pytest.mark.parametrize("name", ["fedfix", "fedavg", "async"])
def test_a_bad_reply_is_refused_by_name_and_the_run_goes_on(name: str, reason: str) -> None:
    grid = grid_of()
    spoil(grid, 3, FAULTS[reason])
    strategy = run(STRATEGIES[name], grid, limits=Limits(ttl_s=3.0))
    (refused,) = strategy.server.refusals
    assert refused.client == "c3"
    assert reason in refused.reason
    assert strategy.server.version == 25
    assert all(np.isfinite(value).all() for value in strategy.server.arrays.values())


def test_an_app_that_fails_is_refused_with_its_words() -> None:
    failing = app()

    def fails(message: Message, context: Any) -> Message:
        if message.metadata.message_type == "train" and context.node_id == 2:
            raise RuntimeError("no disk")
        return failing(message, context)

    strategy = run(STRATEGIES["fedfix"], grid_of(fails))
    assert {refused.client for refused in strategy.server.refusals} == {"c2"}
    assert "its app failed: RuntimeError: no disk" in strategy.server.refusals[0].reason


def test_an_answer_that_never_comes_is_given_up_and_the_client_asked_anew() -> None:
    grid = grid_of()
    spoil(grid, 3, lambda message, reply: None)
    strategy = run(STRATEGIES["fedavg"], grid, limits=Limits(ttl_s=3.0))
    journal = strategy.server.journal
    (expired,) = [event for event in journal if event.kind == "expire"]
    assert expired.client == "c3"
    later = [event for event in journal if event.kind == "receive" and event.version > expired.version]
    assert "c3" in {event.client for event in later}


def test_a_client_that_was_away_comes_back_with_an_old_version() -> None:
    grid = grid_of()
    grid.nodes[3].away = ((START_S + 0.3, START_S + 4.3),)
    kept = run(STRATEGIES["fedfix"], grid).server
    gaps = [event for event in kept.journal if event.client == "c3" and event.kind == "receive"]
    assert not kept.refusals
    assert gaps[0].now_s > 4
    grid = grid_of()
    grid.nodes[3].away = ((START_S + 0.3, START_S + 4.3),)
    refusing = run(STRATEGIES["fedfix"], grid, limits=Limits(ttl_s=2.0)).server
    assert any("time to live" in refused.reason and refused.client == "c3" for refused in refusing.refusals)


def test_a_node_that_comes_late_joins() -> None:
    grid = grid_of()
    grid.nodes[6] = node(client_app(lambda context: towards(6)), 6, 0.5, away=((0.0, START_S + 3.0),))
    server = run(STRATEGIES["fedfix"], grid).server
    assert server.clients.known["partition-6"].num_accepted > 3
    assert min(event.now_s for event in server.journal if event.client == "partition-6") >= 3.0


def test_ordinary_flower_clients_that_send_their_model_give_the_same() -> None:
    def model_of(message: Message, context: Any) -> Message:
        reply = app()(message, context)
        if message.metadata.message_type != "train":
            return reply
        sent, delta = arrays_of(message.content["arrays"]), arrays_of(reply.content["arrays"])
        content = {
            "arrays": ArrayRecord({key: array_record({key: sent[key] + delta[key]})[key] for key in sent}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    one, other = run(STRATEGIES["fedfix"]), run(STRATEGIES["fedfix"], grid_of(model_of))
    assert not other.server.refusals
    for key, value in one.server.arrays.items():
        np.testing.assert_allclose(other.server.arrays[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fedfix", "fedbuff"])
def test_a_server_that_was_killed_goes_on_from_its_last_aggregation(name: str, tmp_path: Any) -> None:
    """In the same run: messages that are out are still answered, and what is refused is refused by the same names."""
    path = tmp_path / "state" / "server.safetensors"
    expected = run(STRATEGIES[name]).server

    class Killed(Exception):
        pass

    def kill(version: int, arrays: ArrayRecord) -> None:
        if version == 10:
            raise Killed

    grid = grid_of()
    settings = {"timing": grid.timing(), "min_available_nodes": 5, "state_path": path, "keep_journal": True}
    with pytest.raises(Killed):
        STRATEGIES[name](**settings).start(grid, array_record(start()), 25, 1e6, evaluate_fn=kill)
    resumed = STRATEGIES[name](**settings)
    assert path.exists()
    resumed.start(grid, array_record(start(9)), 25, 1e6)
    assert resumed.server.version == 25
    assert not resumed.server.refusals
    early = [event for event in resumed.server.journal if event.kind == "receive" and event.version < 10]
    assert early, "answers to what was out when the server was killed"
    assert resumed.server.clients.known.keys() == expected.clients.known.keys()
    other = grid_of(run_id=8)  # of another run: the old messages cannot be asked for
    settings["timing"] = other.timing()
    again = STRATEGIES[name](**settings)
    again.start(other, array_record(start(9)), 30, 1e6)
    assert again.server.version == 30


def test_metrics_and_evaluation_are_in_the_result() -> None:
    grid = grid_of()
    strategy = FedFix(0.4, timing=grid.timing(), min_available_nodes=5)
    result = strategy.start(
        grid, array_record(start()), 6, 1e6, evaluate_fn=lambda version, arrays: MetricRecord({"version": version})
    )
    assert [record["version"] for record in result.evaluate_metrics_serverapp.values()] == list(range(7))
    assert set(result.train_metrics_clientapp) == set(range(1, 7))
    assert all(set(record) == {"loss"} for record in result.train_metrics_clientapp.values())


def test_a_node_that_describes_itself_wrongly_is_refused_and_not_asked_again() -> None:
    wrong = client_app(lambda context: towards(6), lambda context: {"num-examples": 0, "name": "empty"})
    grid = grid_of()
    grid.nodes[6] = node(wrong, 6, 0.5)
    server = run(STRATEGIES["fedfix"], grid).server
    assert [refused.client for refused in server.refusals] == ["empty"]
    assert "above 0" in server.refusals[0].reason
    assert len([message for message in grid.pushed if message.metadata.dst_node_id == 6]) == 1


def test_names_are_told_apart() -> None:
    server = run(STRATEGIES["fedavg"], grid_of(app(name="twin")), num_rounds=2).server
    assert len(server.clients) == 5
    assert "twin" in server.clients.known


def test_the_adapter_names_the_extra_where_flower_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    for name in [name for name in sys.modules if name.startswith("trainwright.federated.flower")]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "flwr" else found(name, *rest))
    with pytest.raises(federated.server.UserError, match=r"pip install 'trainwright\[federated\]'"):
        importlib.import_module("trainwright.federated.flower")


def test_the_grid_of_these_tests_keeps_time() -> None:
    grid = grid_of()
    assert isinstance(grid.nodes[1], Node)
    run(STRATEGIES["fedavg"], grid, num_rounds=3)
    assert grid.now_s - START_S == pytest.approx(3.0, abs=0.2)
