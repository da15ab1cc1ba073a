"""What every optimizer with refreshed curvature owes its user: closures, explicit refreshes, errors, ranks, resume."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.second_order_cases import METHODS, cross_entropy_problem, make
from trainwright.artifacts import UserError
from trainwright.numerics.seeds import seeded
from trainwright.optim.adahessian import AdaHessian
from trainwright.optim.sophia import SophiaG, SophiaH, sampled_cross_entropy

NAMES = list(METHODS)


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_closures_step_is_the_explicit_form(name: str) -> None:
    """`step(closure)` equals `update_hessian` + `backward` + `step()`, and leaves `.grad` alone."""
    by_closure, explicit = cross_entropy_problem(), cross_entropy_problem()
    first, second = make(name, by_closure.params), make(name, explicit.params)
    marks = [torch.full_like(param, 7.0) for param in by_closure.params]
    for param, mark in zip(by_closure.params, marks, strict=True):
        param.grad = mark
    for _ in range(7):
        by_closure.step(name, first)
        explicit.step_explicitly(name, second)
    torch.testing.assert_close(by_closure.params, explicit.params, rtol=1e-10, atol=1e-12)
    for param, mark in zip(by_closure.params, marks, strict=True):
        assert param.grad is mark
        assert_equal(mark, torch.full_like(mark, 7.0))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str) -> None:
    whole = cross_entropy_problem()
    optimizer = make(name, whole.params)
    for _ in range(4):
        whole.step(name, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = cross_entropy_problem(copy.deepcopy(whole.params))
    again = make(name, resumed.params)
    again.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        whole.step(name, optimizer)
        resumed.step(name, again)
    assert_equal(resumed.params, whole.params)


@pytest.mark.parametrize("name", NAMES)
def test_lists_equal_the_loop(name: str) -> None:
    loop, lists = cross_entropy_problem(), cross_entropy_problem()
    first, second = make(name, loop.params, foreach=False), make(name, lists.params, foreach=True)
    for _ in range(7):
        loop.step(name, first)
        lists.step(name, second)
    torch.testing.assert_close(loop.params, lists.params, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_narrow_and_complex_parameters(name: str) -> None:
    """bf16 keeps fp32 state; a complex parameter is its real and imaginary parts."""
    narrow = [nn.Parameter(torch.linspace(-1, 1, 6).to(torch.bfloat16))]
    optimizer = make(name, narrow)
    for _ in range(6):
        step_by(name, optimizer, lambda: narrow[0].float().pow(4).sum())
    assert {state.dtype for state in optimizer.state[narrow[0]].values()} == {torch.float32}
    pair = nn.Parameter(torch.tensor([[0.3, -2.0], [1.0, 0.7], [-0.2, 0.1]], dtype=torch.float64))
    single = nn.Parameter(torch.view_as_complex(pair.detach().clone()))
    optimizers = [make(name, [parameter]) for parameter in (pair, single)]
    for _ in range(6):
        step_by(name, optimizers[0], lambda: (pair**4).sum())
        step_by(name, optimizers[1], lambda: (torch.view_as_real(single) ** 4).sum())
    torch.testing.assert_close(torch.view_as_real(single), pair, rtol=1e-12, atol=0)


def step_by(name: str, optimizer: Any, loss: Any) -> None:
    """One explicit step on a loss; SophiaG's estimate of a loss that is no cross-entropy serves only its arithmetic."""
    if optimizer.hessian_due:
        optimizer.update_hessian(loss, *([5] if name == "sophia_g" else []))
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_a_scaler_skips_the_step_of_infinite_gradients(name: str) -> None:
    problem = cross_entropy_problem()
    optimizer, scaler = make(name, problem.params), torch.amp.GradScaler("cpu", init_scale=4.0)
    problem.step_explicitly(name, optimizer)
    before = copy.deepcopy(problem.params)
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(problem.loss() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert any(not torch.equal(a, b) for a, b in zip(problem.params, before, strict=True)) is moves


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_parts_of_the_batch_average_to_the_whole(name: str, pool2: Pool) -> None:
    found = pool2.run("tests.second_order_cases:parts_of_a_batch", name=name)
    assert found[0] == found[1]
    assert found[0]["worst"] < (1e-12 if name != "sophia_g" else 1e-3)  # its ranks draw labels of their own


@pytest.mark.parametrize("name", NAMES)
def test_sharded_parameters_take_the_same_steps(name: str, pool2: Pool) -> None:
    found = pool2.run("tests.second_order_cases:steps_on_shards", name=name)
    assert found[0]["worst"] < 1e-12
    assert found[1]["worst"] < 1e-12


@pytest.mark.parametrize("name", ["sophia_h", "adahessian"])
def test_a_first_step_without_curvature_is_refused(name: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = make(name, [weight])
    with pytest.raises(UserError, match=r"needs curvature for every parameter .* closure .* update_hessian\(closure\)"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    assert not optimizer.state


def test_sophia_g_is_refused_once_its_sign_steps_are_over() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = SophiaG([weight], update_period=3)
    for _ in range(3):
        assert not optimizer.hessian_due
        optimizer.step()
    assert optimizer.hessian_due
    with pytest.raises(UserError, match="SophiaG needs curvature"):
        optimizer.step()
    with pytest.raises(UserError, match="needs the logits in a step with fresh curvature"):
        optimizer.step(lambda: weight.sum())


@pytest.mark.parametrize("name", ["sophia_h", "adahessian"])
@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda weight: None, "got NoneType"),
        (lambda weight: weight.sum().detach(), "got one without"),
        (lambda weight: backwarded(weight), r"without calling backward\(\)"),
        (lambda weight: weight, r"got shape \(2,\)"),
    ],
)
def test_closures_without_a_usable_loss_leave_everything(name: str, closure: Any, message: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make(name, [weight])
    with pytest.raises(UserError, match=message):
        optimizer.step(lambda: closure(weight))
    assert weight.tolist() == [1.0, 1.0]
    assert not optimizer.state


def backwarded(weight: Tensor) -> Tensor:
    loss = (weight**2).sum()
    loss.backward()
    return loss


def test_a_kernel_without_second_derivative_is_refused_untouched() -> None:
    weight = nn.Parameter(torch.randn(1, 1, 4, 4, generator=seeded(0)))
    optimizer = AdaHessian([weight])
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(UserError, match=r"AdaHessian: .*scaled_dot_product\w+ has no second derivative"),
    ):
        optimizer.step(lambda: nn.functional.scaled_dot_product_attention(weight, weight, weight).sum())
    assert not optimizer.state


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda params: SophiaH(params, gamma=0.0), "SophiaH needs gamma above 0; got 0.0"),
        (lambda params: SophiaG(params, eps=0.0), "SophiaG needs eps above 0"),
        (lambda params: SophiaH(params, betas=(0.9, 1.0)), r"betas\[1\] in \[0, 1\)"),
        (lambda params: SophiaH(params, probe="sphere"), "probe among rademacher, gaussian; got 'sphere'"),
        (lambda params: SophiaG(params, update_period=0), "update_period of at least 1; got 0"),
        (lambda params: AdaHessian(params, hessian_power=0.0), r"hessian_power in \(0, 1\]"),
        (lambda params: AdaHessian(params, lr=-1.0), "lr of at least 0"),
        (lambda params: SophiaG(params).update_hessian(lambda: params[0].sum(), 0), "num_loss_terms of at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("name", NAMES)
def test_another_methods_state_is_refused(name: str) -> None:
    problem = cross_entropy_problem()
    optimizer, other = make(name, problem.params), torch.optim.Adagrad(problem.params)
    problem.step(name, optimizer)
    problem.loss().backward()
    other.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match="needs its own state"):
        optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_without_its_count_of_refreshes_is_refused(name: str) -> None:
    problem = cross_entropy_problem()
    optimizer = make(name, problem.params)
    problem.step(name, optimizer)
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["state"][1]["hessian_step"]
    with pytest.raises(UserError, match="hessian_step is missing"):
        optimizer.load_state_dict(broken)


def test_sparse_gradients_of_a_closure_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = SophiaH(table.parameters())
    with pytest.raises(UserError, match=r"SophiaH needs dense gradients; got layout torch\.sparse_coo"):
        optimizer.step(lambda: table(torch.tensor([1, 3])).pow(2).sum())
    assert not optimizer.state


def test_sampled_labels_need_no_global_state() -> None:
    before = torch.get_rng_state()
    problem = cross_entropy_problem()
    optimizer = make("sophia_g", problem.params)
    for _ in range(5):
        problem.step("sophia_g", optimizer)
    sampled_cross_entropy(torch.zeros(2, 3), seeded(1))
    assert torch.equal(torch.get_rng_state(), before)
