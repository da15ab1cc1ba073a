"""Predicted against measured peak of a steady-state step, for small models of the zoo.

    python -m benchmarks.profiler.peaks [NAME ...] [--out FILE]

Each model is profiled, then really trained for two steps under the allocator's records. One JSON record is printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

from trainwright.capture import zoo
from trainwright.profiler import measure, profile, reference_step, static_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models of the zoo; default: all that end in -tiny")
    parser.add_argument("--out", type=Path, help="write the record there as well")
    arguments = parser.parse_args()
    names = arguments.names or [name for name in zoo.names() if name.endswith("-tiny")]
    record = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rows": [compare(name) for name in names],
    }
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf8")


def compare(name: str) -> dict[str, object]:
    """Profile one model and run it; sizes in bytes."""
    model, batch = zoo.build(name, device="cpu")
    model.train()
    predicted = profile(model, batch, name=name)
    static = static_bytes(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)
    measured = static + measure(lambda: reference_step(model, optimizer, batch)).peak_of_step(1)
    return {
        "model": name,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured,
        "error": round(predicted.peak_bytes / measured - 1, 6),
        "peak_at": predicted.peak_at,
        "profile_s": round(predicted.profile_s, 2),
    }


if __name__ == "__main__":
    main()
