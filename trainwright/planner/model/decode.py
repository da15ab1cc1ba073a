"""From the solver's numbers to `Decisions`: the chosen options, and which values of which block are not kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...program.blocks import RegionClass
from ...program.decisions import Decisions
from ...program.groups import Split
from ...program.layout import PARTIAL, REPLICATE, Layout
from ...program.program import Op, Program, Tensor
from ...program.transition import gradient_layout
from ..problem.problem import Decision, Problem, Source, Stored, Use, Want
from .offload import IN_FLIGHT
from .recompute import Recompute
from .sharding import Sharding

_ROUNDING = 1e-5


@dataclass(eq=False)
class Choice:
    """The solver's answer: an option a decision, and how many instances rerun or convert again."""

    options: dict[Decision, int]
    reruns: dict[Decision, int] = field(default_factory=dict)
    converts: dict[tuple[Use, Want], int] = field(default_factory=dict)
    leaves: dict[Stored | Decision | tuple[Use, Want], int] = field(default_factory=dict)
    """The number of kept instances that are offloaded, of an output, of a group's internals or of a converted copy."""
    states: dict[Decision, int] = field(default_factory=dict)
    """The number of instances of a parameter whose optimizer states are offloaded."""
    params: dict[Decision, int] = field(default_factory=dict)
    """The number of instances of a parameter that rest on disks."""
    shared: frozenset[tuple[Source, Want]] = frozenset()
    """The parameters, with the want, of which one gathered copy serves the readers of several regions."""


def read_choice(values: np.ndarray, sharding: Sharding, recompute: Recompute | None) -> Choice:
    """Round the solver's values to a `Choice`."""
    options = {decision: int(np.argmax(values[columns])) for decision, columns in sharding.choice.items()}
    choice = Choice(options, shared=frozenset(_shared(values, sharding, options)))
    if recompute is not None:
        for (decision, option), column in recompute.rerun.items():
            if options[decision] == option:
                choice.reruns[decision] = _count(values[column])
        for (use, native, want), column in recompute.convert.items():
            if use.source.natives[options[use.source.decision]] == native:
                choice.converts[use, want] = _count(values[column])
        choice.leaves = {
            key: num for key, kept in _kept(options, recompute) if (num := _leaving(values, recompute, kept))
        }
        for into, columns in ((choice.states, recompute.states), (choice.params, recompute.params)):
            for (decision, option), column in columns.items():
                if options[decision] == option:
                    into[decision] = round(values[column])
    return choice


def _shared(values: np.ndarray, sharding: Sharding, options: dict[Decision, int]) -> Iterator[tuple[Source, Want]]:
    """Yield the wants that one gathered copy serves for more than one region under the chosen options."""
    for tied in sharding.tied:
        native = tied.source.natives[options[tied.source.decision]]
        for want in tied.wants:
            column = sharding.shared.get((tied.source, native, want))
            is_copy = column is not None and native != want[0] and values[column] > 0.5
            if is_copy and tied.num_readers(want, options) > 1:
                yield tied.source, want


def _kept(options: dict[Decision, int], recompute: Recompute) -> Iterator[tuple[Any, int]]:
    """Yield what may be kept under the chosen options, with the column that counts its kept instances."""
    for (stored, native), column in recompute.keep.items():
        if stored.source.natives[options[stored.source.decision]] == native:
            yield stored, column
    for (decision, option), column in recompute.keep_inner.items():
        if options[decision] == option:
            yield decision, column
    for (use, want), column in recompute.keep_copy.items():
        yield (use, want), column


def _leaving(values: np.ndarray, recompute: Recompute, kept: int) -> int:
    return round(values[recompute.leaves[kept]]) if kept in recompute.leaves else 0


def _count(value: float) -> int:
    return max(0, math.ceil(value - _ROUNDING))


