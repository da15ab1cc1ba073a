"""Two-layer ReLU networks: ADMM against an interior-point solver on the same programme, and against Adam on the network.

    python -m benchmarks.solvers.convex_nets [--quick]

Every method gets the same data and weight decay; what counts is the network's own objective ½‖f(X) - y‖² + (β/2)‖weights‖².
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.convex_nets import enumerate_patterns, recover, sample_patterns, solve_relu_programme

BETA = 0.1
Outcome = tuple[float, float, int]


def problem(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """A noisy network of five units on d features, the last of them constant."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64) + 0.3
    X[:, -1] = 1.0
    teacher = torch.randn(d, 5, generator=generator, dtype=torch.float64)
    noise = 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return X, (X @ teacher).relu() @ torch.tensor([1.0, -1, 1, -1, 0.5], dtype=torch.float64) + noise


def by_admm(X: Tensor, y: Tensor, patterns: Tensor) -> Outcome:
    found = solve_relu_programme(X, y, patterns, BETA, rtol=1e-5, max_iterations=2000)
    return found.fun, found.convex_fun, found.nit


def by_cvxpy(X: Tensor, y: Tensor, patterns: Tensor) -> Outcome:
    import cvxpy as cp

    rows, passes = X.numpy(), patterns.numpy().astype(float)
    v, w = (cp.Variable((passes.shape[1], X.shape[1])) for _ in range(2))
    output = cp.sum(cp.multiply(passes @ (v - w), rows), axis=1)
    decay = BETA * cp.sum(cp.norm(v, 2, axis=1) + cp.norm(w, 2, axis=1))
    constraints = [cp.multiply(2 * passes - 1, rows @ each.T) >= 0 for each in (v, w)]
    asked = cp.Problem(cp.Minimize(cp.sum_squares(output - y.numpy()) / 2 + decay), constraints)
    asked.solve(solver="CLARABEL")
    network = recover(torch.stack([torch.from_numpy(each.value) for each in (v, w)]))
    return network.objective(X, y, BETA), float(asked.value), int(asked.solver_stats.num_iters)


def by_adam(X: Tensor, y: Tensor, num_units: int, steps: int, seed: int) -> Outcome:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(X.shape[1], num_units, generator=generator, dtype=torch.float64).requires_grad_()
    output = (0.3 * torch.randn(num_units, generator=generator, dtype=torch.float64)).requires_grad_()
    adam = torch.optim.Adam([hidden, output], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        fit = ((X @ hidden).relu() @ output - y).square().sum() / 2
        loss = fit + BETA / 2 * (hidden.square().sum() + output.square().sum())
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return float(loss.detach()), float("nan"), steps


def rows(n: int, d: int, num_patterns: int, seeds: int, cvxpy: bool, steps: int) -> list[dict[str, Any]]:
    runs: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(seeds):
        X, y = problem(n, d, seed)
        patterns = sample_patterns(X, num_patterns, torch.Generator().manual_seed(seed))
        methods: dict[str, Any] = {f"ADMM, {num_patterns} patterns drawn": lambda: by_admm(X, y, patterns)}  # noqa: B023
        if d == 2:
            methods["ADMM, all patterns"] = lambda: by_admm(X, y, enumerate_patterns(X))  # noqa: B023
        if cvxpy:
            methods["cvxpy (Clarabel), same patterns"] = lambda: by_cvxpy(X, y, patterns)  # noqa: B023
        for num_units in (10, num_patterns):
            methods[f"Adam, {num_units} units"] = lambda m=num_units: by_adam(X, y, m, steps, seed)  # noqa: B023
        for name, run in methods.items():
            started = time.process_time()
            outcome = run()
            runs.setdefault(name, []).append((time.process_time() - started, *outcome))
    medians = {name: [median(column) for column in zip(*found)] for name, found in runs.items()}
    ours = next(iter(medians.values()))[0]
    return [
        {"method": name, "seconds": s, "objective": fun, "programme's": convex, "iterations": int(nit), "time / ADMM": s / ours}
        for name, (s, fun, convex, nit) in medians.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="One seed, small problems, nothing written.")
    quick = parser.parse_args().quick
    sizes = [(30, 2, 40, True), (60, 6, 40, True)] + ([] if quick else [(100, 6, 100, True), (1000, 10, 200, False)])
    torch.set_num_threads(1)
    sections = {}
    for n, d, num_patterns, cvxpy in sizes:
        steps = 500 if quick else 3000
        sections[f"n = {n}, d = {d}"] = rows(n, d, num_patterns, 1 if quick else 3, cvxpy, steps)
    remarks = [
        CPU_SECONDS,
        "objective: the network's own; programme's: the convex one at the solver's point. Medians over seeds.",
        "Sampled patterns are no global optimum: where Adam's objective is lower, that is why. All patterns (d = 2) are one.",
        "cvxpy is left out where its programme does not fit the machine in sane time; its seconds include compiling.",
    ]
    write("solvers-convex-nets", sections, remarks, ("cvxpy", "clarabel"), keep=not quick)


if __name__ == "__main__":
    main()
