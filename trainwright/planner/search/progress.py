"""The line that tells how far a search is: `joint on mesh 8 · 12 of 30 s · best 40.6 ms, proven ≥ 32.9 ms`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..model.deadline import Deadline


@dataclass
class Best:
    """The fastest step that was found to fit."""

    seconds: float = math.inf


@dataclass(eq=False)
class ProgressLine:
    """Tells of one search. `bound_s` is proven for all that it may choose from; no step is faster on this mesh."""

    tell: Callable[[str], None]
    what: str
    deadline: Deadline
    best: Best
    bound_s: float | None = None

    def goes_on(self, *_: float) -> None:
        """Say that time has passed."""
        self.tell(progress_text(self.what, self.deadline, self.best.seconds, self.bound_s))

    def fits(self, seconds: float) -> None:
        """Note a plan that fits and whose step takes so long."""
        self.best.seconds = min(self.best.seconds, seconds)
        self.goes_on()

    def proves(self, bound_s: float) -> None:
        """Note what no plan is faster than; what is proven first holds for the whole space, what comes later may not."""
        if self.bound_s is None and bound_s > 0:
            self.bound_s = bound_s
            self.goes_on()


def progress_text(what: str, deadline: Deadline, best_s: float, bound_s: float | None) -> str:
    """Return one line for the terminal.

    >>> progress_text("joint", Deadline(30), 0.0406, 0.0329)
    'joint · 0 of 30 s · best 40.6 ms, proven ≥ 32.9 ms'
    >>> progress_text("joint", Deadline(30), math.inf, None)
    'joint · 0 of 30 s · no plan yet'
    """
    limit = f" of {deadline.seconds:.3g}" if math.isfinite(deadline.seconds) else ""
    best = f"best {_duration(best_s)}" if math.isfinite(best_s) else "no plan yet"
    proven = "" if bound_s is None else f", proven ≥ {_duration(bound_s)}"
    return f"{what} · {deadline.spent_s:.0f}{limit} s · {best}{proven}"


def _duration(seconds: float) -> str:
    """Write a duration with three digits.

    >>> _duration(0.0406), _duration(2.345), _duration(0.00012)
    ('40.6 ms', '2.35 s', '0.12 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
