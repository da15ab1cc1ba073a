"""MeZO: fine-tuning with forward passes alone, in the memory of evaluation.

step      both losses, the slope, the update                  `MeZO.step`
move      every parameter by ±ε z, z drawn anew each time      `MeZO._perturb`
z         from (seed, step, number of the parameter)           `numerics.normals`
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError, check_range
from ..numerics.normals import normals, uniform_bits
from .record import ExtraPass, OptimizerRecord, Options, Shape


class MeZO(torch.optim.Optimizer):
    r"""Estimate the slope of the loss along one random direction by two forwards, and step along it.

        z ~ N(0, I) from (seed, t);   g = (L(θ + εz) − L(θ − εz)) / 2ε;   θ ← θ − lr (g z + λ θ)

    params: in groups, each with its own lr and weight_decay λ (biases and norms usually 0); epsilon: ε; seed: of all
    directions. `step(closure)` calls the closure twice, with gradients off; it returns the loss of one batch. Random
    numbers that it draws (dropout) are the same both times. The step returns the mean of the two losses.

    Nothing is kept beside the parameters: z is generated again for each move, one parameter at a time. By default fp32
    and wider parameters are moved by +ε, −2ε, +ε, which leaves them a rounding away from where they were; with `exact`
    they are restored from a copy, at the cost of one. bf16 parameters are always restored so, and updates are rounded
    stochastically: of lr·g·z most lies below bf16's resolution, and nearest rounding would lose it. Tied weights are
    one parameter, as in `model.parameters()`. A step whose slope is not finite changes nothing.

    lr is far smaller than a gradient method's: 1e-7 to 1e-5 for language models, divided by about the number of
    parameters that matter. For fine-tuning with prompts, where few directions do; from scratch it hardly learns. Raises
    `UserError` for settings out of range, fp16 or sharded parameters, and a step without a closure.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    >>> optimizer = MeZO([weight], lr=0.05, epsilon=1e-2)
    >>> for _ in range(200):
    ...     loss = optimizer.step(lambda: weight.square().sum())
    >>> loss < 0.01
    True

    Source: Malladi et al. 2023, Fine-Tuning Language Models with Just Forward Passes (arXiv:2305.17333). Departs in z's
    generator, which counts and is the same on every device, in restoring low precision from a copy, and in rounding.
    """

    updates_alone = False
    forms = ("loop",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-6, epsilon: float = 1e-3, weight_decay: float = 0.0, seed: int = 0,
        exact: bool = False,
    ) -> None:  # fmt: skip
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "epsilon": epsilon,
            "seed": seed,
            "num_steps": 0,
            "exact": exact,
        }
        super().__init__(params, settings)
        self.slope = math.nan
        """g of the last step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with an lr and weight_decay of their own; epsilon and seed are the same for all."""
        settings = {**self.defaults, **param_group}
        check_range(
            "MeZO",
            lr=(settings["lr"], "of at least 0", lambda value: value >= 0),
            epsilon=(settings["epsilon"], "above 0", lambda value: value > 0),
            weight_decay=(settings["weight_decay"], "of at least 0", lambda value: value >= 0),
        )
        first = self.param_groups[0] if self.param_groups else settings
        if any(settings[name] != first[name] for name in ("epsilon", "seed")):
            raise UserError(
                "MeZO needs one epsilon and one seed for all groups; got several; one direction spans them all"
            )
        super().add_param_group({**param_group, "num_steps": first["num_steps"]})
        for param in self.param_groups[-1]["params"]:
            _check(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; returns the mean of the losses at θ ± εz, a float."""
        if closure is None:
            raise UserError(
                "MeZO needs a closure that returns the loss; got none; call optimizer.step(lambda: loss of the batch)"
            )
        epsilon = self.param_groups[0]["epsilon"]
        copies = {param: param.detach().clone() for group, param, _ in self._numbered() if _from_copy(param, group)}
        at = 0.0
        try:
            at = self._perturb(copies, epsilon, at)
            with _same_random_numbers():
                above = float(closure())
            at = self._perturb(copies, -epsilon, at)
            below = float(closure())
        finally:
            self._perturb(copies, 0.0, at)
        self.slope = (above - below) / (2 * epsilon)
        if math.isfinite(self.slope):
            self.apply(self.slope)
        for group in self.param_groups:
            group["num_steps"] += 1
        return (above + below) / 2

    @torch.no_grad()
    def apply(self, slope: float) -> None:
        """Move the parameters by this step's direction: θ ← θ − lr (slope · z + λ θ)."""
        for group, param, number in self._numbered():
            z, lr = self._direction(param, number), group["lr"]
            wide = param if param.dtype != torch.bfloat16 else param.float()
            moved = wide.mul(1 - lr * group["weight_decay"]).add_(z, alpha=-lr * slope)
            param.copy_(moved if wide is param else stochastically_rounded(moved, self._key(number, 1)))

    def _perturb(self, copies: dict[Tensor, Tensor], to: float, at: float) -> float:
        """Put every parameter at θ + to · z, and return `to`; those without a copy stand at θ + at · z now."""
        for _, param, number in self._numbered():
            if param in copies:
                own = copies[param]
                param.copy_(own.add(self._direction(param, number).to(own.dtype), alpha=to) if to else own)
            else:
                param.add_(self._direction(param, number), alpha=to - at)
        return to

    def _direction(self, param: Tensor, number: int) -> Tensor:
        dtype = torch.promote_types(param.dtype, torch.float32)
        return normals(param.numel(), self._key(number)).view(param.shape).to(param.device, dtype)

    def _key(self, number: int, *more: int) -> tuple[int, ...]:
        first = self.param_groups[0]
        return first["seed"], first["num_steps"], number, *more

    def _numbered(self) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    yield group, param, number
                number += 1


