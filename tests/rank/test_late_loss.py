"""A loss whose value is not waited for where the forward ends: the same gradients, and the value when the step is done."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grids import slow_but
from tests.pool import Pool

CASES = "tests.late_loss_cases:"
DATA_PARALLEL = {"hardware": "cpu:2", "mesh": [2], "solver": "ddp"}


@pytest.mark.parametrize("factor", slow_but([0.25], [1.0, 0.25]))
@pytest.mark.parametrize("model", slow_but(["gpt2-tiny"], ["gpt2-tiny", "vit-tiny"]))
def test_on_two_ranks(pool2: Pool, model: str, factor: float) -> None:
    ranks = pool2.run(CASES + "compared", model=model, question=DATA_PARALLEL, factor=factor)
    for found in ranks:
        assert_same(found)
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert ranks[0]["inside"] != ranks[0]["loss"][0]  # else nothing was late


@pytest.mark.slow
def test_on_two_axes(pool4: Pool) -> None:
    for found in pool4.run(
        CASES + "compared", model="gpt2-tiny", question={"hardware": "cpu:4", "mesh": [2, 2], "solver": "ddp"}
    ):
        assert_same(found)


@pytest.mark.slow  # gpt2-tiny under data parallelism is tested on each change
def test_with_gathered_parameters(pool2: Pool) -> None:
    for found in pool2.run(CASES + "compared", model="llama-tiny", question={**DATA_PARALLEL, "solver": "fsdp"}):
        assert_same(found)


@pytest.mark.slow  # a plan of its own on two ranks
def test_where_micro_batches_make_the_loss_it_is_waited_for(pool2: Pool) -> None:
    for found in pool2.run(CASES + "compared", model="gpt2-tiny", question={**DATA_PARALLEL, "micro_batches": 2}):
        assert found["same gradients"]
        assert found["inside"] == found["loss"][0] == found["loss"][1]


def assert_same(found: dict[str, Any]) -> None:
    assert found["sums"]
    assert found["finite"]
    assert found["same gradients"]
    assert found["loss"][0] == found["loss"][1]
    assert found["evaluated"] == pytest.approx(found["loss"][0], rel=0.1)  # dropout of the same step


def test_the_ranks_meet_for_it_after_the_backward(pool2: Pool) -> None:
    for events in pool2.run(CASES + "order", question=DATA_PARALLEL):
        assert events.index("issue loss") < events.index("forward ends")
        assert events.index("wait loss") > events.index("backward ends")


def test_an_error_inside_leaves_the_next_step_as_it_was(pool2: Pool) -> None:
    assert all(pool2.run(CASES + "failing", question=DATA_PARALLEL))
