"""Optimizer states off the device: of each class of parameters, in how many instances they leave between updates.

    S[d, k] ∈ 0..M     instances of a parameter in layout k whose states are on the tier     S + R = M · x[d, k],  R stay

    bytes     every row has the states of R alone (`memory`)
    window    W ≥ 2 · bytes · S / M: at the optimizer's step two parameters' states stand on the device
    capacity  one row with what else leaves (`offload`)
    seconds   E ≥ (1 − ω) T  and  E ≥ T − ω · U     T = Σ (bytes / out + bytes / back + 2 latency) · S,  U the update's

Reading and writing take turns, so their times add up; beside them runs the update (`rank.offload_states`). What is
small stays: it would hold up what is large, and frees next to nothing (`costs.LEAST_SHARE`).
"""

from __future__ import annotations

from ...artifacts import Tier
from ..costs.price import state_transfer_s
from ..problem.problem import Decision, Problem
from .milp import MIB, Model, Terms
from .recompute import Recompute
from .sharding import Sharding

STATE_LEAVES = "an optimizer state stays or leaves"
WINDOW = "optimizer states come back to be updated"
STATES_IN_WINDOW = 2
"""Parameters whose states stand on the device at once: the one that is updated, and one on its way."""
STATE_EPSILON_S = 1e-9
"""So that nothing leaves for no reason."""


def add_states(
    model: Model, problem: Problem, sharding: Sharding, recompute: Recompute, has_window: bool = True
) -> Terms:
    """Add the columns of the states that may leave; return the MiB that they take of the tier.

    has_window: states come back at the optimizer's step, in a window of their own; else beside the backward (`resting`).
    """
    taken: Terms = []
    for decision in problem.params:
        for option, chosen in enumerate(sharding.choice[decision]):
            size = decision.leaving_state_bytes[option] / MIB
            if size > 0:
                away, stays = add_away(model, decision, chosen, STATE_LEAVES)
                recompute.states[decision, option], recompute.states_stay[decision, option] = away, stays
                taken.append((away, size))
    if not taken or not has_window:
        return taken
    recompute.state_window = model.column()
    for (decision, option), column in recompute.states.items():
        size = STATES_IN_WINDOW * decision.leaving_state_bytes[option] / MIB / decision.count
        model.row(WINDOW, [(column, size), (recompute.state_window, -1.0)], upper=0.0)
    return taken


def add_away(model: Model, decision: Decision, chosen: int, name: str) -> tuple[int, int]:
    """Add the columns of the instances of a parameter of which something leaves, and of those of which it stays."""
    count = float(decision.count)
    away, stays = model.column(count, STATE_EPSILON_S, integer=True), model.column(count)
    model.row(name, [(stays, 1.0), (away, 1.0), (chosen, -count)], 0.0, 0.0)
    return away, stays


def moved_terms(problem: Problem, recompute: Recompute, tier: Tier) -> Terms:
    """Return the seconds that all states take to move."""
    return [
        (column, state_transfer_s(tier, decision.leaving_state_bytes[option]))
        for (decision, option), column in recompute.states.items()
    ]


def update_terms(problem: Problem, sharding: Sharding) -> Terms:
    """Return the seconds of the optimizer's step."""
    return [
        (column, decision.count * decision.backward_s[option])
        for decision in problem.params
        for option, column in enumerate(sharding.choice[decision])
    ]
