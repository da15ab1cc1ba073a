"""AdaHessian against a float64 oracle by hand and the published checks of its estimate and its averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.numerics import hvp
from trainwright.numerics.seeds import seeded
from trainwright.optim.adahessian import AdaHessian


def curvature_of(weight: Tensor, loss: Any, **options: Any) -> Tensor:
    """The bias-corrected D^(s) after one refresh."""
    optimizer = AdaHessian([weight], **options)
    optimizer.update_hessian(loss)
    return optimizer.state[weight]["hessian_sq"].sqrt()


def test_a_diagonal_hessian_is_estimated_without_variance() -> None:
    """One step: Newton where the curvature is positive, descent by the same length where it is negative."""
    scale = torch.tensor([3.0, -2.0, 10.0], dtype=torch.float64)
    for seed in range(5):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        AdaHessian([weight], lr=1.0, seed=seed).step(lambda weight=weight: 0.5 * (scale * weight**2).sum())
        expected = torch.tensor([3.3332e-05, 2.0, 9.9999e-6], dtype=torch.float64)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=0)


def test_the_mean_over_draws_is_the_diagonal_not_the_row_sums() -> None:
    """A constant probe would give (3, 5, 5). D itself: with probe ±1 on this H every |D| is its own D."""
    matrix = torch.tensor([[2.0, 1, 0], [1, 3, 1], [0, 1, 4]], dtype=torch.float64)
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer, total = AdaHessian([weight], betas=(0.9, 0.0)), torch.zeros(3, dtype=torch.float64)
    for _ in range(4000):
        optimizer.update_hessian(lambda: 0.5 * weight @ matrix @ weight)
        total += optimizer.state[weight]["hessian_sq"].sqrt()  # D > 0: each diagonal outweighs its row's others
    torch.testing.assert_close(total / 4000, torch.tensor([2.0, 3.0, 4.0]).double(), rtol=0.03, atol=0)
    probes = hvp.rademacher([torch.empty(20000, 3, dtype=torch.float64)], seeded(0))[0]
    torch.testing.assert_close((probes * (probes @ matrix)).mean(0), matrix.diagonal(), rtol=0.02, atol=0)


def test_twenty_steps_are_the_equations_by_hand() -> None:
    draw = seeded(1)
    mixing = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(6, generator=draw, dtype=torch.float64) + 1)
    optimizer = AdaHessian(
        [weight], lr=0.03, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.1, hessian_power=0.5, update_period=3, seed=4
    )
    theta, m, q = weight.detach().clone(), torch.zeros(6), torch.zeros(6)
    for step in range(20):
        optimizer.step(lambda: ((mixing @ weight) ** 4).sum() / 40)

        products, count = mixing @ theta, step // 3 + 1
        if step % 3 == 0:
            probe = hvp.rademacher([theta], seeded(4, step // 3))[0]
            q = 0.7 * q + 0.3 * (mixing.T @ (12 * products**2 * (mixing @ probe)) / 40) ** 2
        m = 0.8 * m + 0.2 * mixing.T @ (4 * products**3) / 40
        denominator = (q.sqrt() / (1 - 0.7**count) ** 0.5) ** 0.5 + 1e-3
        theta = theta - 0.03 * (m / ((1 - 0.8 ** (step + 1)) * denominator) + 0.1 * theta)
    torch.testing.assert_close(weight.detach(), theta, rtol=1e-11, atol=1e-12)
    assert weight.grad is None


def bilinear(weight: Tensor, scale: Tensor) -> Any:
    """A loss whose Hessian is diagonal with `scale`, so D is `scale` whatever the probe."""
    return lambda: 0.5 * (scale * weight**2).sum()


SHAPES: list[tuple[int, ...]] = [(5,), (3, 4), (2, 3, 4), (2, 3, 3, 3), (2, 2, 2, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("average", ["spatial", "row", None, 4, 1])
def test_averages_are_over_their_blocks(shape: tuple[int, ...], average: str | int | None, signed: bool) -> None:
    scale = torch.randn(shape, generator=seeded(3), dtype=torch.float64)
    weight = nn.Parameter(torch.full(shape, 2.0, dtype=torch.float64))
    found = curvature_of(weight, bilinear(weight, scale), average=average, signed=signed)
    values = scale if signed else scale.abs()
    expected = torch.zeros(shape, dtype=torch.float64)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape)).tolist():
        expected[tuple(index)] = values[block(index, shape, average)].mean().abs()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def block(index: list[int], shape: tuple[int, ...], average: str | int | None) -> Any:
    """The mask of the block of one element, by the definition."""
    mask = torch.zeros(shape, dtype=torch.bool)
    if isinstance(average, int) and len(shape) > 1:
        flat = sum(i * step for i, step in zip(index, torch.empty(shape).stride(), strict=True))
        mask.view(-1)[flat // average * average : (flat // average + 1) * average] = True
    elif average in ("spatial", "row") and len(shape) >= 4:
        mask[index[0], index[1]] = True
    elif average == "row" and len(shape) in (2, 3):
        mask[tuple(index[:-1])] = True
    else:
        mask[tuple(index)] = True
    return mask


def test_a_kernels_state_is_constant_inside_the_kernel() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, dtype=torch.float64)
    images = torch.randn(4, 2, 8, 8, generator=seeded(0), dtype=torch.float64)
    optimizer = AdaHessian(layer.parameters())
    optimizer.step(lambda: layer(images).pow(2).mean())
    state = optimizer.state[layer.weight]["hessian_sq"]
    assert torch.equal(state, state[..., :1, :1].expand_as(state))
    assert state[..., 0, 0].unique().numel() == 6


def test_constant_curvature_is_its_own_average_from_the_first_step() -> None:
    scale = torch.tensor([0.5, -4.0], dtype=torch.float64)
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = AdaHessian([weight], lr=0.0)
    for _ in range(7):
        optimizer.step(bilinear(weight, scale))
        torch.testing.assert_close(optimizer.state[weight]["hessian_sq"].sqrt(), scale.abs(), rtol=1e-12, atol=0)


def test_a_parameter_that_joins_late_gets_its_curvature_at_once() -> None:
    """Without it q = 0 and the step would be lr/eps."""
    early, late = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = AdaHessian([early, late], lr=1.0, update_period=100)
    for step in range(4):
        optimizer.step(lambda step=step: (early**2).sum() + ((5 * late**2).sum() if step == 2 else 0.0))
        if step < 2:
            assert late.tolist() == [1.0, 1.0]
    assert optimizer.state[late]["hessian_step"] == 1
    assert late.abs().max() < 1.1e-4


@pytest.mark.parametrize("average", [0, "rows", True])
def test_an_unknown_average_is_refused(average: Any) -> None:
    with pytest.raises(ValueError, match=r"average 'spatial', 'row', None or a block length of at least 1; got"):
        AdaHessian([nn.Parameter(torch.ones(1))], average=average)
