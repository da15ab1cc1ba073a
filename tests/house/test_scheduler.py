"""A run of the tests ends, whatever becomes of a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = "from tests.conftest import pytest_xdist_make_scheduler"

ENDS_ITS_WORKER = """
import os, pathlib

def test_before(): pass

def test_dies():
    if not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os._exit(1)

def test_after(): pass
"""


def test_every_test_runs_and_the_run_ends_after_a_worker_has_died(tmp_path: Path) -> None:
    tmp_path.joinpath("conftest.py").write_text(CONFTEST)
    for number in range(8):
        tmp_path.joinpath(f"test_{number}.py").write_text("import time\ndef test_sleeps(): time.sleep(0.05)\n" * 2)
    tmp_path.joinpath("test_x.py").write_text(ENDS_ITS_WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n2", "--dist=loadfile", "--no-loadscope-reorder"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 11 passed" in done.stdout
    assert "crashed while running 'test_x.py::test_dies'" in done.stdout
