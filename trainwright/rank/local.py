"""One rank's local program, built from a program and a plan's decisions: ops on local tensors, reshards between layouts.

The planner simulates it on fake tensors, the runtime runs it on real ones; `instructions` has the kinds of instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ..ops import find
from ..ops.local import Mirror, Pair, Rows
from ..ops.sampled import sampled_map
from ..program.decisions import Decisions
from ..program.factors import leaves
from ..program.groups import Group, Split
from ..program.layout import REPLICATE, Layout, local_shape, slot_range
from ..program.program import Op, Program, Tensor
from ..program.sampling import can_sample, share_of
from ..program.transition import gradient_layout, transition
from ..torch_internals.private import takes_device
from ..torch_internals.trees import tensors_in
from .instructions import Borrow, Compute, Instruction, Open, Ref, Reshard, Value
from .reshard import Axes, Communicator, Nothing, Route
from .schedule import in_buckets

_ANY_REGION = -2


@dataclass(eq=False)
class LocalProgram:
    """The instructions of one rank's step, in order, with the values that they read and make."""

    program: Program
    decisions: Decisions
    communicator: Communicator
    values: list[Value]
    instructions: list[Instruction]
    sources: dict[Tensor, int]
    """The value of each parameter, buffer, batch entry and constant, and of each result of the stage before."""
    outputs: list[Any]
    """A `Ref` (or literal) for each flat output, then for each result that goes to the next stage."""
    loss: int | None
    """The value of the whole loss; None in a stage that another stage follows."""

    def travelling(self) -> set[Tensor]:
        """Return the parameters that one bucket opens and nothing else reads, in a step of one run.

        A step of several runs has none: its runs share the rank's parts, whose gradients accumulate (`accumulate`).
        """
        if self.program.num_runs > 1:
            return set()
        readers: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            for value in {*instruction.inputs, *instruction.again.inputs}:
                readers.setdefault(value, []).append(instruction)
        held = {found.value for found in self.outputs if isinstance(found, Ref)}
        found = set()
        for tensor, value in self.sources.items():
            first, *others = readers.get(value, [None])
            alone = isinstance(first, Open) and not others
            if tensor.role == "param" and alone and value not in held:
                found.add(tensor)
        return found


def build_local(
    program: Program, decisions: Decisions, communicator: Communicator, all_outputs: bool = False
) -> LocalProgram:
    """Return the local program of the rank of `communicator`; with micro-batches, its only output is the loss.

    all_outputs: give all outputs, for validation.
    """
    outputs = program.outputs if all_outputs else program.kept_outputs
    return _LocalBuilder(program, decisions, communicator).build(outputs)


