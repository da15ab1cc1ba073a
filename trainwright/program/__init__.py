"""The captured graph in terms of loops, blocks and layouts, and what a plan decides about it."""

from .decisions import Decisions
from .program import Op, Program, Tensor, build_program

__all__ = ["Decisions", "Op", "Program", "Tensor", "build_program"]
