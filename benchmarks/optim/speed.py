"""Time of an optimizer's step against the fastest AdamW of torch, and against what else implements the same method.

    python -m benchmarks.optim.speed [--sizes 10 100] [--rounds N] [--only NAME ...] [--keep] [--libraries FOLDER]

Parameters are square matrices, `--sizes` millions of elements together. The fastest of AdamW's loop, foreach and fused
forms is found first; then each method's step alternates with it, and the median of the ratios counts. A method that
moves b bytes an element may take b / 28 × 1.2 of AdamW's time: 28 are AdamW's own (parameter and two moments read and
written, gradient read). `--libraries` is a folder to import pytorch_optimizer, bitsandbytes and torchao from.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainwright import optim

from ..solvers.record import write

ADAMW_BYTES = 28
BAR = 1.2
ADAMW_FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SIDE = {10: (1000, 10), 100: (2000, 25)}
"""Millions of elements: the matrices' side, and how many there are."""
Make = Callable[[list[nn.Parameter]], Any]


def parameters(millions: int) -> list[nn.Parameter]:
    side, count = SIDE[millions]
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(side, side, generator=draw)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(side, side, generator=draw) * 1e-2
    return params


def candidates(only: list[str]) -> Iterator[tuple[str, str, Make, float]]:
    """Yield library or form, method, how it is made, and bytes an element."""
    for name in optim.names():
        entry = optim.record(name)
        if not entry.cls.__module__.startswith("trainwright") or entry.needs_loss or (only and name not in only):
            continue
        moved = 12 + 2 * entry.state_bytes((4096, 4096)) / 4096**2
        for form, options in (("loop", {}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
            yield form, name, lambda params, name=name, options=options: optim.create(name, params, **options), moved
    yield from _others(only)


def _others(only: list[str]) -> Iterator[tuple[str, str, Make, float]]:
    for library, class_name, name in (
        ("pytorch_optimizer", "AdaBelief", "adabelief"),
        ("pytorch_optimizer", "Adan", "adan"),
        ("pytorch_optimizer", "DiffGrad", "diffgrad"),
        ("bitsandbytes.optim", "AdamW8bit", "adamw8bit"),
        ("bitsandbytes.optim", "SGD8bit", "sgd8bit"),
        ("torchao.optim", "AdamW8bit", "adamw8bit"),
    ):
        if only and name not in only:
            continue
        options = {"lr": 1e-3, "momentum": 0.9} if name == "sgd8bit" else {"lr": 1e-3}
        moved = 12 + 2 * optim.record(name).state_bytes((4096, 4096)) / 4096**2
        yield (
            library,
            name,
            lambda params, made=(library, class_name), options=options: _made(*made)(params, **options),
            moved,
        )


def _made(library: str, class_name: str) -> Any:
    module = __import__(library, fromlist=[class_name])
    return getattr(module, class_name)


def step_s(optimizer: Any) -> float:
    begin = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begin


def step_bytes(optimizer: Any) -> int:
    """The most that a step allocates and frees again."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate((event["args"]["Bytes"] for event in events), initial=0))


def fastest_adamw(params: list[nn.Parameter], num_rounds: int) -> tuple[str, dict[str, float]]:
    pairs = {form: torch.optim.AdamW(params, **options) for form, options in ADAMW_FORMS.items()}
    times: dict[str, list[float]] = {form: [] for form in pairs}
    for turn in range(num_rounds + 1):
        for form, optimizer in pairs.items():
            times[form] += [step_s(optimizer)] * (turn > 0)
    medians = {form: statistics.median(own) for form, own in times.items()}
    return min(medians, key=lambda form: medians[form]), medians


def row(
    form: str, name: str, make: Make, moved: float, params: list[nn.Parameter], reference: Any, num_rounds: int
) -> dict[str, Any]:
    num_elements = sum(param.numel() for param in params)
    shown: dict[str, Any] = {"method": name, "form": form}
    try:
        optimizer = make(params)
        for _ in range(3):
            optimizer.step()
        ratios, times = [], []
        for _ in range(num_rounds):
            base, own = step_s(reference), step_s(optimizer)
            ratios.append(own / base)
            times.append(own)
        temporaries = step_bytes(optimizer) / num_elements
    except Exception as error:
        return {**shown, "ns/param": f"not run: {type(error).__name__}: {str(error)[:90]}"}
    finally:
        gc.collect()
    bar = moved / ADAMW_BYTES * BAR
    return {
        **shown,
        "ns/param": round(statistics.median(times) / num_elements * 1e9, 2),
        "of AdamW's time": round(statistics.median(ratios), 2),
        "bar": round(bar, 2),
        "met": "yes" if statistics.median(ratios) <= bar else "no",
        "step temporaries B/param": round(temporaries, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], choices=sorted(SIDE))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/optim-speed.{json,md}")
    parser.add_argument("--libraries", default="")
    given = parser.parse_args()
    if given.libraries:
        sys.path.append(given.libraries)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
        tempfile.mkdtemp()
    )  # an older cache may hold code without vector instructions
    sections = {}
    for millions in given.sizes:
        params = parameters(millions)
        best, medians = fastest_adamw(params, given.rounds)
        reference = torch.optim.AdamW(params, **ADAMW_FORMS[best])
        reference.step()
        own = [
            {"method": "torch adamw", "form": form, "ns/param": round(found / millions / 1e6 * 1e9, 2),
             "of AdamW's time": round(found / medians[best], 2), "bar": "", "met": "", "step temporaries B/param": ""}
            for form, found in medians.items()
        ]  # fmt: skip
        for candidate in candidates(given.only):
            own.append(row(*candidate, params, reference, given.rounds))
            print(own[-1], flush=True)
        sections[f"{millions} million parameters"] = own
    remarks = [
        "of AdamW's time: median over rounds of own step / the fastest AdamW step just before it.",
        "bar: bytes moved an element / 28 × 1.2.",
    ]
    write("optim-speed", sections, remarks, packages=("pytorch-optimizer", "bitsandbytes", "torchao"), keep=given.keep)


if __name__ == "__main__":
    main()
