"""Defines communication graphs by name, and the weights of averages over neighbours, and checks both.

ring, complete, star, path, grid, torus, exponential, barbell     one graph
one-peer                                                          log₂ n graphs of pairs, used in turn; n a power of two
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..artifacts import UserError

Edge = tuple[int, int]


@dataclass(frozen=True)
class Graph:
    """A graph with nodes 0 … num_nodes − 1 and undirected edges.

    >>> Graph.of([(0, 1), (2, 1)]).neighbours[1]
    (0, 2)
    """

    num_nodes: int
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, edges: Iterable[Sequence[int]], num_nodes: int | None = None) -> Graph:
        """Return the graph of `edges`, without duplicates and loops."""
        own = sorted({(min(a, b), max(a, b)) for a, b in map(_pair, edges) if a != b})
        largest = max((b for _, b in own), default=0)
        if num_nodes is not None and largest >= num_nodes:
            raise UserError(
                f"edges between {num_nodes} workers are needed; got one with worker {largest}; count from 0"
            )
        return cls(largest + 1 if num_nodes is None else num_nodes, tuple(own))

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Return each node's neighbours in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for a, b in self.edges:
            found[a].append(b)
            found[b].append(a)
        return tuple(tuple(sorted(each)) for each in found)

    @property
    def is_connected(self) -> bool:
        """Tell whether every node can be reached from node 0."""
        reached, new = {0}, [0]
        while new:
            new = [node for at in new for node in self.neighbours[at] if node not in reached]
            reached.update(new)
        return len(reached) == self.num_nodes

    def check_connected(self, owner: str) -> None:
        """Raise `UserError` unless the graph is connected."""
        if not self.is_connected:
            raise UserError(
                f"{owner} needs a connected graph over {self.num_nodes} workers; from worker 0 not all are reached; add edges"
            )

    def laplacian(self, rates: Sequence[float] | None = None) -> np.ndarray:
        """Return Σ rate_ij (e_i − e_j)(e_i − e_j)ᵀ; rates of 1 unless given, in the order of `edges`."""
        matrix = np.zeros((self.num_nodes, self.num_nodes))
        for (a, b), rate in zip(self.edges, rates if rates is not None else np.ones(len(self.edges))):
            matrix[[a, b], [a, b]] += rate
            matrix[[a, b], [b, a]] -= rate
        return matrix


def _pair(edge: Sequence[int]) -> Edge:
    try:
        a, b = map(operator.index, edge)
    except (TypeError, ValueError):
        a = b = -1
    if min(a, b) < 0:
        raise UserError(f"edges are pairs of workers, as in [(0, 1), (1, 2)]; got {edge!r}; write them so, from 0")
    return a, b


def named(name: str, num_nodes: int) -> tuple[Graph, ...]:
    """Return the graphs called `name` over `num_nodes`, one of which is used in each step in turn; only `one-peer` has several.

    >>> [graph.edges for graph in named("one-peer", 4)]
    [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    """
    if name == "one-peer":
        return _one_peer(num_nodes)
    if name not in _EDGES:
        raise UserError(
            f"a graph is needed, one of {', '.join(_EDGES)}, one-peer, or a list of edges; got {name!r}; choose one"
        )
    return (Graph.of(_EDGES[name](num_nodes), num_nodes),)


def graphs_of(given: str | Graph | Iterable[Sequence[int]], num_nodes: int, owner: str) -> tuple[Graph, ...]:
    """Return the graphs of an option `graph`; raise `UserError` unless their union is connected."""
    if isinstance(given, str):
        found = named(given, num_nodes)
    else:
        found = (given if isinstance(given, Graph) else Graph.of(given, num_nodes),)
    if found[0].num_nodes != num_nodes:
        raise UserError(
            f"{owner} needs a graph over {num_nodes} workers; got one over {found[0].num_nodes}; match them"
        )
    union(found).check_connected(owner)
    return found


def union(graphs: Sequence[Graph]) -> Graph:
    """Return the graph with the edges of all `graphs`."""
    return Graph.of([edge for graph in graphs for edge in graph.edges], graphs[0].num_nodes)


def metropolis(graph: Graph) -> np.ndarray:
    """Return Metropolis–Hastings weights, symmetric and doubly stochastic: w_ij = 1 / (1 + max(deg_i, deg_j)) on edges.

    >>> metropolis(named("ring", 4)[0])[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    degrees = [len(each) for each in graph.neighbours]
    weights = np.zeros((graph.num_nodes, graph.num_nodes))
    for a, b in graph.edges:
        weights[a, b] = weights[b, a] = 1 / (1 + max(degrees[a], degrees[b]))
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def checked_weights(given: Any, graph: Graph, owner: str) -> np.ndarray:
    """Return weights as a matrix; raise `UserError` unless it is symmetric, doubly stochastic, and zero without an edge."""
    n = graph.num_nodes
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{owner} needs weights of {n} by {n} workers as rows of numbers; got {given!r}") from None
    if weights.shape != (n, n):
        raise UserError(
            f"{owner} needs weights of {n} by {n} workers; got {weights.shape}; leave them out for Metropolis'"
        )
    allowed = np.eye(n, dtype=bool)
    for a, b in graph.edges:
        allowed[a, b] = allowed[b, a] = True
    problem = ""
    if not np.allclose(weights.sum(0), 1, atol=1e-9) or not np.allclose(weights.sum(1), 1, atol=1e-9):
        problem = f"rows or columns sum to {_furthest_from_one(weights):.6g}"
    elif not np.allclose(weights, weights.T, atol=1e-12):
        problem = "they are not symmetric"
    elif (weights < 0).any() or weights[~allowed].any():
        problem = "some are negative, or stand where there is no edge"
    if problem:
        raise UserError(
            f"{owner} needs symmetric, doubly stochastic weights on the graph's edges; {problem}; leave them out for Metropolis'"
        )
    return weights


def _furthest_from_one(weights: np.ndarray) -> float:
    sums = np.concatenate([weights.sum(0), weights.sum(1)])
    return float(sums[np.abs(sums - 1).argmax()])


def _one_peer(num_nodes: int) -> tuple[Graph, ...]:
    if num_nodes & (num_nodes - 1):
        raise UserError(f"one-peer needs a power of two of workers; got {num_nodes}; take ring or exponential")
    hops = [1 << bit for bit in range(num_nodes.bit_length() - 1)] or [0]
    return tuple(Graph.of([(node, node ^ hop) for node in range(num_nodes)], num_nodes) for hop in hops)


def _sides(num_nodes: int) -> tuple[int, int]:
    """Return the rows and columns of the most square grid of `num_nodes`."""
    rows = max(rows for rows in range(1, int(num_nodes**0.5) + 1) if num_nodes % rows == 0)
    return rows, num_nodes // rows


def _grid(num_nodes: int, around: bool = False) -> list[Edge]:
    rows, columns = _sides(num_nodes)
    edges = []
    for row in range(rows):
        for column in range(columns):
            if column + 1 < columns or around:
                edges.append((row * columns + column, row * columns + (column + 1) % columns))
            if row + 1 < rows or around:
                edges.append((row * columns + column, (row + 1) % rows * columns + column))
    return edges


def _exponential(num_nodes: int) -> list[Edge]:
    hops = [1 << bit for bit in range(max(1, (num_nodes - 1).bit_length()))]
    return [(node, (node + hop) % num_nodes) for node in range(num_nodes) for hop in hops]


def _barbell(num_nodes: int) -> list[Edge]:
    """Return the edges of two complete halves and one edge between them."""
    half = num_nodes // 2
    sides = [range(half), range(half, num_nodes)]
    return [(a, b) for side in sides for a in side for b in side if a < b] + [(half - 1, half)][: num_nodes - 1]


_EDGES: dict[str, Callable[[int], list[Edge]]] = {
    "ring": lambda n: [(node, (node + 1) % n) for node in range(n)],
    "complete": lambda n: [(a, b) for a in range(n) for b in range(a)],
    "star": lambda n: [(0, node) for node in range(1, n)],
    "path": lambda n: [(node, node + 1) for node in range(n - 1)],
    "grid": _grid,
    "torus": lambda n: _grid(n, around=True),
    "exponential": _exponential,
    "barbell": _barbell,
}
