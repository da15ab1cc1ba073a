"""Facility location against apricot and submodlib on the same similarities, and CRAIG against random subsets on digits.

    python -m benchmarks.solvers.selection [--quick] [--sizes POINTSxCHOSEN ...]

Peers that cannot be imported are left out; they want an older NumPy as a dependency, but run with a new one:

    pip install --no-deps --target peers apricot-select submodlib-py numba llvmlite; export PYTHONPATH=.:peers
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.solvers.record import CPU_SECONDS, write
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


METHODS: dict[str, Choice] = {"lazy greedy": by_lazy, "stochastic greedy": by_stochastic,
                              "apricot, lazy": by_apricot, "submodlib, lazy": by_submodlib}  # fmt: skip
STORE_A_MATRIX = ("apricot, lazy", "submodlib, lazy")
MOST_STORED = 10_000
"""Points above which a matrix of n² similarities is not asked for: at 60,000 it would take 29 GB."""


def against_peers(num_points: int, num_chosen: int, seeds: int) -> list[dict[str, Any]]:
    found = []
    for name, choose in METHODS.items():
        if name in STORE_A_MATRIX and num_points > MOST_STORED:
            continue
        runs = alone(choose, num_points, num_chosen, seeds)
        if not runs:
            continue
        found.append((name, runs))
        print(num_points, name, [round(run["seconds"], 2) for run in runs], flush=True)
    exact = found[0][1]
    return [
        {
            "method": name,
            "seconds": median(run["seconds"] for run in runs),
            "time / lazy": median(run["seconds"] / other["seconds"] for run, other in zip(runs, exact)),
            "memory taken, MB": max(run["peak_bytes"] for run in runs) / 1e6,
            "L(S)": median(run["total"] for run in runs),
            "L(S) / lazy": median(run["total"] / other["total"] for run, other in zip(runs, exact)),
            "same choice": all(run["chosen"] == other["chosen"] for run, other in zip(runs, exact)),
        }
        for name, runs in found
    ]


def alone(choose: Choice, num_points: int, num_chosen: int, seeds: int) -> list[dict[str, Any]]:
    """Run in a process of its own, so that the memory taken is this method's; nothing where it cannot be imported."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        try:
            choose(points(60, 0), 20)  # imports, and what is compiled at the first call
        except ImportError:
            sender.send([])
            return
        sender.send([measured(choose, points(num_points, seed), num_chosen) for seed in range(seeds)])

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    found = receiver.recv()
    child.join()
    return found


def measured(choose: Choice, rows: Tensor, num_chosen: int) -> dict[str, Any]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    chosen = choose(rows, num_chosen)
    seconds, after = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(float(torch.cdist(part, rows[chosen]).min(1).values.sum()) for part in rows.split(1000))
    return {"seconds": seconds, "peak_bytes": 1024 * (after - before), "total": total, "chosen": chosen}


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


def size(text: str) -> tuple[int, int]:
    """Read POINTSxCHOSEN."""
    num_points, num_chosen = text.split("x")
    return int(num_points), int(num_chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Small, nothing written.")
    parser.add_argument("--sizes", nargs="+", type=size, metavar="POINTSxCHOSEN", default=[(1000, 50), (4000, 200)],
                        help="Of one class; 60000x600 is a record of its own. Default: 1000x50 4000x200.")  # fmt: skip
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    remarks = [
        CPU_SECONDS,
        "L(S): sum of distances to the nearest chosen, lower is better. Medians over three seeds, one where a matrix of "
        "n² similarities would not fit; there the peers, which need one, are left out.",
        "Seconds and memory include making the distances, or the matrix.",
    ]
    fractions = (0.05,) if quick else (0.02, 0.05, 0.1)
    sizes = [(500, 25)] if quick else arguments.sizes
    sections = {}
    is_large = sizes[0][0] > MOST_STORED
    if not is_large:
        sections["digits"] = [row for fraction in fractions for row in on_digits(fraction, 3 if quick else 10)]
    for n, k in sizes:
        rows = against_peers(n, k, 1 if quick or n > MOST_STORED else 3)
        sections = {f"{n} points, {k} chosen": rows, **sections}
        name = "solvers-selection-large" if is_large else "solvers-selection"
        write(name, sections, remarks, ("apricot-select", "submodlib-py", "scikit-learn"), keep=not quick)


if __name__ == "__main__":
    main()
