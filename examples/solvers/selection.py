"""Weighted subsets of scikit-learn's digits: gradient error and accuracy of CRAIG's 2 to 10 % against random ones.

python examples/solvers/selection.py --out selection.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trainwright.selection import CRAIG, WeightedSubset, gradient_error

NUM_TRAIN, EPOCHS, SEEDS = 1200, 60, 3
FRACTIONS = (0.02, 0.05, 0.1)


def gradients(X: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    difference = (X @ weight).softmax(1) - torch.nn.functional.one_hot(y, 10)
    return (difference[:, :, None] * X[:, None, :]).flatten(1)


def accuracy(subset: WeightedSubset, X: Tensor, y: Tensor, seed: int) -> float:
    """Train multinomial regression with the weighted loss; the share of X that it gets right."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.zeros(X.shape[1], 10, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.05)
    for _ in range(EPOCHS):
        for inputs, labels, weights in DataLoader(subset, 16, shuffle=True, generator=generator):
            losses = torch.nn.functional.cross_entropy(inputs @ weight, labels, reduction="none")
            optimizer.zero_grad()
            ((weights * losses).sum() / weights.sum()).backward()
            optimizer.step()
    return float(((X @ weight).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("selection.html"))
    out = parser.parse_args().out
    digits = load_digits()
    X, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    train, rest = TensorDataset(X[:NUM_TRAIN], y[:NUM_TRAIN]), (X[NUM_TRAIN:], y[NUM_TRAIN:])
    errors: dict[str, list[tuple[float, ...]]] = {"CRAIG": [], "random": []}
    hits: dict[str, list[tuple[float, ...]]] = {"CRAIG": [], "random": []}
    for fraction in FRACTIONS:
        chosen = CRAIG(fraction).fit(*train.tensors)
        found: dict[str, list[tuple[float, float]]] = {"CRAIG": [], "random": []}
        for seed in range(SEEDS):
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randperm(NUM_TRAIN, generator=generator)[: len(chosen.indices_)]
            share = torch.full((len(drawn),), NUM_TRAIN / len(drawn))
            g = gradients(*train.tensors, 0.3 * torch.randn(65, 10, generator=generator))
            for name, pair in {"CRAIG": (chosen.indices_, chosen.weights_), "random": (drawn, share)}.items():
                found[name].append((gradient_error(g, *pair), accuracy(WeightedSubset(train, *pair), *rest, seed)))
        for name, pairs in found.items():
            error, hit = zip(*pairs)
            errors[name].append(error)
            hits[name].append(hit)
            means = sum(error) / SEEDS, sum(hit) / SEEDS
            print(f"{fraction:4.0%} {name:7s} gradient error {means[0]:.3f}, test accuracy {means[1]:.3f}")
    figure = make_subplots(1, 2, subplot_titles=("error of the gradient sum", "test accuracy"))
    for name, color in (("CRAIG", "#2563eb"), ("random", "#888888")):
        for column, values in ((1, errors[name]), (2, hits[name])):
            means = [sum(runs) / len(runs) for runs in values]
            above = [max(runs) - mean for runs, mean in zip(values, means)]
            below = [mean - min(runs) for runs, mean in zip(values, means)]
            figure.add_scatter(
                x=[100 * fraction for fraction in FRACTIONS], y=means, name=name, line={"color": color},
                error_y={"array": above, "arrayminus": below, "thickness": 1}, showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title="% of the training examples")
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_layout(
        title=f"Digits: a weighted subset against a random one, mean and range of {SEEDS} seeds",
        template="plotly_white",
    )
    go.Figure(figure).write_html(out, include_plotlyjs=True)


if __name__ == "__main__":
    main()
