"""Saves the steps of a run in its tier, instead of in checkpoints."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from ...artifacts import UserError
from ..module import ParallelModule


class TierSaving:
    """Context manager around the loop: attaches the optimizer, resumes at `first_step`, and commits due steps and the last one.

    The schedule's state and the number of the next step are saved in the notes of the step.
    """

    def __init__(
        self, module: ParallelModule, optimizer: torch.optim.Optimizer, num_steps: int, schedule: Any = None
    ) -> None:
        assert module.tier is not None
        self._tier, self._num_steps, self._schedule = module.tier, num_steps, schedule
        self._tier.commits = False
        self._tier.attach(optimizer)
        if self._tier.options.resume:
            self._resume()
        self.first_step = self._tier.store.notes.get("next_step", 0)

    def _resume(self) -> None:
        notes = self._tier.store.notes
        if (notes.get("schedule") is not None and self._schedule is None) or (
            notes.get("schedule") is None and self._schedule is not None
        ):
            before, now = ("a", "none") if self._schedule is None else ("no", "one")
            raise UserError(
                f"the run in these folders has {before} schedule of the learning rate; got {now}; resume it as it was begun"
            )
        if self._schedule is not None:
            self._schedule.load_state_dict(notes["schedule"])

    def after_step(self, step: int) -> None:
        """Commit the step, if it is due or the last one; a skipped step counts too."""
        notes = {
            "next_step": step + 1,
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }  # fmt: skip
        self._tier.commit(notes, force=step + 1 == self._num_steps)

    def save_finished(self, step: int) -> None:
        """Do nothing: the last step is committed already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tier.close()
