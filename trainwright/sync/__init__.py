"""Trains with less communication: sync methods, each written once and run on real ranks or on simulated workers.

sync = tw.sync.create("local-sgd", model, optimizer, period=8)       under torchrun, or alone
loss.backward(); sync.step(loss)                                     in place of optimizer.step()

sync = yield from tw.sync.join("local-sgd", model, optimizer)        in a program: a generator that yields requests
simulate([program(rank) for rank in range(1000)], Network(…))        `simulator`: one process, a counted clock
Ranks(group).run(program(rank))                                      `ranks`: torch.distributed
"""

from __future__ import annotations

import difflib
import math
from typing import Any

from torch import nn

from .. import launch
from ..artifacts import UserError
from . import (
    cr_psgd,
    dadao,
    diloco,
    easgd,
    face,
    gossip,
    gradient_coding,
    just_one_byte,
    local_sgd,
    lsgd,
    one_bit_adam,
    one_bit_lamb,
    sequential_coding,
    token,
    torch_hooks,
)
from .codes import GradientCode
from .cr_psgd import CRPSGD, CRPSGDCatalyst
from .dadao import DADAO
from .diloco import DiLoCo
from .easgd import EASGD
from .elastic import Elastic, Meeting, host_meeting, lost_at_the_beginning
from .face import Sync
from .gossip import DecentLaM, Gossip
from .gradient_coding import GradientCoding
from .graphs import Graph, metropolis
from .hub import Hub
from .just_one_byte import JustOneByte
from .local_sgd import DataParallel, LocalSGD
from .lsgd import LSGD
from .method import Method
from .network import TCP_WIRE, Network
from .one_bit_adam import OneBitAdam
from .one_bit_lamb import OneBitLAMB
from .options import check_options, options_of, parse_options
from .price import Price, price
from .ranks import Ranks
from .rates import optimal_rates
from .record import Message, Size, StateVector, SyncRecord
from .replica import Replica, Worker
from .requests import (
    Absent,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Count,
    Exchange,
    Form,
    Gone,
    Identify,
    Letter,
    MembersChanged,
    Now,
    RankAndSize,
    Receive,
    Request,
    Send,
    Steps,
)
from .sequential_codes import MSGC, SRSGC
from .sequential_coding import MSGCTraining, SRSGCTraining
from .simulator import Simulation, simulate
from .token import SASRRW, SelfRepellentWalk
from .torch_hooks import PostLocalSGD, PowerSGD
from .traffic import Traffic

__all__ = [
    "CRPSGD",
    "DADAO",
    "EASGD",
    "LSGD",
    "MSGC",
    "SASRRW",
    "SRSGC",
    "TCP_WIRE",
    "Absent",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "CRPSGDCatalyst",
    "Compute",
    "Count",
    "DataParallel",
    "DecentLaM",
    "DiLoCo",
    "Elastic",
    "Exchange",
    "Form",
    "Gone",
    "Gossip",
    "GradientCode",
    "GradientCoding",
    "Graph",
    "Identify",
    "JustOneByte",
    "Letter",
    "LocalSGD",
    "MSGCTraining",
    "Meeting",
    "MembersChanged",
    "Message",
    "Method",
    "Network",
    "Now",
    "OneBitAdam",
    "OneBitLAMB",
    "PostLocalSGD",
    "PowerSGD",
    "Price",
    "RankAndSize",
    "Ranks",
    "Receive",
    "Replica",
    "Request",
    "SRSGCTraining",
    "SelfRepellentWalk",
    "Send",
    "Simulation",
    "Size",
    "StateVector",
    "Steps",
    "Sync",
    "SyncRecord",
    "Traffic",
    "Worker",
    "check_options",
    "create",
    "host_meeting",
    "join",
    "metropolis",
    "names",
    "optimal_rates",
    "parse_options",
    "price",
    "record",
    "simulate",
    "table",
]

_RECORDS = {
    entry.name: entry
    for entry in (
        *local_sgd.RECORDS,
        *torch_hooks.RECORDS,
        *diloco.RECORDS,
        easgd.RECORD,
        lsgd.RECORD,
        *gossip.RECORDS,
        *cr_psgd.RECORDS,
        one_bit_adam.RECORD,
        one_bit_lamb.RECORD,
        token.RECORD,
        gradient_coding.RECORD,
        *sequential_coding.RECORDS,
        dadao.RECORD,
        just_one_byte.RECORD,
    )
}
_TYPICAL = (1000, 1000)
"""The shape of the parameter for which the table's numbers are computed, on 8 workers in fp32."""


