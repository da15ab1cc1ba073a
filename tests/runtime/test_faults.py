"""Runs that go wrong: ranks that die or hang, losses that are not finite, disks that are full; and how they go on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import trainwright as tw
from tests import fault_cases
from tests.builders import PLAIN
from tests.pool import Pool
from tests.process_tree import assert_ended, children, ranks_of
from trainwright.cli import main
from trainwright.cli.recovery import with_restarts
from trainwright.cli.saving import KEEP
from trainwright.launch import WorkerError, run_processes
from trainwright.runtime.training.watchdog import RankHung, listen

CASES = "tests.fault_cases:"
ROOT = Path(__file__).parents[2]
MODEL = "zoo:gpt2-tiny"


@cache
def planned() -> str:
    model, batch, loss_fn = fault_cases.build()
    return tw.plan(model, batch, hardware="cpu:2", solver="fsdp", loss_fn=loss_fn).to_json()


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "plan.json"
    assert main(["plan", MODEL, "--hardware", "cpu:2", "-o", str(path)]) == 0
    return path


# Losses that are not finite.


def test_a_bad_step_is_left_out(pool2: Pool, tmp_path: Path) -> None:
    found = pool2.run(
        CASES + "not_finite", plan=planned(), on_nan="skip", folder=str(tmp_path), bad_step=2, value=math.nan
    )
    expected = pool2.run(CASES + "without_the_step", plan=planned(), left_out=2)[0]
    for each in found:
        assert each["raised"] == ""
        assert [skipped for _, _, skipped in each["losses"]] == [False, False, True, False, False]
        assert [loss for step, loss, _ in each["losses"] if step != 2] == expected["losses"]
        assert each["weights"] == expected["weights"], "neither weights nor moments have seen it"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_stops_before_a_bad_step_and_goes_on_from_there(pool2: Pool, tmp_path: Path, value: float) -> None:
    question = {"plan": planned(), "folder": str(tmp_path)}
    found = pool2.run(CASES + "not_finite", **question, on_nan="stop", bad_step=3, value=value)
    before = pool2.run(CASES + "without_the_step", plan=planned(), left_out=-1, num_steps=3)[0]
    for each in found:
        assert each["raised"].startswith("NotFinite: ")
        assert "at step 3; the weights are those of the step before" in each["raised"]
        assert each["weights"] == before["weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"], "what there was is saved"
    resumed = pool2.run(CASES + "goes_on", **question)[0]
    whole = pool2.run(CASES + "without_the_step", plan=planned(), left_out=-1)[0]
    assert resumed == {"first": 3, "weights": whole["weights"]}


def test_a_bad_step_can_be_a_failure_that_names_gradients(pool2: Pool, tmp_path: Path) -> None:
    question = {"plan": planned(), "folder": str(tmp_path), "on_nan": "raise", "bad_step": 1, "value": math.nan}
    for found in pool2.run(CASES + "not_finite", **question):
        assert found["raised"].startswith("FloatingPointError")
        assert "0.weight" in found["raised"]


def test_skipping_for_ever_stops(pool2: Pool) -> None:
    with pytest.raises(tw.Refusal, match="at step 10 for 11 steps in a row"):
        pool2.run(CASES + "always_bad", plan=planned())


# Ranks that hang.


@pytest.mark.parametrize(
    ("where", "said"),
    [
        pytest.param(
            "data",
            r"rank 1 hung: it has been at step 2 in the data for more than 3 s; waiting: rank 0 in a",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data of all",
            r"rank 0 hung: it has been at step 2 in the data for more than 3 s; rank 1 hung: it has been at",
            marks=pytest.mark.slow,
        ),
        ("backward", r"rank 1 hung: it has been at step 2 in the backward for more than 3 s; waiting: rank 0 in "),
        pytest.param(
            "process",
            r"rank 1 hung: it does not respond; last heard of at step \d in .*; waiting: rank 0 in a",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hung_rank_is_named_with_its_op(where: str, said: str) -> None:
    with pytest.raises(RankHung, match=said):
        run_processes(CASES + "hangs", {"plan": planned(), "where": where}, 2, timeout_s=120)


def test_a_late_beat_is_not_silence() -> None:
    """On a loaded machine a thread may be kept from telling for a few periods."""
    looks = iter(range(100))

    def look() -> dict[int, dict[str, int]]:
        at = next(looks)
        return {0: {"beat": at}, 1: {"beat": int(at >= 5)}, 2: {"beat": 0}}

    assert listen(look, lambda: None)[1] == [2]


# Ranks that die.


def test_failures_are_tried_again_and_mistakes_are_not() -> None:
    calls: list[bool] = []

    def run(restarted: bool) -> str:
        calls.append(restarted)
        if len(calls) < 3:
            raise WorkerError("rank 0 of 2 was ended by SIGKILL")
        return "done"

    assert with_restarts(run, 2) == "done"
    assert calls == [False, True, True]
    calls.clear()
    with pytest.raises(WorkerError):
        with_restarts(run, 1)
    for mistake in (tw.UserError, tw.Refusal):
        tries: list[bool] = []

        def wrong(restarted: bool, mistake: type[Exception] = mistake, tries: list[bool] = tries) -> None:
            tries.append(restarted)
            raise mistake("no")

        with pytest.raises(mistake):
            with_restarts(wrong, 5)
        assert tries == [False]


@pytest.mark.slow
def test_what_restarts_and_resuming_need(plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", MODEL, "--plan", str(plan_path), "--steps", "2"]
    assert main([*train, "--restarts", "1"]) == 2
    assert "--restarts needs the directory of the checkpoints" in capsys.readouterr().err
    assert main([*train, "--checkpoint", str(tmp_path / "none"), "--resume"]) == 2
    assert "--resume needs a checkpoint" in capsys.readouterr().err
    assert main([*train, "--on-nan", "panic"]) == 2
    assert "stop, skip or raise" in capsys.readouterr().err
    assert main([*train, "--metrics", "/dev/full"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert main([*train, "--checkpoint", "/proc/none"]) == 2
    assert "a directory that can be written to" in capsys.readouterr().err
    assert main([*train, "--checkpoint", str(tmp_path / "own")]) == 0
    assert main([*train, "--checkpoint", str(tmp_path / "own")]) == 2
    error = capsys.readouterr().err
    assert "has those of another run" in error
    assert "Traceback" not in error


def _train(plan_path: Path, folder: Path, num_steps: int, model: str = MODEL) -> list[str]:
    return [
        "train", model, "--plan", str(plan_path), "--steps", str(num_steps), "--lr", "0.01",
        "--data", str(plan_path), "--metrics", str(folder / "metrics.jsonl"),
    ]  # fmt: skip


def losses_of(folder: Path) -> dict[int, float]:
    """The loss of every step in the file, each of which stands there once and whole."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["loss"] for row in rows}


