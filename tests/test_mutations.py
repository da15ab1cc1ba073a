"""The lists of planted faults fit the code, and the tests notice at least 95 % of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.run import ROOT, Fault, copy_of_the_repository, faults, is_noticed, places, score, survivors

ALL = faults()


def test_every_fault_has_its_place_and_its_tests() -> None:
    assert len(ALL) >= 36
    for fault in ALL:
        assert places(fault) == 1, f"{fault.file}: {fault.old!r} stands there {places(fault)} times"
        assert fault.new != fault.old
        assert fault.tests
        for test in fault.tests:
            assert (ROOT / test).exists(), test


def test_every_family_of_solvers_has_faults() -> None:
    planted = {Path(fault.file).parts[1:3] for fault in ALL}
    folders = {("solvers", path.name) for path in (ROOT / "trainwright" / "solvers").iterdir() if path.is_dir()}
    folders = {folder for folder in folders if not folder[1].startswith("__")}
    assert len(folders) >= 9
    assert folders <= planted
    assert any(parts[0] == "selection" for parts in planted)


def test_the_score_counts_by_family() -> None:
    one, two = (Fault("a", "f.py", "old", new, ("tests/t.py",)) for new in ("x", "y"))
    assert score([one, two], [two]) == [{"family": "a", "planted": 2, "noticed": 1, "survivors": "f.py: y"}]


@pytest.mark.slow
def test_a_fault_is_noticed_and_a_change_of_words_is_not() -> None:
    tests = ("tests/test_solver_steps_constrained.py",)
    file = "trainwright/solvers/constrained/ai_sqp.py"
    with copy_of_the_repository() as root:
        assert is_noticed(root, Fault("x", file, "(0.5 - o.beta) * point.eta2", "(0.5 + o.beta) * point.eta2", tests))
        assert not is_noticed(root, Fault("x", file, '"""∇ₓL."""', '"""The gradient."""', tests))


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_the_tests_notice_95_percent_of_the_faults() -> None:
    left = survivors(ALL)
    assert len(left) <= 0.05 * len(ALL), "\n".join(f"{fault.file}: {fault.old} → {fault.new}" for fault in left)
