"""Equality-constrained problems: sketched SQP against SciPy's SLSQP and trust-constr.

    python -m benchmarks.solvers.constrained [--quick]

All get the same values and derivatives, from autograd; sketches are drawn with three seeds. Solved: KKT residual
‖(∇L, c)‖ with the best multipliers (least squares) at most 1e-5, and for the published problems the objective within
1e-4 of the published optimum.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy import optimize

from benchmarks.solvers.constrained_problems import PROBLEMS, Problem, logistic, pde_control, sine_quartic
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.constrained import SqpOptions, TorchProblem, solve_ai_sqp

Array = np.ndarray
TOLERANCE = 1e-6
MAX_SECONDS = 2.0
Found = tuple[Array, int, int, int]
"""Solution, iterations, evaluations of the objective, row actions."""


def sqp(**options: Any) -> Callable[[Problem, int], Found]:
    def run(problem: Problem, seed: int) -> Found:
        begin = time.process_time()
        result = solve_ai_sqp(
            problem.fun, problem.x0, problem.constraints, atol=TOLERANCE, max_iterations=300, options=SqpOptions(**options),
            seed=seed, callback=lambda _: time.process_time() - begin > MAX_SECONDS,
        )  # fmt: skip
        return np.asarray(result.x), result.nit, result.nfev, result.num_sketches

    return run


def scipy_method(method: str) -> Callable[[Problem, int], Found]:
    def run(problem: Problem, seed: int) -> Found:
        inner, last = TorchProblem(problem.fun, problem.constraints), {}
        zero = np.zeros(inner.values(np.array(problem.x0)).constraints.size)

        def values(x: Array) -> Any:
            if not np.array_equal(last.get("x"), x):
                last["x"], last["values"] = x.copy(), inner.values(x)
            return last["values"]

        rows: dict[str, Any] = {"fun": lambda x: values(x).constraints, "jac": lambda x: values(x).jacobian}
        arguments: dict[str, Any] = {"constraints": {"type": "eq", **rows}}
        if method == "trust-constr":
            curvature = lambda x, v: inner.hessian(x, v) - inner.hessian(x, zero)  # noqa: E731
            arguments = {
                "constraints": optimize.NonlinearConstraint(rows["fun"], 0, 0, jac=rows["jac"], hess=curvature),
                "hess": lambda x: inner.hessian(x, zero),
            }
        result = optimize.minimize(
            lambda x: values(x).fun, np.array(problem.x0), jac=lambda x: values(x).gradient, method=method,
            tol=1e-12 if method == "SLSQP" else 1e-7, options={"maxiter": 1000}, **arguments,
        )  # fmt: skip
        return result.x, int(result.nit), int(inner.counts["nfev"]), 0

    return run


METHODS: dict[str, Callable[[Problem, int], Found]] = {
    "AI-SQP, Kaczmarz": sqp(sketch="kaczmarz"),
    "AI-SQP, Kaczmarz, psi_scale 1e-8": sqp(sketch="kaczmarz", psi_scale=1e-8),
    "AI-SQP, Kaczmarz, blocks of 16": sqp(sketch="kaczmarz", size=16),
    "AI-SQP, Gaussian": sqp(sketch="gaussian"),
    "AI-SQP, exact": sqp(sketch="exact"),
    "SciPy SLSQP": scipy_method("SLSQP"),
    "SciPy trust-constr": scipy_method("trust-constr"),
}
DRAWN = tuple(name for name in METHODS if "Kaczmarz" in name or "Gaussian" in name)
"""The methods that draw random numbers."""


def solve(name: str, problem: Problem) -> dict[str, Any]:
    """Return the medians over the seeds; the methods that draw nothing run once."""
    runs = [attempt(name, problem, seed) for seed in (range(3) if name in DRAWN else range(1))]
    middle = {key: median(run[key] for run in runs) for key in runs[0]}
    solved = sum(run["solved"] for run in runs)
    print(problem.name, name, middle, flush=True)
    return {"problem": problem.name, "method": name, **middle, "solved": f"{solved}/{len(runs)}"}


def attempt(name: str, problem: Problem, seed: int) -> dict[str, Any]:
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, iterations, evaluations, sketches = METHODS[name](problem, seed)
    seconds = time.process_time() - begin
    values = TorchProblem(problem.fun, problem.constraints).values(x)
    multipliers = np.linalg.lstsq(values.jacobian.T, -values.gradient, rcond=None)[0]
    kkt = float(np.linalg.norm(np.concatenate([values.lagrangian_gradient(multipliers), values.constraints])))
    near = math.isnan(problem.best) or abs(values.fun - problem.best) <= 1e-4 * max(1.0, abs(problem.best))
    return {
        "solved": kkt <= 1e-5 and near, "objective": values.fun, "KKT": kkt, "iterations": iterations,
        "evaluations": evaluations, "row actions": sketches, "seconds": seconds,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the problems that every method solved with every seed, so that all are of the same problems."""

    def full(row: dict[str, Any]) -> bool:
        solved, of = row["solved"].split("/")
        return bool(solved == of)

    missed = {name: [row["problem"] for row in rows if row["method"] == name and not full(row)] for name in METHODS}
    common = {row["problem"] for row in rows} - {problem for names in missed.values() for problem in names}
    found: list[dict[str, Any]] = []
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        middle = {
            key: median(row[key] for row in own if row["problem"] in common)
            for key in ("iterations", "evaluations", "row actions", "seconds")
        }
        solved = f"{len(own) - len(missed[name])}/{len(own)}"
        found.append({"method": name, "solved": solved, **middle, "not solved": ", ".join(missed[name]) or "none"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    larger = [sine_quartic(), logistic(), logistic(2000, 100, 10), pde_control(4), pde_control(8), pde_control(12)]
    small = [solve(name, problem) for problem in (PROBLEMS[:4] if quick else PROBLEMS) for name in METHODS]
    sections = {"Published problems, 2 to 5 variables (medians over those that all methods solved)": summary(small)}
    for problem in larger[:2] if quick else larger:
        sections[f"{problem.name}, {len(problem.x0)} variables"] = [solve(name, problem) for name in METHODS]
    sections["Published problems, one by one"] = small
    write(
        "solvers-constrained", sections,
        [CPU_SECONDS,
         f"AI-SQP stops at a KKT residual of {TOLERANCE:g} or {MAX_SECONDS:g} s; a row action reads one row of the KKT matrix.",
         "Solved: with how many of the seeds; the other columns are medians over the seeds.",
         "HS61 starts where the constraints' gradients are dependent: AI-SQP ends as BREAKDOWN there and says so."],
    )  # fmt: skip


if __name__ == "__main__":
    main()
