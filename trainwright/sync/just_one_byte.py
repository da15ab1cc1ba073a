"""Just One Byte: zeroth-order training in which each worker sends one byte a sample and regenerates all perturbations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from ..numerics.normals import normals
from .method import Method
from .record import Message, SyncRecord, each_step
from .replica import Worker
from .requests import AllGather, Compute, MembersChanged, Steps

_SHARPNESS, _MOST = 8, 63


class JustOneByte(Method):
    r"""Estimate slopes along random directions, and send each to the other workers in one byte.

        g_ms = (L(θ + εz) − L(θ − εz)) / 2ε,   z from (seed, step, worker m, sample s)
        θ ← θ − (lr / c) Σ_m Σ_s ĝ_ms z_ms              in the order of workers, then samples; c: how many there are

    ĝ is the byte's value: 7 bits of log-magnitude and a sign (`encode`), within 6.5 % from 3.8e-4 to 2.6e3; 0 is 0, and
    so is a slope that is not a number. `sync.step(closure)` calls closure(s) twice a sample, with gradients off; it
    returns the loss of the s-th sample (or batch) of this step, the same both times: no dropout. lr is that of
    `optimizer`, whose own step is not taken.

    num_samples: directions a worker and step. epsilon: ε. seed: of all perturbations. Memory is that of evaluation and
    one copy; each step generates n·num_samples directions on each worker, which is what limits n. The parameters stay
    equal bit for bit on all workers: they are restored from the copy, never by subtraction, and directions come from a
    counter and tables, not from a device's own generator. It is for fine-tuning, where few directions matter; from scratch
    it hardly learns.

    Source: Zelikman et al. 2023, Just One Byte (per gradient) (arXiv:2306.10015); MeZO: Malladi et al. 2023
    (arXiv:2305.17333).
    """

    needs_whole = "a slope is along a direction of the whole model"

    bears_changes = True

    def __init__(self, worker: Worker, *, num_samples: int = 8, epsilon: float = 1e-3, seed: int = 0) -> None:
        super().__init__(worker)
        check_range(
            "just-one-byte",
            num_samples=(num_samples, "of at least 1", lambda value: value >= 1),
            epsilon=(epsilon, "above 0", lambda value: value > 0),
        )
        if worker.replica.optimizer is None:
            raise UserError("just-one-byte needs an optimizer, whose lr it takes; got none; give torch.optim.SGD")
        self.num_samples, self.epsilon, self.seed = int(num_samples), float(epsilon), int(seed)

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        theta = self.replica.read()
        rows = None
        while rows is None:
            slopes = [self._slope(loss, theta, sample) for sample in range(self.num_samples)]
            yield Compute(amount=2 * self.num_samples / 3)
            try:
                rows = yield AllGather(encode(torch.tensor(slopes, dtype=torch.float64)))
            except MembersChanged:  # directions hang on the rank: along new ones, the slopes are others
                continue
        self.replica.write(self.caught_up(theta, self.num_steps, rows))
        self.replica.count_step()

    def caught_up(self, theta: Tensor, step: int, rows: Tensor) -> Tensor:
        """Return the parameters after `step`, given those before it, `theta`, and all workers' bytes, `rows` [n, num_samples]."""
        scale = self.replica.settings("lr")
        values = decode(rows)
        for rank, own in enumerate(values.tolist()):
            for sample, slope in enumerate(own):
                if slope:
                    theta = theta - scale * (slope / rows.numel()) * self._direction(theta, step, rank, sample)
        return theta

    def _slope(self, closure: Any, theta: Tensor, sample: int) -> float:
        z = self._direction(theta, self.num_steps, self.worker.rank, sample)
        losses = []
        for side in (self.epsilon, -self.epsilon):
            self.replica.write(theta + side * z)
            losses.append(float(closure(sample)))
        return (losses[0] - losses[1]) / (2 * self.epsilon)

    def _direction(self, like: Tensor, step: int, rank: int, sample: int) -> Tensor:
        return normals(like.numel(), (self.seed, step, rank, sample)).to(like.device, like.dtype)


def encode(slopes: Tensor) -> Tensor:
    """Return one byte (int8) for each slope: 0, or sign · (p + 64) with p = round(8 ln |g|) clamped to ±63.

    >>> encode(torch.tensor([0.0, 1.0, -1.0, 1e9, float('nan')])).tolist()
    [0, 64, -64, 127, 0]
    """
    magnitudes = slopes.abs()
    steps = (_SHARPNESS * magnitudes.clamp(1e-30, 1e30).log()).round().clamp(-_MOST, _MOST) + _MOST + 1
    code = torch.where((magnitudes > 0), steps * slopes.sign(), 0.0)
    return torch.nan_to_num(code, nan=0.0).to(torch.int8)


def decode(codes: Tensor) -> Tensor:
    """Return the slopes (float64) that the bytes encode.

    >>> decode(torch.tensor([0, 64, -72], dtype=torch.int8)).tolist()
    [0.0, 1.0, -2.7182817459106445]
    """
    table = np.exp((np.arange(128) - _MOST - 1) / _SHARPNESS).astype(np.float32).astype(np.float64)
    table[0] = 0.0
    found = torch.from_numpy(table)[codes.cpu().long().abs()]
    return found * codes.cpu().sign()


RECORD = SyncRecord(
    "just-one-byte",
    JustOneByte,
    "slopes along random directions, a byte each",
    (
        Message(
            "slopes",
            "all-gather",
            lambda size: size.num_workers * (size.num_workers - 1) * size.options["num_samples"],
            each_step,
            "(n−1)·samples B",
        ),
    ),
    promises="another trajectory, equal on all to the bit",
    assumes="fine-tuning; no dropout",
    takes="closure",
    gradients=lambda size: 2 * size.options["num_samples"] / 3,
    extra_passes="2 forwards a sample, no backward",
    paper="Zelikman et al. 2023, arXiv:2306.10015",
    departs="a byte is 7 bits of log-magnitude and a sign; lr is divided by the number of slopes, not its root",
)
