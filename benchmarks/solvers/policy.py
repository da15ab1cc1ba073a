"""Cart-pole from gymnasium: N-PG-IGT, HARPG and N-HARPG against REINFORCE at equal trajectories.

python -m benchmarks.solvers.policy [--quick]
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import gymnasium
import torch
from torch import Tensor

from benchmarks.solvers.record import write
from trainwright.solvers.policy import HARPG, NPGIGT, REINFORCE, SoftmaxMLP, evaluate, learn

BATCH, HORIZON = 16, 200
STEPS = (0.03, 0.1, 0.3)
METHODS: dict[str, Any] = {
    "REINFORCE": lambda step: REINFORCE(step=step / 30),
    "REINFORCE, normalised": lambda step: REINFORCE(step=step, normalized=True),
    "REINFORCE, normalised, momentum 0.5": lambda step: REINFORCE(step=step, momentum=0.5, normalized=True),
    "N-PG-IGT": lambda step: NPGIGT(step=3 * step, step_power=0.5),
    "HARPG": lambda step: HARPG(step=step / 30),
    "N-HARPG": lambda step: HARPG(step=step, normalized=True, step_power=0.5),
}


def curves(method: Any, num_trajectories: int, seeds: range) -> tuple[Tensor, Tensor]:
    """Return the mean return over the whole run and that of 64 fresh trajectories at the end, one per seed."""
    areas, ends = [], []
    for seed in seeds:
        env = gymnasium.make_vec("CartPole-v1", num_envs=BATCH, vectorization_mode="vector_entry_point")
        result = learn(
            env, SoftmaxMLP(4, 2, seed=seed), method=method, max_iterations=10**6, max_trajectories=num_trajectories,
            batch_size=BATCH, horizon=HORIZON, use_baseline=True, seed=seed, keep_history=True,
        )  # fmt: skip
        history = torch.tensor(result.history["mean_return"])
        areas.append(float(history.mean()))
        ends.append(float(evaluate(env, result.policy, num_trajectories=64, horizon=HORIZON, seed=1000 + seed).mean()))
    return torch.tensor(areas), torch.tensor(ends)


def interval(values: Tensor) -> str:
    """Return the mean with its 95 % interval (normal, over seeds)."""
    return f"{values.mean():.0f} ± {1.96 * values.std() / math.sqrt(len(values)):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, few trajectories")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num_trajectories, seeds = (160, range(2)) if quick else (960, range(8))
    rows = []
    for name, make in METHODS.items():
        began, best = time.perf_counter(), None
        for step in STEPS:
            areas, _ = curves(make(step), num_trajectories, range(100, 102))
            if best is None or float(areas.mean()) > best[0]:
                best = (float(areas.mean()), step)
        assert best is not None
        areas, ends = curves(make(best[1]), num_trajectories, seeds)
        seconds = time.perf_counter() - began
        print(name, best, interval(ends), f"{seconds:.0f} s", flush=True)
        rows.append(
            {
                "method": repr(make(best[1])),
                "return at the end": interval(ends),
                "mean over the run": interval(areas),
                "seconds": seconds,
            }
        )
    remarks = [
        f"CartPole-v1, horizon {HORIZON}, softmax policy 32-32, {BATCH} trajectories an estimate, linear baseline, discount 0.99.",
        "Step sizes chosen per method from three by the mean over the run on two other seeds; 95 % intervals over the seeds.",
        "HARPG and N-HARPG use two batches an iteration, so half the iterations at equal trajectories.",
    ]
    write(
        "solvers-policy",
        {f"{num_trajectories} trajectories, {len(seeds)} seeds": rows},
        remarks,
        packages=("gymnasium",),
    )


if __name__ == "__main__":
    main()
