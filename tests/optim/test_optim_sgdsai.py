"""SGD-SaI: its factor in closed form, its steps by hand, and the tensors on which the quotient alone explodes."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.optim.sgdsai import SGDSaI


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one(gradient: Tensor, **options: Any) -> tuple[nn.Parameter, SGDSaI]:
    weight = nn.Parameter(torch.ones_like(gradient))
    weight.grad = gradient.clone()
    optimizer = SGDSaI([weight], **options)
    optimizer.step()
    return weight, optimizer


def gain(gradient: Tensor, **options: Any) -> float:
    weight, optimizer = one(gradient, **options)
    return float(optimizer.state[weight]["gain"])


@pytest.mark.parametrize(("num", "expected"), [(100, 9.96), (10_000, 99.996), (1_000_000, 999.99)])
def test_the_gain_of_noise_is_the_root_of_its_size(num: int, expected: float) -> None:
    gradient = torch.randn(num, generator=draws(0))
    assert gain(gradient) == pytest.approx(expected, rel=6e-3)
    assert gain(gradient - gradient.mean()) == pytest.approx(math.sqrt(num - 1), rel=1e-5)


@given(st.integers(2, 50), st.floats(-3, 3), st.integers(0, 2**31))
def test_the_gain_in_closed_form(num: int, mean: float, seed: int) -> None:
    gradient = mean + torch.randn(num, generator=draws(seed), dtype=torch.float64)
    spread = float(((gradient - gradient.mean()) ** 2).sum())
    square = (num - 1) * (1 + num * float(gradient.mean()) ** 2 / spread)
    if square < (num - 1) / 1e-6:
        assert gain(gradient) == pytest.approx(math.sqrt(square), rel=1e-4)


def test_the_scale_of_the_loss_does_not_matter_to_the_gain() -> None:
    gradient = 0.1 + torch.randn(33, 7, generator=draws(1))
    assert gain(1000 * gradient) == pytest.approx(gain(gradient), rel=1e-5)


def test_tensors_of_unlike_size_get_unlike_learning_rates() -> None:
    small, large = torch.randn(10, generator=draws(2)), torch.randn(1_000_000, generator=draws(3))
    centred = [tensor - tensor.mean() for tensor in (small, large)]
    assert gain(centred[1]) / gain(centred[0]) == pytest.approx(math.sqrt(999_999 / 9), rel=1e-4)


def test_steps_equal_the_equations_by_hand() -> None:
    values = torch.randn(6, 5, 3, generator=draws(4), dtype=torch.float64) + 0.3
    weight = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))
    optimizer = SGDSaI([weight], lr=0.02, momentum=0.9, weight_decay=0.1)
    expected, mean, factor = [1.0] * 15, [0.0] * 15, 0.0
    for step, gradient in enumerate(values):
        flat = gradient.flatten().tolist()
        if step == 0:
            average = sum(flat) / 15
            sigma = math.sqrt(sum((g - average) ** 2 for g in flat) / 14)
            factor, mean = math.sqrt(sum(g * g for g in flat)) / (sigma + 1e-8), flat
        else:
            mean = [0.9 * m + 0.1 * g for m, g in zip(mean, flat)]
        expected = [x * (1 - 0.02 * 0.1) - 0.02 * factor * m for x, m in zip(expected, mean)]
        weight.grad = gradient.clone()
        optimizer.step()
    assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_the_first_step_is_exactly_the_scaled_gradient_and_the_second_averages() -> None:
    first, second = torch.randn(2, 9, generator=draws(5), dtype=torch.float64)
    weight, optimizer = one(first, lr=0.5, weight_decay=0.0)
    factor = optimizer.state[weight]["gain"]
    assert torch.equal(weight, 1 - 0.5 * (factor * first))
    before, weight.grad = weight.detach().clone(), second
    optimizer.step()
    assert torch.allclose(weight, before - 0.5 * factor * (0.9 * first + 0.1 * second), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    "gradient",
    [torch.tensor(0.1), torch.tensor([0.1]), torch.full((4,), 0.2), torch.zeros(4), torch.full((7, 3), 1 / 3)],
    ids=["scalar", "one", "alike", "zero", "alike-rounded"],
)
def test_tensors_without_spread_take_the_root_of_their_size(gradient: Tensor) -> None:
    weight, optimizer = one(gradient, lr=1e-2, weight_decay=0.0)
    root = math.sqrt(gradient.numel())
    assert float(optimizer.state[weight]["gain"]) == pytest.approx(root)
    assert torch.allclose(weight, 1 - 1e-2 * root * gradient)


def test_a_tensor_with_a_late_gradient_gets_its_own_gain() -> None:
    early, late = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(6))
    optimizer = SGDSaI([late, early])
    early.grad = torch.randn(5, generator=draws(6))
    optimizer.step()
    assert late not in optimizer.state
    late.grad = torch.randn(6, generator=draws(7))
    optimizer.step()
    assert float(optimizer.state[late]["gain"]) == pytest.approx(gain(late.grad))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_resumed_run_keeps_its_gain(momentum: float) -> None:
    gradients = torch.randn(6, 8, generator=draws(8)) * torch.logspace(0, 2, 6)[:, None]

    def run(start: int, stop: int, state: Any = None) -> tuple[Tensor, dict[str, Any]]:
        weight = nn.Parameter(torch.ones(8) if state is None else state["weight"])
        optimizer = SGDSaI([weight], momentum=momentum)
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
        for gradient in gradients[start:stop]:
            weight.grad = gradient
            optimizer.step()
        file = io.BytesIO()
        torch.save({"weight": weight.detach(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        return weight.detach(), torch.load(file, weights_only=True)

    whole, _ = run(0, 6)
    _, saved = run(0, 2)
    assert torch.equal(run(2, 6, saved)[0], whole)


def test_without_momentum_no_buffer_is_kept() -> None:
    weight, optimizer = one(torch.randn(5, generator=draws(9)), momentum=0.0)
    assert set(optimizer.state[weight]) == {"step", "gain"}


def test_maximize_mirrors_the_gradient() -> None:
    gradient = torch.randn(5, generator=draws(10))
    up, _ = one(gradient, maximize=True)
    down, _ = one(-gradient)
    assert torch.equal(up, down)


def sharded_gains(dim: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(dim)]))
    optimizer = SGDSaI([weight], lr=0.1)
    for seed in (11, 12):
        weight.grad = distribute_tensor(torch.randn(5, 3, generator=draws(seed)), mesh, [Shard(dim)])
        optimizer.step()
    assert isinstance(weight, DTensor)
    assert isinstance(optimizer.state[weight]["momentum_buffer"], DTensor)
    return [float(optimizer.state[weight]["gain"]), weight.full_tensor().tolist()]


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_share_the_gain_of_the_whole(pool2: Pool, dim: int) -> None:
    weight = nn.Parameter(torch.ones(5, 3))
    optimizer = SGDSaI([weight], lr=0.1)
    for seed in (11, 12):
        weight.grad = torch.randn(5, 3, generator=draws(seed))
        optimizer.step()
    for factor, values in pool2.run("tests.optim.test_optim_sgdsai:sharded_gains", dim=dim):
        assert factor == float(optimizer.state[weight]["gain"])
        assert torch.equal(torch.tensor(values), weight.detach())


def test_bad_settings_are_named() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match=r"SGDSaI needs momentum in \[0, 1\)"):
        SGDSaI([weight], momentum=1.0)
    with pytest.raises(UserError, match=r"SGDSaI needs guard in \[0, 1\)"):
        SGDSaI([weight], guard=-1.0)
