"""What a server refuses, gives up, clips and saves; clients that are away; importing without Flower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.federated_cases import start, towards
from trainwright.artifacts import Refusal, UserError
from trainwright.federated import (
    AsyncFedAvg,
    FedAvg,
    FedBuff,
    FedFix,
    FedSpeedAverage,
    Limits,
    Rule,
    Server,
    SimulatedClient,
    digest,
    load_extra,
    load_server,
    norm,
    save_server,
    simulate,
)

ROOT = Path(__file__).resolve().parents[2]
TIMES_S = {"a": 1.0, "b": 0.7, "c": 0.45}


def clients(**changed: Any) -> dict[str, SimulatedClient]:
    return {
        name: SimulatedClient(towards(k), TIMES_S[name], predicted_s=TIMES_S[name], **changed.get(name, {}))
        for k, name in enumerate(TIMES_S)
    }


def asked(rule: Rule, **options: Any) -> Server:
    server = Server(start(), rule, **options)
    for name, time_s in TIMES_S.items():
        server.enroll(name, predicted_s=time_s)
    for name in server.ready():
        server.send(name)
    return server


def change(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"w": np.full((3, 2), value, np.float32), "b": np.full(2, value)}


BAD: dict[str, Any] = {
    "w holds what is not finite": {**change(), "w": np.full((3, 2), np.nan, np.float32)},
    "b holds what is not finite": {**change(), "b": np.array([1.0, np.inf])},
    "w has the shape [2, 3], the model's is [3, 2]": {**change(), "w": np.zeros((2, 3), np.float32)},
    "its arrays are others: lacks b": {"w": change()["w"]},
    "its arrays are others: has more": {**change(), "more": np.zeros(1)},
    "b is no array of floating point": {**change(), "b": [1.0, 1.0]},
    "arrays by name are needed, it sent a NoneType": None,
}


@pytest.mark.parametrize("rule", [FedAvg(), FedFix(0.5), AsyncFedAvg(), FedBuff(2)])
@pytest.mark.parametrize("reason", BAD)
def test_a_bad_change_is_refused_by_name_and_the_others_count(rule: Rule, reason: str) -> None:
    server, whole = asked(rule), asked(rule)
    assert server.receive(BAD[reason], 0, "b") is None
    assert str(server.refusals[0]) == f"client b, version 0: {reason}"
    assert digest(server.arrays) == digest(whole.arrays)
    for name in ("a", "c"):
        server.receive(change(), 0, name)
    if isinstance(rule, FedFix):
        server.tick()
    assert server.version > 0
    assert all(np.isfinite(value).all() for value in server.arrays.values())
    assert "b" in server.ready() or rule.is_synchronous


def test_what_was_not_sent_is_refused() -> None:
    server = asked(FedFix(1.0), limits=Limits(ttl_s=10.0, max_gap=2))
    for version, client, now_s, reason in (
        (0, "nobody", 0.0, "no such client is enrolled"),
        (5, "a", 0.0, "the version is not one it was sent"),
        (0, "a", 0.0, None),
        (0, "a", 0.0, "it was sent twice"),
        (0, "b", 11.0, "it is past its time to live, 10 s"),
        (0, "b", 12.0, "it is past its time to live"),
    ):
        before = len(server.refusals)
        server.receive(change(), version, client, now_s)
        refused = server.refusals[before:]
        assert [each.reason for each in refused] == ([reason] if reason else [])
    server.tick()
    for _ in range(2):
        server.send("a")
        server.receive(change(), server.version, "a")
        server.tick()
    server.receive(change(), 0, "c")
    assert server.refusals[-1].reason == "it is 4 aggregations old, the most is 2"


def test_a_round_goes_on_without_those_past_their_time_to_live() -> None:
    server = asked(FedAvg(), limits=Limits(ttl_s=2.0))
    server.receive(change(3.0), 0, "a", 1.0)
    assert server.expire(1.9) is None
    found = server.expire(2.1)
    assert found is not None
    np.testing.assert_allclose(found["b"] - start()["b"], 3.0)
    assert set(server.ready()) == {"a", "b", "c"}


def test_a_round_of_refusals_alone_is_asked_anew() -> None:
    server = asked(FedAvg())
    for name in TIMES_S:
        server.receive(None, 0, name)
    assert server.version == 1
    assert digest(server.arrays) == digest(Server(start(), FedAvg()).arrays)
    assert len(server.ready()) == 3


def test_large_changes_are_scaled_down() -> None:
    server = asked(AsyncFedAvg(weighted=False), limits=Limits(max_norm=0.5))
    before = {name: np.array(value) for name, value in server.arrays.items()}
    server.receive(change(100.0), 0, "a")
    moved = {name: server.arrays[name] - before[name] for name in before}
    assert norm(moved) == pytest.approx(0.5, rel=1e-6)
    assert server.traffic.num_clipped == 1
    server.receive(change(1e-3), 0, "b")
    assert server.traffic.num_clipped == 1


def test_a_run_that_diverges_says_so() -> None:
    server = asked(AsyncFedAvg(weighted=False))
    huge = change(3e38)
    server.receive(huge, 0, "a")
    with pytest.raises(Refusal, match="diverged at aggregation 2: w is no longer finite; try a smaller"):
        server.receive(huge, 0, "b")


def test_bytes_are_counted() -> None:
    run = simulate(Server(start(), FedFix(0.5)), clients(), max_aggregations=8)
    size, traffic = 3 * 2 * 4 + 2 * 8, run.server.traffic
    assert (traffic.bytes_down, traffic.bytes_up) == (size * traffic.num_sent, size * traffic.num_received)
    assert traffic.num_sent >= traffic.num_received == run.num_updates


def test_a_server_writes_into_nobodys_arrays() -> None:
    given_arrays, delta = start(), change()
    server = asked(AsyncFedAvg())
    kept = digest(delta)
    server.receive(delta, 0, "a")
    assert digest(delta) == kept
    assert digest(given_arrays) == digest(start())
    with pytest.raises(ValueError, match="read-only"):
        server.arrays["b"][0] = 1.0


@settings(max_examples=20, deadline=None)
@given(
    rule=st.sampled_from([FedAvg(), FedAvg(0.5), FedFix(0.4), AsyncFedAvg(), FedBuff(2), FedSpeedAverage()]),
    stop=st.integers(1, 12),
    sigma=st.sampled_from([0.0, 0.4]),
)
def test_a_saved_server_goes_on_as_if_it_had_not_been_killed(
    rule: Rule, stop: int, sigma: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saved after an aggregation and loaded into a new process's server, under the same arrivals: the same bits."""
    path = tmp_path_factory.mktemp("state") / "server.safetensors"
    server = Server(start(), rule, trust=4.0)
    held: list[Server] = []

    def kill(server: Server, now_s: float) -> None:
        if server.version == stop:
            save_server(server, path, {"now_s": now_s})
            held.append(load_server(path, rule, trust=4.0))

    everyone = clients()
    simulate(server, everyone, max_aggregations=stop + 1, callback=kill)
    (loaded,) = held
    assert loaded.version == stop
    assert load_extra(path)["now_s"] > 0
    for one in (loaded, load_server(path, rule, trust=4.0)):
        for name in list(one.outstanding):
            one.receive(change(0.5), one.outstanding[name].version, name, 9.0)
        one.tick(9.0)
        for name in one.ready():
            one.send(name, 10.0)
            one.receive(change(0.25), one.version, name, 11.0)
        one.tick(12.0)
    again = load_server(path, rule, trust=4.0)
    assert again.outstanding.keys() == {name for name in TIMES_S if name in again.outstanding}
    assert json.dumps(again.clients.as_json()) == json.dumps(held[0].clients.as_json()) or held[0].version > stop


