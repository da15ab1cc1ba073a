"""The 8-bit methods: on small parameters, whose moments stay wide, they are Adam, SGD and LAMB by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .case import Case, Vector

_EIGHT_BIT = (
    ({"block_size": 8}, "block_size of at least 16; got 8"),
    ({"min_8bit_size": 0}, "min_8bit_size of at least 1; got 0"),
    ({"lr": -1.0}, "lr of at least 0"),
    ({"weight_decay": -0.1}, "weight_decay of at least 0"),
)
_ADAM = (*_EIGHT_BIT, ({"betas": (1.0, 0.9)}, r"betas\[0\]"), ({"eps": -1.0}, "eps of at least 0"))
_IN_BLOCKS: tuple[dict[str, Any], ...] = (
    {"block_size": 16, "min_8bit_size": 8},
    {"block_size": 256, "min_8bit_size": 9},
)
_SCALES = ("exp_avg_absmax", "exp_avg_sq_absmax", "momentum_buffer_absmax")
_KERNEL = "a kernel of its own, for parameters above min_8bit_size; tests/optim/test_optim_8bit.py"
_SKIPS = {"nan": "elements without a finite gradient are left alone; tests/optim/test_optim_8bit.py"}


def adamw(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        m, v = np.zeros_like(x), np.zeros_like(x)
        for t, slope in enumerate(slopes, 1):
            g = slope[index] + curvature[index] * x
            x = x * (1 - lr * weight_decay)
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
            x = x - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        results.append(x)
    return results


def momentum(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-2, momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        s = np.zeros_like(x)
        for slope in slopes:
            s = momentum * s + slope[index] + curvature[index] * x + weight_decay * x
            x = x - lr * s
        results.append(x)
    return results


def lamb(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    max_unorm: float | None = None,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        m, v = np.zeros_like(x), np.zeros_like(x)
        for t, slope in enumerate(slopes, 1):
            g = slope[index] + curvature[index] * x
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
            u = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * x
            own, length = math.sqrt(float(np.sum(x * x))), math.sqrt(float(np.sum(u * u)))
            ratio = own / length if max_unorm is None else min(1.0, max_unorm * own / length)
            x = x - lr * ratio * u
        results.append(x)
    return results


CASES = (
    Case(
        "adam8bit",
        adamw,
        _ADAM,
        settings={"lr": 0.02},
        variants=({}, {"weight_decay": 0.1}, {"betas": (0.5, 0.9)}),
        unlike=_IN_BLOCKS,
        sharded_shapes=((4, 512), (7,), (2, 1024)),
        unordered=_SCALES,
        skips={"fused": _KERNEL, **_SKIPS},
    ),
    Case(
        "adamw8bit",
        adamw,
        _ADAM,
        settings={"lr": 0.02, "weight_decay": 0.1},
        variants=({}, {"weight_decay": 0.0}),
        unlike=_IN_BLOCKS,
        sharded_shapes=((4, 512), (7,), (2, 1024)),
        unordered=_SCALES,
        skips={"fused": _KERNEL, **_SKIPS},
    ),
    Case(
        "sgd8bit",
        momentum,
        (*_EIGHT_BIT, ({"momentum": 1.0}, r"momentum in \(0, 1\)"), ({"momentum": 0.0}, r"momentum in \(0, 1\)")),
        settings={"lr": 0.02, "weight_decay": 0.1},
        variants=({}, {"weight_decay": 0.0, "momentum": 0.5}),
        unlike=_IN_BLOCKS,
        sharded_shapes=((4, 512), (7,), (2, 1024)),
        unordered=_SCALES,
        skips={"fused": _KERNEL, **_SKIPS},
    ),
    Case(
        "lamb8bit",
        lamb,
        (*_ADAM, ({"max_unorm": 0.0}, "max_unorm above 0, or None"), ({"fused": True}, "LAMB8bit needs two passes")),
        settings={"lr": 0.02, "weight_decay": 0.1},
        variants=({}, {"weight_decay": 0.0}, {"max_unorm": 0.1}),
        unlike=_IN_BLOCKS,
        sharded_shapes=((4, 512), (7,), (2, 1024)),
        unordered=_SCALES,
        skips={"fused": "it has no compiled form", **_SKIPS},
    ),
)
