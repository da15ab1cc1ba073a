"""The batch size of the most examples a second, found by planning for some: `fastest_batch`.

A step of B examples takes s(B) seconds, and the rate is B / s(B). Up to where memory binds a step grows by the same for each
example, beyond it by more, for memory is then bought with time: s is taken to be convex. Hence

    doubling    from one example a device on, until there is no plan, or the rate no longer grows by `WORTH`
    bounds      between two sizes that were tried s is above the lines through the pairs of sizes beside them, so that no
                size between can have a higher rate than B / line(B)
    halving     the gap beside the best size whose bound is `WORTH` above the best rate, until there is none
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from .artifacts import Cluster, Plan, Refusal, UserError

WORTH = 0.01
"""The gain for which a larger batch is looked for, as a share of the rate: the planner proves no step to less than a thousandth."""
MOST_DOUBLINGS = 20
_POINTS = 64
"""Sizes at which a bound is evaluated, of gaps that hold more."""


def fastest_batch(plan_of: Callable[[int], Plan], granule: int, first: int | None = None) -> Plan:
    """Return the plan whose batch trains the most examples a second within the memory, with a note on what was tried.

        max over B of B / s(B),   B a multiple of `granule`

    plan_of: the fastest plan for a batch of that many examples; raises `Refusal` where none fits. granule: the number of
    devices, so that each can have as many examples as the others; where one example a device does not fit, smaller batches
    are tried, down to one example. first: where to begin. Raises the `Refusal` of the smallest batch where nothing fits.

    >>> from types import SimpleNamespace as Some
    >>> def made(size):
    ...     if size > 22:
    ...         raise Refusal("too large")
    ...     return Some(predicted=Some(step_s=5.0 + size), batch={"x": Some(shape=(size,))}, micro_batches=1, notes=(),
    ...                 model_copy=lambda update: (size, update["notes"]))
    >>> size, (note,) = fastest_batch(made, 2)
    >>> size, note.partition(": ")[0]
    (22, 'a batch of 22 was chosen, 0.815 examples a second')
    >>> note.partition(": ")[2]
    '20 reaches 0.8, 24 does not fit; tried were 2, 4, 8, 16, 20, 22, 24, 32'
    """
    search = _Search(plan_of, granule)
    search.double(first or granule)
    search.close_in()
    return search.best_with_note()


class _Search:
    def __init__(self, plan_of: Callable[[int], Plan], granule: int) -> None:
        self.plan_of, self.granule = plan_of, granule
        self.plans: dict[int, Plan] = {}
        self.refused: dict[int, Refusal] = {}

    def double(self, size: int) -> None:
        """Find a size that fits, and double it while that gains enough."""
        while not self._fits(size):
            if size == 1:
                raise self.refused[size]
            size //= 2
        if self.refused and size > 1:  # memory may bind already, so that fewer examples are faster
            self._fits(size // 2)
        for _ in range(MOST_DOUBLINGS):
            if 2 * size in self.refused or not self._fits(2 * size):
                return
            size *= 2
            if self._rate(size) < (1 + WORTH) * self._rate(size // 2):
                return

    def close_in(self) -> None:
        """Halve gaps beside the best size until none can hold a better one."""
        while (middle := next(self._promising(), None)) is not None:
            self._fits(middle)

    def best_with_note(self) -> Plan:
        """Return the best plan; its note names its neighbours."""
        best = self._best
        low, high = self._beside(best)
        around = [self._reached(size) for size in (low, high) if size is not None]
        tried = ", ".join(map(str, sorted({*self.plans, *self.refused})))
        note = (
            f"a batch of {best} was chosen, {self._rate(best):.3g} examples a second: {', '.join(around) or 'it is the only one'}; "
            f"tried were {tried}"
        )
        plan = self.plans[best]
        return plan.model_copy(update={"notes": (*plan.notes, note)})

    @property
    def _best(self) -> int:
        """The smallest size whose rate is the highest."""
        return max(sorted(self.plans), key=self._rate)

    def _fits(self, size: int) -> bool:
        if size in self.plans or size in self.refused:
            return size in self.plans
        try:
            self.plans[size] = self.plan_of(size)
        except Refusal as refusal:
            self.refused[size] = refusal
        return size in self.plans

    def _rate(self, size: int) -> float:
        return size / self.plans[size].predicted.step_s

    def _reached(self, size: int) -> str:
        return f"{size} reaches {self._rate(size):.3g}" if size in self.plans else f"{size} does not fit"

    def _beside(self, size: int) -> tuple[int | None, int | None]:
        """The sizes next to `size` that were tried; of those that do not fit, the smallest."""
        tried = sorted({*self.plans, *self.refused})
        low = max((each for each in tried if each < size), default=None)
        return low, min((each for each in tried if each > size), default=None)

    def _promising(self) -> Iterator[int]:
        """Yield the middles of the gaps beside the best that may hold a rate that is worth it."""
        best = self._best
        for low, high in pairwise([each for each in (self._beside(best)[0], best, self._beside(best)[1]) if each]):
            step = self.granule if low >= self.granule else 1
            between = range(low + step, high, step)
            if between and self._bound(between, low, high) > (1 + WORTH) * self._rate(best):
                yield between[len(between) // 2]

    def _bound(self, between: range, low: int, high: int) -> float:
        """The highest rate that a size in a gap can have where the step is convex over the size."""
        points = between[:: max(1, len(between) // _POINTS)]
        lines = [self._line(*pair) for pair in self._pairs(low, high)]
        return max(size / max(line(size) for line in lines) for size in {*points, between[-1]})

    def _pairs(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The pairs of sizes below and above a gap, whose lines the step is above in it."""
        sizes = sorted(self.plans)
        below, above = [size for size in sizes if size <= low][-2:], [size for size in sizes if size >= high][:2]
        yield (below[0], below[-1])
        if len(above) == 2:
            yield (above[0], above[1])

    def _line(self, one: int, other: int) -> Callable[[int], float]:
        """The seconds on the line through two sizes; through one alone, its seconds whatever the size."""
        at, step_s = one, self.plans[one].predicted.step_s
        slope = 0.0 if one == other else (self.plans[other].predicted.step_s - step_s) / (other - one)
        return lambda size: max(step_s + slope * (size - at), math.ulp(1.0))


