"""Rates from the batch Hessian: the random-matrix formula, the exact stability law, and Polyak's heavy ball."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.schedules import LanczosLR, batch_curvature, batch_ggn_curvature, saturation_batch, scaled_lr

POLYAK = {"rule": "polyak", "num_warmup_steps": 0, "max_lr": math.inf, "max_growth": math.inf}
"""The rule for deterministic gradients, as a quadratic wants it."""


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quadratic(spectrum: Tensor) -> tuple[nn.Parameter, Callable[[], Tensor]]:
    weight = nn.Parameter(torch.ones_like(spectrum))
    return weight, lambda: (spectrum * weight**2).sum() / 2


@pytest.mark.parametrize(
    ("batch_size", "formula"), [(2, 34.6), (6, 22.1), (24, 17.4), (60, 16.4), (240, 16.0), (2400, 15.8)]
)
def test_the_largest_eigenvalue_of_a_spiked_wigner_matrix(batch_size: int, formula: float) -> None:
    num_params, spike = 600, 15.81
    raw = torch.randn(num_params, num_params, generator=draws(0), dtype=torch.float64)
    noise = (raw + raw.T) / 2**0.5
    spiked = noise / batch_size**0.5
    spiked[0, 0] += spike
    predicted = batch_curvature(spike, 1.0, num_params, batch_size)
    assert predicted == pytest.approx(formula, abs=0.06)
    assert float(torch.linalg.eigvalsh(spiked)[-1]) == pytest.approx(predicted, rel=0.03)


def test_a_batch_of_all_the_data_has_its_curvature() -> None:
    assert batch_curvature(3.0, 5.0, 100, 50, 50) == 3.0
    assert batch_curvature(-10.0, 1.0, 100, 4) == -12.5


@pytest.mark.parametrize(("batch_size", "largest"), [(1, 0.0196), (4, 0.0762), (16, 0.2735), (64, 0.7758)])
def test_the_rate_from_a_batch_is_stable_by_the_exact_law(batch_size: int, largest: float) -> None:
    """On least squares with N(0, I_P) inputs, a batch B is stable in mean square if lr < 2B / (B + P + 1)."""
    assert 2 * batch_size / (batch_size + 101) == pytest.approx(largest, abs=6e-5)
    weight = nn.Parameter(torch.ones(100, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    inputs = torch.randn(10, batch_size, 100, generator=draws(1), dtype=torch.float64)

    def rates(safety: float) -> list[float]:
        schedule = LanczosLR(optimizer, safety=safety, num_lanczos=20, num_warmup_steps=0, max_growth=math.inf)
        found = []
        for batch in inputs:
            schedule.measure(lambda batch=batch: ((batch @ weight) ** 2).mean() / 2)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert all(largest / 3 < rate < 2 * largest for rate in rates(1.0))
    assert all(rate < largest for rate in rates(0.5))


def test_one_step_of_the_exact_law_shrinks_below_it_and_grows_above() -> None:
    for batch_size, below, above in [(1, 0.996, 1.004), (4, 0.986, 1.018), (16, 0.949, 1.059), (64, 0.859, 1.166)]:
        largest = 2 * batch_size / (batch_size + 101)
        for share, factor in [(0.9, below), (1.1, above)]:
            lr = share * largest
            assert 1 - 2 * lr + lr**2 * (batch_size + 101) / batch_size == pytest.approx(factor, abs=6e-3)
            inputs = torch.randn(4000, batch_size, 100, generator=draws(2))
            weight = torch.full((100,), 0.1)
            moved = weight - lr * ((inputs @ weight)[..., None] * inputs).mean(1)
            assert float(moved.square().sum(1).mean()) == pytest.approx(factor, abs=0.02)


def test_polyak_on_a_quadratic_by_hand_and_against_descent() -> None:
    spectrum = torch.linspace(0.01, 1, 100, dtype=torch.float64)
    weight, loss = quadratic(spectrum)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = LanczosLR(optimizer, num_lanczos=100, lower="smallest", safety=1.0, interval=10**6, **POLYAK)
    schedule.measure(loss)
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(3.3058, abs=5e-5)
    assert group["momentum"] == pytest.approx(0.6694, abs=5e-5)
    plain, plain_loss = quadratic(spectrum)
    descent = torch.optim.SGD([plain], lr=0.1)
    LanczosLR(descent, num_lanczos=100, lower="smallest", safety=1.0, num_warmup_steps=0, max_lr=2.0).measure(
        plain_loss
    )
    for _ in range(200):
        for param, method in ((weight, optimizer), (plain, descent)):
            param.grad = spectrum * param.detach()
            method.step()
        schedule.step()
    assert group["lr"] == pytest.approx(3.3058, abs=5e-5)
    assert float(weight.detach().norm()) < 1e-13
    assert 1e-3 < float(plain.detach().norm()) < 1


def test_a_negative_outlier_bounds_the_rate_too() -> None:
    weight, loss = quadratic(torch.tensor([-8.0, 1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    LanczosLR(optimizer, safety=1.0, lower="smallest", num_lanczos=3, num_warmup_steps=0).measure(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2 / 9, rel=1e-5)


def test_the_mean_curvature_weighs_the_spectrum_as_the_start_does() -> None:
    spectrum = torch.cat([torch.zeros(198), torch.tensor([10.0, 20.0])]).double()
    weight, loss = quadratic(spectrum)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = LanczosLR(optimizer, num_lanczos=3, safety=0.5, **POLYAK)
    found = schedule.measure(loss)
    mean = float((found.weights * found.ritz_values.abs()).sum())
    assert schedule.curvatures == pytest.approx((20.0, mean))
    assert 0 < mean < 1
    upper, low = 20.0**0.5, mean**0.5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * (2 / (upper + low)) ** 2)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(((upper - low) / (upper + low)) ** 2)


def test_warm_up_smoothing_the_cap_and_tensor_rates() -> None:
    weight, _ = quadratic(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([{"params": [weight]}], lr=torch.tensor(0.7, dtype=torch.float64), foreach=False)
    schedule = LanczosLR(
        optimizer,
        rule="polyak",
        num_warmup_steps=3,
        smoothing=0.75,
        max_momentum=0.3,
        safety=1.0,
        lower="smallest",
        num_lanczos=2,
        interval=2,
    )
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.7 / 4)
    assert schedule.due
    schedule.measure(lambda: (torch.tensor([1.0, 4.0]).double() * weight**2).sum() / 2)
    assert schedule.due  # step 0 itself; after it the interval counts
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx((2 / 3) ** 2 / 4)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    schedule.step()
    assert schedule.due  # step 1, as 2, 4, 8 … of a first interval
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx((2 / 3) ** 2 / 2)
    schedule.measure(lambda: (torch.tensor([5.0, 400.0]).double() * weight**2).sum() / 2)
    assert schedule.curvatures == pytest.approx((400, 0.75 + 1.25))
    assert optimizer.param_groups[0]["momentum"] == 0.3
    assert not weight.grad.any()


def test_a_resumed_run_measures_with_the_same_starts() -> None:
    spectrum = torch.linspace(0.1, 30, 40, dtype=torch.float64)

    def run(num_steps: int, state: Any = None) -> tuple[list[float], Any]:
        weight, loss = quadratic(spectrum)
        optimizer = torch.optim.SGD([weight], lr=0.01)
        schedule = LanczosLR(optimizer, interval=2, num_lanczos=3, rule="heavy-ball")
        if state is not None:
            weight.data.copy_(state[0])
            optimizer.load_state_dict(state[1])
            schedule.load_state_dict(state[2])
        seen = []
        for _ in range(num_steps):
            if schedule.due:
                schedule.measure(loss)
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            schedule.step()
        return seen, copy.deepcopy((weight.detach(), optimizer.state_dict(), schedule.state_dict()))

    whole, _ = run(8)
    assert len(set(whole)) >= 4
    first, state = run(3)
    assert first + run(5, state)[0] == whole


def rates_of(parts: int) -> list[float]:
    weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
    inputs = torch.randn(8, 6, generator=draws(3), dtype=torch.float64)
    own = inputs if parts == 1 else inputs.chunk(parts)[dist.get_rank()]
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = LanczosLR(optimizer, process_group=None if parts == 1 else dist.group.WORLD, **POLYAK)
    schedule.measure(lambda: ((own @ weight) ** 4).mean())
    assert "_process_group" not in schedule.state_dict()
    return [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]


def test_ranks_measure_the_whole_batch(pool2: Pool) -> None:
    alone = rates_of(1)
    for found in pool2.run("tests.schedules.test_schedules_lanczos:rates_of", parts=2):
        assert found == pytest.approx(alone, rel=1e-9)


def test_measurements_come_at_powers_of_two_and_then_at_intervals() -> None:
    weight, loss = quadratic(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = LanczosLR(optimizer, interval=10, num_lanczos=2)
    due = []
    for step in range(31):
        if schedule.due:
            due.append(step)
            schedule.measure(loss)
        optimizer.step()
        schedule.step()
    assert due == [0, 1, 2, 4, 8, 10, 20, 30]


def test_the_rate_is_capped_and_grows_by_a_factor_at_most() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    caps = {"max_growth": 3.0, "max_lr": 5.0, "smoothing": 0.0}
    schedule = LanczosLR(optimizer, safety=1.0, lower="smallest", num_warmup_steps=0, **caps)
    rates = []
    for curvature in (2.0, 0.01, 0.01, 100.0):
        schedule.measure(lambda curvature=curvature: curvature * (weight**2).sum() / 2)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 1.5, 4.5, 0.01])
    for _ in range(7):
        schedule.measure(lambda: 0.01 * (weight**2).sum() / 2)
    assert optimizer.param_groups[0]["lr"] == 5.0


def test_a_later_measurement_without_curvature_leaves_the_rates() -> None:
    weight, loss = quadratic(torch.tensor([4.0, 4.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = LanczosLR(optimizer, num_warmup_steps=0)
    schedule.measure(loss)
    before = optimizer.param_groups[0]["lr"]
    schedule.measure(lambda: weight.sum())
    assert optimizer.param_groups[0]["lr"] == before
    assert schedule.num_measured == 2


def test_the_accumulated_step_of_the_heavy_ball_is_the_plain_one() -> None:
    weight, loss = quadratic(torch.tensor([1.0, 4.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    LanczosLR(optimizer, rule="heavy-ball", lower="smallest", safety=1.0, num_warmup_steps=0).measure(loss)
    group = optimizer.param_groups[0]
    assert group["momentum"] == pytest.approx(1 / 9)
    assert group["lr"] / (1 - group["momentum"]) == pytest.approx(0.4)


def test_the_plain_rule_counts_the_optimizers_own_momentum() -> None:
    weight, loss = quadratic(torch.tensor([1.0, 4.0], dtype=torch.float64))
    groups = [{"params": [weight]}, {"params": [nn.Parameter(torch.ones(1).double())], "dampening": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = LanczosLR(optimizer, lower="smallest", safety=1.0, num_warmup_steps=0)
    schedule.measure(loss)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.04, 0.08])
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


@pytest.mark.parametrize("rule", ["plain", "heavy-ball"])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_it_converges_on_least_squares_with_small_batches(rule: str, batch_size: int) -> None:
    """The noise of the gradients vanishes at the solution here, so a stable rate reaches it; Polyak's rate diverges."""
    assert least_squares(batch_size, rule=rule) < 0.7
    if batch_size == 1 and rule == "plain":
        assert least_squares(batch_size, rule="polyak", safety=0.5, num_steps=300) > 1e3


