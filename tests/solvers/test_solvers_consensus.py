"""Consensus-based optimisation against steps written out, the proximal step it approximates, and known minima."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.solvers.consensus import CBO, ConsensusHopping, Swarm, consensus_point, minimize
from trainwright.solvers.consensus.ensemble import Ensemble
from trainwright.solvers.outcome import Status


def rastrigin(x: Tensor) -> Tensor:
    return (x**2 - 10 * torch.cos(2 * torch.pi * x) + 10).sum(1)


def shifted_bowl(x: Tensor) -> Tensor:
    """A quadratic of condition 30 with its minimum off the origin."""
    scales = torch.linspace(1, 30, x.shape[1], dtype=x.dtype)
    return 2 + (scales * (x - 0.7) ** 2).sum(1)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.floats(0, 50), st.floats(-1e6, 1e6))
def test_the_consensus_is_the_weighted_mean_and_knows_no_constant(
    values: list[float], alpha: float, shift: float
) -> None:
    particles = torch.arange(2.0 * len(values), dtype=torch.float64).reshape(-1, 2) ** 1.5 - 3
    array = np.array(values)
    weights = np.exp(-alpha * (array - array.min()))
    wanted = (weights[:, None] * particles.numpy()).sum(0) / weights.sum()
    energies = torch.tensor(values, dtype=torch.float64)
    np.testing.assert_allclose(consensus_point(particles, energies, alpha), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(consensus_point(particles, energies + shift, alpha), wanted, rtol=1e-4, atol=1e-6)
    assert (consensus_point(particles, energies, alpha) >= particles.min(0).values - 1e-9).all()


def test_the_consensus_ignores_what_is_not_finite() -> None:
    particles = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])
    for bad in (torch.nan, torch.inf):
        torch.testing.assert_close(consensus_point(particles, torch.tensor([bad, 1.0, bad]), 3.0), particles[1])
    torch.testing.assert_close(consensus_point(particles, torch.full((3,), torch.nan), 3.0), particles.mean(0))
    huge = consensus_point(particles, torch.tensor([1e30, 2e30, 3e30]), 1e9)
    torch.testing.assert_close(huge, particles[0])


@pytest.mark.parametrize("order", ["drift-first", "textbook"])
@pytest.mark.parametrize("diffusion", ["anisotropic", "isotropic"])
def test_a_step_is_the_one_written_out(diffusion: Any, order: Any) -> None:
    particles = torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.0, 1.5]], dtype=torch.float64)
    method = CBO(drift=2.0, noise=0.8, dt=0.1, alpha=1.0, diffusion=diffusion, order=order)
    ensemble = Ensemble.of(particles, torch.tensor([0.3, 0.9], dtype=torch.float64), 1.0, None)
    found = method.propose(ensemble, torch.Generator().manual_seed(4))
    noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    share = 1 / (1 + np.exp(-0.6))
    centre = share * particles[0] + (1 - share) * particles[1]
    for i in range(2):
        old = particles[i] - centre
        new = old * (1 - 2.0 * 0.1)
        base = new if order == "drift-first" else old
        factor = base.abs() if diffusion == "anisotropic" else base.norm()
        sign = base.sign() if diffusion == "anisotropic" else 1.0  # diag(z) ξ, not diag(|z|) ξ: the same law
        torch.testing.assert_close(found[i], centre + new + 0.8 * np.sqrt(0.1) * sign * factor * noise[i])


@pytest.mark.parametrize(("alpha", "tolerance"), [(1.0, 1e-3), (10.0, 4e-3)])
def test_a_hop_is_a_proximal_step(alpha: float, tolerance: float) -> None:
    """On ‖x‖²/2 one hop multiplies x by 1/(1 + α σ²): 0.9901 and 0.9091."""
    x0 = torch.tensor([1.0, -0.5], dtype=torch.float64)
    method = ConsensusHopping(noise=0.1, alpha=alpha)
    result = minimize(lambda x: (x**2).sum(1) / 2, x0=x0, method=method, num_particles=200_000, max_iterations=0)
    factor = float(result.x @ x0 / (x0 @ x0))
    assert factor == pytest.approx(1 / (1 + alpha * 0.01), abs=tolerance)


def test_a_hop_falls_short_where_the_weights_collapse() -> None:
    x0 = torch.tensor([1.0, -0.5], dtype=torch.float64) * 3
    method = ConsensusHopping(noise=0.1, alpha=100.0)
    result = minimize(lambda x: (x**2).sum(1) / 2, x0=x0, method=method, num_particles=1000, max_iterations=0)
    assert float(result.x @ x0 / (x0 @ x0)) > 0.75  # the proximal step would be 0.5


def successes(num_dims: int, method: CBO, num_particles: int, num_steps: int, num_runs: int) -> int:
    """Rastrigin from N(1, 4 I): runs that end within a quarter of the minimum in every coordinate."""
    x0 = torch.ones(num_dims, dtype=torch.float64)
    results = [
        minimize(
            rastrigin, x0=x0, spread=2.0, method=method, num_particles=num_particles, max_iterations=num_steps, seed=i
        )
        for i in range(num_runs)
    ]
    return sum(bool(result.x.abs().max() < 0.25) for result in results)


@pytest.mark.parametrize("order", ["drift-first", "textbook"])
def test_rastrigin_in_two_dimensions(order: Any) -> None:
    method = CBO(noise=0.7, alpha=100.0, diffusion="isotropic", order=order)
    assert successes(2, method, num_particles=100, num_steps=600, num_runs=5) == 5


def test_rastrigin_in_five_dimensions() -> None:
    assert successes(5, CBO(), num_particles=200, num_steps=600, num_runs=5) >= 4


@pytest.mark.slow
def test_rastrigin_in_full() -> None:
    assert successes(2, CBO(noise=0.7, alpha=100.0, diffusion="isotropic"), 100, 1000, 10) >= 9
    assert successes(5, CBO(), 200, 1500, 10) >= 8
    assert successes(10, CBO(), 500, 1500, 10) >= 7
    assert successes(10, CBO(), 1000, 1500, 10) >= 8


def test_hopping_leaves_a_local_valley_that_descent_stays_in() -> None:
    x0 = torch.full((2,), 3.1, dtype=torch.float64)
    result = minimize(
        rastrigin, x0=x0, method=ConsensusHopping(noise=0.6, alpha=100.0), num_particles=200, max_iterations=100
    )
    assert result.best_fun < 0.1 < 20 < float(rastrigin(x0[None]))
    decayed = minimize(
        rastrigin,
        x0=x0,
        method=ConsensusHopping(0.6, 100.0, decay=0.5, decay_every=20),
        num_particles=200,
        max_iterations=140,
    )
    assert decayed.fun < 0.05


def test_ask_and_tell_is_the_same_run_as_minimize() -> None:
    bounds = [(-2.0, 3.0), (-1.0, 2.0), (0.0, 5.0)]
    result = minimize(shifted_bowl, bounds, num_particles=30, max_iterations=40, seed=3, keep_history=True)
    swarm = Swarm(bounds, num_particles=30, seed=3)
    assert swarm.best_fun == torch.inf
    torch.testing.assert_close(swarm.consensus, swarm.ask().mean(0))
    for _ in range(41):
        points = swarm.ask()
        assert torch.equal(points, swarm.ask())
        assert ((points >= torch.tensor([-2.0, -1.0, 0.0])) & (points <= torch.tensor([3.0, 2.0, 5.0]))).all()
        swarm.tell(shifted_bowl(points))
    torch.testing.assert_close(swarm.consensus, result.x, rtol=0, atol=0)
    assert swarm.best_fun == result.history["best_fun"][-1] >= result.best_fun
    assert (result.nit, result.nfev, result.status) == (40, 41 * 30 + 1, Status.COMPLETED)
    assert result.best_fun <= result.fun == float(shifted_bowl(result.x[None]))


def test_the_type_of_the_start_decides_the_type_of_the_points() -> None:
    seen: list[Any] = []

    def record(points: Any) -> Any:
        seen.append(points)
        return (points**2).sum(-1)

    options: dict[str, Any] = {"num_particles": 8, "max_iterations": 3}
    for bounds in (np.array([[-1.0, 2.0]] * 2), Bounds([-1.0, -1.0], [2.0, 2.0])):
        assert isinstance(minimize(record, bounds, **options).x, np.ndarray)
        assert isinstance(seen[-1], np.ndarray)
    wanted = minimize(record, [(-1, 2)] * 2, **options)
    assert wanted.x.dtype == torch.float64
    np.testing.assert_array_equal(minimize(record, np.array([[-1.0, 2.0]] * 2), **options).x, wanted.x.numpy())
    single = minimize(record, x0=torch.ones(3), spread=1.0, **options)
    assert single.x.dtype == torch.float32
    one_by_one = minimize(record, [(-1, 2)] * 2, vectorized=False, **options)
    assert seen[-1].shape == (2,)
    torch.testing.assert_close(one_by_one.x, wanted.x)


def test_tolerances_limits_and_renoising() -> None:
    bounds = [(-4.0, 4.0)] * 2
    done = minimize(shifted_bowl, bounds, max_iterations=2000, rtol=1e-2)
    assert (done.status, done.success) == (Status.CONVERGED, True)
    assert done.spread <= 1e-2 * 4.0
    spent = minimize(shifted_bowl, bounds, max_iterations=2000, max_evaluations=1000)
    assert spent.status is Status.COMPLETED
    assert 1000 <= spent.nfev <= 1101
    method = CBO(noise=0.5, renoise=0.3, renoise_below=0.05)
    kept_alive = minimize(shifted_bowl, bounds, method=method, max_iterations=1500)
    collapsed = minimize(shifted_bowl, bounds, method=CBO(noise=0.5), max_iterations=1500)
    assert collapsed.spread < 1e-4 < 1e-2 < kept_alive.spread


def test_what_is_not_finite_is_no_candidate() -> None:
    def half_defined(points: Tensor) -> Tensor:
        return torch.where(points[:, 0] > 0, shifted_bowl(points), torch.nan)

    result = minimize(half_defined, [(-4.0, 4.0)] * 2, max_iterations=400)
    assert result.success
    assert (result.x - 0.7).abs().max() < 0.2
    calls = iter(range(1000))
    broken = minimize(
        lambda points: shifted_bowl(points) * (torch.nan if next(calls) > 20 else 1),
        [(-4.0, 4.0)] * 2,
        max_iterations=400,
    )
    assert (broken.status, broken.nit) == (Status.NOT_FINITE, 21)
    assert torch.isfinite(broken.best_x).all()
    assert np.isfinite(broken.best_fun)


def test_a_hundred_thousand_particles_in_twenty_dimensions() -> None:
    result = minimize(rastrigin, x0=torch.ones(20), spread=1.0, num_particles=100_000, max_iterations=3)
    assert result.nfev == 4 * 100_000 + 1
    assert result.best_fun < float(rastrigin(torch.full((1, 20), 1.5)))


def test_mistakes_are_named() -> None:
    fine = [(-1.0, 1.0)] * 2
    x0 = torch.zeros(2)
    for options, message in (
        ({"dt": 2.0}, "drift dt ≤ 1"),
        ({"noise": -1.0}, "at least 0"),
        ({"diffusion": "none"}, "diffusion 'anisotropic'"),
    ):
        with pytest.raises(UserError, match=message):
            CBO(**options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="noise > 0"):
        ConsensusHopping(noise=0.0)
    for arguments, message in (
        ({}, "bounds or x0 are needed"),
        ({"bounds": [(1.0, 0.0)]}, "low < high"),
        ({"bounds": fine, "x0": torch.zeros(3)}, "pair for each entry|low < high"),
        ({"bounds": [1.0, 2.0]}, "pairs \\(low, high\\)"),
        ({"bounds": torch.zeros(3, 3)}, "pairs \\(low, high\\)"),
        ({"x0": x0}, "finite bounds, or x0 with spread"),
        ({"bounds": [(None, 1.0)]}, "finite bounds"),
        ({"bounds": fine, "num_particles": 0}, "num_particles of at least 1"),
        ({"bounds": fine, "method": ConsensusHopping(), "rtol": 0.1}, "CBO is needed for a tolerance"),
    ):
        with pytest.raises(UserError, match=message):
            minimize(shifted_bowl, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="one value per particle"):
        minimize(lambda x: x, fine)
    with pytest.raises(UserError, match="returns one number"):
        minimize(lambda x: x, fine, vectorized=False)
