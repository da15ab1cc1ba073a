"""Every optimizer on the same two problems, with equal budgets and learning rates found by one rule.

    python -m benchmarks.optim.comparison        # about 15 minutes on one core; writes results and plot

Rule: each optimizer is run once, on a seed of its own, at every learning rate of one logarithmic grid, and at one more
beyond an end while the best stands at that end (three at most); the best loss on held-out data wins. Then three other
seeds with it. All use linear decay with a twentieth of warm-up, no weight decay, and otherwise the defaults of
`trainwright.optim.create`, but for periods made for longer runs (see `SETTINGS`).
"""

from __future__ import annotations

import argparse
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
from .problems import PROBLEMS, Problem

RESULTS = Path(__file__).parent.parent / "results"
PLOT = Path(__file__).parent.parent.parent / "docs" / "optimizers.png"
NUM_STEPS = {"gpt": 150, "digits": 150}
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
    """Train and return the curve, the loss on held-out data, the seconds of a step and the bytes kept."""
    optimizer = made(problem, name, lr)
    schedule = LinearDecay(optimizer, num_steps, num_warmup_steps=num_steps // 20)
    curve: list[float] = []
    seconds = []
    for step in range(num_steps):
        began = time.perf_counter()
        loss = one_step(problem, optimizer, name, problem.batch(step))
        seconds.append(time.perf_counter() - began)
        schedule.step()
        curve.append(loss)
        if not math.isfinite(loss) or loss > 3 * curve[0]:
            return {"held_out": math.inf, "curve": curve}
    held_out = problem.held_out_loss()
    return {
        "held_out": held_out if math.isfinite(held_out) else math.inf,
        "curve": curve,
        "step_s": statistics.median(seconds),
        "state_bytes": kept_bytes(optimizer),
    }


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


def tuned(problem_name: str, name: str, num_steps: int) -> dict[float, float]:
    """The loss on held-out data at each learning rate that was tried."""
    tried: dict[float, float] = {}

    def attempt(lr: float) -> None:
        tried[lr] = run(PROBLEMS[problem_name](TUNING_SEED), name, lr, num_steps)["held_out"]

    for lr in GRID:
        attempt(lr)
    for _ in range(3):
        best, lowest, highest = min(tried, key=lambda lr: tried[lr]), min(tried), max(tried)
        if best not in (lowest, highest):
            break
        attempt(best * 10**0.5 if best == highest else best / 10**0.5)
    return tried


def compare(problem_name: str, name: str, num_steps: int) -> dict[str, Any]:
    tried = tuned(problem_name, name, num_steps)
    lr = min(tried, key=lambda lr: tried[lr])
    runs = [run(PROBLEMS[problem_name](seed), name, lr, num_steps) for seed in SEEDS]
    curves = [found["curve"] for found in runs]
    length = min(map(len, curves))
    found = {
        "lr": lr,
        "tuning": {f"{lr:.3g}": round(loss, 4) if math.isfinite(loss) else None for lr, loss in sorted(tried.items())},
        "held_out": [round(each["held_out"], 4) for each in runs],
        "curve": [round(statistics.mean(curve[step] for curve in curves), 4) for step in range(length)],
        "step_s": statistics.median(each.get("step_s", math.inf) for each in runs),
        "state_bytes": runs[0].get("state_bytes"),
        "num_params": sum(param.numel() for param in PROBLEMS[problem_name](0).model.parameters()),
    }
    print(
        f"{problem_name} {name}: lr {lr:.3g}, held out {found['held_out']}, {1e3 * found['step_s']:.1f} ms", flush=True
    )
    return found


def known(path: Path) -> dict[str, dict[str, Any]]:
    """What was measured before, to which `--only` adds."""
    found = json.loads(path.read_text(encoding="utf8"))["problems"] if path.exists() else {}
    return {problem: dict(found.get(problem, {})) for problem in PROBLEMS}


def table(results: dict[str, Any]) -> str:
    lines = ["# Optimizers on two small problems", "", results["how"], ""]
    for problem, rows in results["problems"].items():
        lines += [
            f"## {problem}, {results['num_steps'][problem]} steps",
            "",
            "| optimizer | learning rate | held-out loss, mean of 3 | lowest … highest | step | against AdamW's | state B/param |",
            "|---|---|---|---|---|---|---|",
        ]
        base = rows["adamw"]["step_s"] if "adamw" in rows else math.nan
        for name, row in sorted(rows.items(), key=lambda item: statistics.mean(item[1]["held_out"])):
            losses = row["held_out"]
            state = row["state_bytes"] / row["num_params"] if row["state_bytes"] is not None else math.nan
            lines.append(
                f"| {name} | {row['lr']:.3g} | {statistics.mean(losses):.4f} | {min(losses):.4f} … {max(losses):.4f} | "
                f"{1e3 * row['step_s']:.1f} ms | {row['step_s'] / base:.2f} | {state:.3g} |"
            )
        lines.append("")
    left_out = [f"- {name} is left out: it is {why}" for name, why in results["left_out"].items()]
    return "\n".join([*lines, *left_out])


def plot(results: dict[str, Any], path: Path) -> None:
    """Loss against steps and against seconds, a row a problem."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results["problems"]), 2, figsize=(13, 5 * len(results["problems"])), squeeze=False
    )
    for row, (problem, rows) in enumerate(results["problems"].items()):
        ordered = sorted(rows.items(), key=lambda item: statistics.mean(item[1]["held_out"]))
        for index, (name, found) in enumerate(ordered):
            smooth = _smooth(found["curve"])
            style = {"label": name, "color": pyplot.cm.tab20(index % 20), "lw": 2.2 if name == "adamw" else 1.1}
            axes[row][0].plot(range(len(smooth)), smooth, **style)
            axes[row][1].plot([found["step_s"] * step for step in range(len(smooth))], smooth, **style)
        for axis, label in zip(axes[row], ("steps", "seconds (1 core)")):
            axis.set(xlabel=label, ylabel="training loss, mean of 3 seeds", title=problem, yscale="log")
        axes[row][1].legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _smooth(curve: list[float], width: int = 15) -> list[float]:
    return [statistics.mean(curve[max(0, step - width + 1) : step + 1]) for step in range(len(curve))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of optimizers, by commas, to add to what the output has")
    parser.add_argument("--steps", type=int, help="steps of each run; default: as published")
    parser.add_argument("--output", type=Path, default=RESULTS / "optim-comparison.json")
    parser.add_argument("--plot", type=Path, default=PLOT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = given.only.split(",") if given.only else names()
    num_steps = {problem: given.steps or steps for problem, steps in NUM_STEPS.items()}
    how = (
        f"{'; '.join(f'{key}: {value}' for key, value in about(('scikit-learn',)).items())}. Other work ran on the machine. "
        f"Learning rates from {GRID[0]:.2g} to {GRID[-1]:.2g} in half decades, tuned on a seed of its own."
    )
    results = {"how": how, "num_steps": num_steps, "left_out": LEFT_OUT}
    results["problems"] = known(given.output) if given.only else {problem: {} for problem in PROBLEMS}
    for name in chosen:
        for problem in PROBLEMS:
            results["problems"][problem][name] = compare(problem, name, num_steps[problem])
        write(results, given.output)
    plot(results, given.plot)


def write(results: dict[str, Any], path: Path) -> None:
    """Write what there is so far: a run takes long, and its end may not come."""
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    path.with_suffix(".md").write_text(table(results) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
