"""Predicted against measured memory of a steady-state step: every architecture, every way of training it.

    python -m benchmarks.profiler.peaks [NAME ...] [--variant NAME] [--threads N] [--out FILE.json]

Each model is profiled, then really trained for two steps under the allocator's records. Measured are the peak of the
second step and what its (last) forward left alive. The record is written as JSON and, beside it, as a table in
Markdown; without `--out` a line a model is printed and nothing written.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.profiler import ForwardMarks, measure, profile, reference_step, static_bytes, storage_bytes

from .architectures import TABLE, Architecture, find

Row = dict[str, Any]
TOLERANCE = 3e-3
_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Variant:
    """One way of training."""

    name: str
    make_optimizer: MakeOptimizer
    autocast: str | None = None
    accumulate: int = 1
    checkpointing: bool = False


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def foreach(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=True)


VARIANTS = (
    Variant("adamw", adamw),
    Variant("sgd-momentum", momentum),
    Variant("adamw-foreach", foreach),
    Variant("autocast-bf16", adamw, autocast="bf16"),
    Variant("accumulate-2", adamw, accumulate=2),
    Variant("checkpointing", adamw, checkpointing=True),
)


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    chosen = [find(name) for name in arguments.names] or TABLE
    variants = [variant for variant in VARIANTS if arguments.variant in (None, variant.name)]
    rows = []
    for architecture in chosen:
        for variant in variants:
            if not variant.checkpointing or can_checkpoint(architecture):
                rows.append(compare(architecture, variant))
                print(_line(rows[-1]), flush=True)
    if arguments.out:
        record = {**_conditions(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
        arguments.out.with_suffix(".md").write_text(as_markdown(record), encoding="utf8")


def compare(architecture: Architecture, variant: Variant) -> Row:
    """Profile one model and run it; sizes in bytes, times in seconds."""
    model, batch, loss_fn = architecture.build()
    if variant.checkpointing:
        model.gradient_checkpointing_enable()
    how = {"autocast": variant.autocast, "accumulate": variant.accumulate}
    predicted = profile(model, batch, loss_fn=loss_fn, make_optimizer=variant.make_optimizer, **how)
    _forget_tables()
    optimizer = variant.make_optimizer(model.parameters())
    static = static_bytes(model) + storage_bytes(_state_of(optimizer))

    def step() -> None:
        reference_step(model, optimizer, batch, loss_fn, observer=ForwardMarks(), **how)

    record = measure(step)
    return {
        "model": architecture.name,
        "kind": architecture.kind,
        "variant": variant.name,
        "num_threads": torch.get_num_threads(),
        **_both("peak", predicted.peak_bytes, static + record.peak_of_step(1)),
        **_both("saved", predicted.saved_bytes, record.kept_bytes[-1]),
        "num_missed_frees": record.num_missed_frees,
        "peak_at": predicted.peak_at,
        "profile_s": predicted.profile_s,
        "step_s": _seconds(step),
    }


def can_checkpoint(architecture: Architecture) -> bool:
    """Tell whether the model has `gradient_checkpointing_enable`, and means it."""
    return getattr(architecture.build()[0], "supports_gradient_checkpointing", False)


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Some make it before their first step, hence before the records begin."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _forget_tables() -> None:
    """Empty the caches of the models' library, lest the run finds tables there that the profile made before it."""
    for cached in gc.get_objects():
        # its type, since a weak proxy answers `isinstance` for what it stands for, which may be gone
        if issubclass(type(cached), _CACHED_FUNCTION) and cached.__module__.startswith("transformers."):
            cached.cache_clear()


def _both(what: str, predicted: int, measured: int) -> Row:
    return {
        f"predicted_{what}_bytes": predicted,
        f"measured_{what}_bytes": measured,
        f"{what}_error": round(predicted / measured - 1, 6),
    }


def _seconds(step: Callable[[], None], num_runs: int = 3) -> float:
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures of the table; default: all")
    parser.add_argument("--variant", choices=[variant.name for variant in VARIANTS], help="only this one")
    parser.add_argument("--threads", type=int, default=1, help="kernels' scratch depends on it (default 1)")
    parser.add_argument("--out", type=Path, help="write FILE.json and FILE.md")
    return parser.parse_args()


def _conditions() -> Row:
    import transformers

    return {
        "command": "python -m benchmarks.profiler.peaks " + shlex.join(_without_out(sys.argv[1:])),
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _without_out(arguments: list[str]) -> list[str]:
    """Where the record goes is no condition of it."""
    return [word for before, word in zip(["", *arguments], arguments) if "--out" not in (before, word)]


def _line(row: Row) -> str:
    errors = f"peak {row['peak_error']:+.3%}  saved {row['saved_error']:+.3%}"
    mark = "" if is_within(row) else "  MISS"
    return f"{row['model']:20} {row['variant']:14} {errors}  {row['measured_peak_bytes']:>10}  {row['peak_at']}{mark}"


def is_within(row: Row) -> bool:
    """Tell whether both errors are within the bar."""
    return _worst(row) <= TOLERANCE


def _worst(row: Row) -> float:
    return max(abs(row["peak_error"]), abs(row["saved_error"]))


def as_markdown(record: Row) -> str:
    """Return the record as a page: the conditions, and a table a variant."""
    rows = record["rows"]
    lines = [
        "# Memory of a steady-state step: predicted against the allocator's records",
        "",
        f"`{record['command']}`, {record['date']}. {record['machine']} ({record['cpu_capability']}), "
        f"{record['num_threads']} thread(s); torch {record['torch']}, transformers {record['transformers']}.",
        "",
        f"{sum(map(is_within, rows))} of {len(rows)} rows within {TOLERANCE:.1%}, peak and saved; the largest error is "
        f"{max(map(_worst, rows)):.3%}. Bytes; the batch is not counted. *saved*: what the last forward allocated and "
        "is alive at its end. *time*: seconds to profile over seconds of the real step.",
    ]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        lines += ["", f"## {variant}", "", _HEAD, "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
        lines += [_markdown_row(row) for row in rows if row["variant"] == variant]
    return "\n".join(lines) + "\n"


_HEAD = "| model | kind | peak predicted | measured | error | saved predicted | measured | error | time |"


def _markdown_row(row: Row) -> str:
    cells = [row["model"], row["kind"]]
    for what in ("peak", "saved"):
        cells += [
            f"{row[f'predicted_{what}_bytes']:,}",
            f"{row[f'measured_{what}_bytes']:,}",
            f"{row[f'{what}_error']:+.3%}",
        ]
    missed = "" if is_within(row) else " missed"
    return "| " + " | ".join([*cells, f"{row['profile_s'] / row['step_s']:.1f}{missed}"]) + " |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
