"""Converts between a `Plan`, keyed by module paths with repeated blocks written once, and a program's `Decisions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..artifacts import BatchEntry, OpPlan, ParamPlan, Plan, UserError
from ..artifacts.plan import names_of_batch
from .blocks import RegionClass
from .compiled_shares import shares_of
from .decisions import Decisions
from .groups import Group
from .layout import REPLICATE, layout_text, parse_layout_at_rest
from .plan_entries import parse_ranges, refuse_other_batch, refuse_unknown_corrections, refuse_unknown_keys
from .program import Op, Program, Tensor
from .sampling import SampledSplit, can_sample, share_of
from .span_text import ranges, span

_PARAM = "param"
"""The name, in a plan, of a parameter's own values."""
_STATE = "state"
"""The name, in a plan, of what an optimizer keeps for a parameter."""


def plan_sections(
    program: Program, decisions: Decisions
) -> tuple[dict[str, ParamPlan], dict[str, OpPlan], dict[str, BatchEntry]]:
    """Write decisions as the `params`, `modules` and `batch` of a plan."""
    params = {}
    for tied in param_classes(program):
        layout = layout_text(decisions.params[tied[0]], tied[0].slots)
        offloaded = {}
        for what, away in ((_PARAM, decisions.offloaded_params), (_STATE, decisions.offloaded_states)):
            if members := [member for member, tensor in enumerate(tied) if tensor in away]:
                offloaded[what] = _blocks(members, len(tied))
        shared = sorted(" ".join(layout_text(own, tied[0].slots)) for t, own in decisions.shared if t is tied[0])
        key = span([tensor.key for tensor in tied])
        params[key] = ParamPlan(layout=layout, offloaded=offloaded, shared=tuple(shared))
    modules = {}
    for region_class in program.classes:
        for group in region_class.groups:
            modules[group_key(region_class, group)] = _op_plan(region_class, group, decisions)
    return params, modules, _batch_entries(program, decisions)


def _batch_entries(program: Program, decisions: Decisions) -> dict[str, BatchEntry]:
    replicated = (REPLICATE,) * len(decisions.mesh)
    own = names_of_batch({tensor.key: tensor.shape for tensor in program.inputs})
    return {
        tensor.key: BatchEntry(
            shape=(program.num_runs * tensor.shape[0], *tensor.shape[1:]) if tensor.key in own else tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            layout=layout_text(decisions.inputs.get(tensor, replicated), tensor.slots),
        )
        for tensor in program.inputs
    }


def decisions_of(program: Program, plan: Plan) -> Decisions:
    """Return a plan's decisions for `program`; raise `UserError` if the plan is another model's or has unknown entries."""
    if plan.fingerprint != program.fingerprint:
        raise UserError(
            f"the model that was planned is needed; this one has fingerprint {program.fingerprint}, the plan's has "
            f"{plan.fingerprint} ({plan.model.name}, torch {plan.torch_version}); use the same model, batch shape and library "
            "versions, or plan anew"
        )
    mesh = tuple(plan.inner_mesh.values())
    plan.inner_cluster.mesh(mesh)  # its sizes are those of the hardware
    refuse_unknown_corrections(plan, [op.key for op in program.ops])
    decisions = Decisions(mesh, {}, {}, overlap=plan.overlap, imbalance=plan.imbalance)
    _read_params(program, plan, decisions)
    _read_modules(program, plan, decisions)
    _read_batch(program, plan, decisions)
    if twice := sorted(decisions.recomputed & decisions.offloaded):
        raise UserError(
            f"a value is recomputed or offloaded, not both; {twice[0]} is both recomputed and offloaded; take it out of one of them"
        )
    states = decisions.offloaded_states if plan.tier is None else ()
    if (decisions.offloaded or states) and plan.offload is None:
        raise UserError(
            "the plan's `offload` (tier, in_flight_bytes) is needed where values are offloaded; it has none; add it, or plan anew"
        )
    decisions.compiled = shares_of(program, plan)
    if decisions.compiled is not None and (chosen := sorted(decisions.recomputed | decisions.offloaded)):
        raise UserError(
            f"what a compiled block keeps is said by its share in `compile`; {chosen[0]} is recomputed or offloaded by itself; "
            "take that out, or `compile`"
        )
    decisions.in_flight_bytes = plan.offload.in_flight_bytes if plan.offload is not None else 0
    return decisions


def _read_params(program: Program, plan: Plan, decisions: Decisions) -> None:
    mesh = decisions.mesh
    classes = {span([tensor.key for tensor in tied]): tied for tied in param_classes(program)}
    refuse_unknown_keys(plan.params, classes, "params")
    for key, tied in classes.items():
        entry = _entry(plan.params, key, "params")
        slots = tied[0].slots
        layout = parse_layout_at_rest(_per_axis(entry.layout, mesh, key), slots, key)
        decisions.params.update(dict.fromkeys(tied, layout))
        away = _away(tied, entry.offloaded, key, plan.tier is not None)
        decisions.offloaded_params |= away[_PARAM]
        decisions.offloaded_states |= away[_STATE]
        for text in entry.shared:
            wanted = parse_layout_at_rest(_per_axis(text.split(), mesh, key), slots, f"{key} (shared)")
            decisions.shared |= {(tensor, wanted) for tensor in tied}


