"""1-bit Adam: runs Adam until its second moment is steady, then averages momenta with one bit an element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .method import Method
from .record import Message, Size, StateVector, SyncRecord, all_reduced
from .replica import Worker
from .requests import Steps
from .signs import Segments, compressed_mean


class OneBit(Method):
    """The common base of 1-bit Adam and 1-bit LAMB: moments, their settings, and the compressed mean."""

    of_size = ("error", "server_error")
    optimizers = ("adam", "adamw")

    def __init__(self, worker: Worker, freeze_step: int) -> None:
        super().__init__(worker)
        check_range("1-bit", freeze_step=(freeze_step, "of at least 1 step", lambda value: value >= 1))
        optimizer = worker.replica.optimizer
        if optimizer is None or any({"betas", "eps"} - {*group} for group in optimizer.param_groups):
            raise UserError(
                f"1-bit methods need torch.optim.Adam or AdamW, whose settings they take; got {type(optimizer).__name__}; take one"
            )
        self.freeze_step = int(freeze_step)

    @property
    def segments(self) -> Segments:
        """Return the segments of the parameter vector, each with its own scale."""
        return Segments(self.replica.shapes, self.worker.size)

    @property
    def frozen(self) -> bool:
        """Tell whether this step is in the compressed phase."""
        return self.num_steps > self.freeze_step

    @property
    def betas(self) -> tuple[float, float]:
        assert self.replica.optimizer is not None
        first, second = self.replica.optimizer.param_groups[0]["betas"]
        return float(first), float(second)

    def vector(self, name: str) -> Tensor:
        """Return an entry of the state."""
        kept = self.state[name]
        assert isinstance(kept, Tensor)
        return kept

    def start(self) -> Steps[None]:
        zeros = torch.zeros_like(self.replica.read())
        self.state |= {name: zeros.clone() for name in ("m", "v", "error")}
        self.state["server_error"] = zeros.new_zeros(self.segments.chunk_length)
        yield from ()

    def whole_step(self) -> Steps[None]:
        """Update both moments with the mean of all workers' gradients."""
        gradient = yield from self.mean(self.replica.read_gradient())
        first, second = self.betas
        self.vector("m").mul_(first).add_(gradient, alpha=1 - first)
        self.vector("v").mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def compressed(self, momentum: Tensor) -> Steps[Tensor]:
        """Return the mean of the workers' momenta, sent with one bit an element; 0 where no gradient was ever nonzero."""
        error, server_error = self.vector("error"), self.vector("server_error")
        mean = yield from compressed_mean(self.segments, self.worker.rank, momentum, error, server_error)
        return mean * (self.vector("v") > 0)

    def direction(self, x: Tensor) -> Tensor:
        """Return m / (√v + ε) + decay · x."""
        step = self.vector("m") / (self.vector("v").sqrt() + self.replica.settings("eps"))
        return step + self.replica.settings("weight_decay") * x


class OneBitAdam(OneBit):
    r"""Adam whose momentum is averaged at one bit an element once its second moment is frozen.

        steps ≤ freeze_step:   Adam with all-reduced gradients
        later:                 m_i ← β₁ m + (1 − β₁) g_i,   m ← compressed mean of the m_i,   v as it was
        x ← x − lr (m / (√v + ε) + weight_decay · x)

    lr, betas, eps and weight_decay are those of `optimizer`, Adam or AdamW, whose own step only counts. There is no bias
    correction, as in the authors' code. freeze_step: 15 to 25 % of all steps, when v has become steady; if it is earlier, small
    entries of v make steps explode.

    Each parameter has its own scale; under a plan that shards it, each shard has.
    Elements whose gradient was 0 throughout the first phase never change, since one bit cannot encode 0. Each worker's gradient
    has to be its own, which excludes clipping by a common norm.

    Source: Tang et al. 2021, 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed
    (arXiv:2102.02888).
    """

    def __init__(self, worker: Worker, *, freeze_step: int = 100) -> None:
        super().__init__(worker, freeze_step)

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        if self.frozen:
            first = self.betas[0]
            own = first * self.vector("m") + (1 - first) * self.replica.read_gradient()
            self.state["m"] = yield from self.compressed(own)
        else:
            yield from self.whole_step()
        x = self.replica.read()
        self.replica.write(x - self.replica.settings("lr") * self.direction(x))
        self.replica.count_step()


def phases(segments_of: Any) -> tuple[Message, ...]:
    """Return the messages of both phases: gradients up to `freeze_step`, signs afterwards."""
    return (
        Message("signs", "all-to-all and all-gather", lambda size: segments_of(size).total_bytes(size.itemsize),
                lambda size, k: max(0, k - size.options["freeze_step"]), "2P/32"),
        Message("gradients at first", "all-reduce", all_reduced, lambda size, k: min(k, size.options["freeze_step"]),
                "2P at first"),
    )  # fmt: skip


def by_parameter(size: Size) -> Segments:
    """Return one segment for each parameter."""
    return Segments(size.shapes, size.num_workers)


RECORD = SyncRecord(
    "1-bit-adam",
    OneBitAdam,
    "Adam; momenta at a bit an element",
    phases(by_parameter),
    promises="close to Adam's trajectory",
    assumes="v steady at freeze_step",
    states=(
        StateVector("m"),
        StateVector("v"),
        StateVector("error"),
        StateVector("server_error", lambda size: by_parameter(size).chunk_length),
    ),
    paper="Tang et al. 2021, arXiv:2102.02888",
    departs="the scales of all parameters travel in one message; pads carry no error; always-zero elements are masked",
)