def soak(plan_path: Path, folder: Path, num_kills: int, num_steps: int, seed: int, model: str = MODEL) -> Counter[str]:
    """Kill a random rank at random moments of a run, compare with the run that nobody disturbed; return the kills by place."""
    whole, disturbed = folder / "whole", folder / "disturbed"
    whole.mkdir()
    disturbed.mkdir()
    assert main(_train(plan_path, whole, num_steps, model)) == 0
    chance = random.Random(seed)
    saving = ["--checkpoint", str(disturbed / "saved"), "--checkpoint-every", "3", "--restarts", str(num_kills)]
    process = start(["-m", "trainwright", *_train(plan_path, disturbed, num_steps, model), *saving], disturbed)
    seen: list[int] = []
    places: Counter[str] = Counter()
    for number in range(num_kills):
        starting = chance.random() < 0.2
        until_step = 0 if starting else (number + 1) * num_steps // (num_kills + 2)
        ranks = _ranks_at_work(process, seen, disturbed, until_step, chance)
        if not ranks:
            break
        seen += ranks
        if starting:
            time.sleep(chance.uniform(0, 1))  # forked ranks are at their first step after one to two seconds
        victim = chance.randrange(len(ranks))
        place = _place(disturbed, starting)
        with contextlib.suppress(ProcessLookupError):  # the run may have come to its end meanwhile
            os.kill(ranks[victim], signal.SIGKILL)
            places[f"rank {victim}, {place}"] += 1
    process.wait(timeout=240)
    out, err = ((disturbed / name).read_text() for name in ("out", "err"))
    assert process.returncode == 0, err
    assert places.total() == num_kills, err
    assert err.count("; restart ") == num_kills, err
    assert losses_of(disturbed) == losses_of(whole)
    assert len(losses_of(whole)) == num_steps
    assert f"{num_steps} steps on 2 ranks" in out
    assert_ended(seen)
    assert all(path.name.startswith("step-") for path in (disturbed / "saved").iterdir()), "nothing half written"
    assert len(list((disturbed / "saved").iterdir())) == KEEP
    return places


