"""Facility location against apricot and submodlib on the same similarities, and CRAIG against random subsets on digits.

    python -m benchmarks.solvers.selection [--quick]

Peers that cannot be imported are left out. Seconds include making the distances (or the matrix that a peer needs).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.solvers.record import write
from trainwright.selection import CRAIG, Distances, gradient_error, lazy_greedy, stochastic_greedy

Choice = Callable[[Tensor, int], list[int]]


def points(num_points: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(30, 16, generator=generator, dtype=torch.float64)
    which = torch.randint(30, (num_points,), generator=generator)
    return centres[which] + torch.randn(num_points, 16, generator=generator, dtype=torch.float64)


def similarities(rows: Tensor) -> np.ndarray:
    distances = torch.cdist(rows, rows)
    return (distances.max() - distances).numpy()


def by_apricot(rows: Tensor, num_chosen: int) -> list[int]:
    from apricot import FacilityLocationSelection

    selector = FacilityLocationSelection(num_chosen, metric="precomputed", optimizer="lazy")
    return [int(place) for place in selector.fit(similarities(rows)).ranking]


def by_submodlib(rows: Tensor, num_chosen: int) -> list[int]:
    from submodlib import FacilityLocationFunction

    function = FacilityLocationFunction(len(rows), mode="dense", sijs=similarities(rows), separate_rep=False)
    found = function.maximize(num_chosen, optimizer="LazyGreedy", show_progress=False)
    return [place for place, _ in found]


def by_lazy(rows: Tensor, num_chosen: int) -> list[int]:
    return lazy_greedy(Distances(rows), num_chosen).indices.tolist()


def by_stochastic(rows: Tensor, num_chosen: int) -> list[int]:
    return stochastic_greedy(Distances(rows), num_chosen, torch.Generator().manual_seed(0)).indices.tolist()


def against_peers(num_points: int, num_chosen: int, seeds: int) -> list[dict[str, Any]]:
    methods: dict[str, Choice] = {"lazy greedy": by_lazy, "stochastic greedy": by_stochastic,
                                  "apricot, lazy": by_apricot, "submodlib, lazy": by_submodlib}  # fmt: skip
    found = []
    for name, choose in methods.items():
        seconds, totals = [], []
        try:
            choose(points(60, 0), 20)  # imports, and what is compiled at the first call
        except ImportError:
            continue
        for seed in range(seeds):
            rows = points(num_points, seed)
            started = time.perf_counter()
            chosen = choose(rows, num_chosen)
            seconds.append(time.perf_counter() - started)
            totals.append(float(torch.cdist(rows, rows[chosen]).min(1).values.sum()))
        found.append({"method": name, "seconds": median(seconds), "L(S)": median(totals)})
    return [{**row, "time / lazy": row["seconds"] / found[0]["seconds"]} for row in found]


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.from_numpy(data.data) / 16, torch.from_numpy(data.target)


def on_digits(fraction: float, seeds: int) -> list[dict[str, Any]]:
    """Multinomial regression on a weighted subset of the first 1200 digits, tested on the others."""
    X, y = digits()
    X = torch.cat([X, torch.ones_like(X[:, :1])], 1)
    train, test = slice(0, 1200), slice(1200, None)
    chosen = CRAIG(fraction).fit(X[train], y[train])
    errors: dict[str, list[float]] = {"CRAIG": [], "random": []}
    hits: dict[str, list[float]] = {"CRAIG": [], "random": []}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(1200, generator=generator)[: len(chosen.indices_)]
        subsets = {"CRAIG": (chosen.indices_, chosen.weights_.double()),
                   "random": (drawn, torch.full((len(drawn),), 1200 / len(drawn), dtype=torch.float64))}  # fmt: skip
        weight = 0.3 * torch.randn(65, 10, generator=generator, dtype=torch.float64)
        for name, (places, weights) in subsets.items():
            errors[name].append(gradient_error(gradients(X[train], y[train], weight), places, weights))
            fitted = fit(X[train][places], y[train][places], weights)
            hits[name].append(float(((X[test] @ fitted).argmax(1) == y[test]).double().mean()))
    return [{"subset": f"{fraction:.0%} {name}", "examples": len(chosen.indices_), "gradient error": median(errors[name]),
             "test accuracy": median(hits[name])} for name in errors]  # fmt: skip


def gradients(X: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    difference = (X @ weight).softmax(1) - torch.nn.functional.one_hot(y, 10)
    return (difference[:, :, None] * X[:, None, :]).flatten(1)


def fit(X: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    weight = torch.zeros(X.shape[1], 10, dtype=X.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(X @ weight, y, reduction="none")
        loss = (weights * losses).sum() / weights.sum() + 1e-3 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return weight.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Small, nothing written.")
    quick = parser.parse_args().quick
    sizes = [(500, 25)] if quick else [(1000, 50), (4000, 200)]
    sections = {f"{n} points, {k} chosen": against_peers(n, k, 1 if quick else 3) for n, k in sizes}
    fractions = (0.05,) if quick else (0.02, 0.05, 0.1)
    sections["digits"] = [row for fraction in fractions for row in on_digits(fraction, 3 if quick else 10)]
    write("solvers-selection", sections, ["L(S): sum of distances to the nearest chosen, lower is better; medians over seeds."],
          ("apricot-select", "submodlib-py", "scikit-learn"), keep=not quick)  # fmt: skip


if __name__ == "__main__":
    main()
