"""Batches that grow under a plan: a step takes more and more planned batches, one after the other, as its noise asks for.

The planned batch is the size in which it grows, so that the plan's memory holds: of several, the gradients add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .artifacts import UserError, check_range

if TYPE_CHECKING:
    from torch import Tensor

    from .runtime import ParallelModule
    from .schedules import GradientNoise


@dataclass(frozen=True)
class GrowthOptions:
    """How a batch may grow: up to `most` planned batches, measured every `every` steps, its noise at most `eta` of the gradient."""

    most: int
    every: int = 10
    eta: float = 0.5

    def __post_init__(self) -> None:
        check_range(
            "train",
            **{
                "--grow-batch": (self.most, "of at least 1", lambda value: value >= 1),
                "--grow-every": (self.every, "of at least 1", lambda value: value >= 1),
                "--grow-eta": (self.eta, "above 0", lambda value: value > 0),
            },
        )


class Growth:
    """How many planned batches a step takes: m ← min(most, max(m, ⌈b_new / b⌉)), b_new by the norm test (`GradientNoise`).

    Each measurement takes the gradients of all examples of one planned batch (`sample_gradients`): as many steps of one example.
    With AdAdaGrad this is the method of Lau et al. 2024, whose batch never shrinks.
    """

    def __init__(self, options: GrowthOptions, module: ParallelModule, batch_size: int) -> None:
        self.options, self.module, self.batch_size = options, module, batch_size
        self.num, self.num_batches = 1, 0

    def after(self, step: int, batches: list[Any]) -> None:
        """Count the batches of a step, and measure where that is due; a collective call."""
        self.num_batches += len(batches)
        if (step + 1) % self.options.every == 0 and self.num < self.options.most:
            wanted = noise_of(self.module, batches[-1]).batch_size("norm", eta=self.options.eta)
            if math.isnan(wanted):
                raise UserError("finite gradients are needed to choose a batch size; got NaN; lower the learning rate")
            self.num = max(self.num, math.ceil(min(self.options.most, wanted / self.batch_size)))

    def start_at(self, num_batches: int) -> None:
        """Go on behind so many batches."""
        self.num_batches = num_batches

    def state_dict(self) -> dict[str, int]:
        """Return the present size."""
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at the size of `state`."""
        self.num = state["num"]


def noise_of(module: ParallelModule, batch: Any) -> GradientNoise:
    """Return the statistics of the gradients of a batch's examples under a plan; a collective call, the same on all ranks."""
    from .runtime.sample_gradients import sample_gradients
    from .schedules import GradientNoise

    means: dict[str, Tensor] = {}
    spreads: dict[str, Tensor] = {}
    count = 0
    for count, found in enumerate(sample_gradients(module, batch), 1):
        for name, grad in _parts(found):
            before = means.setdefault(name, grad.new_zeros(grad.shape).double())
            change = grad.double() - before
            means[name] = before + change / count
            spreads[name] = spreads.get(name, 0.0) + change * (grad - means[name])
    if count < 2:
        raise UserError(f"at least 2 examples are needed to see their noise; got {count}; plan for a larger batch")
    params = dict(module.named_parameters())
    square, spread = (
        float(
            _total(
                {name: values[name].sum() if values is spreads else values[name].square().sum() for name in values},
                params,
            )
        )
        for values in (means, spreads)
    )
    return GradientNoise(count, square, spread / (count - 1))


def _parts(found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each gradient."""
    from torch.distributed.tensor import DTensor

    for name, grad in found.items():
        yield name, grad.to_local() if isinstance(grad, DTensor) else grad


def _total(parts: dict[str, Tensor], params: dict[str, Any]) -> Tensor:
    from .numerics.shards import sum_over_shards

    return sum_over_shards((value, params[name]) for name, value in parts.items())
