"""Calls of torch's functions compute under plans, split as their rules allow, what they compute in one process."""

from __future__ import annotations

import pytest

from tests.grids import slow_but
from tests.models.calls import EXPRESSIONS
from tests.pool import Pool

QUICK = [
    "h * torch.full_like(h, 0.3) + h.new_ones(12)",
    "F.embedding(i, h, scale_grad_by_freq=True)",
    "h[:, :8] + h[:, :8].T",
]
"""Expressions whose calls may not be split along every dim, for three different reasons."""


@pytest.mark.parametrize("expression", slow_but(QUICK, EXPRESSIONS))
def test_plans_drawn_at_random(pool2: Pool, expression: str) -> None:
    reports = pool2.run("tests.user_model_cases:plans_of_a_call", expression=expression, seeds=[0, 1])[0]
    assert all(report["passed"] for report in reports), reports
