"""Plans of mixtures of experts: what is in the space, what is promised of rows that depend on the data, and what is kept of it."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.arguments import as_imbalance
from trainwright.artifacts import UserError
from trainwright.models import zoo
from trainwright.planner.budget import RESERVE_BYTES
from trainwright.reports.splits import legend


@cache
def planned(split: str, imbalance: float | str = 1.25) -> tw.Plan:
    pin = f"model.layers.*.mlp.experts:experts=shard({split})@cpu"
    return tw.plan(*zoo.build("gpt-oss-tiny"), hardware="cpu:2", pins=pin, expert_imbalance=imbalance)


def _split_of(plan: tw.Plan) -> set[str]:
    return {split for key, op in plan.modules.items() if key.endswith(":experts") for split in op.split}


@pytest.mark.parametrize("split", slow_but(["t.0+e"], ["f", "e", "t.0+e"]))
def test_each_split_can_be_pinned_and_says_what_it_promises(split: str) -> None:
    plan = planned(split)
    assert _split_of(plan) == {split}
    promises = [note for note in plan.notes if "even share" in note]
    assert bool(promises) == ("e" in split)
    assert any("expert" in meaning for loop, meaning in legend(plan) if loop == split)
    assert plan.expert_imbalance == 1.25
    assert tw.Plan.parse(plan.to_json()) == plan


def test_more_imbalance_is_planned_with_more_memory_and_time() -> None:
    some, worst = planned("t.0+e"), planned("t.0+e", "worst")
    assert some.predicted.peak_bytes < worst.predicted.peak_bytes
    assert some.predicted.step_s < worst.predicted.step_s
    assert any("however" in note for note in worst.notes)
    assert worst.imbalance == math.inf


@pytest.mark.parametrize("split", ["t.0+e", pytest.param("e", marks=pytest.mark.slow)])
def test_the_peak_is_that_of_the_rows_that_were_sent(pool2: Pool, split: str) -> None:
    plan = planned(split, "worst")
    for found in pool2.run("tests.expert_cases:peaks", timeout_s=200, model="gpt-oss-tiny", plan=plan.to_json()):
        assert found["counts"][0], "rows are counted"
        assert found["measured"] <= found["promised"]
        assert abs(found["measured"] - found["known"]) <= 64, found


def test_splits_of_known_rows_count_nothing(pool2: Pool) -> None:
    for found in pool2.run(
        "tests.expert_cases:peaks", timeout_s=200, model="gpt-oss-tiny", plan=planned("f").to_json()
    ):
        assert found["counts"] == [{}, {}]
        assert abs(found["measured"] - found["promised"]) <= 64, found


@pytest.mark.slow
def test_verify_predicts_the_peak_anew_for_the_rows_that_were_sent(pool2: Pool) -> None:
    """Within what real ranks take beside tensors."""
    plan = planned("t.0+e", "worst").to_json()
    for found in pool2.run("tests.expert_cases:reported", timeout_s=200, model="gpt-oss-tiny", plan=plan):
        assert found["passed"]
        assert found["expert_imbalance"] > 1.0
        assert len(found["routed_peak_bytes"]) == 2
        for measured, known in zip(found["peak_bytes"], found["routed_peak_bytes"]):
            assert measured <= found["predicted_peak_bytes"]
            assert abs(measured - known) <= RESERVE_BYTES, found


def test_going_over_is_told_or_stops_all_ranks(pool2: Pool) -> None:
    plan = planned("t.0+e").to_json()
    for found in pool2.run("tests.expert_cases:skewed", timeout_s=100, plan=plan, policy="warn"):
        assert found["factors"] == pytest.approx([2.0] * 3, abs=0.05)
    for found in pool2.run("tests.expert_cases:skewed", timeout_s=100, plan=plan, policy="stop"):
        assert "2 × their even share" in found["refused"]
        assert "step 0" in found["refused"]
        assert found["same"], "the update is not made"


def test_rows_beyond_the_plan_are_computed_in_pieces_or_dropped(pool2: Pool) -> None:
    plan = planned("t.0+e")
    warned, pieces, dropped = (
        pool2.run("tests.expert_cases:limited", timeout_s=100, plan=plan.to_json(), limit=limit)
        for limit in ("none", "pieces", "drop")
    )
    promised = plan.predicted.peak_bytes
    for place in range(2):
        assert warned[place]["factor"] == pieces[place]["factor"] == dropped[place]["factor"]
        assert pieces[place]["losses"] == pytest.approx(warned[place]["losses"], rel=1e-6)
        for name, gradient in warned[place]["gradients"].items():
            torch.testing.assert_close(torch.tensor(pieces[place]["gradients"][name]), torch.tensor(gradient))
        assert pieces[place]["peak"] <= promised
        assert dropped[place]["peak"] <= promised
        assert dropped[place]["losses"] != pytest.approx(warned[place]["losses"], rel=1e-6)
    assert max(each["peak"] for each in warned) > promised
    rows, excess = (sum(each["rows"][at] for each in dropped) for at in range(2))
    assert excess / rows == pytest.approx(1 - 1.25 / 2, abs=0.01), (
        "the first rank may have 1.25 of the 2 shares that it is sent"
    )


@pytest.mark.parametrize("imbalance", [1.0, 1.25])
@pytest.mark.parametrize("limit", ["none", "pieces", "drop"])
def test_what_is_left_of_skewed_rows_is_computed_exactly(pool2: Pool, limit: str, imbalance: float) -> None:
    first, second = pool2.run("tests.expert_cases:routes", timeout_s=100, limit=limit, imbalance=imbalance)
    for found in (first, second):
        assert max(found["errors"]) < 1e-12, found
        assert found["heaviest"]
        assert found["dropped"] == (sum(each["counted"][0][0] for each in (first, second)) if limit == "drop" else 0)
        if limit != "none":
            assert found["largest"] <= 5 * max(24, found["counted"][0][1]), "no exchange brings more rows than planned"
    assert first["counted"][0][0] > 0, "the case goes over"


def test_drops_are_recorded_step_by_step(pool2: Pool) -> None:
    plan = planned("t.0+e").to_json()
    for policy, share in (("rerun", None), ("drop", 0.375)):
        for found in pool2.run("tests.expert_cases:skewed", timeout_s=100, plan=plan, policy=policy):
            assert found["factors"] == pytest.approx([2.0] * 3, abs=0.05)
            assert found["dropped"] == ([None] * 3 if share is None else pytest.approx([share] * 3, abs=0.03))


@pytest.mark.slow  # other edits that no rank can follow are refused in test_plan_edits.py
def test_two_axes_that_exchange_are_refused() -> None:
    plan = tw.plan(*zoo.build("gpt-oss-tiny"), hardware="cpu:4", mesh="2x2", solver="ddp")
    data = json.loads(plan.to_json())
    key = next(key for key in data["modules"] if key.endswith(":experts"))
    data["modules"][key]["split"] = "t.0+e t.1+e"
    with pytest.raises(UserError, match="exchanged along one axis"):
        tw.check(tw.Plan.parse(json.dumps(data)), *zoo.build("gpt-oss-tiny"))


def test_measured_imbalance_is_the_largest_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "expert_imbalance": 1.5}\n{"step": 1, "expert_imbalance": 1.75}\n')
    assert as_imbalance(f"measured:{path}") == 1.75
    path.write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="give a number"):
        as_imbalance(f"measured:{path}")


@pytest.mark.parametrize("value", ["0.5", "inf", "nan", "much", "measured:nowhere.jsonl"])
def test_what_is_no_imbalance_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"needed|a number of at least 1"):
        as_imbalance(value)


EVEN = [("t.0+e", 1.0), ("t.0+e", "worst"), ("f", 1.25)]


@pytest.mark.slow  # a plan for each split
@pytest.mark.parametrize("cases", [EVEN[:2], EVEN], ids=len)
def test_explain_names_the_imbalance_at_which_splits_are_even(cases: list[tuple[str, Any]]) -> None:
    model, batch = zoo.build("gpt-oss-tiny")
    found = []
    for split, imbalance in cases:
        rows = tw.explain(planned(split, imbalance), model, batch).rows
        (row,) = [row for row in rows if row.key.endswith(":experts")]
        assert row.even_at is not None
        assert "e" in row.even_at.below[0].split("+")
        assert row.even_at.above[0] in ("t.0", "t.1", "f")
        found.append(row.even_at)
        assert all(row.even_at is None for row in rows if not row.key.endswith(":experts"))
    assert found[0].imbalance == pytest.approx(found[1].imbalance), "it does not depend on what was planned for"


def test_a_run_tells_the_next_plan_what_it_saw(pool2: Pool, tmp_path: Path) -> None:
    metrics = str(tmp_path / "metrics.jsonl")
    pool2.run("tests.expert_cases:trained", timeout_s=100, plan=planned("t.0+e").to_json(), metrics=metrics)
    events = [json.loads(line) for line in Path(metrics).read_text(encoding="utf8").splitlines()]
    seen = [event["expert_imbalance"] for event in events if "expert_imbalance" in event]
    assert len(seen) == 2
    assert planned("t.0+e", f"measured:{metrics}").expert_imbalance == max(seen) > 1.0
