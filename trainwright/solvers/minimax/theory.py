"""The constants of the proofs. They guarantee; they are far too cautious to use: measure your own steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...artifacts import UserError
from .catalyst import AccSpiderGDA
from .spider import SpiderGDA


@dataclass(frozen=True)
class Planned:
    """A method with the number of its iterations that the proof asks for."""

    method: SpiderGDA | AccSpiderGDA
    max_iterations: int


def spider(
    num_components: int, smoothness: float, mu_x: float, mu_y: float, accuracy: float, *, one_sided: bool = False
) -> Planned:
    """Return SPIDER-GDA with M = B = √n, step_y = 1/(5 L), λ = 32 L²/μᵧ², step_x = step_y/(24 λ) and its K and T.

    PL in both: K = ⌈4224/(μₓ step_x)⌉, T = ⌈log(1/accuracy)⌉ restarts. `one_sided` (PL in y alone; `mu_x` is not
    read): T = 1, K = ⌈64/(step_x accuracy²)⌉. Source: Chen, Yao, Luo, NeurIPS 2022.

    >>> planned = spider(100, smoothness=1.0, mu_x=1.0, mu_y=1.0, accuracy=0.1)
    >>> planned.method.period, planned.method.num_inner, planned.max_iterations // planned.method.num_inner
    (10, 16220160, 3)
    """
    _check(num_components, smoothness, mu_x, mu_y, accuracy)
    step_y = 1 / (5 * smoothness)
    step_x = step_y / (24 * 32 * smoothness**2 / mu_y**2)
    num_inner = _ceil(64 / (step_x * accuracy**2)) if one_sided else _ceil(4224 / (mu_x * step_x))
    num_restarts = 1 if one_sided else max(1, _ceil(math.log(1 / accuracy)))
    root = _ceil(math.sqrt(num_components))
    method = SpiderGDA(step_x, step_y, batch_size=root, period=root, num_inner=num_inner)
    return Planned(method, num_restarts * num_inner)


def acc_spider(
    num_components: int,
    smoothness: float,
    mu_x: float,
    mu_y: float,
    accuracy: float,
    gap: float,
    *,
    as_printed: bool = False,
) -> Planned:
    """Return AccSPIDER-GDA with β = 2 L, γ = 0, x as the fast variable, and the outer steps for a primal gap of `accuracy`.

    `gap` bounds the primal gap g(x₀) − min g. The sub-problem is L + β = 3 L smooth and L strongly convex in x:
    step_x = 1/(15 L), λ = 288. `as_printed` takes the paper's 1/(10 L) and 128, which belong to a smoothness of 2 L.
    step_y = step_x/(24 λ), K = ⌈4224/(μᵧ step_y)⌉, T = ⌈log(1/δ̂)⌉ with the paper's δ̂.

    >>> planned = acc_spider(100, smoothness=1.0, mu_x=0.1, mu_y=1.0, accuracy=0.1, gap=1.0)
    >>> round(1 / planned.method.inner.step_x), planned.method.num_restarts
    (15, 18)
    """
    _check(num_components, smoothness, mu_x, mu_y, accuracy)
    beta = 2 * smoothness
    sub_smoothness = beta if as_printed else smoothness + beta
    step_x = 1 / (5 * sub_smoothness)
    step_y = step_x / (24 * 32 * sub_smoothness**2 / (beta - smoothness) ** 2)
    root = _ceil(math.sqrt(num_components))
    num_inner = _ceil(4224 / (mu_y * step_y))
    inner = SpiderGDA(step_x, step_y, batch_size=root, period=root, num_inner=num_inner)
    delta = mu_x * accuracy / (11 * (mu_x + 4 * smoothness) * smoothness)
    slack = min(
        1 / 6,
        (beta - smoothness) * mu_x * mu_y * delta / (192 * beta**2 * gap),
        (beta - smoothness) * mu_y * delta / (96 * beta**2 * accuracy),
    )
    method = AccSpiderGDA(inner, beta=beta, num_restarts=_ceil(math.log(1 / slack)))
    num_outer = max(1, _ceil(math.log(gap / accuracy) / -math.log1p(-mu_x / (2 * beta + mu_x))))
    return Planned(method, num_outer * method.restart_length(num_components))


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9 * abs(value))


def _check(num_components: int, smoothness: float, mu_x: float, mu_y: float, accuracy: float) -> None:
    if not (num_components >= 1 and 0 < mu_x <= smoothness and 0 < mu_y <= smoothness and 0 < accuracy < 1):
        raise UserError(
            "n ≥ 1, 0 < mu ≤ smoothness and 0 < accuracy < 1 are needed; "
            f"got n={num_components}, smoothness={smoothness}, mu_x={mu_x}, mu_y={mu_y}, accuracy={accuracy}"
        )