def test_what_was_outstanding_is_accepted_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    server = asked(FedFix(1.0))
    server.receive(change(), 0, "a")
    server.tick()
    save_server(server, path)
    server.send("a")  # after the save: the restarted server does not know of it
    loaded = load_server(path, FedFix(1.0))
    assert loaded.outstanding.keys() == {"b", "c"}
    assert loaded.ready() == ["a"]
    loaded.receive(change(), 0, "b")
    assert not loaded.refusals
    loaded.receive(change(), 1, "a")
    assert loaded.refusals[0].reason == "the version is not one it was sent"


def test_the_saved_duals_come_back(tmp_path: Path) -> None:
    server = asked(FedSpeedAverage())
    for name in TIMES_S:
        server.receive(change(), 0, name)
    save_server(server, tmp_path / "s.safetensors")
    loaded = load_server(tmp_path / "s.safetensors", FedSpeedAverage())
    for one in (server, loaded):
        for name in one.ready():
            one.send(name)
        for name in TIMES_S:
            one.receive(change(0.5), 1, name)
    assert digest(loaded.arrays) == digest(server.arrays)
    np.testing.assert_allclose(server.memory["duals"].values["b"], 4.5)


def test_files_that_are_no_state_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    server, path = asked(FedFix(1.0)), tmp_path / "s.safetensors"
    save_server(server, path)
    with pytest.raises(UserError, match=r"the rule that .* was saved with is needed, FedFix"):
        load_server(path, FedFix(2.0))
    with pytest.raises(UserError, match="the rule that"):
        load_server(path, FedAvg())
    for content in (b"", b"junk" * 10, path.read_bytes()[:50]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match="is not one"):
            load_server(tmp_path / "bad", FedFix(1.0))
    save_file({"w": np.zeros(1)}, tmp_path / "other")
    with pytest.raises(UserError, match="is not one"):
        load_server(tmp_path / "other", FedFix(1.0))
    save_file(
        {"w": np.zeros(1)}, tmp_path / "new", metadata={"trainwright.federated": json.dumps({"format_version": 99})}
    )
    with pytest.raises(UserError, match="has 99"):
        load_server(tmp_path / "new", FedFix(1.0))
    with pytest.raises(UserError, match="cannot be"):
        save_server(server, tmp_path / "bad" / "under" / "a-file")


