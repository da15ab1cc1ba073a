"""Opens each rank's store, of disks at the last step that all ranks have committed, and sees that all have room."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...artifacts import UserError
from ...tiers import MemoryStore, TierStore, check_folders
from ...tiers.layout import NUM_SLOTS
from ...tiers.memory import check_available
from ...tiers.places import check_room
from .options import TierOptions


def open_store(options: TierOptions, rank: int, num_ranks: int, device: torch.device) -> TierStore | MemoryStore:
    """Return this rank's store: a new one in empty folders, or, with `resume`, at the last step that every rank has committed.

    With several ranks, each one has its own folder within every given folder. In the host's memory it is always new. A collective
    call.
    """
    if options.host:
        return MemoryStore(device, options.store)
    paths = check_folders(options.folders)
    if num_ranks == 1:
        return TierStore.open(paths, options.store) if options.resume else TierStore.create(paths, options.store)
    own = [path / f"rank-{rank}-of-{num_ranks}" for path in paths]
    if not options.resume:
        _check_untouched(paths, num_ranks)
        dist.barrier()  # all have looked before one makes anything
        for path in own:
            path.mkdir()
        return TierStore.create(own, options.store)
    if missing := [path for path in own if not path.is_dir()]:
        raise UserError(
            f"the folders of {num_ranks} ranks are needed to go on; {missing[0]} is not there; resume on as many"
        )
    last = torch.tensor([TierStore.last_step(own)], dtype=torch.int64)
    dist.all_reduce(last, dist.ReduceOp.MIN)
    return TierStore.open(own, options.store, step=int(last.item()))


def check_room_for_all(paths: Sequence[Path], num_bytes: int, num_ranks: int) -> None:
    """Raise `UserError` on every rank unless the disks have room for both versions of what all ranks put there, or the host for it.

    paths: none for the host's memory. num_bytes: of this rank. A collective call, after which each may take its room.
    """
    host = socket.gethostname()
    if not paths:
        _agree(
            lambda: check_available(sum(_of_all(Counter({host: num_bytes}), num_ranks), Counter[str]())[host]),
            num_ranks,
        )
        return
    share = -(-NUM_SLOTS * num_bytes // len(paths))
    wanted = Counter[tuple[str, int]]()
    for path in paths:
        wanted[host, path.stat().st_dev] += share
    everybodys = sum(_of_all(wanted, num_ranks), Counter[tuple[str, int]]())
    disks = {path.stat().st_dev: path for path in paths}
    _agree(lambda: check_room(list(disks.values()), [everybodys[host, disk] for disk in disks]), num_ranks)


def _agree(check: Callable[[], None], num_ranks: int) -> None:
    """Raise the `UserError` of any rank's check on every rank."""
    refusal = ""
    try:
        check()
    except UserError as error:
        refusal = str(error)
    if refusals := [each for each in _of_all(refusal, num_ranks) if each]:
        raise UserError(refusals[0])


def _of_all(own: Any, num_ranks: int) -> list[Any]:
    """Return what every rank has."""
    found = [own] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(found, own)
    return found


def _check_untouched(paths: list[Path], num_ranks: int) -> None:
    for path in paths:
        if (found := next(path.iterdir(), None)) is not None:
            raise UserError(
                f"an empty folder is needed for a new tier of {num_ranks} ranks; {path} holds {found.name}; empty it"
            )
