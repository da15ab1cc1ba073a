"""Averages parameters with neighbours only: ATC-DSGD and DmSGD, and DecentLaM, whose momentum adds no bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from .graphs import Graph, checked_weights, graphs_of, metropolis
from .method import Method
from .network import Network
from .record import Message, Size, SyncRecord
from .replica import Worker
from .requests import Exchange, Steps

_ROUNDS, _FEW_ROUNDS, _MANY = 64, 8, 64
"""The rounds that a price simulates, a smaller number of them for more than `_MANY` workers."""


class Gossip(Method):
    r"""Run the optimizer's step, then average with the neighbours (adapt, then combine).

        u_i = the optimizer's step from x_i
        x_i ← Σ_j w_ij u_j

    With plain SGD this is ATC-DSGD, with SGD and momentum DmSGD, with any other optimizer its decentralised form. W is
    symmetric and doubly stochastic. graph: a name (`trainwright.sync.graphs`), a `Graph`, or edges. weights: W;
    Metropolis–Hastings unless given.

    A worker waits only for its neighbours. Workers with different data end up around the minimum, not on it: by lr² for SGD, by
    lr² / (1 − momentum)² with momentum; `decentlam` has the smaller bias with momentum too.

    Source: Lian et al. 2017 (arXiv:1705.09056); DmSGD: Yu, Jin & Yang 2019 (arXiv:1905.03817).
    """

    bears_changes = True

    def __init__(
        self, worker: Worker, *, graph: str | Graph | Sequence[Sequence[int]] = "ring", weights: Any = None
    ) -> None:
        super().__init__(worker)
        self.graph = graph
        self.graphs = graphs_of(graph, worker.size, "gossip")
        if weights is None:
            self.weights = [metropolis(each) for each in self.graphs]
        else:
            self.weights = [checked_weights(weights, self.graphs[0], "gossip")]

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        self.replica.update()
        self.replica.write((yield from self.average(self.replica.read())))

    def resized(self) -> None:
        """Use the named graph over the present workers, with Metropolis–Hastings weights."""
        if not isinstance(self.graph, str):
            raise UserError(
                f"a graph by name is needed where workers come and go, so that there is one for {self.worker.size}; got edges; "
                "take ring, or another"
            )
        self.graphs = graphs_of(self.graph, self.worker.size, "gossip")
        self.weights = [metropolis(each) for each in self.graphs]

    def average(self, vector: Tensor) -> Steps[Tensor]:
        """Return Σ_j w_ij u_j, summed in the order of ranks."""
        came = yield from self.again(lambda: Exchange(vector, self._near()))
        turn, rank = self._turn(), self.worker.rank
        total = torch.zeros_like(vector)
        for other, theirs in sorted([*came.items(), (rank, vector)], key=lambda item: item[0]):
            total += float(self.weights[turn][rank, other]) * theirs
        return total

    def _turn(self) -> int:
        return (self.num_steps - 1) % len(self.graphs)

    def _near(self) -> tuple[int, ...]:
        return self.graphs[self._turn()].neighbours[self.worker.rank]


class DecentLaM(Gossip):
    r"""Run SGD with momentum over neighbours without the bias that momentum adds, at the same traffic.

        u_i = x_i − γ g_i
        g̃_i = (x_i − Σ_j w_ij u_j) / γ
        x_i ← SGD with momentum, stepping with g̃_i

    γ is the optimizer's lr, which may change from step to step; the optimizer is `torch.optim.SGD`, without Nesterov or
    dampening. Its weight decay enters g_i, so that neighbours average it. momentum = 0 is ATC-DSGD. Where γ is 0,
    nothing is averaged.

    Differences are computed in fp32 at least; with a very small γ they still cancel. It helps with large batches, where the bias
    dominates; with much noise all methods end alike.

    Source: Yuan et al. 2021, DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training (arXiv:2104.11981).
    """

    optimizers = ("sgd", "sgd-momentum")

    def __init__(
        self, worker: Worker, *, graph: str | Graph | Sequence[Sequence[int]] = "ring", weights: Any = None
    ) -> None:
        super().__init__(worker, graph=graph, weights=weights)
        optimizer = worker.replica.optimizer
        if not isinstance(optimizer, torch.optim.SGD) or any(
            group["nesterov"] or group["dampening"] or group["maximize"] for group in optimizer.param_groups
        ):
            raise UserError(
                f"decentlam needs torch.optim.SGD, with momentum and without nesterov, dampening or maximize; got "
                f"{type(optimizer).__name__}; take that, or gossip, which takes any optimizer"
            )

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        x, lr, decay = self.replica.read(), self.replica.settings("lr"), self.replica.settings("weight_decay")
        gradient = self.replica.read_gradient() + decay * x
        mixed = yield from self.average(x - lr * gradient)
        self.replica.write_gradient(_penalised(x, mixed, lr, gradient))
        with self.replica.without("weight_decay"):
            self.replica.update()


def _penalised(x: Tensor, mixed: Tensor, lr: Tensor | float, gradient: Tensor) -> Tensor:
    """Return (x − mixed) / lr, and the gradient itself where lr is 0."""
    lr = torch.as_tensor(lr, dtype=x.dtype)
    return torch.where(lr == 0, gradient, (x - mixed) / torch.where(lr == 0, 1.0, lr))


def _edge_bytes(size: Size) -> int:
    """Return the bytes sent while each graph is used once."""
    graphs = graphs_of(size.options["graph"], size.num_workers, "gossip")
    return sum(2 * len(graph.edges) for graph in graphs) * size.param_bytes


def _round_s(size: Size, network: Network, compute_s: float) -> float:
    """Return the seconds that using each graph once adds to the computation, from a simulation of some rounds.

    A node starts when its neighbours' vectors have arrived, and sends to one neighbour after the other while it computes.
    """
    graphs = graphs_of(size.options["graph"], size.num_workers, "gossip")
    rounds = _FEW_ROUNDS if size.num_workers > _MANY else _ROUNDS
    first_s, one_s = (network.busy_s(size.param_bytes, network.bytes_per_s, is_idle) for is_idle in (True, False))
    begins, free, ends = [0.0] * size.num_workers, [0.0] * size.num_workers, []
    for number in range(rounds * len(graphs)):
        ready = [begin + compute_s for begin in begins]
        begins = list(ready)
        for node, near in enumerate(graphs[number % len(graphs)].neighbours):
            own_s = first_s if free[node] < ready[node] else one_s
            free[node] = max(free[node], ready[node])
            for other in near:
                free[node] += own_s
                own_s = one_s
                begins[other] = max(begins[other], free[node] + network.latency_s)
        ends.append(max(begins))
    half = rounds // 2 * len(graphs)
    return (ends[-1] - ends[half - 1]) / (rounds - rounds // 2) - compute_s * len(graphs)


def _rounds(size: Size, k: int) -> int:
    return k // len(graphs_of(size.options["graph"], size.num_workers, "gossip"))


def _edges() -> tuple[Message, ...]:
    """Return the messages of whole rounds over all graphs, and those of a round in progress."""

    def rest(size: Size, k: int) -> int:
        graphs = graphs_of(size.options["graph"], size.num_workers, "gossip")
        return sum(2 * len(graph.edges) for graph in graphs[: k % len(graphs)])

    return (
        Message("neighbours", "edge", _edge_bytes, _rounds, "deg·P", seconds=_round_s),
        Message(
            "neighbours, of a round under way",
            "edge",
            lambda size: size.param_bytes,
            rest,
            "",
            seconds=lambda size, network, _: network.message_s(size.param_bytes) / size.num_workers,
        ),
    )


_GOSSIP = SyncRecord(
    "gossip",
    Gossip,
    "steps, then averages with neighbours",
    _edges(),
    promises="a neighbourhood of the minimum",
    assumes="symmetric W; a connected graph",
    faults="its neighbours wait",
    paper="Lian et al. 2017, arXiv:1705.09056",
)
RECORDS = (
    _GOSSIP,
    replace(_GOSSIP, name="atc-dsgd", summary="the same, with SGD", promises="bias of lr²"),
    replace(
        _GOSSIP,
        name="dmsgd",
        summary="the same, with SGD and momentum",
        promises="bias of lr² / (1 − momentum)²",
        paper="Yu, Jin & Yang 2019, arXiv:1905.03817",
    ),
    replace(
        _GOSSIP,
        name="decentlam",
        cls=DecentLaM,
        summary="neighbours; momentum adds no bias",
        promises="bias of lr², whatever the momentum",
        assumes="symmetric W; a connected graph; SGD",
        paper="Yuan et al. 2021, arXiv:2104.11981",
    ),
)