def decisions_from(problem: Problem, choice: Choice) -> Decisions:
    """Write a choice in terms of the program."""
    splits = {d.group: d.options[choice.options[d]] for d in problem.groups if d.group is not None}
    params = {tensor: d.options[choice.options[d]] for d in problem.params for tensor in d.tied}
    decisions = Decisions(problem.mesh, splits, params, imbalance=problem.costs.imbalance)
    decisions.inputs = input_layouts(problem.program, decisions)
    decisions.shared = {(source.tensor, want[0]) for source, want in choice.shared}
    for decision, num in choice.states.items():
        # Beside a backward those that are updated last wait for nobody: theirs stay.
        away = decision.tied[:num] if problem.costs.resting is None else decision.tied[decision.count - num :]
        decisions.offloaded_states.update(away)
    for decision, num in choice.params.items():
        decisions.offloaded_params.update(decision.tied[:num])
    for region_class in problem.program.classes:
        flags = _Flags(problem, choice, decisions, region_class)
        decisions.recomputed |= flags.keys()
        decisions.offloaded |= flags.offloaded()
        decisions.in_flight_bytes = max(decisions.in_flight_bytes, IN_FLIGHT * flags.largest_bytes)
    return decisions


def input_layouts(program: Program, decisions: Decisions) -> dict[Tensor, Layout]:
    """Return for each batch entry the layout of which everything that is wanted of it is a slice."""
    replicated = (REPLICATE,) * len(decisions.mesh)
    layouts: dict[Tensor, Layout] = {}
    for tensor in program.inputs:
        wants = {forward for op, place in _readers(tensor) for forward in [_forward(program, decisions, op, place)]}
        per_axis = [set(entries) for entries in zip(*wants)] if wants else []
        common = tuple(entries.pop() if len(entries) == 1 else REPLICATE for entries in per_axis)
        layouts[tensor] = common if wants and PARTIAL not in common else replicated
    return layouts


def _readers(tensor: Tensor) -> Iterator[tuple[Op, int]]:
    for op in dict.fromkeys(tensor.consumers):
        for place, found in enumerate(op.inputs):
            if found is tensor:
                yield op, place


def _forward(program: Program, decisions: Decisions, op: Op, place: int) -> Layout:
    if op.constant or op.region is None:
        return (REPLICATE,) * len(decisions.mesh)
    group = program.group_of(op)
    return group.input_layout(_twin(op), place, decisions.splits[group])[0]


def _twin(op: Op) -> Op:
    assert op.region is not None
    return op.region.region_class.representative.ops[op.position]


