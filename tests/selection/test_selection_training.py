"""Gradient proxies against autograd, choosing anew while training, and augmentation of a coreset."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright.artifacts import UserError
from trainwright.selection import CRAIG, AugmentedCoreset, Reselection, last_layer_gradients


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(num_features: int, num_classes: int, seed: int, width: int = 12) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(num_features, width), nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, num_classes)
    ).double()
    generator = seeded(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model


def clusters(num: int, seed: int, num_classes: int = 4, num_features: int = 6) -> tuple[Tensor, Tensor]:
    """Each class of five clusters, large and small, off the origin."""
    generator = seeded(seed)
    centres = 2 * torch.randn(num_classes * 5, num_features, generator=generator, dtype=torch.float64) + 1
    share = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5]).repeat(num_classes)
    which = torch.multinomial(share, num, replacement=True, generator=generator)
    noise = torch.randn(num, num_features, generator=generator, dtype=torch.float64)
    return centres[which] + 0.4 * noise, which // 5


def test_proxies_are_the_gradients_of_the_last_layer() -> None:
    """Against autograd on each example: the bias's gradient without the embedding, the weight's with it."""
    X, y = clusters(11, 0)
    model = network(6, 4, 1)
    last = model[3]
    loader = [(X[:4], y[:4]), (X[4:], y[4:])]
    logits, labels = last_layer_gradients(model, loader)
    weights, _ = last_layer_gradients(model, loader, last_layer=last)
    assert labels.tolist() == y.tolist()
    assert model.training
    assert model[1].training
    model.eval()
    for place in range(11):
        loss = nn.functional.cross_entropy(model(X[place : place + 1]), y[place : place + 1])
        weight, bias = torch.autograd.grad(loss, [last.weight, last.bias])
        torch.testing.assert_close(logits[place], bias)
        torch.testing.assert_close(weights[place], weight.flatten())
    assert not last._forward_pre_hooks


def test_modes_come_back_as_they_were_even_after_an_error() -> None:
    model = network(6, 4, 2)
    model[1].eval()
    with pytest.raises(RuntimeError):
        last_layer_gradients(model, [(torch.zeros(1, 5).double(), torch.zeros(1).long())], last_layer=model[3])
    assert model.training
    assert not model[1].training
    assert not model[3]._forward_pre_hooks


def test_the_choice_is_made_when_due_and_by_the_model_as_it_is_then() -> None:
    X, y = clusters(120, 3)
    model = network(6, 4, 4)
    batches = Reselection(TensorDataset(X, y), model, CRAIG(0.1), every=2, warm_up=1, batch_size=8)
    chosen, sizes = [], []
    for _ in range(5):
        sizes.append(sum(len(weight) for _, _, weight in batches))
        chosen.append(batches.indices_.tolist() if batches.num_selections else None)
        with torch.no_grad():
            model[3].weight.add_(torch.randn(model[3].weight.shape, generator=seeded(5), dtype=torch.float64))
    assert batches.num_selections == 2
    assert sizes[0] == 120
    assert len(set(sizes[1:])) == 1
    assert sizes[1] < 18
    assert chosen[1] == chosen[2] != chosen[3] == chosen[4]
    assert batches.selection_s > 0
    batches.select()
    gradients, labels = last_layer_gradients(model, [(X, y)])
    expected = CRAIG(0.1).fit(gradients, labels)
    assert batches.indices_.tolist() == expected.indices_.tolist()
    assert batches.weights_.tolist() == expected.weights_.tolist()


def train(batches: Any, model: nn.Module, epochs: int) -> None:
    model.eval()  # the dropout is for the modes' test
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(epochs):
        for x, y, weight in batches:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            ((weight * losses).sum() / weight.sum()).backward()
            optimizer.step()


def test_a_chosen_tenth_trains_to_nearly_what_everything_does() -> None:
    X, y = clusters(600, 6)
    model = network(6, 4, 7)
    batches = Reselection(TensorDataset(X, y), model, CRAIG(0.1), every=5, batch_size=16, last_layer=model[3])
    train(batches, model, 40)
    assert float((model(X).argmax(1) == y).double().mean()) > 0.93
    assert batches.num_selections == 8


def augmented_errors(seed: int, fraction: float) -> tuple[float, float]:
    """How far the augmented coreset's gradient is from that of augmenting everything: chosen with embedding, and random."""
    X, y = clusters(500, seed)
    model = network(6, 4, seed + 1, width=16)
    full = [(x, label, torch.tensor(1.0)) for x, label in zip(X, y)]
    train(torch.utils.data.DataLoader(full, 64), model, 3)  # type: ignore[arg-type]
    noise = 0.3 * torch.randn(X.shape, generator=seeded(seed + 2), dtype=torch.float64)
    gradients, labels = last_layer_gradients(model, [(X, y)], last_layer=model[3])
    chosen = CRAIG(fraction).fit(gradients, labels)
    augmented, _ = last_layer_gradients(model, [(X + noise, y)], last_layer=model[3])
    whole = augmented.sum(0)
    ours = (chosen.weights_.double()[:, None] * augmented[chosen.indices_]).sum(0)
    drawn = torch.randperm(500, generator=seeded(seed + 3))[: len(chosen.indices_)]
    random = augmented[drawn].sum(0) * (500 / len(drawn))
    return float((ours - whole).norm() / whole.norm()), float((random - whole).norm() / whole.norm())