def plan_sized(
    plan_of: Callable[..., Plan], batch: Any, cluster: Cluster, batch_size: int | str | None, global_batch: int | None
) -> Plan:
    """Return the plan of `plan_of(batch, …)` for the batch that was asked for: of a size, of the best one, or cut into parts.

    With `global_batch` that many examples make a step, in as many micro-batches as is fastest; `plan_of` is then told
    `micro_batches="auto"`, unless it was given a number.
    """
    from .models.batches import resized, shared_size

    check_batch_size(batch_size, global_batch)
    if shared_size(batch) is None:
        raise UserError(
            f"a batch whose tensors share their first dim is needed for a batch size of {batch_size}; they do not; make the "
            "batch of that size yourself"
        )
    if global_batch is not None:
        return plan_of(resized(batch, global_batch), micro_batches="auto")
    if batch_size != "auto":
        return plan_of(resized(batch, int(batch_size or 0)))
    return fastest_batch(lambda size: plan_of(resized(batch, size)), cluster.num_devices)


def check_batch_size(batch_size: int | str | None, global_batch: int | None) -> None:
    """Raise `UserError` for a batch size or a global batch that cannot be, or where nothing is left open in that.

    >>> check_batch_size("auto", 0)
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: a global batch of 1 example or more is needed; got 0; try 256
    """
    if batch_size not in (None, "auto") and not _is_count(batch_size):
        raise UserError(f"a batch size of 1 example or more is needed, or auto; got {batch_size!r}; try auto")
    if global_batch is not None and not _is_count(global_batch):
        raise UserError(f"a global batch of 1 example or more is needed; got {global_batch!r}; try 256")
    if global_batch is not None and batch_size != "auto":
        raise UserError(
            f"a batch size of auto is needed for a global batch of {global_batch}; got {batch_size or 'none'}; say auto, or "
            f"give the batch itself {global_batch} examples"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
