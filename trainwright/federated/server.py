"""`Server`: the one update rule with stochastic weights, without a framework, a network or a clock of its own.

    send(client)                       → the model for a client, and its version               `Server.send`
    receive(delta, version, client)    → a change; refused, kept, or the reason to aggregate   `Server.receive`
    tick(now_s)                        → rules on a clock: aggregate what has come             `Server.tick`
    expire(now_s)                      → work past its time to live is given up                `Server.expire`

Whoever drives it (`simulate`'s clock, Flower's messages) tells it the time; nothing here waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..artifacts import Refusal, UserError, check_range
from .arrays import Arrays, Sum, as_arrays, clipped, fault_of, num_bytes
from .checks import positive, whole
from .clients import Clients
from .rules import Rule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """A model on its way to a client; `config` goes with it: its `version`, and `accepted`, the client's last one that counted."""

    client: str
    arrays: Arrays
    version: int
    config: dict[str, Any]


@dataclass(frozen=True)
class RefusedReply:
    """A reply that was not taken, and why."""

    client: str
    version: int
    reason: str

    def __str__(self) -> str:
        return f"client {self.client}, version {self.version}: {self.reason}"


@dataclass(frozen=True)
class Event:
    """One line of a server's journal: `send`, `receive`, `aggregate` or `expire`, in the order in which they came."""

    kind: str
    client: str = ""
    version: int = -1
    now_s: float = 0.0


@dataclass
class Traffic:
    """Messages and bytes so far; the model of one version is counted for each client that it is sent to."""

    num_sent: int = 0
    num_received: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    num_clipped: int = 0


@dataclass(frozen=True)
class Limits:
    """What a server accepts: `ttl_s`, seconds from sending a model to its change's arrival; `max_norm`, to which a larger
    change is scaled down; `max_gap`, the most aggregations in between."""

    ttl_s: float = math.inf
    max_norm: float | None = None
    max_gap: int | None = None

    def __post_init__(self) -> None:
        check_range(
            "Limits",
            ttl_s=(self.ttl_s, "above 0", lambda value: value > 0),
            max_norm=(self.max_norm, "above 0, or None", lambda value: value is None or value > 0),
            max_gap=(self.max_gap, "whole, of at least 1, or None", lambda value: value is None or whole()(value)),
        )


@dataclass
class Outstanding:
    """Work that was sent out and has not come back."""

    version: int
    sent_s: float


@dataclass
class Round:
    """What has come since the last aggregation."""

    total: Sum
    arrived: dict[str, Outstanding] = field(default_factory=dict)
    """Of each client whose change is in `total`, what it was sent."""