class _LocalBuilder:
    def __init__(self, program: Program, decisions: Decisions, communicator: Communicator) -> None:
        self.program, self.decisions, self.communicator = program, decisions, communicator
        self.values: list[Value] = []
        self.instructions: list[Instruction] = []
        self.native: dict[Tensor, Value] = {}
        self.copies: dict[tuple[Tensor, Layout, Layout, int], Value] = {}
        self.replicated: Layout = (REPLICATE,) * len(decisions.mesh)
        self.routing = _routing(program)

    def build(self, kept: Sequence[Any]) -> LocalProgram:
        layouts = {**self.decisions.params, **self.decisions.inputs}
        given = {tensor: self._layout_made(tensor) for tensor in self.program.given}
        for tensor in self.program.tensors:
            if tensor.role != "op" or tensor in given:
                layout = given[tensor] if tensor in given else layouts.get(tensor, self.replicated)
                self.native[tensor] = self._value(tensor.key, tensor, layout)
        sources = {tensor: value.index for tensor, value in self.native.items()}
        for op in self.program.ops:
            if op.constant:
                self._constant(op)
            else:
                self._op(op)
        loss = self._whole(self.program.loss) if self.program.loss in self.native else None
        outputs = [self._output(found, loss) for found in kept]
        outputs += [Ref(self.native[tensor].index) for tensor in self.program.handed]
        return LocalProgram(
            self.program,
            self.decisions,
            self.communicator,
            self.values,
            in_buckets(self.instructions, self.values, self.decisions.overlap),
            sources,
            outputs,
            None if loss is None else loss.index,
        )

    def _layout_made(self, tensor: Tensor) -> Layout:
        """Return the layout in which the op that makes `tensor`, of another stage, leaves it."""
        op = tensor.producer
        assert op is not None, "it was made"
        assert op.region is not None, "constants are not handed on"
        group, twin = self.program.group_of(op), op.region.region_class.representative.ops[op.position]
        return group.output_layout(twin, op.outputs.index(tensor), self.decisions.splits[group])

    def _value(self, key: str, tensor: Tensor, layout: Layout) -> Value:
        chosen = self.decisions
        is_rerun = key in chosen.recomputed and tensor not in self.routing
        value = Value(len(self.values), key, tensor, layout, is_rerun, key in chosen.offloaded)
        self.values.append(value)
        return value

    def _constant(self, op: Op) -> None:
        inputs = [
            self._wanted(tensor, self.replicated, self.replicated, -1, f"{op.key}.in{i}")
            for i, tensor in enumerate(op.inputs)
        ]
        outputs = [self._value(tensor.key, tensor, self.replicated) for tensor in op.outputs]
        self.native.update({value.tensor: value for value in outputs})
        args, kwargs = _fill(op.node, inputs)
        if self.communicator.device is not None and not inputs and takes_device(op.node.target):
            kwargs = {**kwargs, "device": self.communicator.device}
        self._emit_op(op, op.node.target, args, kwargs, inputs, outputs, -1, ())

    def _op(self, op: Op) -> None:
        assert op.region is not None
        group = self.program.group_of(op)
        twin = op.region.region_class.representative.ops[op.position]
        split = self.decisions.splits[group]
        inputs = []
        for place, tensor in enumerate(op.inputs):
            forward, gradient = group.input_layout(twin, place, split)
            inputs.append(self._wanted(tensor, forward, gradient, op.region.index, f"{op.key}.in{place}"))
        outputs = [
            self._value(tensor.key, tensor, group.output_layout(twin, place, split))
            for place, tensor in enumerate(op.outputs)
        ]
        self.native.update({value.tensor: value for value in outputs})
        args, kwargs = _fill(op.node, inputs)
        function: Callable[..., Any] = op.node.target  # type: ignore[assignment]
        localize = find(op.name).localize
        if localize is not None:
            context = _Context(op, twin, group, split, inputs, outputs, self.communicator, self.decisions.imbalance)
            function, args, kwargs = localize(context, function, args, kwargs)
        exchanges = bool(group.pair_axes(split))
        sampled = sampled_form(op, function, split)
        function = _unless_empty(op, function, outputs, self.communicator, exchanges)
        if sampled is not None:
            sampled = _unless_empty(op, sampled, outputs, self.communicator, exchanges)
        # an op that broadcasts along the loop that its group splits has the same results on all ranks, and draws the same
        axes = tuple(
            axis
            for axis, loop in enumerate(split)
            if loop >= 0 and any(value.layout[axis] != REPLICATE for value in outputs)
        )
        self._emit_op(op, function, args, kwargs, inputs, outputs, op.region.index, axes, sampled)

    def _emit_op(self, op: Op, function: Any, args: Any, kwargs: Any, inputs: list[Value], outputs: list[Value], region: int,
                 axes: tuple[int, ...], sampled: Callable[..., Any] | None = None) -> None:  # fmt: skip
        internal, scratch = f"{op.key}.internal", find(op.name).scratch
        self.instructions.append(Compute(
            index=len(self.instructions), key=op.key, path=op.path, region=region, op=op,
            function=function, args=args, kwargs=kwargs,
            inputs=tuple(value.index for value in inputs), outputs=tuple(value.index for value in outputs), axes=axes,
            internal_recomputed=internal in self.decisions.recomputed,
            internal_offloaded=internal in self.decisions.offloaded,
            sampled=sampled,
            rerun=_on_copies(function, scratch) if op.writes and scratch else None,
        ))  # fmt: skip

    def _wanted(self, tensor: Tensor, forward: Layout, gradient: Layout, region: int, key: str) -> Value:
        """Return the value of `tensor` in the layout that a consumer wants, shared by all that want the same."""
        held = self.native[tensor]
        due = gradient_layout(held.layout)
        if not tensor.requires_grad:
            gradient = due = self.replicated
        if held.layout == forward and gradient == due:
            return held
        if not tensor.requires_grad and tensor.role not in ("op", "param"):
            region = -1  # a slice of the batch or of a constant serves every block
        # A tied parameter that is read as it rests: its readers' gradients are summed here, and reduced once.
        as_it_rests = tensor.role == "param" and held.layout == forward
        name = (tensor, forward, gradient, _ANY_REGION if as_it_rests else region)
        if name not in self.copies:
            self.copies[name] = self._copy(held, forward, gradient, due, region, key)
            self.copies[name].recomputed &= not as_it_rests
        return self.copies[name]

    def _copy(self, held: Value, forward: Layout, gradient: Layout, due: Layout, region: int, key: str) -> Value:
        """Return a converted copy for one region: its own, or the one that an earlier region has made."""
        if (held.tensor, forward) not in self.decisions.shared:
            return self._reshard(held, forward, gradient, due, region, key)
        name = (held.tensor, forward, gradient, _ANY_REGION)
        if name in self.copies:
            return self._reshard(held, forward, gradient, due, region, key, self.copies[name])
        self.copies[name] = self._reshard(held, forward, gradient, due, region, key)
        return self.copies[name]

    def _reshard(self, held: Value, forward: Layout, gradient: Layout, due: Layout, region: int, key: str,
                 lent: Value | None = None) -> Value:  # fmt: skip
        """Emit a reshard; where a copy is `lent`, borrow it, so that autograd sums its readers' gradients."""
        tensor = held.tensor
        there, back = (
            Route(steps, tensor.shape, tensor.slots, self.communicator, tensor.order)
            for steps in (transition(held.layout, forward), transition(gradient, due))
        )
        copy = self._value(key, tensor, forward)
        copy.recomputed &= region >= 0  # one that serves several blocks is kept
        change = Reshard(
            index=len(self.instructions), key=key, path=key.rpartition(":")[0], region=region,
            source=held.index, result=copy.index, there=there, back=back, differentiable=tensor.requires_grad,
        )  # fmt: skip
        self.instructions.append(change if lent is None else Borrow(**vars(change), lent=lent.index))
        return copy

    def _whole(self, tensor: Tensor) -> Value:
        return self._wanted(tensor, self.replicated, self.replicated, -1, f"{tensor.key}.whole")

    def _output(self, found: Any, loss: Value | None) -> Any:
        if not isinstance(found, Tensor):
            return found
        if found is self.program.loss:
            return None if loss is None else Ref(loss.index)
        native = self.native[found]
        if any(at < REPLICATE for at in native.layout):
            return Ref(
                self._wanted(
                    found, gradient_layout(native.layout), gradient_layout(native.layout), -1, f"{found.key}.sum"
                ).index
            )
        return Ref(native.index)


