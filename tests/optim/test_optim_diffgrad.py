"""diffGrad against Adam: their steps differ by the friction alone, which constant gradients show in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.optim import DiffGrad


def frictions(gradients: Sequence[float]) -> list[float]:
    """How much of Adam's step diffGrad takes, both with ε = 0."""
    weights = [nn.Parameter(torch.tensor(1.5, dtype=torch.float64)) for _ in range(2)]
    pair = (DiffGrad([weights[0]], lr=0.01, eps=0.0), torch.optim.Adam([weights[1]], lr=0.01, eps=0.0))
    found = []
    for gradient in gradients:
        before = [weight.item() for weight in weights]
        for weight, optimizer in zip(weights, pair):
            weight.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
        moved = [weight.item() - old for weight, old in zip(weights, before)]
        found.append(moved[0] / moved[1])
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_a_constant_gradient_halves_the_step() -> None:
    found = frictions([2.0] * 6)
    assert found[0] == pytest.approx(0.8808, abs=1e-4)
    assert found == pytest.approx([sigmoid(2.0)] + [0.5] * 5, rel=1e-9)


def test_an_alternating_gradient_hardly_damps() -> None:
    found = frictions([2.0, -2.0] * 3)
    assert found[1] == pytest.approx(0.98201, abs=1e-5)
    assert found == pytest.approx([sigmoid(2.0)] + [sigmoid(4.0)] * 5, rel=1e-9)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=6))
def test_the_friction_is_that_of_successive_gradients(gradients: list[float]) -> None:
    before = [0.0, *gradients[:-1]]
    expected = [sigmoid(abs(new - old)) for new, old in zip(gradients, before)]
    assert frictions(gradients) == pytest.approx(expected, rel=1e-6)


def test_what_is_remembered_is_a_copy() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer = DiffGrad([weight], weight_decay=0.5)
    optimizer.step()
    weight.grad.zero_()
    assert optimizer.state[weight]["previous_grad"].tolist() == [3.5, 3.5]
