"""Sophia against float64 oracles by hand, and the published properties of its two estimators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainwright.numerics import hvp
from trainwright.numerics.seeds import seeded
from trainwright.optim.sophia import SophiaG, SophiaH, sampled_cross_entropy


def softmax_regression() -> tuple[Tensor, Tensor, nn.Parameter]:
    draw = seeded(0)
    inputs = torch.randn(64, 5, generator=draw, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(4, 5, generator=draw, dtype=torch.float64))
    return inputs, torch.randint(4, (64,), generator=draw), weight


def gauss_newton_diagonal(inputs: Tensor, weight: Tensor) -> Tensor:
    """mean_i p_c (1 - p_c) x_j², [classes, features]."""
    shares = (inputs @ weight.T).softmax(-1).detach()
    return torch.einsum("nc,nf->cf", shares * (1 - shares), inputs**2) / len(inputs)


@pytest.mark.parametrize(("num_draws", "bound"), [(1500, 0.06), pytest.param(20000, 0.015, marks=pytest.mark.slow)])
def test_sampled_gradients_are_unbiased_for_the_gauss_newton_diagonal(num_draws: int, bound: float) -> None:
    """Published check: 20 000 resamplings, relative error 0.010; the true labels give 13.7."""
    inputs, labels, weight = softmax_regression()
    optimizer, total = SophiaG([weight], betas=(0.9, 0.0)), torch.zeros_like(weight)
    draw = seeded(2)
    for _ in range(num_draws):
        optimizer.update_hessian(lambda: sampled_cross_entropy(inputs @ weight.T, draw), num_loss_terms=64)
        total += optimizer.state[weight]["hessian"]
    exact = gauss_newton_diagonal(inputs, weight)
    assert (total / num_draws - exact).norm() / exact.norm() < bound
    optimizer.update_hessian(lambda: nn.functional.cross_entropy(inputs @ weight.T, labels), num_loss_terms=64)
    assert (optimizer.state[weight]["hessian"] - exact).norm() / exact.norm() > 10


def test_sophia_g_is_the_equations_by_hand() -> None:
    """25 steps, a refresh after every fifth, in float64 by the script's order; B g² with the sampled labels."""
    inputs, labels, weight = softmax_regression()
    theta, m, h = weight.detach().clone(), torch.zeros(4, 5), torch.zeros(4, 5)
    optimizer = SophiaG([weight], lr=0.02, betas=(0.9, 0.8), gamma=0.4, weight_decay=0.3, update_period=5)
    draws, shares = (seeded(7), seeded(7)), []
    for step in range(25):
        if optimizer.hessian_due:
            optimizer.update_hessian(lambda: sampled_cross_entropy(inputs @ weight.T, draws[0]), num_loss_terms=64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(inputs @ weight.T, labels).backward()
        optimizer.step()

        probability = (inputs @ theta.T).softmax(-1)
        if step >= 5 and step % 5 == 0:
            sampled = torch.multinomial(probability.float(), 1, generator=draws[1])[:, 0]
            residual = probability - nn.functional.one_hot(sampled, 4)
            h = 0.8 * h + 0.2 * 64 * (residual.T @ inputs / 64) ** 2
        gradient = (probability - nn.functional.one_hot(labels, 4)).T @ inputs / 64
        theta = theta * (1 - 0.02 * 0.3)
        m = 0.9 * m + 0.1 * gradient
        theta = theta - 0.02 * (m / (0.4 * h).clamp(min=1e-15)).clamp(-1, 1)
        shares.append(float((m.abs() < 0.4 * h).double().mean()))
        assert optimizer.win_rate() == pytest.approx(shares[-1])
    torch.testing.assert_close(weight.detach(), theta, rtol=1e-12, atol=1e-12)
    assert shares[:5] == [0.0] * 5  # momentum's sign until the first refresh
    assert 0.1 < shares[-1] < 0.9


def test_sophia_h_is_the_equations_by_hand() -> None:
    """12 steps on a quartic in float64, refreshed before steps 1, 4, 7, …; H u by the analytic Hessian."""
    draw = seeded(1)
    mixing = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(6, generator=draw, dtype=torch.float64) + 1)
    optimizer = SophiaH([weight], lr=0.05, betas=(0.8, 0.7), gamma=0.2, weight_decay=0.1, update_period=3, seed=5)
    theta, m, h = weight.detach().clone(), torch.zeros(6), torch.zeros(6)
    for step in range(12):
        loss = optimizer.step(lambda: ((mixing @ weight) ** 4).sum() / 40)

        products = mixing @ theta
        assert loss.item() == pytest.approx(float((products**4).sum() / 40))
        if step % 3 == 0:
            probe = hvp.gaussian([theta], seeded(5, step // 3))[0]
            h = 0.7 * h + 0.3 * probe * (mixing.T @ (12 * products**2 * (mixing @ probe)) / 40)
        theta = theta * (1 - 0.05 * 0.1)
        m = 0.8 * m + 0.2 * mixing.T @ (4 * products**3) / 40
        theta = theta - 0.05 * (m / (0.2 * h).clamp(min=1e-12)).clamp(-1, 1)
    torch.testing.assert_close(weight.detach(), theta, rtol=1e-12, atol=1e-12)
    assert weight.grad is None


@pytest.mark.parametrize("exponents", [(-3.0, 3.0), (0.0, 0.1)])
def test_with_the_exact_diagonal_progress_does_not_depend_on_the_condition(exponents: tuple[float, float]) -> None:
    """|x| after 40 steps is 9.095e-13 for both spectra; gradient descent is at f = 0.343 after 1000 on the first."""
    spectrum = torch.logspace(*exponents, 7, dtype=torch.float64)
    weight = nn.Parameter(torch.ones(7, dtype=torch.float64))
    optimizer = SophiaH(
        [weight], lr=0.5, betas=(0.0, 0.0), gamma=1.0, weight_decay=0.0, update_period=1, probe="rademacher"
    )
    for _ in range(40):
        optimizer.step(lambda: 0.5 * (spectrum * weight**2).sum())
    torch.testing.assert_close(weight.detach(), torch.full((7,), 9.095e-13).double(), rtol=1e-3, atol=0)


def test_gradient_descent_on_the_first_spectrum_is_far_away() -> None:
    spectrum, x = torch.logspace(-3, 3, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    for _ in range(1000):
        x -= spectrum * x / 1e3
    assert 0.5 * (spectrum * x**2).sum() > 5e-3


def test_negative_curvature_takes_a_step_of_exactly_the_learning_rate() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -0.25, 2.0], dtype=torch.float64))
    optimizer = SophiaH([weight], lr=0.125, gamma=1.0, weight_decay=0.0, probe="rademacher")
    optimizer.step(lambda: -(torch.tensor([1.0, 3.0, 1e-6]) * weight**2).sum())
    assert weight.tolist() == [1.125, -0.375, 2.125]


