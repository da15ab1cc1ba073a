r"""Computes the rates of DADAO's edges with the fewest messages for which it converges.

    minimise Σ λ_ij   subject to   χ1[Λ] χ2[Λ] ≤ 1/2

For a fixed a that is a semidefinite problem: χ1 ≤ a is Λ ⪰ (I − 11ᵀ/n)/a, and χ2 ≤ 1/(2a) is, for each edge, the Schur complement
[[Λ + 11ᵀ/n, e_i − e_j], [·, 1/a]] ⪰ 0. Both constraints scale together, so that only a search over a remains.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..artifacts import UserError
from .dadao import chi, uniform_rates
from .graphs import Graph

_MARGIN = 1e-7


def optimal_rates(graph: Graph) -> tuple[float, ...]:
    """Return the rates with the smallest sum that DADAO allows on a graph, in the order of its edges.

    It pays off on a graph with a bottleneck, which gets a larger share; on a ring all edges are alike. It needs cvxpy
    (`pip install 'trainwright[solvers-convex-nets]'`), without which it raises `UserError`, and seconds for tens of edges.

    >>> from trainwright.sync.graphs import named
    >>> star = named("star", 5)[0]
    >>> sum(optimal_rates(star)) <= sum(uniform_rates(star)) * 1.001
    True

    Source: Nabli & Oyallon 2023 (arXiv:2208.00779) asks for such rates; this form is derived here.
    """
    from scipy.optimize import minimize_scalar  # every command would take its time to import

    graph.check_connected("optimal_rates")
    problem = _Problem(graph)
    first, second = chi(graph, uniform_rates(graph))
    around = math.log(first)
    found = minimize_scalar(
        lambda log_a: problem.total(math.exp(log_a)),
        bounds=(around - 2, around + 2),
        method="bounded",
        options={"xatol": 1e-3},
    )
    rates = np.clip(problem.rates(math.exp(found.x)), 0, None)
    first, second = chi(graph, list(rates))
    scaled = rates * math.sqrt(2 * first * second) * (1 + _MARGIN)
    return tuple(float(f"{rate:.12g}") for rate in scaled)


class _Problem:
    """The semidefinite problem, built once, with a as its parameter."""

    def __init__(self, graph: Graph) -> None:
        cp: Any = _cvxpy()
        n, edges = graph.num_nodes, graph.edges
        self.inverse = cp.Parameter(pos=True)
        self.variable = cp.Variable(len(edges), nonneg=True)
        differences = np.zeros((len(edges), n))
        for row, (a, b) in zip(differences, edges):
            row[a], row[b] = 1.0, -1.0
        laplacian = sum(self.variable[k] * np.outer(row, row) for k, row in enumerate(differences))
        ones = np.full((n, n), 1 / n)
        limits = [laplacian >> self.inverse * (np.eye(n) - ones)]
        for row in differences:
            corner = cp.reshape(self.inverse, (1, 1), order="F")
            limits.append(cp.bmat([[laplacian + ones, row[:, None]], [row[None], corner]]) >> 0)
        self.problem = cp.Problem(cp.Minimize(cp.sum(self.variable)), limits)

    def total(self, a: float) -> float:
        """Return the smallest sum of rates for χ1 ≤ a; infinity if there is none."""
        self.inverse.value = 1 / a
        self.problem.solve()
        return float(self.problem.value) if self.variable.value is not None else math.inf

    def rates(self, a: float) -> np.ndarray:
        """Return the rates with the smallest sum for χ1 ≤ a."""
        self.total(a)
        return np.asarray(self.variable.value)


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError:
        raise UserError(
            "optimal rates need cvxpy; it is not installed; pip install 'trainwright[solvers-convex-nets]', or leave rates out"
        ) from None
    return cvxpy
