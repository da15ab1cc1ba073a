"""Problems beyond loss minimisation, a folder a problem; one driver, one face of results.

Each is imported when it is first asked for: `trainwright.solvers.minimax`.

>>> import trainwright as tw
>>> tw.solvers.online.Ball(2, radius=5.0).radius
5.0
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "bilevel",
    "consensus",
    "constrained",
    "convex_nets",
    "linear",
    "minimax",
    "online",
    "policy",
    "transport",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
