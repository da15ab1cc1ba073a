"""Base of the coded methods: a master asks workers for sums of gradients, and proceeds once the answers can be decoded."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .method import Method
from .replica import Worker
from .requests import Absent, Gone, Letter, Now, Receive, Send, Steps

MASTER = 0
_DOWN, _UP, _END = 1, 2, 3
_LAST = -1


class Coded(Method):
    """Runs the rounds of a master, rank 0, which computes nothing, and its workers, ranks 1 … n, numbered 0 … n − 1.

    A subclass defines the master's message to a worker (`down`), what the worker does with it (`told`, `answer`), when answers
    are `enough`, and how the master uses them (`use`). A round lasts (1 + patience) times as long as its fastest worker took,
    longer while the answers are not enough; with infinite patience it waits for all workers present. Late answers are ignored,
    since each carries the number of its round. Where workers come and go, a worker that is gone counts as one that does not
    answer; if the others' answers are not enough, the run ends with its name.
    """

    keeps_places = True
    name: ClassVar[str] = "a coded method"

    def __init__(self, worker: Worker, patience: float) -> None:
        super().__init__(worker)
        if worker.size < 2:
            raise UserError(f"{self.name} needs a master and a worker at least; got 1 rank; start more")
        check_range(self.name, patience=(patience, "of at least 0", lambda value: value >= 0))
        self.patience = float(patience)
        self.state["newest"] = 0
        self.gone: dict[int, str] = {}
        """By rank: the names of the workers that are gone and whose places nobody has taken."""
        self._late: Counter[int] = Counter()
        self._has_ended = False
        self._first: Letter | None = None
        self._owes = False
        """Whether this worker has not answered the newest round yet."""
        self._closure: Any = None

    @property
    def down_length(self) -> int:
        """Return the number of elements of the master's message to a worker."""
        raise NotImplementedError

    @property
    def up_length(self) -> int:
        """Return the number of elements of an answer."""
        raise NotImplementedError

    def begin(self) -> None:
        """Decide the work of this round; called on the master."""

    def down(self, worker: int) -> Tensor:
        """Return the master's message to a worker in this round."""
        raise NotImplementedError

    def told(self, turn: int, message: Tensor) -> None:
        """Store the master's message of a round; called on a worker."""
        raise NotImplementedError

    def answer(self, closure: Any) -> Steps[Tensor]:
        """Return the answer to the newest round; called on a worker."""
        raise NotImplementedError

    def enough(self, answers: dict[int, Tensor]) -> bool:
        """Tell whether the round may end with these answers."""
        raise NotImplementedError

    def once_more(self, answers: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return further messages to workers, for the case that all present have answered and it is not enough; default: none."""
        return {}

    def repeated(self, worker: int, answer: Tensor) -> None:
        """Store a worker's answer to a further message; called on the master."""

    def use(self, answers: dict[int, Tensor]) -> None:
        """Update the model with the answers of a round; called on the master."""
        raise NotImplementedError

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        if self.worker.rank == MASTER:
            yield from self._lead()
        elif not self._has_ended:
            yield from self._follow(loss)

    def finish(self) -> Steps[None]:
        """Receive late answers, and send the master's parameters to all ranks."""
        if self.worker.rank == MASTER:
            yield from self._end_all()
            return
        while not self._has_ended:
            if self._owes:
                yield from self._reply(self._closure)
            yield from self._next(None)

    def take_up(self) -> Steps[None]:
        """Set a joining worker's step to that of the first message that it receives."""
        self._first = yield from self._received(None)
        assert self._first is not None
        self.num_steps = max(0, int(self._first.tensor[0]) - 1)

    def _lead(self) -> Steps[None]:
        began = yield Now()
        there = yield from self._ask()
        answers = yield from self._collected(there, began)
        while not self.enough(answers):
            again = {worker: message for worker, message in self.once_more(answers).items() if worker + 1 in there}
            if not again:
                self._give_up(len(answers))
            for worker, message in again.items():
                yield from self._tell(worker + 1, message)
            asked = {worker + 1 for worker in again}
            for worker, answer in (yield from self._collected(asked, None)).items():
                self.repeated(worker, answer)
            there -= {*self.gone}
        self.state["newest"] = self.num_steps
        self.use(dict(sorted(answers.items())))

    def _collected(self, there: set[int], began: float | None) -> Steps[dict[int, Tensor]]:
        """Return the answers of the workers in `there`, from which those that leave are removed.

        began: the time at which they were asked, if the round may end without the slowest; None: wait for all.
        """
        answers: dict[int, Tensor] = {}
        until = None
        while there - {worker + 1 for worker in answers}:
            left_s = None
            if until is not None and math.isfinite(until) and self.enough(answers):
                left_s = until - (yield Now())
                if left_s <= 0:
                    break
            letter = yield Receive(torch.zeros(1 + self.up_length, dtype=torch.float64), None, _UP, within_s=left_s)
            if isinstance(letter, Gone):
                there.discard(letter.source)
                self._lose(letter)
            elif letter is not None and self._is_answer(letter) and letter.source in there:
                answers[letter.source - 1] = letter.tensor[1:]
                if began is not None:
                    until = until or self._until(began, (yield Now()))
        return answers

    def _until(self, began_s: float, first_s: float) -> float:
        """Return the time at which a round ends whose fastest worker answered at `first_s`; infinite with infinite patience."""
        return math.inf if math.isinf(self.patience) else began_s + (1 + self.patience) * (first_s - began_s)

    def _ask(self) -> Steps[set[int]]:
        """Send this round's messages to all workers present, and return their ranks."""
        there = yield from self._there()
        self.begin()
        for rank in sorted(there):
            yield from self._tell(rank, self.down(rank - 1))
        return there

    def _tell(self, rank: int, message: Tensor) -> Steps[None]:
        yield Send(_headed(self.num_steps, message), rank, _DOWN)
        self._late[rank] += 1

    def _there(self) -> Steps[set[int]]:
        self.gone = yield Absent()
        for rank in self.gone:
            self._late[rank] = 0
        return set(range(1, self.worker.size)) - {*self.gone}

    def _is_answer(self, letter: Letter) -> bool:
        """Count a letter as an answer of its sender, unless that one is gone, and return whether it answers this round."""
        if letter.source in self.gone:
            return False
        self._late[letter.source] -= 1
        return int(letter.tensor[0]) == self.num_steps

    def _lose(self, gone: Gone) -> None:
        self.gone[gone.source] = gone.name
        self._late[gone.source] = 0

    def _give_up(self, number: int) -> None:
        names = " and ".join(self.gone[rank] for rank in sorted(self.gone)) or "nobody"
        raise UserError(
            f"{self.name} needs more of its workers than are left: {number} of {self.worker.size - 1} answered in step "
            f"{self.num_steps}, {names} gone; start them again from a checkpoint, or take a code that bears more stragglers"
        )

    def _end_all(self) -> Steps[None]:
        yield from self._there()
        while any(self._late.values()):
            letter = yield Receive(torch.zeros(1 + self.up_length, dtype=torch.float64), None, _UP)
            if isinstance(letter, Gone):
                self._lose(letter)
            elif letter is not None:
                self._is_answer(letter)
        for rank in sorted((yield from self._there())):
            yield Send(_headed(_LAST, torch.zeros(self.down_length)), rank, _DOWN)
            yield Send(self.replica.read().double(), rank, _END)

    def _follow(self, closure: Any) -> Steps[None]:
        """Answer the newest round in the step of its number, for which the closure has the data; answer past rounds with zeros.

        A late worker skips the steps between its own and the newest round; one that gets a further message is already in the next
        step, and answers before it begins that.
        """
        self._closure = closure
        while not self._has_ended:
            is_early = self._newest < self.num_steps and not self._owes
            if (yield from self._next(None if is_early else 0.0)):
                continue
            if self._owes and self._newest <= self.num_steps:
                yield from self._reply(closure)
            if self._newest >= self.num_steps:
                return

    def _reply(self, closure: Any) -> Steps[None]:
        answer = yield from self.answer(closure)
        self._owes = False
        yield Send(_headed(self._newest, answer), MASTER, _UP)

    @property
    def _newest(self) -> int:
        return int(self.state["newest"])

    def _pass(self) -> Steps[None]:
        """Answer the master's last message with zeros."""
        self._owes = False
        yield Send(torch.zeros(1 + self.up_length, dtype=torch.float64), MASTER, _UP)

    def _next(self, within_s: float | None) -> Steps[bool]:
        """Receive the next message of the master, and return whether one came; the last one brings its parameters.

        If the previous one is not answered yet, its round is over, and it is answered with zeros.
        """
        letter = yield from self._received(within_s)
        if letter is None:
            return False
        if self._owes:
            yield from self._pass()
        turn = int(letter.tensor[0])
        if turn == _LAST:
            self._has_ended = True
            last = yield Receive(self.replica.read().double(), MASTER, _END)
            self.replica.write(self._of_master(last).tensor)
        else:
            self.state["newest"], self._owes = turn, True
            self.told(turn, letter.tensor[1:])
        return True

    def _received(self, within_s: float | None) -> Steps[Letter | None]:
        first, self._first = self._first, None
        if first is not None:
            return first
        like = torch.zeros(1 + self.down_length, dtype=torch.float64)
        letter = yield Receive(like, MASTER, _DOWN, within_s=within_s)
        return None if letter is None else self._of_master(letter)

    def _of_master(self, letter: Letter | Gone) -> Letter:
        if isinstance(letter, Gone):
            raise UserError(
                f"{self.name} needs its master; {letter.name} gone; start all of them again from a checkpoint"
            )
        return letter


def _headed(turn: int, body: Tensor) -> Tensor:
    """Return a message in float64: the number of its round, and the vector."""
    return torch.cat([torch.tensor([turn], dtype=torch.float64), body.detach().double().cpu()])
