"""Limits the time of each activity of a rank: a run that hangs ends with the name of the rank and of the op.

Each rank has a thread that writes the rank's activity to a shared store. A rank whose activity lasts too long finds the rank
to blame, and ends with that message: a rank that has stopped writing; else one that is not in a collective, in which the
others wait for it; else the one that has completed the fewest collectives.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ...launch import WorkerError, fail
from ..activity import Activity

STORE_TIMEOUT_S = 5.0
# A rank is silent when it tells nothing new for this many periods: a loaded machine delays a thread for one or two.
SILENT_PERIODS = 6
Statuses = dict[int, dict[str, Any]]


class RankHung(WorkerError):
    """Raised when one activity of a rank has lasted longer than the time limit."""


class Watchdog:
    """Context manager that ends this rank when one activity lasts longer than `timeout_s`; constructing it is collective.

    `activity` is the communicator's. The timeout has to be longer than the longest legitimate wait, such as one for data.
    """

    def __init__(self, activity: Activity, timeout_s: float) -> None:
        self._activity, self._timeout_s = activity, timeout_s
        self._period_s = min(1.0, timeout_s / 4)
        self._ended = threading.Event()
        self._store = _shared_store() if dist.get_world_size() > 1 else None
        self._beat = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._tell()  # so that every rank is known, even one that stops at once
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._period_s):
            unheard, stuck = self._tell(), self._activity.now
            if time.monotonic() - stuck.since_s <= self._timeout_s:
                continue
            message = unheard or self._diagnosis()
            # What a suspended machine kept waiting has gone on meanwhile.
            if self._activity.now is stuck and not self._ended.is_set():
                fail(RankHung(message))

    def _tell(self) -> str | None:
        """Write this rank's activity to the store; return an error message if rank 0, which hosts the store, does not respond."""
        now, self._beat = self._activity.now, self._beat + 1
        status = {
            "beat": self._beat,
            "what": now.what,
            "is_collective": now.is_collective,
            "peer": now.peer,
            "step": self._activity.step,
            "num_collectives": self._activity.num_collectives,
        }
        self._own = status
        if self._store is None:
            return None
        try:
            self._store.set(str(dist.get_rank()), json.dumps(status))
        except (RuntimeError, ValueError):
            return (
                f"rank 0 hung: it does not respond; rank {dist.get_rank()} has waited in {now.what} for {self._limit}"
            )
        return None

    @property
    def _limit(self) -> str:
        return f"{self._timeout_s:g} s"

    def _diagnosis(self) -> str:
        def look() -> Statuses:
            # The others may be asking the same at this time: a rank that asks goes on telling.
            self._tell()
            return self._statuses()

        try:
            statuses, silent = listen(look, lambda: time.sleep(self._period_s))
        except (RuntimeError, ValueError):
            return f"rank 0 hung: it does not respond within {self._limit}"
        return describe_hang(statuses, silent, self._limit)

    def _statuses(self) -> Statuses:
        if self._store is None:
            return {0: self._own}
        ranks = [rank for rank in range(dist.get_world_size()) if self._store.check([str(rank)])]
        return {rank: json.loads(self._store.get(str(rank))) for rank in ranks}


def listen(look: Callable[[], Statuses], wait: Callable[[], None]) -> tuple[Statuses, list[int]]:
    """Return the ranks' last statuses, and the ranks that wrote nothing new during `SILENT_PERIODS` waits.

    >>> beats = iter([1, 1, 2])
    >>> listen(lambda: {0: {"beat": next(beats)}}, lambda: None)
    ({0: {'beat': 2}}, [])
    >>> listen(lambda: {0: {"beat": 1}}, lambda: None)
    ({0: {'beat': 1}}, [0])
    """
    before = after = look()
    silent = list(before)
    for _ in range(SILENT_PERIODS):
        wait()
        after = look()
        silent = [rank for rank in silent if after[rank]["beat"] == before[rank]["beat"]]
        if not silent:
            break
    return after, silent


def describe_hang(statuses: Mapping[int, Mapping[str, Any]], silent: Sequence[int], limit: str) -> str:
    """Return a message that names the rank to blame, its activity, and where the others wait.

    >>> waiting = {"what": "all_reduce over axis a0", "is_collective": True, "step": 3, "num_collectives": 9}
    >>> late = {"what": "data", "is_collective": False, "step": 3, "num_collectives": 8}
    >>> print(describe_hang({0: waiting, 1: late}, [], "60 s"))
    rank 1 hung: it has been at step 3 in data for more than 60 s; waiting: rank 0 in all_reduce over axis a0; see what
    keeps it, or allow more time
    """
    outside = [rank for rank, status in statuses.items() if not status["is_collective"]]
    fewest = min(status["num_collectives"] for status in statuses.values())
    behind = [rank for rank, status in statuses.items() if status["num_collectives"] == fewest]
    behind = _waited_for(statuses) or behind  # stages differ in their collectives by design
    blamed = list(silent) or outside or behind
    places = [f"at step {statuses[rank]['step']} in {statuses[rank]['what']}" for rank in blamed]
    how = "it does not respond; last heard of {}" if silent else f"it has been {{}} for more than {limit}"
    who = "; ".join(f"rank {rank} hung: {how.format(place)}" for rank, place in zip(blamed, places))
    waiting = "; ".join(f"rank {r} in {status['what']}" for r, status in statuses.items() if r not in blamed)
    waits = f"; waiting: {waiting}" if waiting else ""
    return f"{who}{waits}; see what keeps it, or allow more time"


def _waited_for(statuses: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks at the end of chains of waits for single peers, or those in a cycle; none if no rank waits for one peer.

    >>> _waited_for({0: {"peer": 1}, 1: {"peer": 0}, 2: {"peer": 1}})
    [0, 1]
    >>> _waited_for({0: {"peer": 1}, 1: {"peer": None}})
    [1]
    """
    found: set[int] = set()
    for rank in statuses:
        seen: list[int] = []
        while rank in statuses and rank not in seen and statuses[rank].get("peer") is not None:
            seen.append(rank)
            rank = int(statuses[rank]["peer"])
        if seen:
            found |= set(seen[seen.index(rank) :]) if rank in seen else {rank}
    return sorted(found)


def _shared_store() -> dist.TCPStore:
    """Return a store on rank 0 for the watchdogs alone, since the process group's cannot be used from another thread."""
    limit = timedelta(seconds=STORE_TIMEOUT_S)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store, told = None, [0]
    if dist.get_rank() == 0:
        store = dist.TCPStore(host, 0, None, True, timeout=limit, wait_for_workers=False)
        told = [store.port]
    dist.broadcast_object_list(told, 0)
    return store or dist.TCPStore(host, told[0], None, False, timeout=limit, wait_for_workers=False)
