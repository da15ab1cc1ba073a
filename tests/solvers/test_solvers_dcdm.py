"""Deep conjugate directions: the identity as model is the conjugate gradient method; a trained network needs far fewer."""

from __future__ import annotations

import functools
import itertools
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import linalg as sparse_linalg
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.solvers.linear import DirectionNet, PoissonGrid, RitzFamily, dcdm, solve_dcdm, train_direction_net
from trainwright.solvers.linear.direction_training import direction_loss
from trainwright.solvers.outcome import Status

SHAPES = [(7,), (5, 8), (3, 4, 6), (1, 5), (2, 1, 3)]


def identity(residual: Tensor) -> Tensor:
    return residual


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def right_sides(size: int) -> dict[str, Tensor]:
    """Noise, blocks and a smooth function on a square grid."""
    axis = torch.linspace(0, 1, size, dtype=torch.float64)
    blocks = torch.zeros(size, size, dtype=torch.float64)
    blocks[size // 4 : size // 2, size // 3 : size // 2] = 1
    blocks[3 * size // 4 :, : size // 3] = -2
    return {
        "noise": torch.randn(size, size, generator=generator(5), dtype=torch.float64),
        "blocks": blocks,
        "smooth": torch.outer(axis**2, torch.cos(3 * axis)),
    }


def cg_iterations(grid: PoissonGrid, right: Tensor, rtol: float) -> int:
    steps: list[Any] = []
    sparse_linalg.cg(grid.matrix(), right.numpy().ravel(), rtol=rtol, callback=lambda x: steps.append(1))
    return len(steps)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("boundary", ["dirichlet", "neumann"])
def test_products_are_the_matrix(shape: tuple[int, ...], boundary: Any) -> None:
    grid = PoissonGrid(shape, boundary)
    x = torch.randn(2, *shape, generator=generator(), dtype=torch.float64)
    dense = grid.matrix().toarray()
    np.testing.assert_allclose(grid.apply(x).reshape(2, -1).numpy(), x.reshape(2, -1).numpy() @ dense, atol=1e-12)
    np.testing.assert_allclose(dense, dense.T)
    least = np.linalg.eigvalsh(dense)[0]
    assert least == pytest.approx(0, abs=1e-12) if boundary == "neumann" else least > 0


@pytest.mark.parametrize("shape", [(6,), (5, 4), (3, 2, 4)])
@pytest.mark.parametrize("boundary", ["dirichlet", "neumann"])
def test_basis_and_eigenvalues_are_the_operators(shape: tuple[int, ...], boundary: Any) -> None:
    grid = PoissonGrid(shape, boundary)
    for size in shape:
        line = PoissonGrid((size,), boundary)
        basis = line._basis(size).double()
        image = torch.from_numpy(line.matrix().toarray()) @ basis
        torch.testing.assert_close(image, basis * line._line_eigenvalues(size), atol=1e-5, rtol=0)
        torch.testing.assert_close(basis.T @ basis, torch.eye(size).double(), atol=1e-5, rtol=0)
    exact = np.linalg.eigvalsh(grid.matrix().toarray())
    np.testing.assert_allclose(np.sort(grid._eigenvalues().numpy().ravel()), exact, atol=1e-5)


@pytest.mark.parametrize("boundary", ["dirichlet", "neumann"])
def test_samples_lean_to_the_low_end(boundary: Any) -> None:
    grid = PoissonGrid((12, 9), boundary)
    samples = grid.sample(64, generator()).double()
    torch.testing.assert_close(samples.flatten(1).norm(dim=1), torch.ones(64).double(), atol=1e-5, rtol=0)
    values, vectors = np.linalg.eigh(grid.matrix().toarray())
    energy = np.square(samples.flatten(1).numpy() @ vectors).mean(0)
    low = values <= np.median(values)
    assert energy[low].sum() > 20 * energy[~low].sum()
    if boundary == "neumann":
        assert abs(samples.mean(dim=(1, 2))).max() < 1e-6


def test_ritz_samples_span_the_wanted_part() -> None:
    grid = PoissonGrid((6, 5))
    family = RitzFamily(grid.apply, (6, 5), 30, seed=generator(1), extra_low=2)
    dense = grid.matrix().toarray()
    ritz = family.vectors.double().numpy()
    image = dense @ ritz
    values = (ritz * image).sum(0)
    np.testing.assert_allclose(image, ritz * values, atol=1e-4)
    assert (np.diff(values) > -1e-6).all()
    assert family.num_low == ritz.shape[1] // 2 + 2
    samples = family.sample(5, generator(2))
    assert samples.shape == (5, 6, 5)
    torch.testing.assert_close(samples.flatten(1).norm(dim=1), torch.ones(5))


@pytest.mark.parametrize("num_previous", [1, 2])
@pytest.mark.parametrize("name", ["noise", "blocks", "smooth"])
def test_identity_is_the_conjugate_gradient_method(name: str, num_previous: int) -> None:
    grid, right = PoissonGrid((32, 32)), right_sides(32)[name]
    result = solve_dcdm(grid.apply, right, identity, num_previous=num_previous, max_iterations=200)
    assert result.success
    assert result.nit == cg_iterations(grid, right, 1e-6)
    assert 80 <= result.nit <= 90


def test_without_previous_directions_it_is_steepest_descent() -> None:
    grid, right = PoissonGrid((6, 7)), torch.randn(6, 7, generator=generator(3), dtype=torch.float64)
    result = solve_dcdm(grid.apply, right, identity, num_previous=0, max_iterations=3, rtol=0)
    x = torch.zeros(6, 7).double()
    for _ in range(3):
        r = right - grid.apply(x)
        x = x + r * (r * r).sum() / (r * grid.apply(r)).sum()
    torch.testing.assert_close(result.x, x)
    assert result.num_matvecs == 7


@settings(max_examples=20, deadline=None)
@given(scale=st.floats(1e-6, 1e6), sign=st.sampled_from([-1.0, 1.0]), seed=st.integers(0, 99))
def test_the_length_of_a_direction_is_irrelevant_and_the_error_falls(scale: float, sign: float, seed: int) -> None:
    grid = PoissonGrid((9, 6))
    right = torch.randn(9, 6, generator=generator(seed), dtype=torch.float64)
    exact = torch.from_numpy(np.linalg.solve(grid.matrix().toarray(), right.numpy().ravel())).reshape(9, 6)
    mixing = torch.eye(54).double() + 0.3 * torch.randn(54, 54, generator=generator(seed + 1), dtype=torch.float64) / 7
    energies: list[float] = []

    def model(residual: Tensor) -> Tensor:
        return sign * scale * (mixing @ residual.reshape(-1)).reshape(9, 6)

    def watch(moment: Any) -> None:
        error = moment.state.x - exact
        energies.append(float((error * grid.apply(error)).sum()))

    scaled = solve_dcdm(grid.apply, right, model, rtol=0, max_iterations=12, callback=watch)
    plain = solve_dcdm(grid.apply, right, lambda r: model(r) / (sign * scale), rtol=0, max_iterations=12)
    torch.testing.assert_close(scaled.x, plain.x, rtol=1e-6, atol=1e-9)
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(energies))


def test_a_singular_problem_is_solved_off_its_null_space() -> None:
    grid = PoissonGrid((10, 8), "neumann")
    right = torch.randn(10, 8, generator=generator(4), dtype=torch.float64) + 3
    result = solve_dcdm(grid.apply, right, identity, project=grid.project, max_iterations=200, rtol=1e-9)
    assert result.success
    torch.testing.assert_close(grid.apply(result.x), right - right.mean(), atol=1e-6, rtol=0)


def test_every_kind_of_operator_gives_the_same() -> None:
    grid, right = PoissonGrid((7, 5)), torch.randn(7, 5, generator=generator(6), dtype=torch.float64)
    matrix = grid.matrix()
    expected = solve_dcdm(grid.apply, right, identity).x
    for operator in (matrix, matrix.toarray(), sparse_linalg.aslinearoperator(matrix), torch.tensor(matrix.toarray())):
        torch.testing.assert_close(solve_dcdm(operator, right, identity).x, expected)
    x, info = dcdm(matrix, right.numpy(), model=identity)
    assert isinstance(x, np.ndarray)
    assert info == 0
    np.testing.assert_allclose(x, expected.numpy())
    assert dcdm(matrix, right.numpy(), model=identity, maxiter=2)[1] == 2


@functools.cache
def trained() -> tuple[DirectionNet, float]:
    """Eight channels, trained for some seconds on a 24 × 24 and a 32 × 32 grid."""
    net = DirectionNet(2, channels=8, seed=generator(7))
    families = [PoissonGrid((24, 24)), PoissonGrid((32, 32))]
    result = train_direction_net(net, families, max_iterations=200, learning_rate=4e-3, seed=generator(8))
    return net, result.fun


@pytest.mark.slow
def test_a_trained_network_needs_a_third_of_the_iterations() -> None:
    net, loss = trained()
    assert loss < 0.05
    for size in (32, 64):
        grid = PoissonGrid((size, size))
        for right in right_sides(size).values():
            result = solve_dcdm(grid.apply, right, net.direction, max_iterations=200)
            assert result.success
            assert result.nit <= 0.35 * cg_iterations(grid, right, 1e-6)
            assert float((right - grid.apply(result.x)).norm()) <= 1.01e-6 * float(right.norm())


@pytest.mark.slow
def test_accuracy_is_not_the_networks() -> None:
    grid, right = PoissonGrid((32, 32)), right_sides(32)["blocks"]
    result = solve_dcdm(grid.apply, right, trained()[0].direction, rtol=1e-12, max_iterations=200)
    assert result.success


def test_training_is_reproducible_and_reports() -> None:
    losses = []
    for _ in range(2):
        net = DirectionNet(1, channels=4, seed=generator(9))
        result = train_direction_net(net, [PoissonGrid((8,))], max_iterations=20, seed=generator(10), keep_history=True)
        losses.append(result.history["fun"])
    assert losses[0] == losses[1]
    assert result.nfev == 200
    assert result.status is Status.COMPLETED
    assert result.fun == pytest.approx(np.mean(losses[0][-2:]))
    stopped = train_direction_net(net, [PoissonGrid((8,))], seed=generator(1), callback=lambda moment: moment.nit == 3)
    assert (stopped.status, stopped.nit) == (Status.STOPPED, 3)


def test_the_loss_is_what_a_step_leaves() -> None:
    grid = PoissonGrid((6, 7))
    net = DirectionNet(2, channels=8, seed=generator(7))  # any will do: the step along its direction is the best one
    right = grid.sample(3, generator(12))
    losses = direction_loss(net, grid, right).detach()
    for loss, b in zip(losses, right, strict=True):
        step = solve_dcdm(grid.apply, b.double(), net.direction, max_iterations=1, rtol=0)
        assert step.residual_norm < float(b.norm())
        assert float(loss) == pytest.approx(step.residual_norm**2, rel=1e-3)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_networks_take_any_size_and_are_homogeneous(num_dims: int) -> None:
    net = DirectionNet(num_dims, channels=4, blocks=((1, 1), (2, 0)), seed=generator(13))
    shape = (9, 6, 11)[:num_dims]
    residual = torch.randn(shape, generator=generator(14), dtype=torch.float64)
    once, scaled = net.direction(residual), net.direction(250 * residual)
    assert once.shape == residual.shape
    assert once.dtype == torch.float64
    torch.testing.assert_close(scaled, 250 * once, rtol=1e-4, atol=1e-3)


def test_the_papers_network_has_the_papers_layers() -> None:
    net = DirectionNet(3, blocks=((2, 2), (3, 0)), max_levels=1, bias=True, seed=generator(15))
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv3d)]
    assert len(convolutions) == 2 + 2 * (2 + 2 + 3)
    assert all(module.bias is not None for module in convolutions)
    assert net(torch.zeros(1, 1, 8, 8, 8)).shape == (1, 1, 8, 8, 8)


