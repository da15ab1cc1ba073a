"""Links between simulated workers, and what messages and collectives take on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .requests import Members


@dataclass(frozen=True)
class Network:
    """Links between workers: all alike but those in `links`, {(from, to): (latency_s, bytes_per_s)}.

    >>> Network(1e-3, 1e6, links={(0, 1): (0.5, 1e3)}).slowest((0, 1, 2))
    (0.5, 1000.0)
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    links: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def link(self, source: int, to: int) -> tuple[float, float]:
        """Return (latency_s, bytes_per_s) of a link."""
        return self.links.get((source, to), (self.latency_s, self.bytes_per_s))

    def slowest(self, members: Members) -> tuple[float, float]:
        """Return the largest latency and the smallest bandwidth between members, which a collective has to wait for."""
        inside = set(members)
        own = [link for (source, to), link in self.links.items() if source in inside and to in inside]
        if len(own) < len(members) * (len(members) - 1):
            own.append((self.latency_s, self.bytes_per_s))
        return max(latency for latency, _ in own), min(speed for _, speed in own)

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds of one message over the usual link."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def collective_s(self, kind: str, num_bytes: int, members: Members) -> float:
        """Return the seconds of a collective of parts, for `broadcast` of a tensor, of `num_bytes`."""
        if len(members) == 1:
            return 0.0
        latency_s, bytes_per_s = self.slowest(members)
        one_s = latency_s + num_bytes / bytes_per_s
        return one_s * (math.ceil(math.log2(len(members))) if kind == "broadcast" else len(members) - 1)