class _Flags:
    """The values of one class that are not kept, member by member."""

    def __init__(self, problem: Problem, choice: Choice, decisions: Decisions, region_class: RegionClass) -> None:
        self.problem, self.choice, self.decisions, self.region_class = problem, choice, decisions, region_class
        self.pinned = {stored.source.tensor for stored in problem.stored if stored.boundary or stored.held}
        self.found: set[str] = set()
        self.largest_bytes = 0
        """The bytes of the largest value that one instance offloads."""

    def offloaded(self) -> set[str]:
        """Return the keys of all values that leave: the first of the instances that are kept, behind those that rerun."""
        found: set[str] = set()
        for kept, num in self.choice.leaves.items():
            if isinstance(kept, tuple):
                found |= self._leaving_copies(*kept, num)
            elif isinstance(kept, Stored):
                found |= self._leaving_outputs(kept, num)
            else:
                found |= self._leaving_internals(kept, num)
        return found

    def _leaving_outputs(self, stored: Stored, num: int) -> set[str]:
        decision, tensor = stored.source.decision, stored.source.tensor
        if decision.region_class is not self.region_class or tensor.producer is None:
            return set()
        op, place = tensor.producer, tensor.producer.outputs.index(tensor)
        size = self.problem.costs.local_bytes(tensor, stored.source.natives[self.choice.options[decision]])
        self.largest_bytes = max(self.largest_bytes, size)
        first = 0 if stored.boundary else self.choice.reruns.get(decision, 0)
        return {member.ops[op.position].outputs[place].key for member in self.region_class.members[first : first + num]}

    def _leaving_internals(self, decision: Decision, num: int) -> set[str]:
        if decision.region_class is not self.region_class or decision.group is None:
            return set()
        self.largest_bytes = max(self.largest_bytes, decision.inner_bytes[self.choice.options[decision]])
        split, costs = decision.options[self.choice.options[decision]], self.problem.costs
        inside = {op.position for op in decision.group.ops if costs.has_internals(decision.group, op, split)}
        made = [(t.producer.position, t.producer.outputs.index(t)) for t in decision.inner_tensors if t.producer]
        first = self.choice.reruns.get(decision, 0)
        found: set[str] = set()
        for member in self.region_class.members[first : first + num]:
            found |= {f"{member.ops[position].key}.internal" for position in inside}
            found |= {member.ops[position].outputs[place].key for position, place in made}
        return found

    def _leaving_copies(self, use: Use, want: Want, num: int) -> set[str]:
        if use.region_class is not self.region_class:
            return set()
        copies = self._copies(use, use.source.natives[self.choice.options[use.source.decision]])
        if want not in copies:
            return set()
        self.largest_bytes = max(self.largest_bytes, self.problem.costs.local_bytes(use.source.tensor, want[0]))
        position, place = copies[want]
        first = self.choice.converts.get((use, want), 0)
        members = use.members[first : first + num]
        return {f"{self.region_class.members[member].ops[position].key}.in{place}" for member in members}

    def keys(self) -> set[str]:
        """Return the keys of all values that are recomputed."""
        for decision in self.problem.of_class(self.region_class):
            for member in range(self.choice.reruns.get(decision, 0)):
                self._flag_group(decision, member)
        for use in self.problem.uses:
            if use.region_class is self.region_class:
                self._flag_copies(use)
        return self.found

    def _flag_group(self, decision: Decision, member: int) -> None:
        assert decision.group is not None
        region, split = self.region_class.members[member], self.decisions.splits[decision.group]
        for op in decision.group.ops:
            record, own = self.problem.costs.records[op], region.ops[op.position]
            for place, tensor in enumerate(op.outputs):
                if place not in record.aliases and tensor not in self.pinned:
                    self.found.add(own.outputs[place].key)
            if self.problem.costs.has_internals(decision.group, op, split):
                self.found.add(f"{own.key}.internal")

    def _flag_copies(self, use: Use) -> None:
        native = use.source.natives[self.choice.options[use.source.decision]]
        for want, (position, place) in self._copies(use, native).items():
            if want[0] == native:
                self._flag_same_memory(use, position, place)
                continue
            for member in use.members[: self.choice.converts.get((use, want), 0)]:
                self.found.add(f"{self.region_class.members[member].ops[position].key}.in{place}")

    def _flag_same_memory(self, use: Use, position: int, place: int) -> None:
        """Treat a copy that differs in its gradient alone as the tensor, whose memory it shares."""
        for member in use.members:
            op = self.region_class.members[member].ops[position]
            if self._is_flagged(op.inputs[place]):
                self.found.add(f"{op.key}.in{place}")

    def _is_flagged(self, tensor: Tensor) -> bool:
        while True:
            if tensor.key in self.found:
                return True
            op = tensor.producer
            if op is None or op.region is None or op.region.region_class is not self.region_class:
                return False
            source = self.problem.costs.records[_twin(op)].aliases.get(op.outputs.index(tensor))
            if source is None:
                return False
            tensor = op.inputs[source]

    def _copies(self, use: Use, native: Layout) -> dict[Want, tuple[int, int]]:
        """Return the converted copies of a use under the chosen splits: want → the op and place that ask for it first."""
        due = gradient_layout(native)
        found: dict[Want, tuple[int, int]] = {}
        for op in self.region_class.representative.ops:
            for place, tensor in enumerate(op.inputs):
                if tensor is use.tensor:
                    want = self._want(op, place)
                    same_gradient = want[1] == due or not tensor.requires_grad
                    if not (want[0] == native and same_gradient):
                        found.setdefault(want, (op.position, place))
        return found

    def _want(self, op: Op, place: int) -> Want:
        group = self.region_class.group_at[op.position]
        split: Split = self.decisions.splits[group]
        forward, gradient = group.input_layout(op, place, split)
        return forward, gradient if op.inputs[place].requires_grad else (REPLICATE,) * len(split)
