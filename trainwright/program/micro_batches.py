"""Finds the corrections with which the mean of K micro-batches' losses equals the loss of the whole batch.

Two captures of one step are compared op by op, the whole batch's and one micro-batch's. Dims whose sizes differ are
batch dims. The ops' loops decide the kind of each tensor:

    same    it has the same value in every micro-batch, since it depends on no example
    part    a micro-batch has its rows of the whole tensor
    mean    the whole value is the mean of the micro-batches' values

Three corrections turn a result into a `mean`. A sum over the batch is multiplied by K. A mean with weights that differ
between micro-batches (cross-entropy with ignored labels) is multiplied by K · its weight / the sum of all weights. A
result that depends on a literal with the batch's size is multiplied by the ratio of the two literals. A mean that is
computed from the batch alone (the number of tokens that a mask leaves) and then used nonlinearly is replaced by the
whole batch's value.

The loss has to end as a `mean` or `same`; then loss = Σ_k loss_k / K exactly, and so are the gradients. Everything else
is refused with a message that names the op: batch norm takes statistics of all examples, a contrastive loss compares
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..artifacts import UserError
from ..artifacts.plan import names_of_batch
from ..capture.cached import cached_capture, capture_named, name_on, step_name
from ..capture.export import Captured, as_batch
from ..capture.passes.chunked_loss import chunk_losses
from ..ops import find
from ..torch_internals.private import flatten_batch
from .drawing import draws
from .factors import leaves
from .program import Op, Program, Tensor, build_program, op_name

WEIGHTED = "weighted"
"""The op's result is multiplied by K · its weight / all micro-batches' weights."""
WHOLE_SUM, WHOLE_MEAN = "whole-sum", "whole-mean"
"""The op's result is replaced by that of the whole batch: the sum, or the mean, of all micro-batches' results."""
Corrections = dict[str, float | str]
"""Maps an op's key to its correction: a factor of its result, `weighted`, `whole-sum` or `whole-mean`."""
Kind = Literal["same", "part", "mean"]


