"""Row budgets follow what simulations say: none is tried twice, or where an earlier one says that nothing is."""

from __future__ import annotations

import pytest

from tests.builders import simulated
from trainwright.planner.search.aim import Search
from trainwright.planner.search.effort import Effort


def test_a_sharding_is_fitted_to_the_end_once_no_row_budget_is_left_between() -> None:
    """Only then may it be forbidden: under one in between it might have an answer that fits."""
    search = Search(1000.0, Effort())
    search.note(simulated(1300))
    assert (search.high, search.is_closed) == (1000.0, False)
    search.aim = 700.0
    assert search.note_nothing()
    assert not search.is_closed
    search.aim = 999.9
    assert not search.note_nothing()
    assert search.is_closed


def test_a_row_budget_that_is_just_missed_is_hardly_lowered() -> None:
    """A thousandth less of it may let nothing in, where ten bytes were missing."""
    search = Search(1e6, Effort())
    search.note(simulated(1_000_010))
    assert 1e6 - 40 < search.aim < 1e6 - 10
    search = Search(1e6, Effort())
    search.note(simulated(1_100_000))
    assert 1e6 - 104_000 < search.aim < 1e6 - 101_000


def test_no_row_budget_is_tried_below_one_that_let_in_nothing() -> None:
    """An answer that is fast enough and fits, if there is one, lies between that and the smallest whose answer did not fit."""
    search = Search(1000.0, Effort(), aim=950.0)
    search.note(simulated(1300))
    search.aim = 900.0
    assert search.note_nothing()
    assert search.aim == 925.0
    search.note(simulated(1900))
    assert 900.0 < search.aim < 925.0


def test_what_did_not_fit_is_not_asked_for_again_under_a_row_budget_that_still_lets_it_in() -> None:
    search = Search(1000.0, Effort())
    search.note(simulated(1010), rows_peak=960.0)
    assert search.high == 960.0
    assert search.aim < 960.0


@pytest.mark.parametrize(("missed_s", "is_flat"), [(0.9995, True), (0.99, False)])
def test_no_row_budget_is_sought_between_answers_that_are_as_fast(missed_s: float, is_flat: bool) -> None:
    search = Search(1000.0, Effort())
    search.note(simulated(1100, missed_s))
    assert not search.is_flat, "nothing fits yet"
    search.note(simulated(900, 1.0))
    assert search.is_flat is is_flat


def test_an_answer_that_comes_again_is_followed_by_the_largest_row_budget_that_is_left() -> None:
    """Halving what is between would prove the same once more, up to what did not fit."""
    search = Search(1000.0, Effort())
    search.note(simulated(1100, 0.9))
    search.aim = 800.0
    search.note(simulated(900, 1.0))
    assert search.aim < 950.0
    search.aim = 850.0
    search.note(simulated(900, 1.0))
    assert 999.0 < search.aim < search.high
    search.note(simulated(900, 1.0))
    assert search.is_spent
