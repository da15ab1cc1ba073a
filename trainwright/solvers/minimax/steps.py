"""What every method of the family checks of its step sizes."""

from __future__ import annotations

import math

from ...artifacts import UserError


def check_steps(step_x: float, step_y: float) -> None:
    """Refuse step sizes that are not positive and finite."""
    if not (0 < step_x < math.inf and 0 < step_y < math.inf):
        raise UserError(
            f"positive step sizes are needed; got step_x={step_x}, step_y={step_y}; "
            "start near 1 / the largest smoothness of a component"
        )
