"""A plan's step is compared with one process that draws what the ranks draw, in models with random numbers of their own."""

from __future__ import annotations

from typing import Any

import pytest

import trainwright as tw
from tests.models import micro
from tests.plans import plan_of, random_decisions
from tests.pool import Pool
from trainwright.capture.cached import cached_capture
from trainwright.program.program import build_program


def report_of(pool: Pool, plan: tw.Plan, dtype: str = "float64", name: str = "drawn") -> tw.Report:
    given = {"spec": f"tests/models/micro.py:{name}", "options": {}}
    found = pool.run("trainwright.cli.workers:verify", timeout_s=280, model=given, plan=plan.to_json(), dtype=dtype)
    report = tw.Report.model_validate(found[0])
    assert report.passed, report
    return report


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_draw_for_parts_are_compared(pool2: Pool, seed: int) -> None:
    model, batch = micro.drawn()
    program = build_program(cached_capture(model, batch))
    report = report_of(pool2, plan_of(program, random_decisions(program, (2,), seed, 0.5), {}))
    assert report.max_relative_error_gradient < 1e-12
    assert report.max_relative_error_evaluation < 1e-12


def test_on_two_axes(pool4: Pool) -> None:
    model, batch = micro.drawn()
    program = build_program(cached_capture(model, batch))
    report_of(pool4, plan_of(program, random_decisions(program, (2, 2), 1, 0.5), {}))


@pytest.mark.parametrize("solver", ["ddp", "megatron"])
def test_in_single_precision_bars_are_those_of_rounding(pool2: Pool, solver: str) -> None:
    """The reference in float64 has the numbers that fp32 draws, which are others than those of float64."""
    report = report_of(pool2, tw.plan(*micro.drawn(), hardware="cpu:2", solver=solver), "fp32")
    assert report.bar_gradient < 1e-3


def test_each_micro_batch_draws_its_own(pool2: Pool) -> None:
    report = report_of(pool2, tw.plan(*micro.drawn(), hardware="cpu:2", micro_batches=2))
    assert "evaluation was not compared: each micro-batch draws its own random numbers" in report.notes
    assert report.max_relative_error_gradient < 1e-12


def test_with_a_loss_in_chunks(pool2: Pool) -> None:
    """Whose op the plan's corrections name."""
    plan = tw.plan(*micro.noised(), hardware="cpu:2", micro_batches=2, loss_chunks=2)
    assert plan.loss_chunks == 2
    report_of(pool2, plan, name="noised")


def test_another_step_draws_others_and_is_not_the_same(pool2: Pool) -> None:
    """The comparison tells numbers apart: with those of the next step it fails."""
    plan = tw.plan(*micro.drawn(), hardware="cpu:2", solver="ddp")
    found: Any = pool2.run("tests.ranks_draws_cases:of_the_next_step", plan=plan.to_json())[0]
    assert not found["passed"]
    assert found["max_relative_error_loss"] > 1e-6