def _read_modules(program: Program, plan: Plan, decisions: Decisions) -> None:
    groups = {
        group_key(region_class, group): (region_class, group)
        for region_class in program.classes
        for group in region_class.groups
    }
    refuse_unknown_keys(plan.modules, groups, "modules")
    for key, (region_class, group) in groups.items():
        entry = _entry(plan.modules, key, "modules")
        split = _split_of(group, _per_axis(entry.split, decisions.mesh, key), key)
        decisions.splits[group] = SampledSplit(split, _share_of(group, entry.sampled, key)) if entry.sampled else split
        decisions.recomputed |= _values(region_class, group, entry.recomputed, key, is_rerun=True)
        decisions.offloaded |= _values(region_class, group, entry.offloaded, key)


def _read_batch(program: Program, plan: Plan, decisions: Decisions) -> None:
    own = _batch_entries(program, decisions)
    refuse_unknown_keys(plan.batch, own, "batch")
    for tensor in program.inputs:
        key = tensor.key
        entry = _entry(plan.batch, key, "batch")
        refuse_other_batch(entry, own[key], key)
        decisions.inputs[tensor] = parse_layout_at_rest(_per_axis(entry.layout, decisions.mesh, key), tensor.slots, key)


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


def _fates(group: Group) -> Iterator[tuple[str, Op, str]]:
    """Yield every value of a group that may be recomputed or offloaded: its name in a plan, the op, the end of its key."""
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
        sampled=share_of(decisions.splits[group]),
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


def _away(tied: Sequence[Tensor], chosen: Mapping[str, str], key: str, has_disks: bool) -> dict[str, set[Tensor]]:
    """Return those of a parameter's instances whose values, and those whose optimizer states, a plan keeps off the device."""
    found: dict[str, set[Tensor]] = {_PARAM: set(), _STATE: set()}
    for name, text in chosen.items():
        if name not in found:
            raise UserError(
                f"of {key} {_STATE}, what its optimizer keeps, and {_PARAM}, its values, can be offloaded; got {name!r}; take it "
                "out"
            )
        if name == _PARAM and not has_disks:
            raise UserError(
                f"the plan's `tier` is needed where parameters rest on disks, as {key} does; it has none; plan with --tier"
            )
        found[name] |= {tied[member] for member in parse_ranges(text, len(tied), f"{key} {name}")}
    if found[_STATE] and not tied[0].requires_grad:
        raise UserError(
            f"only parameters that are trained have optimizer states to offload; {key} is frozen; take `offloaded` out"
        )
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
            raise UserError(
                f"{key} has no value {name!r}; it has {', '.join(table)}; name one of these, or take it out"
            )
        op, suffix = table[name]
        if is_rerun and op.runs_once and not suffix.startswith(".in"):
            raise UserError(
                f"ops without effects are needed to be recomputed; {op.key} {_effect(op)}, and a rerun would not give the "
                f"same; take {name} of {key} out of what is recomputed"
            )
        for member in parse_ranges(text, region_class.multiplicity, f"{key} {name}"):
            found.add(region_class.members[member].ops[op.position].key + suffix)
    return found


@dataclass(frozen=True)
class Entry:
    """One fate of one value in a plan: the plan's key, and the keys of the program's values that it names."""

    key: str
    fate: str
    name: str
    keys: frozenset[str]


def entries_of(program: Program, plan: Plan) -> Iterator[Entry]:
    """Yield what a plan says is recomputed or offloaded, entry by entry."""
    for region_class in program.classes:
        for group in region_class.groups:
            key = group_key(region_class, group)
            for fate in ("recomputed", "offloaded"):
                for name, blocks in getattr(plan.modules[key], fate).items():
                    yield Entry(key, fate, name, frozenset(_values(region_class, group, {name: blocks}, key)))


def _split_of(group: Group, names: Sequence[str], key: str) -> tuple[int, ...]:
    loops = {loop.name: index for index, loop in enumerate(group.loops) if not loop.whole}
    for name in names:
        if name != "-" and name not in loops:
            raise UserError(
                f"{key} has no loop {name!r} that can be split; it has {', '.join(loops) or 'none'}; write one of these, or -"
            )
    split = tuple(loops.get(name, -1) for name in names)
    if len(group.pair_axes(split)) > 1:
        raise UserError(
            f"tokens and experts are exchanged along one axis of the mesh; {key} has {' '.join(names)!r}; take the experts alone, "
            "or the tokens alone, on the others"
        )
    return split


def _share_of(group: Group, share: float, key: str) -> float:
    if not any(map(can_sample, group.ops)):
        raise UserError(
            f"a linear map of activations by a trained weight is needed to keep some of its rows; {key} is none; take its "
            "`sampled` out"
        )
    return share


def _per_axis(entries: Sequence[str], mesh: Sequence[int], key: str) -> Sequence[str]:
    if len(entries) != len(mesh):
        raise UserError(
            f"{key} needs one entry for each of the mesh's {len(mesh)} axes; it has {' '.join(entries)!r}; write {len(mesh)}"
        )
    return entries


def _entry(section: dict, key: str, name: str):
    if key not in section:
        raise UserError(
            f"a plan needs an entry for every part of the model; {key} is missing under {name}; put it back, or plan anew"
        )
    return section[key]
