"""SA-SRRW: a token with the parameters walks over a graph, avoids visited nodes, and runs a step of SGD at each node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .graphs import Graph, graphs_of
from .method import Method
from .record import Message, Size, StateVector, SyncRecord
from .replica import Worker
from .requests import Broadcast, Receive, Send, Steps


class SelfRepellentWalk:
    r"""A random walk whose next node is drawn with weights that fall with its visits; several walks run at once.

        K_ij[x] ∝ P_ij x_j^(−α)                    P: Metropolis–Hastings, min(1/d_i, 1/d_j), its loops the rest
        x ← x + γ_n (e_next − x),   γ_n = (n + offset)^(−a)

    x begins uniform and sums to 1; weights are kept as logarithms, so that no α overflows. at: [walks]. x: [walks, nodes].

    >>> walk = SelfRepellentWalk(Graph.of([(0, 1), (1, 2)]), alpha=5.0)
    >>> [int(walk.move(np.array([0.5]))[0]) for _ in range(4)]
    [0, 1, 2, 1]

    Source: Doshi, Hu & Eun 2023, Self-Repellent Random Walks on General Graphs (arXiv:2305.05097).
    """

    def __init__(
        self, graph: Graph, alpha: float, exponent: float = 0.8, offset: float | None = None, num_walks: int = 1
    ) -> None:
        self.alpha, self.exponent = alpha, exponent
        self.offset = float(graph.num_nodes if offset is None else offset)
        degrees = [len(each) for each in graph.neighbours]
        width = max(degrees) + 1
        self.targets = np.zeros((graph.num_nodes, width), dtype=np.int64)
        self.log_weights = np.full((graph.num_nodes, width), -np.inf)
        for node, near in enumerate(graph.neighbours):
            weights = [min(1 / degrees[node], 1 / degrees[other]) for other in near]
            loop = 1 - sum(weights)
            self.targets[node, : len(near) + 1] = [*near, node]
            with np.errstate(divide="ignore"):
                self.log_weights[node, : len(near) + 1] = np.log([*weights, loop if loop > 1e-12 else 0.0])
        self.num_moves = 0
        self.at = np.zeros(num_walks, dtype=np.int64)
        self.x = np.full((num_walks, graph.num_nodes), 1 / graph.num_nodes)

    def move(self, uniforms: np.ndarray) -> np.ndarray:
        """Move each walk to its next node, drawn by its number in [0, 1), and return the nodes."""
        targets = self.targets[self.at]
        log_visits = np.log(np.take_along_axis(self.x, targets, axis=1))
        logits = self.log_weights[self.at] - self.alpha * log_visits
        weights = np.exp(logits - logits.max(1, keepdims=True)).cumsum(1)
        chosen = (weights <= uniforms[:, None] * weights[:, -1:]).sum(1)
        self.at = np.take_along_axis(targets, chosen[:, None], axis=1)[:, 0]
        self.num_moves += 1
        rate = (self.num_moves + self.offset) ** -self.exponent
        self.x *= 1 - rate
        self.x[np.arange(len(self.at)), self.at] += rate
        return self.at


class SASRRW(Method):
    r"""Move the parameters over the graph as a token, with one optimizer step at each node; only the token's are up to date.

        X_n ~ K_{X_{n−1}}[x],   θ ← the optimizer's step at node X_n with the gradient times (n + n₀)^(−b)

    Only the node that has the token computes: `sync.step(closure)` calls the closure there and nowhere else. It sends θ
    to the next one; the visits need no message, since all nodes follow the walk by one seed, at O(degree) each step.
    `sync.finish()` gives all nodes the parameters of the token.

    graph: as for `gossip`. alpha: α, how strongly visited nodes are avoided; 0 is the plain walk. The asymptotic
    variance falls as 1/α² if visits settle faster than the parameters: visit_exponent a < step_exponent b, both in (½,
    1]; with a > b α does nothing in the limit. The optimizer is SGD without momentum, as a rule: its state stays at each
    node.

    It is for networks with one busy link at a time and nodes with their own data; the wall time is that of one worker and its
    messages.

    Source: Hu, Doshi & Eun 2024, Accelerating Distributed Stochastic Optimization via Self-Repellent Random Walks
    (arXiv:2401.09665).
    """

    needs_whole = "one worker alone computes at a time, and a planned step needs all its ranks"
    of_size = ("visits", "holder")

    def __init__(
        self, worker: Worker, *, graph: str | Graph | Sequence[Sequence[int]] = "ring", alpha: float = 5.0,
        visit_exponent: float = 0.8, step_exponent: float = 0.9, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(worker)
        check_range(
            "sa-srrw",
            alpha=(alpha, "of at least 0", lambda value: value >= 0),
            visit_exponent=(visit_exponent, "in (1/2, 1]", lambda value: 0.5 < value <= 1),
            step_exponent=(step_exponent, "in (1/2, 1]", lambda value: 0.5 < value <= 1),
        )
        if worker.size == 1:
            raise UserError("sa-srrw needs two workers at least, for the token to walk; got 1; train without sync")
        self.walk = _walk(graph, worker.size, alpha, visit_exponent)
        self.step_exponent, self.seed = step_exponent, int(seed)
        self.state |= {"visits": torch.from_numpy(self.walk.x[0]), "holder": 0}

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        self._restore()
        holder = int(self.walk.at[0])
        if self.worker.rank == holder:
            self._local_step(loss)
        following = int(self.walk.move(draw(self.seed, self.num_steps))[0])
        self.state |= {"visits": torch.from_numpy(self.walk.x[0].copy()), "holder": following}
        if following != holder and self.worker.rank == holder:
            yield Send(self.replica.read(), following)
        elif following != holder and self.worker.rank == following:
            letter = yield Receive(self.replica.read(), holder)
            self.replica.write(letter.tensor)

    def finish(self) -> Steps[None]:
        """Set all nodes' parameters to those of the node with the token."""
        theirs: Tensor = yield Broadcast(self.replica.read(), int(self.state["holder"]))
        self.replica.write(theirs)

    def _local_step(self, closure: Any) -> None:
        self.replica.gradients_by(closure)
        scale = (self.num_steps + self.walk.offset) ** -self.step_exponent
        self.replica.write_gradient(self.replica.read_gradient() * scale)
        self.replica.update()

    def _restore(self) -> None:
        """Set the walk from the state, which may have been loaded from a checkpoint."""
        visits = self.state["visits"]
        assert isinstance(visits, Tensor)
        self.walk.x = visits.numpy().copy()[None]
        self.walk.at = np.array([int(self.state["holder"])])
        self.walk.num_moves = self.num_steps - 1


