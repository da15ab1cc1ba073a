"""AdaBelief: the lengths of its steps under constant and alternating gradients, in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainwright.optim import AdaBelief


def step_lengths(gradients: Iterator[float], num_steps: int, **options: Any) -> list[float]:
    """|step| / lr under the given gradients, in float64."""
    weight = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
    optimizer = AdaBelief([weight], lr=1e-3, **options)
    found = []
    for _ in range(num_steps):
        before = weight.item()
        weight.grad = torch.tensor(next(gradients), dtype=torch.float64)
        optimizer.step()
        found.append(abs(weight.item() - before) / 1e-3)
    return found


def constant(value: float = 1.0) -> Iterator[float]:
    while True:
        yield value


def alternating() -> Iterator[float]:
    while True:
        yield from (1.0, -1.0)


def test_steps_grow_where_the_gradient_stands_still() -> None:
    found = step_lengths(constant(), 2000, rectify=False)
    expected = {1: 1.1111, 2: 1.1680, 10: 1.6354, 100: 4.9551, 1000: 20.031, 2000: 38.633}
    assert {step: found[step - 1] for step in expected} == pytest.approx(expected, rel=1e-4)
    assert found[0] == pytest.approx(1 / 0.9, rel=1e-12)


def test_steps_stay_small_where_it_alternates() -> None:
    assert step_lengths(alternating(), 2000, rectify=False)[-1] == pytest.approx(0.05556, rel=1e-3)


@pytest.mark.slow  # 24,000 steps; the other forms of the second moment are tested by a few
def test_eps_builds_up_in_the_second_moment() -> None:
    limit = 1 / math.sqrt(1e-8 / (1 - 0.999))
    assert limit == pytest.approx(316.23, rel=1e-5)
    assert step_lengths(constant(), 12_000, rectify=False, eps=1e-8)[-1] == pytest.approx(limit, rel=1e-2)
    assert step_lengths(constant(), 12_000, rectify=False, eps=1e-8, eps_accumulate=False)[-1] > 10 * limit


def test_the_first_five_rectified_steps_have_no_denominator() -> None:
    found = step_lengths(constant(3.0), 6)
    assert found[:5] == pytest.approx([3.0] * 5, rel=1e-9)
    assert found[5] < 1.0
    assert step_lengths(constant(3.0), 6, degenerated_to_sgd=False)[:5] == [0.0] * 5


def test_decay_by_lr_or_fixed_or_in_the_gradient() -> None:
    def after(**options: Any) -> float:
        weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        weight.grad = torch.zeros_like(weight)
        AdaBelief([weight], lr=0.1, weight_decay=0.3, **options).step()
        return weight.item()

    assert after() == pytest.approx(2 * (1 - 0.03))
    assert after(fixed_decay=True) == pytest.approx(2 * (1 - 0.3))
    assert after(decoupled=False) == pytest.approx(2 - 0.1 * 0.3 * 2)


@given(st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_the_scale_of_the_loss_does_not_matter(scale: float, seed: int) -> None:
    def run(factor: float) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.full((3,), 0.7, dtype=torch.float64))
        optimizer = AdaBelief([weight], lr=0.1, eps=0.0, rectify=False)
        for _ in range(3):
            weight.grad = factor * torch.randn(3, generator=draw, dtype=torch.float64)
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(run(scale), run(1.0), rtol=1e-9, atol=1e-9)
