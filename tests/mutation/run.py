"""How many one-line faults the tests notice: each is planted into a copy, and the tests named beside it are run there.

    python -m tests.mutation.run [--family NAME] [--faults FILE] [--few N] [--record]      (not on Windows: it forks)

A fault is an entry of a JSON list: `family`, `file`, `old` (text that stands there once), `new`, `tests` (files, or
`file::test`), and `why` where it is known to survive. It is noticed where one of the tests fails; the quickest is run first.
`--record` writes the score to benchmarks/results/mutations.md, in place of what stands there of the same families.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize
import scipy.sparse.linalg
import torch

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent
COPIED = ("trainwright", "tests", "benchmarks", "examples", "pyproject.toml")
TIMEOUT_S = 900
"""A fault that makes the tests hang is noticed too."""
Row = dict[str, Any]
PRELOADED = (torch, scipy.optimize, scipy.sparse.linalg)
"""What takes seconds to import, once for all faults: their tests run in forks."""


@dataclass(frozen=True)
class Fault:
    """One line of one file, another in its place, and the tests that are to notice."""

    family: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""
    """Why no test can notice it, where that is known."""


def faults(paths: Iterable[Path] = ()) -> list[Fault]:
    """Return the faults of these files, or of all lists beside this module."""
    found = []
    for path in sorted(paths) or sorted(FAULTS.glob("*.json")):
        entries = json.loads(path.read_text(encoding="utf8"))
        found += [Fault(**{**{"family": path.stem}, **entry, "tests": tuple(entry["tests"])}) for entry in entries]
    return found


def places(fault: Fault, root: Path = ROOT) -> int:
    """Return how often the old text stands in the file: a fault is planted where that is once."""
    return (root / fault.file).read_text(encoding="utf8").count(fault.old)


@contextmanager
def copy_of_the_repository() -> Iterator[Path]:
    """Yield a copy of what the tests need; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results"))
            else:
                shutil.copy(source, target)
        yield Path(folder)


def passes(root: Path, tests: Sequence[str]) -> bool:
    """Return whether the fast tests of these files pass in the copy, in a fork of this process, which has torch already."""
    child = os.fork()
    if child == 0:
        os._exit(_tested(root, tests))
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            if status not in (0, 1, 2) and status >= 0:
                raise RuntimeError(f"pytest ended with {status} on {tests}")
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _tested(root: Path, tests: Sequence[str]) -> int:
    """In the child: the package, the tests and the benchmarks are those of the copy."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(root)
    # No capture of an earlier fault; compiled code is found by its source and stays.
    os.environ["TRAINWRIGHT_CACHE"] = str(root / "cache")
    shutil.rmtree(root / "cache" / "captures", ignore_errors=True)
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]))


def is_noticed(root: Path, fault: Fault) -> bool:
    """Plant the fault into the copy, run its tests, and take it out again."""
    path = root / fault.file
    whole = path.read_text(encoding="utf8")
    if whole.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {fault.old!r} {whole.count(fault.old)} times; one place is needed")
    compiled = Path(importlib.util.cache_from_source(str(path)))
    compiled.unlink(missing_ok=True)  # it is told from the source by a time in whole seconds
    path.write_text(whole.replace(fault.old, fault.new), encoding="utf8")
    try:
        return not passes(root, fault.tests)
    finally:
        path.write_text(whole, encoding="utf8")
        compiled.unlink(missing_ok=True)


def survivors(given: Sequence[Fault], told: Callable[[str], None] = print) -> list[Fault]:
    """Return the faults that no test noticed; without any fault all tests must pass."""
    with copy_of_the_repository() as root:
        seconds = seconds_without_fault(root, {test for fault in given for test in fault.tests})
        left = []
        for place, fault in enumerate(given, start=1):
            noticed = is_noticed(root, replace(fault, tests=tuple(sorted(fault.tests, key=seconds.__getitem__))))
            told(f"{place}/{len(given)} {'noticed ' if noticed else 'SURVIVED'} {fault.file}: {fault.new.strip()}")
            left += [] if noticed else [fault]
        return left


def seconds_without_fault(root: Path, tests: Iterable[str]) -> dict[str, float]:
    """Return how long each of the tests takes in the copy as it is, where all must pass."""
    seconds = {}
    for test in sorted(tests):
        start = time.monotonic()
        if not passes(root, (test,)):
            raise RuntimeError(f"{test} fails without any fault; mend it first")
        seconds[test] = time.monotonic() - start
    return seconds


def few(given: Sequence[Fault], num: int) -> list[Fault]:
    """Return at most `num` faults of each family, spread evenly over its list."""
    kept: list[Fault] = []
    for own in by_family(given).values():
        kept += own if len(own) <= num else [own[place * len(own) // num] for place in range(num)]
    return kept


def by_family(given: Iterable[Fault]) -> dict[str, list[Fault]]:
    planted: dict[str, list[Fault]] = defaultdict(list)
    for fault in given:
        planted[fault.family].append(fault)
    return dict(sorted(planted.items()))


def score(given: Sequence[Fault], left: Sequence[Fault]) -> list[Row]:
    """Return a row a family: how many were planted, how many noticed, which survived and why."""
    return [
        {
            "family": family,
            "planted": len(own),
            "noticed": len(own) - sum(fault in left for fault in own),
            "survivors": "; ".join(_told(fault) for fault in own if fault in left),
        }
        for family, own in by_family(given).items()
    ]


def _told(fault: Fault) -> str:
    reason = f" ({fault.why})" if fault.why else ""
    return f"{Path(fault.file).name}: `{' '.join(fault.new.split())}`{reason}".replace("|", "∣")


def with_the_others(rows: Sequence[Row], path: Path) -> list[Row]:
    """Return these rows among those of the other families in the record at `path`."""
    if not path.exists():
        return list(rows)
    (before,) = json.loads(path.read_text(encoding="utf8"))["sections"].values()
    merged = {row["family"]: row for row in (*before, *rows)}
    return [merged[family] for family in sorted(merged)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", help="only the faults of this family; repeatable")
    parser.add_argument("--faults", action="append", type=Path, default=[], help="another list of faults; repeatable")
    parser.add_argument("--few", type=int, help="at most so many faults of each family")
    parser.add_argument("--json", action="store_true", help="print the score as JSON, last")
    parser.add_argument("--record", action="store_true", help="write the score to benchmarks/results/mutations.md")
    arguments = parser.parse_args()
    given = [each for each in faults(arguments.faults) if not arguments.family or each.family in arguments.family]
    given = given if arguments.few is None else few(given, arguments.few)
    rows = score(given, survivors(given, lambda line: print(line, flush=True)))
    if arguments.json:
        print(json.dumps(rows))
        return
    record(rows, keep=arguments.record)


def record(rows: Sequence[Row], keep: bool) -> None:
    """Print the score, and write it where it is to be kept."""
    from benchmarks.solvers.record import RESULTS, write

    rows = with_the_others(rows, RESULTS / "mutations.json") if keep else rows
    planted, noticed = (sum(int(row[key]) for row in rows) for key in ("planted", "noticed"))
    write(
        "mutations",
        {f"{noticed} of {planted} one-line faults noticed": rows},
        ["Each fault is planted into a copy, and the fast tests of the files named beside it are run there."],
        keep=keep,
    )


if __name__ == "__main__":
    main()