def draw(seed: int, step: int) -> np.ndarray:
    """Return the random number in [0, 1) of a step."""
    return np.random.Generator(np.random.Philox(key=[seed, step])).random(1)


def _walk(graph: Any, num_workers: int, alpha: float, exponent: float) -> SelfRepellentWalk:
    graphs = graphs_of(graph, num_workers, "sa-srrw")
    if len(graphs) > 1:
        raise UserError("sa-srrw needs one graph; one-peer changes in each step; take another")
    return SelfRepellentWalk(graphs[0], alpha, exponent)


def _moves(size: Size, k: int) -> int:
    """Return the number of moves of the token to another node in k steps."""
    names = ("graph", "alpha", "visit_exponent")
    graph, alpha, exponent = (size.options[name] for name in names)
    walk = _walk(graph, size.num_workers, alpha, exponent)
    nodes = [0, *(int(walk.move(draw(size.options["seed"], step))[0]) for step in range(1, k + 1))]
    return sum(a != b for a, b in itertools.pairwise(nodes))


RECORD = SyncRecord(
    "sa-srrw",
    SASRRW,
    "a token walks, and avoids where it was",
    (
        Message(
            "token",
            "edge",
            lambda size: size.param_bytes,
            _moves,
            "P/n",
            seconds=lambda size, network, _: network.message_s(size.param_bytes),
        ),
    ),
    promises="variance of 1/α² in the limit",
    assumes="a connected graph; a < b",
    states=(StateVector("visits", lambda size: size.num_workers, 8),),
    takes="closure",
    faults="the token waits, or is lost",
    paper="Hu, Doshi & Eun 2024, arXiv:2401.09665",
    departs="visits are followed by one seed and not sent; step sizes begin at n = number of nodes",
)
