"""Local SGD, DiLoCo, EASGD, gossip, DecentLaM and CR-PSGD against references written from their formulas alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sync_problems import LeastSquares, ends, normal, run, sgd
from trainwright.sync import metropolis
from trainwright.sync.cr_psgd import rounds_for
from trainwright.sync.graphs import named

pytestmark = pytest.mark.usefixtures("one_thread")
PROBLEM = LeastSquares(4, 5, 12)
START = normal(5, seed=9)


def close(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_data_parallel_weighs_workers_by_their_examples() -> None:
    done = run("data-parallel", 4, START, PROBLEM.gradient, 20, sgd(0.1))
    x = START
    for _ in range(20):
        x = x - 0.1 * torch.stack([PROBLEM.gradient(x, rank, 0) for rank in range(4)]).mean(0)
    close(ends(done), x.expand(4, -1))


def test_local_sgd_by_hand() -> None:
    done = run("local-sgd", 4, START, PROBLEM.gradient, 11, sgd(0.1), period=3, shared_steps=2)
    rows = START.repeat(4, 1)
    for step in range(1, 12):
        gradients = torch.stack([PROBLEM.gradient(x, rank, 0) for rank, x in enumerate(rows)])
        rows = rows - 0.1 * (gradients.mean(0) if step <= 2 else gradients)
        if step > 2 and (step - 2) % 3 == 0:
            rows = rows.mean(0).repeat(4, 1)
    close(ends(done), rows)


def test_local_sgd_with_period_one_is_data_parallel_sgd() -> None:
    local = run("local-sgd", 4, START, PROBLEM.gradient, 15, sgd(0.1), period=1)
    shared = run("data-parallel", 4, START, PROBLEM.gradient, 15, sgd(0.1))
    close(ends(local), ends(shared))


@pytest.mark.parametrize(("fragments", "delay", "mix"), [(1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.5)])
def test_diloco_by_hand(fragments: int, delay: int, mix: float) -> None:
    options: Any = {
        "period": 4,
        "fragments": fragments,
        "delay": delay,
        "mix": mix,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    }
    done = run("streaming-diloco", 4, START, PROBLEM.gradient, 21, sgd(0.1), **options)
    rows, theta, v = START.repeat(4, 1), START.clone(), torch.zeros(5, dtype=torch.float64)
    parts = np.array_split(np.arange(5), fragments)
    due: dict[int, tuple[Any, Tensor]] = {}
    for step in range(1, 22):
        rows = rows - 0.1 * torch.stack([PROBLEM.gradient(x, rank, 0) for rank, x in enumerate(rows)])
        for index, part in enumerate(parts):
            if step % 4 == (index + 1) * (4 // fragments) % 4:
                due[step + delay] = part, rows[:, part].mean(0)
        if step in due:
            part, mean = due[step]
            delta = theta[part] - mean
            v[part] = 0.9 * v[part] + delta
            theta[part] = theta[part] - 0.7 * (delta + 0.9 * v[part])
            rows[:, part] = mix * rows[:, part] + (1 - mix) * theta[part]
    close(ends(done), rows)


def test_easgd_by_hand() -> None:
    done = run("easgd", 4, START, PROBLEM.gradient, 12, sgd(0.1), period=2, pull=0.2, centre_pull=0.4)
    rows, centre = START.repeat(4, 1), START
    for step in range(1, 13):
        rows = rows - 0.1 * torch.stack([PROBLEM.gradient(x, rank, 0) for rank, x in enumerate(rows)])
        if step % 2 == 0:
            rows, centre = rows - 0.2 * (rows - centre), centre + 0.4 * (rows.mean(0) - centre)
    close(ends(done), rows)
    close(done.results[0].method.state["centre"], centre)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", ["ring", "star", "path", "complete", "one-peer"])
@pytest.mark.parametrize(("name", "momentum"), [("atc-dsgd", 0.0), ("dmsgd", 0.9), ("decentlam", 0.9)])
def test_gossip_in_matrices(name: str, momentum: float, graph: str) -> None:
    lr, decay = 0.05, 0.1
    done = run(name, 4, START, PROBLEM.gradient, 9, sgd(lr, momentum, decay), graph=graph)
    mixing = [torch.from_numpy(metropolis(each)) for each in named(graph, 4)]
    rows, m = START.repeat(4, 1), torch.zeros(4, 5, dtype=torch.float64)
    for step in range(9):
        w = mixing[step % len(mixing)]
        gradients = torch.stack([PROBLEM.gradient(x, rank, 0) for rank, x in enumerate(rows)]) + decay * rows
        if name == "decentlam":
            m = momentum * m + (rows - w @ (rows - lr * gradients)) / lr
            rows = rows - lr * m
        else:
            m = momentum * m + gradients
            rows = w @ (rows - lr * m)
    close(ends(done), rows)


RING = LeastSquares(8, 10, 40, seed=3, scale=2.0)


def bias(name: str, lr: float, beta: float, num_steps: int = 600) -> float:
    """Mean squared distance of the workers from the minimum, where they end."""
    done = run(name, 8, RING.minimum, RING.gradient, num_steps, sgd(lr, beta))
    return float((ends(done) - RING.minimum).square().sum(1).mean())


@pytest.mark.slow
def test_momentum_adds_no_bias_to_decentlam_and_much_to_dmsgd() -> None:
    plain = bias("atc-dsgd", 0.005, 0.0)
    assert bias("decentlam", 0.005, 0.9) == pytest.approx(plain, rel=1e-3)
    assert bias("dmsgd", 0.005, 0.9) > 40 * plain


def test_the_limit_of_dmsgd_is_that_of_dsgd_at_a_larger_rate() -> None:
    assert bias("dmsgd", 0.01, 0.5, 250) == pytest.approx(bias("atc-dsgd", 0.02, 0.0, 250), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.8, 0.9, 0.95])
def test_decentlam_for_every_momentum(beta: float) -> None:
    assert bias("decentlam", 0.005, beta, 6000) == pytest.approx(bias("atc-dsgd", 0.005, 0.0, 6000), rel=1e-3)


def error_by_budget(num_workers: int, budget: int, growth: float, num_seeds: int = 4) -> tuple[float, int]:
    """N·T·(f − f*) of CR-PSGD on a noisy quadratic, spectrum 0.5 … 1, σ = 1, γ = 0.5, and its rounds."""
    spectrum = torch.linspace(0.5, 1, 20, dtype=torch.float64)
    generator = torch.Generator().manual_seed(budget + num_workers)
    errors = []
    for _ in range(num_seeds):
        batches: dict[int, int] = {}

        def gradient(x: Tensor, rank: int, step: int, batches: dict[int, int] = batches) -> Tensor:
            noise = torch.randn(20, generator=generator, dtype=torch.float64) / 20**0.5
            return spectrum * x + noise / batches.get(step, 1) ** 0.5

        def watch(joined: Any, step: int, batches: dict[int, int] = batches) -> None:
            batches[step + 1] = joined.method.batch_size

        rounds = rounds_for(budget, 1, growth)
        done = run(
            "cr-psgd", num_workers, torch.ones(20, dtype=torch.float64), gradient, rounds, sgd(0.5), growth=growth,
            budget=budget, watch=watch,
        )  # fmt: skip
        assert done.results[0].method.finished  # type: ignore[attr-defined]
        errors.append(float((spectrum * ends(done)[0].square()).sum() / 2))
    return num_workers * budget * float(np.mean(errors)), rounds


@pytest.mark.slow  # rates of convergence over thousands of steps
def test_error_of_cr_psgd_falls_with_workers_times_budget_in_few_rounds() -> None:
    grid = {(n, budget): error_by_budget(n, budget, 1.3) for n in (1, 4, 16) for budget in (2000, 8000, 32000)}
    errors = [error for error, _ in grid.values()]
    assert max(errors) < 2.5 * min(errors)
    assert [grid[4, budget][1] - 1 for budget in (2000, 8000, 32000)] == [24, 29, 34]  # and the last, clipped one
    assert grid[4, 8000][1] - grid[4, 2000][1] <= math.log(4, 1.3) + 2


def test_a_growth_beyond_the_limit_loses_the_speed_up() -> None:
    assert error_by_budget(16, 32000, 3.5)[0] > 10 * error_by_budget(16, 32000, 1.3)[0]


def test_batches_of_unequal_sizes_count_by_their_examples() -> None:
    from tests.sync_problems import Vector
    from trainwright import sync

    def program(rank: int) -> Any:
        model = Vector(torch.zeros(1, dtype=torch.float64))
        joined = yield from sync.join("cr-psgd", model, torch.optim.SGD(model.parameters(), lr=1.0))
        model.set_gradient(torch.tensor([float(rank)], dtype=torch.float64))
        yield from joined.steps(None, num_samples=1 + 2 * rank)
        return model.x

    assert sync.simulate([program(rank) for rank in range(2)]).results[0].item() == -0.75


def test_catalyst_starts_batches_anew_and_moves_its_centre() -> None:
    seen = []

    def watch(joined: Any, step: int) -> None:
        if joined.method.worker.rank == 0:
            seen.append((joined.method.batch_size, joined.method.state["problem"]))

    done = run(
        "cr-psgd-catalyst", 4, START, PROBLEM.gradient, 60, sgd(0.1), growth=2.0, budget=400, theta=2.0, watch=watch
    )
    # ⌊√(400/4)⌋ = 10 examples a problem: batches of 1, 2, 4 and the 3 that are left
    assert seen[:6] == [(2, 0), (4, 0), (3, 0), (1, 1), (2, 1), (4, 1)]
    x, centre = START, START
    for step in range(60):
        x = x - 0.1 * (torch.stack([PROBLEM.gradient(x, rank, 0) for rank in range(4)]).mean(0) + 2.0 * (x - centre))
        centre = x if step % 4 == 3 else centre
    close(ends(done), x.expand(4, -1))
    assert done.results[0].method.num_problems == 40  # type: ignore[attr-defined]
