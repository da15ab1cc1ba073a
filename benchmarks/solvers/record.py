"""A benchmark's record: a table as Markdown and JSON, with command, date, machine and versions."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "results"
CPU_SECONDS = "Seconds are the processor's, of one thread: waiting for other work on the machine is not counted."
Rows = Sequence[Mapping[str, Any]]


def write(
    name: str,
    sections: Mapping[str, Rows],
    remarks: Sequence[str] = (),
    packages: Sequence[str] = (),
    keep: bool = True,
) -> None:
    """Print the record, and write it to `results/NAME.md` and `.json` where `keep`; `sections` maps a heading to its rows."""
    head = about(packages)
    lines = [f"# {name}", "", *(f"- {key}: {value}" for key, value in head.items()), ""]
    for heading, rows in sections.items():
        lines += [f"## {heading}", "", *table(rows), ""]
    lines += [f"- {remark}" for remark in remarks]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if not keep:
        return
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf8")
    record = {
        **head,
        "sections": {heading: _plain(rows) for heading, rows in sections.items()},
        "remarks": list(remarks),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1, default=float) + "\n", encoding="utf8")


def write_text(name: str, found: Any, text: str, keep: bool) -> None:
    """Print a record with a text of its own, and write both to `results/NAME.md` and `.json` where `keep`."""
    print(text)
    if keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(text, encoding="utf8")
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


def about(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec is not None else sys.argv[0]
    return {
        "command": " ".join(["python", program, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch",
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("torch", "numpy", "scipy", *packages)),
        "python": platform.python_version(),
    }


def table(rows: Rows) -> list[str]:
    """Return the rows as lines of a Markdown table; the first row gives the columns."""
    columns = list(rows[0])
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def _plain(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows with null for NaN, which JSON does not know."""
    return [{key: None if _cell(value) == "–" else value for key, value in row.items()} for row in rows]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
