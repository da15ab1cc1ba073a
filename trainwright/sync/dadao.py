"""DADAO: nodes compute gradients and exchange with neighbours at random times, without rounds, accelerated in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .graphs import Graph, graphs_of
from .method import Method
from .network import Network
from .record import Message, Size, StateVector, SyncRecord
from .replica import Worker
from .requests import Compute, Exchange, Steps

_MOST_CHI, _TERMS, _UNITS = 0.5, 18, 40
"""The largest χ1 χ2 for which theory holds; the terms of e^A's series for ‖A‖ ≤ 1/2; the units of time that a price simulates."""
_VARIABLES = ("x", "x_tilde", "y", "y_tilde", "z", "z_tilde")


class DADAO(Method):
    r"""Minimise Σ f_i over a graph, with gradients and messages at independent random times.

        ẋ = η(x̃ − x)   x̃' = η̃(x − x̃)   ẏ = α(ỹ − y)   ỹ' = −θ(y + z + νx̃)   ż = α(z̃ − z)   z̃' = α̃(z − z̃)

    flows at each node between its events, which are

        gradient (rate 1 a node):   h = ∇f_i(x) − νx − ỹ,   x ← x − γh,   x̃ ← x̃ − γ̃h,   ỹ ← ỹ + (δ + δ̃)h
        edge (rate λ_ij):           m = (y + z)_i − (y + z)_j,   z_i ← z_i − βm,   z̃_i ← z̃_i − β̃m,   j with +

    `sync.step(closure)` advances by one unit of time, in which a node computes about one gradient: the closure returns f_i's
    loss each time it is called. The constants follow from the smoothness L and the convexity μ of the f_i, which have to be
    right: with a wrong μ it is slow or diverges. All nodes draw the events from one seed, so a run can be repeated on any
    engine.

    graph: as for `gossip`. rates: λ_ij in the order of the graph's edges; by default uniform, with the least sum that
    theory allows, χ1 χ2 = 1/2; `trainwright.sync.optimal_rates` needs fewer messages on a graph with a bottleneck. Use float64,
    since ỹ is stiff. It keeps six copies of the parameters, and is only for strongly convex losses.

    Source: Nabli & Oyallon 2023, DADAO: Decoupled Accelerated Decentralized Asynchronous Optimization (arXiv:2208.00779).
    """

    needs_whole = "its closure computes at events of its own, and a planned step needs all its ranks at once"
    equal_start = False

    def __init__(
        self, worker: Worker, *, smoothness: float, convexity: float, graph: str | Graph | Sequence[Sequence[int]] = "ring",
        rates: Sequence[float] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(worker)
        check_range(
            "dadao",
            convexity=(convexity, "above 0", lambda value: value > 0),
            smoothness=(smoothness, "of at least the convexity", lambda value: value >= convexity),
        )
        if worker.size == 1:
            raise UserError("dadao needs two workers at least, for edges between them; got 1; train without sync")
        self.schedule = Schedule.of(graph, worker.size, rates, seed)
        self.constants = Constants.of(smoothness, convexity, self.schedule.chi_1)
        self.state["at"] = 0.0

    def start(self) -> Steps[None]:
        x = self.replica.read()
        self.state |= {name: torch.zeros_like(x) for name in _VARIABLES}
        self.state["x"] = x
        yield from ()

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        for at, nodes in self.schedule.events(self.num_steps):
            if self.worker.rank in nodes:
                self._flow(at)
                if len(nodes) == 1:
                    yield Compute()
                    self._gradient_event(loss)
                else:
                    yield from self._edge_event(nodes[0] if nodes[1] == self.worker.rank else nodes[1])
        self._flow(float(self.num_steps))
        self.replica.write(self._kept("x"))

    def _flow(self, until: float) -> None:
        matrix = self.constants.flow(until - float(self.state["at"]))
        before = [self._kept(name) for name in _VARIABLES]
        for name, row in zip(_VARIABLES, matrix):
            after = torch.zeros_like(before[0])
            for weight, value in zip(row, before):
                if weight:
                    after += float(weight) * value
            self.state[name] = after
        self.state["at"] = until

    def _gradient_event(self, closure: Any) -> None:
        c, x = self.constants, self._kept("x")
        self.replica.write(x)
        self.replica.gradients_by(closure)
        h = self.replica.read_gradient() - c.nu * x - self._kept("y_tilde")
        self._add("x", -c.gamma, h)
        self._add("x_tilde", -c.gamma_tilde, h)
        self._add("y_tilde", c.delta + c.delta_tilde, h)

    def _edge_event(self, other: int) -> Steps[None]:
        own = self._kept("y") + self._kept("z")
        theirs = (yield Exchange(own, (other,)))[other]
        self._add("z", -self.constants.beta, own - theirs)
        self._add("z_tilde", -self.constants.beta_tilde, own - theirs)

    def _add(self, name: str, weight: float, vector: Tensor) -> None:
        self.state[name] = self._kept(name) + weight * vector

    def _kept(self, name: str) -> Tensor:
        kept = self.state[name]
        assert isinstance(kept, Tensor)
        return kept


@dataclass(frozen=True)
class Constants:
    """The constants of the flow and of the jumps, for r = √(ν/L), ν = μ/2."""

    nu: float
    eta: float
    alpha: float
    alpha_tilde: float
    theta: float
    gamma: float
    gamma_tilde: float
    delta: float
    delta_tilde: float
    beta: float
    beta_tilde: float

    @classmethod
    def of(cls, smoothness: float, convexity: float, chi_1: float) -> Constants:
        """Return the constants for L = `smoothness`, μ = `convexity`; `chi_1` is 1 / λ₂ of the Laplacian with the rates."""
        nu = convexity / 2
        r = math.sqrt(nu / smoothness)
        return cls(
            nu=nu, eta=r / 8, alpha=r / 4, alpha_tilde=r / 8, theta=1 / (2 * r), gamma=1 / (4 * smoothness),
            gamma_tilde=1 / (4 * math.sqrt(nu * smoothness)), delta=r / 4, delta_tilde=1.0, beta=0.5,
            beta_tilde=2 * chi_1 / r,
        )  # fmt: skip

    def flow(self, seconds: float) -> np.ndarray:
        """Return the matrix that advances (x, x̃, y, ỹ, z, z̃) by `seconds` of the flow."""
        return _exponential(self, seconds)


@lru_cache(maxsize=4096)
def _exponential(c: Constants, seconds: float) -> np.ndarray:
    rates = np.zeros((6, 6))
    rates[0, :2] = -c.eta, c.eta
    rates[1, :2] = c.eta, -c.eta
    rates[2, 2:4] = -c.alpha, c.alpha
    rates[3, [2, 4, 1]] = -c.theta, -c.theta, -c.theta * c.nu
    rates[4, 4:] = -c.alpha, c.alpha
    rates[5, 4:] = c.alpha_tilde, -c.alpha_tilde
    return exponential(rates * seconds)


def exponential(matrix: np.ndarray) -> np.ndarray:
    """Return e^matrix by its series with scaling and squaring; for thousands of small matrices, on which SciPy is slower.

    >>> exponential(np.array([[0.0, 1.0], [0.0, 0.0]])).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    squarings = max(0, 1 + math.ceil(math.log2(max(float(np.abs(matrix).sum(1).max()), 1e-300))))
    scaled = matrix / 2.0**squarings
    term = total = np.eye(len(matrix))
    for k in range(1, _TERMS):
        term = _product(term, scaled) / k
        total = total + term
    for _ in range(squarings):
        total = _product(total, total)
    return total


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the matrix product computed without BLAS, whose last bits may depend on its threads."""
    return np.asarray((a[:, :, None] * b).sum(1))


@dataclass(frozen=True)
class Schedule:
    """Draws the times of all events: each node has a Poisson clock of rate 1, each edge one of its own rate."""

    graph: Graph
    rates: tuple[float, ...]
    seed: int

    @classmethod
    def of(cls, graph: Any, num_workers: int, rates: Sequence[float] | None, seed: int) -> Schedule:
        """Return the schedule of a graph, by default with uniform rates; raise `UserError` for rates that are too low."""
        graphs = graphs_of(graph, num_workers, "dadao")
        if len(graphs) > 1:
            raise UserError("dadao needs one graph; one-peer changes in each step; take another")
        own = uniform_rates(graphs[0]) if rates is None else tuple(float(rate) for rate in rates)
        if len(own) != len(graphs[0].edges) or min(own) < 0:
            raise UserError(
                f"dadao needs a rate of at least 0 for each of {len(graphs[0].edges)} edges; got {len(own)}; leave rates out"
            )
        first, second = chi(graphs[0], own)
        if not first * second <= _MOST_CHI * (1 + 1e-6):
            raise UserError(
                f"dadao needs rates with χ1 χ2 of at most 1/2, else it diverges; got {first * second:.4g}; multiply them all by "
                f"{math.sqrt(2 * first * second):.4g}"
            )
        return cls(graphs[0], own, int(seed))

    @property
    def chi_1(self) -> float:
        return chi(self.graph, self.rates)[0]

    def events(self, unit: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return (time, nodes) of the events between times unit − 1 and unit; nodes are one node, or the two of an edge."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, unit]))
        who = [*((node,) for node in range(self.graph.num_nodes)), *self.graph.edges]
        weights = np.concatenate([np.ones(self.graph.num_nodes), self.rates])
        times = np.sort(rng.random(rng.poisson(weights.sum())))
        chosen = np.searchsorted(weights.cumsum() / weights.sum(), rng.random(len(times)), side="right")
        return [(unit - 1 + float(at), who[min(index, len(who) - 1)]) for at, index in zip(times, chosen)]


def chi(graph: Graph, rates: Sequence[float]) -> tuple[float, float]:
    """Return χ1 = 1 / λ₂(Λ) and χ2 = ½ max over edges of (e_i − e_j)ᵀ Λ⁺ (e_i − e_j), Λ the Laplacian weighted by the rates.

    >>> from trainwright.sync.graphs import named
    >>> [round(value, 3) for value in chi(named("complete", 4)[0], [1.0] * 6)]
    [0.25, 0.25]
    """
    matrix = graph.laplacian(rates)
    second = float(np.linalg.eigvalsh(matrix)[1])
    if second <= 1e-12:
        return math.inf, math.inf
    inverse = np.linalg.pinv(matrix, hermitian=True)
    resistances = [inverse[a, a] + inverse[b, b] - 2 * inverse[a, b] for a, b in graph.edges]
    return _short(1 / second), _short(max(resistances) / 2)


def uniform_rates(graph: Graph) -> tuple[float, ...]:
    """Return the smallest common rate of all edges for which χ1 χ2 = 1/2."""
    first, second = chi(graph, [1.0] * len(graph.edges))
    return (_short(math.sqrt(2 * first * second)),) * len(graph.edges)


def _short(value: float) -> float:
    """Return the value rounded to twelve digits, on which all machines' linear algebra agrees, so that runs are the same."""
    return float(f"{value:.12g}")


def _edge_events(size: Size, k: int) -> int:
    schedule = Schedule.of(*(size.options["graph"], size.num_workers, size.options["rates"], size.options["seed"]))
    return sum(len(nodes) == 2 for unit in range(1, k + 1) for _, nodes in schedule.events(unit))


def _event_s(size: Size, network: Network, compute_s: float) -> float:
    """Return the seconds that one edge event adds to a step, averaged over simulated units of time in which nodes wait."""
    schedule = Schedule.of(*(size.options["graph"], size.num_workers, size.options["rates"], size.options["seed"]))
    at, num_edges = [0.0] * size.num_workers, 0
    for unit in range(1, _UNITS + 1):
        for _, nodes in schedule.events(unit):
            took_s = compute_s if len(nodes) == 1 else network.message_s(size.param_bytes)
            until = max(at[node] for node in nodes) + took_s
            num_edges += len(nodes) - 1
            for node in nodes:
                at[node] = until
    return (max(at) - _UNITS * compute_s) / max(1, num_edges)


RECORD = SyncRecord(
    "dadao",
    DADAO,
    "gradients and gossip at random times",
    (Message("y + z", "edge", lambda size: 2 * size.param_bytes, _edge_events, "2P Σλ/n", seconds=_event_s),),
    promises="the minimum, accelerated, linear rate",
    assumes="strong convexity; L and μ known",
    states=tuple(StateVector(name) for name in _VARIABLES),
    takes="closure",
    faults="its neighbours wait",
    paper="Nabli & Oyallon 2023, arXiv:2208.00779",
    departs="events follow one seed and their order, not the nodes' own clocks",
    defaults={"smoothness": 10.0, "convexity": 1.0},
)
