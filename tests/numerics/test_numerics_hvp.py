"""Hessian-vector products and probes against dense Hessians, on shifted and rectangular problems."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.pool import Pool
from trainwright.numerics import hvp
from trainwright.numerics.normals import _quantiles
from trainwright.numerics.seeds import seeded


def problem() -> tuple[list[Tensor], Tensor]:
    """A smooth loss of a 3×2 matrix, a vector that enters linearly, and one that does not enter."""
    draw = seeded(4)
    matrix = torch.randn(3, 2, generator=draw, dtype=torch.float64).requires_grad_()
    linear = torch.randn(2, generator=draw, dtype=torch.float64).requires_grad_()
    unused = torch.ones(4, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(7, 3, generator=draw, dtype=torch.float64) * torch.tensor([0.1, 1.0, 5.0])
    loss = torch.tanh(inputs @ matrix + 0.3).pow(2).sum() + 3 * linear.sum()
    return [matrix, linear, unused], loss


def dense(params: list[Tensor]) -> Tensor:
    """The Hessian of `problem` in its matrix, by torch's own functional, and zeros for the linear vector."""
    draw = seeded(4)
    torch.randn(3, 2, generator=draw, dtype=torch.float64)
    torch.randn(2, generator=draw, dtype=torch.float64)
    inputs = torch.randn(7, 3, generator=draw, dtype=torch.float64) * torch.tensor([0.1, 1.0, 5.0])

    def loss(matrix: Tensor) -> Tensor:
        return torch.tanh(inputs @ matrix + 0.3).pow(2).sum()

    whole = torch.zeros(8, 8, dtype=torch.float64)
    whole[:6, :6] = torch.autograd.functional.hessian(loss, params[0].detach()).reshape(6, 6)  # type: ignore[union-attr]
    return whole


def test_products_matrix_and_operator_agree_with_the_dense_hessian() -> None:
    params, loss = problem()
    grads = hvp.gradients(loss, params)
    assert grads[2] is None
    used = [grad for grad in grads if grad is not None]
    exact = dense(params)
    torch.testing.assert_close(hvp.hessian_matrix(used, params[:2]), exact, rtol=1e-12, atol=1e-12)
    vector = torch.randn(8, generator=seeded(1), dtype=torch.float64)
    operator = hvp.HessianOperator(problem()[1], params)
    assert operator.num_dims == 0  # another graph's parameters are not used by this loss
    params, loss = problem()
    operator = hvp.HessianOperator(loss, params)
    assert operator.num_dims == 8
    for _ in range(2):
        torch.testing.assert_close(operator(vector), exact @ vector, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(operator.gradient(), hvp.flatten([grad.detach() for grad in used]))
    assert all(param.grad is None for param in params)


def test_a_linear_loss_has_no_curvature() -> None:
    weight = torch.ones(3, requires_grad=True)
    grads = hvp.gradients((2 * weight).sum(), [weight])
    assert hvp.hessian_vector([grad for grad in grads if grad is not None], [weight], [weight])[0].tolist() == [0, 0, 0]


def test_complex_parameters_count_as_pairs_of_reals() -> None:
    draw = seeded(2)
    half = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    exact = half @ half.T
    weight = torch.randn(3, generator=draw, dtype=torch.complex128).requires_grad_()
    flat = torch.view_as_real(weight).reshape(-1)
    operator = hvp.HessianOperator(0.5 * flat @ exact @ flat, [weight])
    vector = torch.randn(6, generator=draw, dtype=torch.float64)
    assert operator.num_dims == 6
    torch.testing.assert_close(operator(vector), exact @ vector)
    (probe,) = hvp.rademacher([weight], draw)
    assert set(torch.view_as_real(probe).reshape(-1).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(("draw", "extra"), [(hvp.rademacher, 0.0), (hvp.gaussian, 2.0)])
def test_hutchinsons_mean_is_the_diagonal_and_its_variance_the_theorys(draw: object, extra: float) -> None:
    """Per element Σ_{j≠i} H_ij² for ±1, and 2 H_ii² more for normal probes; 50×50, as published: 1.046, 3.117."""
    half = torch.randn(50, 50, generator=seeded(0), dtype=torch.float64)
    matrix = (half + half.T) / 2 / 50**0.5 + torch.eye(50)
    probes = draw([torch.empty(40000, 50, dtype=torch.float64)], seeded(1))[0]  # type: ignore[operator]
    estimates = probes * (probes @ matrix)
    diagonal = matrix.diagonal()
    variance = matrix.pow(2).sum(1) - diagonal**2 + extra * diagonal**2
    error = (estimates.mean(0) - diagonal) / (variance / 40000).sqrt()
    assert error.abs().max() < 4.5
    assert abs(estimates.var(0).mean() / variance.mean() - 1) < 0.02


def test_probes_come_from_their_seed_alone() -> None:
    like = [torch.empty(5, 3, dtype=torch.bfloat16), torch.empty(4)]
    before = torch.get_rng_state()
    first, again, other = (hvp.rademacher(like, seeded(3, step)) for step in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [probe.dtype for probe in first] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_streams_of_neighbouring_counters_are_unrelated() -> None:
    draws = torch.stack([torch.randn(2000, generator=seeded(9, step, rank)) for step in range(8) for rank in range(4)])
    correlation = torch.corrcoef(draws) - torch.eye(32)
    assert correlation.abs().max() < 5 / 2000**0.5


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda weight: weight * 2, r"one real number.*got shape \(3,\)"),
        (lambda weight: 1.0, "got float"),
        (lambda weight: weight.detach().sum(), "with its graph is needed; got one without"),
        (lambda weight: weight.sum() * 1j, "complex64"),
    ],
)
def test_losses_without_a_gradient_are_refused(loss: object, message: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        hvp.gradients(loss(weight), [weight])  # type: ignore[operator]


def test_a_graph_used_up_by_backward_is_named() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight**2).sum()
    loss.backward()
    with pytest.raises(ValueError, match="without calling backward"):
        hvp.gradients(loss, [weight])


