r"""When a server aggregates, and how much a client's change counts: four rules of one framework.

At its aggregation n the server takes

    θ^{n+1} = θ^n + η_g Σ_i ω_i(n) Δ_i,      ω_i(n) = d_i where client i delivered since aggregation n-1, else 0,

with Δ_i the change that client i made to the model *it was sent*. Only what changes the model is an aggregation: a tick of a
clock to which nobody delivered is none. Where client i takes part in one of g_i aggregations on average, E ω_i = d_i / g_i: the
run is unbiased, that is, heads for the minimum of Σ p_i f_i, exactly if E ω_i is in proportion to the importances p_i. So every
rule takes d_i = p_i g_i, and a rule is no more than *when* and its g_i:

    rule              aggregates                 g_i, for the time τ_i of a client's work
    FedAvg            when all have answered     1
    AsyncFedAvg       at each reply              τ_i Σ_j 1/τ_j
    FedFix(Δt)        every Δt seconds           ⌈τ_i / Δt⌉, times the part of the ticks at which somebody delivers
    FedBuff(K)        at every K replies         by simulation of the arrivals

Without weights (`weighted=False`: the papers' identical ones) the run heads for the minimum of Σ (p_i / g_i) f_i instead.

Source: Fraboni, Vidal, Kameni & Lorenzi 2023, A General Theory for Federated Optimization with Asynchronous and
Heterogeneous Clients Updates, JMLR 24 (arXiv:2206.10189); FedBuff: Nguyen et al. 2022, AISTATS (arXiv:2106.06639).
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from ..artifacts import UserError, check_range
from .arrays import Arrays, Sum
from .checks import in_unit, positive, whole
from .record import StrategyRecord

_ROUNDING = 1e-9
"""Of a quotient of times: 0.6 / 0.2 is 3.0000000000000004 or less, as it falls out, and means 3."""
_NUM_SIMULATED = 200
"""Jobs of the slowest client over which FedBuff's arrivals are simulated."""
_MOST_SIMULATED = 200_000


@dataclass(frozen=True)
class Rule(ABC):
    """When to aggregate, with what weights; abstract. See the module's description."""

    weighted: bool = field(default=True, kw_only=True)
    """Whether a change counts p_i g_i, or the same for all clients (`identical`)."""

    takes_server_lr: ClassVar[bool] = True
    """Whether the server's step may be scaled."""

    @property
    def is_synchronous(self) -> bool:
        """Whether clients are asked in rounds, and a round waits for all that were asked."""
        return False

    @property
    def interval_s(self) -> float | None:
        """The seconds between two aggregations of a rule on a clock, `None` for one that goes by replies."""
        return None

    @property
    def settings(self) -> dict[str, float | int | bool]:
        """Return the rule's settings by name, as a saved server keeps them."""
        return dict(vars(self))

    @property
    def is_settled(self) -> bool:
        """True where nothing of the rule waits for the clients' predicted times."""
        return True

    def settled(self, times_s: Mapping[str, float]) -> Rule:
        """Return the rule with what it takes from the clients' predicted times."""
        return self

    @abstractmethod
    def is_due(self, num_arrived: int, num_outstanding: int) -> bool:
        """Return whether to aggregate now that `num_arrived` changes came and `num_outstanding` are still out."""

    @abstractmethod
    def periods(self, times_s: Mapping[str, float]) -> dict[str, float]:
        """Return g_i for each client from the seconds that its work takes: aggregations from one of its own to the next."""

    @abstractmethod
    def identical(self, importance: float, num_clients: int) -> float:
        """Return d_i without weights; `importance` is p_i, all of them adding up to one."""

    def chosen(self, clients: Sequence[str], version: int) -> list[str]:
        """Return those of the idle `clients` that get the model of this version."""
        return list(clients)

    def combine(
        self, arrays: Arrays, total: Sum, memory: dict[str, Sum], share: float, num_clients: int
    ) -> dict[str, np.ndarray]:
        """Return the next model from `total` = η_g Σ d_i Δ_i; `share` is the p_i of those that delivered, added up."""
        return total.added_to(arrays)


