"""`simulate`: clients of all speeds on a clock that is only counted, in one process; `replay`: a recorded order of arrivals.

Every client works on one model at a time, the one it was last sent; work takes the seconds that its `duration_s` says. The same
`Server` runs behind Flower's messages: for the same order of arrivals it computes the same bits there and here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..artifacts import UserError, check_range
from .arrays import Arrays
from .checks import whole
from .server import Event, Sent, Server

State = dict[str, Any]
"""What a client keeps between two pieces of work: arrays, numbers and text by name; empty at first."""
ClientUpdate = Callable[[State, Arrays, Mapping[str, Any]], tuple[Any, State]]
"""`client_update(state, arrays, config) -> (delta, state)`: the change to `arrays` that a client's work makes."""
Callback = Callable[[Server, float], bool | None]
_SLACK = 1e-6
"""Of an interval: what arrives at a tick, but for rounding, is in time for it."""


@dataclass
class SimulatedClient:
    """A client on the simulated clock.

    update: its work. duration_s: the seconds that its k-th piece of work takes (k = 0, 1, …), a number for always the same.
    away: spells (from, to), seconds on the clock, in which it can be reached by nothing: work under way goes on when it is
    back, with the model that it has. importance, predicted_s: as for `Server.enroll`.
    """

    update: ClientUpdate
    duration_s: Callable[[int], float] | float = 1.0
    importance: float = 1.0
    predicted_s: float | None = None
    away: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        check_range(
            "a simulated client", update=(self.update, "a function of (state, arrays, config)", callable),
            away=(self.away, "pairs (from, to) with from < to", lambda value: all(begin_s < end_s for begin_s, end_s in value)),
        )  # fmt: skip

    def takes_s(self, number: int) -> float:
        """Return the seconds of its piece of work `number`."""
        found = self.duration_s(number) if callable(self.duration_s) else self.duration_s
        check_range("a simulated client", duration_s=(found, "above 0 and finite", lambda value: 0 < value < math.inf))
        return float(found)

    def finished_s(self, start_s: float, takes_s: float) -> float:
        """Return when work that begins at `start_s` is done, spells away added."""
        for begin_s, end_s in sorted(self.away):
            if end_s > start_s and begin_s < start_s + takes_s:
                takes_s += end_s - max(begin_s, start_s)
        return start_s + takes_s

    def back_s(self, now_s: float) -> float:
        """Return when it can be reached, `now_s` where it can be now."""
        return max((end_s for begin_s, end_s in self.away if begin_s <= now_s < end_s), default=now_s)


class Together(Protocol):
    """Computes the work of many clients at once: a result a piece of work, in their order; see `VectorisedTraining`."""

    def __call__(self, works: Sequence[tuple[str, State, Arrays, Mapping[str, Any]]]) -> list[tuple[Any, State]]: ...


@dataclass
class Simulation:
    """How a simulated run ended: `server` with its model, the time on the clock, and every client's state."""

    server: Server
    now_s: float
    states: dict[str, State]
    num_updates: int = 0


