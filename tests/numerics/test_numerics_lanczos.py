"""Lanczos against dense eigendecompositions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.numerics.lanczos import lanczos


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spiked(num_dims: int = 300, seed: int = 1) -> torch.Tensor:
    """A Wigner matrix of unit bulk radius 2 with one spike above it."""
    noise = torch.randn(num_dims, num_dims, generator=generator(seed), dtype=torch.float64)
    spike = torch.nn.functional.normalize(
        torch.randn(num_dims, generator=generator(seed + 1), dtype=torch.float64), dim=0
    )
    return (noise + noise.T) / (2 * num_dims) ** 0.5 + 8.0 * torch.outer(spike, spike)


def test_twenty_steps_find_the_spike_and_the_bulks_edge() -> None:
    matrix = spiked()
    exact = torch.linalg.eigvalsh(matrix)
    found = lanczos(lambda vector: matrix @ vector, 300, 20, generator=generator())
    assert abs(found.ritz_values[-1] - exact[-1]) < 1e-12 * exact[-1]
    assert 0 <= found.ritz_values[0] - exact[0] < 0.02
    assert abs(found.weights.sum() - 1) < 1e-13
    assert len(found.ritz_values) == 20


def test_the_quadrature_is_exact_for_low_powers() -> None:
    """k nodes integrate polynomials of degree up to 2k - 1 exactly, seen from the start vector."""
    matrix = spiked(60)
    start = torch.nn.functional.normalize(torch.randn(60, generator=generator(5), dtype=torch.float64), dim=0)
    found = lanczos(lambda vector: matrix @ vector, 60, 4, generator=generator(5))
    power = start
    for degree in range(8):
        assert abs((found.weights * found.ritz_values**degree).sum() - start @ power) < 1e-9 * 8.5**degree
        power = matrix @ power
    assert abs((found.weights * found.ritz_values**8).sum() - start @ power) > 1e-3


def test_no_ghosts_after_convergence() -> None:
    """Without reorthogonalisation, converged extreme values come again; here every Ritz value is one eigenvalue."""
    spectrum = torch.cat(
        [torch.linspace(0, 1, 80, dtype=torch.float64), torch.tensor([50.0, 1e4], dtype=torch.float64)]
    )
    found = lanczos(lambda vector: spectrum * vector, 82, 82, generator=generator(2), vectors=True)
    torch.testing.assert_close(found.ritz_values, spectrum, rtol=0, atol=1e-8)
    assert found.vectors is not None
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(82, dtype=torch.float64), rtol=0, atol=1e-10)


def test_ritz_vectors_are_eigenvectors_once_converged() -> None:
    matrix = spiked(50)
    found = lanczos(lambda vector: matrix @ vector, 50, 50, generator=generator(), vectors=True)
    assert found.vectors is not None
    torch.testing.assert_close(matrix @ found.vectors, found.vectors * found.ritz_values, rtol=0, atol=1e-9)


@given(st.integers(1, 6), st.integers(0, 100))
@settings(max_examples=25)
def test_a_small_krylov_space_ends_early(rank: int, seed: int) -> None:
    """A matrix with few distinct eigenvalues has as many Ritz values, whatever was asked for."""
    distinct = torch.linspace(-2, 3, rank, dtype=torch.float64) if rank > 1 else torch.full((1,), 3.0).double()
    spectrum = distinct.repeat_interleave(7)
    found = lanczos(lambda vector: spectrum * vector, 7 * rank, 7 * rank, generator=generator(seed))
    torch.testing.assert_close(found.ritz_values, distinct, rtol=1e-7, atol=1e-9)


def test_products_are_asked_for_in_the_operators_dtype_and_the_draw_is_the_generators() -> None:
    matrix, dtypes = spiked(40).float(), []

    def matvec(vector: torch.Tensor) -> torch.Tensor:
        dtypes.append(vector.dtype)
        return matrix @ vector

    before = torch.get_rng_state()
    found = lanczos(matvec, 40, 12, generator=generator(3), dtype=torch.float32)
    again = lanczos(matvec, 40, 12, generator=generator(3), dtype=torch.float32)
    assert set(dtypes) == {torch.float32}
    assert torch.equal(found.ritz_values, again.ritz_values)
    assert torch.equal(torch.get_rng_state(), before)
    assert abs(found.ritz_values[-1] - torch.linalg.eigvalsh(matrix.double())[-1]) < 1e-5


def test_zero_and_one_dimensional_operators() -> None:
    assert lanczos(torch.zeros_like, 5, 4, generator=generator()).ritz_values.tolist() == [0.0]
    assert lanczos(lambda vector: -3 * vector, 1, 4, generator=generator()).ritz_values.tolist() == [-3.0]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="num_dims and num_steps of at least 1; got 3 and 0"):
        lanczos(torch.zeros_like, 3, 0)
    with pytest.raises(ValueError, match=r"returns shape \(3,\); got \(3, 1\)"):
        lanczos(lambda vector: vector[:, None], 3, 2)
    with pytest.raises(ValueError, match="finite products"):
        lanczos(lambda vector: vector / 0.0, 3, 2)
