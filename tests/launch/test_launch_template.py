"""Ranks that are forked are as good as fresh interpreters, and a template that does not serve is done without."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.launch import WorkerError, Workers, run_processes, template

HERE = "tests.launch.test_launch_template"


def surroundings() -> dict[str, Any]:
    return {
        "folder": os.getcwd(),
        "said": os.environ.get("SAID"),
        "path": sys.path[0],
        "argv": sys.argv,
        "drawn": [random.random(), float(np.random.rand())],
        "session": os.getsid(0) == os.getpid(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "rank": os.environ["RANK"],
    }


def sleep() -> None:
    time.sleep(60)


def is_fork() -> bool:
    """Tell whether a template forked this rank: a fresh interpreter has another command line."""
    return "from trainwright.launch.template import serve" in Path("/proc/self/cmdline").read_text()


@pytest.fixture(scope="module")
def own() -> Iterator[None]:
    """No template yet, then one for these tests that imports no more than every rank needs; the session's one afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_template", None)
        patch.setattr(template, "PACKAGES", ())
        yield


def test_a_rank_has_the_surroundings_of_the_moment_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        template, "PACKAGES", (*template.PACKAGES, "numpy")
    )  # as with a package that imports its generators
    assert np.random.rand() < 1
    run_processes("trainwright.launch.group:rank")  # the template stands before what it hands on is set
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID", "now")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = run_processes(HERE + ":surroundings", num_processes=2)
    for index, each in enumerate(found):
        assert each["folder"] == str(tmp_path) == each["path"]
        assert (each["said"], each["argv"], each["rank"]) == ("now", ["-c"], str(index))
        assert each["session"]
    assert len({value for each in found for value in each["drawn"]}) == 4, "generators of the system's are seeded anew"
    assert run_processes(HERE + ":is_fork") == [True]


def test_one_template_serves_until_a_variable_changes_that_is_read_at_loading(
    own: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        run_processes("trainwright.launch.group:rank", num_processes=2)
    first = template._template
    assert first is not None
    assert first.serves
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert not first.serves
    run_processes("trainwright.launch.group:rank")
    assert template._template is not first
    assert not first.is_alive, "the one that nobody needs has ended"


@pytest.mark.slow  # two interpreters are started
def test_without_a_template_ranks_are_fresh_interpreters(own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_template", None)
    monkeypatch.setattr(template, "_START", "raise SystemExit(3)")
    assert run_processes(HERE + ":is_fork", num_processes=2) == [False, False]


@pytest.mark.slow
def test_ranks_whose_template_is_killed_are_still_told_of_and_ended(own: None) -> None:
    with Workers(2) as workers:
        serving = template._template
        assert serving is not None
        pids = workers.pids
        os.kill(serving._process.pid, signal.SIGKILL)
        serving._process.wait()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank \d of 2 was ended by SIGKILL"):
            workers.call(HERE + ":sleep", timeout_s=30)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cwd").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}/cwd").exists() for pid in pids)
    assert run_processes("trainwright.launch.group:rank", num_processes=2) == [0, 1], (
        "the next ones have a new template"
    )
