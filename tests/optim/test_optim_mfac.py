"""M-FAC, static and dynamic, against dense solves in float64, and pruning against the losses that it predicts."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.builders import peak_bytes
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.numerics.seeds import seeded
from trainwright.optim.mfac import MFAC, RECORD
from trainwright.optim.mfac_inverse import MFACInverse, pruning_stages


def rows(num_gradients: int, num_params: int, seed: int = 0) -> Tensor:
    """Gradients off the origin, of scales four powers of ten apart."""
    scale = torch.logspace(-2, 2, num_params, dtype=torch.float64)
    return (torch.randn(num_gradients, num_params, generator=seeded(seed), dtype=torch.float64) + 0.3) * scale


def fisher(gradients: Tensor, damping: float, divisor: int | None = None) -> Tensor:
    size = len(gradients) if divisor is None else divisor
    return damping * torch.eye(gradients.shape[1], dtype=torch.float64) + gradients.T @ gradients / size


@given(st.integers(1, 32), st.integers(1, 60), st.integers(0, 9), st.sampled_from([1e-3, 1.0]))
@settings(max_examples=30)
def test_static_products_and_diagonal_are_the_dense_inverses(size: int, dims: int, seed: int, damping: float) -> None:
    gradients = 0.01 * rows(size, dims, seed)
    inverse, dense = MFACInverse(gradients, damping), torch.linalg.inv(fisher(gradients, damping))
    x = torch.randn(dims, generator=seeded(seed, 1), dtype=torch.float64)
    assert (inverse.product(x) - dense @ x).norm() <= 1e-10 * (dense @ x).norm() + 1e-10 / damping * 1e-3
    torch.testing.assert_close(inverse.diagonal(), dense.diagonal(), rtol=1e-7, atol=1e-10 / damping)


def test_static_agrees_with_a_dense_solve_in_a_thousand_dims() -> None:
    gradients = torch.randn(32, 1000, generator=seeded(0), dtype=torch.float64)
    x = torch.randn(1000, generator=seeded(1), dtype=torch.float64)
    expected = torch.linalg.solve(fisher(gradients, 0.1), x)
    assert (MFACInverse(gradients, 0.1).product(x) - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("block_size", [1, 5, 7, 23])
def test_blocks_are_inverted_by_themselves(block_size: int) -> None:
    """23 parameters in blocks of 5 end with one of 3."""
    gradients, x = 0.01 * rows(9, 23), torch.randn(23, generator=seeded(1), dtype=torch.float64)
    inverse = MFACInverse(gradients, 0.01, block_size)
    for start in range(0, 23, block_size):
        part = slice(start, start + block_size)
        dense = torch.linalg.inv(fisher(gradients[:, part], 0.01))
        torch.testing.assert_close(inverse.product(x)[part], dense @ x[part], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(inverse.diagonal()[part], dense.diagonal(), rtol=1e-9, atol=1e-9)


def made(dims: tuple[tuple[int, ...], ...], **options: Any) -> tuple[list[nn.Parameter], MFAC]:
    params = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in dims]
    return params, MFAC(params, **options)


def give(params: list[nn.Parameter], flat: Tensor) -> None:
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape).clone()


@pytest.mark.parametrize("num_steps", [1, 5, 8, 9, 21])
def test_the_window_is_the_last_m_gradients_however_often_it_wraps(num_steps: int) -> None:
    """F⁻¹x for any x, and each step's direction, against a dense F of the window; two parameters are one vector."""
    params, optimizer = made(((4, 3), (5,)), lr=0.1, num_gradients=8, damping=1e-2)
    given_rows, theta = 0.01 * rows(num_steps, 17), torch.ones(17, dtype=torch.float64)
    for step in range(num_steps):
        give(params, given_rows[step])
        optimizer.step()
        window = given_rows[max(0, step - 7) : step + 1]
        theta -= 0.1 * torch.linalg.solve(fisher(window, 1e-2, 8), given_rows[step])
        flat = torch.cat([param.detach().flatten() for param in params])
        torch.testing.assert_close(flat, theta, rtol=1e-10, atol=1e-10)
    x = torch.randn(17, generator=seeded(1), dtype=torch.float64)
    expected = torch.linalg.solve(fisher(window, 1e-2, 8), x)
    found = optimizer.inverse_product([x[:12].view(4, 3), x[12:]])
    torch.testing.assert_close(torch.cat([part.flatten() for part in found]), expected, rtol=1e-10, atol=1e-10)
    assert (
        MFACInverse(torch.cat([window, torch.zeros(8 - len(window), 17)]), 1e-2).product(x) - expected
    ).norm() < 1e-9


