"""Linear maps that may keep some rows in the planner: offered only where allowed, taken where faster, true to the byte."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.builders import run_on_ranks
from tests.plans import cluster
from tests.pool import Pool
from tests.sampled_cases import build, build_wide
from trainwright.artifacts import Plan, UserError
from trainwright.cli import main
from trainwright.ops.sampled import rows_kept

SPEC = "tests/sampled_cases.py:build_wide"


@cache
def planned(share: float | None = None, sampled: float | None = None, num: int = 2, **options: Any) -> Plan:
    """A plan; `share` is its budget as a share of what the fastest plan without one takes."""
    model, batch, loss_fn = build_wide()
    memory = None if share is None else int(share * planned(num=num).predicted.peak_bytes)
    question = {"hardware": cluster(num), "memory": memory, "sampled": sampled, "time_limit_s": 10.0, **options}
    return tw.plan(model, batch, loss_fn=loss_fn, **question)


def test_is_taken_where_it_makes_a_step_faster_and_says_so() -> None:
    exact, sampled = planned(0.6, num=1), planned(0.6, 0.3, num=1)
    assert sampled.predicted.step_s < exact.predicted.step_s
    assert sampled.predicted.peak_bytes <= sampled.budget_bytes
    assert sampled.sampled
    assert set(sampled.sampled.values()) == {0.3}
    notes = " ".join(sampled.notes)
    for text in ("gradients are not exact", "unbiased estimates", *sampled.sampled, "variance", "with exact gradients"):
        assert text in notes
    model, batch, loss_fn = build_wide()
    assert tw.check(sampled, model, batch, loss_fn=loss_fn).predicted == sampled.predicted
    assert Plan.parse(sampled.to_json()) == sampled


def test_nothing_is_sampled_unasked() -> None:
    assert not planned(0.6, num=1).sampled
    for solver in ("ddp", "fsdp", "megatron", "two-stage"):
        assert not planned(None, 0.3, solver=solver).sampled
    assert '"sampled"' not in planned().to_json()
    assert not planned(None, 1.0).sampled, "all rows are no estimate"


def test_pins_hold_a_form() -> None:
    pinned = planned(None, 0.3, pins=("blocks.*.up=sampled", "blocks.*.down=exact", "head=exact"))
    assert list(pinned.sampled) == ["blocks.{0-3}.up:linear"]


def test_explain_tells_the_form_its_variance_and_the_other() -> None:
    plan = planned(None, 0.3, pins="blocks.*.up=sampled")
    model, batch, loss_fn = build_wide()
    text = tw.explain(plan, model, batch, "blocks.*.up*", loss_fn=loss_fn).text()
    assert "unbiased estimate" in text
    assert "3.35 · Σ‖g‖²‖x‖²" in text
    assert "of its rows kept" in plan.table()


PINS = (
    "*=sampled",
    ("*=sampled", "blocks.*=recompute"),
    ("*=sampled", "blocks.*.up=shard(o)@host", "*.down=shard(i)@host"),
)


@pytest.mark.parametrize("pins", [PINS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in PINS[1:])])
def test_what_is_promised_is_measured(pool2: Pool, pins: Any) -> None:
    plan = planned(None, 0.25, pins=pins)
    assert len(plan.sampled) == 3
    report = run_on_ranks(pool2, SPEC, plan)
    assert max(report.peak_bytes) - plan.predicted.peak_bytes in (0, 4), "the loss, where the ranks sum it"
    assert report.max_relative_error_gradient < 1e-12
    assert report.sampled_variance is not None


def test_the_problem_counts_k_rows_and_their_numbers() -> None:
    from trainwright.planner.task import Task
    from trainwright.program.sampling import share_of
    from trainwright.request import PlanRequest

    model, batch, loss_fn = build_wide()
    request = PlanRequest.of("plan", model, batch, {"hardware": cluster(2), "loss_fn": loss_fn, "sampled": 0.3})
    (place,) = Task(**request.question()).places
    (up,) = [each for each in place.problem.groups if each.key == "blocks.{0-3}.up:linear"]
    found = {
        (up.group.loops[split[0]].name, bool(share_of(split))): (size, seconds)
        for split, size, seconds in zip(up.options, up.inner_bytes, up.backward_s)
        if split[0] >= 0
    }
    num = 4 * 256
    assert {key: size for key, (size, _) in found.items() if key[1]} == {
        ("b0", True): rows_kept(num // 2, 0.3) * (64 * 4 + 8),
        ("b1", True): rows_kept(num // 2, 0.3) * (64 * 4 + 8),
        ("o", True): rows_kept(num, 0.3) * (64 * 4 + 8),
        ("i", True): rows_kept(num, 0.3) * (32 * 4 + 8),
    }
    assert all(size == 0 for key, (size, _) in found.items() if not key[1])
    assert found["b0", True][1] < found["b0", False][1], "the product of k rows is the smaller"


def test_mistakes_are_said() -> None:
    model, batch, loss_fn = build()
    ask = lambda **options: tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:2", **options)  # noqa: E731
    for share in (0, -0.3, 1.5, "many", float("nan")):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            ask(sampled=share)
    with pytest.raises(UserError, match="exact gradients are needed for sophiah"):
        ask(sampled=0.3, optimizer="sophiah")
    with pytest.raises(UserError, match="add --sampled"):
        ask(pins="blocks.*.up=sampled")
    plan = ask()
    gelu = next(key for key in plan.modules if key.endswith(":gelu"))
    edited = {**plan.modules, gelu: plan.modules[gelu].model_copy(update={"sampled": 0.3})}
    with pytest.raises(UserError, match="a linear map of activations"):
        tw.check(plan.model_copy(update={"modules": edited}), model, batch, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("model", "entry", "said"),
    [
        (nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU()), (torch.ones(8, 4, 4),), "the model has none"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.ones(8, 4),), "more than 10 rows"),
        (nn.Linear(4, 4), (torch.ones(80, 4),), "the model has none"),
    ],
)
def test_a_model_with_nothing_to_sample_is_refused(model: nn.Module, entry: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tw.plan(model, entry, loss_fn=lambda out: out.mean(), hardware="cpu:2", sampled=0.3)


def test_the_command_line_plans_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, path = ["plan", "tests/sampled_cases.py:build", "--hardware", "cpu:1"], str(tmp_path / "plan.json")
    assert main([*asked, "--sampled", "0.3", "--pin", "blocks.*.up=sampled", "-o", path]) == 0
    assert "0.3 of its rows kept: its weight's gradient is an estimate" in " ".join(capsys.readouterr().out.split())
    assert '"sampled": 0.3' in Path(path).read_text()
    assert main([*asked, "--sampled", "0"]) == 2
    assert "try 0.3" in " ".join(capsys.readouterr().err.split())
