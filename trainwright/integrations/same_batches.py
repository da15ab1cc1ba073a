"""A guard: every rank loads whole batches by itself, and they have to be the same batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import UserError
from ..torch_internals.private import flatten_batch

EVERY = 16
"""Batches between two comparisons; the first is compared too. In between sums are added up, which needs no waiting."""
SAMPLES = 4096
"""Entries of a tensor that its checksum looks at, at most."""
_PRIME = 2**31 - 1


class SameBatches:
    """Adds up checksums of the batches that this rank sees, and compares them with the other ranks' now and then.

    A collator or a dataset that draws random numbers of its own on each rank would give each other examples, and the
    model would learn from pieces of different batches without a word. group: the `size` ranks that see the same; default: all.
    """

    def __init__(self, device: torch.device, group: Any = None, size: int | None = None) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._num_batches, self._group, self._size = 0, group, size

    def see(self, batch: Any) -> None:
        """Count a batch in; every so often compare, a collective call.

        Raises `UserError` when the ranks have not seen the same.
        """
        for _, leaf in flatten_batch(batch)[0]:
            if isinstance(leaf, Tensor):
                self._sum = (self._sum * 31 + checksum(leaf).to(self._sum.device)) % _PRIME
        self._num_batches += 1
        if self._num_batches % EVERY == 1 and self._num_ranks() > 1:
            self._compare()

    def _num_ranks(self) -> int:
        if self._size is not None:
            return self._size
        return dist.get_world_size() if dist.is_initialized() else 1

    def _compare(self) -> None:
        both = torch.stack([self._sum, -self._sum])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        if int(both[0]) != -int(both[1]):
            raise UserError(
                "the same batches on every rank are needed, of which each takes its part; the ranks' batches differ (within "
                f"the last {min(EVERY, self._num_batches)}); seed what draws at random in dataset, sampler, collator alike"
            )


def checksum(tensor: Tensor) -> Tensor:
    """Return a number that tells tensors of different contents or order apart, but for rare chance.

    Of a large tensor it looks at some thousand entries, evenly spread: examples drawn at random differ in most.

    >>> int(checksum(torch.tensor([1, 2]))) == int(checksum(torch.tensor([2, 1])))
    False
    """
    flat = tensor.detach().reshape(-1)
    raw = flat[:: 1 + flat.numel() // SAMPLES].contiguous().view(torch.uint8).long()
    places = torch.arange(1, raw.numel() + 1, device=raw.device)
    return ((raw + 1) * places).sum() % _PRIME