def simulate(
    server: Server,
    clients: Mapping[str, SimulatedClient],
    *,
    max_aggregations: int | None = None,
    max_s: float = math.inf,
    callback: Callback | None = None,
    together: Together | None = None,
    states: Mapping[str, State] | None = None,
    start_s: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> Simulation:
    """Run `server` with `clients` until so many aggregations, or so many seconds on the simulated clock, are over.

    clients: by name; those that the server does not know are enrolled. callback: called with the server and the time
    after each aggregation; True ends the run. together: computes the work of several clients at once, in place of
    their `update`. states, start_s: of a run that goes on (`Simulation.states`, `.now_s`). progress: told, in words, at
    each hundredth aggregation. At least one of the two limits is needed.

    Raises `UserError` without a limit, without clients, and where nothing can happen any more (all answers are lost and
    there is no time to live).

    >>> import numpy as np
    >>> from trainwright.federated import FedFix
    >>> def towards(goal):
    ...     return lambda state, arrays, config: ({"w": (goal - arrays["w"]) / 2}, state)
    >>> clients = {"fast": SimulatedClient(towards(0.0), 0.5, predicted_s=0.5),
    ...            "slow": SimulatedClient(towards(4.0), 1.0, predicted_s=1.0)}
    >>> done = simulate(Server({"w": np.zeros(1)}, FedFix(0.5)), clients, max_aggregations=2)
    >>> done.now_s, done.num_updates, done.server.arrays
    (1.0, 3, {'w': array([2.])})
    """
    check_range(
        "simulate", max_s=(max_s, "above 0", lambda value: value > 0),
        max_aggregations=(max_aggregations, "whole, of at least 1, or None", lambda value: value is None or whole()(value)),
        clients=(clients, "SimulatedClients by name", _are_simulated),
    )  # fmt: skip
    if max_aggregations is None and math.isinf(max_s):
        raise UserError("an end of the run is needed, max_aggregations or max_s; got neither; give one")
    if not clients:
        raise UserError("clients are needed, at least one; got none; give them by name")
    run = _Run(
        server, clients, Limit(max_aggregations, max_s), callback, together, dict(states or {}), start_s, progress
    )
    return run.until_its_end()


def _are_simulated(clients: Any) -> bool:
    return isinstance(clients, Mapping) and all(isinstance(each, SimulatedClient) for each in clients.values())


@dataclass(frozen=True)
class Limit:
    """When a simulated run ends."""

    max_aggregations: int | None
    max_s: float


@dataclass
class _Work:
    """A piece of work on the clock; the result is computed when it is first asked for."""

    sent: Sent
    result: tuple[Any, State] | None = None


@dataclass(order=True)
class _Entry:
    due_s: float
    number: int
    now_s: float = field(compare=False)
    act: Callable[[float], None] = field(compare=False)


class _Run:
    def __init__(
        self, server: Server, clients: Mapping[str, SimulatedClient], limit: Limit, callback: Callback | None,
        together: Together | None, states: dict[str, State], start_s: float, progress: Callable[[str], None] | None,
    ) -> None:  # fmt: skip
        self.server, self.clients, self.limit = server, clients, limit
        self.callback, self.together, self.progress = callback, together, progress
        self.states: dict[str, State] = {name: states.get(name, {}) for name in clients}
        self.start_s = self.now_s = start_s
        self.first_version = server.version
        self.num_updates, self.over = 0, False
        self.works: dict[str, _Work] = {}
        self.free_s = dict.fromkeys(clients, start_s)
        """When each client has done what it was sent."""
        self.numbers = dict.fromkeys(clients, 0)
        self.queue: list[_Entry] = []
        self.num_entries = self.num_ticks = 0

    def until_its_end(self) -> Simulation:
        for name, client in self.clients.items():
            if name not in self.server.clients.known:
                self.server.enroll(name, client.importance, client.predicted_s)
        self._resume_outstanding()
        self._send_all(self.now_s)
        self._next_tick()
        while not self.over:
            if not self.queue:
                raise UserError(
                    "clients that answer are needed; none is at work and nothing is due any more; give Limits(ttl_s=…), so that "
                    "work that is lost is sent out anew"
                )
            entry = heapq.heappop(self.queue)
            if entry.now_s > self.limit.max_s:
                self.now_s = self.limit.max_s
                break
            self.now_s = max(self.now_s, entry.now_s)
            entry.act(self.now_s)
        return Simulation(self.server, self.now_s, self.states, self.num_updates)

    def _resume_outstanding(self) -> None:
        """A server that goes on awaits answers to models that are gone: those clients are asked anew past their time to live."""
        for work in self.server.outstanding.values():
            self._watch(work.sent_s)

    def _at(self, due_s: float, act: Callable[[float], None], slack_s: float = 0.0) -> None:
        heapq.heappush(self.queue, _Entry(due_s + slack_s, self.num_entries, due_s, act))
        self.num_entries += 1

    def _next_tick(self) -> None:
        if (interval_s := self.server.rule.interval_s) is not None:
            self.num_ticks += 1
            self._at(self.start_s + self.num_ticks * interval_s, self._tick, _SLACK * interval_s)

    def _tick(self, now_s: float) -> None:
        if self.server.tick(now_s) is not None:
            self._aggregated(now_s)
        self._next_tick()

    def _watch(self, sent_s: float) -> None:
        if not math.isinf(ttl_s := self.server.limits.ttl_s):
            self._at(sent_s + ttl_s, self._expire, slack_s=ttl_s * 2 * _SLACK)

    def _expire(self, now_s: float) -> None:
        if self.server.expire(now_s * (1 + 2 * _SLACK)) is not None:
            self._aggregated(now_s)
        elif not self.over:
            self._send_all(now_s)

    def _send_all(self, now_s: float) -> None:
        for name in self.server.ready():
            client = self.clients.get(name)
            if client is None:
                continue
            if (back_s := client.back_s(now_s)) > now_s and not self.server.rule.is_synchronous:
                self._at(back_s, self._send_all)
            else:
                self._send(name, client, now_s)

    def _send(self, name: str, client: SimulatedClient, now_s: float) -> None:
        work = _Work(self.server.send(name, now_s))
        begin_s = max(now_s, self.free_s[name])
        self.free_s[name] = client.finished_s(begin_s, client.takes_s(self.numbers[name]))
        self.numbers[name] += 1
        self.works[name] = work
        self._at(self.free_s[name], lambda at_s: self._arrive(name, work, at_s))
        self._watch(now_s)

    def _arrive(self, name: str, work: _Work, now_s: float) -> None:
        delta, self.states[name] = self._result(name, work)
        if self.works.get(name) is work:
            del self.works[name]
        before = self.server.version
        self.server.receive(delta, work.sent.version, name, now_s)
        if self.server.version > before:
            self._aggregated(now_s)
        elif not self.over:
            self._send_all(now_s)

    def _result(self, name: str, work: _Work) -> tuple[Any, State]:
        if work.result is None and self.together is not None and self.works.get(name) is work:
            self._compute_together()
        if work.result is None:
            found = self.clients[name].update(self.states[name], work.sent.arrays, work.sent.config)
            if not isinstance(found, tuple) or len(found) != 2:
                raise UserError(
                    f"a client's work needs to return (delta, state); that of {name} returned {type(found).__name__}; return both"
                )
            work.result = found
            self.num_updates += 1
        return work.result

    def _compute_together(self) -> None:
        """Compute all work under way whose client has nothing older to do: its state is what it will begin with."""
        assert self.together is not None
        open_works = {name: work for name, work in self.works.items() if work.result is None}
        tasks = [(name, self.states[name], work.sent.arrays, work.sent.config) for name, work in open_works.items()]
        for work, result in zip(open_works.values(), self.together(tasks), strict=True):
            work.result = result
        self.num_updates += len(tasks)

    def _aggregated(self, now_s: float) -> None:
        done = self.server.version - self.first_version
        if self.callback is not None and self.callback(self.server, now_s):
            self.over = True
        if self.progress is not None and done % 100 == 0:
            self.progress(f"aggregation {done}, {now_s:.4g} s on the clock, {len(self.server.refusals)} refused")
        if self.limit.max_aggregations is not None and done >= self.limit.max_aggregations:
            self.over = True
        if not self.over:
            self._send_all(now_s)


def replay(server: Server, clients: Mapping[str, ClientUpdate], events: Iterable[Event]) -> dict[str, State]:
    """Repeat a recorded order of sending, arrivals and aggregations on `server`; return the clients' states.

    events: a `Server.journal`, of a run behind Flower, say. The server has to be as that one was at its start.

    Raises `UserError` where the events do not fit: an answer to what was never sent, say.

    >>> import numpy as np
    >>> from trainwright.federated import AsyncFedAvg
    >>> def towards_one(state, arrays, config):
    ...     return {"w": 1 - arrays["w"]}, state
    >>> def server():
    ...     new = Server({"w": np.zeros(1)}, AsyncFedAvg(weighted=False), keep_journal=True)
    ...     new.enroll("ann")
    ...     return new
    >>> recorded = simulate(server(), {"ann": SimulatedClient(towards_one)}, max_aggregations=3).server
    >>> again = server()
    >>> _ = replay(again, {"ann": towards_one}, recorded.journal)
    >>> again.arrays == recorded.arrays
    True
    """
    states: dict[str, State] = {name: {} for name in clients}
    held: dict[tuple[str, int], Sent] = {}
    for event in events:
        if event.kind == "send":
            held[event.client, event.version] = server.send(event.client, event.now_s)
        elif event.kind == "receive":
            sent = held.get((event.client, event.version))
            if sent is None:
                raise UserError(
                    f"events that fit are needed; {event.client} answers version {event.version}, never sent"
                )
            if event.client not in clients:
                raise UserError(
                    f"the work of each client is needed; there is none for {event.client}; add it to clients"
                )
            delta, states[event.client] = clients[event.client](states[event.client], sent.arrays, sent.config)
            server.receive(delta, event.version, event.client, event.now_s)
        elif event.kind == "expire":
            server.expire(event.now_s)
        elif server.version < event.version:
            server.tick(event.now_s)
    return states
