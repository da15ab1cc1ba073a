"""Time of an optimizer's step against the fastest AdamW of torch, and against what else implements the same method.

    pip install --no-deps --target FOLDER pytorch-optimizer bitsandbytes torchao
    python -m benchmarks.optim.speed [--sizes 1 10 100] [--forms FORM ...] [--rounds N] [--only NAME ...] [--keep]
                                     [--dtype bf16] [--libraries FOLDER]

Parameters are square matrices, `--sizes` millions of elements together. The fastest of AdamW's loop, foreach and fused
forms is found first; then each method's step alternates with it, and the median of the ratios counts. A method that
moves b bytes an element may take b / 28 × 1.2 of AdamW's time: 28 are AdamW's own (parameter and two moments read and
written, gradient read); 14 for parameters in bf16, whose moments torch keeps in bf16 and ours in fp32. Times are of the
processor. The bar is for methods whose update of an element needs that element alone; clipping takes the
whole gradient's k-th largest coordinate, LAMB and AdAdaGrad-Norm take norms, and FRUGAL chooses rows. `--libraries` is
the folder to import the others from. `--keep` adds the rows to those of earlier runs. Compiled code is kept for the run
alone, unless TORCHINDUCTOR_CACHE_DIR says where.
"""

from __future__ import annotations

import argparse
import functools
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

from ..solvers.record import RESULTS, write

