"""Builds the planning problem of a program on a mesh: options with their seconds and bytes, and tensors' readers.

`problem` defines the parts of a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...program.blocks import RegionClass
from ...program.groups import Group, Split
from ...program.layout import REPLICATE, Layout
from ...program.plan_text import group_key, param_classes, span
from ...program.program import Op, Program, Tensor
from ...program.sampling import SampledSplit, can_sample
from ...program.transition import gradient_layout, transition
from ...rank.late_loss import comes_late
from ..costs.costs import LEAST_SHARE, CostModel, OptimizerCost
from .group_backward import backward_of
from .problem import Decision, Demand, Problem, SavedConstant, Source, Stored, Use, Want
from .strategies import batch_factor, group_options, param_options


def build_problem(program: Program, costs: CostModel, optimizer: OptimizerCost) -> Problem:
    """Return the planning problem: every option with its seconds and bytes."""
    return _ProblemBuilder(program, costs, optimizer).build()


class _ProblemBuilder:
    def __init__(self, program: Program, costs: CostModel, optimizer: OptimizerCost) -> None:
        self.program, self.costs, self.optimizer = program, costs, optimizer
        self.samples = batch_factor(program)
        self.sources: dict[Tensor, Source] = {}
        """The source of each representative's tensor, and of the first of each class of parameters."""
        self.twins: dict[Tensor, Tensor] = {}
        """Maps a tensor to the tensor of its class's representative."""
        self.uses: list[Use] = []
        self.saved: dict[RegionClass, set[Tensor]] = {}
        self.last_readers: dict[RegionClass, dict[Tensor, Op]] = {}
        self.largest_bytes = max((tensor.num_bytes for tensor in program.params if tensor.is_trained), default=0)
        """The bytes of the largest parameter that is trained."""

    def build(self) -> Problem:
        groups = [
            self._group_decision(region_class, group)
            for region_class in self.program.classes
            for group in region_class.groups
        ]
        for index, decision in enumerate(groups):
            decision.index = index
        self._find_twins()
        demands = {region_class: self._demands(region_class, groups) for region_class in self.program.classes}
        params = self._param_decisions(demands)
        for index, decision in enumerate(params):
            decision.index = len(groups) + index
        for decision in groups:
            self._add_sources(decision)
        for region_class, table in demands.items():
            for tensor, found in table.items():
                self._add_uses(region_class, tensor, found)
        stored = self._stored(groups)
        self._add_rerun_s(groups, {found.source.tensor for found in stored if found.boundary or found.held})
        buffers = [tensor.num_bytes for tensor in self.program.tensors if tensor.role == "buffer"]
        static = sum(map(self.costs.taken_bytes, buffers)) + self.optimizer.once_bytes()
        return Problem(
            self.program, self.costs, self.optimizer, self.samples, groups, params, self.uses, stored, static,
            self._saved_constants(groups),
        )  # fmt: skip

    # Decisions

    def _group_decision(self, region_class: RegionClass, group: Group) -> Decision:
        options = group_options(group, self.costs.records, self.costs.mesh, self.samples)
        options += self._sampled_options(group, options)
        decision = Decision(
            -1, group_key(region_class, group), list(options), region_class.multiplicity, group, region_class
        )
        for split in options:
            times = [self.costs.op_s(group, op, split) for op in group.ops]
            inner = [self.costs.inner_s(group, op, split) for op in group.ops]
            decision.forward_s.append(sum(forward for forward, _ in times))
            decision.backward_s.append(sum(backward for _, backward in times))
            result_s = self._add_results(decision, split)
            decision.inner_comm_s.append((sum(a for a, _ in inner) + result_s, sum(b for _, b in inner)))
            self._add_forward_bytes(decision, split)
            self._add_given_bytes(decision, split)
        decision.backwards = backward_of(group, options, self.costs)
        self._add_inner_bytes(decision)
        return decision

    def _sampled_options(self, group: Group, options: Sequence[Split]) -> list[Split]:
        """Return the same splits in the form that keeps some rows, where that is asked for and leaves any out."""
        share = self.costs.sampled
        op = next((op for op in group.ops if can_sample(op)), None)
        if not share or op is None:
            return []
        sampled = [SampledSplit(split, share) for split in options]
        return [split for split in sampled if 0 not in self.costs.saved_inputs(group, op, split)]

    def _add_results(self, decision: Decision, split: tuple[int, ...]) -> float:
        """Add the bytes of the sums that the caller is given of outputs that are partial; return the seconds of an instance.

        The loss is summed too, unless that is left to the next step.
        """
        group, region_class = decision.group, decision.region_class
        assert group is not None
        assert region_class is not None
        seconds, held, most = 0.0, 0, 0
        for op in group.ops:
            for place, tensor in enumerate(op.outputs):
                native = group.output_layout(op, place, split)
                twins = [member.ops[op.position].outputs[place] for member in region_class.members]
                is_loss = any(twin is self.program.loss for twin in twins)
                due = (REPLICATE,) * len(split) if is_loss else gradient_layout(native)
                num = max(is_loss, sum(map(self._is_output, twins)))
                if not num or due == native:
                    continue
                held += num * self.costs.copy_bytes(tensor, native, due)
                most = max(most, self.costs.change_bytes(tensor, native, due))
                if not is_loss or not comes_late(self.program, transition(native, due)):
                    seconds += self.costs.move_s(tensor, native, due)
        decision.result_bytes.append(held)
        decision.summing_bytes.append(most)
        return seconds / region_class.multiplicity

    def _add_forward_bytes(self, decision: Decision, split: tuple[int, ...]) -> None:
        """Add the bytes that the group's ops hold temporarily in the forward, and in a rerun for the backward."""
        group, region_class = decision.group, decision.region_class
        assert group is not None
        assert region_class is not None
        saved, last = self._saved_roots(region_class), self._last_readers(region_class)
        root_of = self.costs.records.root
        spaces, reruns, remade = [], [], []
        for op in group.ops:
            space = self.costs.forward_bytes(group, op, split)
            made = {t: group.output_layout(op, k, split) for k, t in enumerate(op.outputs)}
            read = {t: group.input_layout(op, k, split)[0] for k, t in enumerate(op.inputs) if t.role == "op"}
            passing = {t: layout for t, layout in {**read, **made}.items() if root_of(t) not in saved}
            # what is handed on inside the group, or read for the last time; a memory row counts what others still read
            handed = {
                t: layout for t, layout in passing.items() if t.producer in group.ops or last.get(root_of(t)) is op
            }
            spaces.append(space)
            reruns.append(space + self._bytes_of({**passing, **made}))
            remade.append(space + self._bytes_of({**handed, **made}))
        decision.workspace_bytes.append(max(spaces))
        decision.rerun_bytes.append(max(reruns))
        decision.remade_bytes.append(max(remade))

    def _bytes_of(self, layouts: Mapping[Tensor, Layout]) -> int:
        """Return the memory of tensors in their layouts; views of one memory count once, and what each rank slices not at all."""
        sizes: dict[Tensor, int] = {}
        for tensor, layout in layouts.items():
            if not _is_free(tensor):
                root = self.costs.records.root(tensor)
                sizes[root] = max(sizes.get(root, 0), self.costs.block_bytes(tensor, layout))
        return sum(sizes.values())

    def _add_given_bytes(self, decision: Decision, split: tuple[int, ...]) -> None:
        """Add the bytes of the gradients at which the group's backward begins."""
        group = decision.group
        assert group is not None
        given = [(t, t.producer) for t in group.outputs() if t.producer is not None and t.requires_grad]
        decision.given_bytes.append(
            sum(self.costs.block_bytes(t, group.output_layout(op, op.outputs.index(t), split)) for t, op in given)
        )

    def _last_readers(self, region_class: RegionClass) -> dict[Tensor, Op]:
        """Return the last op in the region to read each memory, by the root of what lies in it."""
        if region_class not in self.last_readers:
            ops = region_class.representative.ops
            found = {self.costs.records.root(tensor): op for op in ops for tensor in op.inputs}
            self.last_readers[region_class] = found
        return self.last_readers[region_class]

    def _saved_roots(self, region_class: RegionClass) -> set[Tensor]:
        """Return the roots of the memory that some backward in the region needs."""
        if region_class not in self.saved:
            records = self.costs.records
            saved = _saved_by(region_class.representative.ops, self.costs)
            self.saved[region_class] = {records.root(tensor) for tensor in saved}
        return self.saved[region_class]

    def _inner_until(self, decision: Decision, inner: set[Tensor]) -> float:
        """Return until when, among the groups of the region, backwards need what the group saves and nobody outside reads."""
        group, region_class = decision.group, decision.region_class
        assert group is not None
        assert region_class is not None
        own = (
            group.moment(op, region_class.groups)
            for op in group.ops
            if self.costs.records[op].internals
            or any(
                t.producer in group.ops and _root(group, t, self.costs) in inner for t in _saved_by([op], self.costs)
            )
        )
        return min(own, default=group.index)

    def _add_inner_bytes(self, decision: Decision) -> None:
        group = decision.group
        assert group is not None
        saved = _saved_inside(group, group.ops, self.costs)
        read_outside = {_root(group, tensor, self.costs) for tensor in group.outputs()}
        inner = [root for root in saved if root not in read_outside and not self._is_output(root)]
        decision.inner_tensors = inner
        decision.inner_until = self._inner_until(decision, set(inner))
        for place, op in enumerate(group.ops):
            # the first op that saves a tensor is the last whose backward needs it
            own = _saved_inside(group, [op], self.costs)
            first = [root for root in inner if root in own]
            inner = [root for root in inner if root not in first]
            internals = [self.costs.internal_bytes(group, op, split) for split in decision.options]
            tensors = [sum(self._output_bytes(group, root, split) for root in first) for split in decision.options]
            decision.inner_freed[place] = [sum(sizes) for sizes in zip(internals, tensors)]
        decision.inner_bytes = [sum(sizes) for sizes in zip(*decision.inner_freed.values())]

    def _output_bytes(self, group: Group, tensor: Tensor, split: tuple[int, ...]) -> int:
        op = tensor.producer
        assert op is not None
        return self.costs.block_bytes(tensor, group.output_layout(op, op.outputs.index(tensor), split))

    def _is_output(self, tensor: Tensor) -> bool:
        return any(found is tensor for found in self.program.kept_outputs)

    def _param_decisions(self, demands: dict[RegionClass, dict[Tensor, list[Demand]]]) -> list[Decision]:
        wanted: dict[Tensor, set[Layout]] = {}
        for region_class, table in demands.items():
            for tensor, found in table.items():
                for own in self._members_tensors(region_class, tensor):
                    layouts = wanted.setdefault(own, set())
                    layouts |= {want[0] for demand in found for wants in demand.wants for want in wants}
        result = []
        for tied in param_classes(self.program):
            first = tied[0]
            options = param_options(first, wanted.get(first, set()), self.costs.mesh)
            decision = Decision(-1, span([tensor.key for tensor in tied]), list(options), len(tied), tied=tied)
            for layout in options:
                self._add_param_option(decision, first, layout)
            result.append(decision)
            source = Source(first, decision, list(options))
            self.sources[first] = source
            self.twins.update(dict.fromkeys(tied, first))
        return result

    def _add_param_option(self, decision: Decision, tensor: Tensor, layout: Layout) -> None:
        trained = tensor.is_trained
        decision.rest_bytes.append(self.costs.block_bytes(tensor, layout))
        decision.state_bytes.append(self.costs.state_bytes(tensor, layout, self.optimizer) if trained else 0)
        rests = self.costs.resting is not None  # the smallest too, beside its parameter
        leaves = trained and (rests or tensor.num_bytes >= LEAST_SHARE * self.largest_bytes)
        leaving_bytes = self.costs.leaving_state_bytes(tensor, layout, self.optimizer) if leaves else 0
        least_bytes = 0 if rests else self.costs.min_offload_bytes
        decision.leaving_state_bytes.append(leaving_bytes if leaving_bytes >= least_bytes else 0)
        decision.step_bytes.append(self.costs.step_bytes(tensor, layout, self.optimizer) if trained else 0)
        decision.left_bytes.append(self.costs.left_bytes(tensor, layout, self.optimizer) if trained else 0)
        decision.forward_s.append(0.0)
        decision.backward_s.append(self.costs.optimizer_s(tensor, layout, self.optimizer) if trained else 0.0)
        decision.inner_comm_s.append((0.0, 0.0))

    # Who reads what

    def _find_twins(self) -> None:
        for region_class in self.program.classes:
            first = region_class.representative
            for member in region_class.members:
                for op, twin in zip(member.ops, first.ops):
                    self.twins.update(zip(op.outputs, twin.outputs))

    def _members_tensors(self, region_class: RegionClass, tensor: Tensor) -> list[Tensor]:
        """Return, for each member of the class, the tensor that it reads where the representative reads `tensor`."""
        place = {external: index for index, external in enumerate(region_class.representative.externals)}
        if tensor not in place:
            return [tensor] * region_class.multiplicity
        return [member.externals[place[tensor]] for member in region_class.members]

    def _demands(self, region_class: RegionClass, groups: Sequence[Decision]) -> dict[Tensor, list[Demand]]:
        """Return each group's demand on every tensor that the groups of a class read."""
        table: dict[Tensor, list[Demand]] = {}
        for decision in groups:
            group = decision.group
            if decision.region_class is not region_class or group is None:
                continue
            places: dict[Tensor, list[tuple]] = {}
            for op, place, tensor in group.operands():
                if not _is_free(tensor):
                    places.setdefault(tensor, []).append((op, place))
            for tensor, readers in places.items():
                wants, saves = [], []
                for split in decision.options:
                    found = [(self._want(group, op, place, split), op, place) for op, place in readers]
                    wants.append(frozenset(want for want, _, _ in found))
                    saved = [want for want, op, place in found if place in self.costs.saved_inputs(group, op, split)]
                    saves.append(frozenset(saved))
                until = min(group.moment(op, region_class.groups) for op, _ in readers)
                place = min(group.ops.index(op) for op, _ in readers)
                table.setdefault(tensor, []).append(Demand(decision, group.index, until, place, wants, saves))
        return table

    def _want(self, group: Group, op, place: int, split: tuple[int, ...]) -> Want:
        forward, gradient = group.input_layout(op, place, split)
        return forward, gradient if op.inputs[place].requires_grad else (REPLICATE,) * len(split)

    def _add_sources(self, decision: Decision) -> None:
        group = decision.group
        assert group is not None
        for op in group.ops:
            for place, tensor in enumerate(op.outputs):
                natives = [group.output_layout(op, place, split) for split in decision.options]
                self.sources[tensor] = Source(tensor, decision, natives)

    def _add_uses(self, region_class: RegionClass, tensor: Tensor, demands: list[Demand]) -> None:
        inside = tensor.producer is not None and tensor.producer.region is region_class.representative
        by_source: dict[Source, list[int]] = {}
        for member, own in enumerate(self._members_tensors(region_class, tensor)):
            if not _is_free(own):
                by_source.setdefault(self.sources[self.twins.get(own, own)], []).append(member)
        for source, members in by_source.items():
            self.uses.append(Use(source, region_class, tuple(members), tensor, inside, demands))

    def _stored(self, groups: Sequence[Decision]) -> list[Stored]:
        """Return the memory of every group's outputs, with the uses of the outputs and of their views."""
        found: dict[Tensor, Stored] = {}
        for decision in groups:
            group = decision.group
            assert group is not None
            saved = _saved_inside(group, group.ops, self.costs)
            by_op = [_saved_inside(group, [op], self.costs) for op in group.ops]
            for tensor in group.outputs():
                root = _root(group, tensor, self.costs)
                stored = found.setdefault(root, Stored(self.sources[root], root in saved, False))
                stored.own_place = min((k for k, own in enumerate(by_op) if root in own), default=0)
                stored.held |= self._any_output(decision, root) or self._any_output(decision, tensor)
        for use in self.uses:
            group = use.source.decision.group
            if group is not None:
                root = _root(group, use.source.tensor, self.costs)
                # What the representative's readers leave in the group, those of another member may read outside.
                found.setdefault(root, Stored(self.sources[root], False, False)).uses.append(use)
        return list(found.values())

    def _saved_constants(self, groups: Sequence[Decision]) -> list[SavedConstant]:
        """Return the memory of the constants that backwards need, such as masks and indices, which no decision is about."""
        last: dict[Tensor, tuple[int, float]] = {}
        for tensor, place in self._saved_free(groups):
            if _is_constant(made := _behind_views(tensor)):
                last[made] = min(last.get(made, place), place)
        whole = (REPLICATE,) * len(self.costs.mesh)
        return [SavedConstant(self.costs.block_bytes(tensor, whole), place) for tensor, place in last.items()]

    def _saved_free(self, groups: Sequence[Decision]) -> Iterator[tuple[Tensor, tuple[int, float]]]:
        """Yield what backwards need and no decision is about, in each instance, with the region and until when it is needed."""
        for decision in groups:
            group, region_class = decision.group, decision.region_class
            assert group is not None
            assert region_class is not None
            for op in group.ops:
                until = group.moment(op, region_class.groups)
                for tensor in filter(_is_free, _saved_by([op], self.costs)):
                    owns = self._members_tensors(region_class, tensor)
                    yield from ((own, (member.index, until)) for member, own in zip(region_class.members, owns))

    def _add_rerun_s(self, groups: Sequence[Decision], kept: set[Tensor]) -> None:
        """Add the seconds of rerunning each group; the tensors of `kept` are never rematerialised."""
        for decision in groups:
            group, records = decision.group, self.costs.records
            assert group is not None
            for split in decision.options:
                again = [
                    op
                    for op in group.ops
                    if self.costs.has_internals(group, op, split)
                    or any(k not in records[op].aliases and t not in kept for k, t in enumerate(op.outputs))
                ]
                inner_s = sum(self.costs.inner_s(group, op, split)[0] for op in again)
                decision.rerun_s.append(sum(self.costs.op_s(group, op, split)[0] for op in again) + inner_s)

    def _any_output(self, decision: Decision, tensor: Tensor) -> bool:
        op, outputs = tensor.producer, {id(found) for found in self.program.kept_outputs}
        assert op is not None
        assert decision.region_class is not None
        place = op.outputs.index(tensor)
        return any(id(member.ops[op.position].outputs[place]) in outputs for member in decision.region_class.members)


