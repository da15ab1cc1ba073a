r"""Computes a mean over workers with one bit an element, with feedback of the errors of both directions.

    C(z) = s · sign(z), s = ‖z‖₂ / √numel, sign(0) = +1        one scale for each segment
    worker:  z ← z + e,   q = C(z),   e ← z − q                q is sent in n chunks, one to each worker
    server:  a = (1/n) Σ_i q_i + δ,   p = C(a),   δ ← a − p    of the worker's own chunk; p is sent to all

It takes two collectives, an all-to-all and an all-gather, of an eighth of a byte an element and one scale a segment. Segments
(parameters, or one for all) are padded to a multiple of 8n; the padding counts in no scale and carries no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .requests import AllGather, AllToAll, Steps
from .sums import squared_norm

_BLOCK = 1 << 16
"""The number of elements processed at once: a block and its temporaries stay in a core's cache."""


@dataclass(frozen=True)
class Segments:
    """The lengths of the segments, and their division into chunks for n workers.

    >>> cut = Segments((10, 20), num_workers=2)
    >>> cut.chunk_lengths, cut.chunk_length, cut.message_bytes(itemsize=4)
    ((8, 16), 24, 11)
    """

    lengths: tuple[int, ...]
    num_workers: int

    @cached_property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Return the number of elements of each segment in one worker's chunk, padding included."""
        return tuple(8 * -(-length // (8 * self.num_workers)) for length in self.lengths)

    @property
    def chunk_length(self) -> int:
        return sum(self.chunk_lengths)

    def message_bytes(self, itemsize: int) -> int:
        """Return the bytes of one chunk's message: its signs, and the scales."""
        return self.chunk_length // 8 + itemsize * len(self.lengths)

    def total_bytes(self, itemsize: int) -> int:
        """Return the bytes that all workers together send for one mean."""
        return 2 * self.num_workers * (self.num_workers - 1) * self.message_bytes(itemsize)

    def num_real(self, rank: int) -> list[int]:
        """Return, for each segment, the number of elements of worker `rank`'s chunk without padding."""
        return [min(chunk, max(0, length - rank * chunk)) for length, chunk in zip(self.lengths, self.chunk_lengths)]

    def places(self) -> Iterator[tuple[int, int]]:
        begin = 0
        for length in self.chunk_lengths:
            yield begin, length
            begin += length


def compressed_mean(
    segments: Segments, rank: int, vector: Tensor, error: Tensor, server_error: Tensor
) -> Steps[Tensor]:
    """Return the compressed mean of the workers' vectors, equal on all workers; both errors are updated in place.

    vector, error: [Σ lengths]. server_error: [chunk_length]. The errors hold what the mean leaves out, so that sums over time
    are right. Each element is read and written a few times, in blocks that stay in the cache, as in a sum of vectors.
    """
    z, n = error.add_(vector), segments.num_workers
    parts = z.split(segments.lengths)
    scales = torch.stack([_scale(part, part.numel()) for part in parts])
    packed = z.new_zeros((n, segments.chunk_length // 8), dtype=torch.uint8)
    for part, scale, (begin, length) in zip(parts, scales, segments.places()):
        bits = take_signs(part, scale)
        room = bits.new_zeros(n * length // 8)
        room[: len(bits)] = bits
        packed[:, begin // 8 : (begin + length) // 8] = room.view(n, -1)
    given = yield AllToAll(torch.cat([packed, _as_bytes(scales).expand(n, -1)], dim=1))
    own_scales = _serve(segments, rank, given, server_error)
    own = [take_signs(part, scale) for part, scale in zip(server_error.split(segments.chunk_lengths), own_scales)]
    _clear_pads(segments, rank, server_error)
    rows = yield AllGather(torch.cat([*own, _as_bytes(own_scales)]))
    return _joined(segments, rows, z)


def _serve(segments: Segments, rank: int, given: Tensor, server_error: Tensor) -> Tensor:
    """Add the mean of the workers' chunks to `server_error`, and return the scale of each of its segments."""
    chunks, scales = _opened(given, segments, server_error.dtype)
    table = _table(server_error)
    for index, (begin, length) in enumerate(segments.places()):
        own = server_error[begin : begin + length]
        tables = [table * scale for scale in scales[:, index]]
        for block, *bits in zip(
            own.split(_BLOCK), *(row[begin // 8 : (begin + length) // 8].split(_BLOCK // 8) for row in chunks)
        ):
            total = _looked_up(tables[0], bits[0])
            for each, packed in zip(tables[1:], bits[1:]):
                total += _looked_up(each, packed)
            block += total.div_(segments.num_workers)
    _clear_pads(segments, rank, server_error)
    real = segments.num_real(rank)
    return torch.stack([_scale(part, count) for part, count in zip(server_error.split(segments.chunk_lengths), real)])


def _joined(segments: Segments, rows: Tensor, like: Tensor) -> Tensor:
    """Return the vector whose chunks `rows` contains, each as signs and scales."""
    chunks, scales = _opened(rows, segments, like.dtype)
    table, mean = _table(like), torch.empty_like(like)
    for index, (part, (begin, length)) in enumerate(zip(mean.split(segments.lengths), segments.places())):
        for room, row, scale in zip(part.split(length), chunks, scales[:, index]):
            scaled = table * scale
            for block, bits in zip(room.split(_BLOCK), row[begin // 8 : (begin + length) // 8].split(_BLOCK // 8)):
                block.copy_(_looked_up(scaled, bits)[: block.numel()])
    return mean


def _clear_pads(segments: Segments, rank: int, chunk: Tensor) -> None:
    """Set the padding of a chunk to zero."""
    for (begin, length), count in zip(segments.places(), segments.num_real(rank)):
        chunk[begin + count : begin + length] = 0


def take_signs(z: Tensor, scale: Tensor) -> Tensor:
    """Return the signs of `z` ([k]) as bits ([⌈k / 8⌉]), and set `z` in place to z − scale · sign(z).

    >>> z = torch.tensor([3.0, -1.0, 0.0])
    >>> take_signs(z, torch.tensor(2.0)).tolist(), z.tolist()
    ([160], [1.0, 1.0, -2.0])
    """
    bits = []
    for block in z.split(_BLOCK):
        block += 0.0  # −0.0 has the sign of 0
        bits.append(_packed(block >= 0))
        block -= torch.copysign(scale, block)
    return torch.cat(bits) if len(bits) != 1 else bits[0]


def sign_of(x: Tensor) -> Tensor:
    """Return the sign of each element as ±1, +1 for 0."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def _packed(bits: Tensor) -> Tensor:
    """Return booleans ([k]) packed into bytes ([⌈k / 8⌉], uint8), the first in the highest bit, padded with 0."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=bits.device)
    filled = torch.nn.functional.pad(bits, (0, -bits.numel() % 8))
    return (filled.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)


def _table(like: Tensor) -> Tensor:
    """Return a table [256, 8] of the eight signs in each byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return torch.from_numpy(bits * 2.0 - 1.0).to(like)


def _looked_up(table: Tensor, packed: Tensor) -> Tensor:
    """Return the rows of the table ([256, 8]) for the bytes ([k]) as one vector ([8k])."""
    return table.index_select(0, packed.int()).view(-1)


def _opened(messages: Tensor, segments: Segments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the bits [n, chunk_length / 8] and the scales [n, segments] of n messages."""
    num_bytes = segments.chunk_length // 8
    scales = messages[:, num_bytes:].clone(memory_format=torch.contiguous_format)
    return messages[:, :num_bytes], scales.view(-1).view(dtype).view(len(messages), -1)


def _scale(x: Tensor, count: int) -> Tensor:
    return (squared_norm(x) / max(1, count)).sqrt()


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
