"""Step times that can be compared on a noisy machine: every contender takes one step a round, in changing order.

What disturbs a round disturbs all contenders of it alike, so it is the ratio within a round that is looked at: its
median over the rounds, and the interval that resampling the rounds gives for it (bootstrap, 95 %).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Step = Callable[[], object]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Ratio:
    """A median of ratios within rounds, and its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(steps: Mapping[str, Step], num_rounds: int, num_warm: int = 3) -> tuple[Times, Times]:
    """Return the seconds of each contender's step, round by round, and the processor's, all threads together.

    On several ranks the slowest rank's seconds count, and the sum of the processor's.
    """
    names = list(steps)
    wall: Times = {name: [] for name in names}
    processor: Times = {name: [] for name in names}
    for number in range(-num_warm, num_rounds):
        order = random.Random(number).sample(names, len(names))
        for name in order:
            wall_s, processor_s = _clock(steps[name])
            if number >= 0:
                wall[name].append(wall_s)
                processor[name].append(processor_s)
    return wall, processor


def _clock(step: Step) -> tuple[float, float]:
    together = dist.is_initialized()
    if together:
        dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step()
    taken = time.perf_counter() - start, time.process_time() - busy
    if not together:
        return taken
    slowest, total = (torch.tensor(seconds, dtype=torch.float64) for seconds in taken)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total)


def ratio(ours: Sequence[float], theirs: Sequence[float], num_samples: int = 4000) -> Ratio:
    """Return the median of ours / theirs within rounds, with its bootstrap interval.

    >>> ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    Ratio(median=0.5, low=0.5, high=0.5)
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(num_samples))
    return Ratio(statistics.median(ratios), medians[int(0.025 * num_samples)], medians[int(0.975 * num_samples)])


def columns(wall: Times, processor: Times, one: str, other: str) -> dict[str, float]:
    """Return what a table says of `one` against `other`: the ratio of their steps, its interval, and the processor's."""
    found = ratio(wall[one], wall[other])
    busy = ratio(processor[one], processor[other])
    return {"ratio": found.median, "low": found.low, "high": found.high, "processor": busy.median}
