"""AdaGrad by coordinate and by norm, the batch-size tests, and a batch that grows without losing its place."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.numerics.norms import total_norm
from trainwright.optim.adadagrad import AdAdaGrad, AdAdaGradNorm
from trainwright.schedules import (
    AdaptiveBatchSize,
    GradientNoise,
    GrowingBatchSampler,
    measure_noise,
    sample_gradients,
)


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(rows: Tensor) -> Callable[[], Iterable[Tensor]]:
    return lambda: [rows]


def test_adadagrad_equals_the_equations_in_float64() -> None:
    weight = nn.Parameter(torch.randn(3, 5, generator=draws(0), dtype=torch.float64))
    optimizer = AdAdaGrad([weight], lr=0.05, eps=1e-3, weight_decay=0.1)
    expected, sums = weight.detach().clone(), torch.zeros(3, 5, dtype=torch.float64)
    for step in range(20):
        gradient = torch.randn(3, 5, generator=draws(step), dtype=torch.float64) * 10 ** (step % 4 - 2)
        weight.grad = gradient.clone()
        optimizer.step()
        for i in range(3):
            for j in range(5):
                sums[i, j] += gradient[i, j] ** 2
                expected[i, j] *= 1 - 0.05 * 0.1
                expected[i, j] -= 0.05 * gradient[i, j] / (math.sqrt(sums[i, j]) + 1e-3)
    assert torch.allclose(weight, expected, rtol=1e-12, atol=0)


def test_adadagrad_norm_has_one_norm_for_all_groups() -> None:
    weights = [
        nn.Parameter(torch.randn(shape, generator=draws(1), dtype=torch.float64)) for shape in [(4, 3), (5,), ()]
    ]
    late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [{"params": [late, weights[0]]}, {"params": weights[1:], "lr": 0.3, "weight_decay": 0.1}]
    optimizer = AdAdaGradNorm(groups, lr=0.7, b0=0.2)
    expected = [weight.detach().clone() for weight in [*weights, late]]
    accumulator = 0.04
    for step in range(12):
        for weight in [*weights, late]:
            weight.grad = torch.randn(weight.shape, generator=draws(step), dtype=torch.float64)
        if step < 4:
            late.grad = None
        if step == 8:
            weights[0].grad = None
        present = [weight.grad for weight in [*weights, late]]
        accumulator += sum(float(grad.square().sum()) for grad in present if grad is not None)
        optimizer.step()
        for index, (value, grad) in enumerate(zip(expected, present)):
            if grad is not None:
                lr, decay = (0.3, 0.1) if index in (1, 2) else (0.7, 0.0)
                value.mul_(1 - lr * decay).sub_(lr * grad / math.sqrt(accumulator))
    for weight, value in zip([*weights, late], expected):
        assert torch.allclose(weight, value, rtol=1e-12, atol=1e-14)
    assert [float(state["sum_of_squares"]) for state in optimizer.state.values()] == pytest.approx([accumulator] * 4)


@pytest.mark.parametrize(("lr", "limit"), [(1.0, 272.13), (10.0, 118.53)])
def test_the_sum_of_squared_gradients_saturates(lr: float, limit: float) -> None:
    weight = nn.Parameter(torch.linspace(-3, 3, 50, dtype=torch.float64))
    optimizer = AdAdaGradNorm([weight], lr=lr, b0=0.01)
    total, at = 0.0, {}
    for step in range(1, 1001):
        with torch.no_grad():
            weight.grad = 2 * weight / (1 + weight**2) ** 2
        total += float(weight.grad.square().sum())
        optimizer.step()
        at[step] = total
    assert at[250] == pytest.approx(limit, abs=0.005)
    assert at[1000] == pytest.approx(limit, abs=0.005)


def test_the_tests_estimate_what_theory_says() -> None:
    num_dims, size, eta = 200, 512, 0.5
    generator = draws(2)
    mean = torch.randn(num_dims, generator=generator, dtype=torch.float64)
    variances = 9 * torch.rand(num_dims, generator=generator, dtype=torch.float64)
    norm, inner = [], []
    for _ in range(50):
        noise = torch.randn(size, num_dims, generator=generator, dtype=torch.float64)
        measured = measure_noise(whole(mean + noise * variances.sqrt()), "inner-product")
        norm.append(measured.batch_size("norm", eta=eta))
        inner.append(measured.batch_size("inner-product", theta=eta))
    trace, square = float(variances.sum()), float(mean.square().sum())
    assert statistics.mean(norm) == pytest.approx(trace / (eta**2 * (square + trace / size)), rel=0.02)
    assert statistics.mean(norm) != pytest.approx(trace / (eta**2 * square), rel=1e-3)
    assert statistics.mean(inner) == pytest.approx(float(mean.square() @ variances) / (eta**2 * square**2), rel=0.04)


def test_correlations_between_layers_count() -> None:
    shared = torch.randn(256, 1, generator=draws(3), dtype=torch.float64)
    shared -= shared.mean()
    first = torch.ones(10, dtype=torch.float64) + shared * torch.ones(10, dtype=torch.float64)
    second = torch.ones(10, dtype=torch.float64) - (shared + 1e-3 * shared.flip(0)) * torch.ones(
        10, dtype=torch.float64
    )
    rows = torch.cat([first, second], dim=1)
    together = measure_noise(whole(rows), "inner-product").variance_along
    apart = [measure_noise(whole(part), "inner-product").variance_along for part in (first, second)]
    assert together == pytest.approx(float((rows @ rows.mean(0)).var()), rel=1e-9)
    assert together is not None
    assert together < 1e-3 * sum(value for value in apart if value is not None)


@given(st.integers(2, 40), st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**31))
def test_chunks_give_the_statistics_of_the_whole(num_rows: int, num_dims: int, chunk: int, seed: int) -> None:
    rows = 5 + torch.randn(num_rows, num_dims, generator=draws(seed), dtype=torch.float64)
    mean, variances = rows.mean(0), rows.var(0)
    square = float(mean @ mean)
    along = float((rows @ mean).var())
    across = (rows - (rows @ mean)[:, None] * mean / square).var(0).sum()
    found = measure_noise(lambda: rows.split(chunk), "augmented")
    assert found.variance == pytest.approx(float(variances.sum()))
    assert found.batch_size("norm", eta=0.3) == pytest.approx(float(variances.sum()) / (0.09 * square))
    inner = along / (0.04 * square**2)
    assert found.batch_size("inner-product", theta=0.2) == pytest.approx(inner)
    assert found.batch_size("augmented", theta=0.2, nu=0.4) == pytest.approx(
        max(inner, float(across) / (0.16 * square)), rel=1e-6, abs=1e-9
    )
    by_coordinate = measure_noise(lambda: rows.split(chunk), "coordinate")
    assert by_coordinate.batch_size("coordinate", eta=0.5) == pytest.approx(float((variances / mean**2).max()) / 0.25)


def test_the_bias_of_the_squared_mean_can_be_taken_off() -> None:
    noise = GradientNoise(num_samples=10, squared_mean=2.0, variance=10.0)
    assert noise.batch_size("norm", eta=1.0, unbias=True) == pytest.approx(10.0)
    loud = GradientNoise(num_samples=10, squared_mean=1.0, variance=20.0)
    assert loud.batch_size("norm", eta=1.0, unbias=True) == pytest.approx(2000.0)
    assert GradientNoise(2, 0.0, 1.0).batch_size() == math.inf
    assert GradientNoise(2, 0.0, 0.0).batch_size() == 0.0


def test_a_quadratic_grows_its_batch_as_measured_and_takes_few_steps() -> None:
    curvature = torch.linspace(0.1, 1.0, 50, dtype=torch.float64)
    weight = nn.Parameter(torch.full((50,), 3.0, dtype=torch.float64))
    optimizer = AdAdaGradNorm([weight], lr=3.0, b0=0.1)
    sampler = GrowingBatchSampler(200_000, 8)
    batch_size = AdaptiveBatchSize(sampler, max_batch_size=4096, eta=0.5)
    generator, sizes = draws(0), []
    for batch in sampler:
        sizes.append(len(batch))
        rows = curvature * weight.detach() + torch.randn(len(batch), 50, generator=generator, dtype=torch.float64)
        weight.grad = rows.mean(0)
        optimizer.step()
        batch_size.update(measure_noise(whole(rows)))
    assert sizes[0] == 8
    assert sizes[:-1] == sorted(sizes[:-1])
    assert sizes[-2] == 4096
    assert len(sizes) == pytest.approx(145, rel=0.2)
    assert statistics.median(sizes) == pytest.approx(694, rel=0.3)
    assert sum(sizes) == 200_000


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.norm = nn.GroupNorm(1, 5)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


def net_and_batch() -> tuple[Net, dict[str, Tensor]]:
    net = Net()
    with torch.no_grad():
        for index, param in enumerate(net.parameters()):
            param.copy_(torch.randn(param.shape, generator=draws(index)))
    inputs = torch.randn(11, 6, generator=draws(20))
    return net, {"x": inputs, "y": torch.randint(0, 3, (11,), generator=draws(21))}


def sample_loss(model: Callable[..., Tensor], sample: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(sample["x"][None]), sample["y"][None])


def test_sample_gradients_equal_a_backward_pass_for_each() -> None:
    net, batch = net_and_batch()
    net.first.bias.requires_grad_(False)
    rows = torch.cat(list(sample_gradients(net, sample_loss, batch, chunk_size=4)))
    for index, row in enumerate(rows):
        net.zero_grad()
        sample_loss(net, {name: value[index] for name, value in batch.items()}).backward()
        expected = torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None])
        assert torch.allclose(row, expected, rtol=1e-4, atol=1e-6)


def test_dropout_differs_between_samples_and_gradients_stay_away() -> None:
    net, batch = net_and_batch()
    net.drop.p = 0.5
    same = {name: value[:1].expand(8, *value.shape[1:]) for name, value in batch.items()}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = next(iter(sample_gradients(net, sample_loss, same)))
    assert rows.var(0).sum() > 1e-3
    assert all(param.grad is None for param in net.parameters())


def test_a_step_measures_at_its_interval_and_stops_at_the_maximum() -> None:
    net, batch = net_and_batch()
    sampler = GrowingBatchSampler(1000, 4)
    batch_size = AdaptiveBatchSize(sampler, max_batch_size=200, interval=3, eta=0.5, chunk_size=5)
    assert [batch_size.step(net, sample_loss, batch) for _ in range(2)] == [4, 4]
    rows = torch.cat(list(sample_gradients(net, sample_loss, batch)))
    exact = float(rows.var(0).sum() / rows.mean(0).square().sum()) / 0.25
    with torch.no_grad():
        assert batch_size.step(net, sample_loss, batch) == math.ceil(max(4, exact))
    saved = batch_size.state_dict()
    other = AdaptiveBatchSize(GrowingBatchSampler(1000, 4), max_batch_size=200, interval=3)
    other.load_state_dict(saved)
    assert (other.num_steps, other.sampler.batch_size) == (3, sampler.batch_size)
    sampler.batch_size = 200
    batch_size.num_steps = 5
    assert batch_size.step(net, None, None) == 200  # type: ignore[arg-type]


def test_a_loader_keeps_its_place_while_the_batch_grows() -> None:
    dataset = TensorDataset(torch.arange(60))
    sampler = GrowingBatchSampler(60, 3, seed=7)
    seen: list[list[int]] = []
    for epoch in range(2):
        own: list[int] = []
        for step, (batch,) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
            assert len(batch) in (sampler.batch_size, 60 - len(own))
            own += batch.tolist()
            if step == 4 and epoch == 0:
                sampler.batch_size = 11
        seen.append(own)
    assert [sorted(own) for own in seen] == [list(range(60))] * 2
    assert seen[0] != seen[1]
    torch.manual_seed(0)
    again = [index for batch in GrowingBatchSampler(60, 5, seed=7) for index in batch]
    assert again == seen[0]


def test_a_resumed_sampler_goes_on_in_the_middle_of_an_epoch() -> None:
    def rest(sampler: GrowingBatchSampler) -> list[list[int]]:
        return [batch for _ in range(2) for batch in sampler]

    first = GrowingBatchSampler(40, 4, seed=3)
    batches = iter(first)
    drawn = [next(batches) for _ in range(4)]
    first.batch_size = 7
    drawn += [next(batches) for _ in range(2)]
    resumed, rewound = GrowingBatchSampler(40, 1), GrowingBatchSampler(40, 1)
    resumed.load_state_dict(first.state_dict())
    rewound.load_state_dict(first.state_dict(num_pending=2))
    assert len(resumed) == 2
    expected = rest(first)
    assert rest(resumed) == expected
    assert rest(rewound) == drawn[4:] + expected


@given(st.integers(4, 60), st.integers(1, 20), st.integers(1, 4), st.booleans())
def test_ranks_share_each_batch_evenly(num_samples: int, size: int, ranks: int, drop_last: bool) -> None:
    parts = [
        list(GrowingBatchSampler(num_samples, size, num_replicas=ranks, rank=rank, drop_last=drop_last))
        for rank in range(ranks)
    ]
    assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
    together = [index for part in parts for batch in part for index in batch]
    assert len(together) == len(set(together))
    whole_batches = num_samples - num_samples % (math.ceil(size / ranks) * ranks)
    assert len(together) == (whole_batches if drop_last else num_samples - num_samples % ranks)


def noise_on_ranks(test: Any, shared: bool) -> list[float | None]:
    rows = 3 + torch.randn(7, 5, generator=draws(9), dtype=torch.float64)
    own = (rows[:4] if dist.get_rank() == 0 else rows[4:]) if shared else rows
    found = measure_noise(lambda: own.split(2), test, dist.group.WORLD if shared else None)
    return [found.num_samples, found.squared_mean, found.variance, found.variance_along, found.largest_ratio]


@pytest.mark.parametrize("test", ["augmented", "coordinate"])
def test_ranks_measure_what_one_process_measures(pool2: Pool, test: str) -> None:
    function = "tests.optim.test_optim_adadagrad:noise_on_ranks"
    alone = pool2.run(function, test=test, shared=False)[0]
    for found in pool2.run(function, test=test, shared=True):
        for value, expected in zip(found, alone):
            assert value == (pytest.approx(expected) if expected is not None else None)


def test_every_error_is_reached() -> None:
    net, batch = net_and_batch()
    sampler = GrowingBatchSampler(10, 4)
    with pytest.raises(UserError, match="AdAdaGradNorm needs b0 above 0"):
        AdAdaGradNorm([nn.Parameter(torch.ones(1))], b0=0.0)
    with pytest.raises(UserError, match="needs lr of at least 0"):
        AdAdaGrad([nn.Parameter(torch.ones(1))], lr=-1.0)
    with pytest.raises(UserError, match="at least 2 samples"):
        measure_noise(whole(torch.ones(1, 3)))
    with pytest.raises(UserError, match="batch-size test is needed"):
        measure_noise(whole(torch.ones(2, 3)), "size")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="eta, theta and nu above 0"):
        GradientNoise(2, 1.0, 1.0).batch_size(eta=0.0)
    with pytest.raises(UserError, match="statistics for the augmented test"):
        GradientNoise(2, 1.0, 1.0).batch_size("augmented")
    with pytest.raises(UserError, match="max_batch_size of at least 4"):
        AdaptiveBatchSize(sampler, max_batch_size=3)
    with pytest.raises(UserError, match="got NaN"):
        AdaptiveBatchSize(sampler, max_batch_size=8).update(GradientNoise(2, 1.0, math.nan))
    with pytest.raises(UserError, match="use GroupNorm"):
        list(sample_gradients(nn.Sequential(nn.BatchNorm1d(3)), sample_loss, batch))
    with pytest.raises(UserError, match="chunk_size of at least 1"):
        list(sample_gradients(net, sample_loss, batch, chunk_size=0))
    with pytest.raises(UserError, match="one first dimension"):
        list(sample_gradients(net, sample_loss, (torch.ones(2), torch.ones(3))))
    with pytest.raises(UserError, match="found str"):
        list(sample_gradients(net, sample_loss, (torch.ones(2), "words")))
    with pytest.raises(UserError, match="batch size of at least 1"):
        sampler.batch_size = 0
    with pytest.raises(UserError, match="at least a sample a rank"):
        GrowingBatchSampler(10, 4, num_replicas=2, rank=2)
    with pytest.raises(UserError, match="num_pending of at most 0"):
        sampler.state_dict(num_pending=1)
    with pytest.raises(UserError, match="sampler over 10 samples"):
        sampler.load_state_dict(GrowingBatchSampler(11, 4).state_dict())
    with pytest.raises(ValueError, match="at least one tensor"):
        total_norm([])
