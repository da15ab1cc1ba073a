"""AdaBelief, Adan and diffGrad, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .case import Case, Vector

_COMMON = (
    ({"lr": -1.0}, "lr of at least 0"),
    ({"eps": -1e-8}, "eps of at least 0"),
    ({"weight_decay": -0.1}, "weight_decay of at least 0"),
    ({"betas": (1.0, 0.999, 0.9)}, r"betas\[0\] in \[0, 1\)"),
    ({"betas": (0.9, -0.1, 0.9)}, r"betas\[1\] in \[0, 1\)"),
)


def adabelief(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-16, weight_decay: float = 0.0, decoupled: bool = True,
    fixed_decay: bool = False, rectify: bool = True, degenerated_to_sgd: bool = True, amsgrad: bool = False,
    eps_accumulate: bool = True,
) -> list[Vector]:  # fmt: skip
    beta1, beta2 = betas
    results = []
    for index, x in enumerate(theta):
        m, s, top = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        for t, slope in enumerate(slopes, 1):
            g = slope[index] + curvature[index] * x
            if decoupled:
                x = x - x * weight_decay * (1.0 if fixed_decay else lr)
            else:
                g = g + weight_decay * x
            m = beta1 * m + (1 - beta1) * g
            s = beta2 * s + (1 - beta2) * (g - m) ** 2 + (eps if eps_accumulate else 0.0)
            used = s if eps_accumulate else s + eps
            if amsgrad:
                used = top = np.maximum(top, used)
            corrected = m / (1 - beta1**t)
            last = 2 / (1 - beta2) - 1
            now = last - 2 * t * beta2**t / (1 - beta2**t)
            if not rectify:
                x = x - lr * corrected / (np.sqrt(used / (1 - beta2**t)) + eps)
            elif now >= 5:
                top_ratio = (now - 4) * (now - 2) * last / ((last - 4) * (last - 2) * now)
                x = x - lr * math.sqrt((1 - beta2**t) * top_ratio) * corrected / (np.sqrt(used) + eps)
            elif degenerated_to_sgd:
                x = x - lr * corrected
        results.append(x)
    return results


def diffgrad(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, eps_corrected: bool = False,
) -> list[Vector]:  # fmt: skip
    beta1, beta2 = betas
    results = []
    for index, x in enumerate(theta):
        m, v, before = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        for t, slope in enumerate(slopes, 1):
            g = slope[index] + curvature[index] * x + weight_decay * x
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            friction = 1 / (1 + np.exp(-np.abs(before - g)))
            before = g
            first, second = 1 - beta1**t, math.sqrt(1 - beta2**t)
            if eps_corrected:
                x = x - lr * friction * (m / first) / (np.sqrt(v) / second + eps)
            else:
                x = x - lr * second / first * friction * m / (np.sqrt(v) + eps)
        results.append(x)
    return results


def adan(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99), eps: float = 1e-8, weight_decay: float = 0.0,
    max_grad_norm: float = 0.0, no_prox: bool = False,
) -> list[Vector]:  # fmt: skip
    beta1, beta2, beta3 = betas
    theta = list(theta)
    m, d, n, before = ([np.zeros_like(x) for x in theta] for _ in range(4))
    for t, slope in enumerate(slopes, 1):
        grads = [own + bend * x for own, bend, x in zip(slope, curvature, theta)]
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in grads))
        factor = min(1.0, max_grad_norm / (norm + eps)) if max_grad_norm else 1.0
        for i, x in enumerate(theta):
            g = factor * grads[i]
            change = g - before[i] if t > 1 else 0 * g
            before[i] = g
            m[i] = beta1 * m[i] + (1 - beta1) * g
            d[i] = beta2 * d[i] + (1 - beta2) * change
            n[i] = beta3 * n[i] + (1 - beta3) * (g + beta2 * change) ** 2
            root = np.sqrt(n[i] / (1 - beta3**t)) + eps
            moved = lr * (m[i] / (1 - beta1**t) + beta2 * d[i] / (1 - beta2**t)) / root
            if no_prox:
                theta[i] = x * (1 - lr * weight_decay) - moved
            else:
                theta[i] = (x - moved) / (1 + lr * weight_decay)
    return theta


def _variants(**switches: Any) -> tuple[dict[str, Any], ...]:
    """Each switch alone, and all together."""
    return ({}, *({name: value} for name, value in switches.items()), switches)


CASES = (
    Case(
        "adabelief",
        adabelief,
        _COMMON,
        settings={"lr": 0.02, "eps": 1e-8, "weight_decay": 0.1},
        variants=(
            *_variants(decoupled=False, fixed_decay=True, rectify=False, amsgrad=True, eps_accumulate=False),
            {"degenerated_to_sgd": False},
            {"betas": (0.8, 0.6)},
            {"betas": (0.5, 0.9), "amsgrad": True},
            {"weight_decay": 0.0},
        ),
    ),
    Case(
        "adan",
        adan,
        (*_COMMON, ({"betas": (0.9, 0.9, 1.0)}, r"betas\[2\] in \[0, 1\)"), ({"max_grad_norm": -1.0}, "max_grad_norm")),
        settings={"lr": 0.02, "weight_decay": 0.1},
        variants=(*_variants(no_prox=True, max_grad_norm=3.0, weight_decay=0.0), {"max_grad_norm": 1e9}),
    ),
    Case(
        "diffgrad",
        diffgrad,
        _COMMON,
        settings={"lr": 0.02, "weight_decay": 0.1},
        variants=_variants(eps_corrected=True, eps=1e-2, weight_decay=0.0),
    ),
)
