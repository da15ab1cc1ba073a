"""Records what each op of a program costs and saves for its backward, by running it once on fake tensors.

Only the representative of each kind of region is run, so eighty layers take as long as one. A tensor that is a view of
another shares its memory; `Records.root` names the tensor whose memory it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor as Array

from ..artifacts import Device
from ..ops import find
from ..ops.flops import bytes_moved, flops, is_convolution, moves_nothing
from ..ops.kernels import Kernel, kernel_of, skips_half
from ..program.decisions import Decisions
from ..program.layout import REPLICATE
from ..program.program import Op, Program, Tensor
from ..rank.execute import Executor
from ..rank.instructions import Compute
from ..rank.local import LocalProgram, build_local
from ..rank.reshard import SimulatedCommunicator
from ..rank.run_state import RunState
from ..torch_internals.fakes import new_mode
from ..torch_internals.private import without_modes
from ..torch_internals.trees import tensors_in
from .gpu_time import gpu_seconds
from .kernels import gpu_workspace, workspace
from .time import dtype_name, rate, table_of
from .tracker import MemoryTracker, Target


@dataclass(frozen=True)
class CallCost:
    """The arithmetic and the memory traffic of one ATen call on whole tensors."""

    flops: int
    num_bytes: int
    dtype: torch.dtype
    convolution: bool = False
    kernel: Kernel | None = None
    call: tuple[Any, tuple[Any, ...], Any] | None = field(default=None, compare=False, repr=False)
    """On a GPU: op, arguments and result, tensors without values; what a kernel takes there hangs on how they lie."""
    _whole_s: dict[int, tuple[Device, float]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def seconds(self, device: Device, flop_share: float, byte_share: float) -> float:
        """Return the seconds of a rank's share of the call, as a profile prices the whole.

        It is a share of the measured kernel, of a GPU's kernel by its kind and shape (gpu_time.py), or a roofline's without either.
        """
        if (whole_s := self._measured_s(device)) is not None:
            return whole_s * (flop_share if self.flops else byte_share)
        if self.call is not None and self.kernel is not None and device.kind == "gpu" and device.num_units:
            return self._on_gpu_s(device) * (flop_share if self.flops else byte_share) + device.launch_s
        rates = device.conv_flops_per_s if self.convolution and device.conv_flops_per_s else device.flops_per_s
        skipped = 0.5 if self.kernel is not None and skips_half(self.kernel) else 1.0
        compute_s = self.flops * skipped * flop_share / rate(rates, self.dtype) if self.flops else 0.0
        return max(compute_s, self.num_bytes * byte_share / device.bandwidth_bytes_per_s) + device.launch_s

    def _on_gpu_s(self, device: Device) -> float:
        """Return the seconds of the whole call's kernel on a GPU, without its launch."""
        known = self._whole_s.get(id(device))
        if known is None or known[0] is not device:
            assert self.call is not None
            assert self.kernel is not None
            func, args, out = self.call
            rates = device.conv_flops_per_s if self.convolution and device.conv_flops_per_s else device.flops_per_s
            found = gpu_seconds(device, self.kernel, rate(rates, self.dtype), args, out, func)
            known = self._whole_s[id(device)] = (device, found)
        return known[1]

    def launch_s(self, device: Device) -> float:
        """Return what of `seconds` every share takes whole."""
        return device.launch_s if self._measured_s(device) is None else 0.0

    def _measured_s(self, device: Device) -> float | None:
        if not device.kernels or self.kernel is None:
            return None
        return table_of(device).seconds(self.kernel, dtype_name(self.dtype))


