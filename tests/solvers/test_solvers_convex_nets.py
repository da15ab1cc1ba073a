"""Convex ReLU networks: against an exact conic solution and Adam, optimality by hand, worst cases by corners, wrong inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.solvers import convex_nets
from trainwright.solvers.convex_nets import (
    AdmmOptions,
    ReLUClassifier,
    ReLURegressor,
    RobustReLUClassifier,
    TwoLayerReLU,
    enumerate_patterns,
    recover,
    sample_patterns,
    solve_relu_programme,
)
from trainwright.solvers.convex_nets.gates import Gates, InverseSystem
from trainwright.solvers.convex_nets.newton import OutputNewton
from trainwright.solvers.outcome import Status


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def curve(num: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A noisy sine off the origin, with a column of ones."""
    generator = seeded(seed)
    x = torch.linspace(-1, 3, num, dtype=torch.float64) + 0.05 * torch.randn(
        num, generator=generator, dtype=torch.float64
    )
    y = torch.sin(2 * x) + 0.3 + 0.1 * torch.randn(num, generator=generator, dtype=torch.float64)
    return torch.stack([x, torch.ones_like(x)], 1), y


def dense(gates: Gates) -> tuple[Tensor, Tensor]:
    """F and G as matrices, from their action on every unit vector."""
    _, num_patterns, d = gates.shape
    units = torch.eye(2 * num_patterns * d, dtype=torch.float64).view(-1, 2, num_patterns, d)
    F = torch.stack([gates.output(unit) for unit in units], 1)
    G = torch.stack([gates.margins(unit).flatten() for unit in units], 1)
    return F, G


@pytest.mark.parametrize(("n", "d", "num"), [(7, 3, 5), (40, 2, 4), (5, 4, 2)])
def test_the_maps_are_their_definition_and_the_system_is_solved(n: int, d: int, num: int) -> None:
    """Both ways of factoring: fewer examples than weights, and more."""
    X = 1.5 + torch.randn(n, d, generator=seeded(1), dtype=torch.float64) * torch.tensor([10.0, 1, 0.1, 1])[:d]
    patterns = sample_patterns(X, 40, seeded(2))[:, :num]
    gates = Gates(X, patterns)
    _, P, _ = gates.shape
    F, G = dense(gates)
    by_hand = torch.cat([patterns[:, i, None] * X for i in range(P)], 1)
    torch.testing.assert_close(F, torch.cat([by_hand, -by_hand], 1))
    signs = 2.0 * patterns.double() - 1
    blocks = torch.block_diag(*[(signs[:, i, None] * X) for i in range(P)] * 2).view(2, P, n, -1)
    torch.testing.assert_close(G, blocks.transpose(1, 2).reshape(2 * n * P, -1))
    r = torch.randn(n, generator=seeded(3), dtype=torch.float64)
    s = torch.randn(2, n, P, generator=seeded(4), dtype=torch.float64)
    torch.testing.assert_close(gates.output_adjoint(r).flatten(), F.T @ r)
    torch.testing.assert_close(gates.margins_adjoint(s).flatten(), G.T @ s.flatten())
    b = torch.randn(2, P, d, generator=seeded(5), dtype=torch.float64)
    system = torch.eye(2 * P * d, dtype=torch.float64) + F.T @ F / 0.3 + G.T @ G
    torch.testing.assert_close(InverseSystem(gates, 0.3).solve(b).flatten(), torch.linalg.solve(system, b.flatten()))


def exactly(X: Tensor, y: Tensor, patterns: Tensor, beta: float, loss: str) -> float:
    """The programme's optimum by an interior-point solver."""
    cp = pytest.importorskip("cvxpy")
    rows, passes = X.numpy(), patterns.numpy().astype(float)
    v, w = (cp.Variable((passes.shape[1], X.shape[1])) for _ in range(2))
    output = cp.sum(cp.multiply(passes @ (v - w), rows), axis=1)
    fit = cp.sum_squares(output - y.numpy()) / 2
    if loss == "logistic":
        fit = cp.sum(cp.logistic(-cp.multiply(y.numpy(), output)))
    decay = beta * cp.sum(cp.norm(v, 2, axis=1) + cp.norm(w, 2, axis=1))
    constraints = [cp.multiply(2 * passes - 1, rows @ each.T) >= 0 for each in (v, w)]
    problem = cp.Problem(cp.Minimize(fit + decay), constraints)
    problem.solve(solver="CLARABEL")
    return float(problem.value)


