"""1-bit LAMB: the compressed method for LAMB, with estimates of the trust ratios that the frozen phase cannot measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .one_bit_adam import OneBit, phases
from .record import Size, StateVector, SyncRecord
from .replica import Worker
from .requests import Steps
from .signs import Segments
from .sums import squared_norm

_LEAST_TRUST, _MOST_TRUST = 0.01, 10.0
_LEAST_FACTOR, _MOST_FACTOR, _MOST_CHANGE = 0.5, 4.0, 0.1
_AVERAGED = 0.9


class OneBitLAMB(OneBit):
    r"""LAMB whose momentum is averaged at one bit an element, all parameters under one scale.

        first phase, per parameter:  u = m / (√v + ε) + λx,   c = clip(‖x‖ / ‖u‖, 0.01, 10),   c̄ ← 0.9 c̄ + 0.1 c where
        c ≠ 1
                                     x ← x − lr · c · u
        at the end of it:            k = (mean over parameters of rms(m)) / rms(m)
        later:   m ← compressed mean of (β₁ m + (1 − β₁) g_i) k, divided by k
                 ĝ = (m − β₁ m_before) / (1 − β₁),   w ← β₂ w + (1 − β₂) ĝ²        w begins as v
                 f = max (√v + ε) / (√w + ε), blended with the decay's share, in [0.5, 4], within 10 % of the last
                 x ← x − lr · c̄ · f · (m / (√v + ε) + λx)

    Settings come from `optimizer` as for `1-bit-adam`; the same advice holds. c̄ begins at 0: a first phase of fewer
    than some twenty steps leaves the second one with small steps.

    Source: Li, Awan, Tang, Rajbhandari & He 2021, 1-bit LAMB (arXiv:2104.06069).
    """

    needs_whole = "trust ratios are norms of whole parameters"

    def __init__(self, worker: Worker, *, freeze_step: int = 100) -> None:
        super().__init__(worker, freeze_step)

    @property
    def segments(self) -> Segments:
        return Segments((self.replica.num_params,), self.worker.size)

    def start(self) -> Steps[None]:
        yield from super().start()
        v = self.vector("v")
        ones = v.new_ones(len(self.replica.shapes))
        self.state |= {"w": v.clone(), "trust": torch.zeros_like(ones), "evenness": ones.clone(), "factor": ones}

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        x = self.replica.read()
        if self.frozen:
            yield from self._compressed_step()
            rate = self.vector("trust") * self._factors(x)
        else:
            yield from self.whole_step()
            rate = self._trust(x)
            if self.num_steps == self.freeze_step:
                self._freeze()
        self.replica.write(x - self.replica.settings("lr") * self._spread(rate) * self.direction(x))
        self.replica.count_step()

    def _compressed_step(self) -> Steps[None]:
        first, second = self.betas
        before, evenness = self.vector("m"), self._spread(self.vector("evenness"))
        own = (first * before + (1 - first) * self.replica.read_gradient()) * evenness
        m = (yield from self.compressed(own)) / evenness
        gradient = (m - first * before) / (1 - first)
        self.vector("w").mul_(second).addcmul_(gradient, gradient, value=1 - second)
        self.state["m"] = m

    def _trust(self, x: Tensor) -> Tensor:
        """Return the trust ratio of each parameter, and update its moving average."""
        ratios = []
        for own, step in zip(self._parts(x), self._parts(self.direction(x))):
            norms = float(squared_norm(own).sqrt()), float(squared_norm(step).sqrt())
            ratios.append(trust_ratio(*norms))
        found = x.new_tensor(ratios)
        trust = self.vector("trust")
        trust.copy_(torch.where(found != 1, _AVERAGED * trust + (1 - _AVERAGED) * found, trust))
        return found

    def _freeze(self) -> None:
        m = self.vector("m")
        self.state["w"] = self.vector("v").clone()
        sizes = torch.stack([(squared_norm(part) / part.numel()).sqrt() for part in self._parts(m)])
        self.state["evenness"] = torch.where(sizes > 0, sizes.mean() / torch.where(sizes > 0, sizes, 1.0), 1.0)

    def _factors(self, x: Tensor) -> Tensor:
        """Return, for each parameter, the factor by which the second moment has shrunk since it was frozen."""
        eps, decay = self.replica.settings("eps"), self.replica.settings("weight_decay")
        frozen = self.vector("v").sqrt() + eps
        ratios, last = frozen / (self.vector("w").sqrt() + eps), self.vector("factor")
        bare = self.vector("m") / frozen
        whole = bare + decay * x
        for index, parts in enumerate(zip(*(self._parts(each) for each in (ratios, bare, whole)))):
            share = _norm_share(parts[1], parts[2])
            last[index] = adaptive_factor(float(parts[0].max()), share, float(last[index]))
        return last

    def _parts(self, vector: Tensor) -> tuple[Tensor, ...]:
        return vector.split(self.replica.shapes)

    def _spread(self, values: Tensor) -> Tensor:
        """Return a vector that repeats each parameter's value for all its elements."""
        return torch.cat([value.expand(size) for value, size in zip(values, self.replica.shapes)])


def trust_ratio(param_norm: float, step_norm: float) -> float:
    """Return ‖x‖ / ‖u‖ clamped to [0.01, 10]; 1 if either is 0.

    >>> trust_ratio(3.0, 0.1), trust_ratio(0.0, 1.0)
    (10.0, 1.0)
    """
    if param_norm == 0 or step_norm == 0:
        return 1.0
    return min(max(param_norm / step_norm, _LEAST_TRUST), _MOST_TRUST)


def adaptive_factor(ratio: float, share: float, last: float) -> float:
    """Return f: the ratio blended by `share` with 1, in [0.5, 4], and within 10 % of the last one.

    >>> adaptive_factor(100.0, 1.0, 3.9), adaptive_factor(1.05, 1.0, 1.0), adaptive_factor(3.0, 0.0, 1.0)
    (4.0, 1.05, 1.0)
    """
    blended = min(max(ratio * share + (1 - share), _LEAST_FACTOR), _MOST_FACTOR)
    return min(max(blended, (1 - _MOST_CHANGE) * last), (1 + _MOST_CHANGE) * last)


def _norm_share(bare: Tensor, whole: Tensor) -> float:
    """Return the share of ‖m / √v‖ in the norm of the step with weight decay, at most 1."""
    norm = float(squared_norm(whole).sqrt())
    return 1.0 if norm == 0 else min(1.0, float(squared_norm(bare).sqrt()) / norm)


def _fused(size: Size) -> Segments:
    return Segments((size.num_params,), size.num_workers)


RECORD = SyncRecord(
    "1-bit-lamb",
    OneBitLAMB,
    "LAMB; momenta at a bit an element",
    phases(_fused),
    promises="close to LAMB's trajectory",
    assumes="v steady at freeze_step",
    states=(
        StateVector("m"),
        StateVector("v"),
        StateVector("w"),
        StateVector("error"),
        StateVector("server_error", lambda size: _fused(size).chunk_length),
        StateVector("trust, evenness, factor", lambda size: 3 * len(size.shapes)),
    ),
    paper="Li et al. 2021, arXiv:2104.06069",
    departs="pads carry no error; always-zero elements are masked; parameters without momentum at freeze_step keep evenness 1",
)
