"""Runs programs on real ranks: answers requests by torch.distributed, over gloo or NCCL, and counts the bytes sent.

An all-reduce is an all-to-all of parts, a sum of this rank's part in the order of ranks, and an all-gather: it sends the bytes
of a ring all-reduce, takes n parts of memory beside the tensor, and gives the same bits on every rank, in every run and on the
simulator. On CPUs both halves are messages in rounds (`trade`), since gloo's own collectives take up to twice as long on a slow
link.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..launch.flat import all_gather_flat
from .outbox import Outbox
from .requests import (
    Absent,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Count,
    Exchange,
    Form,
    Identify,
    Letter,
    Members,
    Now,
    RankAndSize,
    Receive,
    Request,
    Send,
    Steps,
    T,
)
from .sums import ordered_sum
from .trade import trade
from .traffic import Traffic

_LAST_TAG = 1 << 20
"""The tag of exchanges; the tags of methods are smaller."""
_Way = tuple[int | None, int]
"""The other worker, or `None` for a receive from any, and a tag."""

AWAITING = "awaits a message"
"""The name of a thread that receives what a rank does not wait for."""


class Ranks:
    """Runs programs on this rank of `group` (default: all ranks), whose other ranks run theirs; `traffic` counts the bytes sent.

    Ranks in requests are those within the group, which may be any process group, also one of a `DeviceMesh`. With NCCL,
    `Receive` needs a source and no time limit, since NCCL's receives cannot be abandoned.

    >>> import torch
    >>> from trainwright.launch import process_group
    >>> def mean(x):
    ...     place = yield Identify()
    ...     return (yield AllReduce(x)) / place.size
    >>> with process_group():
    ...     Ranks().run(mean(torch.ones(2)))
    tensor([1., 1.])
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.place = RankAndSize(dist.get_rank(group), dist.get_world_size(group))
        self.traffic = Traffic()
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes the context around each request, in which this rank may wait for others; used for a watchdog."""
        self._groups: dict[Members, Any] = {}
        self._store: Any = None
        self._forget()
        self._began_s = time.monotonic()

    def run(self, program: Steps[T]) -> T:
        """Answer the requests of `program` until it returns, and return its result."""
        answer: Any = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            with self.waiting():
                answer = self.answer(request)

    def answer(self, request: Request) -> Any:
        """Return the answer to one request."""
        match request:
            case Identify():
                return self.place
            case Absent():
                return {}
            case AllReduce(tensor, members):
                return self._all_reduce(tensor, members)
            case AllGather(tensor, members):
                return self._all_gather(tensor, members)
            case AllToAll(tensor, members):
                return self._all_to_all(tensor, members)
            case Broadcast(tensor, root, members):
                return self._broadcast(tensor, root, members)
            case Exchange(tensor, peers):
                return self._exchange(tensor, peers)
            case Send(tensor, to, tag):
                self._send(tensor, to, tag)
            case Receive():
                return self._receive(request)
            case Form(groups):
                self._form(groups)
            case Now():
                return time.monotonic() - self._began_s
            case Count(name, amount):
                return self._counters().add(name, amount)
            case Compute():
                pass
        return None

    def close(self) -> None:
        """End unanswered receives, and receive the messages that nobody asked for; all ranks call it at the end."""
        tables: list[_Table] = [_Table()] * self.place.size
        dist.all_gather_object(tables, self._table, group=self.group)
        self._answer_what_is_awaited(tables)
        self._take_in_what_is_left(tables)
        for future in self._due.values():
            future.exception(timeout=60)
        for thread in self._awaiting:
            thread.join()  # one that is still in the transport when Python ends aborts the process
        for outbox in self._outboxes.values():
            outbox.close()
        self._forget()

    def _answer_what_is_awaited(self, tables: Sequence[_Table]) -> None:
        """Send an empty message for each receive that no worker's `Send` answers."""
        for rank, table in enumerate(tables):
            for (source, tag), number in table.posted.items():
                sender = (rank + 1) % self.place.size if source is None else source
                if sender == self.place.rank:
                    for _ in range(number - _number_sent(tables, source, rank, tag)):
                        self._post(torch.zeros(0), rank, tag)

    def _take_in_what_is_left(self, tables: Sequence[_Table]) -> None:
        """Receive the messages that no `Receive` of this rank asked for, since their senders wait."""
        own, me = self._table.posted, self.place.rank
        forms = {tag: form for table in tables for (to, tag), form in table.forms.items() if to == me}
        for tag, form in forms.items():
            sources = [None] if (None, tag) in own else list(range(self.place.size))
            for source in sources:
                for _ in range(_number_sent(tables, source, me, tag) - own[source, tag]):
                    room = torch.empty_like(form, device="cpu")
                    dist.recv(room, None if source is None else self._global(source), self.group, tag)

    def _forget(self) -> None:
        """Reset the records of messages sent, received and awaited."""
        self._table = _Table()
        self._outboxes: dict[int, Outbox] = {}
        self._due: dict[_Way, Future[Letter]] = {}
        self._awaiting: list[Thread] = []

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send without waiting: gloo's send waits for the receiver, so one thread for each receiver sends, in order."""
        self.traffic.count("send", tensor)
        self._table.sent[to, tag] += 1
        self._table.forms[to, tag] = torch.empty_like(tensor, device="meta")
        self._post(tensor.detach().clone(memory_format=torch.contiguous_format), to, tag)

    def _post(self, tensor: Tensor, to: int, tag: int) -> None:
        there = self._global(to)
        if tensor.device.type != "cpu":  # NCCL's send waits on the device alone
            dist.send(tensor, there, self.group, tag)
            return
        if to not in self._outboxes:
            self._outboxes[to] = Outbox(f"worker {to}")
        self._outboxes[to].put(lambda: dist.send(tensor, there, self.group, tag))

    def _all_reduce(self, tensor: Tensor, members: Members | None) -> Tensor:
        size = self._size(members)
        flat = tensor.reshape(-1)
        length = -(-flat.numel() // size)
        parts = flat.new_zeros(size * length)
        parts[: flat.numel()] = flat
        own = ordered_sum(self._all_to_all(parts.view(size, length), members))
        return self._all_gather(own, members).view(-1)[: flat.numel()].view(tensor.shape)

    def _all_gather(self, tensor: Tensor, members: Members | None) -> Tensor:
        size, part = self._size(members), tensor.contiguous()
        if size == 1:
            return part.clone().unsqueeze(0)
        self.traffic.count("all_gather", part, size)
        rows = part.new_empty((size, part.numel()))
        if part.device.type == "cpu":
            self._trade([part.view(-1)] * size, rows, members)
        else:
            all_gather_flat(rows.view(-1), part.view(-1), group=self._group(members))
        return rows.view(size, *part.shape)

    def _all_to_all(self, parts: Tensor, members: Members | None) -> Tensor:
        size = self._size(members)
        if size == 1:
            return parts.clone()
        self.traffic.count("all_to_all", parts, size)
        given = torch.empty_like(parts, memory_format=torch.contiguous_format)
        if parts.device.type == "cpu":
            self._trade(parts.contiguous(), given, members)
        else:
            dist.all_to_all_single(given, parts.contiguous(), group=self._group(members))
        return given

    def _trade(self, parts: Sequence[Tensor] | Tensor, rooms: Tensor, members: Members | None) -> None:
        """Send part k to member k, and receive its part into `rooms[k]`, both directions at once, unlike gloo's collectives."""
        ranks = members or tuple(range(self.place.size))
        own = ranks.index(self.place.rank)
        rooms[own] = parts[own]
        others = [k for k in range(len(ranks)) if k != own and rooms[own].numel()]
        trade(
            {k: parts[k] for k in others},
            {k: rooms[k] for k in others},
            own,
            len(ranks),
            lambda part, k: dist.isend(part, self._global(ranks[k]), self.group, _LAST_TAG),
            lambda room, k: dist.irecv(room, self._global(ranks[k]), self.group, _LAST_TAG),
        )

    def _broadcast(self, tensor: Tensor, root: int, members: Members | None) -> Tensor:
        size, copy = self._size(members), tensor.clone(memory_format=torch.contiguous_format)
        if size > 1:
            self.traffic.count("broadcast", copy, size, is_root=root == self.place.rank)
            dist.broadcast(copy, self._global(root), group=self._group(members))
        return copy

    def _exchange(self, tensor: Tensor, peers: Members) -> dict[int, Tensor]:
        sent = tensor.contiguous()
        came = {peer: torch.empty_like(sent) for peer in sorted(peers)}
        for _ in came:
            self.traffic.count("send", sent)
        if sent.device.type == "cpu":
            trade(
                dict.fromkeys(came, sent),
                came,
                self.place.rank,
                self.place.size,
                lambda part, to: dist.isend(part, self._global(to), self.group, _LAST_TAG),
                lambda room, source: dist.irecv(room, self._global(source), self.group, _LAST_TAG),
            )
            return came
        ops = []
        for peer, room in came.items():
            there = self._global(peer)
            ops.append(dist.P2POp(dist.isend, sent, there, self.group, _LAST_TAG))
            ops.append(dist.P2POp(dist.irecv, room, there, self.group, _LAST_TAG))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return came

    def _receive(self, request: Receive) -> Letter | None:
        key = (request.source, request.tag)
        future = self._due.pop(key, None)
        self._table.posted[key] += future is None
        if future is None and request.within_s is None:
            return self._received(request)
        if future is None:
            future = Future()
            thread = Thread(target=self._await, args=(request, future), name=AWAITING, daemon=True)
            thread.start()
            self._awaiting = [each for each in self._awaiting if each.is_alive()] + [thread]
        try:
            return future.result(request.within_s)
        except Late:
            self._due[key] = future
            return None

    def _await(self, request: Receive, future: Future[Letter]) -> None:
        """Receive a message into `future`; runs on its own thread, since gloo closes a connection whose wait is abandoned."""
        try:
            future.set_result(self._received(request))
        except RuntimeError as error:
            future.set_exception(error)

    def _received(self, request: Receive) -> Letter:
        room = torch.empty_like(request.like, memory_format=torch.contiguous_format)
        source = None if request.source is None else self._global(request.source)
        sender = dist.recv(room, source, self.group, request.tag)
        return Letter(self._local(sender), room)

    def _form(self, groups: tuple[Members, ...]) -> None:
        """Make process groups; since all ranks make all groups in one order, other replicas' groups are made too."""
        new = [members for members in groups if members not in self._groups and len(members) < self.place.size]
        own = {tuple(self._global(rank) for rank in members): members for members in new}
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, list(own))
        for ranks in sorted({tuple(each) for everyone in asked for each in everyone}):
            group = dist.new_group(list(ranks))
            if ranks in own:
                self._groups[own[ranks]] = group

    def _group(self, members: Members | None) -> Any:
        return self.group if members is None or len(members) == self.place.size else self._groups[members]

    def _size(self, members: Members | None) -> int:
        return self.place.size if members is None else len(members)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _local(self, rank: int) -> int:
        return rank if self.group is None else dist.get_group_rank(self.group, rank)

    def _counters(self) -> Any:
        """Return the store of the shared counters: a TCPStore on rank 0, made by all ranks at its first use."""
        if self._store is None:
            self._store = _shared_store(self.place, self.group)
        return self._store


@dataclass
class _Table:
    """Counts of the messages that a rank sent (to, tag) and asked to receive (source, tag), with an example tensor of each."""

    sent: Counter[_Way] = field(default_factory=Counter)
    posted: Counter[_Way] = field(default_factory=Counter)
    forms: dict[_Way, Tensor] = field(default_factory=dict)


def _number_sent(tables: Sequence[_Table], source: int | None, to: int, tag: int) -> int:
    """Return the number of messages that `source`, or all workers, sent to `to` under `tag`."""
    return sum(table.sent[to, tag] for rank, table in enumerate(tables) if source in (None, rank))


def _shared_store(place: RankAndSize, group: Any) -> Any:
    import socket

    if place.size == 1:
        return dist.HashStore()
    own = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if place.rank == 0 else None
    address: list[Any] = [(_hostname(socket), own.port) if own is not None else None]
    dist.broadcast_object_list(address, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    host, port = address[0]
    return own or dist.TCPStore(host, port, is_master=False)


def _hostname(socket: Any) -> str:
    """Return a name by which other ranks reach this machine; the loopback address if it has none."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return str(socket.gethostname())