@dataclass(frozen=True)
class FedAvg(Rule):
    """Aggregate when every client that was asked has answered, with weights p_i: θ ← θ + η_g Σ p_i Δ_i.

    fraction: of the clients that each round asks, drawn anew by `seed`; their p_i are then made to add up to one, as where
    some do not answer in time. Not for clients whose speeds differ much: a round takes as long as its slowest.

    >>> FedAvg(fraction=0.5).chosen(["a", "b", "c", "d"], version=0)
    ['a', 'c']

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
    (arXiv:1602.05629).
    """

    fraction: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(
            type(self).__name__,
            fraction=(self.fraction, "in (0, 1]", in_unit),
            seed=(self.seed, "whole, of at least 0", whole(0)),
        )

    @property
    def is_synchronous(self) -> bool:
        return True

    def is_due(self, num_arrived: int, num_outstanding: int) -> bool:
        return num_outstanding == 0

    def periods(self, times_s: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(times_s, 1.0)

    def identical(self, importance: float, num_clients: int) -> float:
        return 1.0 / num_clients

    def chosen(self, clients: Sequence[str], version: int) -> list[str]:
        size = math.ceil(self.fraction * len(clients) - _ROUNDING)
        if size == len(clients):
            return list(clients)
        drawn = np.random.default_rng([self.seed, version]).permutation(len(clients))[:size]
        return [clients[place] for place in sorted(drawn)]

    def combine(
        self, arrays: Arrays, total: Sum, memory: dict[str, Sum], share: float, num_clients: int
    ) -> dict[str, np.ndarray]:
        return total.added_to(arrays, 1.0 / share)


@dataclass(frozen=True)
class AsyncFedAvg(Rule):
    """Aggregate at each reply, with d_i = p_i τ_i Σ_j 1/τ_j, so that slow clients count as often as they ought to.

    The fastest per second, and the least steady: one client's change is a whole step, a slow one's a large one. Unweighted,
    each change counts 1, and client i as if its importance were in proportion to 1/τ_i.

    >>> AsyncFedAvg().periods({"fast": 1.0, "slow": 3.0})
    {'fast': 1.3333333333333333, 'slow': 4.0}
    """

    def is_due(self, num_arrived: int, num_outstanding: int) -> bool:
        return num_arrived > 0

    def periods(self, times_s: Mapping[str, float]) -> dict[str, float]:
        rate = math.fsum(1.0 / time_s for time_s in times_s.values())
        return {client: time_s * rate for client, time_s in times_s.items()}

    def identical(self, importance: float, num_clients: int) -> float:
        return 1.0


@dataclass(frozen=True)
class FedFix(Rule):
    """Aggregate every `seconds`, whoever has delivered, with d_i = p_i ⌈τ_i / Δt⌉ ρ.

    ρ is the part of the ticks at which somebody delivers, 1 wherever Δt is no shorter than the fastest client's time.
    Δt ≥ max τ is FedAvg; Δt → 0 is `AsyncFedAvg`, weights included. Not where times are all alike: FedAvg is then the
    same and simpler.

    seconds: Δt. Without, it is what `fedfix_interval_s` makes of the predicted times (`Server.enroll`) of the clients that are
    enrolled when the first model is sent, so that `share` of them finish in it; it stays so for the run.

    >>> FedFix(0.2).periods({"a": 0.6, "b": 0.61, "c": 0.2})
    {'a': 3.0, 'b': 4.0, 'c': 1.0}
    >>> FedFix().settled({"a": 0.6, "b": 0.7, "c": 20.0}).interval_s
    0.7
    """

    seconds: float | None = None
    share: float = 0.5

    def __post_init__(self) -> None:
        above = lambda value: value is None or positive(value)  # noqa: E731
        check_range(
            "FedFix",
            seconds=(self.seconds, "above 0 and finite, or None", above),
            share=(self.share, "in (0, 1]", in_unit),
        )

    @property
    def is_settled(self) -> bool:
        return self.seconds is not None

    def settled(self, times_s: Mapping[str, float]) -> FedFix:
        if self.seconds is not None:
            return self
        if not times_s:
            raise UserError(
                "FedFix needs the seconds between two aggregations, or predicted times to choose them by; got neither; give "
                "FedFix(seconds), or predicted_s for each client, such as predicted_work_s(plan, num_steps)"
            )
        return replace(self, seconds=fedfix_interval_s(times_s, self.share))

    @property
    def interval_s(self) -> float | None:
        return self.settled({}).seconds

    def is_due(self, num_arrived: int, num_outstanding: int) -> bool:
        return False

    def periods(self, times_s: Mapping[str, float]) -> dict[str, float]:
        seconds = self.settled(times_s).seconds
        assert seconds is not None
        ticks = {client: max(1, math.ceil(time_s / seconds - _ROUNDING)) for client, time_s in times_s.items()}
        busy = _busy_ticks(sorted(ticks.values()))
        return {client: count * busy for client, count in ticks.items()}

    def identical(self, importance: float, num_clients: int) -> float:
        return importance


@dataclass(frozen=True)
class FedBuff(Rule):
    """Aggregate at every `size` replies, with d_i = p_i / (the part of the aggregations that hold client i).

    Those parts come from a simulation of the arrivals with the clients' mean times. Unweighted, each change counts
    1 / size. Not with a `size` near the number of clients: it then waits for the slowest, as FedAvg does; one larger than
    that number never fills, so all clients together then count as a full buffer.

    >>> FedBuff(size=2).periods({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0})
    {'a': 2.0, 'b': 2.0, 'c': 2.0, 'd': 2.0}
    """

    size: int = 10

    def __post_init__(self) -> None:
        check_range("FedBuff", size=(self.size, "whole, of at least 1", whole()))

    def is_due(self, num_arrived: int, num_outstanding: int) -> bool:
        return num_arrived >= self.size or (num_arrived > 0 and num_outstanding == 0)

    def periods(self, times_s: Mapping[str, float]) -> dict[str, float]:
        return _buffered_periods(times_s, self.size)

    def identical(self, importance: float, num_clients: int) -> float:
        return 1.0 / min(self.size, num_clients)


def _busy_ticks(periods: Sequence[int]) -> float:
    """Return the part of the ticks that are a multiple of one of the periods."""
    if periods[0] == 1:
        return 1.0
    horizon = min(_NUM_SIMULATED * periods[-1], _MOST_SIMULATED)
    if horizon < 20 * periods[-1]:  # too long to count: as if they did not begin together
        return 1.0 - math.prod(1.0 - 1.0 / period for period in periods)
    busy = np.zeros(horizon, dtype=bool)
    for period in periods:
        busy[period - 1 :: period] = True
    return float(busy.mean())


def _buffered_periods(times_s: Mapping[str, float], size: int) -> dict[str, float]:
    """Return aggregations per inclusion of each client, all always at work but while their change waits in the buffer."""
    horizon_s = _NUM_SIMULATED * max(times_s.values())
    arrivals = [(time_s, client) for client, time_s in sorted(times_s.items())]
    heapq.heapify(arrivals)
    counts, buffer, num_aggregations = dict.fromkeys(times_s, 0), [], 0
    while arrivals and (arrivals[0][0] <= horizon_s + _ROUNDING * horizon_s or not all(counts.values())):
        now_s, client = heapq.heappop(arrivals)
        buffer.append(client)
        if len(buffer) < min(size, len(times_s)):
            continue
        num_aggregations += 1
        for each in buffer:
            counts[each] += 1
            heapq.heappush(arrivals, (now_s + times_s[each], each))
        buffer = []
        if num_aggregations * size > _MOST_SIMULATED and all(counts.values()):
            break
    return {client: num_aggregations / count for client, count in counts.items()}


def fedfix_interval_s(times_s: Mapping[str, float], share: float = 0.5) -> float:
    """Return a Δt for `FedFix`: the seconds within which `share` of the clients finish their work.

    times_s: seconds of each client's work, such as a plan predicts. share: 1 waits for all (FedAvg); less aggregates more
    often and on fewer changes. Half is what the benchmarks' runs with stragglers use.

    >>> fedfix_interval_s({"a": 1.0, "b": 2.0, "c": 30.0, "d": 2.5})
    2.0
    """
    check_range(
        "fedfix_interval_s", share=(share, "in (0, 1]", in_unit),
        times_s=(times_s, "a time above 0 for each client", lambda value: len(value) > 0 and all(map(positive, value.values()))),
    )  # fmt: skip
    ordered = sorted(times_s.values())
    return ordered[max(0, math.ceil(share * len(ordered) - _ROUNDING) - 1)]


_SHARED = {"client_state": "none", "up": "P", "down": "P"}
RECORDS = (
    StrategyRecord(
        name="fedavg", cls=FedAvg, summary="a round waits for all that it asked", server_state="1 P + 8 B/param",
        assumes="clients of much the same speed", **_SHARED,
        paper="McMahan et al. 2017, arXiv:1602.05629",
    ),
    StrategyRecord(
        name="async-fedavg", cls=AsyncFedAvg, summary="aggregates at each reply", server_state="1 P + 8 B/param",
        assumes="known or measured times; small steps, for it is unsteady", **_SHARED,
        paper="Fraboni et al. 2023, arXiv:2206.10189",
    ),
    StrategyRecord(
        name="fedfix", cls=FedFix, summary="aggregates every Δt seconds", server_state="1 P + 8 B/param",
        assumes="known or measured times", **_SHARED,
        paper="Fraboni et al. 2023, arXiv:2206.10189",
        departs="ticks at which nobody delivers do not count in d_i, so that Δt → 0 is the asynchronous rule at the same η_g",
    ),
    StrategyRecord(
        name="fedbuff", cls=FedBuff, summary="aggregates at every K replies", server_state="1 P + 8 B/param",
        assumes="known or measured times; K well below the number of clients", **_SHARED,
        paper="Nguyen et al. 2022, arXiv:2106.06639",
        departs="weights p_i over the part of the aggregations, so that it is unbiased; weighted=False is the paper's 1/K",
    ),
)  # fmt: skip
