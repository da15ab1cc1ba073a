"""Finds the loops of an op without a rule by running it on shards of small inputs and recombining the outputs.

Small random tensors replace those of the call. Equal dims stay equal, and other arguments keep the call's values. Each
choice of at most one dim of every input, all of one size, is a candidate. It is cut into 2 and into 3 uneven parts, and
is a loop if the whole outputs result in one of two ways:

    concatenated   the parts' outputs, concatenated along a dim, equal the whole output: the loop is independent
    summed         the parts' outputs add up to the whole output: the loop is reduced

The gradients have to recombine as well, for a random gradient of the outputs: those of cut inputs are concatenated,
those of whole inputs summed. A loop has to hold on every draw: of normal numbers, of large ones, and of such as labels and masks
have for inputs without gradient. An output has to be other than zero on one of them: a loss is zero for labels that it does not
know, whole or in parts. An op that draws random numbers, writes its inputs or
returns different results for the same inputs is not tried. An op that refuses the small inputs is tried on others, last
on inputs of the call's own sizes. Kernels that do not check the sizes of their inputs may write past them, so each trial runs in
a process of its own (`apart`), and one that ends that process has failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops import Call, Signature, TensorSpec
from ..ops.signature import SignatureBuilder
from ..torch_internals import private
from .apart import apart
from .nodewise import gradients
from .rule_cache import RuleCache

SUM = -1
"""Stands in place of an output's dim where the parts' outputs are added."""
_SIZES = (7, 11, 13, 8, 17, 19)
"""The sizes that replace those of a call: none is a multiple of another, and each is cut unevenly by two or three."""
_NUM_PARTS = (2, 3)
_NORMAL, _WIDE, _LABELS = range(3)
"""The draws: normal numbers; ten times those, which pass limits; normal ones beside −1, 0 and 1 for inputs without gradient."""
_MAX_TRIALS, _MAX_INPUTS = 256, 6
_MAX_ELEMENTS = 2**18
"""An op is not tried on tensors with more elements than this."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Cut:
    """One loop: the dim of each input that it cuts (None: the input stays whole) and of each output (`SUM`: a partial sum)."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]


def discovered(target: Any, call: Call, differentiated: Sequence[bool]) -> Signature | None:
    """Return the signature of a call of `target` with the loops found; `None` where none was found or the op cannot be
    tried.

    differentiated: for each tensor argument, whether its gradient is wanted. Found loops are stored in the user's cache
    folder. Stored loops are tried once before they are used, since the op may have been changed under the same name.
    """
    key = f"{target} {call} {differentiated}"
    if key not in _FOUND:
        _FOUND[key] = _tried(target, call, tuple(differentiated)) if _may_be_tried(target, call) else None
    return _FOUND[key]


_FOUND: dict[str, Signature | None] = {}
"""The signatures that this process has found, by call: repeated blocks call an op in the same way many times."""


def _may_be_tried(target: Any, call: Call) -> bool:
    simple = all(spec.dtype is not None and not spec.dtype.is_complex for spec in (*call.inputs, *call.outputs))
    return simple and 0 < len(call.inputs) <= _MAX_INPUTS and private.is_pure(target)


def _tried(target: Any, call: Call, differentiated: tuple[bool, ...]) -> Signature | None:
    cache = RuleCache(private.schema_text(target), f"{_pattern(call)} {differentiated}")
    trial = _first_that_runs(target, call, differentiated)
    if trial is None:
        return None
    known = cache.read()
    cuts = [Cut(tuple(one), tuple(other)) for one, other in known or ()]
    if known is None or not _alone(lambda: all(trial.holds(cut, (_NORMAL, _LABELS)) for cut in cuts)):
        cuts = _search(trial)
        cache.write([(cut.inputs, cut.outputs) for cut in cuts])
    return _signature(call, cuts) if cuts else None


def _alone(attempt: Callable[[], Any]) -> Any:
    """Return the result of an attempt on the same random numbers each time; None if it raised, or ended its process."""

    def seeded() -> Any:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            return attempt()

    return apart(seeded)


def _pattern(call: Call) -> str:
    """Return a text that equals that of another call if they differ in sizes alone: equal dims, dtypes and literals."""
    sizes = {1: 1}

    def show(item: Any) -> Any:
        if isinstance(item, TensorSpec):
            return [sizes.setdefault(size, len(sizes) + 1) for size in item.shape], str(item.dtype), item.requires_grad
        if isinstance(item, (list, tuple)):
            return [show(each) for each in item]
        return {key: show(value) for key, value in item.items()} if isinstance(item, dict) else repr(item)

    return repr((show(call.args), show(call.kwargs), show(call.outputs)))


def _first_that_runs(target: Any, call: Call, differentiated: tuple[bool, ...]) -> _Trial | None:
    """Return the trial with the smallest inputs that the op accepts, or None if it accepts none."""
    distinct = list(dict.fromkeys(size for spec in call.inputs for size in spec.shape if size != 1))
    small = dict(zip(distinct, itertools.chain(_SIZES, itertools.count(23, 2))))
    multiples = {size: size if size <= 16 else 8 + size % 8 for size in distinct}
    own = {size: size for size in distinct}
    for sizes, dtype in itertools.product((small, multiples, own), (torch.float64, torch.float32)):
        trial = _Trial(target, call, differentiated, {1: 1, **sizes}, dtype)
        if _alone(trial.runs):
            return trial
    return None


class _Trial:
    """Runs an op on inputs of chosen sizes, whole and in parts."""

    def __init__(self, target: Any, call: Call, differentiated: tuple[bool, ...], sizes: dict[int, int],
                 dtype: torch.dtype) -> None:  # fmt: skip
        self.target, self.call, self.differentiated, self.dtype = target, call, differentiated, dtype
        self.shapes = [tuple(sizes[size] for size in spec.shape) for spec in call.inputs]

    def runs(self) -> bool:
        """Return True if the op can be tried on these inputs.

        It has to return the same results twice, of the call's numbers of dims, and to change neither its inputs nor the
        state of the random generator.
        """
        if any(math.prod(shape) > _MAX_ELEMENTS for shape in self.shapes):
            return False
        inputs = self._draw(_NORMAL)
        before, state = [value.detach().clone() for value in inputs], torch.get_rng_state()
        try:
            first, second = self._forward(inputs), self._forward(inputs)
        except Exception:  # whatever a foreign kernel raises says no more than that it does not take these inputs
            return False
        untouched = all(torch.equal(a, b) for a, b in zip(before, inputs)) and torch.equal(state, torch.get_rng_state())
        ranks = [out.dim() for out in first] == [len(spec.shape) for spec in self.call.outputs]
        return untouched and ranks and all(self._same(a, b) for a, b in zip(first, second))

    def holds(self, cut: Cut, draws: Sequence[int] = (_NORMAL, _WIDE, _LABELS)) -> bool:
        """Return True if outputs and gradients recombine as `cut` says, on these draws of the inputs, and are not all zero.

        Where an output is a partial sum, an empty part is tried too.
        """
        size = self._size(cut.inputs)
        try:
            for draw, num in itertools.product(draws, _NUM_PARTS):
                if not self._recombines(cut, draw, _uneven(size, num)):
                    return False
            if not any(bool(out.any()) for draw in draws for out in self._forward(self._draw(draw))):
                return False
            return SUM not in cut.outputs or self._recombines(cut, _NORMAL, [size, 0])
        except Exception:  # a part that the op does not take
            return False

    def candidates(self) -> Iterator[tuple[int | None, ...]]:
        """Yield every choice of at most one dim of each input, all of one size; those that cut most inputs come first."""
        found = []
        for dims in itertools.product(*([None, *range(len(shape))] for shape in self.shapes)):
            sizes = {shape[dim] for shape, dim in zip(self.shapes, dims) if dim is not None}
            if len(sizes) == 1 and sizes != {1}:
                found.append(dims)
        yield from sorted(found, key=lambda dims: -sum(dim is not None for dim in dims))[:_MAX_TRIALS]

    def loop_along(self, dims: tuple[int | None, ...]) -> tuple[int, ...] | None:
        """Return how the outputs recombine if cutting `dims` is a loop; None if it is not."""
        outputs = self.outputs_of(dims)
        return outputs if outputs is not None and self.holds(Cut(dims, outputs)) else None

    def outputs_of(self, dims: tuple[int | None, ...]) -> tuple[int, ...] | None:
        """Return how the outputs of two parts recombine, for each output a dim or `SUM`; `None` where one does not."""
        size = self._size(dims)
        try:
            inputs = self._draw(_NORMAL)
            whole = self._forward(inputs)
            parts = [self._forward(part) for part in self._parts(inputs, dims, _uneven(size, 2))]
        except Exception:
            return None
        found = [self._recombination(out, [part[place] for part in parts], size) for place, out in enumerate(whole)]
        return None if None in found else tuple(found)  # type: ignore[arg-type]

    def _recombination(self, whole: Tensor, parts: Sequence[Tensor], size: int) -> int | None:
        for dim in range(whole.dim()):
            fits = all(part.dim() == whole.dim() for part in parts) and whole.shape[dim] == size
            others = [[n for k, n in enumerate(part.shape) if k != dim] for part in (whole, *parts)]
            if fits and others.count(others[0]) == len(others) and self._same(torch.cat(list(parts), dim), whole):
                return dim
        same_shape = all(part.shape == whole.shape for part in parts)
        if same_shape and whole.is_floating_point() and self._same(sum(parts[1:], parts[0]), whole):
            return SUM
        return None

    def _recombines(self, cut: Cut, draw: int, lengths: Sequence[int]) -> bool:
        inputs = self._draw(draw)
        whole = self._forward(inputs)
        parts = self._parts(inputs, cut.inputs, lengths)
        made = [self._forward(part) for part in parts]
        for place, (out, dim) in enumerate(zip(whole, cut.outputs)):
            pieces = [each[place] for each in made]
            joined = sum(pieces[1:], pieces[0]) if dim == SUM else torch.cat(pieces, dim)
            if joined.shape != out.shape or not self._same(joined, out):
                return False
        return self._gradients_recombine(cut, inputs, whole, parts, made, lengths)

    def _gradients_recombine(self, cut: Cut, inputs: Sequence[Tensor], whole: Sequence[Tensor], parts: Sequence[Any],
                             made: Sequence[Any], lengths: Sequence[int]) -> bool:  # fmt: skip
        asked = [place for place, value in enumerate(inputs) if value.requires_grad]
        places = [place for place, out in enumerate(whole) if out.requires_grad]
        if not asked or not places:
            return True
        given = [torch.randn(whole[place].shape, dtype=whole[place].dtype) for place in places]
        found = _gradients([whole[place] for place in places], [inputs[place] for place in asked], given)
        start, of_parts = 0, []
        for part, outs, length in zip(parts, made, lengths):
            own = [
                gradient if cut.outputs[place] == SUM else gradient.narrow(cut.outputs[place], start, length)
                for place, gradient in zip(places, given)
            ]
            of_parts.append(_gradients([outs[place] for place in places], [part[place] for place in asked], own))
            start += length
        for index, place in enumerate(asked):
            pieces, dim = [each[index] for each in of_parts], cut.inputs[place]
            joined = sum(pieces[1:], pieces[0]) if dim is None else torch.cat(pieces, dim)
            if not self._same(joined, found[index]):
                return False
        return True

    def _draw(self, draw: int) -> list[Tensor]:
        generator, scale = torch.Generator().manual_seed(draw), 10.0 if draw == _WIDE else 1.0
        values = []
        for spec, shape, wanted in zip(self.call.inputs, self.shapes, self.differentiated):
            if spec.dtype.is_floating_point and draw == _LABELS and not wanted:
                values.append(torch.randint(-1, 2, shape, generator=generator).to(self.dtype))
            elif spec.dtype.is_floating_point:
                normal = torch.randn(shape, generator=generator, dtype=self.dtype)
                values.append((scale * normal).requires_grad_(wanted))
            else:
                values.append(torch.randint(0, 2, shape, generator=generator).to(spec.dtype))
        return values

    def _parts(
        self, inputs: Sequence[Tensor], dims: Sequence[int | None], lengths: Sequence[int]
    ) -> list[list[Tensor]]:
        """Return the inputs of every part, as leaves of autograd's graph."""
        found, start = [], 0
        for length in lengths:
            part = []
            for value, dim in zip(inputs, dims):
                own = value.detach() if dim is None else value.detach().narrow(dim, start, length).clone()
                part.append(own.clone().requires_grad_(value.requires_grad))
            found.append(part)
            start += length
        return found

    def _forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        queue = iter(inputs)

        def fill(item: Any) -> Any:
            if isinstance(item, TensorSpec):
                return next(queue)
            if isinstance(item, (list, tuple)):
                return [fill(each) for each in item]
            return item

        args = [fill(item) for item in self.call.args]
        out = self.target(*args, **{key: fill(item) for key, item in self.call.kwargs.items()})
        return list(out) if isinstance(out, (list, tuple)) else [out]

    def _size(self, dims: Sequence[int | None]) -> int:
        return next(shape[dim] for shape, dim in zip(self.shapes, dims) if dim is not None)

    def _same(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        tolerance = _TOLERANCE[self.dtype]
        scale = float(other.detach().abs().max()) if other.numel() else 1.0
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(scale, 1e-6))