def test_without_a_gradient_the_inverse_is_that_of_the_damping() -> None:
    _, optimizer = made(((2,),), damping=0.5)
    assert optimizer.inverse_product([torch.ones(2)])[0].tolist() == [2.0, 2.0]


def test_a_parameter_without_gradient_has_a_zero_row_in_place_of_the_old_one() -> None:
    """Steps 3 and 4 of a window of two: what the second parameter had in steps 1 and 2 is gone."""
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = MFAC([first, second], lr=0.1, num_gradients=2)
    for step in range(4):
        first.grad = rows(4, 3)[step]
        second.grad = rows(4, 3, seed=1)[step] if step < 2 else None
        optimizer.step()
    torch.testing.assert_close(optimizer.state[first]["window"], rows(4, 3)[2:])
    assert not optimizer.state[second]["window"].any()


@pytest.mark.parametrize(("divisor", "seen"), [("window", 1024), ("filled", 1)])
def test_the_first_direction_is_the_closed_form(divisor: str, seen: int) -> None:
    """g/λ · n/(n + gᵀg/λ) with n = m, or 1 where only filled rows count."""
    (param,), optimizer = made(((6,),), lr=1.0, damping=1e-5, divisor=divisor)
    gradient = torch.linspace(0.1, 0.4, 6, dtype=torch.float64)
    give([param], gradient)
    optimizer.step()
    expected = 1.0 - gradient / 1e-5 * seen / (seen + float(gradient @ gradient) / 1e-5)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=0)


def test_momentum_decay_and_groups_by_hand() -> None:
    """L2 enters the window; each group has its own rate; velocity averages directions."""
    params = [nn.Parameter(torch.full((n,), 2.0, dtype=torch.float64)) for n in (3, 4)]
    groups = [{"params": [params[0]], "lr": 0.1, "weight_decay": 0.5}, {"params": [params[1]], "lr": 0.02}]
    optimizer = MFAC(groups, momentum=0.8, num_gradients=4, damping=0.1, divisor="filled")
    theta, velocity, window = torch.full((7,), 2.0).double(), torch.zeros(7).double(), []
    decay = torch.tensor([0.5] * 3 + [0.0] * 4)
    rate = torch.tensor([0.1] * 3 + [0.02] * 4)
    for step in range(9):
        gradient = rows(9, 7)[step]
        give(params, gradient)
        optimizer.step()
        window = [*window, gradient + decay * theta][-4:]
        direction = torch.linalg.solve(fisher(torch.stack(window), 0.1), window[-1])
        velocity = 0.8 * velocity + 0.2 * direction
        theta = theta - rate * velocity
    torch.testing.assert_close(torch.cat([param.detach() for param in params]), theta, rtol=1e-7, atol=1e-9)


def test_in_fp32_the_direction_keeps_its_digits() -> None:
    """Published trap: 2e-5 at λ = 1e-5 and 2e-3 at 1e-7 by the plain formula; a g of the window needs no cancellation."""
    for damping in (1e-3, 1e-5, 1e-7):
        gradients = 0.01 * torch.randn(64, 2000, generator=seeded(0), dtype=torch.float64)
        param = nn.Parameter(torch.zeros(2000))
        optimizer = MFAC([param], lr=1.0, num_gradients=64, damping=damping)
        for gradient in gradients[:-1]:
            param.grad = gradient.float()
            optimizer.step()
        param.detach().zero_()
        param.grad = gradients[-1].float()
        optimizer.step()
        expected = -torch.linalg.solve(fisher(gradients.float().double(), damping), gradients[-1].float().double())
        assert (param.detach().double() - expected).norm() / expected.norm() < 1e-5


