"""Small equality-constrained problems of the Hock-Schittkowski collection and others, written for torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT2 = math.sqrt(2)


@dataclass(frozen=True)
class Problem:
    name: str
    fun: Callable[[Tensor], Tensor]
    constraints: Callable[[Tensor], Tensor]
    x0: list[float]
    best: float
    """The published optimal value."""


def _hs(
    name: str, fun: Callable[..., Tensor], rows: Callable[..., list[Tensor]], x0: list[float], best: float
) -> Problem:
    return Problem(name, lambda x: fun(*x), lambda x: torch.stack(rows(*x)), x0, best)


PROBLEMS = [
    _hs("HS6", lambda a, b: (1 - a) ** 2, lambda a, b: [10 * (b - a**2)], [-1.2, 1.0], 0.0),
    _hs(
        "HS7",
        lambda a, b: torch.log(1 + a**2) - b,
        lambda a, b: [(1 + a**2) ** 2 + b**2 - 4],
        [2.0, 2.0],
        -math.sqrt(3),
    ),
    _hs(
        "HS26",
        lambda a, b, c: (a - b) ** 2 + (b - c) ** 4,
        lambda a, b, c: [(1 + b**2) * a + c**4 - 3],
        [-2.6, 2.0, 2.0],
        0.0,
    ),
    _hs(
        "HS27",
        lambda a, b, c: 0.01 * (a - 1) ** 2 + (b - a**2) ** 2,
        lambda a, b, c: [a + c**2 + 1],
        [2.0, 2.0, 2.0],
        0.04,
    ),
    _hs(
        "HS28",
        lambda a, b, c: (a + b) ** 2 + (b + c) ** 2,
        lambda a, b, c: [a + 2 * b + 3 * c - 1],
        [-4.0, 1.0, 1.0],
        0.0,
    ),
    _hs(
        "HS39", lambda a, b, c, d: -a, lambda a, b, c, d: [b - a**3 - c**2, a**2 - b - d**2], [2.0, 2.0, 2.0, 2.0], -1.0
    ),
    _hs(
        "HS40",
        lambda a, b, c, d: -a * b * c * d,
        lambda a, b, c, d: [a**3 + b**2 - 1, a**2 * d - c, d**2 - b],
        [0.8, 0.8, 0.8, 0.8],
        -0.25,
    ),
    _hs(
        "HS42",
        lambda a, b, c, d: (a - 1) ** 2 + (b - 2) ** 2 + (c - 3) ** 2 + (d - 4) ** 2,
        lambda a, b, c, d: [a - 2, c**2 + d**2 - 2],
        [1.0, 1.0, 1.0, 1.0],
        28 - 10 * ROOT2,
    ),
    _hs(
        "HS46",
        lambda a, b, c, d, e: (a - b) ** 2 + (c - 1) ** 2 + (d - 1) ** 4 + (e - 1) ** 6,
        lambda a, b, c, d, e: [a**2 * d + torch.sin(d - e) - 1, b + c**4 * d**2 - 2],
        [ROOT2 / 2, 1.75, 0.5, 2.0, 2.0],
        0.0,
    ),
    _hs(
        "HS47",
        lambda a, b, c, d, e: (a - b) ** 2 + (b - c) ** 3 + (c - d) ** 4 + (d - e) ** 4,
        lambda a, b, c, d, e: [a + b**2 + c**3 - 3, b - c**2 + d - 1, a * e - 1],
        [2.0, ROOT2, -1.0, 2 - ROOT2, 0.5],
        0.0,
    ),
    _hs(
        "HS48",
        lambda a, b, c, d, e: (a - 1) ** 2 + (b - c) ** 2 + (d - e) ** 2,
        lambda a, b, c, d, e: [a + b + c + d + e - 5, c - 2 * (d + e) + 3],
        [3.0, 5.0, -3.0, 2.0, -2.0],
        0.0,
    ),
    _hs(
        "HS49",
        lambda a, b, c, d, e: (a - b) ** 2 + (c - 1) ** 2 + (d - 1) ** 4 + (e - 1) ** 6,
        lambda a, b, c, d, e: [a + b + c + 4 * d - 7, c + 5 * e - 6],
        [10.0, 7.0, 2.0, -3.0, 0.8],
        0.0,
    ),
    _hs(
        "HS50",
        lambda a, b, c, d, e: (a - b) ** 2 + (b - c) ** 2 + (c - d) ** 4 + (d - e) ** 2,
        lambda a, b, c, d, e: [a + 2 * b + 3 * c - 6, b + 2 * c + 3 * d - 6, c + 2 * d + 3 * e - 6],
        [35.0, -31.0, 11.0, 5.0, -5.0],
        0.0,
    ),
    _hs(
        "HS51",
        lambda a, b, c, d, e: (a - b) ** 2 + (b + c - 2) ** 2 + (d - 1) ** 2 + (e - 1) ** 2,
        lambda a, b, c, d, e: [a + 3 * b - 4, c + d - 2 * e, b - e],
        [2.5, 0.5, 2.0, -1.0, 0.5],
        0.0,
    ),
    _hs(
        "HS52",
        lambda a, b, c, d, e: (4 * a - b) ** 2 + (b + c - 2) ** 2 + (d - 1) ** 2 + (e - 1) ** 2,
        lambda a, b, c, d, e: [a + 3 * b, c + d - 2 * e, b - e],
        [2.0, 2.0, 2.0, 2.0, 2.0],
        1859 / 349,
    ),
    _hs(
        "HS61",
        lambda a, b, c: 4 * a**2 + 2 * b**2 + 2 * c**2 - 33 * a + 16 * b - 24 * c,
        lambda a, b, c: [3 * a - 2 * b**2 - 7, 4 * a - c**2 - 11],
        [0.0, 0.0, 0.0],
        -143.6461422,
    ),
    _hs(
        "HS77",
        lambda a, b, c, d, e: (a - 1) ** 2 + (a - b) ** 2 + (c - 1) ** 2 + (d - 1) ** 4 + (e - 1) ** 6,
        lambda a, b, c, d, e: [a**2 * d + torch.sin(d - e) - 2 * ROOT2, b + c**4 * d**2 - 8 - ROOT2],
        [2.0, 2.0, 2.0, 2.0, 2.0],
        0.24150513,
    ),
    _hs(
        "HS78",
        lambda a, b, c, d, e: a * b * c * d * e,
        lambda a, b, c, d, e: [a**2 + b**2 + c**2 + d**2 + e**2 - 10, b * c - 5 * d * e, a**3 + b**3 + 1],
        [-2.0, 1.5, 2.0, -1.0, -1.0],
        -2.91970041,
    ),
    _hs(
        "HS79",
        lambda a, b, c, d, e: (a - 1) ** 2 + (a - b) ** 2 + (b - c) ** 2 + (c - d) ** 4 + (d - e) ** 4,
        lambda a, b, c, d, e: [a + b**2 + c**3 - 2 - 3 * ROOT2, b - c**2 + d + 2 - 2 * ROOT2, a * e - 2],
        [2.0, 2.0, 2.0, 2.0, 2.0],
        0.0787768209,
    ),
    _hs(
        "BT1",
        lambda a, b: -a + 10 * (a**2 + b**2 - 1),
        lambda a, b: [a**2 + b**2 - 1],
        [0.08, 0.06],
        -1.0,
    ),
    _hs(
        "BYRDSPHR",
        lambda a, b, c: -a - b - c,
        lambda a, b, c: [a**2 + b**2 + c**2 - 9, (a - 1) ** 2 + b**2 + c**2 - 9],
        [5.0, 0.0001, -0.0001],
        -4.68330049,
    ),
]


def sine_quartic(num_variables: int = 20, num_constraints: int = 8, seed: int = 0) -> Problem:
    """A convex quartic with linear constraints that a sine bends."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(num_constraints, num_variables, generator=random, dtype=torch.float64)
    right = torch.randn(num_constraints, generator=random, dtype=torch.float64)
    centre = torch.randn(num_variables, generator=random, dtype=torch.float64)
    return Problem(
        "sine-quartic",
        lambda x: 0.25 * (x - centre).pow(4).sum() + 0.5 * (x - centre).square().sum(),
        lambda x: matrix @ x + 0.1 * torch.sin(matrix @ x) - right,
        [1.0] * num_variables,
        math.nan,
    )


