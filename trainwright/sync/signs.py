r"""A mean over workers of which every element travels as one bit, with feedback of both errors.

    C(z) = s · sign(z), s = ‖z‖₂ / √numel, sign(0) = +1        a scale a segment
    worker:  z ← z + e,   q = C(z),   e ← z − q                q is sent in n chunks, one to each worker
    server:  a = (1/n) Σ_i q_i + δ,   p = C(a),   δ ← a − p    of the own chunk; p is sent to all

Two calls, an all-to-all and an all-gather, of an eighth of a byte an element and a scale a segment. Segments
(parameters, or one for all) are padded to a multiple of 8n; pads are in no scale and carry no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .requests import AllGather, AllToAll, Steps
from .sums import ordered_sum, squared_norm


@dataclass(frozen=True)
class Segments:
    """Lengths of the segments, and how they are cut for n workers.

    >>> cut = Segments((10, 20), num_workers=2)
    >>> cut.chunk_lengths, cut.chunk_length, cut.message_bytes(itemsize=4)
    ((8, 16), 24, 11)
    """

    lengths: tuple[int, ...]
    num_workers: int

    @cached_property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Elements of each segment in one worker's chunk, pads included."""
        return tuple(8 * -(-length // (8 * self.num_workers)) for length in self.lengths)

    @property
    def chunk_length(self) -> int:
        return sum(self.chunk_lengths)

    def message_bytes(self, itemsize: int) -> int:
        """Return the bytes of one chunk as it travels: its signs, and the scales."""
        return self.chunk_length // 8 + itemsize * len(self.lengths)

    def total_bytes(self, itemsize: int) -> int:
        """Return what all workers send for one mean."""
        return 2 * self.num_workers * (self.num_workers - 1) * self.message_bytes(itemsize)

    def cut(self, vector: Tensor) -> Tensor:
        """Return a vector of all segments as [n, chunk_length], padded with zeros."""
        rows = vector.new_zeros((self.num_workers, self.chunk_length))
        for part, (begin, length) in zip(vector.split(self.lengths), self._places()):
            rows[:, begin : begin + length] = torch.nn.functional.pad(
                part, (0, self.num_workers * length - part.numel())
            ).view(self.num_workers, length)
        return rows

    def join(self, rows: Tensor) -> Tensor:
        """Return the vector that `cut` made `rows` of."""
        parts = [rows[:, begin : begin + length].reshape(-1) for begin, length in self._places()]
        return torch.cat([part[:length] for part, length in zip(parts, self.lengths)])

    def num_real(self, rank: int) -> list[int]:
        """Return, of each segment, the elements of worker `rank`'s chunk that are no pads."""
        return [min(chunk, max(0, length - rank * chunk)) for length, chunk in zip(self.lengths, self.chunk_lengths)]

    def _places(self) -> Iterator[tuple[int, int]]:
        begin = 0
        for length in self.chunk_lengths:
            yield begin, length
            begin += length


def compressed_mean(
    segments: Segments, rank: int, vector: Tensor, error: Tensor, server_error: Tensor
) -> Steps[Tensor]:
    """Return the compressed mean of the workers' vectors, the same on all; both errors are updated in place.

    vector, error: [Σ lengths]. server_error: [chunk_length]. What the mean leaves out is in the
    errors, so that sums over time are right.
    """
    z = vector + error
    scales = torch.stack([_scale(part, part.numel()) for part in z.split(segments.lengths)])
    error.copy_(z - _scaled(sign_of(z), scales, segments.lengths))
    packed = pack(segments.cut(z))
    given = yield AllToAll(torch.cat([packed, _as_bytes(scales).expand(segments.num_workers, -1)], dim=1))
    own = _mean_of(given, segments, z.dtype) + server_error
    lengths, real = segments.chunk_lengths, segments.num_real(rank)
    own *= _real_elements(lengths, real, own)
    own_scales = torch.stack([_scale(part, count) for part, count in zip(own.split(lengths), real)])
    kept = _scaled(sign_of(own), own_scales, lengths) * _real_elements(lengths, real, own)
    server_error.copy_(own - kept)
    rows = yield AllGather(torch.cat([pack(own[None])[0], _as_bytes(own_scales)]))
    signs, all_scales = _opened(rows, segments, z.dtype)
    return segments.join(torch.stack([_scaled(*each, lengths) for each in zip(signs, all_scales)]))


def sign_of(x: Tensor) -> Tensor:
    """Return ±1, +1 for 0."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def pack(x: Tensor) -> Tensor:
    """Return the signs of `x` ([…, 8k]) as bits ([…, k], uint8), first element first; 1 for at least 0.

    >>> pack(torch.tensor([[1.0, -1, 0, -2, -3, -4, -5, 6]])).tolist()
    [[161]]
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.packbits((x >= 0).numpy(), axis=-1))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=x.device)
    return ((x >= 0).view(*x.shape[:-1], -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ±1 ([…, 8k]) of bits ([…, k]).

    >>> unpack(torch.tensor([161], dtype=torch.uint8), torch.float32).tolist()
    [1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    table = torch.from_numpy(bits * 2.0 - 1.0).to(dtype).to(packed.device)
    return table.index_select(0, packed.reshape(-1).int()).view(*packed.shape[:-1], 8 * packed.shape[-1])


def _mean_of(given: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
    signs, scales = _opened(given, segments, dtype)
    return ordered_sum([_scaled(*each, segments.chunk_lengths) for each in zip(signs, scales)]) / segments.num_workers


def _opened(messages: Tensor, segments: Segments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Signs [n, chunk_length] and scales [n, segments] of n messages."""
    num_bytes = segments.chunk_length // 8
    scales = (
        messages[:, num_bytes:]
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(dtype)
        .view(len(messages), -1)
    )
    return unpack(messages[:, :num_bytes].contiguous(), dtype), scales


def _scale(x: Tensor, count: int) -> Tensor:
    return (squared_norm(x) / max(1, count)).sqrt()


def _scaled(signs: Tensor, scales: Tensor, lengths: Sequence[int]) -> Tensor:
    """Signs times the scale of their segment."""
    return torch.cat([part * scale for part, scale in zip(signs.split(list(lengths)), scales)])


def _real_elements(lengths: Sequence[int], real: Sequence[int], like: Tensor) -> Tensor:
    """1 for elements, 0 for pads."""
    return torch.cat([(torch.arange(n, device=like.device) < count).to(like.dtype) for n, count in zip(lengths, real)])


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
