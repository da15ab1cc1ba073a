"""AdaGrad's two forms, SGD-SaI, FRUGAL and clipping, by hand."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from trainwright.numerics.seeds import seeded

from .case import SHAPES, Case, Vector

_DECAY = ({"lr": -1.0}, "lr of at least 0"), ({"weight_decay": -0.1}, "weight_decay of at least 0")
_BETAS = ({"betas": (1.0, 0.9)}, r"betas\[0\] in \[0, 1\)"), ({"betas": (0.9, -0.1)}, r"betas\[1\] in \[0, 1\)")


def adadagrad(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-2, eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        total = np.zeros_like(x)
        for slope in slopes:
            g = slope[index] + curvature[index] * x
            total = total + g * g
            x = x * (1 - lr * weight_decay) - lr * g / (np.sqrt(total) + eps)
        results.append(x)
    return results


def adadagradnorm(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1.0, b0: float = 0.01,
    weight_decay: float = 0.0,
) -> list[Vector]:  # fmt: skip
    theta, square = list(theta), b0**2
    for slope in slopes:
        grads = [own + bend * x for own, bend, x in zip(slope, curvature, theta)]
        square += sum(float(np.sum(g * g)) for g in grads)
        theta = [x * (1 - lr * weight_decay) - lr * g / math.sqrt(square) for x, g in zip(theta, grads)]
    return theta


def sgdsai(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-2, momentum: float = 0.9,
    eps: float = 1e-8, weight_decay: float = 1e-2, guard: float = 1e-5,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        mean, gain = np.zeros_like(x), 0.0
        for t, slope in enumerate(slopes):
            g = slope[index] + curvature[index] * x
            if t == 0:
                deviation = float(np.std(g, ddof=1)) if g.size > 1 else 0.0
                norm = float(np.linalg.norm(g))
                flat = deviation <= guard * norm / math.sqrt(g.size)
                gain, mean = math.sqrt(g.size) if flat else norm / (deviation + eps), g
            mean = momentum * mean + (1 - momentum) * g
            x = x * (1 - lr * weight_decay) - lr * gain * mean
        results.append(x)
    return results


def clipped(values: list[Vector], clip: float, scale: float = 1.0) -> list[Vector]:
    ordered = np.sort(np.abs(np.concatenate(values)))[::-1]
    place = int(len(ordered) * clip)
    threshold = math.inf if clip == 0 else scale * float(ordered[place]) if place < len(ordered) else 0.0
    return [np.clip(value, -threshold, threshold) for value in values]


def clippedsgd(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-2, clip: float = 0.1,
    momentum: float = 0.0, weight_decay: float = 0.0, threshold_scale: float = 1.0,
) -> list[Vector]:  # fmt: skip
    theta, buffers = list(theta), [np.zeros_like(x) for x in theta]
    for slope in slopes:
        grads = clipped([own + bend * x for own, bend, x in zip(slope, curvature, theta)], clip, threshold_scale)
        buffers = [momentum * b + g + weight_decay * x for b, g, x in zip(buffers, grads, theta)]
        theta = [x - lr * b for x, b in zip(theta, buffers)]
    return theta


def clippedadam(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, clip: float = 0.5,
    threshold_scale: float = 1.0, clip_update: bool = False,
) -> list[Vector]:  # fmt: skip
    theta = list(theta)
    m, v = ([np.zeros_like(x) for x in theta] for _ in range(2))
    for t, slope in enumerate(slopes, 1):
        grads = [own + bend * x for own, bend, x in zip(slope, curvature, theta)]
        firsts = grads if clip_update else clipped(grads, clip, threshold_scale)
        m = [betas[0] * a + (1 - betas[0]) * g for a, g in zip(m, firsts)]
        v = [betas[1] * b + (1 - betas[1]) * g * g for b, g in zip(v, grads)]
        updates = [a / (1 - betas[0] ** t) / (np.sqrt(b / (1 - betas[1] ** t)) + eps) for a, b in zip(m, v)]
        updates = clipped(updates, clip, threshold_scale) if clip_update else updates
        theta = [x * (1 - lr * weight_decay) - lr * u for x, u in zip(theta, updates)]
    return theta


def clippedadafactor(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-2, clip: float = 0.5,
    decay: float = -0.8, max_rms: float = 1.0, eps: tuple[float, float] = (1e-30, 1e-3), weight_decay: float = 0.0,
    threshold_scale: float = 1.0,
) -> list[Vector]:  # fmt: skip
    theta, moments = list(theta), [(0.0, 0.0)] * len(theta)
    for t, slope in enumerate(slopes, 1):
        grads = [own + bend * x for own, bend, x in zip(slope, curvature, theta)]
        beta = 1 - t**decay
        for index, (g, numerator) in enumerate(zip(grads, clipped(grads, clip, threshold_scale))):
            squares = (g * g + eps[0]).reshape(SHAPES[index])
            first, second = moments[index]
            if squares.ndim < 2:
                first = beta * first + (1 - beta) * squares
                v = first
            else:
                first = beta * first + (1 - beta) * squares.mean(-1, keepdims=True)
                second = beta * second + (1 - beta) * squares.mean(-2, keepdims=True)
                v = first * second / first.mean(-2, keepdims=True)
            moments[index] = (first, second)
            u = numerator / np.sqrt(np.ravel(v))
            u = u / max(1.0, math.sqrt(np.mean(u * u)) / max_rms)
            x = theta[index]
            scale = max(eps[1], math.sqrt(np.mean(x * x)))
            theta[index] = x * (1 - lr * weight_decay) - lr * scale * u
    return theta


def lion(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
) -> list[Vector]:  # fmt: skip
    theta, means = list(theta), [np.zeros_like(x) for x in theta]
    for slope in slopes:
        grads = [own + bend * x for own, bend, x in zip(slope, curvature, theta)]
        steps = [np.sign(betas[0] * m + (1 - betas[0]) * g) for m, g in zip(means, grads)]
        means = [betas[1] * m + (1 - betas[1]) * g for m, g in zip(means, grads)]
        theta = [x * (1 - lr * weight_decay) - lr * u for x, u in zip(theta, steps)]
    return theta


def of_one_length(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], by_sign: bool, lr: float = 1e-3,
    momentum: float = 0.9, weight_decay: float = 0.0, clip: float = 0.0, threshold_scale: float = 1.0,
) -> list[Vector]:  # fmt: skip
    theta, means = list(theta), [np.zeros_like(x) for x in theta]
    for slope in slopes:
        grads = clipped([own + bend * x for own, bend, x in zip(slope, curvature, theta)], clip, threshold_scale)
        if not by_sign:
            grads = [g * math.sqrt(g.size) / np.linalg.norm(g) for g in grads]
        means = [momentum * m + (1 - momentum) * g for m, g in zip(means, grads)]
        steps = [np.sign(m) if by_sign else m for m in means]
        theta = [x * (1 - lr * weight_decay) - lr * u for x, u in zip(theta, steps)]
    return theta


def frugal(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, projection: str = "columns",
    density: float = 0.25, update_gap: int = 200, inactive: str = "sign", inactive_scale: float = 1.0,
    projected_scale: float = 1.0, active: str = "adam", projected: bool | None = None, reset_moments: bool = True,
    seed: int = 0,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        shape = SHAPES[index]
        whole = projected is False or len(shape) < 2
        m, v, inside = np.zeros_like(x), np.zeros_like(x), np.arange(x.size)
        for t, slope in enumerate(slopes):
            g = slope[index] + curvature[index] * x
            since = t % update_gap + 1 if reset_moments and not whole else t + 1
            if not whole and t % update_gap == 0:
                inside = _inside(shape, projection, density, (seed, index, t // update_gap))
                if reset_moments or t == 0:
                    m, v = np.zeros(inside.size), np.zeros(inside.size)
            low = g[inside]
            m, v = betas[0] * m + (1 - betas[0]) * low, betas[1] * v + (1 - betas[1]) * low * low
            step = m / (1 - betas[0] ** since) / (np.sqrt(v / (1 - betas[1] ** since)) + eps)
            step = m if active == "sgdm" and not whole else step
            change = inactive_scale * {"sign": np.sign(g), "sgd": g, "none": 0 * g}[inactive]
            change[inside] = step
            x = x * (1 - lr * weight_decay) - lr * (1 if whole else projected_scale) * change
        results.append(x)
    return results


def _inside(shape: tuple[int, ...], projection: str, density: float, place: tuple[int, int, int]) -> Any:
    """The elements of the part, in the order of their moments."""
    rows, columns = shape[0], math.prod(shape[1:])
    count = {"columns": columns, "rows": rows, "entries": rows * columns}[projection]
    chosen = np.sort(torch.randperm(count, generator=seeded(*place))[: int(density * count)].numpy())
    if projection == "rows":
        return (chosen[:, None] * columns + np.arange(columns)).ravel()
    return (np.arange(rows)[:, None] * columns + chosen).ravel() if projection == "columns" else chosen


_WHOLE_MODEL = "one number for the whole model is part of every update"

CASES = (
    Case(
        "adadagrad",
        adadagrad,
        (*_DECAY, ({"eps": -1.0}, "eps of at least 0")),
        settings={"lr": 0.05, "weight_decay": 0.1},
        variants=({}, {"weight_decay": 0.0}, {"eps": 0.1}),
    ),
    Case(
        "adadagradnorm",
        adadagradnorm,
        (*_DECAY, ({"b0": 0.0}, "b0 above 0")),
        settings={"lr": 0.3, "weight_decay": 0.1},
        variants=({}, {"weight_decay": 0.0}, {"b0": 2.0}),
        skips=dict.fromkeys(("nan", "groups", "late"), _WHOLE_MODEL),
    ),
    Case(
        "sgdsai",
        sgdsai,
        (
            *_DECAY,
            ({"eps": -1.0}, "eps of at least 0"),
            ({"momentum": 1.0}, r"momentum in \[0, 1\)"),
            ({"guard": 1.0}, r"guard in \[0, 1\)"),
        ),
        settings={"lr": 0.01, "weight_decay": 0.1},
        variants=({}, {"momentum": 0.0}, {"weight_decay": 0.0}, {"eps": 0.1, "guard": 0.0}),
    ),
    Case(
        "clippedsgd",
        clippedsgd,
        (
            *_DECAY,
            ({"clip": 1.5}, r"clip in \[0, 1\]"),
            ({"threshold_scale": 0.0}, "threshold_scale above 0"),
            ({"momentum": -0.1}, r"momentum in \[0, 1\)"),
        ),
        settings={"lr": 0.05, "weight_decay": 0.1, "clip": 0.3},
        variants=({}, {"momentum": 0.8}, {"clip": 0.0}, {"clip": 1.0}, {"threshold_scale": 0.5, "weight_decay": 0.0}),
        skips=dict.fromkeys(("nan", "late"), _WHOLE_MODEL),
    ),
    Case(
        "clippedadam",
        clippedadam,
        (
            *_DECAY,
            *_BETAS,
            ({"eps": -1.0}, "eps of at least 0"),
            ({"clip": -0.5}, r"clip in \[0, 1\]"),
            ({"threshold_scale": 0.0}, "threshold_scale above 0"),
        ),
        settings={"lr": 0.05, "weight_decay": 0.1, "clip": 0.4},
        variants=({}, {"clip_update": True}, {"clip": 0.0, "betas": (0.5, 0.8)}, {"threshold_scale": 0.5}),
        skips=dict.fromkeys(("nan", "late"), _WHOLE_MODEL),
    ),
    Case(
        "clippedadafactor",
        clippedadafactor,
        (
            *_DECAY,
            ({"clip": 1.5}, r"clip in \[0, 1\]"),
            ({"decay": 0.5}, "decay below 0"),
            ({"max_rms": 0.0}, "max_rms above 0"),
            ({"fused": True}, "means stand between its passes"),
        ),
        settings={"lr": 0.05, "weight_decay": 0.1, "clip": 0.3},
        variants=({}, {"clip": 0.0}, {"decay": -0.5, "max_rms": 0.3}, {"eps": (0.1, 2.0), "threshold_scale": 0.5}),
        skips={
            "nan": "the root mean square of a whole tensor is part of its update",
            "fused": "refused, with the reason",
            "ranks": "not on shards: its record says why",
            "plan": "not on shards: its record says why",
            "temporaries": "its means hold small tensors beside those of the parameter's size",
            **dict.fromkeys(("groups", "late"), _WHOLE_MODEL),
        },
    ),
    Case(
        "lion",
        lion,
        (*_DECAY, *_BETAS),
        settings={"lr": 0.05, "betas": (0.6, 0.8), "weight_decay": 0.1},
        variants=({}, {"weight_decay": 0.0}, {"betas": (0.9, 0.5)}),
        skips={"nan": "the sign of NaN is 0"},
    ),
    Case(
        "signsgd",
        functools.partial(of_one_length, by_sign=True),
        (*_DECAY, ({"clip": 1.5}, r"clip in \[0, 1\]"), ({"momentum": 1.0}, r"momentum in \[0, 1\)")),
        settings={"lr": 0.05, "momentum": 0.7, "weight_decay": 0.1, "clip": 0.2},
        variants=({}, {"momentum": 0.0}, {"clip": 0.0}, {"threshold_scale": 0.5, "weight_decay": 0.0}),
        skips={"nan": "the sign of NaN is 0", **dict.fromkeys(("groups", "late"), _WHOLE_MODEL)},
    ),
    Case(
        "normalizedsgd",
        functools.partial(of_one_length, by_sign=False),
        (*_DECAY, ({"clip": 1.5}, r"clip in \[0, 1\]"), ({"momentum": 1.0}, r"momentum in \[0, 1\)")),
        settings={"lr": 0.05, "momentum": 0.7, "weight_decay": 0.1, "clip": 0.2},
        variants=({}, {"momentum": 0.0}, {"clip": 0.0}, {"threshold_scale": 0.5, "weight_decay": 0.0}),
        skips={
            "nan": "one length for the whole tensor",
            "fused": "refused, with the reason",
            **dict.fromkeys(("groups", "late"), _WHOLE_MODEL),
        },
    ),
    Case(
        "frugal",
        frugal,
        (
            *_DECAY,
            *_BETAS,
            ({"eps": -1.0}, "eps of at least 0"),
            ({"density": 1.1}, r"density in \[0, 1\]"),
            ({"projection": "some"}, "a projection is needed"),
        ),
        settings={"lr": 0.05, "weight_decay": 0.1, "update_gap": 3, "density": 0.4},
        variants=(
            {},
            {"projection": "rows", "inactive_scale": 0.3},
            {"projection": "entries", "projected_scale": 0.5, "seed": 3},
            {"inactive": "none"},
            {"active": "sgdm", "inactive": "sgd"},
            {"density": 0.0},
            {"density": 1.0, "betas": (0.5, 0.8)},
            {"projected": False},
            {"reset_moments": False},
            {"reset_moments": False, "projection": "rows"},
        ),
        skips={
            "capturable": "each tensor chooses its part by its own count",
            "fused": "its pass is C++; tests/optim/test_optim_frugal.py",
            "complex": "a complex matrix keeps its whole state",
            "nan": "the sign of NaN is 0",
            "late": "the choice depends on the place in the group",
            "groups": "the choice depends on the place in the group",
        },
    ),
)