def by_adam(X: Tensor, y: Tensor, beta: float, num_units: int, seed: int, steps: int = 3000) -> float:
    """The non-convex training objective after a long run."""
    generator = seeded(seed)
    hidden = torch.randn(X.shape[1], num_units, generator=generator, dtype=torch.float64).requires_grad_()
    output = (0.3 * torch.randn(num_units, generator=generator, dtype=torch.float64)).requires_grad_()
    adam = torch.optim.Adam([hidden, output], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        fit = ((X @ hidden).relu() @ output - y).square().sum() / 2
        loss = fit + beta / 2 * (hidden.square().sum() + output.square().sum())
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return float(loss.detach())


def test_all_patterns_of_two_features_are_twice_the_examples() -> None:
    X, _ = curve()
    patterns = enumerate_patterns(X)
    assert patterns.shape == (30, 59)  # 60 less the one that passes nothing
    angles = torch.linspace(0, 2 * math.pi, 200_000, dtype=torch.float64)
    swept = X @ torch.stack([angles.cos(), angles.sin()]) >= 0
    assert set(map(tuple, swept.T.unique(dim=0).tolist())) - {(False,) * 30} == set(map(tuple, patterns.T.tolist()))


@pytest.mark.slow
def test_over_all_patterns_the_optimum_is_reached_and_adam_finds_no_better_network() -> None:
    X, y = curve()
    found = solve_relu_programme(X, y, enumerate_patterns(X), 0.1, max_iterations=4000, rtol=1e-5)
    optimum = exactly(X, y, enumerate_patterns(X), 0.1, "squared")
    assert found.convex_fun == pytest.approx(optimum, rel=1e-3)
    assert found.fun == pytest.approx(found.convex_fun, abs=1e-4)  # the network's own objective
    assert found.primal_residual < 1e-3
    adam = by_adam(X, y, 0.1, 60, 0, steps=2000)
    assert adam >= optimum * (1 - 1e-4)
    assert found.fun <= adam * (1 + 1e-3)
    assert by_adam(X, y, 0.1, 3, 0, steps=1000) > found.fun  # three units are too few


def test_the_last_iterate_meets_the_optimality_conditions() -> None:
    """F'(F u - y) + ρ(λ + G'ν) = 0, ρ λ a subgradient of β Σ‖·‖, ν ≤ 0 where s = 0, by dense matrices."""
    X, y = curve(18, seed=3)
    rho, beta, states = 0.1, 0.1, []
    solve_relu_programme(X, y, enumerate_patterns(X), beta, options=AdmmOptions(rho), max_iterations=4000, rtol=1e-6,
                         callback=lambda moment: states.append(moment.state))  # fmt: skip
    gates, last = Gates(X, enumerate_patterns(X)), states[-1]
    F, G = dense(gates)
    slope = F.T @ (F @ last.u.flatten() - y) + rho * (last.lam.flatten() + G.T @ last.nu.flatten())
    assert float(slope.norm()) < 1e-3 * float((F.T @ y).norm())
    norms = last.v.norm(dim=-1)
    assert float((rho * last.lam.norm(dim=-1)).max()) <= beta * (1 + 1e-6)
    away = norms > 1e-3
    assert away.any()
    torch.testing.assert_close(rho * last.lam[away], beta * (last.v / norms[..., None])[away], atol=1e-5, rtol=1e-5)
    assert float(last.nu.max()) <= 1e-9
    assert float((last.nu * last.s).abs().max()) < 1e-9


def test_fewer_patterns_fit_worse_and_the_gap_is_not_hidden() -> None:
    X, y = curve()
    everything = enumerate_patterns(X)
    order = torch.randperm(everything.shape[1], generator=seeded(1))
    funs = [solve_relu_programme(X, y, everything[:, order[:k]], 0.1, rtol=1e-4).convex_fun for k in (6, 20, 59)]
    assert funs[0] > funs[1] * 1.01 > funs[2]


@pytest.mark.slow  # hundreds of iterations
def test_the_logistic_loss_comes_to_the_same_as_the_exact_solver() -> None:
    X, y = curve(20, seed=2)
    labels, patterns = torch.where(y > 0.3, 1.0, -1.0).double(), enumerate_patterns(X)[:, ::3]
    optimum = exactly(X, labels, patterns, 0.2, "logistic")
    found = solve_relu_programme(X, labels, patterns, 0.2, loss="logistic", options=AdmmOptions(0.1), rtol=1e-5)
    assert found.convex_fun == pytest.approx(optimum, rel=1e-3)
    assert found.fun == pytest.approx(found.convex_fun, rel=1e-3)
    assert found.num_inner > 0
    blocks = solve_relu_programme(X, labels, patterns, 0.2, loss="logistic", options=AdmmOptions(0.3, inner="blocks"),
                                  max_iterations=200, rtol=1e-5)  # fmt: skip
    assert blocks.convex_fun == pytest.approx(optimum, rel=0.05)  # inexact first steps
    assert blocks.status is Status.MAX_ITERATIONS
    assert "rho" in blocks.message


def test_newton_in_the_outputs_minimises_over_the_weights() -> None:
    """The gradient over all weights by autograd is zero at what it returns."""
    X, y = curve(12, seed=7)
    labels, rho = torch.where(y > 0.3, 1.0, -1.0).double(), 0.05
    gates = Gates(X * torch.tensor([20.0, 0.1], dtype=torch.float64), enumerate_patterns(X)[:, :5])
    generator = seeded(8)
    centre = 3 * torch.randn(2, 5, 2, generator=generator, dtype=torch.float64)
    margins = 3 * torch.randn(2, 12, 5, generator=generator, dtype=torch.float64)
    newton = OutputNewton(gates, InverseSystem(gates, rho), labels, "logistic", rho, 1e-12)
    u, num_steps = newton.minimise(torch.zeros_like(centre), centre, margins)
    u.requires_grad_()
    far = (u - centre).square().sum() + (gates.margins(u) - margins).square().sum()
    total = torch.log1p(torch.exp(-labels * gates.output(u))).sum() + rho / 2 * far
    (gradient,) = torch.autograd.grad(total, u)
    assert float(gradient.abs().max()) < 1e-8
    assert 0 < num_steps < 20


def test_a_relative_step_below_one_comes_to_the_same() -> None:
    X, y = curve(15, seed=4)
    patterns = enumerate_patterns(X)
    one, other = (
        solve_relu_programme(X, y, patterns, 0.1, options=AdmmOptions(0.1, step), max_iterations=4000, rtol=1e-5)
        for step in (1.0, 0.4)
    )
    assert one.fun == pytest.approx(other.fun, rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_recovery_keeps_outputs_and_decay(num_patterns: int, d: int, seed: int) -> None:
    """Σ relu(X u) a = Σ relu(X v) - Σ relu(X w) for any v, and β/2 Σ(‖u‖² + a²) = β Σ‖v‖."""
    generator = seeded(seed)
    v = torch.randn(2, num_patterns, d, generator=generator, dtype=torch.float64)
    v[0, 0] = 0.0
    X = 1 + torch.randn(9, d, generator=generator, dtype=torch.float64)
    net = recover(v)
    assert net.hidden.shape == (d, 2 * num_patterns - 1)
    units = (X @ v.transpose(-1, -2)).relu().sum(-1)
    torch.testing.assert_close(net(X), units[0] - units[1])
    y = torch.zeros(9, dtype=torch.float64)
    decay = net.objective(X, y, 3.0) - float(net(X).square().sum() / 2)
    assert decay == pytest.approx(3.0 * float(v.norm(dim=-1).sum()))


def test_a_large_decay_leaves_no_unit() -> None:
    X, y = curve(12)
    found = solve_relu_programme(X, y, enumerate_patterns(X), 1e3, rtol=1e-3)
    assert found.x.output.numel() == 0
    assert found.fun == pytest.approx(float(y.square().sum() / 2))


def test_estimators_speak_scikit_learns_dialect() -> None:
    X, y = curve(40, seed=5)
    net = ReLURegressor(1e-2, num_patterns=40, keep_history=True, max_iterations=1500, rtol=1e-4)
    predicted = net.fit(X[:, :1].numpy(), y.numpy()).predict(X[:, :1].numpy())
    assert isinstance(predicted, np.ndarray)
    assert np.mean((predicted - y.numpy()) ** 2) < 0.1 * float(y.var())
    assert net.objective_ == pytest.approx(net.network_.objective(X, y, 1e-2))
    assert net.history_["residual"][-1] < net.history_["residual"][0]
    assert net.n_iter_ == int(net.history_["nit"][-1])
    again = ReLURegressor(1e-2, num_patterns=40, max_iterations=1500, rtol=1e-4).fit(X[:, :1], y)
    assert isinstance(again.predict(X[:, :1]), Tensor)
    assert again.objective_ == net.objective_
    labels = np.where(y.numpy() > 0.3, "high", "low")
    classes = ReLUClassifier(1e-2, num_patterns=20, rho=0.3, max_iterations=40).fit(X[:, :1].numpy(), labels)
    assert classes.classes_.tolist() == ["high", "low"]
    assert np.mean(classes.predict(X[:, :1].numpy()) == labels) > 0.9
    np.testing.assert_allclose(classes.predict_proba(X[:, :1].numpy()).sum(1), 1.0)


def two_moons(num: int = 24) -> tuple[Tensor, Tensor]:
    generator = seeded(6)
    labels = torch.arange(num) % 2
    turn = math.pi * torch.rand(num, generator=generator, dtype=torch.float64)
    x = torch.where(labels == 0, turn.cos(), 1 - turn.cos()) + 2
    y = torch.where(labels == 0, turn.sin(), 0.4 - turn.sin())
    return torch.stack([x, y], 1), labels


def test_the_robust_objective_is_the_worst_case_over_all_corners() -> None:
    pytest.importorskip("cvxpy")
    X, labels = two_moons()
    eps, signs = 0.05, 2.0 * labels - 1
    robust = RobustReLUClassifier(eps, 1e-2, num_patterns=30).fit(X, labels)
    corners = [eps * torch.tensor(corner, dtype=torch.float64) for corner in itertools.product((-1, 1), repeat=2)]
    hinges = torch.stack([(1 - signs * robust.decision_function(X + corner)).clamp_min(0.0) for corner in corners])
    assert robust.worst_hinge_ == pytest.approx(float(hinges.max(0).values.mean()), abs=1e-4)
    inside = eps * (2 * torch.rand(200, *X.shape, generator=seeded(7), dtype=torch.float64) - 1)
    sampled = torch.stack([(1 - signs * robust.decision_function(X + shift)).clamp_min(0.0) for shift in inside])
    assert float(sampled.max(0).values.mean()) <= robust.worst_hinge_ + 1e-6
    plain = RobustReLUClassifier(0.0, 1e-2, num_patterns=30).fit(X, labels)
    attacked = torch.stack([(1 - signs * plain.decision_function(X + corner)).clamp_min(0.0) for corner in corners])
    assert float(attacked.max(0).values.mean()) > robust.worst_hinge_
    assert plain.objective_ < robust.objective_
    assert float((plain.predict(X) == labels).double().mean()) > 0.8


def test_without_cvxpy_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cvxpy", None)
    with pytest.raises(UserError, match="needs the package cvxpy; it is not installed; try pip install cvxpy"):
        RobustReLUClassifier(0.1).fit(*two_moons())


def wrong(**changes: Any) -> Any:
    X, y = curve(8)
    given: dict[str, Any] = {"X": X, "y": y, "patterns": enumerate_patterns(X), "beta": 0.1, **changes}
    return solve_relu_programme(given.pop("X"), given.pop("y"), given.pop("patterns"), given.pop("beta"), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.zeros(3, dtype=torch.float64)}, r"X \[n, d\] and y \[n\] of one floating dtype"),
        ({"y": torch.zeros(8)}, "of one floating dtype"),
        ({"patterns": torch.ones(8, 2)}, r"boolean patterns \[8, P\] are needed; got \[8, 2\] torch.float32"),
        ({"X": torch.full((8, 2), math.nan, dtype=torch.float64)}, "finite X and y"),
        ({"loss": "hinge"}, "a loss of squared, logistic is needed; got 'hinge'"),
        ({"loss": "logistic"}, "labels of -1 and 1"),
        ({"beta": -1.0}, "beta of at least 0"),
        ({"max_iterations": -1}, "max_iterations of at least 0"),
    ],
)
def test_wrong_problems_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrong(**changes)


