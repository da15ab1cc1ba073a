"""Holds factors that `calibrate --learn` learns from some published rows against the steps of others."""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.artifacts import Cluster, Compared, Run
from trainwright.hardware import resolve
from trainwright.hardware.learn import learn

from .rows import Row

_NUM_STEPS = 10
"""Steps of which a published time is taken to be the median."""


@dataclass(frozen=True)
class Place:
    """Where a run comes from."""

    card: str
    source: str


@dataclass(frozen=True)
class Learning:
    """Median errors of steps, before and after factors were learned from other runs."""

    source: str
    num_told: int
    before: float
    after: float


Told = tuple[Run, list[Run]]
"""A run, and those that its step is told by."""


def learnings(rows: Sequence[Row], known: dict[str, Any]) -> list[Learning]:
    """Return the errors by what is learned from: one run of the same source, and all runs of all other sources.

    Both are of the same card. The second leaves one source out, in turn. What nothing is learned from is left out.
    """
    timed = [row for row in rows if row.is_time_comparable and known.get(row.id, {}).get("step_s")]
    runs = [(_run(row, known[row.id]), Place(_card(known[row.id]), row.source)) for row in timed]
    by_one = [
        (run, [other]) for run, place in runs for other, its in runs if place == its and run is not other
    ]  # fmt: skip
    by_others = [
        (run, [other for other, its in runs if its.card == place.card and its.source != place.source])
        for run, place in runs
    ]  # fmt: skip
    learned = {
        "one other run of the source": by_one,
        "all runs of the other sources": [told for told in by_others if told[1]],
    }  # fmt: skip
    return [_learning(what, told) for what, told in learned.items() if told]


def _learning(what: str, told: Iterable[Told]) -> Learning:
    ratios = [
        (run.step_s.predicted / run.step_s.measured, learn(others).device.factors["compute"]) for run, others in told
    ]
    before = statistics.median(abs(ratio - 1) for ratio, _ in ratios)
    return Learning(what, len(ratios), before, statistics.median(abs(ratio * factor - 1) for ratio, factor in ratios))


def _run(row: Row, found: dict[str, Any]) -> Run:
    """Return the row as a run whose whole step is computing, as a log says no more; links are left out, which differ by row."""
    assert row.step_s is not None
    step = Compared(predicted=found["step_s"], measured=row.step_s)
    return Run(
        model=row.id, optimizer=row.data["optimizer"], num_ranks=1, num_steps=_NUM_STEPS, cluster=_alone(_card(found)),
        fingerprint=None, step_s=step, compute_s=step,
    )  # fmt: skip


def _card(found: dict[str, Any]) -> str:
    """Return the card of `2x8xh100`."""
    return re.sub(r"^(\d+x)*", "", found["hardware"])


@functools.cache
def _alone(card: str) -> Cluster:
    return resolve(card)
