"""The schedules that a run can follow by name, as one factor of the learning rate a step.

W warm-up steps of N in all:   (k + 1) / (W + 1)  for k < W,  and from there on, with t = (k − W) / (N − W),

    constant    1
    linear      1 − t
    cosine      (1 + cos πt) / 2
    wsd         1 until the last `decay` steps, then linear     (warm-up, stable, decay)
"""

from __future__ import annotations

import math
from typing import Any

from ..artifacts import UserError
from .linear import ScheduledFactors

NAMED = ("constant", "linear", "cosine", "wsd")


def factors_of(name: str, num_steps: int, num_warmup_steps: int = 0, num_decay_steps: int | None = None) -> list[float]:
    """Return the factors of the learning rate in each of `num_steps` steps.

    num_decay_steps: of `wsd`, at its end; default: a fifth of all steps. Raises `UserError` for another name, and where the
    warm-up, or it and the decay, take more steps than there are.

    >>> factors_of("linear", 4, 1)
    [0.5, 1.0, 0.6666666666666667, 0.33333333333333337]
    >>> factors_of("wsd", 5, 1, 2)
    [0.5, 1.0, 1.0, 0.6666666666666666, 0.3333333333333333]
    """
    if name not in NAMED:
        raise UserError(f"a schedule is one of {', '.join(NAMED)}; got {name!r}; choose one of these")
    if not 0 <= num_warmup_steps < num_steps:
        raise UserError(
            f"fewer warm-up steps than the {num_steps} of the run are needed, 0 or more; got {num_warmup_steps}; warm up for less, "
            "or take more steps"
        )
    decay = _decay(name, num_steps, num_warmup_steps, num_decay_steps)
    rise = [(step + 1) / (num_warmup_steps + 1) for step in range(num_warmup_steps)]
    left = num_steps - num_warmup_steps
    return rise + [_factor(name, step, left, decay) for step in range(left)]


class NamedSchedule(ScheduledFactors):
    """A schedule whose state is where it stands: a run that is resumed with more steps follows the longer one.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> NamedSchedule(optimizer, [0.5, 1.0]).state_dict()["last_epoch"]
    0
    """

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands, and the peak rates; the factors follow from the run's settings."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs), "step_count": self._step_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.last_epoch, self.base_lrs, self._step_count = (
            state["last_epoch"],
            list(state["base_lrs"]),
            state["step_count"],
        )
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def _decay(name: str, num_steps: int, num_warmup_steps: int, num_decay_steps: int | None) -> int:
    if name != "wsd":
        if num_decay_steps is not None:
            raise UserError(f"decay steps are wsd's; got {num_decay_steps} for {name}; leave them out")
        return 0
    decay = max(1, num_steps // 5) if num_decay_steps is None else num_decay_steps
    if not 1 <= decay <= num_steps - num_warmup_steps:
        raise UserError(
            f"wsd needs at least 1 decay step, and no more than the {num_steps - num_warmup_steps} behind its warm-up; "
            f"got {decay}; change the number"
        )
    return decay


def _factor(name: str, step: int, left: int, decay: int) -> float:
    if name == "linear":
        return 1 - step / left
    if name == "cosine":
        return (1 + math.cos(math.pi * step / left)) / 2
    if name == "wsd" and step >= left - decay:
        return (left - step) / (decay + 1)
    return 1.0
