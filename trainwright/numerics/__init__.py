"""What optimizers, schedules and solvers share: Hessian-vector products, Lanczos, line search, quantisation.

Each is imported when it is first asked for: `trainwright.numerics.lanczos`.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "cg",
    "hvp",
    "lanczos",
    "linesearch",
    "native",
    "normals",
    "norms",
    "quantise",
    "seeds",
    "select",
    "shards",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
