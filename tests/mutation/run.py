"""How many one-line faults the tests notice: each is planted into a copy, and the tests named beside it are run there.

    python -m tests.mutation.run [--family NAME] [--faults FILE] [--record]

A fault is an entry of a JSON list: `family`, `file`, `old` (text that stands there once), `new`, `tests` (files). It is
noticed where one of the tests fails. `--record` writes the score to benchmarks/results/mutations.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent
COPIED = ("trainwright", "tests", "benchmarks", "examples", "pyproject.toml")
TIMEOUT_S = 900
"""A fault that makes the tests hang is noticed too."""


@dataclass(frozen=True)
class Fault:
    """One line of one file, another in its place, and the tests that are to notice."""

    family: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


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
    """Return whether the fast tests of these files pass in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with {done.returncode} on {tests}: {done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def is_noticed(root: Path, fault: Fault) -> bool:
    """Plant the fault into the copy, run its tests, and take it out again."""
    path = root / fault.file
    whole = path.read_text(encoding="utf8")
    if whole.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {fault.old!r} {whole.count(fault.old)} times; one place is needed")
    path.write_text(whole.replace(fault.old, fault.new), encoding="utf8")
    try:
        return not passes(root, fault.tests)
    finally:
        path.write_text(whole, encoding="utf8")


def survivors(given: Sequence[Fault], told: Callable[[str], None] = print) -> list[Fault]:
    """Return the faults that no test noticed; without any fault all tests must pass."""
    with copy_of_the_repository() as root:
        for tests in sorted({fault.tests for fault in given}):
            if not passes(root, tests):
                raise RuntimeError(f"{tests} fail without any fault; mend them first")
        left = []
        for place, fault in enumerate(given, start=1):
            noticed = is_noticed(root, fault)
            told(f"{place}/{len(given)} {'noticed ' if noticed else 'SURVIVED'} {fault.file}: {fault.new.strip()}")
            left += [] if noticed else [fault]
        return left


def score(given: Sequence[Fault], left: Sequence[Fault]) -> list[dict[str, object]]:
    """Return a row a family: how many were planted, how many noticed."""
    planted: dict[str, list[Fault]] = defaultdict(list)
    for fault in given:
        planted[fault.family].append(fault)
    return [
        {
            "family": family,
            "planted": len(own),
            "noticed": len(own) - sum(fault in left for fault in own),
            "survivors": "; ".join(f"{Path(fault.file).name}: {fault.new.strip()}" for fault in own if fault in left),
        }
        for family, own in sorted(planted.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", help="only the faults of this family; repeatable")
    parser.add_argument("--faults", action="append", type=Path, default=[], help="another list of faults; repeatable")
    parser.add_argument("--record", action="store_true", help="write the score to benchmarks/results/mutations.md")
    arguments = parser.parse_args()
    given = [each for each in faults(arguments.faults) if not arguments.family or each.family in arguments.family]
    left = survivors(given, lambda line: print(line, flush=True))
    from benchmarks.solvers.record import write

    write(
        "mutations",
        {f"{len(given) - len(left)} of {len(given)} one-line faults noticed": score(given, left)},
        ["Each fault is planted into a copy, and the fast tests of the files named beside it are run there."],
        keep=arguments.record,
    )


if __name__ == "__main__":
    main()
