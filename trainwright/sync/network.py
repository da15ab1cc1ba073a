"""Models the links between simulated workers, and the seconds of messages and collectives on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .requests import Members
from .trade import num_rounds

CommCall = tuple[str, int]
"""A call of torch.distributed, and the bytes of one part; of a broadcast, those of the tensor."""


TCP_WIRE = 1 + 66 / 1448 + 66 / 1448 / 2
"""Bytes on Ethernet for one byte by TCP: a header for 1448 bytes, and an acknowledgement, the other way, for two of these."""


@dataclass(frozen=True)
class Network:
    """The links between workers: all alike except those in `links`, {(from, to): (latency_s, bytes_per_s)}.

    wire: the bytes on the wire for each byte sent (`TCP_WIRE` on Ethernet, if all send and receive). burst_bytes: the bytes
    that an idle link sends at once.

    >>> Network(1e-3, 1e6, links={(0, 1): (0.5, 1e3)}).slowest((0, 1, 2))
    (0.5, 1000.0)
    >>> Network(0.0, 1e6, wire=1.05, burst_bytes=5000).message_s(1e5)
    0.1
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    links: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    wire: float = 1.0
    burst_bytes: float = 0.0

    def link(self, source: int, to: int) -> tuple[float, float]:
        """Return (latency_s, bytes_per_s) of a link."""
        return self.links.get((source, to), (self.latency_s, self.bytes_per_s))

    def slowest(self, members: Members) -> tuple[float, float]:
        """Return the largest latency and the smallest bandwidth between members, which bound a collective."""
        inside = set(members)
        own = [link for (source, to), link in self.links.items() if source in inside and to in inside]
        if len(own) < len(members) * (len(members) - 1):
            own.append((self.latency_s, self.bytes_per_s))
        return max(latency for latency, _ in own), min(speed for _, speed in own)

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds of one message over the usual link."""
        return self.latency_s + self.busy_s(num_bytes, self.bytes_per_s, is_idle=True)

    def busy_s(self, num_bytes: float, bytes_per_s: float, is_idle: bool) -> float:
        """Return the seconds for which a link is busy with `num_bytes`; is_idle: whether a burst is available."""
        burst = self.burst_bytes if is_idle else 0.0
        return max(0.0, num_bytes * self.wire - burst) / bytes_per_s

    def paid_s(self, paid_s: float, now_s: float, num_bytes: float, bytes_per_s: float) -> float:
        """Return the time until which a link is booked once `num_bytes` more are sent from now on, by a token bucket.

        The bytes have left at that time, or at once if it is past.

        >>> link = Network(0.0, 1000.0, burst_bytes=500)
        >>> first = link.paid_s(-1.0, 0.0, 300, 1000.0)
        >>> first, link.paid_s(first, 0.0, 300, 1000.0)  # the second leaves 0.1 s later
        (-0.2, 0.099...)
        """
        return max(paid_s, now_s - self.burst_bytes / bytes_per_s) + num_bytes * self.wire / bytes_per_s

    def collective_s(self, calls: Sequence[CommCall], members: Members, is_idle: bool = True) -> float:
        """Return the seconds of collectives that follow one another directly.

        all_to_all, all_gather: each member sends n − 1 parts, in the rounds of `trade`, each of which waits for one latency.
        broadcast: on a binomial tree, whose root sends to ⌈log₂ n⌉ members, the first of these to one fewer, and so on.
        """
        if len(members) == 1:
            return 0.0
        latency_s, load, bytes_per_s = self.collective(calls, members)
        return latency_s + self.busy_s(load, bytes_per_s, is_idle)

    def collective(self, calls: Sequence[CommCall], members: Members) -> tuple[float, float, float]:
        """Return the latency of collectives in seconds, the bytes on the busiest link, and its bytes a second."""
        n, (latency_s, bytes_per_s) = len(members), self.slowest(members)
        deep = math.ceil(math.log2(n))
        steps = sum(deep if kind == "broadcast" else num_rounds(n - 1, part) for kind, part in calls)
        load = sum(part * (deep * (deep + 1) / 2 if kind == "broadcast" else n - 1) for kind, part in calls)
        return steps * latency_s, load, bytes_per_s
