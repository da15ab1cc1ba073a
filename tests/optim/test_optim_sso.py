"""Target-based surrogates: closed forms, the majorisation, and what one gradient of the loss is worth."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.numerics.seeds import seeded
from trainwright.optim.sso import RECORD, SSO, Surrogate
from trainwright.optim.target_proximal import target_proximal

Vector = np.ndarray[Any, np.dtype[np.float64]]


def least_squares() -> tuple[Tensor, Tensor, nn.Parameter]:
    """40×6, cond(XᵀX) above 1e6, far from the optimum."""
    draw = seeded(0)
    inputs = torch.randn(40, 6, generator=draw, dtype=torch.float64) * torch.logspace(-3, 0, 6, dtype=torch.float64)
    wanted = torch.randn(40, generator=draw, dtype=torch.float64) + 2
    return inputs, wanted, nn.Parameter(torch.full((6,), 3.0, dtype=torch.float64))


def half_squares(wanted: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda z: 0.5 * ((z - wanted) ** 2).sum()


def test_an_exact_inner_solve_ends_after_one_step_whatever_the_condition() -> None:
    inputs, wanted, weight = least_squares()
    best = torch.linalg.lstsq(inputs, wanted[:, None]).solution[:, 0]
    loss = half_squares(wanted)
    assert torch.linalg.cond(inputs.T @ inputs) > 1e6

    def exactly(surrogate: Surrogate) -> None:
        with torch.no_grad():
            weight.copy_(torch.linalg.lstsq(inputs, surrogate.minimiser[:, None]).solution[:, 0])

    SSO([weight], lr=1.0).step(lambda: inputs @ weight, loss, exactly)
    assert loss(inputs @ weight.detach()) - loss(inputs @ best) < 1e-12


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    draw = seeded(1)
    return model, torch.randn(16, 5, generator=draw), torch.randint(3, (16,), generator=draw)


@pytest.mark.parametrize("lr", [0.1, 7.0])
@pytest.mark.parametrize("form", ["loss", "pair", "value_and_gradient"])
def test_one_fixed_inner_step_is_gradient_descent_bit_for_bit(form: str, lr: float) -> None:
    """∇q = ∇ℓ(z(θ)) at θ_t for every η."""
    model, inputs, labels = network()
    twin = copy.deepcopy(model)
    optimizer = SSO(model.parameters(), lr=lr, num_inner_steps=1, search="fixed", inner_step=0.03)
    reference = torch.optim.SGD(twin.parameters(), lr=0.03)

    def loss(z: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, labels, reduction="sum")

    def pair() -> tuple[Tensor, Tensor]:
        z = model(inputs)
        return loss(z), z

    def value_and_gradient(z: Tensor) -> tuple[float, Tensor]:
        z = z.detach().requires_grad_()
        value = loss(z)
        return value.item(), torch.autograd.grad(value, z)[0]

    for _ in range(5):
        if form == "pair":
            found = optimizer.step(pair)
        else:
            found = optimizer.step(lambda: model(inputs), loss if form == "loss" else value_and_gradient)
        reference.zero_grad()
        expected = loss(twin(inputs))
        expected.backward()
        reference.step()
        assert float(found) == expected.item()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
        assert own.grad is None


def test_armijo_inner_steps_are_the_rule_by_hand() -> None:
    """Start at inner_step, then growth times the last; 0.9 until q falls by 0.1 s ‖∇q‖²."""
    inputs, wanted, weight = least_squares()
    theta, eta, step = weight.detach().clone(), 0.4, 10.0 / 2
    optimizer = SSO([weight], lr=eta, num_inner_steps=4)
    for _ in range(3):
        optimizer.step(lambda: inputs @ weight, half_squares(wanted))
        anchor = inputs @ theta
        slope = anchor - wanted

        def q(point: Tensor, anchor: Tensor = anchor, slope: Tensor = slope) -> float:
            change = inputs @ point - anchor
            return float(half_squares(wanted)(anchor) + slope @ change + change @ change / (2 * eta))

        for _ in range(4):
            gradient = inputs.T @ (slope + (inputs @ theta - anchor) / eta)
            step *= 2.0
            while q(theta - step * gradient) > q(theta) - 0.1 * step * float(gradient @ gradient):
                step *= 0.9
            theta = theta - step * gradient
    torch.testing.assert_close(weight.detach(), theta, rtol=1e-10, atol=1e-12)
    assert float(optimizer.state[weight]["inner_step"]) == pytest.approx(step)


def test_the_surrogate_bounds_a_smooth_loss_from_above() -> None:
    """Logistic loss, 1/η = 1/4: 0 of 1000 random z violate ℓ ≤ q; with η = 50, 200 of 200 do."""
    draw = seeded(2)
    anchor = torch.randn(30, generator=draw, dtype=torch.float64)
    signs = torch.randint(2, (30,), generator=draw) * 2.0 - 1

    def loss(z: Tensor) -> Tensor:
        return nn.functional.softplus(-signs * z).sum()

    slope = -signs * torch.sigmoid(-signs * anchor)
    point = nn.Parameter(anchor.clone())
    for lr, num_draws, violations in ((4.0, 1000, 0), (50.0, 200, 200)):
        surrogate = Surrogate(lambda: point * 1, [point], point * 1, float(loss(anchor)), slope, lr)
        found = 0
        for _ in range(num_draws):
            with torch.no_grad():
                point.copy_(anchor + 3 * torch.randn(30, generator=draw, dtype=torch.float64))
            found += int(surrogate.value() < float(loss(point)) - 1e-12)
        assert found == violations


@pytest.mark.parametrize("num_inner_steps", [1, 7])
def test_the_losss_gradient_is_asked_for_once_a_step(num_inner_steps: int) -> None:
    inputs, wanted, weight = least_squares()
    calls = []

    def simulator(z: Tensor) -> tuple[float, Tensor]:
        calls.append(z)
        return float(half_squares(wanted)(z)), z.detach() - wanted

    optimizer = SSO([weight], lr=0.5, num_inner_steps=num_inner_steps)
    for _ in range(5):
        optimizer.step(lambda: inputs @ weight, simulator)
    assert len(calls) == 5


def test_more_inner_steps_need_fewer_gradients() -> None:
    """Logistic regression, n = 500, d = 30, scales 10^[-2, 0], η = 4: m = 10 is in 100 steps where m = 1 is in 400."""
    draw = seeded(3)
    inputs = torch.randn(500, 30, generator=draw, dtype=torch.float64) * torch.logspace(-2, 0, 30, dtype=torch.float64)
    truth = torch.randn(30, generator=draw, dtype=torch.float64) * torch.logspace(2, 0, 30, dtype=torch.float64)
    signs = torch.where(torch.rand(500, generator=draw, dtype=torch.float64) < torch.sigmoid(inputs @ truth), 1.0, -1.0)
    inner_step = 4 / float(torch.linalg.eigvalsh(inputs.T @ inputs)[-1])

    def final(num_steps: int, num_inner_steps: int) -> float:
        weight = nn.Parameter(torch.zeros(30, dtype=torch.float64))
        optimizer = SSO([weight], lr=4.0, num_inner_steps=num_inner_steps, search="fixed", inner_step=inner_step)
        losses = []
        for _ in range(num_steps):
            loss = optimizer.step(lambda: inputs @ weight, lambda z: nn.functional.softplus(-signs * z).sum())
            losses.append(float(loss))
        assert losses == sorted(losses, reverse=True)  # a bound from above: monotone
        return losses[-1]

    assert final(100, 10) <= final(400, 1) < final(100, 1)


def test_a_flat_surrogate_moves_nothing() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    SSO([weight]).step(lambda: weight * 1.0, lambda z: (0 * z).sum())
    assert weight.tolist() == [2.0]


def test_a_search_that_fails_leaves_the_parameters() -> None:
    """The model answers with another output each time, as under dropout: no step decreases the surrogate."""
    weight, calls = nn.Parameter(torch.tensor([2.0])), [0]

    def targets() -> Tensor:
        calls[0] += 1
        return weight * 1.0 + 100.0 * (calls[0] > 1)

    SSO([weight], num_inner_steps=3).step(targets, lambda z: (z**2).sum())
    assert weight.tolist() == [2.0]


def test_maximising_is_minimising_the_negation() -> None:
    inputs, wanted, weight = least_squares()
    other = nn.Parameter(weight.detach().clone())
    down, up = SSO([weight], lr=0.5), SSO([other], lr=0.5, maximize=True)
    for _ in range(3):
        down.step(lambda: inputs @ weight, half_squares(wanted))
        up.step(lambda: inputs @ other, lambda z: -half_squares(wanted)(z))
    assert torch.equal(weight, other)


def test_reset_starts_each_search_anew() -> None:
    inputs, wanted, weight = least_squares()
    optimizer = SSO([weight], num_inner_steps=1, reset=True, inner_step=1e-4, growth=1.0)
    for _ in range(3):
        optimizer.step(lambda: inputs @ weight, half_squares(wanted))
        assert float(optimizer.state[weight]["inner_step"]) == 1e-4


def test_without_reset_the_next_search_starts_from_the_last_length_and_with_it_from_the_first() -> None:
    """Each search's first trial is seen as the point at which the surrogate is first valued."""
    for reset in (False, True):
        weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
        optimizer = SSO([weight], lr=1.0, num_inner_steps=1, inner_step=8.0, growth=2.0, reset=reset)
        seen: list[Tensor] = []

        def targets(weight: nn.Parameter = weight, seen: list[Tensor] = seen) -> Tensor:
            seen.append(weight.detach().clone())
            return 3.0 * weight

        firsts = []
        for _ in range(3):
            seen.clear()
            optimizer.step(targets, lambda z: (z**2).sum() / 2)
            # q's gradient at θ_t is 9 θ_t, so the first trial stands at θ_t (1 − 9 step).
            firsts.append(float((1 - seen[1][0] / seen[0][0]) / 9))
            last = float(optimizer.state[weight]["inner_step"])
        assert firsts[0] == pytest.approx(8.0)
        if reset:
            assert firsts[1:] == pytest.approx([8.0, 8.0])
        else:
            assert firsts[2] < 1.0
            assert last <= firsts[2]