def _place(folder: Path, starting: bool) -> str:
    """Where the run is, as far as its files tell."""
    if any((folder / "saved").glob(".step-*.tmp")):
        return "while a checkpoint is written"
    return "while the ranks start" if starting else "in a step"


def start(arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start Python; what it prints goes to files, for a pipe that nobody reads would stop it."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=out, stderr=err)


def _ranks_at_work(
    process: subprocess.Popen[bytes],
    before: list[int],
    folder: Path,
    until_step: int,
    chance: random.Random,
    ranks_under: Callable[[int], list[int]] = ranks_of,
) -> list[int]:
    """Wait until ranks that were not seen before have come to `until_step`, and a moment more; return them."""
    deadline = time.monotonic() + 600  # a loaded machine takes minutes to start ranks
    while process.poll() is None and time.monotonic() < deadline:
        ranks = [pid for pid in ranks_under(process.pid) if pid not in before]
        lines = (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0
        if len(ranks) == 2 and lines >= until_step:
            time.sleep(chance.uniform(0, 0.05))
            return ranks
        time.sleep(0.002)
    return []


@pytest.mark.slow  # test_checkpoint.py kills ranks while they write, and loads what is left
def test_a_run_whose_ranks_are_killed_has_the_curve_of_one_that_nobody_disturbs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", PLAIN, "--hardware", "cpu:2", "--solver", "fsdp", "-o", str(path)]) == 0
    soak(path, tmp_path, num_kills=1, num_steps=12, seed=1, model=PLAIN)


@pytest.mark.slow
def test_stages_whose_ranks_are_killed_have_the_curve_of_those_that_nobody_disturbs(tmp_path: Path) -> None:
    path = tmp_path / "staged.json"
    stages = ["--pipeline", "2", "--mesh", "1", "--micro-batches", "4", "--pipeline-schedule", "1f1b"]
    assert main(["plan", MODEL, "--hardware", "cpu:2", *stages, "-o", str(path)]) == 0
    places = soak(path, tmp_path, num_kills=3, num_steps=20, seed=3)
    assert {place.partition(",")[0] for place in places} == {"rank 0", "rank 1"}, "either stage was killed"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_fifty_kills(plan_path: Path, tmp_path: Path) -> None:
    places = soak(plan_path, tmp_path, num_kills=50, num_steps=400, seed=2)
    assert {place.partition(", ")[2] for place in places} == {
        "while the ranks start", "in a step", "while a checkpoint is written",
    }  # fmt: skip
    print(*(f"{count:3} {place}" for place, count in sorted(places.items())), sep="\n")


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_and_they_go_on(plan_path: Path, tmp_path: Path) -> None:
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    whole.mkdir()
    disturbed.mkdir()
    assert main(_train(plan_path, whole, 300)) == 0
    command = [*_train(plan_path, disturbed, 300), "--checkpoint", str(disturbed / "saved"), "--checkpoint-every", "30"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = start([*torchrun, "-m", "trainwright", *command], disturbed)
    ranks = _ranks_at_work(process, [], disturbed, 10, random.Random(3), children)  # torchrun forks no template
    assert ranks, (disturbed / "err").read_text()
    os.kill(ranks[1], signal.SIGKILL)
    process.wait(timeout=240)
    assert process.returncode == 0, (disturbed / "err").read_text()
    assert losses_of(disturbed) == losses_of(whole)
