"""Carries a plan's decisions over to the same model captured at other batch shapes.

Decisions belong to ops, loops and tensors; walking both captures together pairs those of one with those of the other. A
dim of size 1 has no loop, so its ranks compute the same, replicated. A step is exact under any decisions, so a decision
that is not carried over costs time, never correctness. Parameters alone have to keep their layouts, since they are the
same tensors.

    ops        aligned by key, or where the graphs differ (an `expand` to one row is none) by name and module
    factors    planned dim by dim, through the tensors of aligned ops                          (`_Twins`)
    splits     loop by loop, through factors                                                   (`_split`)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

import torch
from torch import nn

from ..artifacts import BatchEntry, UserError
from .decisions import Decisions
from .factors import Factor, leaves
from .groups import Group, Split
from .layout import Layout, layout_text, parse_layout
from .program import Op, Program, Tensor
from .sampling import in_form_of


def entry_layout(entry: BatchEntry, shape: Sequence[int]) -> tuple[str, ...]:
    """Return the layout of a batch entry that has another `shape` than planned: as planned where it can be.

    A dim of size 1 is replicated, as is one that was split along an inner factor and has another size.

    >>> entry = BatchEntry(shape=(8, 12), dtype="int64", layout=("S0", "S1.1/3.4"))
    >>> entry_layout(entry, (5, 12)), entry_layout(entry, (1, 9))
    (('S0', 'S1.1/3.4'), ('R', 'R'))
    """
    return tuple(_part_layout(part, entry.shape, shape) for part in entry.layout)


def _part_layout(part: str, planned: Sequence[int], shape: Sequence[int]) -> str:
    if not part.startswith("S"):
        return part
    dim = int(part[1:].split("/")[0].split(".")[0])
    if shape[dim] == planned[dim]:
        return part
    return "R" if shape[dim] == 1 or "/" in part else part


def without_weights(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> nn.Module | None:
    """Return a copy of `model` that can be captured and holds no weights; None where the model cannot be copied.

    Masks are recognised by their values, so buffers are not left out; `buffers`, by name, stand in place of the model's own
    where those have values, so that none is held twice.
    """
    memo: dict[int, object] = {
        id(tensor): tensor if tensor.is_meta else buffers.get(name, tensor) for name, tensor in model.named_buffers()
    }
    for module in model.modules():
        memo.update({id(value): value for value in vars(module).values() if isinstance(value, torch.Tensor)})
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        return None


def decisions_at(
    program: Program, planned: Program, decisions: Decisions, inputs: Mapping[str, Sequence[str]]
) -> Decisions:
    """Return the `decisions` of the `planned` program for `program`, which is the same step on a batch of other shapes.

    inputs: the layout of each batch entry, as a plan writes it (`entry_layout`).

    Raises `UserError` where a parameter or batch entry cannot stand as it must.
    """
    twins = _Twins(program, planned)
    found = replace(
        decisions,
        splits={},
        params={},
        inputs={},
        recomputed=set(),
        offloaded=set(),
        offloaded_states=set(),
        offloaded_params=set(),
        shared=set(),
    )
    for tensor in program.params:
        twin = twins.sources.get(("param", tensor.key))
        if twin is None or twin.shape != tensor.shape:
            raise UserError(
                f"the same parameters at every batch shape are needed; {tensor.key} is read only at this one; plan for this "
                "shape, or keep to the planned one"
            )
        found.params[tensor] = _same_layout(decisions.params[twin], twin, tensor)
        if twin in decisions.offloaded_states:
            found.offloaded_states.add(tensor)
        if twin in decisions.offloaded_params:
            found.offloaded_params.add(tensor)
        found.shared |= {(tensor, _same_layout(own, twin, tensor)) for held, own in decisions.shared if held is twin}
    for tensor in program.inputs:
        found.inputs[tensor] = parse_layout(inputs[tensor.key], tensor.slots, tensor.key)
    for region_class in program.classes:
        for group in region_class.groups:
            found.splits[group] = _split(group, twins, decisions)
    found.recomputed = twins.keys(decisions.recomputed)
    found.offloaded = twins.keys(decisions.offloaded)
    return found


def _same_layout(layout: Layout, planned: Tensor, tensor: Tensor) -> Layout:
    return parse_layout(layout_text(layout, planned.slots), tensor.slots, tensor.key)


class _Twins:
    """Pairs the ops, tensors and factors of a capture with those of the planned program."""

    def __init__(self, program: Program, planned: Program) -> None:
        self.program, self.planned = program, planned
        self.alike = [op.key for op in program.ops] == [op.key for op in planned.ops]
        self.op: dict[Op, Op] = dict(_aligned(program.ops, planned.ops))
        self.sources = {(t.role, t.key): t for t in planned.tensors if t.role != "op"}
        self.factor: dict[Factor, Factor] = {}
        """Maps a planned factor to its twin in this capture; a dim of size 1 has none."""
        for tensor in program.tensors:
            if tensor.role != "op" and (tensor.role, tensor.key) in self.sources:
                self._meet(tensor, self.sources[(tensor.role, tensor.key)])
        for op, twin in self.op.items():
            for tensor, other in zip(op.outputs, twin.outputs):
                self._meet(tensor, other)

    def _meet(self, tensor: Tensor, planned: Tensor) -> None:
        if len(tensor.dims) != len(planned.dims):
            return
        for own, other in zip(tensor.dims, planned.dims):
            here, there = leaves(own), leaves(other)
            if len(here) == len(there):
                self.factor.update(zip(there, here))

    def keys(self, planned: set[str]) -> set[str]:
        """Return the keys of this capture's values that are twins of the planned ones."""
        found = set()
        for op, twin in self.op.items():
            for own, other in _value_keys(op, twin):
                if other in planned and (self.alike or _may_be_rederived(self.program, op, own)):
                    found.add(own)
        return found