def by_hand(
    kind: str, inputs: Vector, theta: Vector, wanted: list[Vector], rows: list[list[int]], lr: float, inner_step: float
) -> Vector:
    """Two outer steps of three inner ones on Σ ℓ of Z = inputs Θ, gradients of q written out."""
    total, table = 0.0, np.zeros((5, theta.shape[1]))
    for labels, batch in zip(wanted, rows):
        x = inputs[batch]
        anchor = x @ theta
        p = softmax(anchor)
        d = p - labels
        total += float((d**2).sum())
        table[batch] += d**2
        for _ in range(3):
            change, now = x @ theta - anchor, softmax(x @ theta)
            bend = {
                "euclidean": change,
                "newton": p * change - p * (p * change).sum(1, keepdims=True),
                "adagrad": math.sqrt(total) * change,
                "diagonal": np.sqrt(table[batch]) * change,
                "kl": now - p,
            }[kind]
            theta = theta - inner_step * x.T @ (d + bend / lr)
    return theta


def softmax(z: Vector) -> Vector:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", ["euclidean", "newton", "adagrad", "diagonal", "kl"])
def test_every_proximal_term_is_the_equation_by_hand(kind: str) -> None:
    draw = np.random.default_rng(3)
    inputs, start = draw.normal(size=(5, 4)), draw.normal(size=(4, 3))
    rows = [[0, 3, 4], [4, 1, 0]]
    wanted = [np.eye(3)[draw.integers(3, size=3)] for _ in rows]
    weight = nn.Parameter(torch.from_numpy(start.copy()))
    table = (5, 3) if kind == "diagonal" else None
    optimizer = SSO([weight], lr=0.7, num_inner_steps=3, search="fixed", inner_step=0.02, proximal=kind, table=table)
    data = torch.from_numpy(inputs)
    for labels, batch in zip(wanted, rows):
        optimizer.step(
            lambda batch=batch: data[batch] @ weight,
            lambda z, labels=labels: -(torch.from_numpy(labels) * torch.log_softmax(z, -1)).sum(),
            rows=torch.tensor(batch),
        )
    expected = by_hand(kind, inputs, start, wanted, rows, 0.7, 0.02)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    once = RECORD.with_options(proximal=kind, table=table)
    assert sum(value.nbytes for value in kept) == once.once_bytes() + once.state_bytes((4, 3), "fp64")