def least_squares(batch_size: int, num_steps: int = 500, **settings: Any) -> float:
    """Return ‖w‖ / ‖w₀‖ after some steps on inputs N(0, I_100), targets 0."""
    weight, generator = nn.Parameter(torch.ones(100, dtype=torch.float64)), draws(5)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    schedule = LanczosLR(optimizer, **settings)
    for _ in range(num_steps):
        inputs = torch.randn(batch_size, 100, generator=generator, dtype=torch.float64)
        loss_of = lambda inputs=inputs: ((inputs @ weight) ** 2).mean() / 2  # noqa: E731
        if schedule.due:
            schedule.measure(loss_of)
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        schedule.step()
    return float(weight.detach().norm()) / 10


def test_flat_batches_do_not_raise_the_rate() -> None:
    """Every other batch is flat: L falls by a tenth of the way to it, and is back at the next one that curves."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    schedule = LanczosLR(torch.optim.SGD([weight], lr=0.1), lower="smallest", num_warmup_steps=0)
    largest = []
    for curvature in (4.0, 0.0625, 4.0, 0.0625, 0.0625):
        schedule.measure(lambda curvature=curvature: curvature * (weight**2).sum() / 2)
        assert schedule.curvatures is not None
        largest.append(schedule.curvatures[0])
    assert largest == pytest.approx([4.0, 3.60625, 4.0, 3.60625, 3.251875])


@pytest.mark.parametrize(
    ("batch_size", "momentum", "num_steps", "bar"), [(1, 0.0, 400, 0.6), (8, 0.0, 200, 0.75), (32, 0.9, 200, 0.75)]
)
def test_a_network_learns_digits_with_the_defaults(
    batch_size: int, momentum: float, num_steps: int, bar: float
) -> None:
    """No rate is chosen by hand, and the result is that of a rate out of {0.03, 0.1, 0.3, 1} that works."""
    assert digits_accuracy(batch_size, momentum, num_steps) > bar


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 256])
def test_batches_of_one_and_of_many_learn_from_every_start(batch_size: int) -> None:
    for seed in range(1, 6):
        assert digits_accuracy(batch_size, 0.0, 600 if batch_size < 8 else 200, seed) > 0.65, seed


def digits_accuracy(batch_size: int, momentum: float, num_steps: int, seed: int = 0) -> float:
    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    schedule, generator = LanczosLR(optimizer), draws(6 + seed)
    for _ in range(num_steps):
        rows = torch.randint(0, 1500, (batch_size,), generator=generator)
        loss_of = lambda rows=rows: nn.functional.cross_entropy(model(inputs[rows]), labels[rows])  # noqa: E731
        if schedule.due:
            schedule.measure(loss_of)
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((model(inputs[1500:]).argmax(1) == labels[1500:]).float().mean())


@pytest.mark.parametrize(("num_samples", "spike"), [(50, 12.0), (400, 12.0), (100, 1.2)])
def test_the_largest_eigenvalue_of_a_spiked_sample_covariance(num_samples: int, spike: float) -> None:
    """The last spike is below the edge of the noise, which swallows it."""
    num_params = 300
    scale = torch.ones(num_params, dtype=torch.float64)
    scale[0] = spike**0.5
    tops = []
    for seed in range(8):
        rows = torch.randn(num_samples, num_params, generator=draws(seed), dtype=torch.float64) * scale
        tops.append(float(torch.linalg.svdvals(rows)[0]) ** 2 / num_samples)
    predicted = batch_ggn_curvature(spike, 1.0, num_params, num_samples)
    assert sum(tops) / len(tops) == pytest.approx(predicted, rel=0.08)


def test_rates_go_with_the_batch_up_to_saturation() -> None:
    assert scaled_lr(0.1, 16, 64) == pytest.approx(0.4)
    assert scaled_lr(0.1, 16, 64, optimizer="adam") == pytest.approx(0.2)
    assert scaled_lr(0.1, 16, 64, saturation=32) == pytest.approx(0.2)
    assert scaled_lr(0.1, 64, 16, saturation=32) == pytest.approx(0.05)
    # At the saturating batch the noise's part of the curvature is as large as the rest.
    at = saturation_batch(20.0, 1.0, 10_000)
    assert batch_curvature(20.0, 1.0, 10_000, int(at) + 1) == pytest.approx(40.0, rel=0.03)
    with pytest.raises(UserError, match="scaled_lr needs optimizer sgd or adam"):
        scaled_lr(0.1, 1, 2, optimizer="lamb")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="batch_ggn_curvature needs bulk"):
        batch_ggn_curvature(1.0, 2.0, 10, 10)


def test_bad_settings_are_named() -> None:
    weight, loss = quadratic(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(UserError, match="LanczosLR needs interval of at least 1"):
        LanczosLR(sgd, interval=0)
    with pytest.raises(UserError, match="needs rule one of plain, heavy-ball, polyak"):
        LanczosLR(sgd, rule="adam")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs an optimizer with heavy-ball momentum"):
        LanczosLR(torch.optim.Adam([weight]), rule="polyak")
    with pytest.raises(UserError, match="needs a loss that curves"):
        LanczosLR(sgd).measure(lambda: weight.sum())
    with pytest.raises(UserError, match="batch_size ≤ num_samples"):
        batch_curvature(1.0, 1.0, 10, 20, 10)
    assert float(loss().detach()) == 1.0


def test_each_measurement_draws_a_direction_of_its_own() -> None:
    """With one Lanczos step the curvature seen is that of the direction drawn: two calls differ, two runs do not."""
    scales = torch.tensor([1.0, 5.0, 25.0, 125.0], dtype=torch.float64)
    seen = []
    for _ in range(2):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        schedule = LanczosLR(torch.optim.SGD([weight], lr=0.1), num_lanczos=1, seed=4)
        seen.append([float(schedule.measure(lambda w=weight: (scales * w**2).sum()).ritz_values) for _ in range(2)])
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
