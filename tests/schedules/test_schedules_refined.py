"""Linear decay and refined schedules: the formula by hand, the bound they come from, and their shapes."""

from __future__ import annotations

import copy
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.grids import slow_but
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.numerics.norms import total_norm
from trainwright.schedules import (
    GradientNormLog,
    LinearDecay,
    RefinedSchedule,
    bound_factors,
    last_iterate_bound,
    refined_weights,
    schedule_of_weights,
)
from trainwright.schedules.factors import factors_of


def sgd(lr: float = 2.0) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def rates(schedule: Any, num_steps: int) -> list[float]:
    """The learning rate of each step that a loop would take."""
    seen = []
    for _ in range(num_steps):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return seen


def test_constant_norms_give_linear_decay() -> None:
    expected = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert schedule_of_weights(9 * refined_weights([3.0] * 10)) == pytest.approx(expected, abs=1e-15)
    refined = RefinedSchedule(sgd(), [3.0] * 10)
    assert refined.factors == pytest.approx(LinearDecay(sgd(), 10).factors, abs=1e-15)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
def test_the_formula_equals_exact_arithmetic(weights: list[int]) -> None:
    total = sum(weights)
    exact = [Fraction(w * sum(weights[t + 1 :]), total) for t, w in enumerate(weights)]
    assert schedule_of_weights(weights) == pytest.approx([float(value) for value in exact], rel=1e-12)


def test_linear_decay_by_hand_has_no_step_of_zero() -> None:
    schedule = LinearDecay(sgd(2.0), 6, num_warmup_steps=2)
    expected = [2 / 3, 4 / 3, 2.0, 1.5, 1.0, 0.5]
    assert rates(schedule, 6) == pytest.approx(expected)
    assert schedule.get_last_lr() == [0.0]
    assert rates(schedule, 2) == [0.0, 0.0]


def test_the_last_iterate_bound_holds_on_max_affine_problems() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        slopes, offsets = random.normal(size=(8, 5)), random.normal(size=8)
        weights, other = random.exponential(size=30) ** 2, random.normal(size=5)
        share = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0) / weights.sum()
        z = x = random.normal(size=5) * 3
        bound = 0.0
        for t in range(30):
            gradient = slopes[(slopes @ x + offsets).argmax()]
            bound += weights[t] * gradient @ (z - other) / weights.sum()
            last, z = x, z - weights[t] * gradient
            step = x - schedule_of_weights(weights)[t] * gradient
            x = last + share[t] * (-weights[t] * gradient)
            assert x == pytest.approx(step, abs=1e-12)
        # The bound is on x_T, the point of the last gradient.
        assert (slopes @ last + offsets).max() - (slopes @ other + offsets).max() <= bound + 1e-9


@pytest.mark.parametrize(
    ("num_steps", "linear", "constant"), [(64, 3.7e-3, 8.8e-2), (256, 4.5e-4, 4.4e-2), (1024, 6e-5, 2.2e-2)]
)
def test_the_last_iterate_of_linear_decay_on_a_noisy_absolute_value(
    num_steps: int, linear: float, constant: float
) -> None:
    bound = (2 / num_steps) ** 0.5
    peak = 1 / (2 * num_steps) ** 0.5
    decayed = last_error(peak * np.arange(num_steps, 0, -1) / num_steps)
    assert decayed <= bound
    assert decayed <= 0.1 * last_error(np.full(num_steps, peak))
    assert decayed == pytest.approx(linear, rel=0.25)
    assert last_error(np.full(num_steps, peak)) == pytest.approx(constant, rel=0.2)


def last_error(learning_rates: Any) -> float:
    random = np.random.default_rng(1)
    x = np.ones(4000)
    for lr in learning_rates:
        x -= lr * (np.sign(x) + random.choice([-1.0, 1.0], size=x.shape))
    return float(np.abs(x).mean())


def test_norms_that_fall_early_make_a_warm_up_and_rising_ones_a_sharper_end() -> None:
    falling = np.concatenate([np.linspace(10, 1, 20), np.ones(80)])
    warm = np.array(RefinedSchedule(sgd(), falling, latest_peak=0.5).factors)
    assert 10 <= warm.argmax() <= 25
    assert warm[0] < 0.05
    assert (np.diff(warm[25:]) < 0).all()
    rising = np.concatenate([np.ones(80), np.linspace(1, 10, 20)])
    sharp, linear = np.array(RefinedSchedule(sgd(), rising).factors), np.array(LinearDecay(sgd(), 100).factors)
    assert (sharp[60:] < linear[60:]).all()