def _is_free(tensor: Tensor) -> bool:
    """Return True for batch entries, buffers and constants, which every rank can slice from its whole copy."""
    return _is_constant(tensor) if tensor.role == "op" else tensor.role != "param"


def _is_constant(tensor: Tensor) -> bool:
    """Return True for what ops make of nothing that is trained, on every rank."""
    return tensor.role == "op" and tensor.producer is not None and tensor.producer.constant


def _behind_views(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory a constant shares."""
    while tensor.producer is not None and tensor.producer.kind == "view" and tensor.producer.inputs:
        tensor = tensor.producer.inputs[0]
    return tensor


def _root(group: Group, tensor: Tensor, costs: CostModel) -> Tensor:
    """Return the tensor made in the group whose memory `tensor` shares; `tensor` itself if it is no view."""
    inside = set(group.ops)
    while tensor.producer in inside:
        op = tensor.producer
        source = costs.records[op].aliases.get(op.outputs.index(tensor))
        if source is None or op.inputs[source].producer not in inside:
            return tensor
        tensor = op.inputs[source]
    return tensor


def _saved_inside(group: Group, ops: Iterable[Op], costs: CostModel) -> set[Tensor]:
    """Return the roots of the memory that is made in the group and that the backward of `ops` of it needs."""
    inside = set(group.ops)
    return {_root(group, tensor, costs) for tensor in _saved_by(ops, costs) if tensor.producer in inside}


def _saved_by(ops: Iterable[Op], costs: CostModel) -> Iterator[Tensor]:
    """Yield the inputs and outputs of `ops` that their backwards need."""
    for op in ops:
        yield from (op.inputs[place] for place in costs.records[op].saved_inputs)
        yield from (op.outputs[place] for place in costs.records[op].saved_outputs)
