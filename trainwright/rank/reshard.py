"""Reshards one rank's part of a tensor, differentiably.

`Communicator` hides the collectives: real process groups in the runtime, shapes alone in the planner's simulation. Both
run this code, so the simulation does what a run does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops.expert_limits import Limit
from ..ops.local import Rows
from ..program.layout import Slot, chunk, local_shape, local_sizes, slots_in_order
from ..program.transition import ReshardStep
from ..torch_internals.dtypes import in_precision, may_have_gradient
from .travel import issued_step


class Pending(Protocol):
    """A collective, or a chain of them, that has been issued."""

    def wait(self) -> Tensor:
        """Wait for the result and return it."""


class Communicator(Protocol):
    """Runs collectives along the axes of a mesh, for the rank at `coords`."""

    mesh: tuple[int, ...]
    coords: tuple[int, ...]
    device: torch.device | None
    """Where ops that read no tensor make theirs; None: on torch's default device."""

    def all_gather(self, axis: int, part: Tensor) -> Tensor:
        """Return the parts of all ranks of `axis`, stacked in front; all of one shape."""

    def reduce_scatter(self, axis: int, parts: Tensor) -> Tensor:
        """Return the sum over the ranks of `axis` of this rank's entry of the leading dim; `parts` may be overwritten."""

    def all_reduce(self, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place (`sum` or `max`) over the ranks of `axis` and return it."""

    def all_to_all(self, axis: int, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send consecutive runs of `flat` (lengths `send`) to the ranks of `axis`; return what they sent."""

    def count(self, key: str, numbers: Tensor, rows: Rows) -> list[int]:
        """Return what `numbers` says of the op `key`: how much of what depends on the data this rank has, where it is known."""

    def limit(self) -> str:
        """Return what becomes of rows beyond those that were planned (`ops.expert_limits`); the same on all ranks."""

    def issue(self, kind: str, axis: int, tensor: Tensor) -> Pending:
        """Begin an `all_gather`, `reduce_scatter` or `all_reduce` of `tensor`, which stays untouched until it is waited for."""


class Axes:
    """Several mesh axes as one group, for ops whose local form communicates."""

    def __init__(self, communicator: Communicator, axes: Sequence[int]) -> None:
        self.communicator, self.axes = communicator, tuple(axes)
        self.size = math.prod(communicator.mesh[axis] for axis in axes)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` over the group; it may be overwritten."""
        tensor = tensor.contiguous()
        for axis in self.axes:
            tensor = self.communicator.all_reduce(axis, tensor, op)
        return tensor

    def all_to_all(self, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send consecutive runs of `flat` to the ranks of the group's one axis; return what they sent."""
        (axis,) = self.axes
        return self.communicator.all_to_all(axis, flat, send, receive)

    def opposite(self, flat: Tensor, length: int) -> Tensor:
        """Exchange `flat` for the `length` numbers of the rank at the mirrored place of the group's one axis."""
        (axis,) = self.axes
        size = self.communicator.mesh[axis]
        there = [place == size - 1 - self.communicator.coords[axis] for place in range(size)]
        send, receive = ([number if own else 0 for own in there] for number in (flat.numel(), length))
        return self.communicator.all_to_all(axis, flat, send, receive)

    def begin(self, tensor: Tensor) -> Pending:
        """Begin to sum `tensor` over the group; it may be overwritten."""
        first, *others = self.axes
        return _Sum(self.communicator.issue("all_reduce", first, tensor.contiguous()), others, self.communicator)


class _Sum:
    """A sum over several axes, the first of which is in flight; `wait` may be called many times."""

    def __init__(self, pending: Pending, others: Sequence[int], communicator: Communicator) -> None:
        self.pending: Pending | None = pending
        self.others, self.communicator = others, communicator
        self.total: Tensor | None = None

    def wait(self) -> Tensor:
        if self.pending is not None:
            self.total, self.pending = self.pending.wait(), None
            for axis in self.others:
                self.total = self.communicator.all_reduce(axis, self.total)
        assert self.total is not None
        return self.total


class Route:
    """The steps from one layout to another, for tensors of one shape; made once, run every step.

    order: the dims as they lie in memory, by default as they are counted. The result has the same order, so that what is a view
    of the tensor in the model as it is, such as heads joined behind attention, is one of the result too, and copies nothing.
    """

    def __init__(
        self,
        steps: Sequence[ReshardStep],
        shape: Sequence[int],
        slots: Sequence[Slot],
        communicator: Communicator,
        order: Sequence[int] | None = None,
    ) -> None:
        self.steps, self.shape, self.slots, self.communicator = tuple(steps), tuple(shape), tuple(slots), communicator
        self._there: tuple[int, ...] = ()
        """The dims in memory's order, where that is another; steps, shape and slots are then those of the tensor so permuted."""
        self._back: tuple[int, ...] = ()
        if order is not None and tuple(order) != tuple(range(len(order))) and self.steps:
            self._permute(tuple(order))

    def _permute(self, order: tuple[int, ...]) -> None:
        places = slots_in_order(self.slots, order)
        self.steps = tuple(step.of_slots(places) for step in self.steps)
        self.slots = tuple(replace(self.slots[slot], dim=order.index(self.slots[slot].dim)) for slot in places)
        self.shape = tuple(self.shape[dim] for dim in order)
        self._there, self._back = order, tuple(order.index(dim) for dim in range(len(order)))

    @property
    def moves(self) -> bool:
        """Return True if any step communicates; slices do not."""
        return any(step.kind != "slice" for step in self.steps)

    def run(self, x: Tensor) -> Tensor:
        """Return the rank's part in the target layout; `x` itself is left as it is."""
        return self.run_from(0, self._in_order(x))

    def start(self, x: Tensor) -> Pending:
        """Issue the first collective; `wait` returns what `run` would. The steps before and after it are not overlapped."""
        number, x = 0, self._in_order(x)
        while number < len(self.steps) and self.steps[number].kind == "slice":
            x = self._run_step(self.steps[number], x)
            number += 1
        if number != issued_step(self.steps):
            return _Underway(x, None, _as_it_is, self, number)
        step = self.steps[number]
        sent, finish = self._prepare(step, x)
        return _Underway(None, self.communicator.issue(step.kind, step.axis, sent), finish, self, number + 1)

    def run_from(self, number: int, x: Tensor) -> Tensor:
        """Return what the route leads to from `x`, whose dims are in memory's order, by step `number` and those that follow."""
        for step in self.steps[number:]:
            x = self._run_step(step, x)
        return x.permute(self._back) if self._back else x

    def _in_order(self, x: Tensor) -> Tensor:
        x = x.resolve_conj()  # a conjugate is a mark on a view, which what sends its memory does not see
        return x.permute(self._there) if self._there else x

    def _run_step(self, step: ReshardStep, x: Tensor) -> Tensor:
        if step.kind == "all_to_all":
            return self._exchange(step, x)
        if step.kind == "slice":
            return self._slice(step, x)
        sent, finish = self._prepare(step, x)
        del x
        return finish(getattr(self.communicator, step.kind)(step.axis, sent))

    def _parts(self, step: ReshardStep, x: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
        """Return the operand as (before, along, after) the slot that changes, the slot's new size, and the result's shape."""
        mesh, coords = self.communicator.mesh, self.communicator.coords
        before = local_sizes(self.slots, step.before, mesh, coords)
        after = local_sizes(self.slots, step.after, mesh, coords)
        shape = local_shape(self.shape, self.slots, step.after, mesh, coords)
        lead, tail = math.prod(before[: step.slot]), math.prod(before[step.slot + 1 :])
        return x.reshape(lead, before[step.slot], tail), after[step.slot], shape

    def _prepare(self, step: ReshardStep, x: Tensor) -> tuple[Tensor, Finish]:
        """Return the collective's input, and the function that turns its output into the step's result."""
        if step.kind == "all_reduce":
            return x.clone(memory_format=torch.contiguous_format), _as_it_is
        if step.kind == "all_gather":
            return self.before_gather(x, step), lambda parts: self.after_gather(parts, step)
        x, size, shape = self._parts(step, x)
        return self._before_scatter(step, x), lambda own: own[:, :size].reshape(shape)

    def _slice(self, step: ReshardStep, x: Tensor) -> Tensor:
        x, _, shape = self._parts(step, x)
        start, stop = chunk(x.shape[1], self.communicator.mesh[step.axis], self.communicator.coords[step.axis])
        part = x.narrow(1, start, stop - start)
        # A copy, so that the whole can be freed; integers are never big enough to matter.
        part = part.clone(memory_format=torch.contiguous_format) if may_have_gradient(x.dtype) else part
        return part.reshape(shape)

    def before_gather(self, x: Tensor, step: ReshardStep | None = None) -> Tensor:
        """Return the input of a gather, padded to as many elements on every rank; `step` is by default the only one."""
        step = step or self.steps[0]
        x, size, _ = self._parts(step, x)
        each = -(-size // self.communicator.mesh[step.axis])
        if x.shape[1] < each:
            x = torch.nn.functional.pad(x, (0, 0, 0, each - x.shape[1]))
        return x.contiguous()

    def after_gather(self, parts: Tensor, step: ReshardStep | None = None) -> Tensor:
        """Return the whole tensor from the ranks' parts, which `before_gather` made; those of one rank are consecutive."""
        step = step or self.steps[0]
        size = local_sizes(self.slots, step.after, self.communicator.mesh, self.communicator.coords)[step.slot]
        shape = local_shape(self.shape, self.slots, step.after, self.communicator.mesh, self.communicator.coords)
        num, lead, each, tail = parts.shape
        if lead == 1:
            return parts.contiguous().view(num * each, tail)[:size].reshape(shape)
        # a result with gaps would be copied once more by an op that reads it, which would save the copy
        if size == num * each:
            return parts.transpose(0, 1).contiguous().view(shape)
        ranges = [chunk(size, num, rank) for rank in range(num)]
        return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, ranges)], dim=1).reshape(shape)

    def _before_scatter(self, step: ReshardStep, x: Tensor) -> Tensor:
        num = self.communicator.mesh[step.axis]
        lead, whole, tail = x.shape
        each = -(-whole // num)
        is_new = whole < num * each
        if is_new:
            x = torch.nn.functional.pad(x, (0, 0, 0, num * each - whole))
        pieces = x.view(lead, num, each, tail).transpose(0, 1)
        if lead > 1 or is_new:
            return pieces.contiguous()
        return pieces.clone(memory_format=torch.contiguous_format)  # it is reduced in place

    def _exchange(self, step: ReshardStep, x: Tensor) -> Tensor:
        """Cut the target slot, send the pieces, and join what arrives along the source slot."""
        mesh, coords = self.communicator.mesh, self.communicator.coords
        before = local_sizes(self.slots, step.before, mesh, coords)
        after = local_sizes(self.slots, step.after, mesh, coords)
        num, source, target = mesh[step.axis], step.source, step.slot
        cuts, joins = ([chunk(size, num, rank) for rank in range(num)] for size in (before[target], after[source]))
        # with the slot that is cut in front, each rank's piece is consecutive
        x = x.reshape(before).movedim(target, 0).contiguous()
        each = math.prod(x.shape[1:])
        send = [(high - low) * each for low, high in cuts]
        shapes = [_with(after, source, high - low) for low, high in joins]
        for shape in shapes:
            shape.insert(0, shape.pop(target))
        lengths = [math.prod(shape) for shape in shapes]
        flat = self.communicator.all_to_all(step.axis, x.view(-1), send, lengths)
        del x
        parts = [part.view(shape).movedim(0, target) for part, shape in zip(flat.split(lengths), shapes)]
        return torch.cat(parts, dim=source).reshape(local_shape(self.shape, self.slots, step.after, mesh, coords))


Finish = Callable[[Tensor], Tensor]


class _Underway:
    """A route that has begun: the tensor so far, or the collective in flight, and the number of the step that follows."""

    def __init__(self, x: Tensor | None, pending: Pending | None, finish: Finish, route: Route, number: int) -> None:
        self.x, self.pending, self.finish, self.route, self.number = x, pending, finish, route, number

    def wait(self) -> Tensor:
        x, self.x = self.x, None
        if self.pending is not None:
            pending, self.pending = self.pending, None
            x = self.finish(pending.wait())
        assert x is not None
        return self.route.run_from(self.number, x)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _with(sizes: Sequence[int], at: int, size: int) -> list[int]:
    return [size if index == at else own for index, own in enumerate(sizes)]


class _Reshard(torch.autograd.Function):
    """Runs one route forward, and the other on the gradient.

    A gradient that is differentiated again gets its own gradient by the forward route.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Route, backward: Route) -> Tensor:
        ctx.routes = backward, forward
        return forward.run(x) if forward.steps else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            return reshard(grads[0], *ctx.routes), None, None
        return ctx.routes[0].run(grads[0]), None, None


def reshard(x: Tensor, forward: Route, backward: Route) -> Tensor:
    """Return `x` in another layout; its gradient comes back by the route `backward`."""
    return _Reshard.apply(x, forward, backward)


class Nothing(torch.autograd.Function):
    """Returns empty results of given shapes and dtypes, in the operands' precision; the gradients of all operands are zero.

    followed: for each result, whether it requires a gradient on the ranks that compute it. If it does not there, it
    must not here either: its readers would issue collectives in the backward that no other rank issues.
    """

    @staticmethod
    def forward(
        ctx: Any, shapes: Sequence[tuple[Sequence[int], torch.dtype]], followed: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        model = next(tensor for tensor in tensors if may_have_gradient(tensor.dtype))
        precision = model.dtype.to_real()
        results = tuple(model.new_zeros(shape, dtype=in_precision(dtype, precision)) for shape, dtype in shapes)
        ctx.mark_non_differentiable(*(result for result, follow in zip(results, followed) if not follow))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # what is differentiated again goes through these zeros, as it does on other ranks
            shapes = [(shape, dtype) for shape, dtype, _ in ctx.like]
            return (
                None,
                None,
                *(zero if want else None for want, zero in zip(wanted, Nothing.apply(shapes, wanted, *grads))),
            )
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return None, None, *(zero if want else None for zero, want in zip(zeros, wanted))


class SimulatedCommunicator:
    """Collectives that only return tensors of the right shapes, and count the bytes that they would move."""

    def __init__(
        self, mesh: Sequence[int], coords: Sequence[int] | None = None, device: torch.device | None = None
    ) -> None:
        self.mesh, self.device = tuple(mesh), device
        self.coords = tuple(coords) if coords is not None else (0,) * len(self.mesh)
        self.num_bytes: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self.counts: Mapping[str, list[int]] = {}
        """The rows that ops count, by key; ops that are not listed count the planned ones."""

    def _count(self, kind: str, axis: int, tensor: Tensor) -> None:
        if self.mesh[axis] > 1:
            self.num_bytes[kind] += tensor.numel() * tensor.element_size()
            self.num_calls[kind] += 1

    def all_gather(self, axis: int, part: Tensor) -> Tensor:
        gathered = part.new_empty((self.mesh[axis], *part.shape))
        self._count("all_gather", axis, gathered)
        return gathered

    def reduce_scatter(self, axis: int, parts: Tensor) -> Tensor:
        self._count("reduce_scatter", axis, parts)
        return parts.new_empty(parts.shape[1:])

    def all_reduce(self, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        self._count("all_reduce", axis, tensor)
        return tensor

    def all_to_all(self, axis: int, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        self._count("all_to_all", axis, flat)
        return flat.new_empty(sum(receive))

    def count(self, key: str, numbers: Tensor, rows: Rows) -> list[int]:
        return self.counts.get(key, rows.planned)

    def limit(self) -> str:
        return Limit.NONE

    def issue(self, kind: str, axis: int, tensor: Tensor) -> Pending:
        return _Simulated(tensor, getattr(self, kind)(axis, tensor))


class _Simulated:
    """A simulated collective in flight: it holds its input until it is waited for, as a real one does."""

    def __init__(self, given: Tensor, result: Tensor) -> None:
        self.given: Tensor | None = given
        self.result = result

    def wait(self) -> Tensor:
        self.given = None
        return self.result
