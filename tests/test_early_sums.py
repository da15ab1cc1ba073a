"""Sums over ranks of what the batch alone says: begun before the step's own work, and the same number as ever."""

from __future__ import annotations

import pytest
import torch

from tests.pool import Pool
from tests.test_overlap import decisions, logged
from trainwright.ops import partial


def test_labels_are_counted_before_anything_is_computed() -> None:
    log, _ = logged(decisions("ddp"), "none")
    forward = log.events[: log.events.index("forward ends")]
    assert forward[0] == "issue 0"
    assert forward.index("wait 0") > max(place for place, event in enumerate(forward) if event == "product")


@pytest.mark.parametrize("recompute", [False, True])
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
