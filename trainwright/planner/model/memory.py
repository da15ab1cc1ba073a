"""The memory rows: at every moment of a step that may be its peak, what the device holds is within the budget.

A row stands for the forward of a group of ops (`forward_memory`), for the backward of one, or for the optimizer's step. Of a
group's backward it adds up

    static        buffers, parameters at rest, and the optimizer states that are not offloaded; values read from disks (`resting`)
    kept          what the forward kept of the regions whose backward is still to come
    own           what the rest of the region's own backward needs, kept by the forward or made again by a rerun (`working_set`)
    gradients     of activations, from the first part to the backward of their producer (`waiting_gradients`); of parameters,
                  those of the regions whose backward is done, and sums that wait for another region's part (`tied`). With
                  micro-batches all gradients of parameters are there throughout, and are static. Where parameters rest on a
                  tier, a gradient goes to its update at once, and rows count the updates under way (`update_memory`)
    in flight     what is offloaded, on its way out or on its way back (`offload`)
    a moment's    the most that the group's backward holds while one of its kernels runs or one gradient changes its layout
                  (`moments`). Where a region's backward begins, reruns are such moments too (`rerun_memory`); where it ends, in
                  buckets, the gradients that come to rest are one

and of the optimizer's step the static bytes, all gradients of parameters, the outputs that the caller holds, what the optimizer
allocates for a moment, and the offloaded states that have come back (`offload_states`).

A group has a row for the first instance of its class, when most gradients of parameters are there, and one for the last, when
most is kept; from one to the next both change by as much each time. Where the first instance reads its input in another layout
than those behind it, the second has a row too. Sums over a class are columns of their own, so that rows stay short.

Formulas in these files are in MiB, over the columns of `sharding` (x, f) and of `recompute` (K, r, C); a class has M instances.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...program.blocks import RegionClass
from ...program.groups import Group
from ...program.program import Op
from ..problem.problem import Decision, Problem
from .bucket_memory import BucketMemory
from .forward_memory import Changes, ForwardMemory
from .milp import MIB, Model, Terms
from .moments import MOMENTARY, Moments
from .offload import spans
from .recompute import Recompute
from .rerun_memory import RerunMemory
from .sharding import Sharding
from .tied import RegionGroup
from .update_memory import UpdateMemory
from .waiting_gradients import WaitingGradients
from .working_set import Item, find_items


@dataclass(eq=False)
class Memory:
    """The rows that hold the budget, and the terms of their left sides in MiB."""

    rows: dict[int, Terms] = field(default_factory=dict)
    static_mib: float = 0.0
    peak: int = -1
    """A column that is at least every row: minimise it for the smallest budget."""

    def loads(self, values: np.ndarray) -> dict[int, float]:
        """Return what each row counts at a solution, in MiB."""
        return {row: sum(factor * values[column] for column, factor in terms) for row, terms in self.rows.items()}

    def peak_bytes(self, values: np.ndarray) -> float:
        """Return the most that a row counts at a solution."""
        return (max(self.loads(values).values(), default=0.0) + self.static_mib) * MIB


def add_memory(model: Model, problem: Problem, sharding: Sharding, recompute: Recompute, budget_bytes: float) -> Memory:
    """Add the rows; `budget_bytes` may be changed afterwards with `set_budget`."""
    memory = _RowBuilder(model, problem, sharding, recompute).build()
    set_budget(model, memory, budget_bytes)
    return memory


def set_budget(model: Model, memory: Memory, budget_bytes: float) -> None:
    """Hold the peak under another budget; of infinitely many bytes there is no bound."""
    model.upper[memory.peak] = budget_bytes / MIB - memory.static_mib


class _RowBuilder:
    def __init__(self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
        self.model, self.problem, self.sharding, self.recompute = model, problem, sharding, recompute
        self.passed: dict[tuple[RegionClass, float], Terms] = defaultdict(list)
        """MiB of what other regions or the caller read too, by class and the position whose backward uses it last."""
        self.kept: dict[RegionClass, int] = {}
        """MiB kept by all instances of a class."""
        self.items: dict[RegionClass, list[Item]] = defaultdict(list)
        self.gradient_places: dict[Decision, list[RegionGroup]] = defaultdict(list)
        """Where the backward begins to make each instance's gradient."""
        self._flights: dict[int, Terms] = {}
        """What other regions have on their way while a region's backward runs."""
        self.waiting = WaitingGradients(model, problem, sharding)
        self.updates = UpdateMemory(model, problem, sharding, recompute)
        self.changes = Changes(model, problem, sharding, BucketMemory(model, problem, sharding, recompute))
        boundary = [stored for stored in problem.stored if stored.boundary and not stored.held]
        self.spans = {stored: spans(stored) for stored in boundary} if recompute.leaves else {}

    def build(self) -> Memory:
        memory = Memory(static_mib=self.problem.static_bytes / MIB, peak=self.model.column())
        self._collect()
        static = self._sum_column([*self._params(self._static_bytes), *self._away(), *self.recompute.values_held])
        moments_of = Moments(self.model, self.sharding, self.changes, self.waiting, self.items)
        reruns = RerunMemory(
            self.model, self.problem, self.sharding, self.recompute, self.changes.buckets, self.waiting
        )
        for region_class in self.problem.program.classes:
            decisions = self.problem.of_class(region_class)
            for decision in decisions:
                momentary = moments_of.group(decision)
                if decision is decisions[0] and (scattered := self._coming_to_rest(region_class)):
                    momentary.append(scattered)
                last = region_class.multiplicity - 1
                shared = None if decision is decisions[-1] else self.model.largest(MOMENTARY, momentary)
                for member in self._members(decision):
                    held = shared
                    if held is None:
                        begins = reruns.of_last if member == last else reruns.of_first if member == 0 else None
                        moments = begins(decisions, self.items[region_class]) if begins is not None else []
                        held = self.model.largest(MOMENTARY, [*momentary, *moments])
                    terms = self._row(region_class, member, decision)
                    self._hold(memory, [(static, 1.0), *terms, *held], _row_name("backward", decision, member))
                for late, op, found in moments_of.late(decision):
                    held = self.model.largest(MOMENTARY, found)
                    for member in self._members(decision):
                        terms = self._row(region_class, member, decision, (late, op))
                        self._hold(memory, [(static, 1.0), *terms, *held], _row_name("backward", decision, member))
        forward = ForwardMemory(self.model, self.problem, self.sharding, self.recompute, self.changes)
        for decision, terms in forward.rows():
            self._hold(memory, [(static, 1.0), *terms, *self._constants()], _row_name("forward", decision, -1))
        self._hold(memory, [(static, 1.0), *self._update_terms()], "at the optimizer's step")
        return memory

    def _members(self, decision: Decision) -> list[int]:
        """Return the instances of which a group's backward may hold most: the first, the last, and those between that begin to
        need what the ones before them do not.

        From one such instance to the next, what is kept grows and the gradients of parameters get fewer by as much each time.
        """
        assert decision.region_class is not None
        assert decision.group is not None
        needed = [item for item in self.items[decision.region_class] if item.position <= decision.group.index]
        return sorted({0, decision.region_class.multiplicity - 1, *(min(item.members) for item in needed)})

    def _static_bytes(self, decision: Decision, option: int) -> int:
        """Return the bytes held throughout the step; with micro-batches they include the accumulated gradients."""
        adds_up = self.adds_up and decision.tied[0].requires_grad
        return decision.rest_bytes[option] * (2 if adds_up else 1) + decision.state_bytes[option]

    @property
    def adds_up(self) -> bool:
        return self.problem.program.num_runs > 1

    @property
    def gradients_add_up_to_all(self) -> bool:
        """True if gradients that are there stay until the optimizer's step, and are not static."""
        return not self.adds_up and self.problem.costs.resting is None

    def _hold(self, memory: Memory, terms: Terms, name: str) -> None:
        row = self.model.row(name, [*terms, (memory.peak, -1.0)], upper=0.0)
        memory.rows[row] = terms

    def _sum_column(self, terms: Terms) -> int:
        column = self.model.column()
        self.model.row("sums of bytes", [*terms, (column, -1.0)], 0.0, 0.0)
        return column

    def _collect(self) -> None:
        for stored in self.problem.stored:
            source, region_class = stored.source, stored.source.decision.region_class
            assert region_class is not None
            if stored.held or stored.boundary:
                for native in self.sharding.yields(source):
                    size = self.problem.costs.block_bytes(source.tensor, native) / MIB
                    key = (region_class, -1 if stored.is_result(native) else stored.position)
                    self.passed[key].append((self.recompute.keep[stored, native], size))
        for decision in self.problem.groups:
            if any(decision.result_bytes):
                assert decision.region_class is not None
                self.passed[decision.region_class, -1] += self._results(decision)
        for item in find_items(self.model, self.problem, self.sharding, self.recompute):
            self.items[item.region_class].append(item)
        self.kept = {
            region_class: self._sum_column([(item.kept, 1.0) for item in items])
            for region_class, items in self.items.items()
        }
        for use in self.problem.uses:
            if use.source.is_param:
                position = max(demand.position for demand in use.demands)
                places = [(use.region_class.members[member].index, position) for member in use.members]
                self.gradient_places[use.source.decision] += places

    def _results(self, decision: Decision) -> Terms:
        """Return the terms of the sums that the caller holds beside outputs which are partial."""
        return self.sharding.chosen_mib(decision, decision.result_bytes)

    # Rows

    def _row(
        self, region_class: RegionClass, member: int, decision: Decision, late: tuple[float, Op] | None = None
    ) -> Terms:
        """Return the terms of a group's backward, or of those ops of it that run at another moment: when, and the last of them."""
        assert decision.group is not None
        region, (position, op) = region_class.members[member].index, late or (decision.group.index, None)
        terms: Terms = []
        for owner, column in self.kept.items():
            num = sum(other.index <= region for other in owner.members)
            if num and owner is not region_class:
                terms.append((column, num / owner.multiplicity))
        terms += self._own_terms(region_class, member, position)
        terms += self._passed_terms(region_class, region, position)
        terms += self.waiting.terms(region, position, decision, op)
        terms += self._param_gradients(region, position)
        terms += self._under_way(region, position)
        terms += self.changes.shared.backward(region, position)
        terms += self.changes.buckets.backward(region_class, region, position)
        terms += self._in_flight(region_class, region)
        terms += self.recompute.on_the_way(region_class)
        terms += self._fetched(region_class, region, position)
        terms += self._constants((region, position))
        terms += self._loss_gradient(decision.group)
        return terms

    def _in_flight(self, region_class: RegionClass, region: int) -> Terms:
        """Return the terms of what other regions have on their way, the same in all rows of a region."""
        if region not in self._flights and self.changes.buckets.ahead:
            self._flights[region] = self.changes.buckets.in_flight(region_class, region, self._fewer(region_class))
        return self._flights.get(region, [])

    def _fewer(self, region_class: RegionClass) -> Terms:
        """Return the terms of what an instance of a class holds less than the one behind it.

        That keeps nothing any more, and its gradients have come to rest, out of their places in the buffers of sums.
        """
        terms = [(self.kept[region_class], 1 / region_class.multiplicity)] if region_class in self.kept else []
        terms += self.changes.buckets.places(region_class)
        regions = {member.index for member in region_class.members}
        for decision, places in self.gradient_places.items():
            if self.gradients_add_up_to_all and len(places) > 1 and {region for region, _ in places} <= regions:
                terms += [(column, -size) for column, size in self._at_rest(decision, 1)]
        return terms

    def _loss_gradient(self, group: Group) -> Terms:
        """Return the term of the gradient of the loss: it stays to the end, and the group that makes the loss is given it."""
        loss = self.problem.program.loss
        if any(loss in op.outputs for op in group.ops):
            return []
        return [(self._one, self.problem.costs.taken_bytes(loss.dtype.itemsize) / MIB)]

    def _constants(self, place: tuple[int, float] | None = None) -> Terms:
        """Return the term of the constants that are there in the forward, or while the backward of a group at `place` runs."""
        kept = [constant for constant in self.problem.constants if place is None or constant.last <= place]
        return [(self._one, sum(constant.num_bytes for constant in kept) / MIB)] if kept else []

    @cached_property
    def _one(self) -> int:
        return self.model.one()

    def _own_terms(self, region_class: RegionClass, member: int, position: float) -> Terms:
        """Return the terms of the own class: the last instance counts all that is kept, the first one only its own."""
        terms: Terms = []
        is_last = member == region_class.multiplicity - 1
        for item in self.items[region_class]:
            is_used, is_waiting = item.position > position, item.first < position
            if member not in item.members:
                terms += [(item.kept, 1.0)] if is_last else []
            elif is_last:
                held = item.held_waiting if is_waiting else item.held
                terms += [(held, 1.0), (item.present, -1.0 if is_used else 0.0)]
            elif not is_used:
                terms.append((item.waiting if is_waiting else item.present, 1.0))
        return terms

    def _passed_terms(self, region_class: RegionClass, region: int, position: float) -> Terms:
        terms: Terms = []
        for (owner, at), passed in self.passed.items():
            num = sum(other.index <= region for other in owner.members)
            if owner is region_class and at > position:
                num -= 1
            if at < 0:
                num = owner.multiplicity
            if num:
                terms += [(column, size * num / owner.multiplicity) for column, size in passed]
        return terms

    def _fetched(self, region_class: RegionClass, region: int, position: float) -> Terms:
        """Return the negative terms of offloaded instances that `_passed_terms` counts but the region does not need."""
        terms: Terms = []
        for stored, found in self.spans.items():
            owner, at = stored.source.decision.region_class, stored.position
            assert owner is not None
            behind = [
                (first, last)
                for member, (first, last) in zip(owner.members, found)
                if member.index <= region and not (member.index == region and at > position)
            ]
            num = sum(not first <= region <= last for first, last in behind)
            for native in self.sharding.yields(stored.source) if num else ():
                size = self.problem.costs.block_bytes(stored.source.tensor, native) / MIB
                leaves = self.recompute.leaves.get(self.recompute.keep[stored, native])
                if leaves is not None:
                    terms.append((leaves, -size * num / owner.multiplicity))
        return terms

    def _param_gradients(self, region: int, position: float) -> Terms:
        """Return the terms of the gradients, at rest, that are there while the backward of a group runs.

        Those that it makes itself are among what it holds for a moment. In buckets, a region's gradients come to rest together,
        those that are scattered when its backward ends; what joins no other is there once it is made.
        """
        here = (region, -1) if self.sharding.joined.in_buckets else (region, position)
        region_class = self.problem.program.regions[region].region_class
        later = self._coming_to_rest(region_class)
        if self.gradients_add_up_to_all:
            later += self.changes.buckets.not_made(region_class, position)
        terms = [(column, -size) for column, size in later]
        for decision in self.problem.params:
            if decision.tied[0].requires_grad and self.gradients_add_up_to_all:
                num = min(decision.count, sum(place > here for place in self.gradient_places[decision]))
                if num:
                    terms += self._at_rest(decision, num)
        return terms

    def _at_rest(self, decision: Decision, num: int) -> Terms:
        """Return the terms of `num` of a parameter's gradients at rest."""
        sizes = self.sharding.chosen_mib(decision, self._gradient_bytes(decision))
        return [(c, num * size) for c, size in sizes] + self.changes.buckets.padding_at_rest(decision, num)

    def _gradient_bytes(self, decision: Decision) -> list[int]:
        """Return the bytes of a parameter's gradient at rest under each option; in buckets it is a part of a buffer."""
        if not self.sharding.joined.in_buckets:
            return decision.rest_bytes
        return [self.problem.costs.local_bytes(decision.tied[0], layout) for layout in decision.options]

    def _under_way(self, region: int, position: float) -> Terms:
        """Return what updates hold while a group's backward runs, where parameters or states rest on a tier.

        It is all of the gradients that are complete, with the states that come for them, or as much as may be there at once. In
        buckets a region's own gradients, which come to rest at the end of its backward, count from its beginning.
        """
        here = (region, -1 if self.sharding.joined.in_buckets else position)
        nums = {d: min(d.count, sum(place > here for place in self.gradient_places[d])) for d in self.updates.trained}
        nums = {decision: num for decision, num in nums.items() if num}
        return [*self.updates.held(nums), (self.temporaries, 1.0)] if nums else []

    def _coming_to_rest(self, region_class: RegionClass) -> Terms:
        return self.changes.buckets.coming_to_rest(region_class) if self.gradients_add_up_to_all else []

    def _params(self, size) -> Terms:
        return [
            (column, decision.count * size(decision, option) / MIB)
            for decision in self.problem.params
            for option, column in enumerate(self.sharding.choice[decision])
        ]

    def _away(self) -> Terms:
        """Return the (negative) terms of optimizer states and parameters that are elsewhere, which the static bytes count."""
        states = [
            (column, -decision.leaving_state_bytes[option] / MIB)
            for (decision, option), column in self.recompute.states.items()
        ]
        return states + [
            (column, -decision.rest_bytes[option] / MIB) for (decision, option), column in self.recompute.params.items()
        ]

    def _update_terms(self) -> Terms:
        """All gradients, the held outputs, the largest of the optimizer's temporaries, and states that have come back."""
        terms: Terms = []
        if self.gradients_add_up_to_all:
            trained = [decision for decision in self.problem.params if decision.tied[0].is_trained]
            terms = [term for decision in trained for term in self._at_rest(decision, decision.count)]
            terms += self.changes.buckets.of_sums_at_rest()
        for stored in self.problem.stored:
            if stored.held:
                for native in filter(stored.is_result, self.sharding.yields(stored.source)):
                    size = self.problem.costs.block_bytes(stored.source.tensor, native)
                    terms.append((self.recompute.keep[stored, native], size / MIB))
        terms += [term for decision in self.problem.groups for term in self._results(decision)]
        window = [(self.recompute.state_window, 1.0)] if self.recompute.state_window >= 0 else []
        updates = self.updates.held({decision: decision.count for decision in self.updates.trained})
        return [*terms, *self._vectors(), (self.temporaries, 1.0), *window, *updates]

    @cached_property
    def temporaries(self) -> int:
        """Return the column of the most that the optimizer's step holds for a moment."""
        largest = self.model.column()
        for sizes in self._step_terms():
            self.model.row("the optimizer's temporaries", [*sizes, (largest, -1.0)], upper=0.0)
        return largest

    def _vectors(self) -> Terms:
        """Return the bytes that an optimizer holds of all parameters at once, in fp32 or wider."""
        optimizer = self.problem.optimizer
        own, whole = optimizer.model_copies, optimizer.whole_copies
        if not own and not whole:
            return []
        return self._params(
            lambda d, k: (own * d.rest_bytes[k] + whole * d.tied[0].num_bytes)
            * max(1, 4 // d.tied[0].dtype.itemsize) * d.tied[0].requires_grad
        )  # fmt: skip

    def _step_terms(self) -> list[Terms]:
        """Return what the optimizer holds at once: of one parameter, with what is left of the one before; of all if `foreach`."""
        each = {param: self.sharding.chosen_mib(param, param.step_bytes) for param in self.problem.params}
        if self.problem.costs.resting is not None:  # parameters are updated one by one
            return [terms for terms in each.values() if terms]
        if self.problem.optimizer.form == "foreach":
            return [[(column, param.count * size) for param, terms in each.items() for column, size in terms]]
        found = [
            [*each[param], *([] if last is None else self.sharding.chosen_mib(last, last.left_bytes))]
            for last, param in self.problem.updated_in_turn
        ]
        return [terms for terms in found if terms]


def _row_name(phase: str, decision: Decision, member: int) -> str:
    assert decision.region_class is not None
    assert decision.group is not None
    region_class = decision.region_class
    key = region_class.members[member].ops[decision.group.head.position].key
    return f"the {phase} of {key}"
