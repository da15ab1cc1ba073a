"""Follows when parameters that rest on disks have to be in memory during a rank's step, by the instructions that the run follows.

    forward    from the first instruction that reads it to the last that reads it or a view of it
    backward   from the backward of the last region that needs it, or of the one before that gathers for it,
               to where its gradient comes: where its bucket opened, else the beginning of the first region that reads it

A parameter whose gathered copy is kept is not needed in the backward until its update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...program.program import Tensor
from ...rank.execute import Executor
from ...rank.instructions import Borrow, Close, Compute, Instruction, Open, Ref, Reshard
from ...rank.params_read import params_read


@dataclass(frozen=True)
class _Span:
    """The instructions between which a parameter is in memory, both included; a backward goes from the last to the first."""

    first: int
    last: int
    num_bytes: int


def standing_forward(executor: Executor, sizes: Mapping[Tensor, int]) -> int:
    """Return the most bytes of these parameters that a forward has to have in memory at once."""
    return _most(_Spans(executor, sizes).forward())


def standing_backward(executor: Executor, sizes: Mapping[Tensor, int]) -> int:
    """Return the most bytes of these parameters that a backward has to have in memory at once, before their updates begin."""
    return _most(_Spans(executor, sizes).backward())


def _most(spans: Iterable[_Span]) -> int:
    changes: Counter[tuple[int, int]] = Counter()
    for span in spans:
        changes[span.first, 0] += span.num_bytes
        changes[span.last, 1] -= span.num_bytes  # what the instruction reads is there until it is done
    most = now = 0
    for _, change in sorted(changes.items()):
        now += change
        most = max(most, now)
    return most


class _Spans:
    def __init__(self, executor: Executor, sizes: Mapping[Tensor, int]) -> None:
        local = executor.local
        self.executor, self.sizes, self.instructions = executor, sizes, local.instructions
        self.source = {local.sources[tensor]: tensor for tensor in sizes if tensor in local.sources}
        self.held = {found.value for found in local.outputs if isinstance(found, Ref)}
        self.touching: dict[Tensor, list[Instruction]] = {tensor: [] for tensor in self.source.values()}
        """By parameter, the instructions that take it, its token or a view of it."""
        self.outlives: set[Tensor] = set()
        """The parameters of which a view is a result of the step."""
        self._follow_views()
        self.reading: dict[Tensor, int] = {}
        """By parameter, the first instruction that reads its contents."""
        for index, read in enumerate(params_read(local)):
            for value in read:
                if value in self.source:
                    self.reading.setdefault(self.source[value], index)
        self.regions: dict[int, tuple[int, int]] = {}
        """By region, its first and last instruction."""
        for instruction in self.instructions:
            first, _ = self.regions.get(instruction.region, (instruction.index, 0))
            self.regions[instruction.region] = first, instruction.index
        self.gathered_in = {before: region for region, before in executor.before.items()}
        """By region, the one in whose backward its parameters are gathered again, ahead."""

    def _follow_views(self) -> None:
        views = dict(self.source)
        for instruction in self.instructions:
            for value in instruction.inputs:
                if (tensor := views.get(value)) is not None:
                    self.touching[tensor].append(instruction)
            for value, made in _handed_on(instruction):
                if value in views:
                    views[made] = views[value]
        self.outlives = {tensor for value, tensor in views.items() if value in self.held}

    def forward(self) -> Iterator[_Span]:
        for tensor, touching in self.touching.items():
            if tensor in self.reading:
                last = len(self.instructions) if tensor in self.outlives else touching[-1].index
                yield _Span(self.reading[tensor], last, self.sizes[tensor])

    def backward(self) -> Iterator[_Span]:
        for tensor, touching in self.touching.items():
            needed = [each for each in touching if self._is_needed(each)]
            if needed:
                yield _Span(self._first(touching[0]), max(map(self._last, needed)), self.sizes[tensor])

    def _is_needed(self, instruction: Instruction) -> bool:
        """Tell whether the backward may need the contents: an op may have saved them, a gather may run again."""
        match instruction:
            case Open():
                return False
            case Close():
                return not instruction.member.there.moves or self._runs_again(instruction)
            case Reshard(there=there) | Borrow(there=there):
                return not there.moves or self._runs_again(instruction)
        return True

    def _runs_again(self, instruction: Instruction) -> bool:
        rerun = self.executor.reruns.get(instruction.region)
        return rerun is not None and instruction.index in rerun.instructions

    def _first(self, instruction: Instruction) -> int:
        """Return where the gradient comes of a parameter that `instruction` takes first."""
        is_inside = instruction.region >= 0 and not isinstance(instruction, Open)
        return self.regions[instruction.region][0] if is_inside else instruction.index

    def _last(self, instruction: Instruction) -> int:
        if instruction.region < 0:
            return instruction.index
        region = self.gathered_in.get(instruction.region, instruction.region)
        return self.regions[region][1]


def _handed_on(instruction: Instruction) -> Iterator[tuple[int, int]]:
    """Yield pairs of a value and one made of it that may be a view of the same memory."""
    match instruction:
        case Open(params=params, tokens=tokens):
            yield from zip(params, tokens, strict=True)
        case Close(token=token, result=result) if not instruction.member.there.moves:
            yield token, result
        case Reshard(source=source, result=result, there=there) if not there.moves:
            yield source, result
        case Compute(op=op, inputs=inputs, outputs=outputs) if op.kind == "view":
            yield from ((value, made) for value in inputs for made in outputs)
