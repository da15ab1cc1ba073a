"""Streamed steps on several ranks: one byte a rank and step, equal parameters, equal to the same by hand."""

from __future__ import annotations

import pytest

from tests import streaming_cases
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.streaming import ByteExchange


def test_two_ranks_are_the_equations_by_hand(pool2: Pool) -> None:
    one, other = pool2.run("tests.streaming_cases:streams")
    assert one == other
    assert one == streaming_cases.by_hand(2)


def test_ranks_are_needed_to_exchange() -> None:
    with pytest.raises(UserError, match="torchrun"):
        ByteExchange()
