"""Clipping of the largest coordinates, the selection it rests on, and curvature along a direction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.numerics import select
from trainwright.numerics.select import kth_largest_magnitude
from trainwright.optim.clipped import ClippedAdam, ClippedSGD
from trainwright.optim.sharpness import directional_sharpness

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draws(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", [ClippedSGD, ClippedAdam])
def test_a_share_of_zero_clips_nothing_whatever_the_scale(kind: Any) -> None:
    ends = []
    for scale in (1.0, 0.25):
        weight = nn.Parameter(noise(1, 6))
        optimizer = kind([weight], lr=0.1, clip=0.0, threshold_scale=scale)
        for step in range(3):
            weight.grad = noise(step, 6)
            optimizer.step()
        ends.append(weight.detach())
    assert torch.equal(*ends)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=60), st.data(), st.sampled_from(DTYPES))
def test_the_selected_magnitude_is_that_of_a_sort(values: list[float], data: st.DataObject, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values).to(dtype)
    index, cut = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values)))
    found = kth_largest_magnitude([tensor[:cut], tensor[cut:]], index)
    assert float(found) == float(tensor.abs().sort(descending=True).values[index])


def test_many_equal_magnitudes_are_counted_exactly() -> None:
    ties = torch.cat([torch.full((20_000_000,), 0.5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)])
    assert float(kth_largest_magnitude([ties], 2)) == 1.0
    assert float(kth_largest_magnitude([ties], 20_000_002)) == 0.5
    assert math.isnan(float(kth_largest_magnitude([torch.tensor([1.0, math.nan])], 0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", ["normal", "ties", "sorted", "nan"])
def test_a_sample_tells_where_to_look_and_never_what_is_found(dtype: torch.dtype, spread: str) -> None:
    values = torch.randn(300_001, generator=draws(7))
    values = {
        "normal": values,
        "ties": values.round(),
        "sorted": values.abs().sort().values,
        "nan": values.where(values < 2, torch.nan),
    }[spread].to(dtype)  # fmt: skip
    parts = [values[:100_000].view(100, 1000), values[100_000:]]
    expected = values.float().abs().sort(descending=True).values
    for index in (0, 3, 150_000, 299_990, 300_000):
        found = kth_largest_magnitude(parts, index)
        torch.testing.assert_close(found, expected[index], rtol=0, atol=0, equal_nan=True)
        by_digits = kth_largest_magnitude(parts, index, lambda counts: torch.stack(list(counts)).sum(0))
        torch.testing.assert_close(found, by_digits, rtol=0, atol=0, equal_nan=True)


def test_elements_that_lie_apart_are_selected_among_themselves() -> None:
    values = torch.arange(600_000, dtype=torch.float32)
    for apart in (values[::2], values.view(-1, 2)[:, 0], values.bfloat16()[::2]):
        assert not apart.is_contiguous()
        assert kth_largest_magnitude([apart], 1000) == apart.float().sort(descending=True).values[1000]


def test_without_a_compiler_digits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(300_000, generator=draws(8))
    sampled = kth_largest_magnitude([values], 1000)
    assert select._by_samples([values], 1000) is not None
    monkeypatch.setattr(select, "_keep_between", lambda: None)
    assert select._by_samples([values], 1000) is None
    assert kth_largest_magnitude([values], 1000) == sampled


def test_a_tenth_of_a_thousand_coordinates_ends_at_one_magnitude() -> None:
    gradient = noise(0, 1000)
    weights = [nn.Parameter(torch.zeros(20, 30).double()), nn.Parameter(torch.zeros(400).double())]
    weights[0].grad, weights[1].grad = gradient[:600].view(20, 30).clone(), gradient[600:].clone()
    ClippedSGD(weights, lr=1.0, clip=0.1).step()
    moved = -torch.cat([weight.detach().flatten() for weight in weights])
    threshold = gradient.abs().sort(descending=True).values[100]
    assert int((moved.abs() == threshold).sum()) == 101
    assert int((moved == gradient).sum()) == 900  # the 899 below the threshold, and the one that is the threshold
    assert torch.equal(moved, gradient.clamp(-threshold, threshold))


@pytest.mark.parametrize("foreach", [False, True])
def test_the_largest_coordinate_is_clipped_in_every_form(foreach: bool) -> None:
    weight = nn.Parameter(torch.zeros(100))
    weight.grad = torch.arange(1.0, 101.0)
    ClippedSGD([weight], lr=1.0, clip=0.5, foreach=foreach).step()
    assert float(weight.detach().abs().max()) == 50.0


def test_clipped_sgd_equals_the_equations_by_hand() -> None:
    shapes = [(3, 4), (5,), ()]
    weights = [nn.Parameter(noise(i, *shape)) for i, shape in enumerate(shapes)]
    optimizer = ClippedSGD(weights, lr=0.1, clip=0.3, momentum=0.8, weight_decay=0.05, threshold_scale=0.7)
    expected = torch.cat([weight.detach().flatten() for weight in weights]).tolist()
    buffers = [0.0] * 18
    for step in range(6):
        gradient = noise(50 + step, 18)
        for weight, part in zip(weights, gradient.split([12, 5, 1])):
            weight.grad = part.view(weight.shape).clone()
        optimizer.step()
        threshold = 0.7 * sorted((abs(g) for g in gradient.tolist()), reverse=True)[int(18 * 0.3)]
        for i, g in enumerate(gradient.tolist()):
            buffers[i] = 0.8 * buffers[i] + math.copysign(min(abs(g), threshold), g) + 0.05 * expected[i]
            expected[i] -= 0.1 * buffers[i]
    found = torch.cat([weight.detach().flatten() for weight in weights]).tolist()
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("clip_update", [False, True])
def test_clipped_adam_equals_the_equations_by_hand(clip_update: bool) -> None:
    weights = [nn.Parameter(noise(1, 3, 4)), nn.Parameter(noise(2, 7))]
    optimizer = ClippedAdam(
        weights, lr=0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2, clip=0.4, clip_update=clip_update
    )
    expected = torch.cat([weight.detach().flatten() for weight in weights]).tolist()
    m, v = [0.0] * 19, [0.0] * 19

    def clipped(values: list[float]) -> list[float]:
        threshold = sorted((abs(value) for value in values), reverse=True)[int(19 * 0.4)]
        return [math.copysign(min(abs(value), threshold), value) for value in values]

    for step in range(1, 6):
        gradient = noise(70 + step, 19) * 3
        for weight, part in zip(weights, gradient.split([12, 7])):
            weight.grad = part.view(weight.shape).clone()
        optimizer.step()
        raw = gradient.tolist()
        m = [0.7 * a + 0.3 * g for a, g in zip(m, raw if clip_update else clipped(raw))]
        v = [0.9 * a + 0.1 * g * g for a, g in zip(v, raw)]
        update = [a / (1 - 0.7**step) / (math.sqrt(b / (1 - 0.9**step)) + 1e-3) for a, b in zip(m, v)]
        update = clipped(update) if clip_update else update
        expected = [x * (1 - 0.1 * 0.2) - 0.1 * u for x, u in zip(expected, update)]
        assert torch.equal(weights[0].grad.flatten(), gradient[:12])  # type: ignore[union-attr]
    found = torch.cat([weight.detach().flatten() for weight in weights]).tolist()
    assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("clip_update", [False, True])
def test_no_clipping_is_adam_and_all_of_it_is_no_step(clip_update: bool) -> None:
    def run(make: Any) -> Tensor:
        weight = nn.Parameter(noise(3, 4, 5).bfloat16())
        optimizer = make(weight)
        for step in range(3):
            weight.grad = noise(step, 4, 5).bfloat16()
            optimizer.step()
        return weight.detach()

    none = run(lambda weight: ClippedAdam([weight], lr=0.1, clip=0.0, clip_update=clip_update))
    adam = nn.Parameter(noise(3, 4, 5).bfloat16().float())
    optimizer = torch.optim.Adam([adam], lr=0.1)
    for step in range(3):
        adam.grad = noise(step, 4, 5).bfloat16().float()
        optimizer.step()
        adam.data.copy_(adam.bfloat16().float())
    assert torch.equal(none, adam.detach().bfloat16())
    if clip_update:
        assert torch.equal(
            run(lambda weight: ClippedAdam([weight], clip=1.0, clip_update=True)), noise(3, 4, 5).bfloat16()
        )
    assert torch.equal(run(lambda weight: ClippedSGD([weight], clip=1.0)), noise(3, 4, 5).bfloat16())


def test_sharpness_in_closed_form_and_what_clipping_gains_on_a_line() -> None:
    curvature = torch.ones(100, dtype=torch.float64)
    curvature[37] = 100.0
    weight = torch.ones(100, dtype=torch.float64, requires_grad=True)

    def sharpness(direction: Tensor) -> float:
        return directional_sharpness(lambda: (curvature * weight**2).sum() / 2, [weight], [direction])

    clipped = nn.Parameter(torch.ones(100, dtype=torch.float64))
    clipped.grad = curvature.clone()
    ClippedSGD([clipped], lr=1.0, clip=0.1).step()
    step = (1 - clipped).detach()
    assert sharpness(curvature) == pytest.approx(99.03, abs=0.005)
    assert sharpness(step) == pytest.approx(1.99, abs=1e-12)
    assert sharpness(5 * curvature.sign()) == pytest.approx(1.99, abs=1e-12)
    decrease = [float((curvature @ v) ** 2 / (2 * sharpness(v) * v.square().sum())) for v in (curvature, step)]
    assert decrease == pytest.approx([50.99, 99.50], abs=0.01)


def test_sharpness_equals_the_explicit_hessian_over_all_layers() -> None:
    sizes = [(5, 4), (5,), (4, 5), (4,)]
    params = [noise(10 + i, *size).requires_grad_() for i, size in enumerate(sizes)]
    unused = noise(30, 3).requires_grad_()
    inputs = [noise(20, 8, 4), noise(21, 8, 4)]

    def loss(batch: Tensor, weights: list[Tensor] = params) -> Tensor:
        first, bias, second, shift = weights
        return (torch.tanh(batch @ first.T + bias) @ second.T + shift).square().mean() + 0.1 * first.pow(4).sum()

    flat = torch.cat([param.detach().flatten() for param in params])

    def flat_loss(vector: Tensor, batch: Tensor) -> Tensor:
        parts = vector.split([param.numel() for param in params])
        return loss(batch, [part.view(param.shape) for part, param in zip(parts, params)])

    hessian = sum(torch.autograd.functional.hessian(lambda v, b=batch: flat_loss(v, b), flat) for batch in inputs) / 2
    direction = noise(22, flat.numel())
    shaped = [part.view(param.shape) for part, param in zip(direction.split([p.numel() for p in params]), params)]
    expected = float(direction @ hessian @ direction / direction.square().sum())  # type: ignore[operator]
    assert directional_sharpness(loss, params, shaped, inputs) == pytest.approx(expected, rel=1e-10)
    half = directional_sharpness(
        lambda batch: loss(batch),
        [*params, unused],
        [*shaped, torch.ones(3).double() * (direction.norm() / 3**0.5)],
        inputs,
    )
    assert half == pytest.approx(expected / 2, rel=1e-10)
    blocks = [directional_sharpness(loss, [p], [s], inputs) * float(s.square().sum()) for p, s in zip(params, shaped)]
    assert sum(blocks) / float(direction.square().sum()) != pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_clipping_gains_on_a_quadratic_with_a_few_steep_coordinates() -> None:
    """The start matters: a steep coordinate farther out than the shrinking threshold allows is never reached."""
    curvature = torch.ones(1000, dtype=torch.float64)
    curvature[:10] = 1000.0
    start = noise(1, 1000)

    def best(clip: float) -> float:
        finals = []
        for lr in torch.logspace(-4, 0, 17).tolist():
            weight = nn.Parameter(start.clone())
            optimizer = ClippedSGD([weight], lr=lr, clip=clip)
            for _ in range(200):
                weight.grad = curvature * weight.detach()
                optimizer.step()
            final = float((curvature * weight.detach() ** 2).sum() / 2)
            finals.append(final if math.isfinite(final) else math.inf)
        return min(finals)

    assert best(0.1) == pytest.approx(15.2, rel=0.02)
    assert best(0.0) == pytest.approx(252, rel=0.02)


def sharded(name: str) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    places = [Shard(0), Shard(1), Replicate()]
    weights = [nn.Parameter(distribute_tensor(noise(i, 5, 3), mesh, [place])) for i, place in enumerate(places)]
    optimizer = made(name, weights)
    for step in range(3):
        for i, (weight, place) in enumerate(zip(weights, places)):
            weight.grad = distribute_tensor(noise(10 * step + i, 5, 3), mesh, [place])
        optimizer.step()
    directions = [distribute_tensor(noise(40 + i, 5, 3), mesh, [place]) for i, place in enumerate(places)]
    sharpness = directional_sharpness(lambda: sum_of_fourth_powers(weights), weights, directions)
    return [[weight.full_tensor().tolist() for weight in weights], sharpness]  # type: ignore[attr-defined]


def sum_of_fourth_powers(weights: list[Any]) -> Tensor:
    # gathered before they are added: after other ops torch 2.13 has confused its cached placements of 0 + a sharded sum
    parts = [weight.pow(4).sum() for weight in weights]
    return sum(part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts)  # type: ignore[return-value]


def made(name: str, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return ClippedSGD(weights, lr=0.1, clip=0.3, momentum=0.9)
    return ClippedAdam(weights, lr=0.1, clip=0.3, clip_update=name == "update")


@pytest.mark.parametrize("name", ["sgd", "adam", "update"])
def test_the_threshold_of_shards_is_that_of_the_whole(pool2: Pool, name: str) -> None:
    weights = [nn.Parameter(noise(i, 5, 3)) for i in range(3)]
    optimizer = made(name, weights)
    for step in range(3):
        for i, weight in enumerate(weights):
            weight.grad = noise(10 * step + i, 5, 3)
        optimizer.step()
    sharpness = directional_sharpness(
        lambda: sum_of_fourth_powers(weights), weights, [noise(40 + i, 5, 3) for i in range(3)]
    )
    for values, found in pool2.run("tests.optim.test_optim_clipped:sharded", name=name):
        for value, weight in zip(values, weights):
            assert torch.allclose(torch.tensor(value, dtype=torch.float64), weight.detach(), rtol=1e-13, atol=0)
        assert found == pytest.approx(sharpness, rel=1e-10)


def test_every_error_is_reached() -> None:
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(UserError, match=r"ClippedSGD needs clip in \[0, 1\]"):
        ClippedSGD([weight], clip=1.5)
    with pytest.raises(UserError, match="ClippedAdam needs threshold_scale above 0"):
        ClippedAdam([weight], threshold_scale=0.0)
    with pytest.raises(UserError, match=r"ClippedSGD needs momentum in \[0, 1\)"):
        ClippedSGD([{"params": [weight], "momentum": 1.0}])
    with pytest.raises(ValueError, match="needs tensors and an index from 0"):
        kth_largest_magnitude([], 0)
    with pytest.raises(UserError, match="direction in the parameters' shapes"):
        directional_sharpness(lambda: weight.sum(), [weight], [torch.ones(3)])
    with pytest.raises(UserError, match="finite length above 0"):
        directional_sharpness(lambda: weight.sum(), [weight], [torch.zeros(2)])
    with pytest.raises(UserError, match="at least one batch"):
        directional_sharpness(lambda batch: weight.sum(), [weight], [torch.ones(2)], [])
    assert (
        directional_sharpness(
            lambda: weight[:0].sum() + torch.ones(1, requires_grad=True).sum(), [weight], [torch.ones(2)]
        )
        == 0
    )