def logistic(num_samples: int = 400, num_features: int = 30, num_constraints: int = 5, seed: int = 0) -> Problem:
    """Logistic regression with a small ridge, its weights bound to A w = b."""
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, num_features, generator=random, dtype=torch.float64)
    truth = torch.randn(num_features, generator=random, dtype=torch.float64)
    labels = torch.sign(features @ truth + torch.randn(num_samples, generator=random, dtype=torch.float64))
    matrix = torch.randn(num_constraints, num_features, generator=random, dtype=torch.float64)
    right = matrix @ truth / 4
    return Problem(
        f"logistic n={num_features}",
        lambda w: torch.nn.functional.softplus(-labels * (features @ w)).mean() + 0.005 * w.square().sum(),
        lambda w: matrix @ w - right,
        [0.0] * num_features,
        math.nan,
    )


def pde_control(grid: int = 8, weight: float = 1e-2) -> Problem:
    """Steer −Δy + y³ = u on the unit square to a target: min h²/2 (‖y − y_d‖² + weight ‖u‖²), variables (y, u)."""
    num, h = grid * grid, 1 / (grid + 1)
    line = (
        torch.diag(torch.full((grid,), 2.0))
        - torch.diag(torch.ones(grid - 1), 1)
        - torch.diag(torch.ones(grid - 1), -1)
    )
    eye = torch.eye(grid)
    laplace = (torch.kron(eye, line) + torch.kron(line, eye)).double()
    axis = torch.linspace(h, 1 - h, grid, dtype=torch.float64)
    target = torch.outer(torch.sin(math.pi * axis), axis * (1 - axis) * 4).reshape(-1)
    return Problem(
        f"pde {grid}x{grid}",
        lambda z: 0.5 * ((z[:num] - target).square().sum() + weight * z[num:].square().sum()),
        lambda z: laplace @ z[:num] + h**2 * (z[:num] ** 3 - 10 * z[num:]),
        [0.0] * (2 * num),
        math.nan,
    )
