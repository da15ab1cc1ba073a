"""Prices a method on given links: seconds and bytes a step, by its record and the simulator's model of links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .network import Network
from .options import options_of
from .record import Size, SyncRecord

_OVER = 1000
"""The least number of steps over which a price is averaged; initial phases count as in a run of that length."""
PERIODS = ("period", "global_period")


@dataclass(frozen=True)
class Price:
    """The price of one method: seconds and bytes of one worker a step, on average over a thousand steps.

    exchange_s: the seconds of waiting for the link, without overlap. period: the steps between two exchanges of all
    parameters; 1 without such an option. state_bytes: the state kept between steps beside model and optimizer.
    """

    name: str
    step_s: float
    exchange_s: float
    sent_bytes: float
    state_bytes: int
    period: int
    gives_up: str

    def period_for(self, share: float) -> int:
        """Return the shortest period for which the exchange takes at most `share` of a step.

        >>> Price("diloco", 2.0, 1.0, 0.0, 0, 100, "").period_for(0.1)
        900
        """
        compute_s = self.step_s - self.exchange_s
        if not compute_s:
            return self.period
        return max(1, math.ceil(self.period * self.exchange_s * (1 - share) / (share * compute_s)))


def price(
    record: SyncRecord, size: Size, network: Network, compute_s: float, options: Mapping[str, Any] | None = None
) -> Price:
    """Return the price of a method between workers that each take `compute_s` for the gradient of a batch.

    size: parameters, bytes and workers; missing options get the method's defaults. network: the links between workers, all
    taken to be the usual one. Stragglers are not modelled; `simulate` has them.

    >>> from trainwright.sync import record
    >>> found = price(record("local-sgd"), Size((1000,), 4, 2), Network(0.0, 4000.0), compute_s=1.0)
    >>> found.step_s, found.sent_bytes  # 4000 bytes by a worker every eighth step
    (1.125, 500.0)
    """
    filled = replace(size, options={**options_of(record.cls), **record.defaults, **size.options, **(options or {})})
    period = next((int(filled.options[name]) for name in PERIODS if name in filled.options), 1)
    over = period * math.ceil(_OVER / period) if period < _OVER else 10 * period
    exchange_s = record.exchange_s(filled, network, record.gradients(filled) * compute_s, over)
    return Price(
        record.name,
        record.gradients(filled) * compute_s + exchange_s,
        exchange_s,
        record.bytes_per_step(filled, over),
        record.state_bytes(filled),
        period,
        record.promises,
    )
