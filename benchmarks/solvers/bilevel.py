"""BSVRB and BO-REP against SOBA, its averaged form and a double loop, at equal gradients and second-order products.

    python -m benchmarks.solvers.bilevel {quadratics,digits,steep} [--quick]

All take their derivatives from one oracle, which counts them block by block; the step sizes of each come from one grid.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.solvers.bilevel_baselines import SOBA, StocBiO
from benchmarks.solvers.bilevel_problems import DigitPairs, Problem, Quadratics, Steep
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.bilevel import BOREP, BSVRB, BilevelResult, bilevel
from trainwright.solvers.outcome import Status

Make = Callable[[float, float], Any]
Row = dict[str, Any]


def sampled(num_sampled: int, floor: float, v_bound: float) -> dict[str, Make]:
    """Every method for many blocks, of which `num_sampled` are drawn, as a function of its steps in x and in y."""
    common: dict[str, Any] = {"num_sampled": num_sampled, "curvature_floor": floor, "v_bound": v_bound}
    tracked: dict[str, Any] = {**common, "alpha": 0.1, "beta": 0.1, "gamma": 0.9}
    return {
        "SOBA": lambda step_x, step_y: SOBA(step_x, step_y, num_sampled),
        "MA-SOBA, share 0.1": lambda step_x, step_y: SOBA(step_x, step_y, num_sampled, share=0.1),
        "stocBiO, 5 inner": lambda step_x, step_y: StocBiO(step_x, step_y, num_sampled),
        "BSVRB v1": lambda step_x, step_y: BSVRB(step_x, step_y, version=1, **tracked),
        "BSVRB v2": lambda step_x, step_y: BSVRB(step_x, step_y, version=2, **tracked),
        "BSVRB v2, defaults": lambda step_x, step_y: BSVRB(step_x, step_y, version=2, **common),
        "BSVRB v2, catch-up": lambda step_x, step_y: BSVRB(step_x, step_y, version=2, catch_up=True, **tracked),
    }


def single() -> dict[str, Make]:
    """Every method for one block whose upper level is steep."""
    return {
        "SOBA": lambda step_x, step_y: SOBA(step_x, step_y, 1),
        "stocBiO, 5 inner": lambda step_x, step_y: StocBiO(step_x, step_y, 1),
        "momentum 0.9, BO-REP's y and z": lambda step_x, step_y: BOREP(step_x, step_y, 0.1, normalised=False),
        "BO-REP": lambda step_x, step_y: BOREP(step_x, step_y, 0.1),
        "BO-REP, decay 0.999": lambda step_x, step_y: BOREP(step_x, step_y, 0.1, decay=0.999),
    }


@dataclass(frozen=True)
class Ended:
    """One run: its result, its last x, its seconds."""

    result: BilevelResult
    x: Tensor
    seconds: float

    @property
    def norm(self) -> float:
        """The mean norm of the true hypergradient over the last fifth; infinite where the run diverged."""
        if self.result.status in (Status.DIVERGED, Status.NOT_FINITE):
            return math.inf
        norms = self.result.history["residual"]
        last = norms[-max(1, len(norms) // 5) :]
        return sum(last) / len(last)


def run(problem: Problem, method: Any, num_calls: int, seed: int) -> Ended:
    """Run for `num_calls` calls; the true hypergradient is looked at every 100 steps, and not counted."""
    iterates = [problem.x0]

    def keep(moment: Any) -> None:
        iterates[0] = moment.state.x

    began = time.process_time()
    result = bilevel(
        problem.upper, problem.lower, problem.x0, problem.y0, method=method, sample=problem.sample, seed=seed,
        max_iterations=10**9, max_evaluations=num_calls, check_every=100, grad_norm=problem.grad_norm, keep_history=True,
        callback=keep,
    )  # fmt: skip
    return Ended(result, iterates[0], time.process_time() - began)


def tuned(problem: Problem, make: Make, grid: Mapping[str, tuple[float, ...]], num_calls: int) -> tuple[float, float]:
    """Return the steps (x, y) of the grid that end lowest on a seed of their own."""
    pairs = [(step_x, step_y) for step_x in grid["x"] for step_y in grid["y"]]
    return min(pairs, key=lambda steps: run(problem, make(*steps), num_calls, seed=100).norm)


@dataclass(frozen=True)
class Comparison:
    """A problem with the methods, the grid of their steps and the calls that each may make."""

    heading: str
    problem: Problem
    methods: Mapping[str, Make]
    grid: Mapping[str, tuple[float, ...]]
    num_calls: int

    def row(self, name: str, num_calls: int, seeds: int) -> Row:
        """Tune one method and return the medians of its runs."""
        make = self.methods[name]
        steps = tuned(self.problem, make, self.grid, num_calls)
        runs = [run(self.problem, make(*steps), num_calls, seed) for seed in range(seeds)]
        row: Row = {
            "method": name,
            "‖∇F‖ at the end": median(each.norm for each in runs),
            "iterations": median(each.result.nit for each in runs),
            "gradients": median(each.result.nsfo for each in runs),
            "products": median(each.result.nhvp for each in runs),
            "seconds": median(each.seconds for each in runs),
            "steps (x, y)": f"{steps[0]:g}, {steps[1]:g}",
        }
        if isinstance(self.problem, DigitPairs):
            row["held-out loss"] = median(self.problem.value(each.x) for each in runs)
        return row


def quadratics() -> Comparison:
    return Comparison(
        heading="1000 quadratic blocks, 10 a step, noise 0.3 on every oracle",
        problem=Quadratics(1000),
        methods=sampled(10, floor=0.5, v_bound=10.0),
        grid={"x": (0.03, 0.1), "y": (0.01, 0.1, 0.3)},
        num_calls=40_000,
    )


def digits() -> Comparison:
    problem = DigitPairs()
    return Comparison(
        heading="penalties of 45 pairs of digits, 5 a step, batches of 32; "
        f"held-out loss at the start {problem.value(problem.x0):.4g}",
        problem=problem,
        methods=sampled(5, floor=1e-3, v_bound=100.0),
        grid={"x": (1.0, 3.0, 10.0), "y": (0.5,)},
        num_calls=12_000,
    )


def steep() -> Comparison:
    return Comparison(
        heading="one steep block (Σ cosh), from ‖∇F‖ = 2e5",
        problem=Steep(),
        methods=single(),
        grid={"x": (1e-5, 1e-4, 1e-2), "y": (0.2,)},
        num_calls=12_000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("quadratics", "digits", "steep"))
    parser.add_argument("--quick", action="store_true", help="one seed, few calls, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comparison = {"quadratics": quadratics, "digits": digits, "steep": steep}[arguments.what]()
    seeds, num_calls = (1, comparison.num_calls // 20) if arguments.quick else (3, comparison.num_calls)
    rows: list[Row] = []
    for name in comparison.methods:
        row = comparison.row(name, num_calls, seeds)
        row["ratio to SOBA"] = row["‖∇F‖ at the end"] / (rows or [row])[0]["‖∇F‖ at the end"]
        rows.append(row)
        write(f"solvers-bilevel-{arguments.what}", {comparison.heading: rows}, REMARKS, ("scikit-learn",),
              keep=not arguments.quick)  # fmt: skip


REMARKS = [
    CPU_SECONDS,
    "Equal calls: gradients of either level and second-order products, one a block; medians over three seeds.",
    "‖∇F‖: the true hypergradient's norm, mean over the last fifth of a run, from a closed form or exact lower solutions; "
    "not counted in calls, but in seconds. inf: no finite end at any step of the grid.",
    "Steps: the best of one grid for all methods, on a seed of its own. α = β = 0.1 and γ = 0.9 for BSVRB, but in *defaults*.",
]


if __name__ == "__main__":
    main()
