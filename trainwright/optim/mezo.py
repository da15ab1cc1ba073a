"""MeZO: fine-tuning with forward passes alone, in the memory of evaluation.

step      both losses, the slope, the update                  `MeZO.step`
move      every parameter by ±ε z, z drawn anew each time      `place`
update    θ − lr (g z + λ θ), rounded stochastically           `descend`
z         from (seed, step, number of the parameter)           `numerics.normals`, a piece at a time
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError, check_range
from ..numerics.normals import PIECE, normals, pieces, uniform_bits
from .record import ExtraPass, OptimizerRecord, Options, Shape

Key = tuple[int, ...]
_LEAST_FP16 = 2.0**-24
"""The least number above 0 in fp16."""


class MeZO(torch.optim.Optimizer):
    r"""Estimate the slope of the loss along one random direction by two forwards, and step along it.

        z ~ N(0, I) from (seed, t);   g = (L(θ + εz) − L(θ − εz)) / 2ε;   θ ← θ − lr (g z + λ θ)

    params: in groups, each with its own lr and weight_decay λ (biases and norms usually 0); epsilon: ε; seed: of all
    directions. `step(closure)` calls the closure twice, with gradients off; it returns the loss of one batch. Random
    numbers that it draws (dropout) are the same both times. The step returns the mean of the two losses.

    Nothing is kept beside the parameters: z is generated again for each move, a million numbers at a time. By default fp32
    and wider parameters are moved by +ε, −2ε, +ε, which leaves them a rounding away from where they were; with `exact`
    they are restored from a copy, at the cost of one. bf16 and fp16 parameters are always restored so, and updates are rounded
    stochastically: of lr·g·z most lies below their resolution, and nearest rounding would lose it. Tied weights are
    one parameter, as in `model.parameters()`. A step whose slope is not finite changes nothing.

    lr is far smaller than a gradient method's: 1e-7 to 1e-5 for language models, divided by about the number of
    parameters that matter. For fine-tuning with prompts, where few directions do; from scratch it hardly learns. Raises
    `UserError` for settings out of range, complex or sharded parameters, and a step without a closure.

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
        self.streamed: Callable[[Callable[[], Any]], float] | None = None
        """Takes the step in place of this optimizer, where the parameters are elsewhere (`trainwright.streaming`)."""

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
        if self.streamed is not None:
            return self.streamed(closure)
        epsilon = self.param_groups[0]["epsilon"]
        copies = {param: param.detach().clone() for group, param, _ in self.numbered() if from_copy(param.dtype, group)}
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
        for group, param, number in self.numbered():
            key = self.key(number)
            descend(param, [(key, slope)], group["lr"], group["weight_decay"], (*key, 1))

    def _perturb(self, copies: dict[Tensor, Tensor], to: float, at: float) -> float:
        """Put every parameter at θ + to · z, and return `to`; those without a copy stand at θ + at · z now."""
        for _, param, number in self.numbered():
            if param not in copies:
                place(param, param, self.key(number), [to - at])
            else:
                place(param, copies[param], self.key(number), [to] if to else [])
        return to

    def key(self, number: int) -> tuple[int, ...]:
        """Return the key of this step's direction for the parameter with that number."""
        first = self.param_groups[0]
        return first["seed"], first["num_steps"], number

    def numbered(self) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
        """Yield each parameter that is trained, with its group before and its number behind it."""
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    yield group, param, number
                number += 1


Draw = Callable[[int, Key, int], Tensor]


def place(into: Tensor, own: Tensor, key: Key, moves: Sequence[float], draw: Draw = normals) -> None:
    """Write own + moves[0] · z + moves[1] · z … into `into`, one rounded addition after another.

    `into` may be `own`. The sum is taken in the wider of their types; z is drawn a piece at a time.
    """
    wide_type = torch.promote_types(into.dtype, own.dtype)
    for target, source, part in _in_pieces(into, own):
        moved = source.to(wide_type)
        if moves:
            z = draw(len(moved), key, part.start).to(moved.device, wide_type)
            for amount in moves:
                moved = moved.add(z, alpha=amount)
        target.copy_(moved)


