"""How noisy a batch's gradient is, from the gradients of its samples, and the batch that would make it quiet enough.

pass 1   n, ḡ and Σ(g_i − ḡ)², chunk by chunk, merged exactly (over ranks too)     `_Moments`
pass 2   Var_i⟨g_i, ḡ⟩, where a test asks for it                                   `_variance_along`
tests    norm, inner product, augmented, coordinate-wise                           `GradientNoise.batch_size`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import UserError

Test = Literal["norm", "inner-product", "augmented", "coordinate"]
Chunks = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class GradientNoise:
    """Statistics of the gradients g_i of a batch's samples about their mean ḡ; variances divide by n − 1."""

    num_samples: int
    squared_mean: float
    """‖ḡ‖², which exceeds that of the expected gradient by `variance` / n on average."""
    variance: float
    """Σ_j Var_i(g_ij), over all coordinates."""
    variance_along: float | None = None
    """Var_i⟨g_i, ḡ⟩; where an inner-product test was asked for."""
    largest_ratio: float | None = None
    """max_j Var_i(g_ij) / ḡ_j²; where the coordinate-wise test was asked for."""

    def batch_size(
        self, test: Test = "norm", *, eta: float = 0.1, theta: float = 0.1, nu: float = 0.1, unbias: bool = False
    ) -> float:
        r"""Return the batch size at which the test would just pass; infinite where the mean gradient is zero.

            norm            Σ_j s_j² / (η² ‖ḡ‖²)                              noise of the whole gradient
            inner-product   Var_i⟨g_i, ḡ⟩ / (θ² ‖ḡ‖⁴)                         noise along the descent direction
            augmented       the larger of that and Σ_j Var_i(g_i − ⟨g_i, ḡ⟩ḡ/‖ḡ‖²)_j / (ν² ‖ḡ‖²)
            coordinate      max_j s_j² / (η² ḡ_j²)                            for steps scaled by coordinate

        eta, theta, nu: how large the noise may be, as a share of the gradient.
        unbias: take ‖ḡ‖² − Σs²/n, at least a hundredth of ‖ḡ‖², for the squared gradient in place of ‖ḡ‖².

        Raises `UserError` for a test whose statistics were not measured, and settings that are not positive.

        >>> GradientNoise(num_samples=8, squared_mean=4.0, variance=3.0).batch_size(eta=0.5)
        3.0
        """
        _check_test(test, eta, theta, nu)
        square = max(self.squared_mean - self.variance / self.num_samples, 0.01 * self.squared_mean)
        square = square if unbias else self.squared_mean
        if test == "norm":
            return _ratio(self.variance, eta**2 * square)
        if test == "coordinate":
            return self._measured(self.largest_ratio, test) / eta**2
        along = self._measured(self.variance_along, test)
        inner = _ratio(along, theta**2 * square**2)
        if test == "inner-product":
            return inner
        across = max(0.0, self.variance - _ratio(along, self.squared_mean))
        return max(inner, _ratio(across, nu**2 * square))

    def _measured(self, value: float | None, test: str) -> float:
        if value is None:
            raise UserError(
                f"statistics for the {test} test are needed; these were measured without; pass test={test!r}"
            )
        return value


def measure_noise(chunks: Chunks, test: Test = "norm", group: dist.ProcessGroup | None = None) -> GradientNoise:
    """Return the statistics of per-sample gradients that come in chunks, over all parameters as one vector.

    chunks: called for each pass over the samples (one; two for the inner-product tests); yields matrices
        [samples, parameters] in the same order each time.
    test: what the statistics are for; more than it needs is not measured.
    group: ranks that hold different samples of the same batch. The moments of all are merged exactly, by the law of
        total variance; every rank must call this, and gets the same. `None`: this process alone.

    Memory: one chunk and one more vector of all parameters, two for the coordinate-wise test. Raises `UserError` for
    fewer than two samples and for an unknown test.

    >>> samples = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> measure_noise(lambda: samples.split(1))
    GradientNoise(num_samples=2, squared_mean=4.0, variance=2.0, variance_along=None, largest_ratio=None)
    """
    _check_test(test)
    moments = _Moments(by_coordinate=test == "coordinate")
    for chunk in chunks():
        moments.add(chunk)
    moments.merge(group)
    if moments.num_samples < 2:
        raise UserError(
            f"at least 2 samples are needed to see their noise; got {moments.num_samples}; take a larger batch"
        )
    mean, spread = moments.mean, moments.spread / (moments.num_samples - 1)
    along = _variance_along(chunks, mean, moments.num_samples, group) if test in _ALONG else None
    ratio = float(_coordinate_ratios(spread, mean).max()) if test == "coordinate" else None
    return GradientNoise(moments.num_samples, float(mean @ mean), float(spread.sum()), along, ratio)


_ALONG = ("inner-product", "augmented")


class _Moments:
    """Count, mean and sum of squared deviations of rows, [d] each or the latter summed, updated chunk by chunk."""

    def __init__(self, by_coordinate: bool) -> None:
        self.by_coordinate, self.num_samples = by_coordinate, 0
        self.mean = self.spread = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        num_rows, mean = rows.shape[0], rows.mean(0)
        spread = (rows - mean).square_().sum(0)
        if self.num_samples == 0:
            self.mean, self.spread = torch.zeros_like(mean), self._kept(torch.zeros_like(mean))
        total = self.num_samples + num_rows
        apart = mean - self.mean
        self.spread = self.spread + self._kept(spread + apart.square() * (self.num_samples * num_rows / total))
        self.mean = self.mean + apart * (num_rows / total)
        self.num_samples = total

    def merge(self, group: dist.ProcessGroup | None) -> None:
        """Make these the moments of all ranks' rows: spread within the ranks, and of their means about the whole's."""
        if group is None:
            return
        count = torch.tensor(float(self.num_samples), dtype=torch.float64, device=self.mean.device)
        dist.all_reduce(count, group=group)
        mean = self.mean * (self.num_samples / count.item())
        dist.all_reduce(mean, group=group)
        spread = self.spread + self._kept((self.mean - mean).square() * self.num_samples)
        dist.all_reduce(spread, group=group)
        self.num_samples, self.mean, self.spread = int(count), mean, spread

    def _kept(self, by_coordinate: Tensor) -> Tensor:
        return by_coordinate if self.by_coordinate else by_coordinate.sum(dtype=torch.float64)


def _variance_along(chunks: Chunks, mean: Tensor, num_samples: int, group: dist.ProcessGroup | None) -> float:
    """Var_i⟨g_i, ḡ⟩; the mean of the inner products is ‖ḡ‖²."""
    squares = torch.stack([((rows @ mean) - mean @ mean).double().square().sum() for rows in chunks()]).sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return float(squares) / (num_samples - 1)


def _coordinate_ratios(variances: Tensor, mean: Tensor) -> Tensor:
    """s_j² / ḡ_j², 0 where both vanish: a coordinate that no sample moves asks for nothing."""
    return torch.where(variances == 0, torch.zeros_like(mean), variances / mean.square())


def _ratio(above: float, below: float) -> float:
    if below > 0:
        return above / below
    return math.inf if above > 0 else 0.0


def _check_test(test: str, *settings: float) -> None:
    if test not in get_args(Test):
        raise UserError(f"a batch-size test is needed, one of {', '.join(get_args(Test))}; got {test!r}; choose one")
    if not all(value > 0 for value in settings):
        raise UserError(f"eta, theta and nu above 0 are needed; got {settings}; change them")
