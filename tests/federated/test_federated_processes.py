"""`flwr run` in the local simulation, and deployed as SuperLink and SuperNodes in processes of their own: the same bits as here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flower_processes import APP, add_nodes, superlink
from trainwright import federated

SETTINGS = {
    "num-clients": 2,
    "num-aggregations": 4,
    "alpha": 0.5,
    "seed": 0,
    "optimizer": "adan",
    "lr": 0.01,
    "num-steps": 5,
}
RULES = {"fedfix": federated.FedFix(1.0), "fedbuff": federated.FedBuff(1), "fedspeed": federated.FedSpeedAverage()}


@pytest.fixture(scope="module")
def app() -> Iterator[None]:
    sys.path.insert(0, str(APP))
    yield
    sys.path.remove(str(APP))


def config(strategy: str, record: Path) -> tuple[str, dict[str, object]]:
    values = {**SETTINGS, "strategy": strategy, "seconds": 1.0, "size": 1, "record": str(record)}
    text = " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in values.items())
    return text, values


def digest_of_replay(record: dict[str, object], strategy: str, values: dict[str, object]) -> str:
    """The digest that the recorded order of arrivals gives in this process."""
    from federated_digits.client_app import work
    from federated_digits.task import build_model

    server = federated.Server(federated.model_arrays(build_model(0)), RULES[strategy], trust=20.0)
    for name, (importance, predicted_s) in record["clients"].items():
        server.enroll(name, importance, predicted_s)
    settings = tuple(sorted(values.items()))
    works = {name: work(int(name.removeprefix("partition-")), settings) for name in record["clients"]}
    federated.replay(server, works, [federated.Event(**event) for event in record["events"]])
    return federated.digest(server.arrays)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fedfix", "fedspeed"])
def test_the_local_simulation_gives_the_bits_of_its_order_of_arrivals(strategy: str, tmp_path: Path, app: None) -> None:
    text, values = config(strategy, tmp_path / "record.json")
    with superlink(tmp_path, "--simulation") as link:
        run_id = link.run(APP, text, "--federation-config", "num-supernodes=2")
        assert link.finished(run_id) == "finished:completed", link.logs()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["digest"] == digest_of_replay(record, strategy, values)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fedfix", "fedbuff"])
def test_three_processes_give_the_bits_of_their_order_of_arrivals(strategy: str, tmp_path: Path, app: None) -> None:
    text, values = config(strategy, tmp_path / "record.json")
    with superlink(tmp_path) as link:
        add_nodes(link, 2)
        assert len(link.processes) == 3
        run_id = link.run(APP, text)
        assert link.finished(run_id) == "finished:completed", link.logs()
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["clients"]) == 2
    assert record["digest"] == digest_of_replay(record, strategy, values)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_fails_is_seen_to_have_failed(tmp_path: Path) -> None:
    """`flwr run` itself ends with 0."""
    text, _ = config("poem", tmp_path / "record.json")
    with superlink(tmp_path, "--simulation") as link:
        run_id = link.run(APP, text, "--federation-config", "num-supernodes=2")
        assert link.finished(run_id) == "finished:failed"
