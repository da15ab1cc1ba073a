"""Directions of several optimizers at the points of one trajectory, against closed forms on a quadratic."""

from __future__ import annotations

import math

import pytest
import torch

from trainwright import optim
from trainwright.artifacts import UserError
from trainwright.optim import compare_on_one_trajectory

CURVATURE = torch.cat([torch.ones(99), torch.tensor([100.0])]).double()


def test_sharpness_and_decrease_are_those_of_the_closed_form() -> None:
    """Of 99 ones and one 100: sharpness 99.03 against 1.99, a decrease of 50.99 against 99.50 of 99.50."""
    weight = torch.ones(100, dtype=torch.float64, requires_grad=True)
    made = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
        "clipped": lambda params: optim.ClippedSGD(params, lr=1e-3, clip=0.1),
        "sign": lambda params: optim.SignSGD(params, lr=1e-3, momentum=0.0),
    }
    rows = compare_on_one_trajectory(
        lambda step: (CURVATURE * weight**2).sum() / 2, [weight], made, "sgd", num_steps=1, first_length=20.0
    )
    found = {row.name: row for row in rows}
    assert found["sgd"].sharpness == pytest.approx(99.03, abs=0.01)
    assert found["clipped"].sharpness == pytest.approx(1.99, abs=1e-9)
    assert found["sign"].sharpness == pytest.approx(1.99, abs=1e-9)
    assert found["sgd"].slope == pytest.approx(float(CURVATURE.norm()), rel=1e-9)
    assert 0.93 * 50.99 < found["sgd"].decrease < 50.99
    assert 0.93 * 99.50 < found["clipped"].decrease <= 99.50
    assert found["clipped"].length == pytest.approx(10.0, rel=0.3)


def test_all_see_the_leaders_points_and_only_it_moves() -> None:
    weight = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
    alone = weight.detach().clone().requires_grad_()
    noise = torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)
    made = {
        "adam": lambda params: torch.optim.Adam(params, lr=0.1),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    }
    rows = compare_on_one_trajectory(
        lambda step: (weight**2).sum() / 2 + noise[step] @ weight, [weight], made, "adam", num_steps=6, interval=2
    )
    optimizer, buffer, slopes = torch.optim.Adam([alone], lr=0.1), torch.zeros(2).double(), []
    for step in range(6):
        grad = alone.detach() + noise[step]
        buffer = 0.5 * buffer + grad
        slopes.append(float(grad @ buffer / buffer.norm()))
        alone.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight, alone, rtol=1e-12, atol=1e-12)
    assert [row.step for row in rows] == [0, 0, 2, 2, 4, 4]
    assert [row.slope for row in rows if row.name == "momentum"] == pytest.approx(slopes[::2])
    assert all(row.sharpness == pytest.approx(1.0) for row in rows)


def test_no_direction_and_no_leader() -> None:
    weight = torch.zeros(2, requires_grad=True)
    made = {"sgd": lambda params: torch.optim.SGD(params, lr=0.1)}
    (row,) = compare_on_one_trajectory(lambda step: (weight**2).sum(), [weight], made, "sgd", num_steps=1)
    assert math.isnan(row.sharpness)
    assert row.decrease == 0.0
    with pytest.raises(UserError, match="a leader among sgd is needed; got 'adam'"):
        compare_on_one_trajectory(lambda step: weight.sum(), [weight], made, "adam", num_steps=1)
