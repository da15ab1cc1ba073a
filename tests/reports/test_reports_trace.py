"""The trace of a simulated step: spans that nest, durations that add up to the step, the memory beside them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from tests import report_samples as samples
from trainwright.artifacts import MemoryPoint, UserError
from trainwright.reports.trace import trace_events

PATHS = ["", "h.0", "h.0.fc", "h.1", "h.1.fc.0", "h.1.fc.1", "head", "0", "0.1"]


def spans(events, kind: str | None = None) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and kind in (None, event["cat"])]


def bounds_ns(span) -> tuple[int, int]:
    start = round(1000 * span["ts"])
    return start, start + round(1000 * span["dur"])


def assert_nested(events) -> None:
    """Of any two spans one lies in the other, or they do not overlap; an outer one comes first."""
    open_until: list[int] = []
    ordered = spans(events)
    assert ordered == sorted(ordered, key=lambda span: (span["ts"], -span["dur"]))
    for span in ordered:
        start, end = bounds_ns(span)
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert start < end
        assert not open_until or end <= open_until[-1], span
        open_until.append(end)


def profile_of(points: list[MemoryPoint]):
    return samples.profile(timeline=tuple(points), step_s=sum(point.time_s for point in points))


@given(st.lists(st.tuples(st.sampled_from(PATHS), st.floats(0, 1e-3), st.integers(0, 2)), min_size=1, max_size=40))
def test_spans_nest_and_add_up_whatever_the_order_of_modules(drawn) -> None:
    phases = ("forward", "backward", "update")
    rows = sorted(drawn, key=lambda row: row[2])
    points = [
        MemoryPoint(phase=phases[phase], op="aten.mm", path=path, live_bytes=7, time_s=time_s)
        for path, time_s, phase in rows
    ]
    events = trace_events(profile_of(points))
    assert_nested(events)
    total_ns = round(1e9 * sum(point.time_s for point in points))
    assert sum(round(1000 * span["dur"]) for span in spans(events, "op")) == pytest.approx(total_ns, abs=1)
    for span in spans(events, "op"):
        start, end = bounds_ns(span)
        around = [each for each in spans(events, "module") if bounds_ns(each)[0] <= start and end <= bounds_ns(each)[1]]
        inner = max(around, key=lambda each: len(each["args"]["module"]), default=None)
        assert (inner["args"]["module"] if inner else "") == span["args"]["module"]


def test_a_real_profile_as_a_trace(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    found = tw.profile(model, (torch.ones(4, 6),), loss_fn=lambda out, batch: out.sum(), hardware="cpu:1")
    found.to_trace(tmp_path / "step.json")
    document = json.loads((tmp_path / "step.json").read_text(encoding="utf8"))
    events = document["traceEvents"]
    assert_nested(events)
    (step,) = spans(events, "step")
    assert step["dur"] == pytest.approx(1e6 * found.step_s, abs=1e-3)
    assert [span["name"] for span in spans(events, "phase")] == ["forward", "backward", "update"]
    assert sum(span["dur"] for span in spans(events, "op")) == pytest.approx(1e6 * found.step_s, abs=1e-3)
    assert {span["name"] for span in spans(events, "module")} == {"0", "1", "2"}
    counters = [event for event in events if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) <= found.peak_bytes
    assert counters[0]["args"]["param"] == found.param_bytes
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(counters))


def test_without_times_it_says_what_is_needed(tmp_path) -> None:
    with pytest.raises(UserError, match="--hardware"):
        samples.profile().to_trace(tmp_path / "step.json")
    with pytest.raises(UserError, match="--hardware"):
        trace_events(samples.profile(step_s=1.0, timeline=()))
    assert not (tmp_path / "step.json").exists()


def test_what_is_no_path_cannot_be_written(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        samples.asked_profile().to_trace(tmp_path)