def create(
    name: str,
    model: nn.Module,
    optimizer: Any = None,
    *,
    group: Any = None,
    meeting: Meeting | None = None,
    **options: Any,
) -> Sync:
    """Return the method `name` over `model` and `optimizer`, agreed upon with all other ranks of `group`.

    model: an ordinary module, not in DistributedDataParallel, so that nothing else sums its gradients; or one made by
    `tw.parallelize(…, replicas=N)`, whose replicas are the workers, each rank with its own shards. optimizer: of its
    parameters; the method calls it, or reads its settings. group: a process group of torch.distributed; default: all
    ranks, under torchrun, or this process alone. meeting: a store, instead of a group, by which workers that come and go
    find one another: the method continues with those present, and a worker that joins takes over the run's parameters and
    state. options: the method's own, as its class documents them.

    Raises `UserError` on all ranks alike, before anything is sent of the model, for an unknown name or option, a value
    that the method refuses, a number of workers that it cannot take, and ranks that differ in method, options or parameters.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> sync = create("local-sgd", net, torch.optim.SGD(net.parameters(), lr=0.1), period=4)
    >>> loss = net(torch.ones(3, 2)).mean()
    >>> loss.backward(); sync.step(loss)
    >>> sync.method.num_steps, sync.traffic.sent_bytes
    (1, 0)
    """
    entry = record(name)
    if meeting is not None:
        return _meet(entry, model, optimizer, meeting, options)
    launch.init()
    engine = Ranks(_between(model) if group is None else group)
    sync = engine.run(face.join(entry, model, optimizer, options))
    sync.engine = engine
    return sync


def _meet(entry: SyncRecord, model: nn.Module, optimizer: Any, meeting: Meeting, options: dict[str, Any]) -> Sync:
    kind = Hub if entry.cls.keeps_places else Elastic
    engine = kind(meeting, may_join=entry.cls.bears_changes)
    if engine.is_new:
        return face.adopt(entry, model, optimizer, options, engine)
    try:
        sync = _begun(entry, model, optimizer, options, engine)
    except UserError:
        engine.close()  # nobody is to count on one that has not begun
        raise
    sync.engine = engine
    face.attach(sync, engine)
    return sync


def _begun(entry: SyncRecord, model: nn.Module, optimizer: Any, options: dict[str, Any], engine: Elastic) -> Sync:
    """Start with all workers; if one leaves meanwhile, with the others, if the method allows that."""
    while True:
        try:
            return engine.run(face.join(entry, model, optimizer, options))
        except MembersChanged as change:
            if engine.keeps_places or not entry.cls.bears_changes:
                raise lost_at_the_beginning(engine.place.size + len(change.gone), change) from None


def _between(model: Any) -> Any:
    """Return the process group over which the replicas of a planned module exchange; `None`, all ranks, for other modules."""
    replicas = getattr(model, "replicas", None)
    if replicas is not None and replicas.is_only and replicas.size > 1:
        raise UserError(
            f"replicas of the plan are needed for a sync method; this module is the only one on its {replicas.size} ranks, which "
            "sum their gradients as the plan says; give tw.parallelize(model, plan, replicas=N), or the model itself, unplanned"
        )
    return None if replicas is None else replicas.across


def join(name: str, model: nn.Module, optimizer: Any = None, **options: Any) -> Steps[Sync]:
    """Return `create` as a program for `simulate`: `sync = yield from join(…)`, then `yield from sync.steps(loss)`."""
    return face.join(record(name), model, optimizer, options)


def record(name: str) -> SyncRecord:
    """Return the record of the method `name`; case, hyphens and underscores do not matter.

    >>> record("Local_SGD").name
    'local-sgd'
    """
    by_key = {_key(known): known for known in _RECORDS}
    if _key(name) in by_key:
        return _RECORDS[by_key[_key(name)]]
    near = [by_key[key] for key in difflib.get_close_matches(_key(name), by_key, n=3)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names())}"
    raise UserError(f"there is no sync method {name!r}; {advice}")


def names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(_RECORDS)


def table() -> list[dict[str, str]]:
    """Return one row for each method; its numbers are for a matrix of a million parameters in fp32 on 8 workers."""
    rows = []
    for entry in _RECORDS.values():
        options = {**options_of(entry.cls), **entry.defaults}
        rows.append(entry.row(Size((math.prod(_TYPICAL),), 4, 8, options, (_TYPICAL,))))
    return rows


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
