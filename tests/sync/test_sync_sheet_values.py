"""Values that others measured of the methods, which no other test here holds: docs/sync/checked.md lists where each stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sync_problems import ends, normal, run, sgd
from trainwright.launch import run_processes
from trainwright.sync import GradientCode, SelfRepellentWalk
from trainwright.sync.graphs import Graph
from trainwright.sync.signs import sign_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_compressor_of_heavy_tails_is_no_contraction() -> None:
    """The error of Student's t with two degrees of freedom is 1.09 of the squared norm, measured at some sizes: above 0.7."""
    z = torch.from_numpy(np.random.default_rng(0).standard_t(2, size=100_000))
    scale = z.norm() / z.numel() ** 0.5
    assert 0.7 < float((z - scale * sign_of(z)).norm() ** 2 / z.norm() ** 2) < 1.9


def test_feedback_with_a_scale_of_means_is_worse_than_with_norms() -> None:
    """Relative error of the sum of 100 compressed vectors: 0.037 with ‖z‖₂/√d, 0.099 with mean |z|."""

    def error_of(scale: Any) -> float:
        truth = total = kept = torch.zeros(200, dtype=torch.float64)
        constant = normal(200, seed=0)
        for step in range(100):
            z = constant + normal(200, seed=step + 1)
            sent = scale(z + kept) * sign_of(z + kept)
            truth, total, kept = truth + z, total + sent, z + kept - sent
        return float((total - truth).norm() / truth.norm())

    assert 1.5 * error_of(lambda z: z.norm() / z.numel() ** 0.5) < error_of(lambda z: z.abs().mean())


def test_batches_of_one_do_not_get_below_their_noise() -> None:
    """N · T · (f − f*) is above 5,000 at a constant batch of 1, where growing ones have 20."""
    spectrum = torch.linspace(0.5, 1, 20, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def gradient(x: Tensor, rank: int, step: int) -> Tensor:
        return spectrum * x + torch.randn(20, generator=generator, dtype=torch.float64) / 20**0.5

    done = run("data-parallel", 4, torch.ones(20, dtype=torch.float64), gradient, 1000, sgd(0.5))
    assert 4 * 1000 * float((spectrum * ends(done)[0].square()).sum() / 2) > 100


def test_visits_come_nearer_to_uniform_with_repulsion() -> None:
    """Distance in total variation after 6,000 steps, 0.116 without repulsion and 0.021 with, on such a graph."""
    edges = {(node, (node + hop) % 20) for node in range(20) for hop in (1, 2)}

    def distance(alpha: float) -> float:
        walk, rng = SelfRepellentWalk(Graph.of(edges, 20), alpha, 0.8, num_walks=50), np.random.default_rng(0)
        for _ in range(3000):
            walk.move(rng.random(50))
        return float(np.abs(walk.x - 1 / 20).sum(1).mean() / 2)

    assert distance(20.0) < 0.042
    assert distance(20.0) < 0.4 * distance(0.0)


def test_coefficients_of_a_large_cyclic_code_need_float64() -> None:
    """n = 256, s = 15: a residual of 1.6e-8 with coefficients up to 1.5e5, of which fp32 loses five digits."""
    code = GradientCode(256, 15, cyclic=True)
    late = set(np.random.default_rng(0).choice(256, 15, replace=False).tolist())
    weights = code.decoding(set(range(256)) - late)
    assert np.abs(weights @ code.matrix - 1).max() < 1e-5
    assert np.abs(code.matrix).max() > 10
    coarse = code.matrix.astype(np.float32).astype(np.float64)
    assert np.abs(weights @ coarse - 1).max() > np.abs(weights @ code.matrix - 1).max()


@pytest.mark.slow
def test_decoded_gradients_on_eight_ranks_where_some_sleep() -> None:
    """A master and seven workers over gloo; in each step two workers sleep, and the code bears two."""
    found = run_processes("tests.sync_sheet_cases:decoded_where_some_sleep", {}, 8)
    assert max(found) < 1e-6
