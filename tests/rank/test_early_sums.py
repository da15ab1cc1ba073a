"""Sums over ranks of what the batch alone says: begun before the step's own work, and the same number as ever."""

from __future__ import annotations

import pytest
import torch

import trainwright as tw
from tests.builders import decisions, logged
from tests.early_sums_cases import batch, build
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.hardware.collectives import seconds
from trainwright.ops import partial


def test_labels_are_counted_before_anything_is_computed() -> None:
    log, _ = logged(decisions("ddp"), "none")
    forward = log.events[: log.events.index("forward ends")]
    assert forward[0] == "issue 0"
    assert forward.index("wait 0") > max(place for place, event in enumerate(forward) if event == "product")


@pytest.mark.parametrize("recompute", slow_but([True], [False, True]))
@pytest.mark.parametrize(
    ("options", "num_early"),
    [({}, 1), ({"weighted": True}, 0), ({"own_labels": True}, 0)],
    ids=["labels of the batch", "weights that may change", "labels of the model"],
)
def test_the_mean_is_over_the_labels_of_all_ranks(
    pool2: Pool, options: dict[str, bool], num_early: int, recompute: bool
) -> None:
    for error, early in pool2.run("tests.early_sums_cases:trained", options=options, recompute=recompute):
        assert error < 1e-12
        assert early == num_early


def test_a_count_keeps_its_digits_beside_losses_of_few() -> None:
    count = partial.label_weight(torch.arange(1003) % 7, None, -100)
    share = partial.mean_of(torch.tensor(3008.0, dtype=torch.bfloat16), count)
    assert share.dtype == torch.bfloat16
    assert float(share) == float(torch.tensor(3008 / 1003, dtype=torch.bfloat16))


def test_a_sum_over_labels_that_other_ranks_have_is_paid_for() -> None:
    """Labels that rest split along another dim have to be exchanged first: their number is not begun with the step."""
    plan = tw.plan(build(), batch(), hardware="cpu:2", mesh=(2,), solver="ddp")
    labels = plan.batch["labels"]
    assert labels.layout == ("S0",)
    elsewhere = {**plan.batch, "labels": labels.model_copy(update={"layout": ("S1",)})}
    edited = plan.model_copy(update={"batch": elsewhere})
    (axis,) = plan.cluster.mesh((2,))
    more_s = tw.check(edited, build(), batch()).predicted.comm_s - plan.predicted.comm_s
    assert more_s == pytest.approx(seconds("all_reduce", axis, torch.float64.itemsize))