def test_the_rate_in_target_space_is_the_line_search_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    scales = torch.tensor([1.0, 6.0], dtype=torch.float64)
    optimizer = SSO(
        [weight], lr=1.0, num_inner_steps=1, search="fixed", inner_step=0.1, target_search=True, sufficient=0.3
    )
    rate = 1.0 / 1.8
    for _ in range(4):
        z = weight.detach().clone()
        slope = scales * z
        rate *= 1.8
        while (scales * (z - rate * slope) ** 2).sum() / 2 > (scales * z**2).sum() / 2 - 0.3 * rate * (slope**2).sum():
            rate *= 0.9
        optimizer.step(lambda: weight * 1.0, lambda z: (scales * z**2).sum() / 2)
        assert float(optimizer.state[weight]["target_lr"]) == pytest.approx(rate, rel=1e-12)


def both(targets: Tensor) -> tuple[Tensor, Tensor]:
    return (targets**2).sum(), targets


def test_proximal_mistakes_are_named() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(UserError, match="needs the shape of its sums"):
        SSO([weight], proximal="diagonal")
    with pytest.raises(UserError, match="proximal among euclidean, newton"):
        SSO([weight], proximal="bregman")
    optimizer = SSO([weight], proximal="diagonal", table=(5, 2))
    with pytest.raises(UserError, match=r"a row each of `rows`; got targets \(3, 2\) and 2 rows"):
        optimizer.step(lambda: weight * 1.0, lambda z: (z**2).sum(), rows=torch.tensor([0, 1]))
    with pytest.raises(UserError, match="needs a loss that autograd sees through"):
        SSO([weight], proximal="newton").step(lambda: weight * 1.0, lambda z: (1.0, z))
    with pytest.raises(UserError, match="needs the loss of the targets"):
        SSO([weight], target_search=True).step(lambda: both(weight * 1.0))
    assert torch.equal(weight, torch.ones(3, 2))


