"""The trace of real steps: rows of compute and of collectives for every rank, and the overlap that one can see there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.pool import Pool
from trainwright.cli import main
from trainwright.planner import schedule_of

Event = dict[str, Any]


def rows(document: Event, rank: int) -> dict[str, list[Event]]:
    """The spans of a rank by the name of their row."""
    events = [event for event in document["traceEvents"] if event["pid"] == rank]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(names[event["tid"]], []).append(event)
    return found


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def within(events: list[Event], outer: Event) -> list[Event]:
    return [event for event in events if outer["ts"] <= event["ts"] < end(outer)]


@pytest.fixture(scope="module")
def document(pool2: Pool, tmp_path_factory: pytest.TempPathFactory) -> Event:
    path = tmp_path_factory.mktemp("trace") / "step.json"
    assert pool2.run("tests.tracing_cases:traced", path=str(path), steps=4) == [True, True]
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("rank", [0, 1])
def test_compute_and_collectives_stand_on_rows_of_their_own(document: Event, rank: int) -> None:
    found = rows(document, rank)
    assert {event["cat"] for event in found["collectives"]} == {"collective"}
    assert {event["cat"] for event in found["compute"]} == {"step", "phase", "op", "wait"}
    steps = [event for event in found["compute"] if event["cat"] == "step"]
    assert [event["name"] for event in steps] == ["step 2", "step 3"], "the first two are measured, and not recorded"
    for step in steps:
        phases = [event["name"] for event in within(found["compute"], step) if event["cat"] == "phase"]
        assert phases[:3] == ["forward", "backward", "optimizer's step"]
    assert any(event["name"] == "aten::mm" for event in found["compute"])


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_travel_before_the_backward_has_ended(document: Event, rank: int) -> None:
    found = rows(document, rank)
    backwards = [event for event in found["compute"] if event["name"] == "backward"]
    assert len(backwards) == 2
    for backward in backwards:
        sums = [event for event in within(found["collectives"], backward) if event["name"] == "all_reduce"]
        assert len(sums) >= 3, "a bucket a region"
        products = [event for event in within(found["compute"], backward) if event["name"] == "aten::mm"]
        assert sum(event["ts"] > sums[0]["ts"] for event in products) > len(products) / 4
        assert all(event["args"]["bytes"] > 0 and event["dur"] > 0 for event in sums)


def test_spans_of_a_row_nest(document: Event) -> None:
    for rank in (0, 1):
        by_row: dict[int, list[Event]] = {}
        for event in document["traceEvents"]:
            if event["ph"] == "X" and event["pid"] == rank and event["cat"] == "collective":
                by_row.setdefault(event["tid"], []).append(event)
        for events in by_row.values():
            ordered = sorted(events, key=lambda event: event["ts"])
            assert all(end(one) <= other["ts"] + 1e-3 for one, other in itertools.pairwise(ordered))


def test_a_run_too_short_to_be_recorded_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", "zoo:gpt2-tiny", "--hardware", "cpu:1", "-o", str(plan)]) == 0
    train = ["train", "zoo:gpt2-tiny", "--plan", str(plan), "--trace", str(tmp_path / "trace.json")]
    assert main([*train, "--steps", "2"]) == 2
    assert "at least 3 steps are needed for --trace" in capsys.readouterr().err
    assert main([*train, "--steps", "3"]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_do_what_the_picture_of_their_plan_says(pool2: Pool, tmp_path: Path, schedule: str) -> None:
    model, batch = tw.zoo.build("gpt2-tiny")
    plan = tw.plan(
        model, batch, hardware="cpu:2", mesh=1, pipeline=2, micro_batches=4, pipeline_schedule=schedule, time_limit_s=20
    )
    timeline = schedule_of(plan)
    assert timeline is not None
    path = tmp_path / "stages.json"
    ended = pool2.run("tests.tracing_cases:traced_stages", path=str(path), plan=plan.to_json(), steps=3)
    assert ended == [True, True]
    for rank in (0, 1):
        found = rows(json.loads(path.read_text()), rank)["compute"]
        kinds = ("forward", "backward", "weight")
        done = [event["name"] for event in found if event["cat"] == "phase" and event["name"].split()[0] in kinds]
        planned = [f"{s.kind} {s.micro}" for s in timeline.spans if s.stage == rank and s.kind in kinds]
        assert [name for name in done if " " in name] == planned
        assert len(planned) == (12 if schedule == "zero-bubble" else 8)
