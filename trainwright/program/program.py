"""`Program`: the captured step in terms of tensors, ops, blocks and groups; what planner and runtime both read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from ..capture.export import Captured
from ..ops import Call, Dims, Signature, TensorSpec, find, signature_of
from ..ops.registry import unknown_signature
from ..torch_internals.dtypes import may_have_gradient
from .blocks import Region, RegionClass, classify, find_regions
from .discover import discovered
from .factors import Factor, leaves, unify, whole
from .groups import Group, build_groups
from .layout import Layout, Slot, memory_order


@dataclass(eq=False)
class Tensor:
    """One tensor of the step: a parameter, buffer, batch entry, constant, or the result of an op."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    role: str
    """The kind of tensor: param, buffer, input, const or op."""
    dims: list[list[Factor]]
    order: tuple[int, ...]
    """The dims as an op's result has them in memory in the model as it is; a change of layout keeps it (`layout.memory_order`)."""
    producer: Op | None = None
    consumers: list[Op] = field(default_factory=list)
    value: Any = None
    """The real tensor of a constant."""

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Return the factors of all dims, major first. The program must be complete before the first read."""
        return tuple(
            Slot(dim, factor.size, factor.blocked) for dim, parts in enumerate(self.dims) for factor in leaves(parts)
        )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_trained(self) -> bool:
        """Return True for a parameter that gets a gradient; one that no op reads has none, nor optimizer states."""
        return self.role == "param" and self.requires_grad and bool(self.consumers)

    def __repr__(self) -> str:
        return f"Tensor({self.key}, {list(self.shape)})"


@dataclass(eq=False)
class Op:
    """One call of the step."""

    key: str
    name: str
    path: str
    node: fx.Node
    call: Call
    signature: Signature
    inputs: list[Tensor]
    outputs: list[Tensor]
    loops: dict[str, list[Factor]]
    constant: bool = False
    """True if the op depends on no parameter and no batch entry; every rank then runs it whole."""
    region: Region | None = None
    position: int = -1
    """The op's index among the ops of its region."""

    @property
    def kind(self) -> str:
        kind = find(self.name).kind
        # on its own: what joined it could not be rerun either
        return "heavy" if self.runs_once and kind == "elementwise" else kind

    @property
    def writes(self) -> str:
        """Return the names of the buffers that the op writes; empty for most ops."""
        return str(self.node.meta.get("mutates", ""))

    @property
    def runs_once(self) -> bool:
        """Return True if the op is never split and never rerun.

        Such an op writes memory that outlasts the step, or makes, views or copies such memory. An op whose results do
        not depend on what it writes (batch normalisation) is split and rerun as any other.
        """
        return bool(self.node.meta.get("touches_written")) and not find(self.name).scratch

    @property
    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.outputs)

    def slot(self, tensor: Tensor, dims: Dims, loop: str, part: int) -> int | None:
        """Return the slot of `tensor`, which the signature gives `dims`, that runs over factor `part` of `loop`."""
        at = 0
        for own, dim in zip(tensor.dims, dims):
            inner = at
            for name in dim:
                if name == loop:
                    return inner + part
                inner += len(leaves(self.loops[name]))
            at += len(leaves(own))
        return None

    def __repr__(self) -> str:
        return f"Op({self.key})"


@dataclass(eq=False)
class Program:
    """The whole step. `ops` are in the order of execution; `classes` are the distinct regions, each with its groups."""

    captured: Captured
    tensors: list[Tensor]
    ops: list[Op]
    regions: list[Region]
    classes: list[RegionClass]
    outputs: list[Tensor | Any]
    loss: Tensor
    by_node: dict[fx.Node, Tensor | tuple[Tensor, ...]]
    num_runs: int = 1
    """The number of runs in a step, each on one micro-batch."""
    corrections: dict[str, float | str] = field(default_factory=dict)
    """The correction of each op, by key, that makes the mean of several runs' losses exact; see `micro_batches`."""
    lifted: torch.dtype | None = None
    """The precision that all floating-point tensors have been brought to (`lift`), whatever they were captured in."""
    given: list[Tensor] = field(default_factory=list)
    """The results that a pipeline stage receives from the stage before, in order; see `stages`."""
    handed: list[Tensor] = field(default_factory=list)
    """The results that a pipeline stage sends to the next stage, in order."""

    @property
    def kept_outputs(self) -> list[Tensor | Any]:
        """Return the outputs that a training step's caller gets: all, or the loss alone with several runs or stages."""
        if self.num_runs == 1 and not self.given and not self.handed:
            return self.outputs
        return [found if found is self.loss else None for found in self.outputs]

    @property
    def params(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.role == "param"]

    @property
    def inputs(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.role == "input"]

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of ops, shapes, dtypes and names, which is equal for equal programs."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            if tensor.role != "op":
                digest.update(
                    repr((tensor.role, tensor.key, tensor.shape, str(tensor.dtype), tensor.requires_grad)).encode()
                )
        for op in self.ops:
            digest.update(repr((op.key, op.name, [t.shape for t in op.outputs])).encode())
        return digest.hexdigest()[:16]

    def group_of(self, op: Op) -> Group:
        """Return the group that decides for `op` (the one of its class)."""
        assert op.region is not None
        return op.region.region_class.group_at[op.position]