def _gradients(outs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    found = gradients(outs, inputs, given)
    return [torch.zeros_like(value) if gradient is None else gradient for value, gradient in zip(inputs, found)]


def _uneven(size: int, num: int) -> list[int]:
    """Return the lengths of `num` parts as the runtime cuts them: equal, rounded up, the last ones shorter or empty."""
    each = -(-size // num)
    return [max(0, min(each, size - start)) for start in range(0, each * num, each)]


def _search(trial: _Trial) -> list[Cut]:
    """Return loops that hold, of which no two cut the same dim.

    Loops without partial sums are preferred, then those that cut most inputs.
    """
    found: list[Cut] = []
    for dims in trial.candidates():
        outputs = _alone(partial(trial.loop_along, dims))
        if outputs is not None:
            found.append(Cut(dims, tuple(outputs)))
    chosen: list[Cut] = []
    for cut in sorted(found, key=lambda cut: (SUM in cut.outputs, -sum(dim is not None for dim in cut.inputs))):
        if not any(_overlap(cut.inputs, other.inputs) or _overlap(cut.outputs, other.outputs) for other in chosen):
            chosen.append(cut)
    return chosen


def _overlap(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    return any(a == b and a is not None and a != SUM for a, b in zip(one, other))


def _signature(call: Call, cuts: Sequence[Cut]) -> Signature | None:
    """Return the signature of the call with these loops; dims that no loop cuts stay whole. None if a loop's sizes differ."""
    builder = SignatureBuilder()
    specs = [*call.inputs, *call.outputs]
    places = list(zip(*((*cut.inputs, *cut.outputs) for cut in cuts)))
    written = []
    for index, (spec, of_cuts) in enumerate(zip(specs, places)):
        dims = []
        for dim, size in enumerate(spec.shape):
            name = next((f"l{k}" for k, place in enumerate(of_cuts) if place == dim), None)
            if name is not None and builder.sizes.get(name, size) != size:
                return None
            dims.append(builder.loop(name or f"t{index}_{dim}", size, whole=name is None))
        written.append(tuple(dims))
    reduced = [f"l{k}" for k, cut in enumerate(cuts) if SUM in cut.outputs]
    num = len(call.inputs)
    return replace(builder.build(written[:num], written[num:], reduced), discovered=True)
