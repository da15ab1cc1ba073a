"""Counts the rows that this rank routes to experts and compares them with the plan, before they are allocated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..ops.expert_limits import Limit
from ..ops.local import Rows


@dataclass(frozen=True)
class Seen:
    """The counts of an op's call with the most rows."""

    numbers: list[int]
    """The counted numbers, in the form that the op reads."""
    factor: float
    """The rows as a multiple of the even share."""
    excess: int
    """The rows beyond those that were planned."""


@dataclass(eq=False)
class Routed:
    """Holds the counts of each op since `clear`; of several calls, those of the one with the most rows."""

    seen: dict[str, Seen] = field(default_factory=dict)
    ever: bool = False
    """True once anything was counted: on all ranks of a plan, or on none."""
    limit: Limit = Limit.NONE
    """The treatment of rows beyond those that were planned."""
    num_rows: int = 0
    num_excess: int = 0
    """The rows of all calls beyond the planned ones; `num_rows` counts all that this rank computes."""

    def note(self, key: str, numbers: Sequence[int], rows: Rows) -> None:
        """Add the counts of one call of the op `key`."""
        self.ever = True
        found = Seen(list(numbers), rows.factor(numbers), rows.excess(numbers))
        self.num_rows += rows.computed(numbers)
        self.num_excess += found.excess
        if key not in self.seen or found.factor > self.seen[key].factor:
            self.seen[key] = found

    def clear(self) -> dict[str, Seen]:
        """Return the counts, and reset them."""
        found, self.seen = self.seen, {}
        self.num_rows = self.num_excess = 0
        return found

    def over(self) -> dict[str, Seen]:
        """Return the counts of the ops that had more rows than were planned."""
        return {key: seen for key, seen in self.seen.items() if seen.excess}

    @contextmanager
    def limited(self, limit: Limit) -> Iterator[None]:
        """Set the treatment of rows beyond the planned ones to `limit` inside the `with` block."""
        before, self.limit = self.limit, limit
        try:
            yield
        finally:
            self.limit = before
