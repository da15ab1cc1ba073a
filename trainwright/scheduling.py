"""The learning rate of a run: `--schedule`, from its name to what the training loop calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifacts import Plan, UserError

if TYPE_CHECKING:
    import torch

    from .runtime import ParallelModule

SCHEDULES = ("constant", "linear", "cosine", "wsd", "refined", "lanczos")
NORMS = {2: "grad_norm", 1: "grad_norm_1"}
"""The fields of the metrics that hold the gradients' norms, by order."""
_OF_SGD = ("sgd", "sgd-momentum", "sgd8bit")


@dataclass(frozen=True)
class ScheduleOptions:
    """What the user said about the learning rate. norms: a metrics file of an earlier run, for `refined`."""

    name: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    norms: str | None = None

    def check(self, steps: int, optimizer: str) -> None:
        """Raise `UserError` for what cannot be followed in a run of `steps`."""
        if self.name not in SCHEDULES:
            raise UserError(f"a schedule is one of {', '.join(SCHEDULES)}; got {self.name!r}; choose one of these")
        if self.norms is not None and self.name != "refined":
            raise UserError(f"norms are for the schedule refined; got them with {self.name}; leave them out")
        if self.name == "refined":
            self._refined(steps, optimizer)
            return
        from .schedules.factors import factors_of

        name = "constant" if self.name == "lanczos" else self.name
        factors_of(name, steps, self.warmup_steps, self.decay_steps)
        if self.name == "lanczos" and optimizer not in _OF_SGD:
            raise UserError(
                f"an optimizer whose steps are the gradient is needed for the schedule lanczos, one of {', '.join(_OF_SGD)}; got "
                f"{optimizer}, which scales coordinates; take one of these, or --schedule linear"
            )

    def factors(self, steps: int, optimizer: str) -> list[float]:
        """Return the factor of the learning rate in each step."""
        from .schedules.factors import factors_of

        if self.name == "refined":
            return self._refined(steps, optimizer)
        return factors_of(self.name, steps, self.warmup_steps, self.decay_steps)

    def _refined(self, steps: int, optimizer: str) -> list[float]:
        import torch

        from .schedules import RefinedSchedule

        if self.norms is None:
            raise UserError(
                "the metrics of an earlier run are needed for the schedule refined; got none; run with --schedule linear "
                "--metrics FILE first, then give --norms FILE"
            )
        if self.warmup_steps:
            raise UserError(
                f"no warm-up is needed with the schedule refined, whose norms say how it begins; got {self.warmup_steps}; leave "
                "--warmup-steps out"
            )
        order: Any = 2 if optimizer in (*_OF_SGD, "clippedsgd", "sgdsai") else 1
        probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return RefinedSchedule(probe, norms_of(self.norms, order), num_steps=steps, order=order).factors


def norms_of(path: str, order: int) -> list[float]:
    """Return the gradient norms of a run from its metrics file, a step each.

    Raises `UserError` where the file cannot be read, or has none.
    """
    try:
        lines = Path(path).read_text(encoding="utf8").splitlines()
        found = [json.loads(line).get(NORMS[order]) for line in lines if line.strip()]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"a metrics file of an earlier run is needed; {path} is none ({error}); check the path"
        ) from None
    norms = [float(value) for value in found if value is not None]
    if len(norms) < 2:
        raise UserError(
            f"gradient norms of at least 2 steps are needed; {path} has {len(norms)}; log a run with --metrics, by an "
            "optimizer that steps on gradients"
        )
    return norms


class Schedule:
    """What the training loop calls before and after each step; it has the state of a scheduler of torch's."""

    def __init__(self, options: ScheduleOptions, optimizer: torch.optim.Optimizer, steps: int, name: str) -> None:
        from .schedules import LanczosLR
        from .schedules.factors import NamedSchedule

        options.check(steps, name)
        self.scheduler: Any
        if options.name == "lanczos":
            warmup: dict[str, Any] = {"num_warmup_steps": options.warmup_steps} if options.warmup_steps else {}
            self.scheduler = LanczosLR(optimizer, **warmup)
        else:
            self.scheduler = NamedSchedule(optimizer, options.factors(steps, name))

    def before(self, module: ParallelModule, part: Any) -> None:
        """Measure the curvature of the batch that is to come, where the schedule goes by it."""
        from .runtime.closures import measuring

        if getattr(self.scheduler, "due", False):
            with measuring(module, part) as loss:
                self.scheduler.measure(loss)

    def after(self) -> None:
        """Go on to the next step's rate."""
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.scheduler.load_state_dict(state)


def check_schedule(options: ScheduleOptions, plan: Plan, steps: int, optimizer: str) -> None:
    """Raise `UserError` for a schedule that cannot be followed under a plan."""
    from .optim.chosen import what_goes_once

    options.check(steps, optimizer)
    away = what_goes_once(plan) if options.name == "lanczos" else None
    if away is not None:
        raise UserError(
            "a plan that keeps everything is needed for the schedule lanczos, which differentiates the loss twice; this one "
            f"{away}; plan with --keep-graph, or take --schedule linear"
        )


Make = Callable[[Any], Schedule]
