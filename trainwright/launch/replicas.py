"""Replicas of a plan: groups of ranks of which each runs the whole plan, and between which no gradient is summed.

ranks of replica 0      0 … k − 1            k: the ranks of the plan
ranks of replica 1      k … 2k − 1           replicas are the outermost axis, over the slowest link
across                  c, k + c, 2k + c …   the ranks at one place of all replicas, which hold the same shards
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def replica_folder(index: int | str) -> str:
    """Return the name of the folder of a replica's checkpoints, in that of the run's."""
    return f"replica-{index}"


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
    acrosses = [dist.new_group(list(range(each, number * size, size))) for each in range(size)]
    here = Replicas(number, index, rank, size, None, acrosses[rank])
    return replace(here, inside=group_inside(here))


def group_inside(here: Replicas, backend: str | None = None) -> Any:
    """Return a new process group of the ranks of this replica; a collective call of all ranks, which make those of all."""
    import torch.distributed as dist

    if here.is_only:
        return dist.new_group(backend=backend)
    each = [list(range(first * here.size, (first + 1) * here.size)) for first in range(here.number)]
    return [dist.new_group(ranks, backend=backend) for ranks in each][here.index]