def _aligned(ops: Sequence[Op], planned: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Yield the ops that are the same in both captures, in order."""
    if [op.key for op in ops] == [op.key for op in planned]:
        yield from zip(ops, planned)
        return
    here, there = ([(op.name, op.path) for op in each] for each in (ops, planned))
    for block in SequenceMatcher(None, here, there, autojunk=False).get_matching_blocks():
        yield from zip(ops[block.a : block.a + block.size], planned[block.b : block.b + block.size])


def _value_keys(op: Op, twin: Op) -> Iterator[tuple[str, str]]:
    yield from zip((tensor.key for tensor in op.outputs), (tensor.key for tensor in twin.outputs))
    for end in ("internal", *(f"in{place}" for place in range(min(len(op.inputs), len(twin.inputs))))):
        yield f"{op.key}.{end}", f"{twin.key}.{end}"


def _may_be_rederived(program: Program, op: Op, key: str) -> bool:
    """Return True if a value may be recomputed or offloaded in this graph, which differs from the planned one."""
    outputs = [tensor for tensor in op.outputs if tensor.key == key]
    inside = all(consumer.region is op.region for tensor in outputs for consumer in tensor.consumers)
    return inside and not any(tensor in program.outputs for tensor in outputs) and not (outputs and op.kind == "view")


def _split(group: Group, twins: _Twins, decisions: Decisions) -> Split:
    """Return the loops of `group` that are split as those of the planned group of the same ops."""
    pairs = {op: twins.op[op] for op in group.ops if op in twins.op and not twins.op[op].constant}
    if not pairs:
        return (-1,) * len(decisions.mesh)
    planned = twins.planned.group_of(pairs.get(group.head) or next(iter(pairs.values())))
    split = decisions.splits[planned]
    return in_form_of(split, (_loop(group, planned, loop, pairs, twins) for loop in split))


def _loop(group: Group, planned: Group, chosen: int, pairs: Mapping[Op, Op], twins: _Twins) -> int:
    """Return the loop of `group` that is loop `chosen` of the planned group; -1 where there is none that may be split."""
    if chosen < 0:
        return -1
    of_twin = {(op.position, _representative(twin)): op for op, twin in pairs.items()}
    members = {op.position: op for op in planned.ops}
    found: list[tuple[bool, int]] = []
    for (position, name, part), loop in planned.loop_at.items():
        if loop != chosen:
            continue
        twin = members[position]
        wanted = twins.factor.get(leaves(twin.loops[name])[part])
        found += [
            (other != name, index)
            for (at, other, number), index in group.loop_at.items()
            if of_twin.get((at, twin)) is not None
            and leaves(of_twin[(at, twin)].loops[other])[number] is wanted
            and not group.loops[index].whole
        ]
    return min(found, default=(False, -1))[1]  # of the same name first: two loops of an op may run over one factor


def _representative(op: Op) -> Op:
    assert op.region is not None
    return op.region.region_class.representative.ops[op.position]
