"""What the command line and Python share of `verify`: the optimizer that the plan names, and a peak predicted anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import optim
from .artifacts import Plan, Report
from .program.decisions import Decisions
from .program.program import Program


def verified(model_fn: Callable[[], Any], plan: Plan, dtype: str, seed: int) -> Report:
    """Compare a plan with one process on its ranks; peak and update where the optimizer takes gradients alone."""
    from .planner.costs.simulate import simulate
    from .runtime.verification.verify import verify

    chosen = optim.of_plan(plan)

    def peak_of(program: Program, decisions: Decisions, coords: Sequence[int], counts: Mapping[str, list[int]]) -> int:
        return simulate(
            program, decisions, chosen.on_fakes, target=plan.cluster.device.kind, coords=coords, optimizer_cost=chosen,
            counts=counts,
        ).peak_bytes  # fmt: skip

    make = None if chosen.needs_loss else chosen.make
    return verify(model_fn, plan, dtype=dtype, seed=seed, make_optimizer=make, peak_of=peak_of)
