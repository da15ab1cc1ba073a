"""Between a `Plan`, keyed by module paths with repeated blocks written once, and the `Decisions` of a program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..artifacts import BatchEntry, OpPlan, ParamPlan, Plan, UserError
from ..artifacts.plan import names_of_batch
from .blocks import RegionClass
from .groups import Group
from .layout import REPLICATE, layout_text, parse_layout
from .local import Decisions
from .program import Op, Program, Tensor

_STATE = "state"
"""What an optimizer keeps for a parameter, as a plan names it."""


def plan_sections(
    program: Program, decisions: Decisions
) -> tuple[dict[str, ParamPlan], dict[str, OpPlan], dict[str, BatchEntry]]:
    """Write decisions as the `params`, `modules` and `batch` of a plan."""
    params = {}
    for tied in param_classes(program):
        layout = layout_text(decisions.params[tied[0]], tied[0].slots)
        members = [member for member, tensor in enumerate(tied) if tensor in decisions.offloaded_states]
        offloaded = {_STATE: _blocks(members, len(tied))} if members else {}
        shared = sorted(" ".join(layout_text(own, tied[0].slots)) for t, own in decisions.shared if t is tied[0])
        key = span([tensor.key for tensor in tied])
        params[key] = ParamPlan(layout=layout, offloaded=offloaded, shared=tuple(shared))
    modules = {}
    for region_class in program.classes:
        for group in region_class.groups:
            modules[group_key(region_class, group)] = _op_plan(region_class, group, decisions)
    replicated = (REPLICATE,) * len(decisions.mesh)
    own = names_of_batch({tensor.key: tensor.shape for tensor in program.inputs})
    batch = {
        tensor.key: BatchEntry(
            shape=(program.num_runs * tensor.shape[0], *tensor.shape[1:]) if tensor.key in own else tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            layout=layout_text(decisions.inputs.get(tensor, replicated), tensor.slots),
        )
        for tensor in program.inputs
    }
    return params, modules, batch


def decisions_of(program: Program, plan: Plan) -> Decisions:
    """Read a plan's decisions for `program`; `UserError` when the plan is another model's or names what is not there."""
    if plan.fingerprint != program.fingerprint:
        raise UserError(
            f"the plan's own model is needed; this one has fingerprint {program.fingerprint}, the plan {plan.fingerprint} "
            f"({plan.model.name}, torch {plan.torch_version}); use the same model, batch shape and library versions, or plan anew"
        )
    mesh = tuple(plan.mesh.values())
    decisions = Decisions(mesh, {}, {}, overlap=plan.overlap)
    for tied in param_classes(program):
        key = span([tensor.key for tensor in tied])
        entry = _entry(plan.params, key, "params")
        layout = parse_layout(_per_axis(entry.layout, mesh, key), tied[0].slots, key)
        decisions.params.update(dict.fromkeys(tied, layout))
        decisions.offloaded_states |= _states_away(tied, entry.offloaded, key)
        for text in entry.shared:
            wanted = parse_layout(_per_axis(text.split(), mesh, key), tied[0].slots, key)
            decisions.shared |= {(tensor, wanted) for tensor in tied}
    for region_class in program.classes:
        for group in region_class.groups:
            key = group_key(region_class, group)
            entry = _entry(plan.modules, key, "modules")
            decisions.splits[group] = _split_of(group, _per_axis(entry.split, mesh, key), key)
            decisions.recomputed |= _values(region_class, group, entry.recomputed, key, is_rerun=True)
            decisions.offloaded |= _values(region_class, group, entry.offloaded, key)
    for tensor in program.inputs:
        batch_entry = _entry(plan.batch, tensor.key, "batch")
        decisions.inputs[tensor] = parse_layout(
            _per_axis(batch_entry.layout, mesh, tensor.key), tensor.slots, tensor.key
        )
    if twice := sorted(decisions.recomputed & decisions.offloaded):
        raise UserError(
            f"one fate for every value is needed; {twice[0]} is both recomputed and offloaded; take it out of one of them"
        )
    if (decisions.offloaded or decisions.offloaded_states) and plan.offload is None:
        raise UserError(
            "the plan's `offload` (tier, in_flight_bytes) is needed where values are offloaded; it has none; add it, or plan anew"
        )
    decisions.in_flight_bytes = plan.offload.in_flight_bytes if plan.offload is not None else 0
    return decisions


def group_key(region_class: RegionClass, group: Group) -> str:
    """Return the key under which a plan lists `group`: `transformer.h.{0-11}.attn:sdpa`."""
    return span([member.ops[group.head.position].key for member in region_class.members])


def param_classes(program: Program) -> list[list[Tensor]]:
    """Return the parameters, those together that play the same part in repeated blocks and so share one layout."""
    classes: dict[Tensor, list[Tensor]] = {tensor: [tensor] for tensor in program.params}
    for region_class in program.classes:
        for row in zip(*(member.externals for member in region_class.members)):
            tied = all(tensor.role == "param" and len(classes[tensor]) == 1 for tensor in row)
            if tied and len(set(row)) == len(row) > 1:
                classes.update({tensor: list(row) for tensor in row})
    seen: set[Tensor] = set()
    result = []
    for tensor in program.params:
        if tensor not in seen:
            result.append(classes[tensor])
            seen.update(classes[tensor])
    return result


def span(names: Sequence[str]) -> str:
    """Write names that differ in one number as one.

    >>> span(["h.0.attn", "h.1.attn", "h.2.attn", "h.5.attn"])
    'h.{0-2,5}.attn'
    """
    if len(names) == 1:
        return names[0]
    rows = [re.split(r"(\d+)", name) for name in names]
    differing = (
        [k for k in range(len(rows[0])) if len({row[k] for row in rows}) > 1]
        if len({len(r) for r in rows}) == 1
        else []
    )
    if len(differing) == 1 and rows[0][differing[0]].isdigit():
        at = differing[0]
        return "".join(rows[0][:at]) + "{" + ranges(int(row[at]) for row in rows) + "}" + "".join(rows[0][at + 1 :])
    head = _common_prefix(names)
    tail = _common_prefix([name[len(head) :][::-1] for name in names])[::-1]
    middles = [name[len(head) : len(name) - len(tail)] for name in names]
    return f"{head}{{{','.join(middles)}}}{tail}"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as runs.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def parse_ranges(text: str, count: int, where: str) -> set[int]:
    """Read `all` or runs of numbers below `count`; `UserError` naming `where` otherwise."""
    if text == "all":
        return set(range(count))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) >= count:
            raise UserError(f"blocks such as 0-{count - 1} or all are needed; {where} has {text!r}; there are {count}")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    count = next((k for k, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:count]


def _fates(group: Group) -> Iterator[tuple[str, Op, str]]:
    """Every value of a group that may be recomputed or offloaded: (its name in a plan, the op, the end of its key)."""
    for op in group.ops:
        prefix = "" if op is group.head else f"{op.key}."
        for index in range(len(op.outputs)):
            yield f"{prefix}out{index or ''}", op, f".out{index or ''}"
        yield f"{prefix}internal", op, ".internal"
        for index in range(len(op.inputs)):
            yield f"{prefix}in{index}", op, f".in{index}"


def _op_plan(region_class: RegionClass, group: Group, decisions: Decisions) -> OpPlan:
    split = tuple(group.loops[loop].name if loop >= 0 else "-" for loop in decisions.splits[group])
    return OpPlan(
        split=split,
        recomputed=_named(region_class, group, decisions.recomputed),
        offloaded=_named(region_class, group, decisions.offloaded),
    )


def _named(region_class: RegionClass, group: Group, keys: set[str]) -> dict[str, str]:
    """Write those of a group's values whose keys are given: name in a plan → blocks."""
    found: dict[str, str] = {}
    for name, op, suffix in _fates(group):
        members = [m for m, region in enumerate(region_class.members) if region.ops[op.position].key + suffix in keys]
        if members:
            found[name] = _blocks(members, region_class.multiplicity)
    return found