@dataclass(frozen=True)
class OpRecord:
    """The cost of one op on whole tensors, and the tensors that it saves for its backward."""

    forward: tuple[CallCost, ...]
    backward: tuple[CallCost, ...]
    saved_inputs: frozenset[int]
    """Positions of the tensor arguments whose memory is saved."""
    saved_outputs: frozenset[int]
    internals: tuple[int, ...]
    """The bytes of each tensor that is saved and is neither an argument nor an output: statistics, masks."""
    backward_bytes: tuple[int, int]
    """The peak bytes of the op's backward, beyond what was saved and its incoming gradient: until the last kernel that reads
    what was saved, and from then on, when that is released (a bias's gradient is summed last)."""
    forward_bytes: int
    """The peak bytes of the op's forward, beyond its inputs, its outputs and what it saves."""
    aliases: dict[int, int]
    """Output position → position of the argument whose memory it shares."""
    num_calls: tuple[int, int]
    """The ATen calls of its forward and of its backward, views and allocations among them."""
    scratch_is_uneven: bool = False
    """True if a part of the op takes another share of its kernels' scratch memory than of its work."""


@dataclass(eq=False)
class Records:
    """Holds the `OpRecord` of each op in the representative regions."""

    by_op: dict[Op, OpRecord] = field(default_factory=dict)
    silent: set[Hashable] = field(default_factory=set)
    """The parts of ops that were found to communicate nothing, as `planner.costs` names them; the same on every mesh."""

    def __getitem__(self, op: Op) -> OpRecord:
        return self.by_op[op]

    def root(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the same region whose memory `tensor` shares; `tensor` itself if it is no view."""
        while tensor.producer in self.by_op:
            producer = tensor.producer
            source = self.by_op[producer].aliases.get(producer.outputs.index(tensor))
            if source is None:
                return tensor
            tensor = producer.inputs[source]
        return tensor


def record(program: Program, target: Target = "cpu") -> Records:
    """Return the records of the representative regions' ops, each run once, forward and backward, on fake tensors.

    `target="gpu"`: attention with dropout counts as the fused kernel that a GPU would run.
    """
    local = whole_program(program)
    executor = Executor(local)
    wanted = {op for region_class in program.classes for op in region_class.representative.ops}
    records = Records()
    with new_mode():
        env: dict[int, Array] = {}
        for instruction in local.instructions:
            if isinstance(instruction, Compute) and instruction.op in wanted:
                inputs = [_operand(local, index, env) for index in instruction.inputs]
                records.by_op[instruction.op] = _record_op(executor, instruction, inputs, env, target)
    return records


def whole_program(program: Program) -> LocalProgram:
    """Return the local program of a mesh of one rank, on which every op and parameter is whole."""
    decisions = Decisions((1,), {}, {})
    decisions.params.update(dict.fromkeys(program.params, (REPLICATE,)))
    for region_class in program.classes:
        decisions.splits.update(dict.fromkeys(region_class.groups, (REPLICATE,)))
    return build_local(program, decisions, SimulatedCommunicator((1,)))


def run_state(op: Op | None, target: Target) -> RunState:
    """Return the run state under which `op` runs on fake tensors as it would on `target`."""
    fused = op is not None and find(op.name).fused_on_gpu and target == "gpu"
    return RunState(dropout=not fused)


def _operand(local: LocalProgram, index: int, env: dict[int, Array]) -> Array:
    if index not in env:
        tensor = local.values[index].tensor
        env[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return env[index]


def _record_op(
    executor: Executor, instruction: Compute, inputs: list[Array], env: dict[int, Array], target: Target
) -> OpRecord:
    op = instruction.op
    leaves = {
        index: value.detach().requires_grad_(executor.local.values[index].tensor.requires_grad)
        for index, value in zip(instruction.inputs, inputs)
    }
    forward, backward = CallCounter(target), CallCounter(target)
    inner = dict(leaves)
    with torch.enable_grad(), saved_tensors() as saved:
        with forward.tracker:
            executor.calls[instruction.index](inner, run_state(op, target))
        left = forward.tracker.live_bytes
        outputs = [inner[index] for index in instruction.outputs]
        backward.tracker.watch([*leaves.values(), *outputs, *saved], "input")
        backward.reads(saved)
        _run_backward(outputs, [leaf for leaf in leaves.values() if leaf.requires_grad], backward)
    env.update({index: inner[index].detach() for index in instruction.outputs})
    return summary(forward, left, backward, [leaves[index] for index in instruction.inputs], outputs, saved)


@contextmanager
def saved_tensors() -> Iterator[list[Array]]:
    """Give the list of what autograd saves inside. Taking note of it is no call of the op: modes do not see it."""
    saved: list[Array] = []

    def note(tensor: Array) -> Array:
        with without_modes():
            saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def _run_backward(outputs: list[Array], leaves: list[Array], counter: CallCounter) -> None:
    results = [out for out in outputs if out.requires_grad]
    if not results or not leaves:
        return
    grads = [torch.empty_like(out) for out in results]
    with counter.tracker:
        counter.tracker.watch(grads, "input")
        kept = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    del kept


def summary(
    forward: CallCounter,
    forward_left: int,
    backward: CallCounter,
    inputs: list[Array],
    outputs: list[Array],
    saved: list[Array],
) -> OpRecord:
    """Return the record of one op from the counters of its forward and backward and from the tensors that it saved.

    forward_left: the bytes that its forward left alive. inputs, outputs, saved: its tensors.
    """
    ins, outs = [_storage(tensor) for tensor in inputs], [_storage(tensor) for tensor in outputs]
    inner = {
        _storage(t): t.untyped_storage().nbytes() for t in saved if _storage(t) not in ins and _storage(t) not in outs
    }
    keys = {_storage(tensor) for tensor in saved}
    return OpRecord(
        tuple(forward.calls),
        tuple(backward.calls),
        frozenset(place for place, key in enumerate(ins) if key in keys),
        frozenset(place for place, key in enumerate(outs) if key in keys and key not in ins),
        tuple(inner.values()),
        backward.peaks,
        forward.tracker.peak_bytes - forward_left,
        {place: ins.index(key) for place, key in enumerate(outs) if key in ins},
        (forward.num_calls, backward.num_calls),
        forward.scratch_is_uneven or backward.scratch_is_uneven,
    )


def _storage(tensor: Array) -> int:
    return id(tensor.untyped_storage())


class CallCounter:
    """Lists the cost of every ATen call that runs under its tracker, and counts those that move nothing too."""

    def __init__(self, target: Target) -> None:
        self.calls: list[CallCost] = []
        self.num_calls = 0
        self.scratch_is_uneven = False
        self.tracker = MemoryTracker(target, on_op=self._on_op)
        self._saved: frozenset[int] = frozenset()
        self._until_read = 0

    def reads(self, saved: Iterable[Array]) -> None:
        """Hold the peak until a call is the last that reads one of `saved` apart from the peak afterwards, see `peaks`."""
        self._saved = frozenset(map(_storage, saved))

    @property
    def peaks(self) -> tuple[int, int]:
        """The peak until the last call that read something saved, and from then on; the same twice if none did."""
        after = self.tracker.peak_bytes
        return (self._until_read, after) if self._until_read else (after, after)

    def _on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.num_calls += 1
        given = tensors_in((args, kwargs)) if self._saved else []
        if any(tensor.layout is torch.strided and _storage(tensor) in self._saved for tensor in given):
            self._until_read = max(self._until_read, self.tracker.take_peak())
        if moves_nothing(func):
            return
        heavy, _ = flops(func, args, kwargs, out)
        first = next((t for t in (out, *(out if isinstance(out, (tuple, list)) else ()), *args) if _is_float(t)), None)
        dtype = torch.float32 if first is None else first.dtype
        kernel = kernel_of(func, args, kwargs, out)
        on_gpu = self.tracker.target == "gpu"
        call = (func, *_without_values((args, out))) if on_gpu else None
        self.scratch_is_uneven |= gpu_workspace.is_uneven(func, args, out) if on_gpu else workspace.is_uneven(func)
        self.calls.append(CallCost(heavy, bytes_moved(func, args, out), dtype, is_convolution(func), kernel, call))


def _without_values(tree: Any) -> Any:
    """Return a tree of arguments with tensors on the meta device in place of others, so that nothing is kept alive."""
    if isinstance(tree, Array):
        with without_modes():
            return torch.empty_strided(tree.shape, tree.stride(), dtype=tree.dtype, device="meta")
    return type(tree)(map(_without_values, tree)) if type(tree) in (tuple, list) else tree


def _is_float(value: Any) -> bool:
    return isinstance(value, Array) and value.is_floating_point()