def sampled_form(op: Op, function: Callable[..., Any], split: Split) -> Callable[..., Any] | None:
    """Return the form of `function`, the local form of `op`, that keeps some rows; None where `split` says nothing of it.

    Each rank keeps rows of its own part: those of its samples, the columns that it has of each, for its part of the weight. What
    the ranks' gradients are summed to is unbiased as each of them is, and no rank asks another.
    """
    share = share_of(split)
    if not share or not can_sample(op):
        return None
    target: Callable[..., Any] = op.node.target  # type: ignore[assignment]
    kept = sampled_map(target, share, find(op.name).linear_map == "in_out")
    return function.retargeted(kept) if hasattr(function, "retargeted") else kept  # type: ignore[no-any-return]


def consecutive_range(op: Op, loop: str, splits: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return start and stop of a rank's part of a loop whose first factor has these splits, each (parts, index)."""
    size = op.signature.sizes.get(loop, 1)
    first = leaves(op.loops[loop])[0].size if loop in op.loops else 1
    start, stop = slot_range(first, splits)
    return start * (size // first), stop * (size // first)


def _routing(program: Program) -> set[Tensor]:
    """Return the tensors that say which expert a row goes to; these are never recomputed.

    Where two experts are as good as equal a rerun may choose the other one, and would exchange other numbers of rows than the
    forward did: all ranks would wait for ever.
    """
    found: set[Tensor] = set()
    for op in program.ops:
        for tensor in op.inputs if op.signature.pairs else ():
            while not tensor.dtype.is_floating_point and tensor not in found:
                found.add(tensor)
                if tensor.producer is None or tensor.producer.kind != "view":
                    break
                tensor = tensor.producer.inputs[0]
    return found


def _on_copies(function: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return `function` with copies of the arguments at `places`: what it writes there is lost."""

    def again(*args: Any, **kwargs: Any) -> Any:
        own = [arg.clone() if place in places and arg is not None else arg for place, arg in enumerate(args)]
        return function(*own, **kwargs)

    return again


def _fill(node: fx.Node, inputs: Sequence[Value]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fill_arguments(node, [value.index for value in inputs])


def fill_arguments(node: fx.Node, inputs: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the node's arguments with a `Ref` to one of the values `inputs` in place of each tensor, in order."""
    queue = iter(inputs)

    def walk(tree: Any) -> Any:
        if isinstance(tree, fx.Node):
            return Ref(next(queue))
        if isinstance(tree, (list, tuple)):
            return (
                type(tree)(walk(item) for item in tree)
                if type(tree) in (list, tuple)
                else [walk(item) for item in tree]
            )
        if isinstance(tree, dict):
            return {key: walk(item) for key, item in tree.items()}
        return tree

    return tuple(walk(arg) for arg in node.args), {key: walk(arg) for key, arg in node.kwargs.items()}


def _unless_empty(op: Op, function: Callable[..., Any], outputs: Sequence[Value], communicator: Communicator,
                  exchanges: bool) -> Any:  # fmt: skip
    """Return what to call for `op` on this rank: where its part of all outputs is empty, a call that does nothing.

    Kernels of several nodes (attention) take other paths on empty tensors; the backward of such a rank would reach
    its collectives in another order than its peers, and all would wait for ever.
    """
    mesh, coords = communicator.mesh, communicator.coords
    shapes = [local_shape(v.tensor.shape, v.tensor.slots, v.layout, mesh, coords) for v in outputs]
    if op.kind != "heavy" or not op.requires_grad or not shapes or any(0 not in shape for shape in shapes):
        return function
    if exchanges or any(name in op.signature.joint for dims in op.signature.outputs for dim in dims for name in dim):
        return function  # others have parts of this very loop, and wait for this rank's share (batch norm's statistics)
    many, followed = isinstance(op.node.meta["val"], (tuple, list)), _followed(op)
    empty = [(shape, value.tensor.dtype) for shape, value in zip(shapes, outputs)]

    def nothing(*args: Any, **kwargs: Any) -> Any:
        results = Nothing.apply(empty, followed, *tensors_in((args, kwargs)))
        return results if many else results[0]

    return nothing


def _followed(op: Op) -> list[bool]:
    """Return, for each output, whether autograd follows it: an op of several may pass on an operand without gradient."""
    followed = [tensor.requires_grad for tensor in op.outputs]
    for user in op.node.users:
        if getattr(user.target, "__name__", "") == "getitem":
            followed[user.args[1]] &= bool(user.meta.get("requires_grad", True))  # type: ignore[index]
    return followed


class _Context:
    """The `LocalContext` of one op on one rank."""

    def __init__(self, op: Op, twin: Op, group: Group, split: Split, inputs: list[Value], outputs: list[Value],
                 communicator: Communicator, imbalance: float) -> None:  # fmt: skip
        self.imbalance = imbalance
        self.op, self.twin, self.group, self.chosen = op, twin, group, split
        self.inputs, self.outputs, self.communicator = inputs, outputs, communicator

    def _shape(self, value: Value, layout: Layout | None = None) -> tuple[int, ...]:
        mesh, coords = self.communicator.mesh, self.communicator.coords
        return local_shape(value.tensor.shape, value.tensor.slots, layout or value.layout, mesh, coords)

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        return self._shape(self.outputs[index])

    def in_shape(self, index: int) -> tuple[int, ...]:
        return self._shape(self.inputs[index])

    def global_shape(self, index: int) -> tuple[int, ...]:
        return self.inputs[index].tensor.shape

    def _axes(self, loops: Sequence[str]) -> tuple[int, ...]:
        found = {axis for loop in loops for axis in self.group.op_axes(self.twin, loop, self.chosen)}
        return tuple(sorted(axis for axis in found if self.communicator.mesh[axis] > 1))

    def split(self, *loops: str) -> bool:
        return bool(self._axes(loops))

    def owner(self, *loops: str) -> bool:
        return all(self.communicator.coords[axis] == 0 for axis in self._axes(loops))

    def group_of(self, *loops: str) -> Axes:
        return Axes(self.communicator, self._axes(loops))

    def range_of(self, loop: str) -> tuple[int, int]:
        return self._range_at(loop, self.communicator.coords)

    def _range_at(self, loop: str, coords: Sequence[int]) -> tuple[int, int]:
        mesh = self.communicator.mesh
        return consecutive_range(self.op, loop, [(mesh[a], coords[a]) for a in self._axes([loop])])

    def mirrors_of(self, loop: str) -> tuple[Mirror, ...]:
        mesh, coords, found = self.communicator.mesh, list(self.communicator.coords), []
        for axis in self._axes([loop]):
            coords[axis] = mesh[axis] - 1 - coords[axis]
            found.append(Mirror(Axes(self.communicator, [axis]), self._range_at(loop, coords)))
        return tuple(found)

    def pair_of(self, first: str, second: str) -> Pair | None:
        axes = [axis for axis in self.group.pair_axes(self.chosen) if self.communicator.mesh[axis] > 1]
        if not axes:
            return None
        (axis,), own = axes, self.communicator.coords
        coords = [(*own[:axis], peer, *own[axis + 1 :]) for peer in range(self.communicator.mesh[axis])]
        return Pair(Axes(self.communicator, axes), own[axis], tuple(self._range_at(second, at) for at in coords))

    def count(self, numbers: Any, rows: Rows) -> list[int]:
        return self.communicator.count(self.op.key, numbers, rows)

    def limit(self) -> str:
        return self.communicator.limit()
