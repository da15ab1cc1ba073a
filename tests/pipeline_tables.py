"""Random tables of units between cuts, for tests of how stages are chosen."""

from __future__ import annotations

import random
from dataclasses import replace

from trainwright.artifacts import Tier
from trainwright.planner.pipeline.frontier import Level
from trainwright.planner.pipeline.table import Hop, Param, Table, Unit


def random_table(seed: int, offloads: bool = False) -> Table:
    """A model of up to nine units of up to four kinds, with uneven ends, tied ends now and then, links slow or fast.

    offloads: each level is also there with a part of what it keeps off the device.
    """
    rng = random.Random(seed)
    num_stages = rng.choice([2, 3, 4])
    num_units, num_kinds = rng.randint(num_stages, 9), rng.choice([1, 2])
    levels: list[tuple[Level, ...]] = []
    for _ in range(num_kinds):
        whole = rng.uniform(5, 20)
        own = [Level(whole)]
        for _ in range(rng.choice([0, 1, 2])):
            kept = own[-1].kept_bytes * rng.uniform(0.1, 0.8)
            own.append(Level(kept, own[-1].rerun_s + rng.uniform(0.05, 0.4), whole - kept))
        levels.append(tuple(own))
    tier = Tier(write_bytes_per_s=rng.choice([5, 20, 80]), read_bytes_per_s=20, overlap=rng.choice([0.5, 1]))
    if offloads:
        levels = [(*own, *(_offloaded(level, rng, tier) for level in own)) for own in levels]
    levels += [(Level(rng.uniform(1, 4)),), (Level(rng.uniform(1, 4)),)]
    units = []
    for place in range(num_units):
        is_last = place == num_units - 1
        kind = num_kinds if place == 0 else num_kinds + 1 if is_last else rng.randrange(num_kinds)
        forward = rng.uniform(0.1, 1) * (rng.choice([1, 4]) if is_last else 1)
        tied = ("p0",) if is_last and rng.random() < 0.5 else ()
        crossing = 0.0 if place == 0 else 1.0
        units.append(
            Unit(
                "" if place == 0 else f"b{place}", kind, forward, forward * rng.uniform(1.5, 2.5), (f"p{place}", *tied),
                reduce_s=rng.uniform(0, 0.1), work_bytes=rng.uniform(0, 5), given_bytes=crossing, returned_bytes=crossing,
            )
        )  # fmt: skip
    params = {f"p{place}": Param(rng.uniform(1, 8), rng.uniform(0, 0.3), 1.0) for place in range(num_units)}
    hops = tuple(Hop(rng.choice([0, 0.01]), rng.choice([1e3, 10.0, 3.0])) for _ in range(num_stages - 1))
    num_micro = rng.choice([2, num_stages, 2 * num_stages, 4 * num_stages])
    overlaps = rng.random() < 0.7
    return Table(tuple(units), tuple(levels), params, hops, num_micro, overlaps, tier=tier if offloads else None)


def _offloaded(level: Level, rng: random.Random, tier: Tier) -> Level:
    moved = level.kept_bytes * rng.uniform(0.3, 0.95)
    out_s, back_s = moved / tier.write_bytes_per_s, moved / tier.read_bytes_per_s
    return replace(level, kept_bytes=level.kept_bytes - moved, out_s=out_s, back_s=back_s, away_bytes=moved)
