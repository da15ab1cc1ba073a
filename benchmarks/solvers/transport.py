"""Entropic transport to an L1 marginal error of 1e-9: Sinkhorn-Newton-Sparse against Sinkhorn, POT, OTT-JAX and geomloss.

    python -m benchmarks.solvers.transport uniform|large|digits [--quick]

Every method gets the same problem and about the same seconds; its error after that is in the table, met or not. The peers
know no limit of time: their iterations are raised until it is used (OTT-JAX: foretold from its first 20), and the last
run counts. Compiling is not counted. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.transport import SnsOptions, solve_sinkhorn, solve_sns

TOLERANCE = 1e-9
Array = np.ndarray
Case = tuple[Array, Array, Array]
Outcome = dict[str, float]


def uniform(n: int) -> Callable[[int], Case]:
    def make(seed: int) -> Case:
        return np.full(n, 1 / n), np.full(n, 1 / n), np.random.default_rng(seed).random((n, n))

    return make


def digit_points(seed: int) -> Case:
    """The digits 0-4 against 5-9 of scikit-learn as points in 64 dimensions, squared distances scaled to [0, 1]."""
    from scipy.spatial.distance import cdist
    from sklearn.datasets import load_digits

    data = load_digits()
    cost = cdist(data.data[data.target < 5], data.data[data.target >= 5], "sqeuclidean")
    n, m = cost.shape
    return np.full(n, 1 / n), np.full(m, 1 / m), cost / cost.max()


def digit_images(norm: int) -> Callable[[int], Case]:
    """Two digits of scikit-learn, enlarged to 32 × 32, as distributions over their pixels; L1 or squared L2 distances."""

    def make(seed: int) -> Case:
        from scipy.ndimage import zoom
        from sklearn.datasets import load_digits

        images = load_digits().images[[seed, seed + 1]]
        one, two = (np.clip(zoom(image, 4, order=1), 0, None).ravel() + 0.16 for image in images)
        places = np.stack(np.meshgrid(*[np.linspace(0, 1, 32)] * 2), -1).reshape(-1, 2)
        gaps = np.abs(places[:, None] - places)
        return one / one.sum(), two / two.sum(), (gaps if norm == 1 else gaps**2).sum(-1) / 2

    return make


def plan_error(plan: Array, a: Array, b: Array) -> float:
    return float(np.abs(plan.sum(1) - a).sum() + np.abs(plan.sum(0) - b).sum())


def until(seconds: float) -> Callable[[Any], bool]:
    """Return a callback that ends a run after so many seconds of the processor."""
    begin = time.process_time()
    return lambda _: time.process_time() - begin > seconds


def sns(case: Case, reg: float, seconds: float, **options: Any) -> Outcome:
    a, b, cost = case
    result = solve_sns(
        a, b, cost, reg, atol=TOLERANCE, max_iterations=100_000, callback=until(seconds), options=SnsOptions(**options)
    )
    return {"iterations": result.nit, "passes": result.nfev, "error": result.marginal_error}


def paper(case: Case, reg: float, seconds: float) -> Outcome:
    """As in the paper: 20 Sinkhorn steps, entries fixed (five a row), no damping."""
    return sns(case, reg, seconds, adaptive=False)


def log_sinkhorn(case: Case, reg: float, seconds: float) -> Outcome:
    a, b, cost = case
    result = solve_sinkhorn(a, b, cost, reg, atol=TOLERANCE, max_iterations=10**7, callback=until(seconds))
    return {"iterations": result.nit, "passes": result.nfev, "error": result.marginal_error}


def pot(method: str) -> Callable[[Case, float, float], Outcome]:
    def run(case: Case, reg: float, seconds: float) -> Outcome:
        import ot

        def solve(limit: int) -> tuple[Array, dict[str, Any]]:
            return ot.sinkhorn(
                *case, reg, method=method, numItermax=limit, stopThr=TOLERANCE / 30, log=True, warn=False
            )

        limit = 10
        while True:
            begin = time.process_time()
            plan, log = solve(limit)
            took = time.process_time() - begin
            error = plan_error(plan, case[0], case[1])
            iterations = log.get("niter", log.get("n_iter", limit))
            # Numerical trouble ends a run of POT before its limit.
            if error <= TOLERANCE or not np.isfinite(error) or took > seconds / 2 or iterations < limit // 2:
                return {"iterations": iterations, "passes": float("nan"), "error": error, "seconds": took}
            limit = int(limit * min(8.0, max(seconds / took, 1.5)))

    return run


def geomloss_solver(case: Case, reg: float, seconds: float) -> Outcome:
    from geomloss import ot

    a, b, cost = (torch.from_numpy(part) for part in case)
    limit, found = 32, float("nan")
    begin = time.process_time()
    while True:
        tic = time.process_time()
        found = plan_error(ot.solve(cost, reg=reg, a=a, b=b, max_iter=limit).plan.numpy(), case[0], case[1])
        took = time.process_time() - tic
        if found <= TOLERANCE or time.process_time() - begin + 4 * took > seconds:
            return {"iterations": limit, "passes": float("nan"), "error": found, "seconds": took}
        limit *= 4


def ott_solver(case: Case, reg: float, seconds: float) -> Outcome:
    import jax
    from ott.geometry.geometry import Geometry
    from ott.solvers import linear

    jax.config.update("jax_enable_x64", True)
    a, b, cost = (jax.numpy.asarray(part) for part in case)

    def timed(limit: int) -> tuple[float, Any]:
        def solve(cost: Any, a: Any, b: Any) -> Any:
            found = linear.solve(Geometry(cost, epsilon=reg), a, b, threshold=TOLERANCE, max_iterations=limit)
            return found.matrix, found.n_iters

        ready = jax.jit(solve).lower(cost, a, b).compile()
        begin = time.process_time()
        found = jax.block_until_ready(ready(cost, a, b))
        return time.process_time() - begin, found

    short, found = timed(20)
    took = short
    if plan_error(np.asarray(found[0]), case[0], case[1]) > TOLERANCE:
        took, found = timed(max(int(20 * seconds / short) // 10 * 10, 20))
    error = plan_error(np.asarray(found[0]), case[0], case[1])
    return {"iterations": int(found[1]), "passes": float("nan"), "error": error, "seconds": took}


def regot_newton(method: str) -> Callable[[Case, float, float], Outcome]:
    """Newton methods on a sparsified Hessian, in C++: `sinkhorn_ssns`, and its quasi-Newton successor `sinkhorn_splr`."""

    def run(case: Case, reg: float, seconds: float) -> Outcome:
        import regot

        a, b, cost = case
        matrix, tolerance = np.asfortranarray(cost), TOLERANCE / float(np.sqrt(a.size + b.size))
        limit = 20
        while True:
            begin = time.process_time()
            found = getattr(regot, method)(matrix, a, b, reg, tol=tolerance, max_iter=limit)
            took = time.process_time() - begin
            error = plan_error(np.asarray(found.plan), a, b)
            if error <= TOLERANCE or not np.isfinite(error) or took > seconds / 2 or found.niter < limit:
                return {"iterations": found.niter, "passes": float("nan"), "error": error, "seconds": took}
            limit *= 4

    return run


METHODS: dict[str, Callable[[Case, float, float], Outcome]] = {
    "SNS (adaptive)": sns,
    "SNS (paper)": paper,
    "Sinkhorn, log domain (ours)": log_sinkhorn,
    "POT sinkhorn": pot("sinkhorn"),
    "POT sinkhorn_log": pot("sinkhorn_log"),
    "POT sinkhorn_stabilized": pot("sinkhorn_stabilized"),
    "OTT-JAX linear.solve": ott_solver,
    "geomloss ot.solve": geomloss_solver,
    "regot sinkhorn_ssns": regot_newton("sinkhorn_ssns"),
    "regot sinkhorn_splr": regot_newton("sinkhorn_splr"),
}


def measure(name: str, make: Callable[[int], Case], eta: float, seconds: float, seeds: range) -> dict[str, Any] | None:
    runs = []
    for seed in seeds:
        case = make(seed)
        begin = time.process_time()
        try:
            found = METHODS[name](case, 1 / eta, seconds)
        except ImportError:
            return None
        runs.append({"seconds": time.process_time() - begin, **found})
    middle = {key: median(run[key] for run in runs) for key in ("seconds", "iterations", "passes", "error")}
    return {"method": name, **middle, "met": f"{sum(run['error'] <= 1.01 * TOLERANCE for run in runs)}/{len(runs)}"}


CASES: dict[str, list[tuple[str, Callable[[int], Case], list[int], range, float]]] = {
    "uniform": [
        ("uniform n=500", uniform(500), [200, 1200], range(3), 3),
        ("uniform n=2000", uniform(2000), [1200, 6000], range(1), 8),
    ],
    "large": [("uniform n=5000", uniform(5000), [6000], range(1), 20)],
    "digits": [
        ("digits as points, 901 × 896, squared L2", digit_points, [200, 1200], range(1), 5),
        ("digits as images, 1024 pixels, squared L2", digit_images(2), [200, 1200], range(2), 3),
        ("digits as images, 1024 pixels, L1", digit_images(1), [200, 1200], range(2), 5),
    ],
}
"""Name, problem of a seed, 1/reg, seeds, seconds allowed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=tuple(CASES))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    cases = CASES[arguments.what]
    torch.set_num_threads(1)
    sections: dict[str, Any] = {}
    for title, make, etas, seeds, seconds in cases[:1] if arguments.quick else cases:
        for eta in etas:
            rows = [measure(name, make, eta, seconds, seeds) for name in METHODS]
            found = [row for row in rows if row is not None]
            for row in found:
                row["time / SNS"] = row["seconds"] / found[0]["seconds"]
            sections[f"{title}, reg = 1/{eta}, at most {seconds:g} s"] = found
            print(title, eta, *found, sep="\n  ", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    write(
        f"solvers-transport-{arguments.what}",
        sections,
        [
            CPU_SECONDS,
            f"Tolerance {TOLERANCE:g} on the L1 error of both marginals; medians over seeds.",
            "A pass is n · m exponentials; POT's iterations are two passes (log), or two products with a stored kernel.",
            "POT and OTT-JAX test the error every 10 or 20 iterations; the peers' seconds are of the last, longest run.",
            "POT's errors of 2 or –: the kernel exp(−C/reg) underflows.",
            f"Peak memory of the whole run, peers included: {peak:.2f} GiB.",
        ],
        packages=("POT", "ott-jax", "jax", "geomloss", "scikit-learn"),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
