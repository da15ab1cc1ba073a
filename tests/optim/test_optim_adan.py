"""Adan: two steps by hand, Adam as a special case, the identity that it is derived from, its decay and its restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainwright.optim import Adan


def double(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def steps(gradients: list[list[float]], **options: Any) -> tuple[nn.Parameter, Adan]:
    weight = double(*(0.7 for _ in gradients[0]))
    optimizer = Adan([weight], **options)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return weight, optimizer


def test_two_steps_by_hand() -> None:
    weight, optimizer = steps([[1.0], [3.0]], lr=0.1, eps=0.0)
    state = optimizer.state[weight]
    assert state["exp_avg_sq"].item() == pytest.approx(0.99 * 0.01 + 0.01 * (3 + 0.92 * 2) ** 2, rel=1e-12)
    assert state["exp_avg_sq"].item() == pytest.approx(0.244156, abs=1e-9)
    assert state["exp_avg_diff"].item() == pytest.approx(0.08 * 2, rel=1e-12)
    root = (0.244156 / (1 - 0.99**2)) ** 0.5
    mean = (0.98 * 0.02 + 0.02 * 3) / (1 - 0.98**2)
    change = 0.16 / (1 - 0.92**2)
    assert weight.item() == pytest.approx(0.7 - 0.1 - 0.1 * (mean + 0.92 * change) / root, rel=1e-9)


def test_a_constant_gradient_gives_adams_steps() -> None:
    weight, other = double(1.0, -2.0), double(1.0, -2.0)
    pair = (Adan([weight], lr=0.1), torch.optim.Adam([other], lr=0.1, betas=(0.98, 0.99)))
    for _ in range(20):
        for param, optimizer in zip((weight, other), pair):
            param.grad = torch.tensor([0.3, -7.0], dtype=torch.float64)
            optimizer.step()
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-12)


def test_decay_alone_is_geometric() -> None:
    weight, _ = steps([[0.0]] * 5, lr=0.1, weight_decay=0.3)
    assert weight.item() == pytest.approx(0.7 / 1.03**5, rel=1e-12)
    weight, _ = steps([[0.0]] * 5, lr=0.1, weight_decay=0.3, no_prox=True)
    assert weight.item() == pytest.approx(0.7 * 0.97**5, rel=1e-12)


@given(st.integers(0, 2**31), st.floats(0.02, 0.9), st.floats(1e-3, 0.05))
def test_nesterov_without_the_gradient_ahead(seed: int, beta: float, lr: float) -> None:
    """Nesterov's iterates and those of the recursion that Adan averages differ by one look ahead, on any quadratic."""
    draw = torch.Generator().manual_seed(seed)
    factor = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    matrix, target = factor.T @ factor, torch.randn(6, generator=draw, dtype=torch.float64)

    def gradient(x: Tensor) -> Tensor:
        return matrix @ x - target

    start = torch.randn(6, generator=draw, dtype=torch.float64)
    ahead, momentum = start.clone(), torch.zeros_like(start)
    behind, mean, before = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for _ in range(8):
        found = gradient(ahead - lr * (1 - beta) * momentum)
        momentum = (1 - beta) * momentum + found
        ahead = ahead - lr * momentum
        new = gradient(behind)
        mean = (1 - beta) * mean + new + (1 - beta) * (new - before)
        before, behind = new, behind - lr * mean
        torch.testing.assert_close(behind, ahead - lr * (1 - beta) * momentum, rtol=1e-9, atol=1e-9)


def test_clipping_is_by_the_norm_of_everything_and_per_group() -> None:
    first, second = double(1.0, 1.0), double(1.0)
    optimizer = Adan([{"params": [first], "max_grad_norm": 1.0}, {"params": [second]}], betas=(0.0, 0.0, 0.0))
    first.grad, second.grad = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[first]["exp_avg"].tolist() == pytest.approx([0.6, 0.0])
    assert optimizer.state[second]["exp_avg"].tolist() == [4.0]
    assert first.grad.tolist() == [3.0, 0.0]


def test_gradients_below_the_bound_are_left_as_they_are() -> None:
    weight = double(1.0, 1.0)
    optimizer = Adan([weight], max_grad_norm=5.0, betas=(0.0, 0.0, 0.0))
    weight.grad = torch.tensor([0.3, -0.4], dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.3, -0.4]


def test_a_restart_is_a_new_optimizer() -> None:
    rows = [[1.0, 2.0], [3.0, -1.0], [-2.0, 0.5], [4.0, 4.0]]
    weight, optimizer = steps(rows[:2], lr=0.1, weight_decay=0.1)
    fresh = nn.Parameter(weight.detach().clone())
    other = Adan([fresh], lr=0.1, weight_decay=0.1)
    optimizer.restart()
    for row in rows[2:]:
        for param, current in ((weight, optimizer), (fresh, other)):
            param.grad = torch.tensor(row, dtype=torch.float64)
            current.step()
    assert weight.tolist() == fresh.tolist()