def build_program(captured: Captured) -> Program:
    """Turn the captured graph into a `Program`: signatures, factors, blocks, groups."""
    builder = _ProgramBuilder(captured)
    builder.walk()
    real_ops = [op for op in builder.ops if not op.constant]
    regions = find_regions(real_ops)
    classes = classify(regions)
    for region_class in classes:
        _tie(region_class)
    for region_class in classes:
        region_class.groups = build_groups(region_class.representative)
        region_class.group_at = {op.position: group for group in region_class.groups for op in group.ops}
    output = next(node for node in captured.graph.nodes if node.op == "output")
    flat = [builder.by_node.get(value, value) if isinstance(value, fx.Node) else value for value in output.args[0]]
    loss = flat[output.meta["loss_index"]]
    assert isinstance(loss, Tensor)
    return Program(captured, builder.tensors, builder.ops, regions, classes, flat, loss, builder.by_node)


def _tie(region_class: RegionClass) -> None:
    """Make corresponding ops of repeated blocks share their factors, so that one decision serves all."""
    first, *others = region_class.members
    for other in others:
        for op, twin in zip(first.ops, other.ops):
            for name, factors in op.loops.items():
                unify(factors, twin.loops[name])


class _ProgramBuilder:
    """Walks the graph once and gives every op its signature and every dim its factors."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.by_node: dict[fx.Node, Tensor | tuple[Tensor, ...]] = {}

    def walk(self) -> None:
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)

    def _tensor(self, key: str, value: torch.Tensor, role: str, dims: list[list[Factor]] | None = None) -> Tensor:
        shape = tuple(int(size) for size in value.shape)
        dims = [whole(size) for size in shape] if dims is None else dims
        is_made = role == "op" and value.layout is torch.strided
        order = memory_order(value.stride()) if is_made else tuple(range(len(shape)))
        tensor = Tensor(key, shape, value.dtype, bool(value.requires_grad), role, dims, order)
        self.tensors.append(tensor)
        return tensor

    def _placeholder(self, node: fx.Node) -> None:
        tensor = self._tensor(node.meta["name"], node.meta["val"], node.meta["role"])
        tensor.value = node.meta.get("value")
        self.by_node[node] = tensor

    def _call(self, node: fx.Node) -> None:
        if getattr(node.target, "__name__", "") == "getitem":
            source = self.by_node[node.args[0]]  # type: ignore[index]
            assert isinstance(source, tuple)
            self.by_node[node] = source[node.args[1]]  # type: ignore[index]
            return
        inputs = [self._as_tensor(found) for found in _tensor_nodes((node.args, node.kwargs))]
        call = _call_of(node)
        if node.meta.get("touches_written") and not find(call.name).scratch:
            signature = replace(unknown_signature(call), known=True)
        else:
            signature = signature_of(call)
        if not signature.known and find(call.name).kind == "heavy" and not node.meta.get("constant"):
            wanted = [tensor.requires_grad and find(call.name).differentiable for tensor in inputs]
            signature = discovered(node.target, call, wanted) or signature
        loops = {name: [Factor(size)] for name, size in signature.sizes.items()}
        for tensor, dims in zip(inputs, signature.inputs):
            for factors, dim in zip(tensor.dims, dims):
                if dim:
                    unify(factors, [factor for name in dim for factor in loops[name]])
        values = node.meta["val"]
        many = isinstance(values, (tuple, list))
        found = list(values) if many else [] if values is None else [values]
        keys = [f"{node.meta['key']}.out{index or ''}" for index in range(len(found))]
        outputs = [
            self._tensor(key, value, "op", [[f for name in dim for f in loops[name]] for dim in dims])
            for key, value, dims in zip(keys, found, signature.outputs)
        ]
        op = Op(node.meta["key"], call.name, node.meta["path"], node, call, signature, inputs, outputs, loops)
        op.constant = bool(node.meta.get("constant", False))
        differentiable = find(call.name).differentiable and any(tensor.requires_grad for tensor in inputs)
        for tensor in outputs:
            tensor.producer = op
            tensor.requires_grad = differentiable and may_have_gradient(tensor.dtype)
        for tensor in inputs:
            tensor.consumers.append(op)
        self.ops.append(op)
        self.by_node[node] = outputs[0] if len(outputs) == 1 and not many else tuple(outputs)

    def _as_tensor(self, node: fx.Node) -> Tensor:
        found = self.by_node[node]
        assert isinstance(found, Tensor), f"{node} gives several tensors"
        return found


def op_name(target: Any) -> str:
    """Return the name under which the op table lists `target`: `linear` for `aten.linear.default`, `ours::linear` for a user's.

    >>> op_name(torch.ops.aten.mul.Tensor)
    'mul'
    """
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def _call_of(node: fx.Node) -> Call:
    def spec(item: fx.Node) -> Any:
        return _spec(item.meta["val"])

    args = fx.map_arg(node.args, spec)
    kwargs = fx.map_arg(node.kwargs, spec)
    values = node.meta["val"]
    found = values if isinstance(values, (tuple, list)) else [] if values is None else [values]
    outputs = tuple(map(_spec, found))
    return Call(op_name(node.target), tuple(args), dict(kwargs), outputs)


def _spec(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in value.shape), value.dtype, bool(value.requires_grad))


def _tensor_nodes(tree: Any) -> Iterable[fx.Node]:
    if isinstance(tree, fx.Node):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensor_nodes(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensor_nodes(item)


__all__ = ["Layout", "Op", "Program", "Tensor", "build_program", "op_name"]
