"""What computation hides of the ways of parameters, on devices that compute while something is on its way.

    E ≥ P − ω · C          of the forward and of the backward, each
    seconds  δ · P + (1 − δ) · E    in place of P

P are the seconds of what parameters travel in (`joined`), C those of computation, reruns included. The first region's
parameters are not among P: nothing runs before they are there, nor after their gradients are on their way. ω < 1, since
what is on its way is hidden by what runs at that moment, not by the whole phase (`overlap.Timeline`), and δ > 0, so that
nothing travels for no reason.

In long programs nothing is taken to be hidden: E makes the relaxation weak, since reruns are C and gathers P. All that
travels then counts, which was close enough in the long programs tried, where little of it is exposed.
"""

from __future__ import annotations

from .milp import Model, Terms
from .problem import Problem
from .recompute import Recompute
from .sharding import Sharding

HIDES = 0.8
"""ω: of computation, what there is something to hide behind."""
EXPOSED = 0.1
"""δ: of what travels, what nothing hides however much is computed."""
HIDDEN = "what computation hides of what is on its way"


def hide(model: Model, problem: Problem, sharding: Sharding, recompute: Recompute | None = None) -> None:
    """Take what computation hides out of the objective."""
    if not sharding.joined.is_weak or problem.costs.device.kind != "gpu":
        return
    computing = _computing(problem, sharding, recompute)
    for phase in (0, 1):
        travelling = [(c, seconds[phase]) for c, seconds in sharding.joined.travelling.items() if seconds[phase]]
        for column, seconds in travelling:
            model.cost[column] -= (1 - EXPOSED) * seconds
        exposed = model.column(cost=1 - EXPOSED)
        hiding = [(column, -HIDES * seconds) for column, seconds in computing[phase]]
        model.row(HIDDEN, [*travelling, *hiding, (exposed, -1.0)], upper=0.0)


def _computing(problem: Problem, sharding: Sharding, recompute: Recompute | None) -> tuple[Terms, Terms]:
    """The seconds of computation in the forward and in the backward."""
    forward: Terms = []
    backward: Terms = []
    for decision in problem.groups:
        for option, column in enumerate(sharding.choice[decision]):
            forward.append((column, decision.count * decision.forward_s[option]))
            backward.append((column, decision.count * decision.backward_s[option]))
            if recompute is not None and (decision, option) in recompute.rerun:
                backward.append((recompute.rerun[decision, option], decision.forward_s[option]))
    return forward, backward
