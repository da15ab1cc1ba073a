"""Pruning a model by M-FAC: the step by hand over two layers, stages, masks, and what it gains over magnitude."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainwright.artifacts import UserError
from trainwright.optim import Pruned, prune_model


def network(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A small regression of correlated inputs, in float64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs = torch.randn(40, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    return model, inputs, model(inputs).detach() + 0.1 * torch.randn(40, 3, dtype=torch.float64)


def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    return [(model(x) - y).square().sum() / 2 for x, y in zip(inputs, targets)]


@pytest.mark.parametrize("block_size", [None, 5])
def test_one_stage_is_the_published_step_over_all_layers(block_size: int | None) -> None:
    model, inputs, targets = network()
    weights = [model[0].weight, model[2].weight]
    start, scores, inverses = [w.detach().flatten().clone() for w in weights], [], []
    for index, weight in enumerate(weights):
        rows = torch.stack([torch.autograd.grad(loss, weight)[0].flatten() for loss in losses(model, inputs, targets)])
        fisher = 0.01 * torch.eye(weight.numel()).double() + rows.T @ rows / len(rows)
        if block_size:
            block = torch.arange(weight.numel()) // block_size
            fisher = fisher * (block[:, None] == block)
        inverses.append(torch.linalg.inv(fisher))
        scores.append(start[index] ** 2 / (2 * inverses[-1].diagonal()))
    order = torch.cat(scores).argsort()[:9]
    gone = torch.zeros(36, dtype=torch.bool)
    gone[order] = True
    expected = []
    for index, part in enumerate(gone.split([24, 12])):
        change = torch.where(part, -start[index] / inverses[index].diagonal(), 0.0)
        expected.append(torch.where(part, 0.0, start[index] + inverses[index] @ change))
    found = prune_model(model, lambda: losses(model, inputs, targets), 0.25, damping=0.01, block_size=block_size)
    for weight, wanted in zip(weights, expected):
        torch.testing.assert_close(weight.detach().flatten(), wanted, rtol=1e-9, atol=1e-12)
    assert found.sparsity == 0.25
    assert found.predicted_rise == pytest.approx(float(torch.cat(scores)[order].sum()), rel=1e-9)
    assert set(found.masks) == {"0.weight", "2.weight"}


def test_stages_take_fresh_gradients_and_beat_magnitude() -> None:
    methods = {"one-shot": pruned(1), "stages": pruned(12), "magnitude": smallest_removed}
    risen = {name: sum(rise(method, seed) for seed in range(4)) for name, method in methods.items()}
    assert risen["stages"] < risen["one-shot"]
    assert risen["stages"] < 0.5 * risen["magnitude"]


def rise(method: Callable[[nn.Module, Tensor, Tensor], None], seed: int) -> float:
    """Return by how much the loss rises when twelve of the 36 weights are removed."""
    model, inputs, targets = network(seed)
    before = sum(losses(model, inputs, targets)).item()
    method(model, inputs, targets)
    assert sum(int((model[i].weight == 0).sum()) for i in (0, 2)) == 12
    return float(sum(losses(model, inputs, targets)).item() - before)


def pruned(num_stages: int) -> Callable[[nn.Module, Tensor, Tensor], None]:
    def prune(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        seen: list[float] = []
        prune_model(
            model, lambda: losses(model, inputs, targets), 12 / 36, num_stages=num_stages, damping=1e-4,
            block_size=None, after_stage=lambda result: seen.append(result.sparsity),
        )  # fmt: skip
        assert len(seen) == num_stages
        assert seen == sorted(seen)

    return prune


@torch.no_grad()
def smallest_removed(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    bound = torch.cat([model[i].weight.abs().flatten() for i in (0, 2)]).sort().values[12]
    for i in (0, 2):
        model[i].weight.mul_(model[i].weight.abs() >= bound)


def test_what_is_removed_stays_so_through_training() -> None:
    model, inputs, targets = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[Tensor] = []

    def train(result: Pruned) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            sum(losses(model, inputs, targets)).backward()
            optimizer.step()
            result.apply(model)
        seen.append(result.masks["0.weight"].clone())

    found = prune_model(model, lambda: losses(model, inputs, targets), 0.5, num_stages=4, after_stage=train)
    assert all(bool((late <= early).all()) for early, late in itertools.pairwise(seen))
    assert torch.equal(model[0].weight != 0, found.masks["0.weight"])


def test_mistakes_are_named_and_change_nothing() -> None:
    model, inputs, _ = network()
    before = [param.detach().clone() for param in model.parameters()]
    for call, message in (
        (lambda: prune_model(model, list, 0.5), "losses to take gradients of are needed; got none"),
        (lambda: prune_model(model, list, 0.5, names=["w"]), "names of parameters are needed; got w"),
        (lambda: prune_model(model, list, 1.0), r"sparsity in \(0, 1\)"),
        (lambda: prune_model(nn.LayerNorm(3), list, 0.5), "linear or convolutional layers are needed"),
        (lambda: prune_model(model, lambda: [(model(inputs) * torch.inf).sum()], 0.5), "needs finite gradients"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    for param, old in zip(model.parameters(), before):
        assert torch.equal(param, old)
