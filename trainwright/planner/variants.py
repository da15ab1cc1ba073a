"""The programs of one batch in other forms, each captured when it is first asked for: in micro-batches, with its loss in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..artifacts import UserError
from ..capture.passes.chunked_loss import MOST_CHUNKS
from ..program.program import Program
from .task import Task


@dataclass(eq=False)
class Variants:
    """The programs of one batch, by the number of micro-batches that make a step of it."""

    numbers: Sequence[int]
    program_of: Callable[[int], Program]
    refused: dict[int, str] = field(default_factory=dict)
    """Why a number cannot be."""
    _tasks: dict[tuple[int, Task], Task] = field(default_factory=dict)
    """By number and the task that asked: others may have another budget, offload elsewhere, sample gradients or cut stages."""
    _programs: dict[int, Program] = field(default_factory=dict)

    def tasks(self, task: Task) -> Iterator[tuple[int, Task]]:
        """Yield the task of each number that can be, beginning with `task` itself."""
        for num in self.numbers:
            if (found := self.task_of(task, num)) is not None:
                yield num, found

    def task_of(self, task: Task, num: int) -> Task | None:
        """Return the task of one number, `task` itself where that is its own; None where that cannot be."""
        if num == task.program.num_runs:
            return task
        return None if num in self.refused else self._task(task, num)

    def _task(self, task: Task, num: int) -> Task | None:
        if (num, task) not in self._tasks:
            try:
                program = self._programs.get(num) or self.program_of(num)
            except UserError as error:
                self.refused[num] = str(error)
                return None
            self._programs[num] = program
            found = replace(task, program=program)
            for (other, _), known in self._tasks.items():
                if other == num:
                    found.records = known.records  # what ops save and cost hangs on the program alone
                    break
            self._tasks[num, task] = found
        return self._tasks[num, task]


@dataclass(eq=False)
class ChunkedLoss:
    """The same step with its loss in chunks, captured when it is first asked for."""

    program_of: Callable[[int | None], tuple[Program, Variants | None]]
    """Captures the step with its loss in so many chunks; None: as many as suit its head (`chunk_losses`)."""
    is_free: bool
    """True if the loss may be taken in chunks even where whole logits fit."""
    num_chunks: int | None = None
    _made: tuple[Program, Variants | None] | None = None

    def task(self, task: Task) -> Task | None:
        """Return `task` with its loss in chunks; None where the step has no loss that can be taken so.

        Where that does not fit either, it may be asked of the task that is returned, with more chunks of each micro-batch.
        """
        try:
            self._made = self._made or self.program_of(self.num_chunks)
        except UserError:
            return None
        program, variants = self._made
        return replace(task, program=program, variants=variants, chunked=self._finer(program, variants))

    def _finer(self, program: Program, variants: Variants | None) -> ChunkedLoss | None:
        """Return the same with as many chunks of a micro-batch as suit the whole batch; None where there is nothing finer."""
        if self.num_chunks is not None or (variants is None and program.num_runs == 1):
            return None
        return ChunkedLoss(self.program_of, False, min(MOST_CHUNKS, program.num_runs * program.captured.loss_chunks))