def test_a_kill_while_saving_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, path = asked(FedFix(1.0)), tmp_path / "s.safetensors"
    save_server(server, path)
    kept = path.read_bytes()

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_server(server, path)
    assert path.read_bytes() == kept


def test_a_client_that_is_away_delivers_when_it_is_back() -> None:
    away = clients(c={"away": ((0.2, 5.0),)})
    server = Server(start(), FedFix(0.5), keep_journal=True)
    simulate(server, away, max_s=8.0)
    assert server.journal is not None
    first = next(event for event in server.journal if event.kind == "receive" and event.client == "c")
    assert first.version == 0
    assert 5.0 < first.now_s < 5.5
    refusing = simulate(Server(start(), FedFix(0.5), limits=Limits(ttl_s=2.0)), away, max_s=8.0).server
    assert {refused.client for refused in refusing.refusals} == {"c"}
    assert refusing.clients.known["c"].num_accepted > 2  # it was asked anew once it was back
    waiting = simulate(Server(start(), FedAvg(), limits=Limits(ttl_s=2.0)), away, max_s=8.0).server
    assert waiting.version >= 4


def test_a_run_in_which_nothing_can_happen_ends() -> None:
    lost = {"a": SimulatedClient(towards(0), 1.0, away=((0.5, 1e12),))}
    run = simulate(Server(start(), FedAvg()), lost, max_s=10.0)
    assert run.now_s == 10.0
    assert run.num_updates == 0


def test_the_core_needs_no_flower() -> None:
    script = """
import sys
sys.modules["flwr"] = None
import trainwright.federated as federated
assert federated.Server and federated.table()
assert not any(name.startswith("ray") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_listing_is_what_the_records_say() -> None:
    from trainwright import federated
    from trainwright.cli.listings import listing

    assert len(federated.table()) == 6
    assert federated.table() == listing("federated"), "the records changed: run python -m trainwright.cli.listings"
    for record in federated.records():
        assert record.cls.__doc__, record.name
        assert record.paper, record.name


@pytest.mark.parametrize("rule", [FedFix(0.5), FedSpeedAverage()])
def test_bytes_kept_and_sent_are_those_of_the_records(rule: Rule) -> None:
    """P and B/param of the table, against what a server holds after some aggregations."""
    from trainwright import federated

    arrays = {"w": np.zeros((50, 20), np.float32)}
    everyone = {
        f"c{k}": SimulatedClient(lambda state, arrays, config: ({"w": arrays["w"] + 1}, state)) for k in range(3)
    }
    server = simulate(Server(arrays, rule), everyone, max_aggregations=4).server
    (record,) = [each for each in federated.records() if each.cls is type(rule)]
    copies, wide = record.server_state.split(" P + ")
    sums = sum(
        value.nbytes for total in (server._round.total, *server.memory.values()) for value in total.values.values()
    )
    assert int(copies) * 4000 == sum(value.nbytes for value in server.arrays.values())
    assert int(wide.split()[0]) * 1000 == sums
    assert (record.up, record.down) == ("P", "P")
    assert server.traffic.bytes_up == 4000 * server.traffic.num_received