def test_a_parameter_without_a_gradient_is_a_row_of_zeros() -> None:
    """The holder of GGᵀ included: the ring goes on without it."""
    params, optimizer = made(((3,), (4,)), lr=0.1, num_gradients=3, damping=0.1)
    window: list[Tensor] = []
    for step in range(7):
        gradient = 0.1 * rows(7, 7)[step]
        if step in (2, 3):
            gradient[:3] = 0.0
        give(params, gradient)
        if step in (2, 3):
            params[0].grad = None
        before = params[0].detach().clone()
        optimizer.step()
        window = [*window, gradient][-3:]
        assert torch.equal(params[0], before) is (step in (2, 3))
    x = torch.ones(7, dtype=torch.float64)
    found = torch.cat(optimizer.inverse_product([x[:3], x[3:]]))
    torch.testing.assert_close(found, torch.linalg.solve(fisher(torch.stack(window), 0.1), x), rtol=1e-10, atol=1e-10)


def test_resume_is_bit_for_bit_and_gradients_are_untouched() -> None:
    params, optimizer = made(((4, 3), (5,)), lr=0.1, num_gradients=4, damping=0.1, momentum=0.5)
    gradients = 0.1 * rows(12, 17)
    for gradient in gradients[:6]:
        give(params, gradient)
        optimizer.step()
    copies, again = made(((4, 3), (5,)), lr=0.1, num_gradients=4, damping=0.1, momentum=0.5)
    for param, saved in zip(copies, params, strict=True):
        param.data.copy_(saved)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for gradient in gradients[6:]:
        give(params, gradient)
        give(copies, gradient)
        optimizer.step()
        again.step()
        assert torch.equal(torch.cat([param.grad.flatten() for param in params if param.grad is not None]), gradient)
    torch.testing.assert_close(copies, params, rtol=0, atol=0)


def test_shards_make_one_window(pool2: Pool) -> None:
    found = pool2.run("tests.second_order_cases:mfac_on_shards")
    assert max(rank["worst"] for rank in found) < 1e-11


