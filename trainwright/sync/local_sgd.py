"""Data-parallel training, and local SGD, in which workers average their parameters periodically."""

from __future__ import annotations

from typing import Any

import torch

from ..artifacts import check_range
from .method import Method
from .record import Message, Size, SyncRecord, all_reduced, each_step
from .replica import Worker
from .requests import AllReduce, Steps


class DataParallel(Method):
    r"""Average the gradients in each step, as DistributedDataParallel does: the baseline of the other methods.

        g = Σ_i b_i g_i / Σ_i b_i        b_i: `num_samples` of worker i, 1 unless said

    and the optimizer steps with g, on all workers alike.
    """

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        self.replica.write_gradient((yield from self._mean_gradient(num_samples)))
        self.replica.update()

    def _mean_gradient(self, num_samples: int) -> Steps[torch.Tensor]:
        gradient = self.replica.read_gradient() * num_samples
        counted = torch.cat([gradient, gradient.new_tensor([num_samples])])
        total = yield from self.again(lambda: AllReduce(counted))
        return total[:-1] / total[-1]


class LocalSGD(DataParallel):
    r"""Let each worker train by itself for `period` steps, then average the parameters.

        x_i ← the optimizer's step with worker i's own gradient
        x_i ← (1/n) Σ_j x_j                              every `period` steps

    Any optimizer works; its state stays with each worker. period: H, the steps between averages. shared_steps: the number of
    first steps that average gradients instead of parameters (post-local SGD), which helps if the first steps are large.

    With fewer averages, workers with different data drift further apart: at the minimum of a quadratic the bias grows with
    lr · H. Use `diloco` for long periods.

    Source: Stich 2019 (arXiv:1805.09767); shared steps: Lin, Stich, Patel & Jaggi 2020 (arXiv:1808.07217).
    """

    bears_changes = True

    def __init__(self, worker: Worker, *, period: int = 8, shared_steps: int = 0) -> None:
        super().__init__(worker)
        check_range(
            "local-sgd",
            period=(period, "of at least 1 step", lambda value: value >= 1),
            shared_steps=(shared_steps, "of at least 0", lambda value: value >= 0),
        )
        self.period, self.shared_steps = int(period), int(shared_steps)

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        if self.num_steps <= self.shared_steps:
            yield from super().step(loss, num_samples)
            return
        self.replica.update()
        if (self.num_steps - self.shared_steps) % self.period == 0:
            self.replica.write((yield from self.mean(self.replica.read())))


def reduced_gradient(size: Size) -> int:
    """Return the bytes of an all-reduce of the gradient and the number of its examples."""
    return all_reduced(Size((*size.shapes, 1), size.itemsize, size.num_workers))


def _shared(size: Size, num_steps: int) -> int:
    return min(num_steps, size.options["shared_steps"])


RECORDS = (
    SyncRecord(
        "data-parallel",
        DataParallel,
        "averages gradients each step",
        (Message("gradients", "all-reduce", reduced_gradient, each_step, "2P"),),
        promises="the maths of one worker with all data",
        assumes="nothing",
        paper="Li et al. 2020, arXiv:2006.15704",
    ),
    SyncRecord(
        "local-sgd",
        LocalSGD,
        "averages parameters every H steps",
        (
            Message(
                "parameters",
                "all-reduce",
                all_reduced,
                lambda size, k: (k - _shared(size, k)) // size.options["period"],
                "2P/H",
            ),
            Message("gradients at first", "all-reduce", reduced_gradient, _shared, "2P at first"),
        ),
        promises="another trajectory; exact at H = 1 with SGD",
        assumes="data alike, or a short period",
        paper="Stich 2019, arXiv:1805.09767",
    ),
)
