r"""The largest curvature of a batch, and how a learning rate goes with the batch size because of it.

Hessian, Wigner noise          λ₁(B) = λ₁ + s²/λ₁,  s = σ √(P/𝔟)                  `batch_curvature`
Gauss–Newton matrix, spiked    λ₁(B) = ℓ (1 + (P/B) b / (ℓ − b))                  `batch_ggn_curvature`
saturation                     𝔟* = P σ²/λ₁²                                      `saturation_batch`
rate                           SGD ∝ min(B, B*),  Adam ∝ √min(B, B*)              `scaled_lr`
"""

from __future__ import annotations

import math
from typing import Literal

from ..artifacts import UserError, check_range

_COUNT = ("of at least 1", lambda value: value >= 1)
_ABOVE_0 = ("above 0", lambda value: value > 0)


def batch_curvature(
    curvature: float, noise: float, num_params: int, batch_size: int, num_samples: float = math.inf
) -> float:
    r"""Return the largest eigenvalue of a batch's Hessian, from that of the whole data's, in the spiked Wigner model.

    With the noise of each element of a sample's Hessian of variance σ², 1/𝔟 = 1/B − 1/N and s = σ √(P/𝔟),

        λ₁(B) = λ₁ + s² / λ₁   where |λ₁| > s,   and the edge of the noise, 2s, otherwise.

    SGD is stable up to about 2 / λ₁(B): a rate that rises with B and saturates where B ≫ P σ² / λ₁² (`saturation_batch`).

    curvature: λ₁, not 0. noise: σ. num_params: P. batch_size: B. num_samples: N of the data.

    Raises `UserError` for counts below 1 and a batch larger than the data.

    >>> batch_curvature(10.0, noise=1.0, num_params=100, batch_size=4)
    12.5

    Source: Granziol, Zohren, Roberts, 2022 (see `LanczosLR`).
    """
    if not 1 <= batch_size <= num_samples or num_params < 1:
        raise UserError(
            f"1 ≤ batch_size ≤ num_samples and at least 1 parameter are needed; got {batch_size}, {num_samples} and "
            f"{num_params}; change them"
        )
    spread = noise * math.sqrt(num_params * (1 / batch_size - 1 / num_samples))
    return curvature + spread**2 / curvature if abs(curvature) > spread else 2 * spread


def batch_ggn_curvature(curvature: float, bulk: float, num_params: int, batch_size: int) -> float:
    r"""Return the largest eigenvalue of a batch's Gauss–Newton matrix, from that of the whole data's (Marchenko–Pastur).

    A Gauss–Newton matrix is a mean of squares, so its noise is that of a sample covariance. With one large eigenvalue ℓ above
    a bulk of eigenvalues b, and γ = P/B,

        λ₁(B) = ℓ (1 + γ b / (ℓ − b))   where ℓ > b (1 + √γ),   and the edge of the bulk, b (1 + √γ)², otherwise.

    Of the same form as `batch_curvature`: a correction that falls as 1/B. For data much larger than the batch.

    curvature: ℓ. bulk: b, at most ℓ. num_params: P. batch_size: B; of a model with C outputs a sample, C · B.

    Raises `UserError` for counts below 1, and for a bulk that is not in (0, curvature].

    >>> batch_ggn_curvature(11.0, bulk=1.0, num_params=100, batch_size=4)
    38.5

    Source: Baik & Silverstein 2006, Eigenvalues of large sample covariance matrices of spiked population models; its use for
    batches: Granziol, Zohren, Roberts, 2022.
    """
    check_range(
        "batch_ggn_curvature",
        num_params=(num_params, *_COUNT),
        batch_size=(batch_size, *_COUNT),
        bulk=(bulk, f"in (0, {curvature}]", lambda value: 0 < value <= curvature),
    )
    ratio = num_params / batch_size
    if curvature > bulk * (1 + math.sqrt(ratio)):
        return curvature * (1 + ratio * bulk / (curvature - bulk))
    return bulk * (1 + math.sqrt(ratio)) ** 2


def saturation_batch(curvature: float, noise: float, num_params: int, num_samples: float = math.inf) -> float:
    """Return the batch size B* above which a larger batch allows no proportionally larger rate.

    There the noise's part of `batch_curvature` is as large as λ₁ itself: 1/B* = λ₁² / (P σ²) + 1/N. Arguments as there.

    >>> saturation_batch(10.0, noise=1.0, num_params=1000)
    10.0

    Source: Granziol, Zohren, Roberts, 2022.
    """
    check_range("saturation_batch", noise=(noise, *_ABOVE_0), num_params=(num_params, *_COUNT))
    return 1 / (curvature**2 / (num_params * noise**2) + 1 / num_samples)


def scaled_lr(
    lr: float,
    batch_size: float,
    new_batch_size: float,
    *,
    optimizer: Literal["sgd", "adam"] = "sgd",
    saturation: float = math.inf,
) -> float:
    """Return the learning rate for another batch size, given a good one for `batch_size`.

        SGD    lr · min(B', B*) / min(B, B*)
        Adam   lr · √(min(B', B*) / min(B, B*))

    optimizer: `sgd`, with or without momentum; `adam` for methods that divide by the root of squared gradients.
    saturation: B*, above which the rate stays (`saturation_batch`, or a batch at which you saw it stay).

    Not for LAMB, LARS and others whose step has a fixed length: theirs is scaled by the norm of the weights already.

    >>> scaled_lr(0.1, 32, 256), round(scaled_lr(1e-3, 32, 128, optimizer="adam"), 6)
    (0.8, 0.002)
    >>> scaled_lr(0.1, 32, 256, saturation=64)
    0.2

    Source: Granziol, Zohren, Roberts, 2022.
    """
    check_range(
        "scaled_lr",
        lr=(lr, *_ABOVE_0),
        batch_size=(batch_size, *_ABOVE_0),
        new_batch_size=(new_batch_size, *_ABOVE_0),
        saturation=(saturation, *_ABOVE_0),
        optimizer=(optimizer, "sgd or adam", lambda value: value in ("sgd", "adam")),
    )
    factor = min(new_batch_size, saturation) / min(batch_size, saturation)
    return lr * (factor if optimizer == "sgd" else math.sqrt(factor))
