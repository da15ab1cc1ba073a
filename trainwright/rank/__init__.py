"""One rank's instructions: built from a program and a plan's decisions, scheduled, executed."""

from .local import LocalProgram, build_local

__all__ = ["LocalProgram", "build_local"]
