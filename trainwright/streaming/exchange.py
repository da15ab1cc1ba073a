"""Exchanges slopes between ranks, one byte a rank and step, so that every rank applies all ranks' directions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..artifacts import UserError
from ..sync.just_one_byte import decode, encode


class ByteExchange:
    """Shares slopes as Just One Byte does: rank m's direction is drawn from (seed, step, parameter, m).

        θ ← θ − lr ((1/n) Σ_m ĝ_m z_m + λ θ),   ĝ: 7 bits of log-magnitude and a sign

    Each rank runs its steps on batches of its own; the parameters stay equal on all ranks, bit for bit. A rank sends one byte a
    step, whatever the model's size. group: the process group; default: all ranks. Raises `UserError` without a process group.

    Source: Zelikman et al. 2023, Just One Byte (arXiv:2306.10015).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise UserError(
                "a process group is needed to exchange slopes; there is none; start with torchrun and init_process_group"
            )
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.stream: tuple[int, ...] = _stream_of(dist.get_rank(group))

    def __call__(self, slope: float) -> list[tuple[tuple[int, ...], float]]:
        """Return every rank's stream with its slope divided by the number of ranks; ranks whose slope is 0 or NaN are left out."""
        own = encode(torch.tensor([slope], dtype=torch.float64))
        rows = [torch.empty_like(own) for _ in range(self.num_ranks)]
        dist.all_gather(rows, own, group=self.group)
        values = decode(torch.cat(rows)).tolist()
        return [(_stream_of(rank), value / self.num_ranks) for rank, value in enumerate(values) if value]


def _stream_of(rank: int) -> tuple[int, ...]:
    return (2, rank)  # 1 is the rounding's
