"""Steps written from their definitions: ReLU programmes, entropic transport, hopping, the turns of a reselection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright.artifacts import UserError
from trainwright.selection import CRAIG, LargestLoss, RandomSubset, Reselection, logit_gradients, selection, selections
from trainwright.solvers.consensus import CBO, ConsensusHopping
from trainwright.solvers.consensus.ensemble import Ensemble
from trainwright.solvers.convex_nets import (
    AdmmOptions,
    RobustReLUClassifier,
    sample_patterns,
    solve_relu_programme,
    sufficient_patterns,
)
from trainwright.solvers.convex_nets.gates import Gates
from trainwright.solvers.convex_nets.programme import _Admm
from trainwright.solvers.driver import Counts
from trainwright.solvers.transport import SnsOptions, solve_sinkhorn, solve_sns
from trainwright.solvers.transport.problem import make_problem
from trainwright.solvers.transport.sns import _Sns

Array = np.ndarray


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_admm_takes_the_steps_written_out() -> None:
    """Dense F and G, one solve, the blockwise shrinkage, the positive part, both duals with γ."""
    X, y, beta, rho, gamma = normal(9, 3, seed=0) + 0.4, normal(9, seed=1) + 1, 0.6, 0.7, 0.8
    patterns = sample_patterns(X, 5, seed=2)
    P, d, n = patterns.shape[1], 3, 9
    gated = [torch.diag(patterns[:, i].double()) @ X for i in range(P)]
    F = torch.cat([*gated, *(-part for part in gated)], 1)
    signs = [torch.diag(2 * patterns[:, i].double() - 1) @ X for i in range(P)]
    G = torch.block_diag(*signs, *signs)
    options = AdmmOptions(rho=rho, step=gamma)
    admm = _Admm(Gates(X, patterns), y, beta, "squared", options, Counts(), torch.Generator())
    state = admm.start()
    u = v = lam = torch.zeros(2 * P * d, dtype=torch.float64)
    s = nu = torch.zeros(2 * P * n, dtype=torch.float64)
    system = torch.eye(2 * P * d, dtype=torch.float64) + F.T @ F / rho + G.T @ G
    shrunk = 0
    for _ in range(6):
        state = admm.step(state)
        u = torch.linalg.solve(system, F.T @ y / rho + v - lam + G.T @ (s - nu))
        blocks = (u + lam).view(2 * P, d)
        sizes = blocks.norm(dim=1, keepdim=True)
        v = ((1 - beta / rho / sizes).clamp_min(0) * blocks).reshape(-1)
        shrunk += int((sizes <= beta / rho).sum())
        s = (G @ u + nu).clamp_min(0)
        lam, nu = lam + gamma * (u - v), nu + gamma * (G @ u - s)
        flat = lambda margins: margins.transpose(-1, -2).reshape(-1)  # noqa: E731
        for found, wanted in ((state.u.reshape(-1), u), (state.v.reshape(-1), v), (flat(state.s), s),
                              (state.lam.reshape(-1), lam), (flat(state.nu), nu)):  # fmt: skip
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert shrunk
    primal, dual = admm.residuals(state)
    assert primal == pytest.approx(float(torch.sqrt((u - v).square().sum() + (G @ u - s).square().sum())))
    assert dual == pytest.approx(float((F.T @ (F @ u - y) / rho + lam + G.T @ nu).norm()))
    objective = float((F @ v - y).square().sum() / 2 + beta * v.view(2 * P, d).norm(dim=1).sum())
    assert admm.objective(state.v) == pytest.approx(objective)


def test_the_logistic_step_minimises_what_is_written() -> None:
    """The slope of  Σ log(1 + exp(-y F u)) + ρ/2 (‖u - v + λ‖² + ‖G u - s + ν‖²)  vanishes at the step's u, for both ways."""
    X = normal(10, 2, seed=5) + 0.3
    y = torch.where(X[:, 0] * X[:, 1] > 0, 1.0, -1.0).double()
    patterns = sample_patterns(X, 6, seed=1)
    for inner, bar in (("newton", 1e-7), ("blocks", 3e-2)):
        options = AdmmOptions(rho=0.4, inner=inner, block_tolerance=1e-12)
        admm = _Admm(Gates(X, patterns), y, 0.05, "logistic", options, Counts(), torch.Generator().manual_seed(0))
        state = admm.start()
        for _ in range(25):
            before, state = state, admm.step(state)
        u = state.u.clone().requires_grad_()
        gates = admm.gates
        value = torch.nn.functional.softplus(-y * gates.output(u)).sum() + 0.2 * (
            (u - before.v + before.lam).square().sum() + (gates.margins(u) - before.s + before.nu).square().sum()
        )
        assert float(torch.autograd.grad(value, u)[0].norm()) < bar