@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_the_augmented_coreset_is_nearer_to_augmenting_everything_than_a_random_one(fraction: float) -> None:
    errors = torch.tensor([augmented_errors(10 * seed, fraction) for seed in range(6)])
    assert float(errors[:, 0].mean()) <= 0.75 * float(errors[:, 1].mean())


def accuracy(seed: int, fraction: float | None, epochs: int = 30) -> float:
    """Of a network trained on everything and strong copies of a coreset chosen each epoch; `None`: without the copies."""
    X, y = clusters(1400, seed)
    train_on, test_on = TensorDataset(X[:400], y[:400]), (X[400:], y[400:])
    model = network(6, 4, seed + 1, width=64)
    batches: Any = torch.utils.data.DataLoader(
        [(x, label, torch.tensor(1.0)) for x, label in train_on],  # type: ignore[arg-type]
        32,
        shuffle=True,
        generator=seeded(seed),
    )
    if fraction is not None:
        noise = seeded(seed + 2)
        strong = lambda x: x + 0.3 * torch.randn(x.shape, generator=noise, dtype=x.dtype)  # noqa: E731
        make = partial(AugmentedCoreset, strong=strong)
        batches = Reselection(train_on, model, CRAIG(fraction), every=1, batch_size=32, last_layer=model[3],
                              make_subset=make, seed=seed)  # fmt: skip
    train(batches, model, epochs)
    return float((model(test_on[0]).argmax(1) == test_on[1]).double().mean())


@pytest.mark.slow
def test_strong_copies_of_a_coreset_do_not_cost_accuracy() -> None:
    none, chosen = (sum(accuracy(seed, fraction) for seed in range(4)) / 4 for fraction in (None, 0.1))
    assert chosen >= none > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_strong_copies_of_a_coreset_do_not_cost_accuracy_in_full(fraction: float) -> None:
    none, chosen = (sum(accuracy(seed, each) for seed in range(8)) / 8 for each in (None, fraction))
    assert chosen >= none > 0.9


def test_an_augmented_coreset_is_the_base_then_the_strong_copies() -> None:
    data = TensorDataset(torch.arange(5.0), torch.arange(5))
    make = partial(AugmentedCoreset, data, [4, 1], [3.0, 0.0], strong=lambda x: 100 + x, weak=lambda x: x + 0.5)
    rows = lambda found: [(float(x), int(y), float(weight)) for x, y, weight in found]  # noqa: E731
    full = [(place + 0.5, place, 1.0) for place in range(5)]
    assert rows(make()) == [*full, (104.0, 4, 1.0), (101.0, 1, 1.0)]
    both = make(base="coreset", weigh_augmented=True)
    assert rows(both) == [(4.5, 4, 1.5), (1.5, 1, 0.5), (104.0, 4, 1.5), (101.0, 1, 0.5)]
    assert len(both) == 4
    with pytest.raises(IndexError):
        both[-1]


def test_augmentation_goes_with_choosing_anew() -> None:
    X, y = clusters(60, 8)
    make = partial(AugmentedCoreset, strong=lambda x: x + 1)
    batches = Reselection(TensorDataset(X, y), network(6, 4, 9), CRAIG(0.2), batch_size=100, make_subset=make)
    ((_, _, weight),) = list(batches)
    assert len(weight) == 60 + len(batches.indices_)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "at least one batch"),
        ([torch.zeros(2, 6)], r"batches \(x, y\) are needed; got Tensor"),
        ([(torch.zeros(2, 6).double(), torch.zeros(3).long())], r"logits \[3, C\] are needed; the model returned \[2, 4\]"),
        ([(torch.zeros(1, 6).double(), torch.tensor([4]))], "labels from 0 to 3"),
        ([(torch.zeros(1, 6).double(), torch.tensor([0.0]))], "labels from 0 to 3"),
    ],
)  # fmt: skip
def test_wrong_batches_are_refused(batches: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        last_layer_gradients(network(6, 4, 0), batches)


def test_wrong_settings_are_refused() -> None:
    data, model = TensorDataset(torch.zeros(2, 6).double(), torch.zeros(2).long()), network(6, 4, 0)
    with pytest.raises(UserError, match="Reselection needs every of at least 1; got 0"):
        Reselection(data, model, CRAIG(), every=0)
    with pytest.raises(UserError, match="base full or coreset is needed; got 'half'"):
        AugmentedCoreset(data, [0], [1.0], strong=lambda x: x, base="half")
    with pytest.raises(UserError, match="one embedding"):
        last_layer_gradients(model, [(torch.zeros(1, 6).double(), torch.tensor([0]))], last_layer=nn.Linear(2, 2))