@given(st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
def test_the_scale_of_the_norms_does_not_matter(scale: float, seed: int, order: Any) -> None:
    norms = np.random.default_rng(seed).uniform(1, 2, size=40)
    plain = RefinedSchedule(sgd(), norms, order=order, latest_peak=None).factors
    assert RefinedSchedule(sgd(), scale * norms, order=order, latest_peak=None).factors == pytest.approx(
        plain, rel=1e-9
    )
    assert max(plain) == 1.0
    assert min(plain) > 0


def test_the_median_filter_by_brute_force() -> None:
    norms = np.random.default_rng(2).uniform(1, 5, size=43)
    width = 2 * int(0.2 * 43 / 2) + 1
    reflected = [*norms, *norms[-2 : -2 - 2 * width : -1]]
    half = width // 2
    smooth = [statistics.median([reflected[max(0, j)] for j in range(t - half, t + half + 1)]) for t in range(43)]
    assert width == 9
    assert refined_weights(norms, 1, smoothing=0.2) == pytest.approx(1 / np.array(smooth))
    assert refined_weights(norms, 2, smoothing=0.2) == pytest.approx(np.array(smooth) ** -2.0)


def test_another_number_of_steps_interpolates_the_weights() -> None:
    norms = np.concatenate([np.linspace(4, 1, 40), np.ones(60)])
    short = RefinedSchedule(sgd(), norms, num_steps=50, smoothing=0).factors
    weights = refined_weights(norms, smoothing=0)
    halved = (weights[0::2] + weights[1::2]) / 2  # the middles of 50 steps lie between two of 100
    exact = schedule_of_weights(np.append(halved, halved[-1]))[:-1]
    assert short == pytest.approx(exact / exact.max(), rel=1e-9)


def test_vanishing_gradients_fall_back_to_linear_decay_and_say_so() -> None:
    vanishing = np.concatenate([np.ones(70), np.linspace(1, 1e-4, 30)])
    with pytest.warns(UserWarning, match="linear decay instead.*peak at step"):
        schedule = RefinedSchedule(sgd(), vanishing)
    assert schedule.factors == pytest.approx(LinearDecay(sgd(), 100).factors)
    assert "latest_peak=0.5" in schedule.fell_back
    assert int(np.argmax(RefinedSchedule(sgd(), vanishing, latest_peak=None).factors)) > 70
    with pytest.warns(UserWarning, match="linear decay instead"):
        RefinedSchedule(sgd(), [1.0] * 50 + [0.0] * 50)


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    norms = np.random.default_rng(3).uniform(1, 2, size=20)
    whole = rates(RefinedSchedule(sgd(), norms), 20)
    first = RefinedSchedule(sgd(), norms)
    rates(first, 7)
    saved, optimizer_state = copy.deepcopy(first.state_dict()), first.optimizer.state_dict()
    second = RefinedSchedule(sgd(), norms)
    second.load_state_dict(saved)
    second.optimizer.load_state_dict(optimizer_state)
    assert rates(second, 13) == whole[7:]


@pytest.mark.parametrize("order", [1, 2])
def test_the_log_takes_the_norm_of_all_gradients_before_clipping(order: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 5), (7,), ()]]
    unused = nn.Parameter(torch.ones(2))
    half = nn.Parameter(torch.randn(70_000, generator=generator).bfloat16())
    log = GradientNormLog([*params, unused, half], order)
    for param in [*params, half]:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    flat = torch.cat([param.grad.double().flatten() for param in [*params, half] if param.grad is not None])
    expected = float(flat.norm(order))
    assert log.record() == pytest.approx(expected, rel=1e-5)
    nn.utils.clip_grad_norm_([*params, half], 0.1)
    assert log.norms == pytest.approx([expected], rel=1e-5)


def test_the_log_undoes_the_loss_scale_and_leaves_out_skipped_steps() -> None:
    weight = nn.Parameter(torch.zeros(2))
    log = GradientNormLog([weight])
    weight.grad = torch.tensor([3.0, 4.0]) * 1024
    assert log.record(1024.0) == 5.0
    weight.grad = torch.tensor([float("inf"), 1.0])
    assert not np.isfinite(log.record())
    assert GradientNormLog([nn.Parameter(torch.zeros(1))]).record() == 0.0
    assert log.norms == [5.0]
    other = GradientNormLog([weight])
    other.load_state_dict(log.state_dict())
    assert other.norms == [5.0]
    with pytest.raises(UserError, match="order 1 are needed"):
        GradientNormLog([weight], 1).load_state_dict(log.state_dict())


def sharded_norms(order: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).reshape(5, 3)
    parts = [
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole, mesh, [Replicate()]),
        torch.ones(4),
        DTensor.from_local(whole / 2, mesh, [Partial()]),
    ]
    return float(total_norm(parts, order))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [1, 2])