def _blocks(members: Sequence[int], count: int) -> str:
    return "all" if len(members) == count else ranges(members)


def _states_away(tied: Sequence[Tensor], chosen: Mapping[str, str], key: str) -> set[Tensor]:
    """Return those of a parameter's instances whose optimizer states a plan keeps off the device."""
    found: set[Tensor] = set()
    for name, text in chosen.items():
        if name != _STATE:
            raise UserError(f"{_STATE} is all that {key} can have offloaded; got {name!r}; take it out")
        found |= {tied[member] for member in parse_ranges(text, len(tied), f"{key} {name}")}
    if found and not tied[0].requires_grad:
        raise UserError(f"a parameter that is trained is needed to offload its state; {key} is not; take it out")
    return found


def _effect(op: Op) -> str:
    """Say why an op runs once."""
    return f"writes {op.writes}" if op.writes else "reads what the forward writes later"


def _values(
    region_class: RegionClass, group: Group, chosen: Mapping[str, str], key: str, is_rerun: bool = False
) -> set[str]:
    """Return the keys of the values that a plan names; `UserError` where they are to be rerun and may not be."""
    table = {name: (op, suffix) for name, op, suffix in _fates(group)}
    found: set[str] = set()
    for name, text in chosen.items():
        if name not in table:
            raise UserError(f"a value of {key} is needed; {name!r} is none; one of {', '.join(table)} would do")
        op, suffix = table[name]
        if is_rerun and op.runs_once and not suffix.startswith(".in"):
            raise UserError(
                f"ops without effects are needed to be recomputed; {op.key} {_effect(op)}, and a rerun would not give the "
                f"same; take {name} of {key} out of what is recomputed"
            )
        for member in parse_ranges(text, region_class.multiplicity, f"{key} {name}"):
            found.add(region_class.members[member].ops[op.position].key + suffix)
    return found


def _split_of(group: Group, names: Sequence[str], key: str) -> tuple[int, ...]:
    loops = {loop.name: index for index, loop in enumerate(group.loops) if not loop.whole}
    for name in names:
        if name != "-" and name not in loops:
            raise UserError(
                f"a loop of {key} is needed; {name!r} cannot be split; one of -, {', '.join(loops)} would do"
            )
    return tuple(loops.get(name, -1) for name in names)


def _per_axis(entries: Sequence[str], mesh: Sequence[int], key: str) -> Sequence[str]:
    if len(entries) != len(mesh):
        raise UserError(f"one entry per mesh axis is needed, {len(mesh)} in all; {key} has {' '.join(entries)!r}")
    return entries


def _entry(section: dict, key: str, name: str):
    if key not in section:
        raise UserError(
            f"a plan for every part of the model is needed; {name} lacks {key}; plan anew, or restore the entry"
        )
    return section[key]
