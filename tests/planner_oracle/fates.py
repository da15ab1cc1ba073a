"""Holds the counts that a plan chooses for a sharding: instances that rerun, convert again, are kept, are offloaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainwright.planner.problem.problem import Decision, Stored, Use, Want

Kept = Stored | Decision | tuple[Use, Want]
"""What may be offloaded: a group's output, what it keeps inside, a converted copy."""


@dataclass
class Fate:
    """The counts of one plan: how many instances of each group or copy rerun, convert again, are kept."""

    reruns: dict[Decision, int]
    converts: dict[tuple[Use, Want], int]
    copies: dict[tuple[Use, Want], int] = field(default_factory=dict)
    kept: dict[Stored, float] = field(default_factory=dict)
    leaves: dict[Kept, int] = field(default_factory=dict)
    """How many instances of what is kept are offloaded."""
    states: dict[Decision, int] = field(default_factory=dict)
    """Of how many instances of a parameter the optimizer's states are offloaded."""