def test_maximising_takes_the_curvature_of_the_negated_loss() -> None:
    weights = [nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in range(2)]
    scale = torch.tensor([3.0, -0.5], dtype=torch.float64)
    for weight, sign, maximize in zip(weights, (1.0, -1.0), (False, True), strict=True):
        optimizer = SophiaH([weight], lr=0.1, gamma=0.5, betas=(0.5, 0.5), update_period=2, maximize=maximize)
        for _ in range(5):
            optimizer.step(lambda weight=weight, sign=sign: sign * (scale * weight**2).sum())
    assert torch.equal(weights[0], weights[1])


def test_logits_from_the_closure_serve_the_sampled_labels() -> None:
    """The same as the explicit refresh with the generator of the same seed, and the labels differ each time."""
    inputs, labels, weight = softmax_regression()
    other = nn.Parameter(weight.detach().clone())
    options = {"lr": 0.02, "gamma": 0.4, "update_period": 2}
    shared, explicit = SophiaG([weight], seed=3, **options), SophiaG([other], **options)

    def both() -> tuple[Tensor, Tensor]:
        logits = inputs @ weight.T
        return nn.functional.cross_entropy(logits, labels), logits

    for step in range(6):
        if explicit.hessian_due:
            draw = seeded(3, step // 2 - 1, 0)
            explicit.update_hessian(lambda draw=draw: sampled_cross_entropy(inputs @ other.T, draw), num_loss_terms=64)
        explicit.zero_grad()
        nn.functional.cross_entropy(inputs @ other.T, labels).backward()
        explicit.step()
        shared.step(both)
    torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-14)
    assert weight.grad is None


def test_labels_are_drawn_from_the_models_softmax() -> None:
    """-log p of the drawn label has the entropy as its mean."""
    logits = torch.tensor([[2.0, 0.0, -1.0]]).expand(20000, 3)
    entropy = torch.distributions.Categorical(logits=logits[0]).entropy()
    assert abs(sampled_cross_entropy(logits, seeded(0)) - entropy) < 0.02


def test_each_rank_draws_labels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hold other examples of one batch: the same draws would repeat themselves across it."""
    optimizer, seeds = SophiaG([torch.nn.Parameter(torch.zeros(2))], process_group=object()), []
    for rank in (0, 1, 0):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group=None, own=rank: own)
        seeds.append(optimizer._label_generator(torch.device("cpu")).initial_seed())
    assert seeds[0] == seeds[2] != seeds[1]
