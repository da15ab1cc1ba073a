"""A loss in chunks in the planner: taken where nothing fits without, or where it is faster and free; its bytes are true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.chunk_cases import build
from trainwright.artifacts import Plan, UserError
from trainwright.models import zoo
from trainwright.planner.budget import budget_for
from trainwright.planner.task import Task
from trainwright.program.micro_batches import capture_step
from trainwright.request import PlanRequest


def loaded() -> tuple[Any, Any]:
    """One block: the head and its loss are most of the step."""
    return zoo.build("gpt2-tiny", batch_size=4, seq_len=64, n_layer=1, device="meta")


def planned(memory: int | None = None, **options: Any) -> Plan:
    question = {"hardware": "cpu:2", "offload": "none", "time_limit_s": 20.0, "memory": memory, **options}
    return tw.plan(*loaded(), **question)


def least(chunks: int | str) -> int:
    """The smallest budget that has a plan, as far as the search knows."""
    model, batch = loaded()
    request = PlanRequest.of("plan", model, batch, {"hardware": "cpu:2", "offload": "none", "loss_chunks": chunks})
    task = Task(**request.question())
    (place,) = task.places
    found = place.solver.smallest(replace(place.settings("joint"), budget_bytes=None))
    assert found is not None
    return budget_for(found.simulation.peak_bytes, task.divisor)


def test_a_chunk_of_a_micro_batch_has_as_many_rows() -> None:
    model, batch = loaded()
    chunks = {
        num: capture_step(model, batch, None, None, num, loss_chunks=None).captured.loss_chunks for num in (1, 2, 4)
    }
    assert chunks == {1: 8, 2: 4, 4: 2}
    with_as_many = capture_step(model, batch, None, None, 4, loss_chunks=8)
    assert with_as_many.captured.loss_chunks == 8  # as asked


@pytest.mark.slow
def test_is_taken_where_nothing_fits_without() -> None:
    whole, chunked = least("none"), least(8)
    assert chunked < whole
    budget = (whole + chunked) // 2
    plan = planned(budget)
    assert plan.loss_chunks == 8
    assert plan.predicted.peak_bytes <= budget
    assert any("8 chunks" in note for note in plan.notes)
    assert tw.check(plan, *loaded()).predicted == plan.predicted


def test_is_not_taken_unasked_where_whole_logits_fit() -> None:
    assert planned().loss_chunks == planned(loss_chunks="free").loss_chunks == 0


@pytest.mark.slow
def test_free_takes_the_faster() -> None:
    budget = int(1.02 * least("none"))
    whole, free = planned(budget, loss_chunks="none"), planned(budget, loss_chunks="free")
    assert whole.loss_chunks == 0
    assert free.predicted.step_s <= whole.predicted.step_s


def test_a_plan_of_before_reads_as_whole_logits() -> None:
    plan = planned(loss_chunks="none")
    old = plan.to_json().replace(' "loss_chunks": 0,\n', "")
    assert old != plan.to_json()
    assert not Plan.parse(old).is_edited
    assert Plan.parse(old).loss_chunks == 0


def test_what_has_no_head_is_refused_by_name() -> None:
    net, batch = torch.nn.Linear(4, 2), (torch.ones(8, 4),)
    with pytest.raises(UserError, match="linear head"):
        tw.plan(net, batch, loss_fn=lambda output: output.mean(), hardware="cpu:2", loss_chunks=4)
    with pytest.raises(UserError, match="number of chunks"):
        planned(loss_chunks="many")
    with pytest.raises(UserError, match="whole logits are needed for sophiah"):
        planned(loss_chunks=4, optimizer="sophiah")


def test_logits_that_are_read_stay_whole() -> None:
    model, batch, loss_fn = build("shifted", device="meta")
    more = lambda out, batch: loss_fn(out, batch) + out.square().mean()  # noqa: E731 - a loss by the names of its arguments
    with pytest.raises(UserError, match="reads the logits too"):
        tw.plan(model, batch, loss_fn=more, hardware="cpu:2", loss_chunks=4)
