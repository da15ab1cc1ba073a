"""Draws the comparison of optimizers: loss against steps, loss against time, and what each costs, memory too.

python -m benchmarks.optim.plot        # from benchmarks/results/optim-comparison.json to docs/optimizers-*.png
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results" / "optim-comparison.json"
FOLDER = Path(__file__).parent.parent.parent / "docs"
REFERENCE = "adamw"
FAMILIES = {
    "Adam's kin": ("adabelief", "adan", "diffgrad", "clippedadam", "sgdsai"),
    "less memory": ("adamw8bit", "adam8bit", "lamb8bit", "sgd8bit", "frugal"),
    "SGD's kin": ("sgd-momentum", "clippedsgd", "adadagrad", "adadagradnorm"),
    "with curvature": ("sophiag", "sophiah", "adahessian", "mfac"),
}
SMOOTHED = 15
"""Steps that a point of a curve is the mean of."""
Rows = dict[str, dict[str, Any]]


def plot(results: dict[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Write the three pictures and return where they are."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    drawn = {
        "steps": _curves(pyplot, results, "steps", lambda found, step: step),
        "time": _curves(pyplot, results, "seconds, one core", lambda found, step: step * found["mean_step_s"]),
        "costs": _costs(pyplot, results),
    }
    paths = []
    for name, figure in drawn.items():
        figure.tight_layout()
        paths.append(folder / f"optimizers-{name}.png")
        figure.savefig(paths[-1], dpi=90)
        pyplot.close(figure)
        _few_colors(paths[-1])
    return paths


def _curves(pyplot: Any, results: dict[str, Any], label: str, place: Callable[[dict[str, Any], int], float]) -> Any:
    """A row a problem, a column a family, and AdamW in each."""
    problems = results["problems"]
    figure, axes = pyplot.subplots(
        len(problems), len(FAMILIES), figsize=(4 * len(FAMILIES), 3.6 * len(problems)), sharey="row", squeeze=False
    )
    for row, (problem, rows) in zip(axes, problems.items()):
        for axis, (family, members) in zip(row, FAMILIES.items()):
            for name in (REFERENCE, *members):
                if name in rows:
                    _curve(axis, name, rows[name], place)
            axis.set(title=f"{problem}: {family}", xlabel=label, yscale="log")
            axis.grid(alpha=0.3, which="both")
            axis.legend(fontsize=8)
            _plain_numbers(axis.yaxis)
        row[0].set_ylabel("training loss, mean of 3 seeds")
        row[0].set_ylim(*_limits(rows))
    return figure


def _curve(axis: Any, name: str, found: dict[str, Any], place: Callable[[dict[str, Any], int], float]) -> None:
    smooth = _smooth(found["curve"])
    style: dict[str, Any] = {"color": "black", "lw": 2} if name == REFERENCE else {"lw": 1.2}
    axis.plot([place(found, step) for step in range(len(smooth))], smooth, label=name, **style)


def _limits(rows: Rows) -> tuple[float, float]:
    """From the start, that all share, to a little below the lowest."""
    curves = [_smooth(found["curve"]) for found in rows.values()]
    return 0.9 * min(min(curve) for curve in curves), 1.1 * curves[0][0]


def _costs(pyplot: Any, results: dict[str, Any]) -> Any:
    """A row a problem; in each, the optimizers by their loss, and beside it a step's time and memory."""
    problems = results["problems"]
    figure, axes = pyplot.subplots(len(problems), 3, figsize=(15, 5 * len(problems)), squeeze=False)
    for (losses, times, memory), (problem, rows) in zip(axes, problems.items()):
        names = sorted(rows, key=lambda name: -statistics.mean(rows[name]["held_out"]))
        places, found = range(len(names)), [rows[name] for name in names]
        for place, row in zip(places, found):
            finite = [loss for loss in row["held_out"] if loss != float("inf")]
            losses.plot(finite, [place] * len(finite), "o", color="black", ms=4)
        all_losses = [loss for row in found for loss in row["held_out"]]
        losses.set(title=f"{problem}: held-out loss, a dot a seed")
        losses.set_xscale("log" if max(all_losses) > 3 * min(all_losses) else "linear")
        times.barh(places, [1e3 * row["mean_step_s"] for row in found], color="C0")
        times.set(title="a whole training step, ms, one core")
        state = [row["state_bytes"] / row["num_params"] for row in found]
        beside = [row["step_allocated_bytes"] / row["num_params"] for row in found]
        memory.barh(places, state, color="C1", label="state")
        memory.barh(places, beside, left=state, color="C7", label="most that a step allocates beside it")
        memory.set(title="bytes a parameter")
        memory.legend(fontsize=8)
        for axis in (losses, times, memory):
            axis.set_yticks(places, names, fontsize=8)
            axis.grid(alpha=0.3, axis="x", which="both")
            _plain_numbers(axis.xaxis)
    return figure


def _plain_numbers(axis: Any) -> None:
    """Write 0.05 where a logarithmic axis would write 5 × 10⁻²."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    if axis.get_scale() == "log":
        axis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axis.set_minor_formatter(FormatStrFormatter("%g"))
    axis.set_major_formatter(FormatStrFormatter("%g"))


def _few_colors(path: Path) -> None:
    """Write a picture again with 256 colours, a third of the size."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(path, optimize=True)


def _smooth(curve: list[float]) -> list[float]:
    return [statistics.mean(curve[max(0, step - SMOOTHED + 1) : step + 1]) for step in range(len(curve))]


if __name__ == "__main__":
    for path in plot(json.loads(RESULTS.read_text(encoding="utf8"))):
        print(path)
