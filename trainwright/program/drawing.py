"""Tells which ops draw random numbers."""

from __future__ import annotations

from typing import Any

from ..ops import find
from ..torch_internals import private
from .program import Op


def draws(op: Op) -> bool:
    """Tell whether an op draws random numbers."""
    target = op.node.target
    rule = find(op.name)
    if rule.draws_by_dropout and rule.dropout is not None:
        name, off = rule.dropout
        return bool(op.call.arg(argument_place(target, name), name, off))
    return private.is_random(target)


def draws_without_dropout(op: Op) -> bool:
    """Tell whether an op draws random numbers in a run that treats every dropout probability as zero."""
    rule = find(op.name)
    return draws(op) and not rule.masks and rule.dropout is None


def needs_state(op: Op) -> bool:
    """Tell whether an op draws random numbers or writes a buffer, so that it needs the state of the run."""
    return draws(op) or bool(op.writes)


def argument_place(target: Any, name: str) -> int:
    """Return the position of the argument called `name` among an op's arguments."""
    return next(place for place, (each, _, _) in enumerate(private.arguments(target)) if each == name)
