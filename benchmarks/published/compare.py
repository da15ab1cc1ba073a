"""Predictions beside published measurements: memory and step time of real training runs, by source.

python -m benchmarks.published.compare                # all rows → benchmarks/results/published.{json,md}, docs/published-*.png
python -m benchmarks.published.compare --only litgpt  # rows whose id begins so, printed alone
python -m benchmarks.published.compare --pages        # the page and the plots anew, from the record

Rows already in the record are taken from there unless --fresh is given. The plots need matplotlib, rows of convolutional nets timm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from . import pages
from .program import CannotExpress, Program
from .programs import program_of
from .rows import Row, load

RECORD = Path(__file__).parent.parent / "results" / "published.json"


_NEEDED = {
    "matplotlib": "the plots; the record and the page are written, and --pages draws them alone",
    "timm": "rows of timm, Lambda and NVIDIA's examples; --only leaves them out",
}


def main() -> int:
    """Predict what is asked for and write or print it; 2 where a library is missing."""
    try:
        _compare()
    except ModuleNotFoundError as missing:
        if missing.name not in _NEEDED:
            raise
        print(
            f"{missing.name} is needed for {_NEEDED[missing.name]}; it is not installed; try pip install 'trainwright[bench]'",
            file=sys.stderr,
        )
        return 2
    return 0


def _compare() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", metavar="PREFIX", help="rows whose id begins so; the record keeps the rest"
    )
    parser.add_argument("--fresh", action="store_true", help="predict anew what the record has")
    parser.add_argument("--pages", action="store_true", help="write the page and plots from the record alone")
    asked = parser.parse_args()
    known = _known()
    done: dict[str, str] = {}
    for row in [] if asked.pages else load():
        if asked.only and not row.id.startswith(tuple(asked.only)):
            continue
        if asked.fresh or row.id not in known:
            alike = done.setdefault(row.setting, row.id)
            found = known[alike] if alike in known and alike != row.id else predicted(row)
            known = _known() | {row.id: found}
            _write(known)
        print(pages.line(row, known[row.id]), flush=True)
    known = _known()
    if asked.pages:
        known = {row.id: _described(row, known[row.id]) for row in load() if row.id in known}
        _write(known)
    pages.write(known)


def predicted(row: Row) -> dict[str, Any]:
    """Return what the model of a GPU says of the row's run, or why it can say nothing."""
    try:
        program = program_of(row)
    except CannotExpress as reason:
        return {"reason": str(reason)}
    return _priced(program) | {"read": program.read}


def _described(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction, with the builder's present remarks on how the row was written.

    The record's stay where the builder needs a library that is missing.
    """
    try:
        return found if "reason" in found else found | {"read": program_of(row).read}
    except CannotExpress as reason:
        return {"reason": str(reason)}
    except ModuleNotFoundError:
        return found


def _priced(program: Program) -> dict[str, Any]:
    from trainwright.hardware import resolve
    from trainwright.profiler import profile

    options = dict(program.options)
    cluster = resolve(program.hardware)
    device = cluster.device.with_tf32() if options.pop("tf32", None) else cluster.device
    attention = {direction: rate * program.attention for direction, rate in device.attention.items()}
    cluster = cluster.model_copy(update={"device": device.model_copy(update={"attention": attention})})
    with program.around():
        found = profile(
            program.model, program.batch, loss_fn=program.loss_fn, make_optimizer=program.make_optimizer,
            hardware=cluster, timeline=False, **options,
        )  # fmt: skip
    return {
        "allocated_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "step_s": found.step_s,
        "peak_at": found.peak_at,
        "hardware": program.hardware,
    }


def _known() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf8"))["rows"] if RECORD.exists() else {}


def _write(known: dict[str, Any]) -> None:
    import torch

    record = {
        "command": "python -m benchmarks.published.compare",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rows": {row.id: known[row.id] for row in load() if row.id in known},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    sys.exit(main())
