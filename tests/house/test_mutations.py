"""The lists of planted faults fit the code, and the tests notice at least 95 % of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.run import ROOT, Fault, by_family, faults, few, places, score, with_the_others

ALL = faults()


def test_every_fault_has_its_place_and_its_tests() -> None:
    assert len(ALL) >= 160
    for fault in ALL:
        assert places(fault) == 1, f"{fault.file}: {fault.old!r} stands there {places(fault)} times"
        assert fault.new != fault.old
        assert fault.tests
        for test in fault.tests:
            assert (ROOT / test.partition("::")[0]).exists(), test


def test_every_family_of_solvers_has_faults() -> None:
    planted = {Path(fault.file).parts[1:3] for fault in ALL}
    folders = {("solvers", path.name) for path in (ROOT / "trainwright" / "solvers").iterdir() if path.is_dir()}
    folders = {folder for folder in folders if not folder[1].startswith("__")}
    assert len(folders) >= 9
    assert folders <= planted
    assert any(parts[0] == "selection" for parts in planted)


def test_the_score_counts_by_family() -> None:
    one, two = (Fault("a", "f.py", "old", new, ("tests/t.py",)) for new in ("x", "y"))
    assert score([one, two], [two]) == [{"family": "a", "planted": 2, "noticed": 1, "survivors": "f.py: `y`"}]


def run(*arguments: str) -> list[dict[str, Any]]:
    """The score by family, from a process of its own: the runner forks, which one with threads must not."""
    command = [sys.executable, "-m", "tests.mutation.run", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_a_fault_is_noticed_and_a_change_of_words_is_not(tmp_path: Path) -> None:
    same = {
        "file": "trainwright/solvers/constrained/ai_sqp.py",
        "tests": ["tests/solvers/test_solver_steps_constrained.py"],
    }
    planted = [
        {**same, "old": "(0.5 - o.beta) * point.eta2", "new": "(0.5 + o.beta) * point.eta2"},
        {**same, "old": '"""∇ₓL."""', "new": '"""The gradient."""'},
    ]
    path = tmp_path / "planted.json"
    path.write_text(json.dumps(planted), encoding="utf8")
    (row,) = run("--faults", str(path))
    assert (row["family"], row["planted"], row["noticed"]) == ("planted", 2, 1)
    assert "The gradient" in row["survivors"]


def test_few_faults_are_spread_over_every_family() -> None:
    kept = few(ALL, 3)
    assert {len(own) for own in by_family(kept).values()} == {3}
    assert by_family(kept).keys() == by_family(ALL).keys()
    assert set(kept) <= set(ALL)
    assert few(ALL, 1000) == [fault for own in by_family(ALL).values() for fault in own]


def test_a_family_that_ran_again_takes_the_place_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "mutations.json"
    rows = [{"family": name, "planted": 2, "noticed": 1, "survivors": "x"} for name in ("a", "c")]
    assert with_the_others(rows, path) == rows
    path.write_text(json.dumps({"sections": {"2 of 4": rows}}), encoding="utf8")
    again = {"family": "c", "planted": 2, "noticed": 2, "survivors": ""}
    assert with_the_others([again], path) == [rows[0], again]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tests_notice_faults_of_every_family() -> None:
    """Three faults of each; all of them are for `python -m tests.mutation.run --record`."""
    for row in run("--few", "3"):
        assert row["planted"] == row["noticed"] == 3, row["survivors"]
