"""What a plan is about: the zoo's models by the program that was stored when they were planned, others by building them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..artifacts import Plan
from ..request import dtype_of, literals_of
from .model import ModelOptions
from .output import remarks

if TYPE_CHECKING:
    from ..models.targets import Loaded


@dataclass(eq=False)
class Planned:
    """A plan and the model that it is for, which is built when it is first asked for."""

    plan: Plan
    options: ModelOptions

    @cached_property
    def loaded(self) -> Loaded:
        """The model and its batch."""
        found = self.options.load()
        remarks(found.notes)
        return found

    @contextmanager
    def subject(self) -> Iterator[dict[str, Any]]:
        """Give `tw.check` and `tw.explain` what they take beside the plan: a stored program, else the model and its batch."""
        stored = self._stored()
        if stored is not None:
            yield {"model": stored, "batch": None}
            return
        loaded = self.loaded
        with named(self.options, loaded):
            yield {"model": loaded.model, "batch": loaded.batch, "loss_fn": loaded.loss_fn}

    def _stored(self) -> Any:
        from ..capture.call import check_same_loss
        from ..profiler.step import DTYPES
        from ..program.micro_batches import stored_step

        plan, name = self.plan, _name(self.options, self.plan.dtype, self.plan.literals)
        if name is None or plan.shapes:  # of further shapes the model is needed
            return None
        check_same_loss(plan, None)
        autocast = DTYPES[plan.autocast] if plan.autocast else None
        return stored_step(name, autocast, plan.micro_batches, plan.corrections, plan.loss_chunks)


@contextmanager
def named(options: ModelOptions, loaded: Loaded) -> Iterator[None]:
    """Store what is captured of `loaded` inside under its name too, if the zoo gave it one."""
    from ..capture.cached import naming

    with naming(_name(options, dtype_of(loaded.model), literals_of(loaded.batch)), loaded.batch):
        yield


def _name(options: ModelOptions, dtype: str, literals: Any) -> str | None:
    """A text that says which of the zoo's models this is, and on which batch; `None` for other models."""
    if not options.spec.startswith("zoo:"):
        return None
    return json.dumps([options.payload(), dtype, dict(literals)], sort_keys=True, default=str)
