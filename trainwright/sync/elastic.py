"""Runs programs on workers that come and go, over a store and gloo groups, one for each set of members.

    a round      one request. Each worker that has its answer counts itself; the last one proposes to commit. A worker that sees
                 a member fall silent proposes who is left. The first proposal is the decision for all: the store sets a key once
    after it     the members that are left make a new group, and the program gets `MembersChanged` and repeats its request
    newcomers    write that they want to join; they are admitted at the next step, and take over parameters and state

The store, a TCPStore, has to outlive the workers: `host_meeting` in a process that does nothing else, or torchrun's agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import UserError
from .pulse import Pulse
from .ranks import Ranks
from .requests import (
    Broadcast,
    Count,
    Form,
    Members,
    MembersChanged,
    RankAndSize,
    Receive,
    Request,
    Send,
    Steps,
    T,
)
from .trade import trade

_OP_TIMEOUT_S, _MEET_S, _GIVE_UP = 600.0, 120.0, 20.0
"""The seconds allowed for one transfer and for the first meeting; an unexplained failure is raised after so many silences."""
_TICK_S, _LOOK_S = 1e-3, 20e-3


@dataclass(frozen=True)
class Meeting:
    """A meeting of workers: the `address` ("host:port") of a store, the number that begin, and the silence that means gone.

    The first `num_workers` to come begin together; later ones join at the next round. silence_s: seconds without a sign of life
    after which a worker counts as gone; longer than a thread of a loaded machine may be delayed: half a second to two.
    """

    address: str
    num_workers: int
    silence_s: float = 1.0

    def store(self) -> Any:
        """Return a client of the store; raise `UserError` if none answers at the address."""
        host, _, port = self.address.rpartition(":")
        try:
            return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_MEET_S))
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"the address of a store, host:port, is needed to meet; {self.address!r} does not answer ({error}); start "
                "tw.sync.host_meeting() in a process that stays"
            ) from None


def host_meeting(port: int = 0) -> tuple[Any, str]:
    """Return a store for a meeting, which must live as long as the workers, and its address; port 0 takes a free port."""
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    return store, f"{_own_name()}:{store.port}"


class _Broken(Exception):
    """Raised for a transfer that not all members will complete."""


class _Connections:
    """Hands out the connection to `store` in which groups meet, and makes a spare one ahead, on a thread.

    Torch looks up a name to connect, which may take seconds; a group that is made anew, since a worker is gone, waits for none.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._current: Any = None
        self._spare = self._connecting()

    def current(self) -> Any:
        """Return the connection, the same until it is left."""
        if self._current is None:
            self._current, self._spare = self._spare.result(), self._connecting()
        return self._current

    def leave(self) -> None:
        """Hand out another connection from now on: a thread that was abandoned may wait in this one forever."""
        self._current = None

    def _connecting(self) -> Future[Any]:
        made = Future[Any]()

        def work() -> None:
            try:
                made.set_result(self._store.clone())
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=work, name="connect", daemon=True).start()
        return made


