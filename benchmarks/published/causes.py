"""Why a row misses, where it is known, and what was fitted to what."""

from __future__ import annotations

from .rows import Row

FITTED_TO = frozenset({"timm", "lambda", "transformers-bert", "transformers-v100"})
"""Sources whose times set constants of the GPU model; memory has no fitted constant."""
MEMORY_MISS, TIME_MISS = 0.03, 0.15
_CAUSES: dict[tuple[str, str], str] = {}


def cause_of(row: Row, errors: dict[str, float | None]) -> str:
    """Return the cause of what is off by more than the limits, `not known` where it has not been found."""
    missed = {name for name, error in errors.items() if error is not None and abs(error) > _limit(name)}
    found = [_known(row, name) for name in sorted(missed)]
    return "; ".join(dict.fromkeys(found))


def _limit(name: str) -> float:
    return TIME_MISS if name == "time" else MEMORY_MISS


def _known(row: Row, name: str) -> str:
    for (start, what), text in _CAUSES.items():
        if row.id.startswith(start) and what == name:
            return text
    return f"{name}: not known"
