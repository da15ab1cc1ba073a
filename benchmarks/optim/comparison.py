"""Every optimizer on the same two problems, with equal budgets and learning rates found by one rule.

    python -m benchmarks.optim.comparison            # trains: some 40 minutes on one core
    python -m benchmarks.optim.comparison --times    # step times and memory of what was trained: a minute; draws the plot

Rule: each optimizer is run once, on a seed of its own, at every learning rate of one logarithmic grid, and at one more
beyond an end while the best stands at that end (three at most); the best loss on held-out data wins. Then three other
seeds with it. All use linear decay with a twentieth of warm-up, no weight decay, and otherwise the defaults of
`trainwright.optim.create`, but for periods made for longer runs (see `SETTINGS`). Steps are timed in turns, one of each
optimizer after the other, so that what else the machine does falls on all alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from trainwright import optim
from trainwright.schedules import LinearDecay

from ..solvers.record import about
from .plot import plot
from .problems import PROBLEMS, Problem
from .speed import allocated_bytes

RESULTS = Path(__file__).parent.parent / "results"
NUM_STEPS = {"gpt": 600, "digits": 300}
NUM_TIMED_ROUNDS, LONGEST_PERIOD = 30, 10
GRID = tuple(10 ** (exponent / 2) for exponent in range(-7, 0))
TUNING_SEED, SEEDS = 100, (0, 1, 2)
THEIRS = ("sgd-momentum", "adamw")
SETTINGS: dict[str, dict[str, Any]] = {"frugal": {"update_gap": 50}, "mfac": {"num_gradients": 32}}
LEFT_OUT = {
    "gradnormsmoothnewton": "for deterministic losses; each step evaluates the batch's loss again",
    "sso": "for losses with a target to compute, whose surrogate it minimises",
}


def names() -> list[str]:
    """All of the project's own, and two to compare them with."""
    own = [name for name in optim.names() if optim.record(name).cls.__module__.startswith("trainwright")]
    return [name for name in (*THEIRS, *own) if name not in LEFT_OUT]


def run(problem: Problem, name: str, lr: float, num_steps: int) -> dict[str, Any]:
    """Train and return the curve and the loss on held-out data, infinite where the run diverges."""
    optimizer = made(problem, name, lr)
    schedule = LinearDecay(optimizer, num_steps, num_warmup_steps=num_steps // 20)
    curve: list[float] = []
    for step in range(num_steps):
        loss = one_step(problem, optimizer, name, problem.batch(step))
        schedule.step()
        curve.append(loss)
        if not math.isfinite(loss) or loss > 3 * curve[0]:
            return {"held_out": math.inf, "curve": curve}
    held_out = problem.held_out_loss()
    return {"held_out": held_out if math.isfinite(held_out) else math.inf, "curve": curve}


def made(problem: Problem, name: str, lr: float) -> torch.optim.Optimizer:
    options = dict(SETTINGS.get(name, {}))
    params = list(problem.model.parameters())
    probe = optim.create(name, [torch.nn.Parameter(torch.ones(2, 2))], lr=lr, **options)
    if "weight_decay" in probe.defaults:
        options["weight_decay"] = 0.0
    return optim.create(name, params, lr=lr, **options)


def one_step(problem: Problem, optimizer: torch.optim.Optimizer, name: str, batch: Any) -> float:
    if optim.record(name).needs_loss:
        with_logits = name == "sophiag"
        return float(optimizer.step(lambda: problem.loss(batch) if with_logits else problem.loss(batch)[0]))  # type: ignore[arg-type]
    optimizer.zero_grad(set_to_none=True)
    loss = problem.loss(batch)[0]
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.untyped_storage().nbytes() for value in states if torch.is_tensor(value))


def tuned(problem_name: str, name: str, num_steps: int, earlier: dict[str, float | None]) -> dict[float, float]:
    """The loss on held-out data at each learning rate that was tried; `earlier` has those of a run like this one."""
    tried: dict[float, float] = {}

    def attempt(lr: float) -> None:
        key = f"{lr:.3g}"
        found = (
            earlier[key]
            if key in earlier
            else run(PROBLEMS[problem_name](TUNING_SEED), name, lr, num_steps)["held_out"]
        )
        tried[lr] = math.inf if found is None else found

    for lr in GRID:
        attempt(lr)
    for _ in range(3):
        best, lowest, highest = min(tried, key=lambda lr: tried[lr]), min(tried), max(tried)
        if best not in (lowest, highest):
            break
        attempt(best * 10**0.5 if best == highest else best / 10**0.5)
    return tried