@pytest.mark.parametrize(
    "options", [{"rho": 0.0}, {"step": 1.5}, {"step": 0.0}, {"block_tolerance": 0.0}, {"newton_tolerance": 0.0}]
)
def test_wrong_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="rho > 0, step in"):
        AdmmOptions(**options)
    with pytest.raises(UserError, match="inner of newton, blocks"):
        AdmmOptions(inner="exact")


def test_wrong_inputs_of_estimators_are_refused() -> None:
    X, y = curve(8)
    with pytest.raises(UserError, match=r"X of shape \[n, d\]"):
        ReLURegressor().fit(y, y)
    with pytest.raises(UserError, match="a finite X"):
        ReLURegressor().fit(X * math.inf, y)
    with pytest.raises(UserError, match="call fit"):
        ReLURegressor().predict(X)
    with pytest.raises(UserError, match="X with 2 features is needed; got 1"):
        ReLURegressor(max_iterations=3).fit(X, y).predict(X[:, :1])
    with pytest.raises(UserError, match="labels of two classes are needed; got 1"):
        ReLUClassifier().fit(X, np.zeros(8))
    with pytest.raises(UserError, match="at least 1 pattern"):
        ReLURegressor(num_patterns=0).fit(X, y)
    with pytest.raises(UserError, match="eps and beta"):
        RobustReLUClassifier(-1.0)
    with pytest.raises(UserError, match="one label an example"):
        RobustReLUClassifier(0.1).fit(X, [0, 1, 0])
    with pytest.raises(UserError, match=r"X of shape \[n, 2\]"):
        enumerate_patterns(torch.ones(3, 3))


def test_every_public_name_is_documented() -> None:
    assert all(getattr(convex_nets, name).__doc__ for name in convex_nets.__all__)
    assert isinstance(recover(torch.zeros(2, 1, 3)), TwoLayerReLU)
