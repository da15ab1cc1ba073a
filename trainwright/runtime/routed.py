"""Rows of experts that this rank was sent, against what was planned: known before they are allocated, judged after the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ops.local import Rows


@dataclass(frozen=True)
class Seen:
    """The fullest call of one op."""

    numbers: list[int]
    """The numbers counted, as the op reads them."""
    computed: int
    """Rows that this rank computed."""
    planned: int
    even: float

    @property
    def factor(self) -> float:
        """Return the rows as a multiple of the even share."""
        return self.computed / self.even if self.even else 1.0


@dataclass(eq=False)
class Routed:
    """The counts since `clear`, op by op; of several calls the fullest."""

    seen: dict[str, Seen] = field(default_factory=dict)
    ever: bool = False
    """True once anything was counted: on all ranks of a plan, or on none."""

    def note(self, key: str, numbers: Sequence[int], rows: Rows) -> None:
        """Take in one call."""
        self.ever = True
        computed = rows.computed(numbers)
        if key not in self.seen or computed > self.seen[key].computed:
            self.seen[key] = Seen(list(numbers), computed, rows.computed(rows.planned), rows.even)

    def clear(self) -> dict[str, Seen]:
        """Return what was counted, and forget it."""
        found, self.seen = self.seen, {}
        return found

    def over(self) -> dict[str, Seen]:
        """Return the ops that had more rows than were planned."""
        return {key: seen for key, seen in self.seen.items() if seen.computed > seen.planned}