def compare(problem_name: str, name: str, num_steps: int, earlier: dict[str, Any]) -> dict[str, Any]:
    tried = tuned(problem_name, name, num_steps, earlier.get("tuning", {}))
    lr = min(tried, key=lambda lr: tried[lr])
    found = {
        "lr": lr,
        "tuning": {f"{lr:.3g}": round(loss, 4) if math.isfinite(loss) else None for lr, loss in sorted(tried.items())},
        "num_params": sum(param.numel() for param in PROBLEMS[problem_name](0).model.parameters()),
    }
    if "held_out" in earlier and math.isclose(earlier["lr"], lr, rel_tol=1e-6):
        found = {**earlier, **found}
    else:
        runs = [run(PROBLEMS[problem_name](seed), name, lr, num_steps) for seed in SEEDS]
        curves = [each["curve"] for each in runs]
        found["held_out"] = [round(each["held_out"], 4) for each in runs]
        found["curve"] = [round(statistics.mean(losses), 4) for losses in zip(*curves)]
    print(f"{problem_name} {name}: lr {lr:.3g}, held out {found['held_out']}", flush=True)
    return found


def measure_steps(problem_name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Add to each row the median seconds of a whole training step, the bytes kept, and the most a step allocates."""
    made_of = {}
    for name, row in rows.items():
        problem = PROBLEMS[problem_name](0)
        made_of[name] = (problem, made(problem, name, row["lr"]))
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(NUM_TIMED_ROUNDS + 2):
        for name, (problem, optimizer) in made_of.items():
            batch = problem.batch(turn)
            began = time.perf_counter()
            one_step(problem, optimizer, name, batch)
            seconds[name] += [time.perf_counter() - began] * (turn > 1)
    for name, (problem, optimizer) in made_of.items():
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        rows[name]["step_allocated_bytes"] = allocated_bytes(
            lambda: [one_step(problem, optimizer, name, problem.batch(step)) for step in range(LONGEST_PERIOD)]  # noqa: B023 - called at once
        )
        rows[name] |= {
            "step_s": statistics.median(seconds[name]),
            "mean_step_s": statistics.mean(seconds[name]),
            "state_bytes": kept_bytes(optimizer),
        }


def known(path: Path) -> dict[str, dict[str, Any]]:
    """What was measured before."""
    found = json.loads(path.read_text(encoding="utf8"))["problems"] if path.exists() else {}
    return {problem: dict(found.get(problem, {})) for problem in PROBLEMS}


def table(results: dict[str, Any]) -> str:
    lines = ["# Optimizers on two small problems", "", results["how"], ""]
    for problem, rows in results["problems"].items():
        lines += [
            f"## {problem}, {results['num_steps'][problem]} steps",
            "",
            "| optimizer | learning rate | held-out loss, mean of 3 | lowest … highest | step, mean | of AdamW's "
            "| state B/param | allocated in a step, B/param |",
            "|---|---|---|---|---|---|---|---|",
        ]
        base = rows.get("adamw", {}).get("mean_step_s", math.nan)
        for name, row in sorted(rows.items(), key=lambda item: statistics.mean(item[1]["held_out"])):
            losses, step_s = row["held_out"], row.get("mean_step_s", math.nan)
            state, allocated = (
                row.get(key, math.nan) / row["num_params"] for key in ("state_bytes", "step_allocated_bytes")
            )
            lines.append(
                f"| {name} | {row['lr']:.3g} | {statistics.mean(losses):.4f} | {min(losses):.4f} … {max(losses):.4f} | "
                f"{1e3 * step_s:.1f} ms | {step_s / base:.2f} | {state:.3g} | {allocated:.3g} |"
            )
        lines.append("")
    left_out = [f"- {name} is left out: it is {why}" for name, why in results["left_out"].items()]
    return "\n".join([*lines, *left_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of optimizers, by commas, to add to what the output has")
    parser.add_argument("--resume", action="store_true", help="take over what the output has of the same runs")
    parser.add_argument("--times", action="store_true", help="train nothing: time and draw what the output has")
    parser.add_argument("--steps", type=int, help="steps of each run; default: as published")
    parser.add_argument("--output", type=Path, default=RESULTS / "optim-comparison.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = given.only.split(",") if given.only else names()
    num_steps = {problem: given.steps or steps for problem, steps in NUM_STEPS.items()}
    found = about(("scikit-learn",))
    how = (
        "Trained by `python -m benchmarks.optim.comparison`, timed and drawn by the same with `--times`; "
        f"{found['date']}; {found['machine']}; {found['versions']}. Learning rates from {GRID[0]:.2g} to {GRID[-1]:.2g} in "
        "half decades, tuned on a seed of its own."
    )
    results = {"how": how, "num_steps": num_steps, "left_out": LEFT_OUT}
    before = known(given.output)
    results["problems"] = before if given.only or given.times else {problem: {} for problem in PROBLEMS}
    for name in () if given.times else chosen:
        for problem in PROBLEMS:
            earlier = before[problem].get(name, {}) if given.resume else {}
            results["problems"][problem][name] = compare(problem, name, num_steps[problem], earlier)
        write(results, given.output)
    for problem, rows in results["problems"].items():
        measure_steps(problem, rows)
    write(results, given.output)
    if given.output == RESULTS / "optim-comparison.json":
        plot(results)


def write(results: dict[str, Any], path: Path) -> None:
    """Write what there is so far: a run takes long, and its end may not come."""
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    path.with_suffix(".md").write_text(table(results) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