def test_narrow_and_complex_parameters() -> None:
    narrow = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    pair = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    single = nn.Parameter(torch.ones(3, dtype=torch.complex128) * (1 + 1j))
    optimizers = [MFAC([param], lr=0.01, num_gradients=3, damping=0.1) for param in (narrow, pair, single)]
    for step in range(5):
        gradient = torch.randn(3, 2, generator=seeded(step), dtype=torch.float64)
        narrow.grad, pair.grad = gradient.flatten().to(torch.bfloat16), gradient
        single.grad = torch.view_as_complex(gradient)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(single), pair, rtol=1e-12, atol=1e-12)
    assert optimizers[0].state[narrow]["window"].dtype == torch.float32
    torch.testing.assert_close(narrow.double(), pair.flatten(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_large_gradients_that_are_nearly_alike_need_no_digits_of_fp32(dtype: torch.dtype) -> None:
    """Their Gram matrix is of rank one but for what the damping adds: rounded to fp32, it has negative eigenvalues."""
    params = [nn.Parameter(torch.randn(400, 30, generator=seeded(index)).to(dtype)) for index in range(2)]
    same = [torch.randn(400, 30, generator=seeded(9 + index)) * 30 for index in range(2)]
    wide = [
        nn.Parameter(torch.view_as_real(p.detach()).double() if p.is_complex() else p.detach().double()) for p in params
    ]
    optimizers = [MFAC(own, num_gradients=6, lr=1e-3) for own in (params, wide)]
    for step in range(14):
        for index, (param, twin) in enumerate(zip(params, wide)):
            param.grad = (same[index] + 1e-3 * torch.randn(400, 30, generator=seeded(step, index))).to(dtype)
            twin.grad = (torch.view_as_real(param.grad) if param.is_complex() else param.grad).double()
        for optimizer in optimizers:
            optimizer.step()
    for param, twin in zip(params, wide):
        found = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
        torch.testing.assert_close(found.double(), twin.detach(), rtol=0.02, atol=1e-3)


def test_a_gram_matrix_that_rounding_made_indefinite_is_cut_at_zero() -> None:
    params, optimizer = made(((3,),), num_gradients=2, damping=1e-3)
    give(params, torch.ones(3).double())
    optimizer.step()
    state = optimizer.state[params[0]]
    state["gram"].copy_(torch.tensor([[3.0, 3.1], [3.1, 3.0]]))
    state["pushes"].fill_(2)
    values, vectors = torch.linalg.eigh(state["gram"])
    right = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    expected = vectors @ ((vectors.mT @ right) / (values.clamp(min=0.0) + 2e-3)[:, None])
    torch.testing.assert_close(optimizer._solve(right), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("shape", "size"), [((96, 512), 8), ((64,), 128)])
def test_temporaries_are_within_what_is_declared(
    shape: tuple[int, ...], size: int, momentum: float, tmp_path: Path
) -> None:
    param = nn.Parameter(torch.ones(shape))
    optimizer = MFAC([param], num_gradients=size, momentum=momentum, damping=0.1)
    for seed in range(size + 1):
        param.grad = torch.randn(shape, generator=seeded(seed))
        optimizer.step()
    measured = peak_bytes(optimizer.step, tmp_path)
    declared = RECORD.step_temporary_bytes(shape, num_gradients=size, momentum=momentum) + RECORD.held_bytes(shape)
    assert measured <= declared <= 2 * measured + 4096


def test_gradients_that_are_not_finite_leave_the_window_alone() -> None:
    params, optimizer = made(((3,),), num_gradients=3)
    give(params, torch.ones(3).double())
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), params[0].detach().clone()
    give(params, torch.tensor([1.0, float("nan"), 2.0]).double())
    with pytest.raises(UserError, match="MFAC needs finite gradients"):
        optimizer.step()
    assert str(optimizer.state_dict()) == str(before[0])
    assert torch.equal(params[0], before[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gradients": 0}, "num_gradients of at least 1; got 0"),
        ({"damping": 0.0}, "damping above 0"),
        ({"momentum": 1.0}, r"momentum in \[0, 1\)"),
        ({"divisor": "all"}, "divisor 'window' or 'filled'; got 'all'"),
        ({"fused": True}, "fused False"),
        ({"capturable": True}, "capturable False"),
        ({"weight_decay": -1.0}, "weight_decay of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(((2,),), **options)
    with pytest.raises(UserError, match="MFAC needs one damping for all groups"):
        MFAC([{"params": [nn.Parameter(torch.ones(1))], "damping": 1.0}], damping=0.1)


def test_the_score_is_the_rise_of_the_loss() -> None:
    """On the quadratic ½(w - w*)ᵀF(w - w*), from w*: removing one weight jointly costs its score exactly."""
    gradients = 0.1 * rows(40, 12)
    curvature, optimum = fisher(gradients, 0.05), torch.linspace(-2, 3, 12, dtype=torch.float64)
    inverse = MFACInverse(gradients, 0.05)
    pruned = inverse.prune(optimum, 1)
    (removed,) = torch.nonzero(pruned == 0)[0].tolist()
    scores = inverse.scores(optimum)
    assert removed == int(scores.argmin())
    rise = 0.5 * (pruned - optimum) @ curvature @ (pruned - optimum)
    assert abs(rise - scores[removed]) < 1e-11
    for index in range(12):  # and for every other weight, by the same formula
        change = torch.zeros(12, dtype=torch.float64)
        change[index] = -optimum[index] / inverse.diagonal()[index]
        step = inverse.product(change)
        assert abs((optimum + step)[index]) < 1e-10
        assert abs(0.5 * step @ curvature @ step - scores[index]) < 1e-10 * max(1.0, float(scores[index]))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_one_at_a_time_pruning_beats_magnitude(seed: int) -> None:
    """Correlated features (condition 1e4), 500 samples, 30 of 60 weights, fresh gradients each: ≤ 0.15 of magnitude's."""
    draw = seeded(seed)
    basis = torch.linalg.qr(torch.randn(60, 60, generator=draw, dtype=torch.float64)).Q
    inputs = torch.randn(500, 60, generator=draw, dtype=torch.float64) @ basis @ torch.diag(
        torch.logspace(0, -2, 60, dtype=torch.float64)
    ) @ basis.T  # fmt: skip
    truth = torch.randn(60, generator=draw, dtype=torch.float64)
    targets = inputs @ truth + 0.1 * torch.randn(500, generator=draw, dtype=torch.float64)
    start = torch.linalg.lstsq(inputs, targets[:, None]).solution[:, 0]

    def loss(weights: Tensor) -> float:
        return float(0.5 * ((inputs @ weights - targets) ** 2).mean())

    weights = start
    for num_pruned in range(1, 31):
        gradients = (inputs @ weights - targets)[:, None] * inputs
        weights = MFACInverse(gradients, 1e-6, kept=weights != 0).prune(weights, num_pruned)
    by_magnitude = start.clone()
    by_magnitude[start.abs().topk(30, largest=False).indices] = 0.0
    assert int((weights == 0).sum()) == 30
    assert loss(weights) - loss(start) <= 0.15 * (loss(by_magnitude) - loss(start))


def test_stages_keep_equal_shares() -> None:
    stages = [0.2, *pruning_stages(0.2, 0.95, 5)]
    shares = [(1 - after) / (1 - before) for before, after in itertools.pairwise(stages)]
    assert stages[-1] == pytest.approx(0.95)
    assert shares == pytest.approx([shares[0]] * 5)


def test_arithmetic_is_linear_in_the_dims() -> None:
    """d = 2e5, m = 64: no d×d matrix would fit; two products with the window, and what pads it to whole blocks."""
    dims = 200_000
    inverse = MFACInverse(torch.randn(64, dims, generator=seeded(0)), 1e-3)
    with FlopCounterMode(display=False) as counter:
        inverse.product(torch.ones(dims))
    assert counter.get_total_flops() == pytest.approx(2 * 2 * 64 * dims, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MFACInverse(torch.ones(3)), r"\[num_gradients, num_params\] of a real dtype; got shape \(3,\)"),
        (lambda: MFACInverse(torch.ones(3, 2, dtype=torch.int64)), "torch.int64"),
        (lambda: MFACInverse(torch.full((3, 2), float("inf"))), "finite gradients"),
        (lambda: MFACInverse(torch.ones(3, 2), damping=0.0), "damping above 0"),
        (lambda: MFACInverse(torch.ones(3, 2), block_size=0), "block_size of at least 1"),
        (lambda: MFACInverse(torch.ones(3, 2)).product(torch.ones(3)), r"product needs a vector of shape \(2,\)"),
        (lambda: MFACInverse(torch.ones(3, 2), kept=torch.ones(3)), r"kept needs a vector of shape \(2,\)"),
        (lambda: MFACInverse(torch.ones(3, 2)).scores(torch.ones(2, 1)), r"scores needs .* got \(2, 1\)"),
        (lambda: MFACInverse(torch.ones(3, 2)).prune(torch.ones(2), 3), r"num_pruned in 0..2; got 3"),
        (lambda: pruning_stages(0.5, 0.4, 3), r"end in \[start, 1\)"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