ADAMW_BYTES = {"fp32": 28, "bf16": 14}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BAR = 1.2
ADAMW_FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SIDE = {1: (500, 4), 10: (1000, 10), 100: (2000, 25)}
"""Millions of elements: the matrices' side, and how many there are."""
FORMS: dict[str, dict[str, bool]] = {"loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
NOT_ELEMENTWISE = ("adadagradnorm", "clippedsgd", "clippedadam", "frugal", "lamb8bit", "normalizedsgd")
OTHERS = (
    ("pytorch_optimizer", "AdaBelief", "adabelief"),
    ("pytorch_optimizer", "Adan", "adan"),
    ("pytorch_optimizer", "DiffGrad", "diffgrad"),
    ("bitsandbytes.optim", "AdamW8bit", "adamw8bit"),
    ("bitsandbytes.optim", "SGD8bit", "sgd8bit"),
    ("torchao.optim", "AdamW8bit", "adamw8bit"),
)
Make = Callable[[list[nn.Parameter]], Any]


def parameters(millions: int, dtype: torch.dtype) -> list[nn.Parameter]:
    side, count = SIDE[millions]
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(side, side, generator=draw).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = (torch.randn(side, side, generator=draw) * 1e-2).to(dtype)
    return params


def candidates(only: list[str], forms: list[str], dtype: str) -> Iterator[tuple[str, str, Make, float]]:
    """Yield library or form, method, how it is made, and bytes an element."""
    for name in optim.names():
        entry = optim.record(name)
        own = entry.cls.__module__.startswith("trainwright") and entry.reads != "model" and not entry.needs_loss
        if not own or (only and name not in only):
            continue
        for form in forms:
            if form in FORMS and form in entry.forms:
                yield form, name, functools.partial(_own, name, form), _moved(name, dtype)
    for library, class_name, name in OTHERS:
        if "others" in forms and (not only or name in only):
            yield library, name, functools.partial(_other, library, class_name, name), _moved(name, dtype)


def _moved(name: str, dtype: str) -> float:
    """Bytes an element: parameter read and written, gradient read, state read and written."""
    return 3 * DTYPES[dtype].itemsize + 2 * optim.record(name).state_bytes((4096, 4096), dtype) / 4096**2


def _own(name: str, form: str, params: list[nn.Parameter]) -> Any:
    return optim.create(name, params, **FORMS[form])


def _other(library: str, class_name: str, name: str, params: list[nn.Parameter]) -> Any:
    module = __import__(library, fromlist=[class_name])
    momentum = {"momentum": 0.9} if name == "sgd8bit" else {}
    return getattr(module, class_name)(params, lr=1e-3, **momentum)


def step_s(optimizer: Any) -> float:
    begin = time.process_time()
    optimizer.step()
    return time.process_time() - begin


def allocated_bytes(call: Callable[[], Any]) -> int:
    """Return the most that a call allocates beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
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
    form: str,
    name: str,
    make: Make,
    moved: float,
    params: list[nn.Parameter],
    reference: Any,
    num_rounds: int,
    adamw_bytes: int,
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
        temporaries = allocated_bytes(optimizer.step) / num_elements
    except Exception as error:
        return {**shown, "ns/param": f"not run: {type(error).__name__}: {str(error)[:90]}"}
    finally:
        gc.collect()
    bar, ratio = moved / adamw_bytes * BAR, statistics.median(ratios)
    barred = name not in NOT_ELEMENTWISE
    return {
        **shown,
        "ns/param": round(statistics.median(times) / num_elements * 1e9, 2),
        "of AdamW's time": round(ratio, 2),
        "bar": round(bar, 2) if barred else "",
        "met": ("yes" if ratio <= bar else "no") if barred else "",
        "step temporaries B/param": round(temporaries, 2),
    }


def section(millions: int, only: list[str], forms: list[str], num_rounds: int, dtype: str) -> list[dict[str, Any]]:
    """Measure every candidate at one size; torch's AdamW comes first."""
    params = parameters(millions, DTYPES[dtype])
    best, medians = fastest_adamw(params, num_rounds)
    reference = torch.optim.AdamW(params, **ADAMW_FORMS[best])
    reference.step()
    found: list[dict[str, Any]] = [
        {"method": "torch adamw", "form": form, "ns/param": round(median / millions * 1e3, 2),
         "of AdamW's time": round(median / medians[best], 2), "bar": "", "met": "", "step temporaries B/param": ""}
        for form, median in medians.items()
    ]  # fmt: skip
    for candidate in candidates(only, forms, dtype):
        found.append(row(*candidate, params, reference, num_rounds, ADAMW_BYTES[dtype]))
        print(found[-1], flush=True)
    return found


def _heading(millions: int, dtype: str) -> str:
    return f"{millions} million parameters" + (f", {dtype}" if dtype != "fp32" else "")


def merged(name: str, sections: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Add the rows to those of the record, in place of rows of the same method and form."""
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text(encoding="utf8"))["sections"] if path.exists() else {}
    for heading, rows in sections.items():
        by_key = {(row["method"], row["form"]): row for row in [*known.get(heading, []), *rows]}
        known[heading] = list(by_key.values())
    return dict(known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], choices=sorted(SIDE))
    parser.add_argument("--forms", nargs="+", default=[*FORMS, "others"], choices=[*FORMS, "others"])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", action="store_true", help="add to benchmarks/results/optim-speed.{json,md}")
    parser.add_argument("--libraries", default="")
    given = parser.parse_args()
    if given.libraries:
        sys.path.append(given.libraries)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # an older cache may hold code without vector instructions
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    sections = {
        _heading(millions, given.dtype): section(millions, given.only, given.forms, given.rounds, given.dtype)
        for millions in given.sizes
    }
    remarks = [
        "of AdamW's time: median over rounds of own step / the fastest AdamW step just before it.",
        "bar: bytes moved an element / 28 (of bf16: 14) × 1.2; none for methods that read more than the element.",
        "Measured in several runs, each row against AdamW in its own; the AdamW rows are the last run's.",
        "Processor time, one thread of a Zen 4 core, on a machine that did other work too: memory is shared with that.",
    ]
    if given.keep:
        sections = merged("optim-speed", sections)
    write("optim-speed", sections, remarks, packages=("pytorch-optimizer", "bitsandbytes", "torchao"), keep=given.keep)


if __name__ == "__main__":
    main()
