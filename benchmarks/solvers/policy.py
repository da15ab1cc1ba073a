"""Cart-pole: N-PG-IGT, HARPG and N-HARPG against REINFORCE and Stable-Baselines3's A2C and PPO at equal trajectories.

    python -m benchmarks.solvers.policy [--quick] [--workers N]

Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import gymnasium
import torch
from torch import Tensor

from benchmarks.solvers.policy_peers import BATCH, HORIZON, Trained, adam_reinforce, stable_baselines
from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.solvers.policy import HARPG, NPGIGT, REINFORCE, SoftmaxMLP, evaluate, learn

THRESHOLD = 195.0
"""A mean return at which cart-pole with 200 steps counts as solved."""


def ours(make: Callable[[float], Any]) -> Callable[[float, int, int], Trained]:
    def run(step: float, num_trajectories: int, seed: int) -> Trained:
        env = gymnasium.make_vec("CartPole-v1", num_envs=BATCH, vectorization_mode="vector_entry_point")
        result = learn(
            env, SoftmaxMLP(4, 2, seed=seed), method=make(step), max_iterations=10**6, max_evaluations=num_trajectories,
            batch_size=BATCH, horizon=HORIZON, use_baseline=True, seed=seed, keep_history=True,
        )  # fmt: skip
        # A value an iteration: HARPG's second batch, drawn at another point, is not in it.
        return result.history["mean_return"], result.policy

    return run


METHODS: dict[str, tuple[Callable[[float, int, int], Trained], tuple[float, float, float]]] = {
    "REINFORCE": (ours(lambda step: REINFORCE(step=step)), (3e-3, 1e-2, 3e-2)),
    "REINFORCE, normalised": (ours(lambda step: REINFORCE(step=step, normalized=True)), (0.03, 0.1, 0.3)),
    "REINFORCE, normalised, momentum 0.5": (
        ours(lambda step: REINFORCE(step=step, momentum=0.5, normalized=True)),
        (0.03, 0.1, 0.3),
    ),
    "N-PG-IGT": (ours(lambda step: NPGIGT(step=step, step_power=0.5)), (0.1, 0.3, 0.9)),
    "HARPG": (ours(lambda step: HARPG(step=step)), (3e-3, 1e-2, 3e-2)),
    "N-HARPG": (ours(lambda step: HARPG(step=step, normalized=True, step_power=0.5)), (0.1, 0.3, 0.9)),
    "REINFORCE with Adam, written out": (adam_reinforce, (3e-3, 1e-2, 3e-2)),
    "Stable-Baselines3 A2C": (stable_baselines("A2C"), (7e-4, 2e-3, 7e-3)),
    "Stable-Baselines3 PPO": (
        stable_baselines("PPO", n_steps=32, batch_size=256, n_epochs=20, gae_lambda=0.8, gamma=0.98),
        (3e-4, 1e-3, 3e-3),
    ),
}


def curves(run: Callable[[float, int, int], Trained], step: float, num: int, seeds: range) -> dict[str, Tensor]:
    """Return, one per seed: the mean return over the run, that of 64 fresh trajectories at its end, and the seconds."""
    found: dict[str, list[float]] = {"mean": [], "end": [], "seconds": []}
    for seed in seeds:
        began = time.process_time()
        returns, policy = run(step, num, seed)
        found["seconds"].append(time.process_time() - began)
        found["mean"].append(sum(returns) / len(returns))
        env = gymnasium.make_vec("CartPole-v1", num_envs=BATCH, vectorization_mode="vector_entry_point")
        torch.manual_seed(1000 + seed)  # Stable-Baselines3 draws its actions from the global state
        ends = evaluate(env, policy, num_trajectories=64, horizon=HORIZON, seed=1000 + seed)
        found["end"].append(float(ends.mean()))
    return {name: torch.tensor(values) for name, values in found.items()}


def interval(values: Tensor) -> str:
    """Return the mean with its 95 % interval (normal, over seeds)."""
    return f"{values.mean():.0f} ± {1.96 * values.std() / math.sqrt(len(values)):.0f}"


def measure(name: str, num: int, seeds: range) -> dict[str, Any] | None:
    run, steps = METHODS[name]
    try:
        means = {step: float(curves(run, step, num, range(100, 101))["mean"].mean()) for step in steps}
    except ImportError:
        return None
    step = max(means, key=lambda each: means[each])
    found = curves(run, step, num, seeds)
    row = {
        "method": name,
        "step": step,
        "return at the end": interval(found["end"]),
        f"ends ≥ {THRESHOLD:g}": f"{int((found['end'] >= THRESHOLD).sum())}/{len(seeds)}",
        "mean over the run": interval(found["mean"]),
        "seconds a run": float(found["seconds"].median()),
    }
    print(row, means, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, few trajectories")
    parser.add_argument("--workers", type=int, default=1, help="methods that run at a time")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    num, seeds = (64, range(2)) if quick else (480, range(6))
    with ProcessPoolExecutor(arguments.workers) as pool:
        tasks = [pool.submit(measure, name, num, seeds) for name in METHODS]
        rows = [row for task in tasks if (row := task.result()) is not None]
    remarks = [
        CPU_SECONDS,
        f"CartPole-v1 cut at {HORIZON} steps, softmax policy 32-32, {BATCH} trajectories an estimate; ours: linear baseline, "
        "discount 0.99. PPO: the settings of the RL zoo but for 16 copies and a constant learning rate; A2C: defaults.",
        "Step sizes chosen per method from three by the mean over the run on another seed; 95 % intervals over the seeds.",
        "HARPG and N-HARPG use two batches an iteration, so half the iterations at equal trajectories.",
    ]
    write(
        "solvers-policy", {f"{num} trajectories, {len(seeds)} seeds": rows}, remarks,
        packages=("gymnasium", "stable-baselines3"), keep=not quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
