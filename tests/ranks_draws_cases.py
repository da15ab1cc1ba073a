"""A comparison whose ranks draw what they would in another step: for `tests/runtime/test_ranks_draws.py`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.models import micro
from trainwright.artifacts import Plan
from trainwright.runtime.module import ParallelModule
from trainwright.runtime.verification.verify import verify


def of_the_next_step(plan: str) -> dict[str, Any]:
    """Verify a plan of `micro.drawn` whose ranks count one step more than they made."""
    own = ParallelModule._state

    def later(module: ParallelModule) -> Any:
        module.num_steps += 1
        return own(module)

    with patch.object(ParallelModule, "_state", later):
        return verify(micro.drawn, Plan.parse(plan)).model_dump()