def test_the_logistic_optimum_is_the_same_by_both_ways() -> None:
    X = normal(12, 2, seed=8) + 0.3
    y = torch.where(X[:, 0] > 0.2, 1.0, -1.0).double()
    patterns = sample_patterns(X, 6, seed=1)
    found = [
        solve_relu_programme(
            X, y, patterns, 0.2, loss="logistic", options=AdmmOptions(1.0, 1.0, inner), max_iterations=500, rtol=1e-6
        ).convex_fun
        for inner in ("newton", "blocks")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


A, B = np.array([0.2, 0.5, 0.3]), np.array([0.1, 0.25, 0.25, 0.4])
COST = np.array([[0.0, 0.7, 0.3, 0.9], [0.4, 0.1, 0.8, 0.2], [0.6, 0.5, 0.05, 0.35]])
REG = 0.11


def plan_of(f: Array, g: Array) -> Array:
    return np.exp((f[:, None] + g - COST) / REG)


def test_sinkhorn_takes_the_steps_written_out() -> None:
    f = np.zeros(3)
    g = REG * (np.log(B) - np.log(plan_of(f, np.zeros(4)).sum(0)))
    for k in range(1, 5):
        f = f + REG * (np.log(A) - np.log(plan_of(f, g).sum(1)))
        g = g + REG * (np.log(B) - np.log(plan_of(f, g).sum(0)))
        found = solve_sinkhorn(A, B, COST, REG, atol=1e-300, max_iterations=k)
        np.testing.assert_allclose(found.x[0].numpy(), f, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(found.x[1].numpy(), g, rtol=1e-10, atol=1e-13)
        error = np.abs(plan_of(f, g).sum(1) - A).sum() + np.abs(plan_of(f, g).sum(0) - B).sum()
        assert found.marginal_error == pytest.approx(error, abs=1e-14)


def dual(f: Array, g: Array) -> float:
    return float(A @ f + B @ g - REG * plan_of(f, g).sum())


def newton_by_hand(f: Array, g: Array, num_kept: int) -> tuple[Array, Array]:
    """A step on the dual whose Hessian keeps the largest entries of the plan and its diagonals whole."""
    plan = plan_of(f, g)
    kept = np.zeros(plan.size)
    places = np.argsort(plan.ravel())[-num_kept:]
    kept[places] = plan.ravel()[places]
    S = kept.reshape(plan.shape)
    matrix = np.block([[np.diag(plan.sum(1)), S], [S.T, np.diag(plan.sum(0))]]) / REG
    gradient = np.concatenate([A - plan.sum(1), B - plan.sum(0)])
    direction = np.linalg.lstsq(matrix, gradient, rcond=1e-12)[0]
    length = 1.0
    while (
        dual(f + length * direction[:3], g + length * direction[3:]) < dual(f, g) + 1e-4 * length * gradient @ direction
    ):
        length /= 2
    return f + length * direction[:3], g + length * direction[3:]


@pytest.mark.parametrize("density", [1.5, 2.0])
def test_sns_takes_the_steps_written_out(density: float) -> None:
    """Two Sinkhorn steps, then Newton steps on `density` · max(n, m) entries of the plan, lengths by Armijo's rule."""
    options = SnsOptions(num_sinkhorn=2, density=density, adaptive=False, cg_rtol=1e-13)
    start = solve_sinkhorn(A, B, COST, REG, atol=1e-300, max_iterations=2)
    f, g = (part.numpy() for part in start.x)
    states: list[Any] = []
    found = solve_sns(A, B, COST, REG, atol=1e-300, max_iterations=5, options=options,
                      callback=lambda moment: states.append(moment.state))  # fmt: skip
    assert (found.num_sinkhorn, found.num_newton) == (2, 3)
    for k in range(3, 6):
        f, g = newton_by_hand(f, g, round(density * 4))
        np.testing.assert_allclose(plan_of(states[k].f.numpy(), states[k].g.numpy()), plan_of(f, g), rtol=1e-8)
        assert states[k].dual == pytest.approx(dual(f, g), rel=1e-10)
        assert dual(f, g) > dual(*(part.numpy() for part in start.x))


def test_the_adaptive_rules_are_those_that_are_told() -> None:
    """Slow full steps double the entries, up to the share; short ones damp from 1e-4 on, tenfold; full ones undo it."""
    cost = torch.rand(20, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method = _Sns(make_problem([], [], cost, 0.01), SnsOptions(density=2.0, max_share=0.3))
    assert (method.num_kept, method.most_kept, method.sinkhorn_left) == (40, 120, 8)
    from trainwright.solvers.transport.sinkhorn import start

    slow = start(method.problem, method.counts)
    method._learn(slow, slow, 1.0)
    assert (method.num_kept, method.damping) == (80, 0.0)
    method._learn(slow, slow, 1.0)
    assert method.num_kept == 120
    for wanted in (1e-4, 1e-3):
        method._learn(slow, slow, 0.5)
        assert method.damping == pytest.approx(wanted)
    method._learn(slow, None, 0.0)
    assert method.damping == pytest.approx(1e-2)
    method.num_kept = 40
    for wanted in (1e-3, 1e-4, 0.0):
        method._learn(slow, slow, 1.0)
        assert method.damping == pytest.approx(wanted, abs=1e-12)
        assert method.num_kept == 40  # a step that was damped is slow for that reason
    method._learn(slow, slow, 1.0)
    assert method.num_kept == 80


def test_a_hop_samples_around_the_point_with_its_noise_at_that_time() -> None:
    """x + σ · decay^⌊k/every⌋ ξ; the first sample is around x0, the next around the consensus of the values."""
    method = ConsensusHopping(noise=0.5, alpha=3.0, decay=0.5, decay_every=2)
    points = normal(4, 2, seed=3)
    values = torch.tensor([0.1, 0.4, 0.2, 1.0], dtype=torch.float64)
    weights = np.exp(-3.0 * (values.numpy() - 0.1))
    consensus = (weights / weights.sum()) @ points.numpy()
    ensemble = Ensemble.of(points, values, method.alpha, None)
    for nit, noise in ((0, 0.5), (1, 0.25), (2, 0.25), (3, 0.125)):
        found = method.propose(
            Ensemble(points, values, ensemble.consensus, nit, points[0], 0.1), torch.Generator().manual_seed(9)
        )
        wanted = consensus + noise * normal(4, 2, seed=9).numpy()
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


def test_renoising_wakes_an_ensemble_that_agrees_and_no_other() -> None:
    values = torch.tensor([0.3, 0.9], dtype=torch.float64)
    for width, woken in ((1e-5, True), (1.0, False)):
        points = width * normal(2, 3, seed=1)
        method = CBO(renoise=0.5, renoise_below=1e-3)
        found = method.propose(Ensemble.of(points, values, 30.0, None), torch.Generator().manual_seed(0))
        assert (float((found - points).norm()) > 0.3) is woken or not woken
        plain = CBO().propose(Ensemble.of(points, values, 30.0, None), torch.Generator().manual_seed(0))
        assert torch.equal(found, plain) is not woken


def test_the_best_point_is_kept_over_ensembles() -> None:
    points, values = normal(3, 2, seed=1), torch.tensor([0.4, 0.1, 0.7], dtype=torch.float64)
    first = Ensemble.of(points, values, 1.0, None)
    worse = Ensemble.of(points + 1, values + 1, 1.0, first)
    better = Ensemble.of(points + 2, values - 1, 1.0, worse)
    for found, place, value in ((first, points[1], 0.1), (worse, points[1], 0.1), (better, points[1] + 2, -0.9)):
        torch.testing.assert_close(found.best_x, place)
        assert found.best_fun == pytest.approx(value)
    assert (first.nit, worse.nit, better.nit) == (0, 1, 2)


def turns(warm_up: int, every: int, num_epochs: int) -> list[int]:
    """The epochs before which a choice was made."""
    data = TensorDataset(normal(24, 3, seed=0).float(), torch.arange(24) % 2)
    batches = Reselection(data, nn.Linear(3, 2), CRAIG(0.25), every=every, warm_up=warm_up, batch_size=6)
    found, sizes = [], []
    for epoch in range(num_epochs):
        before = batches.num_selections
        sizes.append(sum(len(weight) for _, _, weight in batches))
        found += [epoch] * (batches.num_selections - before)
    assert sizes == [24 if epoch < warm_up else 6 for epoch in range(num_epochs)]
    return found


@pytest.mark.parametrize(
    ("warm_up", "every", "wanted"),
    [(0, 1, [0, 1, 2, 3, 4, 5, 6]), (0, 3, [0, 3, 6]), (3, 2, [3, 5]), (4, 2, [4, 6]), (2, 5, [2])],
)
def test_choices_fall_due_after_the_warm_up_and_every_so_many_epochs(
    warm_up: int, every: int, wanted: list[int]
) -> None:
    assert turns(warm_up, every, 7) == wanted


def test_craigs_weights_are_the_sizes_of_the_clusters_of_each_class() -> None:
    """γ_j counts the points of j's class nearest to j; the budget is shared by largest remainders, classes in order."""
    rows, labels = normal(30, 2, seed=4), torch.tensor([0] * 18 + [1] * 12)
    chosen = CRAIG(budget=5).fit(rows, labels)
    assert labels[chosen.indices_].tolist() == [0, 0, 0, 1, 1]
    total = 0.0
    for label in (0, 1):
        own, picked = (labels == label).nonzero().flatten(), chosen.indices_[labels[chosen.indices_] == label]
        distances = (rows[own][:, None] - rows[picked][None]).norm(dim=-1)
        wanted = torch.bincount(distances.argmin(1), minlength=len(picked))
        assert chosen.weights_[labels[chosen.indices_] == label].tolist() == wanted.tolist()
        total += float(distances.min(1).values.sum())
    assert chosen.objective_ == pytest.approx(total)


def test_random_weights_are_those_of_the_classes() -> None:
    labels = torch.tensor([0] * 18 + [1] * 12)
    chosen = RandomSubset(budget=5, seed=1).fit(torch.zeros(30, 1), labels)
    assert chosen.weights_.tolist() == [6.0, 6.0, 6.0, 6.0, 6.0]
    equal = RandomSubset(budget=4, per_class="equal").fit(torch.zeros(30, 1), labels)
    assert equal.weights_.tolist() == [9.0, 9.0, 6.0, 6.0]
    normalised: Any = RandomSubset(budget=4, per_class="equal", normalise=True).fit(torch.zeros(30, 1), labels)
    assert normalised.weights_.tolist() == pytest.approx([1.2, 1.2, 0.8, 0.8])
    assert math.isclose(float(normalised.weights_.sum()), 4.0, rel_tol=1e-6)


def test_the_largest_losses_are_chosen_of_each_class() -> None:
    """From softmax - one-hot the loss is read off exactly; the same from the losses themselves."""
    logits, labels = normal(20, 3, seed=6), torch.arange(20) % 3
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted = []
    for label, size in ((0, 3), (1, 3), (2, 2)):  # ⌈0.4 · 7⌉, ⌈0.4 · 7⌉, ⌈0.3…⌉ by class_sizes of the fraction
        own = (labels == label).nonzero().flatten()
        wanted.append(own[losses[own].argsort(descending=True)[: math.ceil(0.33 * len(own))]].tolist())
        assert size == len(wanted[-1])
    by_gradients = LargestLoss(0.33).fit(logit_gradients(logits, labels), labels)
    by_losses = LargestLoss(0.33).fit(losses, labels)
    for chosen in (by_gradients, by_losses):
        assert chosen.indices_.tolist() == [*wanted[0], *wanted[1], *wanted[2]]
        assert chosen.weights_.tolist() == [1.0] * 8
    assert LargestLoss(budget=1).fit(losses).indices_.tolist() == [int(losses.argmax())]
    for rows, y, message in (
        (logit_gradients(logits, labels), None, "class numbers from 0 to 2 are needed .* got none"),
        (logit_gradients(logits, labels), labels + 1, "from 1 to 3"),
        (logits, labels, "gradients at the logits, softmax - one-hot, are needed"),
    ):
        with pytest.raises(UserError, match=message):
            LargestLoss().fit(rows, y)


@pytest.mark.parametrize("name", [each.name for each in selections()])
def test_every_way_to_select_trains_on_what_it_says(name: str) -> None:
    way, logits, labels = selection(name), normal(30, 3, seed=6), torch.arange(30) % 3
    chosen = way.make(0.2, 0).fit(logit_gradients(logits, labels), labels)
    places, weights = torch.as_tensor(chosen.indices_), torch.as_tensor(chosen.weights_)
    size = 30 if name == "augment-all" else 6
    assert len(places) == size
    if way.compose is not None:
        indices, weights, strong = way.compose(30, places, weights)
        assert indices[strong].tolist() == places.tolist()
        assert int((~strong).sum()) == (6 if name == "augment-coreset" else 30)
        if name == "augment-all":
            assert sorted(indices[strong].tolist()) == list(range(30))
            assert weights.tolist() == [1.0] * 60
    if name == "largest-loss":
        assert weights.tolist() == [1.0] * 6


@pytest.mark.parametrize(("n", "psi", "xi"), [(30, 0.05, 0.05), (30, 0.5, 0.5), (7, 0.9, 0.01), (7, 0.01, 0.9)])
def test_sufficient_patterns_are_the_least_of_both_bounds(n: int, psi: float, xi: float) -> None:
    found = sufficient_patterns(n, psi, xi)

    def holds(num: int) -> bool:
        by_mean = (n + 1) / (num + 1) <= psi * xi * (1 + 1e-12)  # Markov on the mean violation
        return by_mean or psi * num / 2 >= n + 1 - math.log(xi) - 1e-9

    assert holds(found)
    assert not holds(found - 1)
    with pytest.raises(UserError, match=r"in \(0, 1\)"):
        sufficient_patterns(n, 1.0, xi)


def test_a_level_step_of_sns_counts_only_where_it_comes_closer() -> None:
    """Within the rounding of the dual, nearer marginals decide."""
    cost = normal(4, 4, seed=2).abs()
    method = _Sns(make_problem(None, None, cost, 0.3), SnsOptions())
    zeros = torch.zeros(4, dtype=torch.float64)
    state = method._evaluated(zeros, zeros)
    farther = replace(state, log_rows=state.log_rows + 1.0)
    nothing = torch.zeros(8, dtype=torch.float64)
    assert method._rises(state, state, 0.0, nothing)
    assert not method._rises(state, farther, 0.0, nothing)


def test_a_fitted_robust_network_may_shift_features_and_not_the_intercept() -> None:
    """Two points on one side of the origin, which no network without an intercept tells apart."""
    pytest.importorskip("cvxpy")
    X, eps = torch.tensor([[10.0], [11.0]], dtype=torch.float64), 0.1
    robust = RobustReLUClassifier(eps, 1e-4, num_patterns=20).fit(X, torch.tensor([0, 1]))
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    worst = [(1 - signs * robust.decision_function(X + shift)).clamp_min(0.0) for shift in (-eps, eps)]
    assert robust.worst_hinge_ == pytest.approx(float(torch.stack(worst).max(0).values.mean()), abs=1e-3)
    assert robust.predict(X).tolist() == [0, 1]