class Elastic(Ranks):
    """Runs programs on this worker together with the present members; ranks in requests are indices among these.

    A program that gets `MembersChanged` repeats its request; `on_change(place, gone)` has been called before. Requests among
    some of the members, and point-to-point messages, are refused. may_join: whether a late worker may join.
    """

    keeps_places: ClassVar[bool] = False
    """True if ranks never change, so that all workers have to be present at the beginning."""

    def __init__(self, meeting: Meeting, may_join: bool = True) -> None:
        self._meeting, self._store = meeting, meeting.store()
        self.number = int(self._store.add("tickets", 1)) - 1
        """This worker's number, unique in the run, in the order of arrival."""
        self._connections = _Connections(self._store)
        self._pulse = Pulse(self._store.clone(), self.number, meeting.silence_s)
        self._store.set(  # after the first heartbeat: the others watch a worker as soon as they know its name
            f"name/{self.number}", f"worker {self.number} (process {os.getpid()} on {socket.gethostname()})"
        )
        self.on_change: Callable[[RankAndSize, list[str]], None] = lambda place, gone: None
        self.on_newcomers: Callable[[], None] = lambda: None
        self._newcomers: list[int] = []
        self._pg: Any = None
        self._num_rounds = 0
        self._needs_founders = self.keeps_places or not may_join
        self.is_new = self.number >= meeting.num_workers
        if self.is_new and not may_join:
            raise UserError(
                f"a method that goes on with whoever is there is needed to join a run of {meeting.num_workers} workers that has "
                "begun; take diloco, local-sgd, easgd, lsgd, decentlam, gossip or just-one-byte"
            )
        self._start()
        if self.is_new:
            self._ask_to_join()
        else:
            self._meet(tuple(range(meeting.num_workers)))

    def _meet(self, founders: Members) -> None:
        try:
            self._store.wait([f"name/{each}" for each in founders], timedelta(seconds=_MEET_S))
        except RuntimeError:
            come = [each for each in founders if self._store.check([f"name/{each}"])]
            raise UserError(
                f"{len(founders)} workers are needed to begin; {len(come)} came within {_MEET_S:g} s; start the others, or give "
                "Meeting a smaller num_workers"
            ) from None
        try:
            self._enter(0, founders)
        except MembersChanged as change:
            if self._needs_founders:
                raise lost_at_the_beginning(len(founders), change) from None

    def _start(self) -> None:
        from .traffic import Traffic

        self.group, self.traffic = None, Traffic()
        self.waiting = contextlib.nullcontext
        self._began_s = time.monotonic()
        self._forget()

    def run(self, program: Steps[T]) -> T:
        """Admit waiting newcomers, then answer the requests of `program` until it returns."""
        if self._newcomers:
            self._let_in()
        answer: Any = None
        changed: MembersChanged | None = None
        while True:
            try:
                request = program.send(answer) if changed is None else program.throw(changed)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            changed = None
            try:
                with self.waiting():
                    answer = self.answer(request)
            except MembersChanged as change:
                changed = change

    def answer(self, request: Request) -> Any:
        """Return the answer to one request; raise `MembersChanged` if not all members got theirs."""
        if isinstance(request, Form | Send | Receive) or getattr(request, "members", None) is not None:
            raise UserError(
                f"a method whose workers all exchange with one another is needed where workers come and go; this one asks for "
                f"{type(request).__name__} among some; take diloco, local-sgd, lsgd with one group, decentlam or just-one-byte"
            )
        if isinstance(request, Count):
            return int(self._store.add(f"count/{request.name}", request.amount))
        if not hasattr(request, "tensor"):
            return super().answer(request)
        return self._round(request)

    def close(self) -> None:
        """Leave the run; the others continue."""
        self._pulse.end()

    def share(self, data: bytes | None) -> bytes:
        """Return the bytes `data` of the first member; the others give None."""
        while True:
            try:
                length = self._round(Broadcast(torch.tensor([len(data or b"")]), 0))
                own = (
                    torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    if data
                    else torch.zeros(int(length), dtype=torch.uint8)
                )
                return bytes(self._round(Broadcast(own, 0)).numpy().tobytes())
            except MembersChanged:
                if self.place.rank == 0 and data is None:
                    raise UserError(
                        "a worker that knows the run is needed to join it; all were gone before they had told; start anew"
                    ) from None

    def _round(self, request: Any) -> Any:
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        self._key = f"round/{self._epoch}/{number}"
        found, failure = None, None
        try:
            found = super().answer(request)
        except (_Broken, RuntimeError) as error:
            failure = error
        decision = json.loads(self._decided(failure))
        if "left" in decision:
            self._go_on_with(tuple(decision["left"]))
        self._newcomers = decision["new"]
        return found

    def _decided(self, failure: Exception | None) -> bytes:
        """Return the decision on a round, the same for all: that it is committed, with the newcomers, or who is left."""
        done = failure is None and self._store.add(f"{self._key}/done", 1) == self.place.size
        if done:
            self._propose({"new": self._asking()})
        began_s = time.monotonic()
        while not self._store.check([self._key]):
            self._leave_out_the_silent()
            if failure is not None and time.monotonic() - began_s > _GIVE_UP * self._meeting.silence_s:
                raise failure
            time.sleep(_TICK_S)
        return bytes(self._store.get(self._key))

    def _leave_out_the_silent(self) -> None:
        if gone := self._pulse.silent():
            self._propose({"left": [each for each in self._members if each not in gone]})

    def _propose(self, decision: dict[str, Any]) -> None:
        text = json.dumps(decision)
        if self._store.compare_set(self._key, "", text) == text.encode() and decision.get("new"):
            self._store.add("let in", len(decision["new"]))

    def _asking(self) -> list[int]:
        asked = self._store.get("asks").decode() if self._store.check(["asks"]) else ""
        return [int(number) for number in asked.split(",")[int(self._store.add("let in", 0)) : -1]]

    def _go_on_with(self, left: Members) -> None:
        gone = [self._name(each) for each in self._members if each not in left]
        if self.number not in left:
            raise UserError(
                f"signs of life within {self._meeting.silence_s:g} s are needed of each worker; this one, "
                f"{self._name(self.number)}, was silent for longer, and the others went on without it; join anew, or give "
                "Meeting a longer silence_s"
            )
        self._enter(self._epoch + 1, left)
        self.on_change(self.place, gone)
        raise MembersChanged(self.place, gone)

    def _let_in(self) -> None:
        members, newcomers = self._members, self._newcomers
        self._newcomers = []
        epoch, all_of_them = self._epoch + 1, (*members, *newcomers)
        if self.place.rank == 0:
            for each in newcomers:
                self._store.set(f"welcome/{each}", json.dumps([epoch, all_of_them]))
        with contextlib.suppress(MembersChanged):
            self._enter(epoch, all_of_them)
            self.on_change(self.place, [])
        self.on_newcomers()

    def _ask_to_join(self) -> None:
        self._store.append("asks", f"{self.number},")  # at once: one that dies here has asked, or has not
        try:
            self._store.wait([f"welcome/{self.number}"], timedelta(seconds=_OP_TIMEOUT_S))
        except RuntimeError:
            raise UserError(
                f"a run that goes on is needed to join it; the one at {self._meeting.address} let nobody in for "
                f"{_OP_TIMEOUT_S:g} s; see whether it has ended"
            ) from None
        epoch, members = json.loads(self._store.get(f"welcome/{self.number}"))
        with contextlib.suppress(MembersChanged):
            self._enter(epoch, tuple(members))

    def _enter(self, epoch: int, members: Members) -> None:
        """Make the group of `members`, or, if one of them falls silent meanwhile, that of the others."""
        self._epoch, self._members, self._num_rounds = epoch, members, 0
        self.place = RankAndSize(members.index(self.number), len(members))
        self._key = f"enter/{epoch}"
        self._pulse.watch(members)
        store = dist.PrefixStore(f"group/{epoch}", self._connections.current())
        timeout = timedelta(seconds=_OP_TIMEOUT_S)
        failure = None
        try:
            if len(members) > 1:
                self._pg = self._awaited(
                    lambda: dist.ProcessGroupGloo(store, self.place.rank, self.place.size, timeout)
                )
        except (_Broken, RuntimeError) as error:
            failure = error
            self._connections.leave()
        decision = json.loads(self._decided(failure))
        if "left" in decision:
            self._go_on_with(tuple(decision["left"]))

    def _awaited(self, do: Callable[[], Any]) -> Any:
        """Return the result of `do`, run on a thread that is abandoned if a member falls silent."""
        held: dict[str, Any] = {}

        def work() -> None:
            try:
                held["found"] = do()
            except Exception as error:
                held["error"] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        looked_s = time.monotonic()
        while thread.is_alive():
            thread.join(_TICK_S)
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                self._leave_out_the_silent()  # decided at once: one that is silent now may be heard again a moment later
                if self._store.check([self._key]):
                    thread.join(_TICK_S)
                    if thread.is_alive():
                        raise _Broken
        if "error" in held:
            raise held["error"]
        return held.get("found")

    def _all_gather(self, tensor: Tensor, members: Members | None) -> Tensor:
        part = tensor.contiguous()
        if self.place.size == 1:
            return part.clone().unsqueeze(0)
        self.traffic.count("all_gather", part, self.place.size)
        rows = [torch.empty_like(part) for _ in range(self.place.size)]
        pg = self._pg
        self._awaited(lambda: pg.allgather([rows], [part]).wait())
        return torch.stack(rows)

    def _all_to_all(self, parts: Tensor, members: Members | None) -> Tensor:
        if self.place.size == 1:
            return parts.clone()
        self.traffic.count("all_to_all", parts, self.place.size)
        given, sent, pg = torch.empty_like(parts.contiguous()), parts.contiguous(), self._pg
        self._awaited(lambda: pg.alltoall_base(given, sent, [], []).wait())
        return given

    def _broadcast(self, tensor: Tensor, root: int, members: Members | None) -> Tensor:
        copy = tensor.clone(memory_format=torch.contiguous_format)
        if self.place.size > 1:
            self.traffic.count("broadcast", copy, self.place.size, is_root=root == self.place.rank)
            options, pg = dist.BroadcastOptions(), self._pg
            options.rootRank, options.rootTensor = root, 0
            self._awaited(lambda: pg.broadcast([copy], options).wait())
        return copy

    def _exchange(self, tensor: Tensor, peers: Members) -> dict[int, Tensor]:
        sent, pg = tensor.contiguous(), self._pg
        came = {peer: torch.empty_like(sent) for peer in sorted(peers)}

        def swap() -> None:
            trade(
                dict.fromkeys(came, sent),
                came,
                self.place.rank,
                self.place.size,
                lambda part, to: pg.send([part], to, 0),
                lambda room, source: pg.recv([room], source, 0),
            )

        for _ in came:
            self.traffic.count("send", sent)
        if came:
            self._awaited(swap)
        return came

    def _size(self, members: Members | None) -> int:
        return self.place.size

    def _name(self, number: int) -> str:
        key = f"name/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else f"worker {number}"


def lost_at_the_beginning(num_workers: int, change: MembersChanged) -> UserError:
    """Return the error of the remaining workers if one that is needed leaves before all have begun."""
    return UserError(
        f"{num_workers} workers are needed to begin; {' and '.join(change.gone)} gone before they had; start them all again"
    )


def _own_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