def split_entries(batch: Any, num: int) -> Any:
    """Return the first of `num` micro-batches of a batch; raise `UserError` where its size is no multiple of `num`."""
    named, rebuild = flatten_batch(as_batch(batch))
    own = names_of_batch(shapes_of(batch))
    size = batch_size(batch)
    if num < 1 or size % num:
        raise UserError(
            f"a number of micro-batches that divides the batch of {size} is needed; got {num}; try {_nearest(size, num)}"
        )
    return rebuild([leaf[: size // num] if name in own else leaf for name, leaf in named])


def batch_size(batch: Any) -> int:
    """Return the number of examples in a batch."""
    return next((shape[0] for shape in shapes_of(batch).values() if shape), 1)


def shapes_of(batch: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a batch, by name."""
    named, _ = flatten_batch(as_batch(batch))
    return {name: tuple(leaf.shape) for name, leaf in named if isinstance(leaf, torch.Tensor)}


def _nearest(size: int, num: int) -> int:
    return min((k for k in range(1, size + 1) if size % k == 0), key=lambda k: (abs(k - num), k))


def capture_step(
    model: Any,
    batch: Any,
    loss_fn: Any,
    autocast: Any,
    num: int = 1,
    corrections: Corrections | None = None,
    whole: Program | None = None,
    loss_chunks: int | None = 0,
) -> Program:
    """Return the program of a step on `batch`, or of one of its `num` micro-batches.

    loss_chunks: the number of chunks in which a loss and its head are computed; 0 leaves them whole, None takes as many
    as suit the head (`chunk_losses`).

    corrections: those of a plan. By default they are found by comparing with the program of the `whole` batch, which is
    captured if it is not given.
    """
    if num == 1:
        found = cached_capture(model, batch, loss_fn, autocast=autocast, name=step_name(name_on(batch), 1))
        return build_program(_chunked(found, loss_chunks))
    part = cached_capture(
        model, split_entries(batch, num), loss_fn, autocast=autocast, name=step_name(name_on(batch), num)
    )
    part = _chunked(part, loss_chunks, num)
    if corrections is None:
        if whole is None or whole.captured.loss_chunks != part.loss_chunks:
            whole = capture_step(model, batch, loss_fn, autocast, loss_chunks=part.loss_chunks)
        corrections = find_corrections(whole, build_program(part), num)
    return as_runs(part, num, corrections)


def stored_step(
    name: str, autocast: Any, num: int, corrections: Corrections, loss_chunks: int | None = 0
) -> Program | None:
    """Return the program of a step that was captured under `naming(name, …)`, without its model; `None` where none is stored."""
    found = capture_named(str(step_name(name, num)), autocast)
    if found is None:
        return None
    found = _chunked(found, loss_chunks, num)
    return build_program(found) if num == 1 else as_runs(found, num, corrections)


def _chunked(found: Captured, loss_chunks: int | None, num: int = 1) -> Captured:
    return found if loss_chunks == 0 else chunk_losses(found, loss_chunks, num)


def find_corrections(whole: Program, part: Program, num: int) -> Corrections:
    """Return the corrections with which `num` runs of `part` compute the step of `whole`; raise `UserError` where none do."""
    if num == 1:
        return {}
    return _Comparison(whole, part, num).corrections()


@dataclass(frozen=True)
class _State:
    kind: Kind
    slot: int = -1
    """For a `part`, the slot of the tensor that runs over the batch."""
    from_batch: bool = False
    """True if the tensor is computed from the batch, buffers and constants alone, so that it is known before the step."""


def _moves_only(op: Op) -> bool:
    return len(op.outputs) == 1 and len(op.inputs) > 0 and (op.kind == "view" or find(op.name).copies)


def _alike(op: Op, other: Op) -> bool:
    return (op.name, op.path, len(op.inputs)) == (other.name, other.path, len(other.inputs))


class _Comparison:
    def __init__(self, whole: Program, part: Program, num: int) -> None:
        self.whole, self.part, self.num = whole, part, num
        self.found: Corrections = {}
        self.states: dict[Tensor, _State] = {}
        self.twin: dict[Tensor, Tensor] = {}
        self.twin_of: dict[Op, Op] = {}

    def corrections(self) -> Corrections:
        self._match()
        for tensor in self.whole.tensors:
            if tensor.role != "op":
                self.states[tensor] = self._source(tensor)
        for op in self.whole.ops:
            factor = self._literal_factor(op)
            states = self._outputs(op)
            for tensor, state in zip(op.outputs, states):
                self._check_shape(op, tensor, state)
                self.states[tensor] = state
            if factor != 1.0:
                self._correct(op, factor)
        for op in self.whole.ops:
            if op.writes:
                self._refuse("a forward that changes no buffer", f"{op.key} writes {op.writes}")
        if self.states[self.whole.loss].kind == "part":
            self._refuse("a loss over all examples", f"the loss is {self.whole.loss.key}, one of each")
        return self.found

    def _match(self) -> None:
        """Pair the ops of both graphs; an op that only moves or repeats rows may be missing in either of them."""
        sources = [[t for t in program.tensors if t.role != "op"] for program in (self.whole, self.part)]
        self.twin.update(zip(*sources))
        rest = list(reversed(self.part.ops))
        for op in self.whole.ops:
            while rest and not _alike(op, rest[-1]) and _moves_only(rest[-1]) and not _moves_only(op):
                rest.pop()
            if rest and _alike(op, rest[-1]):
                self.twin_of[op] = rest.pop()
                self.twin.update(zip(op.outputs, self.twin_of[op].outputs))
            elif _moves_only(op):
                self.twin[op.outputs[0]] = self.twin[op.inputs[0]]
            else:
                self._refuse("the same graph for a micro-batch as for the batch", f"they differ at {op.key}")
        if len(sources[0]) != len(sources[1]) or self.twin[self.whole.loss] is not self.part.loss:
            self._refuse("the same graph for a micro-batch as for the batch", "they differ at the loss")

    def _refuse(self, needed: str, found: str) -> None:
        raise UserError(f"{self.num} micro-batches need {needed}; {found}; try 1 micro-batch, or another number")

    def _source(self, tensor: Tensor) -> _State:
        twin = self.twin[tensor]
        known = tensor.role != "param"
        if tensor.shape == twin.shape:
            both = (tensor.value, twin.value)
            if all(isinstance(value, torch.Tensor) for value in both) and not torch.equal(*both):
                self._refuse("constants that do not depend on the batch", f"{tensor.key} is another for a micro-batch")
            return _State("same", from_batch=known)
        if tensor.role != "input" or tensor.shape[1:] != twin.shape[1:] or tensor.shape[0] != self.num * twin.shape[0]:
            self._refuse(
                "a batch whose entries are cut along their first dim", f"{tensor.key} has {list(tensor.shape)}"
            )
        return _State("part", self._slot_of_dim(tensor, 0), known)

    def _slot_of_dim(self, tensor: Tensor, dim: int) -> int:
        slots = [index for index, slot in enumerate(tensor.slots) if slot.dim == dim]
        if not slots or tensor.slots[slots[0]].size % self.num:
            self._refuse("a batch dim that stays whole", f"{tensor.key} cuts it into factors")
        return slots[0]

    def _check_shape(self, op: Op, tensor: Tensor, state: _State) -> None:
        expected = list(tensor.shape)
        if state.kind == "part":
            dim = tensor.slots[state.slot].dim
            expected[dim] = expected[dim] // self.num
        if tuple(expected) != self.twin[tensor].shape:
            self._refuse("one dim of the batch in every tensor", f"{op.key} gives {list(tensor.shape)}")

    # Literals

    def _literal_factor(self, op: Op) -> float:
        """Return the factor that corrects the result of an op with a literal that depends on the batch's size.

        Sizes need no correction. A literal of another op than a product or quotient is refused.
        """
        twin = self.twin_of.get(op)
        if twin is None:
            return 1.0
        pairs = list(_literals((op.node.args, op.node.kwargs), (twin.node.args, twin.node.kwargs)))
        differing = [
            (ours, theirs) for ours, theirs, listed in pairs if ours != theirs and not (listed and _takes_sizes(op))
        ]
        whole_numbers = all(isinstance(value, int) for pair in differing for value in pair)
        if not differing or (whole_numbers and (op.kind == "view" or op.name == "arange")):
            return 1.0
        if op.name in ("mul", "div") and len(differing) == 1 and all(isinstance(v, int | float) for v in differing[0]):
            ours, theirs = map(float, differing[0])
            return ours / theirs if op.name == "mul" else theirs / ours
        self._refuse("numbers that do not depend on the batch's size", f"{op.key} has {differing[0][0]}")
        raise AssertionError

    def _correct(self, op: Op, factor: float | str) -> None:
        key = self.twin_of[op].key
        known = self.found.get(key, 1.0)
        if isinstance(known, str) or isinstance(factor, str):
            if key in self.found and known != factor:
                self._refuse("one correction an op", f"{op.key} would take two")
            self.found[key] = factor
        else:
            self.found[key] = known * factor

    # Ops

    def _outputs(self, op: Op) -> list[_State]:
        states = [self.states[tensor] for tensor in op.inputs]
        known = all(state.from_batch for state in states) and not draws(op)
        kinds = {state.kind for state in states}
        if "part" in kinds and "mean" in kinds and self._settle(op):
            kinds = {self.states[tensor].kind for tensor in op.inputs}
        if "part" in kinds:
            if "mean" in kinds:
                self._refuse(
                    "examples that are computed each by itself", f"{op.key} uses an average over all of them for each"
                )
            return self._of_parts(op, known)
        if "mean" in kinds and not _reads_values(op):
            return [self._made(op, tensor, known=True) for tensor in op.outputs]
        if "mean" in kinds and (self._is_linear(op) or not self._settle(op)):
            self._require_linear(op)
            return [_State("mean", from_batch=known)] * len(op.outputs)
        return [self._made(op, tensor, known) for tensor in op.outputs]

    def _made(self, op: Op, tensor: Tensor, known: bool) -> _State:
        """Return the state of a tensor made without examples: it has no batch dim, or its rows are alike."""
        twin = self.twin[tensor]
        if tensor.shape == twin.shape:
            return _State("same", from_batch=known)
        dims = [k for k, (a, b) in enumerate(zip(tensor.shape, twin.shape)) if a != b]
        if _has_rows_alike(op) and len(dims) == 1:
            return _State("part", self._slot_of_dim(tensor, dims[0]), known)
        self._refuse("rows that do not know their place in the batch", f"{op.key} numbers the examples")
        raise AssertionError

    def _settle(self, op: Op) -> bool:
        """Replace the means that `op` reads by the whole batch's; return False if these are not known before the step."""
        means = [tensor for tensor in op.inputs if self.states[tensor].kind == "mean"]
        if not all(self.states[tensor].from_batch for tensor in means):
            return False
        for tensor in means:
            twin = None if tensor.producer is None else self.twin_of.get(tensor.producer)
            if twin is None or len(twin.outputs) > 1 or self.found.get(twin.key, 1.0) not in (1.0, float(self.num)):
                return False
        for tensor in means:
            assert tensor.producer is not None
            key = self.twin_of[tensor.producer].key
            self.found[key] = WHOLE_MEAN if self.found.get(key, 1.0) == 1.0 else WHOLE_SUM
            self.states[tensor] = replace(self.states[tensor], kind="same")
        return True

    def _is_linear(self, op: Op) -> bool:
        kinds = [self.states[tensor].kind for tensor in op.inputs]
        if op.kind == "view" or find(op.name).linear:
            return True
        if op.name == "mul":
            return kinds.count("mean") == 1
        return (
            op.name == "div"
            and kinds[0] == "mean"
            and "mean" not in kinds[1:]
            and "rounding_mode" not in op.call.kwargs
        )

    def _require_linear(self, op: Op) -> None:
        if not self._is_linear(op):
            self._refuse(
                "a loss that averages over the examples", f"{op.key} takes an average of them and is not linear"
            )

    def _of_parts(self, op: Op, known: bool) -> list[_State]:
        loop, factor = self._loop(op)
        signature = op.signature
        if loop in signature.whole and not _reads_values(op):  # as `x.new_zeros(len(x))`
            return [self._made(op, tensor, known=True) for tensor in op.outputs]
        if not signature.known or loop in signature.whole or loop in signature.joint:
            self._refuse("examples that are computed each by itself", f"{op.key} takes the whole batch together")
        if loop in signature.reduced:
            return self._reduced(op, loop, known)
        found = []
        for place, tensor in enumerate(op.outputs):
            slot = op.slot(tensor, signature.outputs[place], loop, factor)
            if slot is None:
                self._refuse("examples that are computed each by itself", f"{op.key} drops the batch")
            else:
                found.append(_State("part", slot, known))
        return found

    def _loop(self, op: Op) -> tuple[str, int]:
        """Return the loop of `op` that runs over the batch, and which of its factors does; all operands that are parts agree.

        A loop over several dims that a view has merged may have the batch as an inner factor, as torch's own attention does.
        """
        found = set()
        for place, tensor in enumerate(op.inputs):
            state = self.states[tensor]
            if state.kind == "part":
                dims = op.signature.inputs[place]
                own = [
                    (name, factor)
                    for name in op.loops
                    for factor in range(len(leaves(op.loops[name])))
                    if op.slot(tensor, dims, name, factor) == state.slot
                ]
                found.add(own[0] if own else None)
        if len(found) != 1 or None in found:
            self._refuse("examples that are computed each by itself", f"{op.key} combines them with one another")
        (same,) = found
        assert same is not None
        return same

    def _reduced(self, op: Op, loop: str, known: bool) -> list[_State]:
        if op.signature.once:
            self._refuse("sums over the batch without an addend", f"{op.key} adds one")
        if loop not in op.signature.averaged:
            self._correct(op, float(self.num))
        elif find(op.name).weight is not None:
            operands = [self.states[tensor] for tensor in op.inputs[1:]]
            if not all(state.from_batch or state.kind == "same" for state in operands):
                self._refuse("labels that are known before the step", f"those of {op.key} are not")
            self._correct(op, WEIGHTED)
        return [_State("mean", from_batch=known)] * len(op.outputs)


def _reads_values(op: Op) -> bool:
    """Return False for an op that takes sizes from its operands alone, as `ones_like` does, where a gradient begins."""
    entry = find(op.name)
    return entry.differentiable or not entry.uniform


def _literals(ours: Any, theirs: Any, depth: int = 0) -> Iterator[tuple[Any, Any, bool]]:
    """Yield pairs of corresponding literals of (args, kwargs), each with True if it stands in a list, as sizes do."""
    if isinstance(ours, torch.fx.Node):
        return
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        for a, b in zip(ours, theirs):
            yield from _literals(a, b, depth + 1)
    elif isinstance(ours, dict) and isinstance(theirs, Mapping) and ours.keys() == theirs.keys():
        for key in ours:
            yield from _literals(ours[key], theirs[key], depth + 1)
    else:
        yield ours, theirs, depth > 2


def _takes_sizes(op: Op) -> bool:
    return op.kind == "view" or _has_rows_alike(op) or find(op.name).localize is not None


def _has_rows_alike(op: Op) -> bool:
    """Tell whether the rows of a result made without examples are alike: equal, or drawn each by itself."""
    return find(op.name).uniform or (draws(op) and not op.inputs)


def as_runs(part: Captured, num: int, corrections: Corrections) -> Program:
    """Return the program of a micro-batch, `num` runs of which make a step; its weighted means are rewritten to sums."""
    keys = {node.meta["key"] for node in part.graph.nodes if node.op == "call_function"}
    unknown = sorted(corrections.keys() - keys)
    if unknown:
        raise UserError(
            f"the plan's corrections must name ops of the model; it has no {unknown[0]}; make the plan again"
        )
    for node in part.graph.nodes:
        if node.op == "call_function" and corrections.get(node.meta["key"]) == WEIGHTED:
            rule = find(op_name(node.target)).weight
            assert rule is not None
            node.args, node.kwargs = rule.as_sum(node.args, node.kwargs)
    program = build_program(part)
    program.num_runs, program.corrections = num, corrections
    return program


def candidates(size: int) -> Sequence[int]:
    """Return the numbers of micro-batches to plan for a batch of `size`: its divisors, some left out where there are
    many.

    >>> candidates(12), candidates(7)
    ([1, 2, 3, 4, 6, 12], [1, 7])
    """
    divisors = [num for num in range(1, size + 1) if size % num == 0]
    powers = [num for num in divisors if num & (num - 1) == 0]
    others = [num for num in divisors if num not in powers][: max(0, 12 - len(powers))]
    return sorted({*powers, *others, size})
