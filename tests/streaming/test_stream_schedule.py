"""The schedule of a streamed step: bounds of every order, and a step worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.streaming.schedule import PartCost, step_s

SECONDS = st.floats(0.0, 3.0)
PARTS = st.lists(st.builds(PartCost, st.sampled_from([0, 100, 250]), SECONDS, SECONDS), min_size=1, max_size=8)


@given(parts=PARTS, beside_s=SECONDS, read=st.floats(10, 1e4), write=st.floats(10, 1e4))
def test_a_step_takes_no_less_than_what_it_computes_or_moves(
    parts: list[PartCost], beside_s: float, read: float, write: float
) -> None:
    found = step_s(parts, beside_s, read, write)
    compute_s = beside_s + sum(part.update_s + part.use_s for part in parts)
    num_bytes = sum(part.num_bytes for part in parts)
    streams = sum(part.num_bytes > 0 for part in parts)
    assert found >= compute_s - 1e-9
    if streams > 2:  # fewer stay in the two buffers
        assert found <= compute_s + num_bytes / read + num_bytes / write + 1e-9
    assert step_s(parts, beside_s, 1e15, 1e15) == pytest.approx(compute_s)


def test_blocks_that_stay_in_the_buffers_are_not_read() -> None:
    parts = [PartCost(100, 0.0, 1.0), PartCost(0, 0.0, 1.0), PartCost(100, 0.0, 1.0)]
    assert step_s(parts, 0.0, 1.0, 1e9) == 3.0


def test_four_blocks_by_hand() -> None:
    """A block takes 3 s to read, 3 s to write and 1 s to use; of two buffers each is read, used and written in 6 s."""
    parts = [PartCost(300, 0.0, 1.0)] * 4
    assert step_s(parts, 0.0, 100.0, 100.0) == pytest.approx(12.0)
    # An update of 1 s between read and write: 7 s a buffer, in which two blocks are served.
    assert step_s([PartCost(300, 1.0, 1.0)] * 4, 0.0, 100.0, 100.0) == pytest.approx(14.0)
    # What computes longer than a block takes to come in hides it.
    assert step_s([PartCost(300, 1.0, 3.0)] * 4, 0.0, 100.0, 100.0) == pytest.approx(16.0)