class Server:
    """Holds a model, hands it to clients, and aggregates the changes that they send by a `Rule`.

    θ ← θ + η_g Σ_i d_i Δ_i over the clients that delivered since the last aggregation; `rules` says when, and what d_i is.

    arrays: the model by name, floating point; kept in their own types, summed in float64. rule: `FedAvg(…)`, `AsyncFedAvg()`,
    `FedFix(seconds)`, `FedBuff(size)`, `FedSpeedAverage(…)`. server_lr: η_g. limits: what is refused or scaled down.
    trust: how many measurements the predicted times count for (`Clients`); infinite: they are not corrected.
    keep_journal: keep every `Event`, so that `replay` can repeat the run.

    A reply that is not finite, of another shape, of a version that the client was not sent, sent twice, or past its time to
    live is refused: it is in `refusals` under the client's name, logged, and the round goes on without it.

    This is neither secure aggregation nor differential privacy: the server sees every change as it is.

    >>> from trainwright.federated import FedAvg
    >>> server = Server({"w": np.zeros(1)}, FedAvg())
    >>> for name in ("ann", "bob"):
    ...     server.enroll(name)
    >>> for name in server.ready():
    ...     sent = server.send(name)
    >>> server.receive({"w": np.array([1.0])}, sent.version, "ann") is None
    True
    >>> server.receive({"w": np.array([3.0])}, sent.version, "bob")
    {'w': array([2.])}

    Source: Fraboni et al. 2023 (see `trainwright.federated.rules`).
    """

    def __init__(
        self, arrays: Any, rule: Rule, *, server_lr: float = 1.0, limits: Limits | None = None, trust: float = math.inf,
        keep_journal: bool = False,
    ) -> None:  # fmt: skip
        check_range(
            "Server", server_lr=(server_lr, "above 0 and finite", positive),
            rule=(rule, "a Rule, such as FedAvg()", lambda value: isinstance(value, Rule)),
            limits=(limits, "Limits(…), or None", lambda value: value is None or isinstance(value, Limits)),
        )  # fmt: skip
        if server_lr != 1.0 and not rule.takes_server_lr:
            raise UserError(f"{type(rule).__name__} has no server_lr; got {server_lr}; leave it out")
        self.arrays: dict[str, np.ndarray] = as_arrays(arrays)
        self.rule, self.server_lr, self.limits = rule, server_lr, limits or Limits()
        self.clients = Clients(rule, trust)
        self.version = 0
        self.outstanding: dict[str, Outstanding] = {}
        self.memory: dict[str, Sum] = {}
        """What a rule keeps beside the model: FedSpeed's sum of duals."""
        self.refusals: list[RefusedReply] = []
        self.traffic = Traffic()
        self.journal: list[Event] | None = [] if keep_journal else None
        self._round = Round(Sum(self.arrays))

    def enroll(self, client: str, importance: float = 1.0, predicted_s: float | None = None) -> None:
        """Add a client, with its importance (its number of examples, say) and the seconds that its work is predicted to take."""
        self.clients.enroll(client, importance, predicted_s)

    def ready(self, present: Collection[str] | None = None) -> list[str]:
        """Return the clients that are to be sent the model now: idle ones; in rounds, those that a new round asks.

        A client that has delivered waits until its change is in the model. present: those that can be reached; `None`: all.
        """
        if self.rule.is_synchronous and (self.outstanding or self._round.arrived):
            return []
        busy = self.outstanding.keys() | self._round.arrived.keys()
        idle = [name for name in self.clients.known if name not in busy and (present is None or name in present)]
        return self.rule.chosen(idle, self.version) if idle else []

    def arrived(self) -> dict[str, Outstanding]:
        """Return the clients whose changes have come since the last aggregation, with what they were sent."""
        return dict(self._round.arrived)

    def send(self, client: str, now_s: float = 0.0) -> Sent:
        """Return the present model for `client` and note that its answer is awaited."""
        entry = self.clients.need(client)
        if not self.rule.is_settled:
            self.rule = self.clients.rule = self.rule.settled(self.clients.predicted_s())
        self.outstanding[client] = Outstanding(self.version, now_s)
        self.traffic.num_sent += 1
        self.traffic.bytes_down += num_bytes(self.arrays)
        self._note("send", client, self.version, now_s)
        config = {"version": self.version, "accepted": entry.last_accepted}
        return Sent(client, self.arrays, self.version, config)

    def receive(self, delta: Any, version: int, client: str, now_s: float = 0.0) -> Arrays | None:
        """Take the change that `client` made to the model of `version`; return the next model where this was what it waited for.

        delta: arrays of the model's names and shapes, the client's model minus the one it was sent. Raises `Refusal` where
        the model is no longer finite.
        """
        self._note("receive", client, version, now_s)
        reason = self._fault(delta, version, client, now_s)
        if reason is not None:
            return self.refuse(client, version, reason, now_s)
        self._take(delta, version, client, now_s)
        return self._aggregated_if_due(now_s)

    def refuse(self, client: str, version: int, reason: str, now_s: float = 0.0) -> Arrays | None:
        """Note that a client's answer of `version` does not count; what it was awaited for goes on without it."""
        self.refusals.append(RefusedReply(client, version, reason))
        log.warning("refused the reply of %s", self.refusals[-1])
        waited = self.outstanding.get(client)
        if waited is None or waited.version != version:
            return None
        del self.outstanding[client]
        return self._aggregated_if_due(now_s)

    def tick(self, now_s: float = 0.0) -> Arrays | None:
        """Aggregate what has come since the last call, for rules on a clock; return the next model, `None` where nothing came."""
        if not self._round.arrived:
            return None
        self._aggregate(now_s)
        return self.arrays

    def expire(self, now_s: float) -> Arrays | None:
        """Give up the work that is past its time to live; return the next model where only that was waited for."""
        late = [name for name, each in self.outstanding.items() if self._is_late(each, now_s)]
        for client in late:
            version = self.outstanding.pop(client).version
            self.clients.known[client].last_expired = version
            self._note("expire", client, version, now_s)
            log.warning("client %s is past its time to live with version %d", client, version)
        return self._aggregated_if_due(now_s) if late else None

    def _is_late(self, work: Outstanding, now_s: float) -> bool:
        return now_s - work.sent_s > self.limits.ttl_s * (1 + 1e-9)

    def _fault(self, delta: Any, version: int, client: str, now_s: float) -> str | None:
        """Return why a reply is refused."""
        entry, waited = self.clients.known.get(client), self.outstanding.get(client)
        if entry is None:
            return "no such client is enrolled"
        if waited is None or waited.version != version:
            if version == entry.last_accepted:
                return "it was sent twice"
            return (
                "it is past its time to live" if version == entry.last_expired else "the version is not one it was sent"
            )
        if self._is_late(waited, now_s):
            entry.last_expired = version
            return f"it is past its time to live, {self.limits.ttl_s:g} s"
        if self.limits.max_gap is not None and self.version - version >= self.limits.max_gap:
            return f"it is {self.version - version + 1} aggregations old, the most is {self.limits.max_gap}"
        return fault_of(delta, self.arrays)

    def _take(self, delta: Arrays, version: int, client: str, now_s: float) -> None:
        entry, waited = self.clients.known[client], self.outstanding.pop(client)
        delta, was_clipped = clipped(delta, self.limits.max_norm)
        gap = self.version + 1 - version
        self._round.total.add(delta, self.server_lr * self.clients.weight(client, gap))
        self._round.arrived[client] = waited
        entry.num_accepted += 1
        entry.num_aggregations += gap
        entry.measured_s += now_s - waited.sent_s
        entry.last_accepted = version
        self.traffic.num_received += 1
        self.traffic.bytes_up += num_bytes(delta)
        self.traffic.num_clipped += was_clipped

    def _aggregated_if_due(self, now_s: float) -> Arrays | None:
        arrived = self._round.arrived
        if self.rule.interval_s is not None or not self.rule.is_due(len(arrived), len(self.outstanding)):
            return None
        self._aggregate(now_s)
        return self.arrays

    def _aggregate(self, now_s: float) -> None:
        arrived = self._round.arrived
        if arrived:
            share = self.clients.share(arrived)
            new = self.rule.combine(self.arrays, self._round.total, self.memory, share, len(self.clients))
            self.arrays = self._finite(new)
            self._round = Round(Sum(self.arrays))
        self.version += 1
        self._note("aggregate", "", self.version, now_s)

    def _finite(self, new: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, value in new.items():
            if not np.isfinite(value).all():
                raise Refusal(
                    f"the run diverged at aggregation {self.version + 1}: {name} is no longer finite; try a smaller learning rate "
                    "at the clients or the server, Limits(max_norm=…), or fewer aggregations (a larger Δt, size)"
                )
        return new

    def _note(self, kind: str, client: str, version: int, now_s: float) -> None:
        if self.journal is not None:
            self.journal.append(Event(kind, client, version, now_s))