def test_resume_is_bit_for_bit() -> None:
    inputs, wanted, weight = least_squares()
    optimizer = SSO([weight], lr=0.3)
    for _ in range(3):
        optimizer.step(lambda: inputs @ weight, half_squares(wanted))
    other = nn.Parameter(weight.detach().clone())
    again = SSO([other])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.step(lambda: inputs @ weight, half_squares(wanted))
        again.step(lambda: inputs @ other, half_squares(wanted))
    assert torch.equal(weight, other)


def test_sharded_parameters_take_the_same_steps(pool2: Pool) -> None:
    found = pool2.run("tests.second_order_cases:surrogates_on_shards")
    assert max(rank["worst"] for rank in found) < 1e-11


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: SSO([w], lr=-1.0), "lr of at least 0"),
        (lambda w: SSO([w], num_inner_steps=0), "num_inner_steps of at least 1"),
        (lambda w: SSO([w], search="wolfe"), "search 'armijo' or 'fixed'; got 'wolfe'"),
        (lambda w: SSO([w], inner_step=0.0), "inner_step above 0"),
        (lambda w: SSO([w], sufficient=1.0), r"sufficient in \(0, 1\)"),
        (lambda w: SSO([w], shrink=1.0), r"shrink in \(0, 1\)"),
        (lambda w: SSO([w], growth=0.5), "growth of at least 1"),
        (lambda w: SSO([w], fused=True), "fused False"),
        (lambda w: SSO([w], capturable=True), "capturable False"),
        (lambda w: SSO([{"params": [w]}, {"params": [nn.Parameter(torch.ones(1))]}]), "SSO needs one group"),
        (lambda w: SSO([w]).step(), "SSO needs a closure and a loss"),
        (lambda w: SSO([w]).step(lambda: w * 1), "SSO needs the loss of the targets"),
        (lambda w: SSO([w]).step(lambda: None, torch.sum), "targets with their graph; got NoneType"),
        (lambda w: SSO([w]).step(lambda: w.detach(), torch.sum), "got a tensor without a graph"),
        (lambda w: SSO([w]).step(lambda: w * 1, lambda z: (z * torch.nan).sum()), "SSO needs a finite loss; got nan"),
    ],
)
def test_mistakes_are_named_and_change_nothing(call: Callable[[Any], object], message: str) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    with pytest.raises(UserError, match=message):
        call(weight)
    assert weight.tolist() == [1.0, 2.0]


def test_newtons_proximal_term_is_half_the_hessians_form_with_its_product_for_a_slope() -> None:
    """½ ⟨c, H c⟩ and H c, c = z - z_t, of a loss that is no quadratic: H stays that of z_t."""
    targets, z = torch.tensor([0.3, -1.2], dtype=torch.float64), torch.tensor([1.1, 0.4], dtype=torch.float64)
    bend, _ = target_proximal(
        {"proximal": "newton"}, {}, torch.zeros(2), lambda t: (t**4).sum() + t.prod(), targets, None
    )
    assert bend is not None
    hessian = torch.tensor([[12 * 0.3**2, 1.0], [1.0, 12 * 1.2**2]], dtype=torch.float64)
    free = z.clone().requires_grad_()
    value = bend(free, targets)
    torch.testing.assert_close(value.detach(), (z - targets) @ hessian @ (z - targets) / 2)
    torch.testing.assert_close(torch.autograd.grad(value, free)[0], hessian @ (z - targets))
