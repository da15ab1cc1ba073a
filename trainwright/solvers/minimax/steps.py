"""What every method of the family checks of its step sizes."""

from __future__ import annotations

import math
import numbers

from ...artifacts import UserError


def check_steps(step_x: float, step_y: float) -> None:
    """Refuse step sizes that are not positive and finite."""
    steps = (step_x, step_y)
    if not all(isinstance(step, numbers.Real) and 0 < step < math.inf for step in steps):
        raise UserError(
            f"positive step sizes are needed; got step_x={step_x!r}, step_y={step_y!r}; "
            "start near 1 / the largest smoothness of a component"
        )
