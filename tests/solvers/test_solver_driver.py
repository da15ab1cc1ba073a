"""The loop that every solver runs in: how it ends, what it keeps, what it counts."""

from __future__ import annotations

import math

import pytest

from trainwright.artifacts import UserError
from trainwright.solvers.driver import Counts, Ended, Limits, Measured, drive
from trainwright.solvers.outcome import Status


def halve(x: float) -> float:
    return x / 2


def size(x: float) -> Measured:
    return Measured(residual=abs(x), fun=x * x)


def test_tolerance_is_relative_to_the_start() -> None:
    for start in (1e-6, 1.0, 1e6):
        run = drive(start, halve, size, Limits(100, rtol=1e-3))
        assert (run.status, run.nit) == (Status.CONVERGED, 10)


def test_without_a_tolerance_all_iterations_are_done() -> None:
    run = drive(1.0, halve, size, Limits(7))
    assert (run.status, run.nit, run.last) == (Status.COMPLETED, 7, 2.0**-7)
    assert run.status.success


def test_with_a_tolerance_the_limit_is_no_success() -> None:
    run = drive(1.0, halve, size, Limits(3, rtol=1e-9))
    assert run.status is Status.MAX_ITERATIONS
    assert not run.status.success
    assert "max_iterations" in run.message


def test_the_best_iterate_survives_a_nan_and_a_divergence() -> None:
    path = iter([0.5, 0.25, 0.4, math.nan])
    run = drive(1.0, lambda _: next(path), size, Limits(10, rtol=1e-9))
    assert (run.status, run.best, run.last, run.nit) == (Status.NOT_FINITE, 0.25, 0.4, 4)
    run = drive(1.0, lambda x: x * 1e7, size, Limits(10, rtol=1e-9, divergence=1e6))
    assert (run.status, run.best) == (Status.DIVERGED, 1.0)


def test_an_iterate_without_a_residual_gives_way_to_one_that_has_it() -> None:
    """The start has none, as where a method has no direction yet: the best is the least of those that are known."""
    residuals = {1.0: math.nan, 0.5: 3.0, 0.25: 4.0}
    run = drive(1.0, halve, lambda x: Measured(residuals[x], fun=x), Limits(2))
    assert (run.best, run.last, run.best_measured.residual) == (0.5, 0.25, 3.0)


def test_a_step_may_end_the_run() -> None:
    def step(x: float) -> float:
        if x < 0.3:
            raise Ended(Status.BREAKDOWN)
        return x / 2

    run = drive(1.0, step, size, Limits(10, rtol=1e-9))
    assert (run.status, run.last, run.nit) == (Status.BREAKDOWN, 0.25, 2)


def test_evaluations_are_limited_as_they_are_counted() -> None:
    counts = Counts()

    def step(x: float) -> float:
        counts.add(nfev=3, nsfo=2)
        return x / 2

    run = drive(1.0, step, size, Limits(100, rtol=1e-30, max_evaluations=10, check_every=50), counts=counts)
    assert (run.status, run.nit, run.counts["nfev"], run.counts["nsfo"]) == (Status.MAX_EVALUATIONS, 4, 12, 8)


def test_time_is_limited_between_measurements() -> None:
    run = drive(1.0, lambda x: x * 0.999999, size, Limits(10**9, rtol=1e-30, max_seconds=0.05, check_every=10**8))
    assert run.status is Status.MAX_SECONDS


def test_callback_stops_and_history_is_kept_on_request() -> None:
    run = drive(1.0, halve, size, Limits(100), callback=lambda moment: moment.nit == 3, keep_history=True)
    assert (run.status, run.nit) == (Status.STOPPED, 3)
    assert run.history["residual"] == [1.0, 0.5, 0.25, 0.125]
    assert drive(1.0, halve, size, Limits(5)).history == {}


def test_a_count_that_begins_late_was_zero_before() -> None:
    counts = Counts()

    def step(x: float) -> float:
        counts.add(nfev=1)
        if x < 0.3:
            counts.add(rare=2)
        return x / 2

    run = drive(1.0, step, size, Limits(4), counts=counts, keep_history=True)
    assert run.history["nfev"] == [0, 1, 2, 3, 4]
    assert run.history["rare"] == [0, 0, 0, 2, 4]
    assert {len(column) for column in run.history.values()} == {5}


def test_an_interrupt_returns_the_best_so_far() -> None:
    def step(x: float) -> float:
        if x < 0.3:
            raise KeyboardInterrupt
        return x / 2

    assert drive(1.0, step, size, Limits(10)).status is Status.STOPPED


def test_a_start_that_is_converged_takes_no_step() -> None:
    assert drive(1e-12, halve, size, Limits(10, atol=1e-9)).nit == 0


@pytest.mark.parametrize("options", [{"max_iterations": -1}, {"max_iterations": 1, "rtol": -1.0},
                                     {"max_iterations": 1, "check_every": 0}, {"max_iterations": 1, "atol": math.nan}])  # fmt: skip
def test_limits_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="is needed"):
        Limits(**options)  # type: ignore[arg-type]
