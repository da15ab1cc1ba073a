"""Gradient coding on a master and its workers: the slowest s of a round are not waited for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .codes import GradientCode
from .method import Method
from .record import Message, Size, SyncRecord, each_step
from .replica import Worker
from .requests import Broadcast, Compute, Now, Receive, Send, Steps

_MASTER, _DOWN, _UP = 0, 1, 2


class GradientCoding(Method):
    r"""Compute each chunk of the data on s + 1 workers, and decode the sum of all from the answers of any n − s.

        worker i:  Σ_j B_ij g_j over its s + 1 chunks
        master:    g = Σ_{i answered} a_i (…),  aᵀ B_S = 1ᵀ,  and the optimizer's step

    `sync.step(closure)` calls closure(chunk), which returns the summed loss of a chunk.

    Rank 0 is the master and computes nothing; ranks 1 … n are the workers, so that `method.num_chunks` is n. The
    gradient is that of the sum of all chunks' losses, divided by `scale`: give each closure sums with a fixed
    normalisation, no means of unequal chunks, and no dropout or batch norm, which would differ between the copies of a
    chunk.

    stragglers: s. patience: μ; a round waits (1 + μ) times as long as its fastest worker took, and longer only while the
    answers do not give the whole. A worker that is late does not hold up the next round: it goes on with the newest
    parameters. cyclic: the cyclic code even where fractional repetition fits. After the last step, `sync.finish()` gives
    all ranks the parameters of the master.

    Data is held s + 1 times and computed s + 1 times: worth it where waiting costs more. Sequential codes need far less work
    (`trainwright.sync.sequential_codes` plans them; a method that runs them is not there yet).

    Source: Tandon, Lei, Dimakis & Karampatziakis 2017, Gradient Coding: Avoiding Stragglers in Distributed Learning (ICML).
    """

    needs_whole = (
        "the master decodes what workers answer in time, and the ranks of a replica would decode from different workers"
    )

    def __init__(
        self, worker: Worker, *, stragglers: int = 1, patience: float = 1.0, scale: float = 1.0, cyclic: bool = False
    ) -> None:
        super().__init__(worker)
        if worker.size < 2:
            raise UserError("gradient-coding needs a master and a worker at least; got 1 rank; start more")
        check_range(
            "gradient-coding",
            patience=(patience, "of at least 0", lambda value: value >= 0),
            scale=(scale, "above 0", lambda value: value > 0),
        )
        self.code = GradientCode(worker.size - 1, stragglers, cyclic)
        self.patience, self.scale = patience, scale
        self.state["newest"] = 0
        self.num_late = 0
        """Answers that a master went on without, and that are on their way still."""

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the data is cut: one a worker."""
        return self.code.num_workers

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        if self.worker.rank == _MASTER:
            yield from self._lead()
        elif int(self.state["newest"]) < self.num_steps:
            yield from self._follow(loss)

    def finish(self) -> Steps[None]:
        """Take in what comes late, and give all ranks the master's parameters."""
        if self.worker.rank == _MASTER:
            while self.num_late:
                yield Receive(self._message(), None, _UP)
                self.num_late -= 1
        theirs: Tensor = yield Broadcast(self.replica.read(), _MASTER)
        self.replica.write(theirs)

    def _lead(self) -> Steps[None]:
        began = yield Now()
        down = self._message(self.replica.read())
        for rank in range(1, self.worker.size):
            yield Send(down, rank, _DOWN)
        self.num_late += self.num_chunks
        sums: dict[int, Tensor] = {}
        until = None
        while True:
            enough = self.code.decodes(sums)
            now = yield Now()
            if len(sums) == self.num_chunks or (enough and until is not None and now >= until):
                break
            letter = yield Receive(
                down, None, _UP, within_s=max(0.0, until - now) if enough and until is not None else None
            )
            if letter is None:
                continue
            self.num_late -= 1
            if int(letter.tensor[0]) == self.num_steps:
                sums[letter.source - 1] = letter.tensor[1:]
                until = until or began + (1 + self.patience) * ((yield Now()) - began)
        self.state["newest"] = self.num_steps
        self.replica.write_gradient(decoded(self.code, sums) / self.scale)
        self.replica.update()

    def _follow(self, closure: Any) -> Steps[None]:
        """Take the newest parameters, add up the own chunks' gradients, send the sum; what is over gets an empty answer."""
        letter = yield Receive(self._message(), _MASTER, _DOWN)
        while (newer := (yield Receive(self._message(), _MASTER, _DOWN, within_s=0.0))) is not None:
            yield Send(torch.zeros_like(letter.tensor), _MASTER, _UP)
            letter = newer
        self.state["newest"] = int(letter.tensor[0])
        self.replica.write(letter.tensor[1:])
        total = torch.zeros_like(letter.tensor[1:])
        rank = self.worker.rank - 1
        for chunk in self.code.chunks(rank):
            self.replica.gradients_by(functools.partial(closure, chunk))
            total += float(self.code.matrix[rank, chunk]) * self.replica.read_gradient()
        yield Compute(amount=self.code.load)
        yield Send(self._message(total), _MASTER, _UP)

    def _message(self, vector: Tensor | None = None) -> Tensor:
        """A vector in float64, behind the number of its round."""
        own = self.replica.read() if vector is None else vector
        number = self.num_steps if self.worker.rank == _MASTER else int(self.state["newest"])
        return torch.cat([torch.tensor([number], dtype=torch.float64), own.double()])


def decoded(code: GradientCode, sums: dict[int, Tensor]) -> Tensor:
    """Return the sum of all chunks' gradients, in the order of workers, in float64."""
    weights = code.decoding(sums)
    total = torch.zeros_like(next(iter(sums.values())))
    for worker in sorted(sums):
        if weights[worker]:
            total += float(weights[worker]) * sums[worker]
    return total


def _one_way(size: Size) -> int:
    return (size.num_workers - 1) * 8 * (size.num_params + 1)


RECORD = SyncRecord(
    "gradient-coding",
    GradientCoding,
    "a master decodes sums of chunks",
    (
        Message(
            "parameters",
            "edge",
            _one_way,
            each_step,
            "P from the master",
            seconds=lambda size, network, _: network.message_s(_one_way(size)),
        ),
        Message(
            "sums",
            "edge",
            _one_way,
            each_step,
            "P",
            seconds=lambda size, network, _: network.message_s(_one_way(size) / (size.num_workers - 1)),
        ),
    ),
    promises="the maths of one worker with all data",
    assumes="data on s + 1 workers; sums, not means",
    takes="closure",
    extra_passes="s",
    gradients=lambda size: 1.0 + size.options["stragglers"],
    faults="s a round are not waited for",
    paper="Tandon et al. 2017, ICML",
    departs="messages are float64, so that large coefficients lose nothing; rank 0 is the master and computes nothing",
)
