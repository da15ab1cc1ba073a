"""Replicas of a plan: groups of ranks of which each runs the whole plan, and between which no gradient is summed.

ranks of replica 0      0 … k − 1            k: the ranks of the plan
ranks of replica 1      k … 2k − 1           replicas are the outermost axis, over the slowest link
across                  c, k + c, 2k + c …   the ranks at one place of all replicas, which hold the same shards
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replicas:
    """This rank's place: in replica `index` of `number`, whose `size` ranks it is one of.

    inside: the process group of the replica's ranks, `None` for all ranks, where there is one replica. across: that of the
    ranks at the same place of all replicas, `None` where there is one.
    """

    number: int = 1
    index: int = 0
    rank: int = 0
    size: int = 1
    inside: Any = None
    across: Any = None

    @property
    def ranks(self) -> list[int]:
        """The ranks of this replica among all."""
        return list(range(self.index * self.size, (self.index + 1) * self.size))

    @property
    def is_only(self) -> bool:
        """True where nothing is replicated."""
        return self.number == 1


def replicas_of(number: int) -> Replicas:
    """Cut the ranks that there are into `number` replicas; a collective call.

    >>> from trainwright.launch import process_group
    >>> with process_group():
    ...     here = replicas_of(1)
    >>> here.number, here.ranks
    (1, [0])
    """
    import torch.distributed as dist

    size = dist.get_world_size() // number
    index, rank = divmod(dist.get_rank(), size)
    if number == 1:
        return Replicas(rank=rank, size=size)
    insides = [dist.new_group(list(range(each * size, (each + 1) * size))) for each in range(number)]
    acrosses = [dist.new_group(list(range(each, number * size, size))) for each in range(size)]
    return Replicas(number, index, rank, size, insides[index], acrosses[rank])
