"""Plans held to a textbook recipe by what every decision may be, the rest left to the solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.planner.problem.problem import Decision
from trainwright.planner.problem.recipes import Restriction
from trainwright.planner.search.solve import Answer, Infeasible, Settings
from trainwright.planner.task import Place

ANY: list[str] = []
LLAMA_OPTIMUS = {
    ":embedding": ["b0/m"],
    "norm:": ["d0/d2"],
    "}:add": ["d0/d2"],
    "q_proj:": ["b0/o.0"],
    "k_proj:": ["b0/o.0"],
    "v_proj:": ["b0/o.0"],
    ":sdpa": ["b0/h"],
    "o_proj:": ["b0/o"],
    "gate_proj:": ["b0/o"],
    "up_proj:": ["b0/o"],
    "act_fn:": ["d0/d2"],
    "down_proj:": ["b0/o"],
    "lm_head:": ["b0/o"],
}


def option_name(decision: Decision, option: int) -> str:
    """Return what an option splits, axis by axis: loops of a group, dims of a parameter; R for nothing."""
    at = decision.options[option]
    if decision.group is not None:
        return "/".join("R" if index < 0 else decision.group.loops[index].name for index in at)
    return "/".join("R" if index < 0 else f"d{decision.tied[0].slots[index].dim}" for index in at)


def restricted(place: Place, names: Mapping[str, Sequence[str]]) -> Answer | Infeasible:
    """Return the fastest plan in which each decision is what the last part of `names` that is in its key allows."""
    allowed = {}
    for decision in place.problem.decisions:
        wanted = [options for part, options in names.items() if part in decision.key]
        if wanted and wanted[-1]:
            found = [k for k in range(len(decision.options)) if option_name(decision, k) in wanted[-1]]
            offered = [option_name(decision, k) for k in range(len(decision.options))]
            assert found, (decision.key, wanted[-1], offered)
            allowed[decision] = frozenset(found)
    return place.solver.solve(Settings(None, 60.0, Restriction(allowed)))


def optimus(place: Place) -> Answer | Infeasible:
    """Weights and activations of a Llama split on both axes: samples and width, width in and width out."""
    names: dict[str, list[str]] = dict(LLAMA_OPTIMUS)
    for decision in place.problem.params:
        if len(decision.tied[0].shape) == 2:
            both = [option_name(decision, k) for k in range(len(decision.options))]
            names[decision.key] = [name for name in both if name == "d1/d0"] or [n for n in both if "R" not in n]
    return restricted(place, names)
