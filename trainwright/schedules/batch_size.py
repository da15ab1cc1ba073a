"""Batches that grow with the noise of their gradient, and the sampler that lets them grow in the middle of an epoch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from ..artifacts import UserError
from .gradient_noise import GradientNoise, Test, _check_test, measure_noise
from .sample_gradients import SampleLoss, sample_gradients


class AdaptiveBatchSize:
    r"""Grow the batch so that the noise of its gradient stays below a fixed share of the gradient.

    Every `interval` steps the gradients of the batch's samples are measured, and with b_new the size at which the test
    would just pass (see `GradientNoise.batch_size` for the tests),

        b ← min(max_batch_size, ⌈max(b, b_new)⌉);

    it never shrinks, and measuring stops once the maximum is reached. The learning rate stays as it is. It pays where
    large batches run at a better rate: few, parallel steps for about the same samples, not a better loss per sample.
    Near a minimum the gradient vanishes and the batch goes to its maximum: that is expected. With `AdAdaGradNorm` and
    the norm test convergence is proved, with `AdAdaGrad` and the coordinate-wise one.

    sampler: gives the batches, and has the batch size.
    max_batch_size: of all ranks together.
    test: `norm`, `inner-product`, `augmented` or `coordinate`.
    eta, theta, nu: the shares: of the norm and the coordinate-wise test, the inner-product test, and orthogonally to
        the gradient. 0.1 is usual, 0.25–0.5 on small images.
    interval: steps between measurements. Each costs 2–4 times the step's gradient, twice that for the inner-product
        tests; at 10, about a fifth of the time.
    unbias: correct ‖ḡ‖² for the noise in it.
    chunk_size: samples whose gradients are held at once.
    group: data-parallel ranks, each of which measures its part of the batch; `None` where there is one process.

    Raises `UserError` for settings out of range.

    >>> sampler = GrowingBatchSampler(1000, 8)
    >>> batch_size = AdaptiveBatchSize(sampler, max_batch_size=64, eta=0.5)
    >>> batch_size.update(GradientNoise(num_samples=8, squared_mean=1.0, variance=5.2))
    21
    >>> len(next(iter(sampler)))
    21

    Source: Lau, Li, Xu, Liu, Kolar, *AdAdaGrad: Adaptive Batch Size Schemes for Adaptive Gradient Methods*, 2024. It
    departs in that inner products are taken over all parameters together, where the authors' code adds them up layer
    by layer, and in the exact variance over chunks and ranks.
    """

    def __init__(
        self,
        sampler: GrowingBatchSampler,
        *,
        max_batch_size: int,
        test: Test = "norm",
        eta: float = 0.1,
        theta: float = 0.1,
        nu: float = 0.1,
        interval: int = 1,
        unbias: bool = False,
        chunk_size: int = 32,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_test(test, eta, theta, nu)
        if interval < 1 or max_batch_size < sampler.batch_size:
            raise UserError(
                f"an interval of at least 1 and a max_batch_size of at least {sampler.batch_size}, the sampler's, are needed; "
                f"got {interval} and {max_batch_size}; change them"
            )
        self.sampler, self.max_batch_size, self.test, self.interval = sampler, max_batch_size, test, interval
        self.chunk_size, self.group, self.num_steps = chunk_size, group, 0
        self._settings: dict[str, Any] = {"eta": eta, "theta": theta, "nu": nu, "unbias": unbias}

    def step(self, model: nn.Module, loss_fn: SampleLoss, batch: Any) -> int:
        """Count a step, measure where one is due, and return the size of the batches to come.

        Call it after `optimizer.step()` with the batch just used; the arguments are those of `sample_gradients`.
        """
        self.num_steps += 1
        if self.num_steps % self.interval or self.sampler.batch_size >= self.max_batch_size:
            return self.sampler.batch_size
        chunks = functools.partial(sample_gradients, model, loss_fn, batch, self.chunk_size)
        with torch.enable_grad():
            return self.update(measure_noise(chunks, self.test, self.group))

    def update(self, noise: GradientNoise) -> int:
        """Grow the batch as `noise`, measured otherwise, asks for, and return its size."""
        wanted = noise.batch_size(self.test, **self._settings)
        if math.isnan(wanted):
            raise UserError("finite gradients are needed to choose a batch size; got NaN; lower the learning rate")
        grown = math.ceil(min(self.max_batch_size, max(self.sampler.batch_size, wanted)))
        self.sampler.batch_size = grown
        return self.sampler.batch_size

    def state_dict(self, num_pending: int = 0) -> dict[str, Any]:
        """Return what a later run needs to go on, the sampler's state included (`num_pending`: see there)."""
        return {"num_steps": self.num_steps, "sampler": self.sampler.state_dict(num_pending)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.sampler.load_state_dict(state["sampler"])
        self.num_steps = state["num_steps"]


class GrowingBatchSampler(Sampler[list[int]]):
    """Batches of indices whose size may be changed at any time, in the middle of an epoch too.

    Give it to a `DataLoader` as `batch_sampler`. Each epoch is a permutation of its own, drawn from (seed, epoch) and
    from nothing global; iterating again goes on behind the last batch given, and starts the next epoch where the last
    one has ended. A loader with worker processes draws `prefetch_factor · num_workers` batches ahead, so a new size
    reaches the training loop that much later.

    num_samples: of the data set.
    batch_size: of all ranks together; settable. Rounded up to a multiple of `num_replicas`.
    seed: of the permutations; the same on every rank.
    shuffle: `False` takes the samples in order.
    drop_last: leave out an epoch's last batch where it is smaller. With several ranks, the samples that do not divide
        among them are always left out.
    num_replicas, rank: each rank gets every `num_replicas`-th index of each batch.

    Raises `UserError` for counts below 1 and a rank outside [0, num_replicas).

    >>> sampler = GrowingBatchSampler(10, 2, shuffle=False)
    >>> batches = iter(sampler)
    >>> next(batches)
    [0, 1]
    >>> sampler.batch_size = 5
    >>> list(batches)
    [[2, 3, 4, 5, 6], [7, 8, 9]]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if num_samples < num_replicas or num_replicas < 1 or not 0 <= rank < num_replicas:
            raise UserError(
                f"at least a sample a rank, and a rank in [0, num_replicas), are needed; got num_samples={num_samples}, "
                f"num_replicas={num_replicas} and rank={rank}; change them"
            )
        self.num_samples, self.seed, self.shuffle, self.drop_last = num_samples, seed, shuffle, drop_last
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch, self.position = 0, 0
        self._drawn: list[int] = []
        self.batch_size = batch_size

    @property
    def batch_size(self) -> int:
        """Samples in a batch, of all ranks together."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        if value < 1:
            raise UserError(f"a batch size of at least 1 is needed; got {value}; change it")
        self._batch_size = math.ceil(value / self.num_replicas) * self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        while (size := self._next_size()) > 0:
            batch = order[self.position : self.position + size]
            self.position += size
            self._drawn.append(size)
            yield batch[self.rank :: self.num_replicas]
        self.epoch, self.position = self.epoch + 1, 0
        self._drawn.clear()

    def __len__(self) -> int:
        """Return the number of batches left in this epoch, at the present size."""
        left = self.num_samples - self.position
        return left // self.batch_size if self.drop_last else math.ceil(left / self.batch_size)

    def state_dict(self, num_pending: int = 0) -> dict[str, int]:
        """Return where the epoch stands.

        num_pending: batches that a loader's workers have drawn and the training loop has not seen: not counted.
        """
        if num_pending > len(self._drawn):
            raise UserError(
                f"num_pending of at most {len(self._drawn)}, the batches drawn in this epoch, is needed; got {num_pending}; "
                "save before the epoch ends, or without workers"
            )
        pending = sum(self._drawn[len(self._drawn) - num_pending :])
        return {
            "epoch": self.epoch,
            "position": self.position - pending,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what `state_dict` returned; `UserError` where that is of a data set of another size."""
        if state["num_samples"] != self.num_samples:
            raise UserError(
                f"the state of a sampler over {self.num_samples} samples is needed; got one over {state['num_samples']}; "
                "resume with the same data"
            )
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self.batch_size = state["batch_size"]
        self._drawn = []

    def _next_size(self) -> int:
        left = self.num_samples - self.position
        size = min(self.batch_size, left)
        if size < self.batch_size and self.drop_last:
            return 0
        return size - size % self.num_replicas

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()
