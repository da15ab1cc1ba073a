"""Sync methods under a plan: which can be taken between its replicas, and what each costs a step on the link between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .artifacts import Cluster, Plan, UserError

if TYPE_CHECKING:
    from torch import nn

    from .sync import Network, Price, SyncRecord

_BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class ReplicaLink:
    """The link between replicas: the axis that it is, bytes a second of each replica, both ways at once, and its latency."""

    axis: str
    bytes_per_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> ReplicaLink:
        """Return the link that a text says, `AXIS=RATE` or `AXIS=RATE,LATENCY`.

        >>> ReplicaLink.parse("node=100Mbit,2ms")
        ReplicaLink(axis='node', bytes_per_s=12500000.0, latency_s=0.002)
        """
        axis, equals, value = text.partition("=")
        rate, comma, late = (part.strip() for part in value.partition(","))
        bits, num_bytes = _quantity(rate, _BITS), _quantity(rate.removesuffix("/s"), _BYTES)
        latency_s = _quantity(late, _SECONDS) if comma else 0.0
        bytes_per_s = bits / 8 if bits is not None else num_bytes
        if not (equals and axis.strip()) or not bytes_per_s or latency_s is None:
            raise UserError(
                f"a link is AXIS=RATE or AXIS=RATE,LATENCY, as in node=100Mbit or node=1GB,2ms; got {text!r}; write one of these"
            )
        return cls(axis.strip(), bytes_per_s, latency_s)


def split(cluster: Cluster, link: ReplicaLink | None, replicas: int | None) -> tuple[Cluster, ReplicaLink, int]:
    """Return the hardware of one replica, the link between replicas, and how many there are.

    With a number of replicas, the hardware is that of one of them. Without, its outermost axis is that of replicas, and the
    link's own rate holds unless another is given. Raises `UserError` where there is no such axis or no rate.
    """
    if replicas is not None:
        if replicas < 2:
            raise UserError(f"at least 2 replicas are needed to price an exchange; got {replicas}; try 2")
        if link is None:
            raise UserError(
                "the link between replicas is needed to price an exchange; got none; add --link node=100Mbit, say"
            )
        return cluster, link, replicas
    outer = next((each for each in cluster.links if each.size > 1), None)
    if outer is None:
        raise UserError(
            f"hardware of several devices, or a number of replicas, is needed for --sync; {cluster.name} has one device; add "
            "--replicas N"
        )
    if link is not None and link.axis != outer.name:
        raise UserError(
            f"the outermost axis of {cluster.name}, {outer.name}, is the one of replicas; got a link of {link.axis}; write "
            f"--link {outer.name}=RATE, or add --replicas N"
        )
    own = link or ReplicaLink(outer.name, outer.bandwidth_bytes_per_s, outer.latency_s)
    links = tuple(each.model_copy(update={"size": 1}) if each is outer else each for each in cluster.links)
    inner = [each for each in links if each.size > 1] or [links[-1]]
    return cluster.model_copy(update={"links": tuple(inner)}), own, outer.size


@dataclass(frozen=True)
class Priced:
    """Methods between the replicas of a plan: their prices, the fastest step first, and why others cannot be taken."""

    prices: tuple[Price, ...]
    refused: Mapping[str, str]
    link: ReplicaLink
    replicas: int
    ranks_a_replica: int


def prices(
    plan: Plan, model: nn.Module, names: Sequence[str], link: ReplicaLink, replicas: int, options: Mapping[str, Any]
) -> Priced:
    """Price sync methods between replicas of `plan`, by their records and the plan's own predicted step.

    names: of methods; `auto` stands for all. options: each is given to the methods that have it. The ranks of a replica
    share its link. Raises `UserError` for an unknown method, and for an option that none of them has.
    """
    from . import sync
    from .sync import Size
    from .sync.options import check_options, options_of

    wanted = sync.names() if list(names) == ["auto"] else [sync.record(name).name for name in names]
    records = [sync.record(name) for name in wanted]
    if unknown := [name for name in options if not any(name in options_of(record.cls) for record in records)]:
        raise UserError(f"none of {', '.join(wanted)} has an option {unknown[0]}; `trainwright sync` lists the methods")
    found, refused = [], {}
    for record in records:
        own = {name: value for name, value in options.items() if name in options_of(record.cls)}
        check_options(record, own)
        why = _why_not(record, plan)
        if why:
            refused[record.name] = why
            continue
        size = Size(shard_sizes(plan, model), max(4, _itemsize(plan)), replicas, own, _dims(plan, model))
        try:
            found.append(sync.price(record, size, _between(link, plan), plan.predicted.step_s))
        except UserError as error:
            refused[record.name] = str(error)
    return Priced(tuple(sorted(found, key=lambda each: each.step_s)), refused, link, replicas, plan.num_ranks)


def shard_sizes(plan: Plan, model: nn.Module) -> tuple[int, ...]:
    """Return how many elements of each trained parameter one rank holds; of uneven shards, the largest."""
    mesh = list(plan.mesh.values())
    found = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            layout = plan.params[name].layout if name in plan.params else ()
            cuts = math.prod(size for size, place in zip(mesh, layout) if place != "R")
            found.append(-(-param.numel() // cuts))
    return tuple(found)


def _dims(plan: Plan, model: nn.Module) -> tuple[tuple[int, ...], ...]:
    """The shapes of trained parameters where a replica is one rank; of shards no method asks."""
    if plan.num_ranks > 1:
        return ()
    return tuple(tuple(param.shape) for param in model.parameters() if param.requires_grad)


def _between(link: ReplicaLink, plan: Plan) -> Network:
    from .sync import Network

    return Network(link.latency_s, link.bytes_per_s / plan.num_ranks)


def _itemsize(plan: Plan) -> int:
    from .profiler.step import DTYPES

    return DTYPES[plan.dtype].itemsize if plan.dtype in DTYPES else 4


def _why_not(record: SyncRecord, plan: Plan) -> str:
    """The reason why a method cannot be taken under a plan; empty where it can."""
    if plan.num_ranks > 1 and record.cls.needs_whole:
        return record.cls.needs_whole
    if record.cls.needs_loop:
        return record.cls.needs_loop
    if record.cls.grows_batches:
        return "its batches grow, and a plan's do not"
    if record.cls.optimizers and plan.optimizer not in record.cls.optimizers:
        return f"it takes {' or '.join(record.cls.optimizers)}; the plan is for {plan.optimizer}"
    return ""


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    scale = next((value for unit, value in units.items() if match and unit.lower() == match[2].lower()), None)
    return float(match[1]) * scale if match and scale is not None else None
