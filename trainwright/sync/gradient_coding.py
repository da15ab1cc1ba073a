"""Gradient coding on a master and its workers: a round does not wait for its s slowest workers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..artifacts import check_range
from .coded import Coded
from .codes import GradientCode
from .record import Message, Size, SyncRecord, each_step
from .replica import Worker
from .requests import Compute, Steps


class GradientCoding(Coded):
    r"""Compute each chunk of the data on s + 1 workers, and decode the sum of all from the answers of any n − s.

        worker i:  Σ_j B_ij g_j over its s + 1 chunks
        master:    g = Σ_{i answered} a_i (…),  aᵀ B_S = 1ᵀ,  and the optimizer's step

    `sync.step(closure)` calls closure(chunk), which returns the summed loss of a chunk.

    Rank 0 is the master and computes nothing; ranks 1 … n are the workers, so that `method.num_chunks` is n. The
    gradient is that of the sum of all chunks' losses, divided by `scale`: give each closure sums with a fixed
    normalisation, no means of unequal chunks, and no dropout or batch norm, which would differ between the copies of a
    chunk.

    stragglers: s. patience: μ; a round lasts (1 + μ) times as long as its fastest worker took, and longer only while the answers
    cannot be decoded. A late worker does not delay the next round: it continues with the newest parameters. cyclic: whether to
    use the cyclic code even if fractional repetition fits. After the last step, `sync.finish()` sets all ranks' parameters to
    the master's.

    At a meeting, a worker that is killed, hangs or is cut off counts as a straggler until one that joins takes its place; if
    the others' answers cannot be decoded, or the master is gone, all end with an error that names it.

    Data is held s + 1 times and computed s + 1 times, which pays off only if waiting costs more. Sequential codes, `sr-sgc` and
    `m-sgc`, need far less work, over several jobs in turn.

    Source: Tandon, Lei, Dimakis & Karampatziakis 2017, Gradient Coding: Avoiding Stragglers in Distributed Learning (ICML).
    """

    name = "gradient-coding"
    bears_changes = True
    needs_whole = (
        "the master decodes what workers answer in time, and the ranks of a replica would decode from different workers"
    )

    def __init__(
        self, worker: Worker, *, stragglers: int = 1, patience: float = 1.0, scale: float = 1.0, cyclic: bool = False
    ) -> None:
        super().__init__(worker, patience)
        check_range(self.name, scale=(scale, "above 0", lambda value: value > 0))
        self.code = GradientCode(worker.size - 1, stragglers, cyclic)
        self.scale = scale

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks of the data: one for each worker."""
        return self.code.num_workers

    @property
    def down_length(self) -> int:
        return self.replica.num_params

    @property
    def up_length(self) -> int:
        return self.replica.num_params

    def down(self, worker: int) -> Tensor:
        return self.replica.read()

    def told(self, turn: int, message: Tensor) -> None:
        self.replica.write(message)

    def answer(self, closure: Any) -> Steps[Tensor]:
        """Return the weighted sum of the gradients of this worker's chunks."""
        rank, total = self.worker.rank - 1, torch.zeros(self.up_length, dtype=torch.float64)
        for chunk in self.code.chunks(rank):
            self.replica.gradients_by(functools.partial(closure, chunk))
            total += float(self.code.matrix[rank, chunk]) * self.replica.read_gradient().double().cpu()
        yield Compute(amount=self.code.load)
        return total

    def enough(self, answers: dict[int, Tensor]) -> bool:
        return self.code.decodes(answers)

    def use(self, answers: dict[int, Tensor]) -> None:
        self.replica.write_gradient(decoded(self.code, answers) / self.scale)
        self.replica.update()


def decoded(code: GradientCode, sums: dict[int, Tensor]) -> Tensor:
    """Return the sum of all chunks' gradients, decoded from the workers' sums in their order, in float64."""
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
    faults="s a round are not waited for, whether slow or gone",
    paper="Tandon et al. 2017, ICML",
    departs="messages are float64, so that large coefficients lose nothing; rank 0 is the master and computes nothing",
)