def descend(
    own: Tensor, slopes: Sequence[tuple[Key, float]], lr: float, weight_decay: float, rounding: Key, draw: Draw = normals,
    draw_bits: Draw = uniform_bits,
) -> None:  # fmt: skip
    """Move `own`: θ ← θ − lr (Σ slope · z + λ θ), in fp32 or wider; 16-bit types are rounded stochastically."""
    wide_type = torch.promote_types(own.dtype, torch.float32)
    for target, source, part in _in_pieces(own, own):
        moved = source.to(wide_type).mul(1 - lr * weight_decay)
        for key, slope in slopes:
            moved.add_(draw(len(moved), key, part.start).to(moved.device, wide_type), alpha=-lr * slope)
        if own.dtype != wide_type:
            moved = _rounded(moved, own.dtype, draw_bits(len(moved), rounding, part.start).to(moved.device))
        target.copy_(moved)


def _in_pieces(into: Tensor, own: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield flat parts of both; a tensor that is not contiguous is written back at the end."""
    flat_into = into.view(-1) if into.is_contiguous() else into.reshape(-1)
    flat_own = flat_into if own is into else own.reshape(-1)
    for part in pieces(own.numel()):
        yield flat_into[part], flat_own[part], part
    if not into.is_contiguous():
        into.copy_(flat_into.view(into.shape))


def stochastically_rounded(wide: Tensor, key: Key, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return fp32 numbers as bf16 or fp16, up or down with the probability that makes each right on average.

    >>> values = torch.full((10_000,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to the next
    >>> round(float((stochastically_rounded(values, (0,)) > 1).float().mean()), 1)
    0.1
    """
    return _rounded(wide, dtype, uniform_bits(wide.numel(), key).view(wide.shape).to(wide.device))


def _rounded(wide: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    if dtype == torch.bfloat16:
        added = wide.contiguous().view(torch.int32) + bits
        return torch.where(wide.isfinite(), (added & -65536).view(torch.float32), wide).to(torch.bfloat16)
    near = wide.to(dtype)
    gap = wide - near.float()
    # the neighbour on the other side of the number: a step of its bits away from 0 or towards it
    outwards = (gap > 0) == ((near > 0) | ((near == 0) & (gap > 0)))
    towards = torch.where(near == 0, torch.copysign(wide.new_tensor(_LEAST_FP16), gap).to(dtype), near)
    steps = torch.where(near == 0, 0, torch.where(outwards, 1, -1)).to(torch.int16)
    other = (towards.view(torch.int16) + steps).view(dtype)
    share = gap.abs() / (other.float() - near.float()).abs()
    takes_other = (gap != 0) & other.isfinite() & (bits < share * 65536)
    return torch.where(takes_other, other, near)


def from_copy(dtype: torch.dtype, group: Mapping[str, Any]) -> bool:
    """Tell whether parameters of that type are restored from a copy: always, for 16 bits."""
    return bool(group["exact"]) or dtype in (torch.bfloat16, torch.float16)


def _check(param: Tensor) -> None:
    if not param.is_floating_point() or param.dtype.itemsize < 2:
        raise UserError(f"MeZO needs real parameters of 16 bits or more; got {param.dtype}; convert the model")
    if isinstance(param, DTensor):
        raise UserError(
            "MeZO needs whole parameters; got a sharded one; on several ranks use trainwright.sync's just-one-byte"
        )


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Let what follows draw the random numbers that are drawn within."""
    before = random_states()
    yield
    set_random_states(before)


def random_states() -> list[Tensor]:
    """Return where torch's generators stand: the CPU's, and each GPU's where there are any in use."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Put torch's generators where `random_states` found them."""
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, device)


def _temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """The direction in fp32 with the bits that it is made of, and the moved parameter, of one piece."""
    return min(math.prod(shape), PIECE) * (4 + 2 + max(element_bytes, 4))


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
    real_only=True,
    not_on_shards="regenerates whole directions",
)
"""Not among `names()`: a plan prices a backward, which MeZO has none of."""
