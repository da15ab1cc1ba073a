"""What a collective costs on one mesh axis: a latency per hop and a volume over a bandwidth, as in a ring.

With n ranks on the axis, α its latency per hop and β the bytes per second that one rank sends while all do:

    all_gather, reduce_scatter   (n − 1) α + (n − 1)/n · B/β     B: bytes of the full tensor (gathered, to be reduced)
    all_reduce                 2 (n − 1) α + 2 (n − 1)/n · B/β   B: bytes of the tensor, the same on every rank
    all_to_all                   (n − 1) α + (n − 1)/n · B/β     B: bytes of one rank's local tensor

Over several nodes β is what `artifacts.cluster.axis_over` says: rings use the network of all members, an all-to-all a device's own.
A ring is an upper estimate where a library uses trees for small messages over many ranks: n grows the latency term
linearly here. A kind may take a factor of that. `calibrate` fits α, β and the factors to these same formulas, so a measured
axis predicts what was measured.
"""

from __future__ import annotations

from typing import Literal, get_args

from ..artifacts import MeshAxis

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
KINDS: tuple[str, ...] = get_args(Collective)


def seconds(kind: Collective, axis: MeshAxis, num_bytes: float) -> float:
    """Return the time of one collective over `axis`; `num_bytes` is of the full tensor (all_to_all: of the local one).

    An axis of one rank costs nothing. Raises `ValueError` for an unknown `kind` or a negative size.

    >>> axis = MeshAxis(name="gpu", size=4, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    >>> round(seconds("all_gather", axis, 4_000_000), 6)
    0.00303
    >>> seconds("all_reduce", axis, 4_000_000) == 2 * seconds("reduce_scatter", axis, 4_000_000)
    True
    """
    if num_bytes < 0:
        raise ValueError(f"a collective needs a size of at least 0 bytes; got {num_bytes}")
    num_hops, fraction_sent = terms(kind, axis.size)
    rate = axis.rates.get(kind, axis.bandwidth_bytes_per_s)
    plain_s = num_hops * axis.latency_s + fraction_sent * num_bytes / rate
    return plain_s * axis.factors.get(kind, 1.0)


GLOO_FACTORS = {"reduce_scatter": 2.0}
"""Gloo reduces and scatters by an all-reduce, which sends twice as much."""


def terms(kind: Collective, num_ranks: int) -> tuple[int, float]:
    """Return what multiplies the latency (hops), and what multiplies bytes over bandwidth, for `num_ranks` on the axis.

    >>> terms("all_reduce", 4)
    (6, 1.5)
    """
    if kind not in KINDS:
        raise ValueError(f"a collective is one of {', '.join(KINDS)}; got {kind!r}")
    passes = 2 if kind == "all_reduce" else 1
    return passes * (num_ranks - 1), passes * (num_ranks - 1) / num_ranks