def stochastically_rounded(wide: Tensor, key: tuple[int, ...]) -> Tensor:
    """Return fp32 numbers as bf16, up or down with the probability that makes each right on average.

    >>> values = torch.full((10_000,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to the next
    >>> round(float((stochastically_rounded(values, (0,)) > 1).float().mean()), 1)
    0.1
    """
    bits = wide.contiguous().view(torch.int32)
    added = bits + uniform_bits(wide.numel(), key).view(wide.shape).to(wide.device)
    return torch.where(wide.isfinite(), (added & -65536).view(torch.float32), wide).to(torch.bfloat16)


def _from_copy(param: Tensor, group: dict[str, Any]) -> bool:
    return bool(group["exact"]) or param.dtype == torch.bfloat16


def _check(param: Tensor) -> None:
    if param.dtype == torch.float16 or param.is_complex():
        raise UserError(
            f"MeZO needs bf16, fp32 or wider real parameters; got {param.dtype}; its steps would be lost; convert the model"
        )
    if isinstance(param, DTensor):
        raise UserError(
            "MeZO needs whole parameters; got a sharded one; on several ranks use trainwright.sync's just-one-byte"
        )


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Let what follows draw the random numbers that are drawn within."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    before, of_devices = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    yield
    torch.set_rng_state(before)
    for device, state in zip(devices, of_devices):
        torch.cuda.set_rng_state(state, device)


def _temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """The direction in fp32 with the bits that it is made of, and the moved parameter."""
    return math.prod(shape) * (4 + 2 + max(element_bytes, 4))


RECORD = OptimizerRecord(
    "mezo",
    MeZO,
    "two forwards and no backward: a step along one random direction, in the memory of evaluation",
    (),
    _temporaries,
    reads="model",
    extra_passes=(ExtraPass("forward", 2),),
    paper="Malladi et al. 2023, arXiv:2305.17333",
    departs="directions from a counter; low precision restored from a copy and rounded stochastically",
    not_on_shards="regenerates whole directions",
)
"""Not among `names()`: a plan prices a backward, which MeZO has none of."""
