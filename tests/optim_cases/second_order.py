"""Methods with curvature, windows and surrogates, by hand; the battery's Hessian is diagonal, so ±1 probes see it exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.numerics.hvp import real_view

from .case import SHAPES, Case, Problem, Vector, by_closure, whole

_LOSS_TERMS = 3
_COMMON: tuple[tuple[dict[str, Any], str], ...] = (
    ({"lr": -1.0}, "lr of at least 0"),
    ({"weight_decay": -0.1}, "weight_decay of at least 0"),
)
_CURVED = (
    *_COMMON,
    ({"eps": -1e-8}, "eps of at least 0"),
    ({"betas": (1.0, 0.9)}, r"betas\[0\] in \[0, 1\)"),
    ({"update_period": 0}, "update_period of at least 1"),
)
_NEEDS_CURVATURE = "its first step by gradients alone is refused; tests/optim/test_optim_second_order.py"
_NEEDS_CLOSURE = "its step needs a closure, and one group"
_NOT_OFFERED = "refused, with the reason"


def by_sample(optimizer: Any, problem: Problem) -> Any:
    """With the loss itself in the place of one against sampled labels, which the arithmetic cannot tell."""
    if optimizer.hessian_due:
        optimizer.update_hessian(problem.loss, _LOSS_TERMS)
    pairs = zip(problem.params, problem.gradients(), strict=True)
    if not all(param.grad is not None and torch.equal(whole(param.grad), whole(grad)) for param, grad in pairs):
        problem.set_gradients()
    return optimizer.step()


def by_targets(optimizer: Any, problem: Problem) -> Any:
    """The targets are the parameters."""

    def flat(tensors: Any) -> Tensor:
        return torch.cat([real_view(tensor).reshape(-1) for tensor in tensors])

    twice = [curve.repeat_interleave(2) if curve.is_complex() else curve for curve in problem.curvature]
    slope, bend = flat(problem.slopes), torch.cat([real_part(curve).reshape(-1) for curve in twice])
    return optimizer.step(lambda: flat(problem.params), lambda z: (problem.loss(), slope + bend * z))


def real_part(tensor: Tensor) -> Tensor:
    return tensor.real if tensor.is_complex() else tensor


def _sophia(estimate: Callable[[Vector, Vector], Vector], first_refresh: int) -> Callable[..., list[Vector]]:
    def oracle(
        theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float,
        betas: tuple[float, float], gamma: float, weight_decay: float, update_period: int, eps: float = 1e-12,
        **_: Any,
    ) -> list[Vector]:  # fmt: skip
        results = []
        for index, x in enumerate(theta):
            m, h = np.zeros_like(x), np.zeros_like(x)
            for t, slope in enumerate(slopes):
                g = slope[index] + curvature[index] * x
                if t % update_period == 0 and t >= first_refresh * update_period:
                    h = betas[1] * h + (1 - betas[1]) * estimate(g, curvature[index])
                x = x * (1 - lr * weight_decay)
                m = betas[0] * m + (1 - betas[0]) * g
                x = x - lr * np.clip(m / np.maximum(gamma * h, eps), -1, 1)
            results.append(x)
        return results

    return oracle


def adahessian(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float, betas: tuple[float, float],
    eps: float, weight_decay: float, hessian_power: float = 1.0, update_period: int = 1,
    average: str | int | None = "spatial", **_: Any,
) -> list[Vector]:  # fmt: skip
    results = []
    for index, x in enumerate(theta):
        diagonal, shape = np.abs(curvature[index]).reshape(SHAPES[index]), SHAPES[index]
        if len(shape) == 4 and average in ("spatial", "row"):
            diagonal = np.broadcast_to(diagonal.mean((2, 3), keepdims=True), shape)
        elif len(shape) == 2 and average == "row":
            diagonal = np.broadcast_to(diagonal.mean(1, keepdims=True), shape)
        elif len(shape) > 1 and isinstance(average, int):
            parts = np.split(diagonal.ravel(), range(average, x.size, average))
            diagonal = np.concatenate([np.full(part.size, part.mean()) for part in parts])
        m, q = np.zeros_like(x), np.zeros_like(x)
        for t, slope in enumerate(slopes):
            g = slope[index] + curvature[index] * x
            if t % update_period == 0:
                q = betas[1] * q + (1 - betas[1]) * diagonal.ravel() ** 2
            m = betas[0] * m + (1 - betas[0]) * g
            second = 1 - betas[1] ** (t // update_period + 1)
            scale = (np.sqrt(q) / np.sqrt(second)) ** hessian_power + eps
            x = x - lr * (m / ((1 - betas[0] ** (t + 1)) * scale) + weight_decay * x)
        results.append(x)
    return results


def mfac(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float, num_gradients: int,
    damping: float, momentum: float = 0.0, weight_decay: float = 0.0, divisor: str = "window", **_: Any,
) -> list[Vector]:  # fmt: skip
    cuts = np.cumsum([x.size for x in theta])[:-1]
    x, bend, window = np.concatenate(theta), np.concatenate(curvature), []
    velocity = np.zeros_like(x)
    for slope in slopes:
        g = np.concatenate(slope) + bend * x + weight_decay * x
        window = [*window, g][-num_gradients:]
        rows = np.stack(window)
        count = num_gradients if divisor == "window" else len(window)
        direction = np.linalg.solve(damping * np.eye(x.size) + rows.T @ rows / count, g)
        velocity = momentum * velocity + (1 - momentum) * direction
        x = x - lr * (velocity if momentum else direction)
    return list(np.split(x, cuts))


def newton(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float = 1.0, gamma: float = 1.0,
    solver: str = "cg", **_: Any,
) -> list[Vector]:  # fmt: skip
    cuts = np.cumsum([x.size for x in theta])[:-1]
    x, bend = np.concatenate(theta), np.concatenate(curvature)
    for slope in slopes:
        linear = np.concatenate(slope)
        g, value = linear + bend * x, float(linear @ x + 0.5 * bend @ (x * x))
        while True:
            shift = np.linalg.norm(g) / gamma
            after = x - g / ((bend if solver != "gradient" else 0.0) + shift)
            rest = linear + bend * after
            if value - float(linear @ after + 0.5 * bend @ (after * after)) >= rest @ rest / (8 * shift):
                break
            gamma /= 2
        x, gamma = x + lr * (after - x), 2 * gamma
    return list(np.split(x, cuts))


def surrogate(
    theta: list[Vector], slopes: list[list[Vector]], curvature: list[Vector], lr: float, num_inner_steps: int,
    inner_step: float, search: str = "armijo", **_: Any,
) -> list[Vector]:  # fmt: skip
    cuts = np.cumsum([x.size for x in theta])[:-1]
    x, bend, step = np.concatenate(theta), np.concatenate(curvature), inner_step / 2
    for slope in slopes:
        d, anchor = np.concatenate(slope) + bend * x, x

        def q(point: Vector, d: Vector = d, anchor: Vector = anchor) -> float:
            return float(d @ (point - anchor) + (point - anchor) @ (point - anchor) / (2 * lr))

        for _step in range(num_inner_steps):
            g = d + (x - anchor) / lr
            if search == "fixed":
                x = x - inner_step * g
                continue
            if np.linalg.norm(g) <= 1e-6:
                break
            step = 2 * step
            while q(x - step * g) > q(x) - 0.1 * step * float(g @ g):
                step *= 0.9
            x = x - step * g
    return list(np.split(x, cuts))


_SOPHIA = {"lr": 0.05, "betas": (0.8, 0.7), "gamma": 0.5, "weight_decay": 0.1}
_FORMS = {"fused": _NOT_OFFERED, "capturable": _NOT_OFFERED}
_BY_CLOSURE = dict.fromkeys(
    ("sparse", "nan", "without gradient", "late", "groups", "scaler", "temporaries"), _NEEDS_CLOSURE
)
_FIRST = dict.fromkeys(("without gradient", "late", "groups", "scaler"), _NEEDS_CURVATURE)

CASES = (
    Case(
        "sophiag",
        _sophia(lambda g, _: _LOSS_TERMS * g * g, 1),
        (*_CURVED, ({"gamma": 0.0}, "gamma above 0")),
        settings={**_SOPHIA, "update_period": 4},
        variants=({}, {"update_period": 5}, {"weight_decay": 0.0}),
        drive=by_sample,
        skips={"late": "without a refresh it stops after update_period steps; tests/optim/test_optim_second_order.py"},
    ),
    Case(
        "sophiah",
        _sophia(lambda _, bend: bend, 0),
        (*_CURVED, ({"gamma": 0.0}, "gamma above 0"), ({"probe": "cube"}, "probe among rademacher, gaussian")),
        settings={**_SOPHIA, "update_period": 3, "probe": "rademacher"},
        variants=({}, {"update_period": 1}, {"weight_decay": 0.0, "eps": 1e-2}),
        drive=by_closure,
        skips=_FIRST,
    ),
    Case(
        "adahessian",
        adahessian,
        (*_CURVED, ({"hessian_power": 0.0}, r"hessian_power in \(0, 1\]"), ({"average": "mean"}, "average 'spatial'")),
        settings={"lr": 0.02, "betas": (0.8, 0.7), "eps": 0.1, "weight_decay": 0.1},
        variants=(
            {},
            {"update_period": 3},
            {"average": "row"},
            {"average": None, "hessian_power": 0.5},
            {"average": 4, "weight_decay": 0.0},
        ),
        drive=by_closure,
        skips=_FIRST,
    ),
    Case(
        "mfac",
        mfac,
        (
            *_COMMON,
            ({"num_gradients": 0}, "num_gradients of at least 1"),
            ({"damping": 0.0}, "damping above 0"),
            ({"momentum": 1.0}, r"momentum in \[0, 1\)"),
            ({"divisor": "all"}, "divisor 'window' or 'filled'"),
        ),
        settings={"lr": 0.05, "num_gradients": 3, "damping": 0.5, "weight_decay": 0.1},
        variants=({}, {"momentum": 0.5}, {"divisor": "filled", "weight_decay": 0.0}),
        skips={
            **_FORMS,
            **dict.fromkeys(("late", "groups"), "all parameters are one vector; tests/optim/test_optim_mfac.py"),
            "nan": "refused, for it would stay in the window; tests/optim/test_optim_mfac.py",
            "temporaries": "the factorisation's workspace is LAPACK's; bounded in tests/optim/test_optim_mfac.py",
        },
    ),
    Case(
        "gradnormsmoothnewton",
        newton,
        (_COMMON[0], ({"solver": "qr"}, "solver among"), ({"gamma": 0.0}, "gamma above 0")),
        settings={"solver": "cg", "cg_rtol": 1e-13},
        variants=({}, {"gamma": 0.3}, {"solver": "gradient"}),
        drive=by_closure,
        skips={**_FORMS, **_BY_CLOSURE},
    ),
    Case(
        "sso",
        surrogate,
        (_COMMON[0], ({"search": "wolfe"}, "search 'armijo' or 'fixed'"), ({"num_inner_steps": 0}, "num_inner_steps")),
        settings={"lr": 0.3, "num_inner_steps": 3, "inner_step": 1.0},
        variants=({}, {"search": "fixed", "inner_step": 0.05}),
        drive=by_targets,
        skips={
            **_FORMS,
            **_BY_CLOSURE,
            "narrow": "targets of low precision change which steps the search accepts",
            "ranks": "its targets join parameters of several shardings; tests/optim/test_optim_sso.py",
        },
    ),
)  # fmt: skip