def test_how_runs_end() -> None:
    grid, right = PoissonGrid((5, 5)), torch.ones(5, 5)
    assert solve_dcdm(grid.apply, right, torch.zeros_like).status is Status.BREAKDOWN
    assert solve_dcdm(lambda x: -grid.apply(x), right, identity).status is Status.BREAKDOWN
    assert solve_dcdm(grid.apply, right, lambda r: r * float("nan")).status is Status.NOT_FINITE
    late = iter([identity, identity, lambda r: r * float("inf")])
    result = solve_dcdm(grid.apply, right.double() + grid.sample(1, generator())[0], lambda r: next(late)(r))
    assert result.status is Status.NOT_FINITE
    assert torch.isfinite(result.x).all()
    assert result.nit == 2


GRID = PoissonGrid((3, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PoissonGrid((3, 3, 3, 3)), "1 to 3 sizes"),
        (lambda: PoissonGrid((3,), "robin"), "'dirichlet' or 'neumann'"),  # type: ignore[arg-type]
        (lambda: DirectionNet(4), "num_dims 1 to 3"),
        (lambda: DirectionNet(2).direction(torch.zeros(3)), "residual of 2 dimensions"),
        (lambda: train_direction_net(DirectionNet(2), [], seed=generator()), "at least one family"),
        (lambda: solve_dcdm(GRID.apply, torch.full((3, 3), float("nan")), identity), "finite numbers"),
        (lambda: solve_dcdm(GRID.apply, torch.ones(3, 3), identity, torch.ones(9)), r"x0 of b's shape \(3, 3\)"),
        (lambda: solve_dcdm(GRID.apply, torch.ones(3, 3), identity, num_previous=-1), "num_previous ≥ 0"),
        (lambda: solve_dcdm(lambda x: x[:1], torch.ones(3, 3), identity), "A gave"),
        (lambda: solve_dcdm(GRID.apply, torch.ones(3, 3), lambda r: r[:2]), "keeps the shape"),
        (lambda: solve_dcdm(GRID.apply, torch.ones(3, 3), lambda r: 3), "keeps the shape"),  # type: ignore[arg-type,return-value]
        (lambda: solve_dcdm(np.eye(4), torch.ones(3, 3), identity), r"A of shape \(9, 9\)"),
        (lambda: solve_dcdm(3, torch.ones(3, 3), identity), "LinearOperator or function"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_the_example_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "figure.html"
    monkeypatch.setattr(
        sys, "argv", ["deep_conjugate_directions.py", "--out", str(out), "--side", "32", "--num-steps", "20"]
    )
    runpy.run_path(
        str(Path(__file__).parents[2] / "examples" / "solvers" / "deep_conjugate_directions.py"), run_name="__main__"
    )
    assert "plotly" in out.read_text(encoding="utf8").lower()


def test_a_projection_that_the_matrix_does_not_keep_solves_the_projected_system() -> None:
    """P A x = P b with x in the range of P: its residual has no part outside, whatever A does."""
    diagonal = torch.arange(1.0, 7.0, dtype=torch.float64)
    right = torch.tensor([3.0, -1.0, 2.0, 5.0, -4.0, 1.0], dtype=torch.float64)
    project = lambda r: r - r.mean()  # noqa: E731
    result = solve_dcdm(lambda x: diagonal * x, right, lambda r: r, rtol=1e-10, max_iterations=200, project=project)
    assert result.success
    assert float(result.x.sum()) == pytest.approx(0.0, abs=1e-9)
    assert float(project(right - diagonal * result.x).norm()) < 1e-8
