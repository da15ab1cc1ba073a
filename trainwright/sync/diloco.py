"""DiLoCo and streaming DiLoCo: workers run many local steps, whose outcome is the gradient of an outer optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .method import Method
from .record import Message, Size, StateVector, SyncRecord
from .replica import Worker
from .requests import Steps
from .traffic import all_reduce_bytes


class DiLoCo(Method):
    r"""Treat the change by `period` local steps, averaged over the workers, as a gradient for Nesterov's SGD.

        Δ = θ − (1/n) Σ_i x_i                 every H steps; θ is what all began those steps with
        v ← μ v + Δ
        θ ← θ − η (Δ + μ v),   x_i ← θ

    The inner optimizer is yours (AdamW, as a rule), and keeps its state. period: H, in the hundreds. outer_lr: η.
    outer_momentum: μ.

    fragments: F > 1 is streaming DiLoCo: the parameters are cut into F parts of one length, each averaged once in H
    steps, H/F steps after the one before, so that no moment sends more than 2P/F. delay: steps between the exchange of a
    part and its use; x_i is then mixed with what it has become: x_i ← mix · x_i + (1 − mix) · θ.

    For short periods use local-sgd, which is simpler; η = 0.7 with μ = 0.9 needs a long one. The exchange is waited for at
    once, even with a delay, which changes no result; overlap with computation is not implemented.

    Source: Douillard et al. 2023 (arXiv:2311.08105); streaming: Douillard et al. 2025 (arXiv:2501.18512).
    """

    bears_changes = True

    def __init__(
        self, worker: Worker, *, period: int = 100, outer_lr: float = 0.7, outer_momentum: float = 0.9, fragments: int = 1,
        delay: int = 0, mix: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(worker)
        check_range(
            "diloco",
            period=(period, "of at least 1 step", lambda value: value >= 1),
            outer_lr=(outer_lr, "above 0", lambda value: value > 0),
            outer_momentum=(outer_momentum, "in [0, 1)", lambda value: 0 <= value < 1),
            fragments=(fragments, "of at least 1", lambda value: value >= 1),
            mix=(mix, "in [0, 1]", lambda value: 0 <= value <= 1),
        )
        if period % fragments or fragments > worker.replica.num_params:
            raise UserError(
                f"diloco needs a period that its fragments divide, and a parameter for each; got period {period}, {fragments} "
                f"fragments and {worker.replica.num_params} parameters; change one of them"
            )
        if not 0 <= delay < period // fragments:
            raise UserError(
                f"diloco needs a delay shorter than period / fragments, {period // fragments} steps; got {delay}; shorten it"
            )
        self.period, self.delay, self.mix = int(period), int(delay), float(mix)
        self.outer_lr, self.outer_momentum, self.fragments = outer_lr, outer_momentum, int(fragments)

    def start(self) -> Steps[None]:
        theta = self.replica.read()
        self.state |= {"theta": theta, "velocity": torch.zeros_like(theta)}
        if self.delay:
            self.state["averaged"] = torch.zeros(
                largest_part(self.replica.num_params, self.fragments), dtype=theta.dtype
            )
        yield from ()

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        self.replica.update()
        spacing = self.period // self.fragments
        turn, over = divmod(self.num_steps, spacing)
        if over == 0:
            averaged = yield from self.mean(self._part(self.replica.read(), turn))
            if self.delay == 0:
                self._outer_step(turn, averaged)
            else:
                self._kept("averaged")[: averaged.numel()] = averaged
        elif over == self.delay and turn > 0:
            self._outer_step(turn, self._kept("averaged")[: self._part(self._kept("theta"), turn).numel()])

    def _outer_step(self, turn: int, averaged: Tensor) -> None:
        theta, velocity = self._part(self._kept("theta"), turn), self._part(self._kept("velocity"), turn)
        outer_gradient = theta - averaged
        velocity.mul_(self.outer_momentum).add_(outer_gradient)
        theta.sub_(self.outer_lr * (outer_gradient + self.outer_momentum * velocity))
        x = self.replica.read()
        own = self._part(x, turn)
        own.copy_(self.mix * own + (1 - self.mix) * theta if self.mix else theta)
        self.replica.write(x)

    def _part(self, vector: Tensor, turn: int) -> Tensor:
        """Return the fragment of a turn, counted from 1; later fragments may be one element shorter."""
        return vector.tensor_split(self.fragments)[(turn - 1) % self.fragments]

    def _kept(self, name: str) -> Tensor:
        kept = self.state[name]
        assert isinstance(kept, Tensor)
        return kept


def largest_part(num_params: int, fragments: int) -> int:
    """Return the number of elements of the largest fragment."""
    return -(-num_params // fragments)


def _fragment(index: int) -> Message:
    """Return the messages of the fragments that are as long as the first one (index 0), or one element shorter (index 1)."""

    def length(size: Size) -> int:
        return size.num_params // size.options["fragments"] + (1 - index)

    def times(size: Size, k: int) -> int:
        fragments, longer = size.options["fragments"], size.num_params % size.options["fragments"]
        turns = k // (size.options["period"] // fragments)
        rounds, rest = divmod(turns, fragments)
        long_ones = rounds * longer + min(rest, longer)
        return long_ones if index == 0 else turns - long_ones

    return Message(
        "parameters" if index else "parameters, longer fragments",
        "all-reduce",
        lambda size: all_reduce_bytes(length(size), size.itemsize, size.num_workers),
        times,
        "2P/H" if index else "",
    )


_STATES = (
    StateVector("theta"),
    StateVector("velocity"),
    StateVector(
        "averaged",
        lambda size: largest_part(size.num_params, size.options["fragments"]) if size.options["delay"] else 0,
    ),
)
_DILOCO = SyncRecord(
    "diloco",
    DiLoCo,
    "averages every H steps, outer Nesterov step",
    (_fragment(0), _fragment(1)),
    promises="another trajectory, close to AdamW's at H of hundreds",
    assumes="a long period",
    states=_STATES,
    paper="Douillard et al. 2023, arXiv:2311.08105",
)
RECORDS = (
    _DILOCO,
    replace(
        _DILOCO,
        name="streaming-diloco",
        summary="the same, a fragment at a time",
        promises="another trajectory, close to DiLoCo's",
        paper="Douillard et al. 2025, arXiv:2501.18512",
        departs="fragments are runs of equal length, not layers; the exchange is waited for",
        defaults={"period": 100, "fragments": 4, "delay": 5, "mix": 0.5},
    ),
)
