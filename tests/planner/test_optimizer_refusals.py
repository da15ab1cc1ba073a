"""A plan for every optimizer on one device and on two: what `plan` says to train next, `train` takes; the rest it refuses."""

from __future__ import annotations

import pytest

import trainwright as tw
from tests.grids import slow_but
from tests.second_derivative_cases import words
from trainwright import optim
from trainwright.artifacts import UserError
from trainwright.cli.plan import _next
from trainwright.training import optimizer_of


@pytest.mark.parametrize(
    ("name", "num_devices"),
    slow_but(
        [("adamw", 2), ("clippedadafactor", 2)],
        [(name, num) for name in optim.names() for num in (1, 2)],
    ),
)
def test_what_comes_next_is_what_train_takes(name: str, num_devices: int) -> None:
    model, batch, loss_fn = words()
    plan = tw.plan(model, batch, loss_fn=loss_fn, hardware=f"cpu:{num_devices}", optimizer=name, solver="fsdp")
    said = _next(plan, "train.py:build", "plan.json")
    if num_devices == 2 and name == "clippedadafactor":
        assert said.startswith("train will not run it: an optimizer that steps on shards is needed on 2 ranks")
        assert "take adafactor" in said
        with pytest.raises(UserError, match=r"takes means over rows and columns"):
            optimizer_of(plan)
        return
    assert said == "next: trainwright train train.py:build --plan plan.json"
    chosen, contradictions = optimizer_of(plan)
    assert chosen.name == name
    assert not contradictions
