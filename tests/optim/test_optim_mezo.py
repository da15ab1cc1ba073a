"""MeZO against its equations by hand, what it promises of memory, random numbers and precision."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.artifacts import UserError
from trainwright.numerics.normals import normals
from trainwright.optim.mezo import RECORD, MeZO, stochastically_rounded

SHAPES = ((3, 4), (5,), ())


def made(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) + 1) for shape in SHAPES
    ]


def loss_of(params: list[Any]) -> Any:
    return sum(((number + 1) * param**2 - param).sum() for number, param in enumerate(params))


def test_it_is_the_equations_by_hand() -> None:
    params = made()
    groups = [{"params": params[:1], "weight_decay": 0.1, "lr": 2e-3}, {"params": params[1:]}]
    optimizer = MeZO(groups, lr=1e-3, epsilon=1e-2, seed=7, exact=True)
    by_hand = [param.detach().numpy().copy() for param in params]
    for step in range(5):
        loss = optimizer.step(lambda: loss_of(params))
        z = [
            normals(max(1, value.size), (7, step, number)).double().numpy().reshape(value.shape)
            for number, value in enumerate(by_hand)
        ]
        sides = [loss_of([value + side * d for value, d in zip(by_hand, z)]) for side in (1e-2, -1e-2)]
        slope = (sides[0] - sides[1]) / 2e-2
        for number, (lr, decay) in enumerate(((2e-3, 0.1), (1e-3, 0.0), (1e-3, 0.0))):
            by_hand[number] = by_hand[number] - lr * (slope * z[number] + decay * by_hand[number])
        assert loss == pytest.approx(sum(sides) / 2, rel=1e-12)
        for param, value in zip(params, by_hand):
            np.testing.assert_allclose(param.detach().numpy(), value, rtol=1e-12, atol=1e-13)


def test_without_a_copy_the_steps_are_those_with_one_but_for_rounding() -> None:
    one, two = made(torch.float32), made(torch.float32)
    for params, exact in ((one, False), (two, True)):
        optimizer = MeZO(params, lr=1e-3, exact=exact)
        for _ in range(20):
            optimizer.step(lambda own=params: loss_of(own))
    for a, b in zip(one, two):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_run_that_is_loaded_goes_on_to_the_bit() -> None:
    params = made()
    optimizer = MeZO(params, lr=1e-3, seed=3, exact=True)
    for _ in range(3):
        optimizer.step(lambda: loss_of(params))
    others = copy.deepcopy(params)
    again = MeZO(others, lr=9.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, each in ((params, optimizer), (others, again)):
        for _ in range(3):
            each.step(lambda own=own: loss_of(own))
    assert all(torch.equal(a, b) for a, b in zip(params, others))


def test_both_forwards_drop_the_same_and_no_gradient_is_made() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    x, seen = torch.ones(3, 4), []

    def loss() -> torch.Tensor:
        assert not torch.is_grad_enabled()
        hidden = model[1](torch.ones(64))
        seen.append(hidden)
        return model(x).square().mean()

    optimizer = MeZO(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.step(loss)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])
    assert all(param.grad is None for param in model.parameters())
    assert not optimizer.state


def test_frozen_parameters_stay_and_the_others_draw_what_they_would() -> None:
    params = made()
    params[0].requires_grad_(False)
    before = params[0].detach().clone()
    optimizer = MeZO(params, lr=1e-3, exact=True)
    optimizer.step(lambda: loss_of(params[1:]))
    assert torch.equal(params[0], before)


def test_a_loss_that_is_not_finite_or_fails_leaves_the_parameters() -> None:
    params = made()
    before = copy.deepcopy(params)
    optimizer = MeZO(params, lr=1e-3, exact=True)
    optimizer.step(lambda: float("nan"))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert all(torch.equal(a, b) for a, b in zip(params, before))
    moved = MeZO(params, lr=1e-3)
    for which in (0, 1):
        calls = iter([*[lambda: 1.0] * which, lambda: 1 / 0])
        with pytest.raises(ZeroDivisionError):
            moved.step(lambda calls=calls: next(calls)())
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(params, before))


def test_steps_below_the_resolution_of_bf16_are_not_lost() -> None:
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = MeZO([weight], lr=1.0)
    z = normals(20_000, (0, 0, 0))
    optimizer.apply(1e-3)  # a step of 0.001 z, where the next number is 0.004 or 0.008 away
    moved = weight.detach().float() - 1
    assert (moved * z).mean().item() == pytest.approx(-1e-3, rel=0.15)
    assert set(moved.unique().tolist()) <= {-0.0078125, -0.00390625, 0.0, 0.0078125}
    values = torch.randn(1000)
    assert torch.equal(stochastically_rounded(values.bfloat16().float(), (1,)), values.bfloat16())


def test_tied_weights_move_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    optimizer = MeZO(model.parameters(), lr=0.0, exact=True)
    places: list[torch.Tensor] = []
    optimizer.step(lambda: places.append(model[1].weight.detach().clone()) or 0.0)
    z = normals(15, (0, 0, 0)).view(5, 3)
    torch.testing.assert_close(places[0], before + 1e-3 * z)
    assert torch.equal(model[1].weight, before)


def test_mistakes_are_said() -> None:
    weight = nn.Parameter(torch.ones(2))
    for wrong in ({"lr": -1.0}, {"epsilon": 0.0}, {"weight_decay": -0.1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            MeZO([weight], **wrong)
    with pytest.raises(UserError, match="closure"):
        MeZO([weight]).step()
    with pytest.raises(UserError, match="complex64"):
        MeZO([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(UserError, match="one epsilon"):
        MeZO([{"params": [weight], "epsilon": 0.1}, {"params": [nn.Parameter(torch.ones(1))], "epsilon": 0.2}])


def test_the_record_says_what_it_keeps() -> None:
    assert RECORD.state_bytes((10, 10)) == 0
    assert RECORD.needs_loss
    assert RECORD.cls is MeZO
