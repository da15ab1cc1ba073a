"""Model + batch → `Program`; `Program` + layouts → one rank's local program."""

from .export import Captured, capture
from .local import Decisions, LocalProgram, build_local
from .program import Op, Program, Tensor, build_program

__all__ = [
    "Captured",
    "Decisions",
    "LocalProgram",
    "Op",
    "Program",
    "Tensor",
    "build_local",
    "build_program",
    "capture",
]