def test_flash_attention_is_named_with_its_way_out() -> None:
    query = torch.randn(1, 2, 8, 4, generator=seeded(0), requires_grad=True)

    def attended() -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query).pow(2).sum()

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        (grad,) = hvp.gradients(attended(), [query])
    with pytest.raises(ValueError, match=r"scaled_dot_product\w+ has no second derivative; .*SDPBackend.MATH"):
        hvp.hessian_vector([grad], [query], [torch.ones_like(query)])  # type: ignore[list-item]
    with sdpa_kernel(SDPBackend.MATH):
        operator = hvp.HessianOperator(attended(), [query])
    assert torch.isfinite(operator(torch.ones(64))).all()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def test_a_once_differentiable_function_is_named() -> None:
    weight = torch.ones(3, requires_grad=True)
    (grad,) = hvp.gradients(Once.apply(weight).pow(2).sum(), [weight])
    with pytest.raises(ValueError, match="once_differentiable has no second derivative; replace this op"):
        hvp.hessian_vector([grad], [weight], [torch.ones(3)])  # type: ignore[list-item]


def test_sharded_parameters_give_the_same_products_on_two_ranks(pool2: Pool) -> None:
    found = pool2.run("tests.second_order_cases:hvp_on_shards")
    assert found[0] == found[1]
    assert found[0]["worst"] < 1e-12


def test_every_bit_of_a_counter_counts_in_a_seed() -> None:
    counters = [0, 1, 2, 255, 256, 257, 2**16, 2**32, 2**40]
    found = {seeded(3, counter).initial_seed() for counter in counters} | {seeded(3, 0, 1).initial_seed()}
    assert len(found) == len(counters) + 1


def test_normals_are_the_quantiles_in_the_middles_of_equal_parts() -> None:
    """2¹⁶ of them, rounded to a grid: as many above zero as below, and their variance is 1 but for what the parts hide."""
    table = _quantiles().astype(np.float64)
    assert np.array_equal(table, -table[::-1])
    wanted = scipy.stats.norm.ppf((np.array([0, 7, 40_000]) + 0.5) / 2**16)
    np.testing.assert_allclose(table[[0, 7, 40_000]], wanted, atol=2**-17)
    assert table.var() == pytest.approx(1.0, abs=1e-4)
