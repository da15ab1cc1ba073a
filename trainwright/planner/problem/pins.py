"""Pins: decisions that the user holds fixed while the rest is optimised.

    PATTERN=shard(LOOP)@AXIS     an op splits its loop, or a parameter its dim (`dim0`), over a mesh axis
    PATTERN=replicate@AXIS       an op splits nothing over the axis; a parameter is whole along it
    BLOCK=begin(S)               stage S of a pipeline begins at a block; with `--pipeline` alone
    PATTERN=keep                 what the op leaves for the backward is kept
    PATTERN=recompute            it is rederived in every block
    PATTERN=offload              it is kept, off the device
    PATTERN=sampled              a linear map keeps some of its rows for its weight's gradient; with `--sampled` alone
    PATTERN=exact                it keeps all of them
    PATTERN=state-keep           what the optimizer keeps for a parameter stays on the device
    PATTERN=state-offload        it is off the device but while the parameter is updated

`PATTERN` is a glob over the keys of a plan, module paths or parameter names: `h.*.mlp.c_fc`, `lm_head*`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

from ...artifacts import MeshAxis, UserError
from ...program.layout import REPLICATE
from ...program.sampling import share_of
from ..costs.costs import LEAST_SHARE
from .problem import Decision, Problem
from .recipes import Restriction

_GRAMMAR = (
    "PATTERN=shard(LOOP)@AXIS, PATTERN=replicate@AXIS, PATTERN=keep, PATTERN=recompute, PATTERN=offload, "
    "PATTERN=sampled, PATTERN=exact, PATTERN=state-keep or PATTERN=state-offload"
)


def apply_pins(problem: Problem, pins: Sequence[str], restriction: Restriction) -> None:
    """Narrow `restriction` to the options that obey `pins`; raise `UserError` for a pin that nothing can obey."""
    for pin in pins:
        pattern, action = _parse(pin)
        matched = _matching(problem, pattern, pin)
        if action in ("keep", "recompute", "offload"):
            groups = [decision for decision in matched if decision.group is not None]
            if action == "offload":
                _allow_offload(problem, pin, restriction)
            elif action == "recompute":
                groups = _able_to_rerun(groups, pin)
            restriction.fates.update(dict.fromkeys(groups, action))
        elif action in ("sampled", "exact"):
            _narrow_form(matched, action == "sampled", pin, restriction)
        elif action in ("state-keep", "state-offload"):
            params = [decision for decision in matched if decision.group is None]
            if action == "state-offload":
                _allow_offload(problem, pin, restriction)
                params = _able_to_leave(problem, params, pin)
            restriction.fates.update(dict.fromkeys(params, action))
        else:
            _narrow(problem, matched, action, pin, restriction)
    _check_capacity(problem, restriction)


def _narrow_form(matched: Sequence[Decision], is_sampled: bool, pin: str, restriction: Restriction) -> None:
    """Leave the named groups the options of one form, sampled or exact; `UserError` where none has any left."""
    obeyed = False
    for decision in (each for each in matched if each.group is not None):
        before = restriction.allowed.get(decision, frozenset(range(len(decision.options))))
        after = frozenset(k for k in before if bool(share_of(decision.options[k])) == is_sampled)
        if after:
            restriction.allowed[decision] = after
            obeyed = True
    if not obeyed:
        raise UserError(
            f"linear maps that may keep some of their rows are needed; {pin!r} names none; add --sampled 0.3, or name linear "
            "maps by trained weights"
        )


def _able_to_rerun(decisions: Sequence[Decision], pin: str) -> list[Decision]:
    """Return those of the named groups that may run again; `UserError` where there is none."""
    able = [decision for decision in decisions if decision.group is not None and decision.group.may_rerun]
    if decisions and not able:
        raise UserError(
            f"ops that may run again are needed to be recomputed; what {pin!r} names ({decisions[0].key}) has no gradient, "
            "writes a buffer, or reads one that the forward writes; name other ops, or leave the pin out"
        )
    return able


def _able_to_leave(problem: Problem, params: Sequence[Decision], pin: str) -> list[Decision]:
    """Return the parameters whose optimizer states may leave the device; `UserError` where none of them may."""
    if not problem.optimizer.updates_alone:
        raise UserError(
            f"an optimizer that updates each parameter by itself is needed to keep its states off the device; {pin!r} asks for "
            f"that, and {getattr(problem.optimizer, 'name', 'this one')} does not; take adamw or sgd-momentum, or leave the pin out"
        )
    able = [decision for decision in params if any(decision.leaving_state_bytes)]
    if not able:
        raise UserError(
            f"optimizer states that are worth moving are needed; what {pin!r} names has none, or they are below "
            f"{LEAST_SHARE:.2g} of the largest parameter's; name larger parameters"
        )
    return able


def _check_capacity(problem: Problem, restriction: Restriction) -> None:
    """Raise `UserError` where the tier cannot hold the states that are pinned to it."""
    tier = problem.costs.tier
    if tier is None or tier.capacity_bytes is None:
        return
    pinned = [decision for decision, fate in restriction.fates.items() if fate == "state-offload"]
    least = 0
    for decision in pinned:
        options = restriction.allowed.get(decision, range(len(decision.options)))
        least += decision.count * min(decision.leaving_state_bytes[option] for option in options)
    if least > tier.capacity_bytes:
        raise UserError(
            f"room for the optimizer states that are pinned off the device is needed, {least} bytes a device at least; the tier "
            f"has {tier.capacity_bytes}; pin fewer, or take hardware with a larger one"
        )


def _allow_offload(problem: Problem, pin: str, restriction: Restriction) -> None:
    if problem.costs.tier is None:
        raise UserError(
            f"somewhere to offload to is needed; {pin!r} asks for it; add --offload host or --offload disk, on hardware that has it"
        )
    restriction.offload = True


def _parse(pin: str) -> tuple[str, str]:
    pattern, _, action = pin.rpartition("=")
    if action.startswith("begin(") or "pipeline" in action:
        raise UserError(
            f"a plan with stages is needed for a pin of where one begins; {pin!r} asks for that; add --pipeline"
        )
    if not pattern or not re.fullmatch(
        r"(state-)?(keep|offload)|recompute|sampled|exact|replicate@\S+|shard\([^()]+\)@\S+", action
    ):
        raise UserError(f"a pin is {_GRAMMAR}; got {pin!r}")
    return pattern, action


def _matching(problem: Problem, pattern: str, pin: str) -> list[Decision]:
    names = {decision: _names(decision) for decision in problem.decisions}
    found = [
        decision
        for decision, own in names.items()
        if any(
            fnmatch.fnmatchcase(name, glob)
            for name in own
            for glob in (pattern, f"*.{pattern}", f"{pattern}:*", f"*.{pattern}:*")
        )
    ]
    if not found:
        known = sorted({name for own in names.values() for name in own})
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
        raise UserError(
            f"a pin of something in the model is needed; {pin!r} matches nothing; near are {', '.join(near)}"
        )
    return found


def _names(decision: Decision) -> set[str]:
    """Return the names by which a pin may match a decision: its key in a plan, and the keys of all its instances."""
    names = {decision.key, *(tensor.key for tensor in decision.tied)}
    if decision.region_class is not None and decision.group is not None:
        names |= {member.ops[op.position].key for member in decision.region_class.members for op in decision.group.ops}
    return names


def _narrow(problem: Problem, matched: Sequence[Decision], action: str, pin: str, restriction: Restriction) -> None:
    what, _, axis_name = action.rpartition("@")
    axis = _axis(problem.costs.axes, axis_name, pin)
    wanted = REPLICATE if what == "replicate" else what[6:-1]
    obeyed = False
    offered: set[str] = set()
    for decision in matched:
        before = restriction.allowed.get(decision, frozenset(range(len(decision.options))))
        names = [_option_name(decision, option, axis) for option in decision.options]
        offered |= {name for name in names if name != "-"}
        after = frozenset(k for k in before if names[k] == ("-" if wanted == REPLICATE else wanted))
        if after:
            restriction.allowed[decision] = after
            obeyed = True
    if not obeyed:
        ways = ", ".join([*(f"shard({name})" for name in sorted(offered)), "replicate"])
        why = "".join(f" ({reason})" for reason in sorted(_reasons(matched, str(wanted))))
        raise UserError(f"a pin that can be obeyed is needed; {pin!r} cannot{why}; over {axis_name} there are {ways}")


def _reasons(decisions: Iterable[Decision], loop: str) -> set[str]:
    """Why ops of these decisions keep the loop of that name whole, where they say."""
    ops = [op for decision in decisions if decision.group is not None for op in decision.group.ops]
    return {op.signature.reasons[loop] for op in ops if loop in op.signature.reasons}


def _option_name(decision: Decision, option: tuple[int, ...], axis: int) -> str:
    if option[axis] < 0:
        return "-"
    if decision.group is not None:
        return decision.group.loops[option[axis]].name
    return f"dim{decision.tied[0].slots[option[axis]].dim}"


def _axis(axes: Sequence[MeshAxis], name: str, pin: str) -> int:
    names = [axis.name for axis in axes]
    if name not in names:
        raise UserError(f"an axis of the mesh is needed; {pin!r} names {name!r}; the axes are {', '.join(names)}")
    return names.index(name)
