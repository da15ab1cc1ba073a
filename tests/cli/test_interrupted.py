"""A run that is interrupted says where it stopped and how to go on; one that cannot save says so before its ranks start."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import report_samples as samples
from tests.process_tree import children, ranks_of
from trainwright.cli import main
from trainwright.cli.errors import Interrupted, status_of
from trainwright.cli.interruption import ending, told_when_interrupted

MODEL = """
import torch
def build():
    return torch.nn.Linear(7, 3), (torch.ones(4, 7),), lambda out, batch: out.square().mean()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "mine.py").write_text(MODEL)
    assert main(["plan", f"{folder}/mine.py:build", "--hardware", "cpu:2", "-o", f"{folder}/plan.json"]) == 0
    return folder


def checkpoint_of_another_run(folder: Path) -> Path:
    """As far as anyone can tell without reading tensors."""
    saved = folder / "step-00000004"
    saved.mkdir(parents=True)
    (saved / "position.json").write_text(json.dumps({"format_version": 1, "step": 4}))
    return folder


def test_ctrl_c_tells_the_step_what_is_saved_and_the_command_that_goes_on(folder: Path) -> None:
    saved = folder / "runs"
    given = ["train", f"{folder}/mine.py:build", "--plan", f"{folder}/plan.json", "--steps", "1000000",
             "--checkpoint", str(saved), "--checkpoint-every", "5"]  # fmt: skip
    running = subprocess.Popen([sys.executable, "-m", "trainwright", *given], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(saved.glob("step-*/position.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = ranks_of(running.pid)
    started = [*children(running.pid), *ranks]
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "interrupted after step " in said
    newest = max(saved.glob("step-*/position.json")).parent
    assert f"saved: {newest}, the state after step {int(newest.name[5:]) + 1}\n" in said
    assert f"to go on from there: trainwright {shlex.join(given)} --resume\n" in said
    assert len(ranks) == 2
    assert not [child for child in started if Path(f"/proc/{child}").exists()]


def test_sigterm_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def action() -> int:
        with told_when_interrupted(lambda: [{"step": 4}], 100, None):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return 0

    assert status_of(action) == 143
    said = capsys.readouterr().err
    assert said.startswith("ended by SIGTERM after step 5 of 100\nsaved: nothing, since no checkpoint was asked for")
    assert signal.getsignal(signal.SIGTERM) is before


def test_before_the_first_step_and_the_first_checkpoint(tmp_path: Path) -> None:
    assert ending([], 100, str(tmp_path)).startswith("interrupted before the first step was done\nsaved: nothing, no")


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Interrupted), told_when_interrupted(lambda: [], 100, None):
        raise KeyboardInterrupt
    assert status_of(lambda: (_ for _ in ()).throw(Interrupted("", 130))) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "make", "said"),
    [
        ("--checkpoint", lambda path: checkpoint_of_another_run(path / "used"), "another run; add --resume"),
        ("--checkpoint", lambda path: path / "mine.py" / "runs", "mine.py is a file"),
        ("--checkpoint", lambda path: "/proc/none", "/proc cannot"),
        ("--metrics", lambda path: path / "none" / "m.jsonl", "there is no directory"),
        ("--metrics", lambda path: path, "is a directory"),
        ("--json", lambda path: path / "none" / "run.json", "there is no directory"),
        ("--trace", lambda path: path / "none" / "run.json", "there is no directory"),
        ("--tensorboard", lambda path: path / "mine.py", "mine.py is a file"),
        ("--data", lambda path: path / "none.txt", "does not exist"),
    ],
)
def test_places_that_will_not_do_are_refused_before_ranks_start(
    option: str, make, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.setattr("trainwright.cli.train.run_worker", lambda *_: pytest.fail("the ranks were started"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: samples)
    before = sorted(tmp_path.rglob("*"))
    place = make(tmp_path)
    made = sorted(tmp_path.rglob("*"))
    assert main(["train", f"{tmp_path}/mine.py:build", "--plan", f"{folder}/plan.json", option, str(place)]) == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == made, "nothing is left behind"
    assert set(before) <= set(made)


def test_resuming_needs_a_checkpoint_before_ranks_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.cli.train.run_worker", lambda *_: pytest.fail("the ranks were started"))
    train = ["train", f"{folder}/mine.py:build", "--plan", f"{folder}/plan.json", "--checkpoint", str(tmp_path)]
    assert main([*train, "--resume"]) == 2
    assert "--resume needs a checkpoint; there is none in" in capsys.readouterr().err