def test_sharded_gradients_have_the_norm_of_the_whole(pool2: Pool, order: int) -> None:
    values = [float(v) for v in range(15)] * 4 + [1.0] * 4
    expected = sum(v**order for v in values) ** (1 / order)
    assert pool2.run("tests.schedules.test_schedules_refined:sharded_norms", order=order) == pytest.approx(
        [expected] * 2
    )


def bound_by_hand(lrs: Any, norms: Any, distance: float) -> float:
    """Written from the formula, a sum at a time."""
    num_steps, total = len(lrs), sum(lrs)
    found = distance**2 / (2 * total) + sum((lr * norm) ** 2 for lr, norm in zip(lrs, norms)) / (2 * total)
    for k in range(num_steps - 1):
        squares = sum((lrs[t] * norms[t]) ** 2 for t in range(k, num_steps))
        found += 0.5 * lrs[k] / sum(lrs[k + 1 :]) * squares / sum(lrs[k:])
    return float(found)


def test_the_bound_of_the_last_iterate_holds_and_equals_its_formula() -> None:
    for seed in range(60):
        draw = np.random.default_rng(seed)
        slopes, offsets = draw.normal(size=(6, 4)), draw.normal(size=6)
        lrs = draw.uniform(0.01, 0.5, size=25)
        point = start = draw.normal(size=4)
        norms, values, points = [], [], []
        for lr in lrs:
            active = int(np.argmax(slopes @ point + offsets))
            values.append(float((slopes @ point + offsets)[active]))
            norms.append(float(np.linalg.norm(slopes[active])))
            points.append(point)
            point = point - lr * slopes[active]
        # Against the best point seen, and any other: the bound is of f(x_T) - f(u) with D = |x_1 - u|.
        for other in (points[int(np.argmin(values))], draw.normal(size=4)):
            below = values[-1] - float((slopes @ other + offsets).max())
            bound = last_iterate_bound(lrs.tolist(), norms, float(np.linalg.norm(start - other)))
            assert below <= bound + 1e-12
        assert bound == pytest.approx(bound_by_hand(lrs, norms, float(np.linalg.norm(start - other))), rel=1e-12)


NORMS = [[1.0] * 20, list(np.linspace(5, 1, 20)), list(np.linspace(1, 4, 20))]


@pytest.mark.parametrize("norms", slow_but(NORMS[1:2], NORMS))
def test_no_other_schedule_has_a_lower_bound(norms: list[float]) -> None:
    def best(factors: Any) -> float:
        """The bound on the point behind the last step, with the best multiple of a schedule at D = 1."""
        found = []
        for free in np.geomspace(1e-2, 10, 200):
            every = [*factors, free]
            found.append((bound_by_hand(every, [*norms, norms[-1]], 0.0) / sum(every)) ** 0.5)
        return 2**0.5 * min(found)

    factors = bound_factors(norms)
    assert factors.max() == 1.0
    formula = RefinedSchedule(sgd(), norms, smoothing=0.0, latest_peak=None).factors
    assert best(factors) < best(formula)
    assert best(factors) < best(np.linspace(1, 1 / 20, 20))
    draw = np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(10):
            assert best(factors * np.exp(size * draw.normal(size=20))) >= best(factors) * (1 - 1e-4)
    minimised = RefinedSchedule(sgd(), norms, smoothing=0.0, latest_peak=None, minimise=True).factors
    np.testing.assert_allclose(minimised, factors, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="got order=1; leave out minimise=True"):
        RefinedSchedule(sgd(), norms, order=1, minimise=True)
    with pytest.raises(UserError, match="learning rates above 0 and as many finite norms"):
        last_iterate_bound([0.1, 0.0], [1.0, 1.0], 1.0)


def test_bad_settings_are_named() -> None:
    with pytest.raises(UserError, match="num_warmup_steps < num_steps"):
        LinearDecay(sgd(), 3, num_warmup_steps=3)
    with pytest.raises(UserError, match="num_steps of at least 1 and latest_peak"):
        RefinedSchedule(sgd(), [1.0, 1.0], num_steps=0)
    for norms, found in [([1.0], "shape"), ([0.0, 0.0], "zeros alone"), ([1.0, float("nan")], "not finite")]:
        with pytest.raises(UserError, match=found):
            refined_weights(norms)
    with pytest.raises(UserError, match=r"smoothing in \[0, 1\]"):
        refined_weights([1.0, 1.0], smoothing=2)
    with pytest.raises(UserError, match="order of a norm"):
        GradientNormLog([], 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least one positive"):
        schedule_of_weights([0.0, 0.0])


def test_warm_up_and_the_last_decay_never_reach_one_nor_zero() -> None:
    """Steps behind n of warm-up rise by 1/(n + 1) each, the last n of wsd fall by as much: no step is made in vain."""
    assert factors_of("wsd", 9, 2, 3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4])
    assert factors_of("wsd", 10) == pytest.approx([*[1.0] * 8, 2 / 3, 1 / 3])
