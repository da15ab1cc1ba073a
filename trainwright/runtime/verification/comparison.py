"""Measures the errors of a plan's results against those of one process, and sets the bars that they must keep.

    error(a, b) = ‖a − b‖ / max(‖b‖, 10⁻³ √(n/N) ‖all‖)        n, N: element counts of b and of all that are compared

The floor is for tensors that are zero but for rounding (the gradient of an attention key's bias, the running mean of
centred inputs): such a tensor is compared to the size it would have if all tensors of its kind were equally large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
FP64_BAR, FP32_BAR, FP32_FACTOR = 1e-9, 1e-5, 5.0
FLOOR = 1e-3
"""The least size that a tensor is compared to, as a share of its size if all were equally large."""


@dataclass(frozen=True)
class Worst:
    """The largest error of one kind of tensors, and the tensor whose error is the largest relative to its bar."""

    error: float
    name: str
    bar: float
    holds: bool


def worst_of(errors: Mapping[str, float], own: Mapping[str, float] | None) -> Worst:
    """Return the largest of `errors`, and the tensor that comes closest to its bar.

    own: in fp32, the single process's errors against float64, which widen the bars; None in float64.
    """
    bars = {name: FP64_BAR if own is None else bar_of(own.get(name, 0.0)) for name in errors}
    name = max(errors, key=lambda each: errors[each] / bars[each], default="")
    holds = all(error <= bars[each] for each, error in errors.items())
    default = FP64_BAR if own is None else FP32_BAR
    return Worst(max(errors.values(), default=0.0), name, bars.get(name, default), holds)


def bar_of(own_error: float) -> float:
    """Return the bar in fp32 for a tensor whose single-process error against float64 is `own_error`."""
    return max(FP32_BAR, FP32_FACTOR * own_error)


def relative(value: float, reference: float) -> float:
    """Return |value − reference| / |reference|."""
    return abs(value - reference) / max(abs(reference), 1e-300)


def gradient_errors(found: Tensors, reference: Tensors) -> dict[str, float]:
    """Return each gradient's error; a gradient that one side lacks counts as zeros there.

    >>> gradient_errors({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 4.0])})
    {'w': 0.75}
    """
    floor = _floor(reference.values())
    return {name: _error(found.get(name), reference.get(name), floor) for name in {**reference, **found}}


def buffer_errors(found: Tensors, reference: Tensors, before: Tensors) -> dict[str, float]:
    """Return each buffer's error after a step; `before` holds the reference's buffers before it.

    Buffers that the step does not write have no floor, and do not count in that of others: a mask of −10³⁸ is no scale for a
    mean.
    """
    written = {name for name, value in reference.items() if not torch.equal(value, before[name].to(value.dtype))}
    floor = _floor(reference[name] for name in written if reference[name].is_floating_point())
    return {
        name: _error(found.get(name), value, floor if name in written and value.is_floating_point() else 0.0)
        for name, value in reference.items()
    }


NUM_DRAWS, BIAS_BAR = 32, 4.0
"""So many draws of an estimate are taken, and so many standard errors their mean may be off."""


class Draws:
    """Draws of estimated gradients, of which only sums are kept.

    bias = ‖mean − exact‖ / √(variance / R)     variance = Σ_r ‖draw_r − mean‖² / (R − 1)
    """

    def __init__(self, exact: Tensors) -> None:
        self.exact, self.num = exact, 0
        self.off = {name: torch.zeros_like(value) for name, value in exact.items()}
        self.squares = dict.fromkeys(exact, 0.0)

    def add(self, gradients: Tensors) -> None:
        """Take one draw of every gradient."""
        self.num += 1
        for name, value in self.exact.items():
            error = gradients[name] - value
            self.off[name] += error
            self.squares[name] += float(error.double().norm()) ** 2

    def variances(self) -> dict[str, float]:
        """Return the variance of each estimate."""
        return {
            name: max(0.0, self.squares[name] - float(off.double().norm()) ** 2 / self.num) / (self.num - 1)
            for name, off in self.off.items()
        }

    def biases(self) -> dict[str, float]:
        """Return how far the mean of each estimate is off, in standard errors of the mean."""
        error = {name: math.sqrt(variance / self.num) for name, variance in self.variances().items()}
        return {
            name: float(off.double().norm()) / self.num / max(error[name], 1e-300) for name, off in self.off.items()
        }

    def relative_variance(self) -> float:
        """Return the largest variance, as a share of the square of the gradient's norm."""
        variances = self.variances()
        return max(
            variances[name] / max(float(value.double().norm()) ** 2, 1e-300) for name, value in self.exact.items()
        )

    def worst(self) -> Worst:
        """Return the gradient whose mean is farthest off."""
        biases = self.biases()
        name = max(biases, key=lambda each: biases[each])
        return Worst(biases[name], name, BIAS_BAR, biases[name] <= BIAS_BAR)


def changes(after: Tensors, before: Tensors) -> dict[str, Tensor]:
    """Return the difference `after` − `before` of each tensor, in double precision."""
    return {name: _in_double(value) - _in_double(before[name]) for name, value in after.items()}


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def output_errors(found: Tensors, reference: Tensors) -> dict[str, float]:
    """Return the error of each output; that of an output that one side lacks is infinite."""
    names = {**reference, **found}
    return {
        name: _error(found[name], reference[name], 0.0) if name in found and name in reference else math.inf
        for name in names
    }


def _floor(tensors: Iterable[Tensor]) -> float:
    """Return the smallest root mean square that a tensor is compared to."""
    held = list(tensors)
    total = sum(tensor.numel() for tensor in held)
    norm = math.sqrt(sum(float(_in_double(tensor).norm()) ** 2 for tensor in held))
    return FLOOR * norm / math.sqrt(max(1, total))


def _error(found: Tensor | None, reference: Tensor | None, floor: float) -> float:
    shown = reference if reference is not None else found
    assert shown is not None
    a, b = (torch.zeros_like(shown) if side is None else side for side in (found, reference))
    if a.shape != b.shape:
        return math.inf
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(side.to(torch.complex128)) for side in (a, b))
    a, b = a.double(), b.double()
    # −inf in masked logits is no difference, nor is a value that neither side has
    same = (a == b) | (a.isnan() & b.isnan())
    size = torch.where(b.isfinite(), b, 0.0).norm()
    scale = max(float(size), floor * math.sqrt(b.numel()), 1e-300)
    error = float(torch.where(same, 0.0, a - b).norm()) / scale
    return math.inf if math.isnan(error) else error
