"""What a server knows of its clients: importances, times, how often each took part; from these the weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..artifacts import UserError, check_range
from .checks import positive
from .rules import Rule


@dataclass
class Known:
    """One client, as the server knows it."""

    importance: float = 1.0
    predicted_s: float | None = None
    """The seconds that its work is predicted to take."""
    measured_s: float = 0.0
    """The seconds that its `num_accepted` pieces of work took together."""
    num_accepted: int = 0
    num_aggregations: int = 0
    """Aggregations from each model that it was sent to its change's own, added up: g_i times `num_accepted`."""
    last_accepted: int = -1
    """The version that its last accepted change was made from."""
    last_expired: int = -1

    @property
    def mean_s(self) -> float | None:
        """The mean of what was measured, `None` where nothing was."""
        return self.measured_s / self.num_accepted if self.num_accepted else None


@dataclass
class Clients:
    """The clients that a server knows by name, and the weight of a change of each.

    g_i, the aggregations from one change of client i to the next, is the rule's for the predicted times, counted as `trust`
    measurements, averaged with what was measured. A client without a prediction has its measured mean alone.
    """

    rule: Rule
    trust: float = math.inf
    known: dict[str, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("Server", trust=(self.trust, "of at least 0", lambda value: value >= 0))
        self._periods: dict[str, float] | None = None
        self._total = 0.0

    def __len__(self) -> int:
        return len(self.known)

    def enroll(self, client: str, importance: float, predicted_s: float | None) -> None:
        """Add a client, or change what is known of one."""
        check_range(
            f"client {client}",
            importance=(importance, "above 0 and finite", positive),
            predicted_s=(predicted_s, "above 0 and finite, or None", lambda value: value is None or positive(value)),
        )
        entry = self.known.setdefault(client, Known())
        entry.importance, entry.predicted_s = float(importance), predicted_s
        self._periods = None
        self._total = math.fsum(each.importance for each in self.known.values())

    def need(self, client: str) -> Known:
        """Return what is known of a client; `UserError` where there is no such."""
        if client not in self.known:
            raise UserError(f"an enrolled client is needed; {client!r} is not; call enroll({client!r}) first")
        return self.known[client]

    def predicted_s(self) -> dict[str, float]:
        """Return the predicted seconds of those clients that have any."""
        return {client: entry.predicted_s for client, entry in self.known.items() if entry.predicted_s is not None}

    def share(self, clients: Mapping[str, Any]) -> float:
        """Return Σ p_i of these clients; exactly 1 for all of them."""
        if not self.rule.weighted:
            return len(clients) / len(self.known)
        return math.fsum(self.known[client].importance for client in clients) / self._total

    def weight(self, client: str, gap: int) -> float:
        """Return d_i for a change of `client` that comes `gap` aggregations after the model that it was made from."""
        entry = self.known[client]
        importance = entry.importance / self._total
        if not self.rule.weighted:
            return self.rule.identical(importance, len(self.known))
        if self.rule.is_synchronous:
            return importance
        return importance * self._period(client, entry, gap)

    def _period(self, client: str, entry: Known, gap: int) -> float:
        total, count = entry.num_aggregations + gap, entry.num_accepted + 1
        if entry.predicted_s is None or self.trust == 0:
            return total / count
        predicted = self._predicted()[client]
        if math.isinf(self.trust):
            return predicted
        return (self.trust * predicted + total) / (self.trust + count)

    def _predicted(self) -> dict[str, float]:
        """Return the rule's g_i; clients without a prediction stand in the sums with what is the middle of the others."""
        if self._periods is None:
            given = self.predicted_s()
            middle = statistics.median(given.values())
            self._periods = self.rule.periods({client: given.get(client, middle) for client in self.known})
        return self._periods

    def as_json(self) -> dict[str, Any]:
        """Return everything known, for a file."""
        return {client: asdict(entry) for client, entry in self.known.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take everything known from a file's JSON."""
        self.known = {client: Known(**entry) for client, entry in saved.items()}
        self._total = math.fsum(each.importance for each in self.known.values())
        self._periods = None
