"""The verbs one after another, as a user runs them: plan, check, explain, train, verify; and the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright as tw
from tests.builders import PLAIN
from tests.grids import slow_but
from trainwright.artifacts import Plan, Report
from trainwright.cli import demo, main
from trainwright.cli.model import ModelOptions

ROOT = Path(__file__).parents[2]
MODEL = (PLAIN, "--batch-size", "4", "--set", "depth=2")
OF_A_PLAN = ("--model", *MODEL)  # a plan names it, and makes no code run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flow")


@pytest.fixture(scope="module")
def plan_path(folder: Path) -> Path:
    path = folder / "plan.json"
    assert main(["plan", *MODEL, "--hardware", "cpu:2", "-o", str(path), "--html", str(folder / "plan.html")]) == 0
    return path


def test_a_plan_is_written_and_shown(plan_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.from_json(plan_path)
    assert plan.num_ranks == 2
    assert plan.model.options["batch_size"] == 4
    assert 0 < plan.predicted.peak_bytes <= plan.budget_bytes
    page = (folder / "plan.html").read_text(encoding="utf8")
    assert "Memory over the step" in page
    assert main(["plan", *MODEL, "--hardware", "cpu:2", "--json", "-"]) == 0
    printed = Plan.parse(capsys.readouterr().out)
    assert printed.modules == plan.modules, "the same question, the same answer"


def test_what_does_not_fit_is_answered_no(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *MODEL, "--hardware", "cpu:2", "--solver", "ddp", "--memory", "1MiB", "--json", "-"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "for which there is a plan" in printed.err


def test_the_recipes_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["plan", *MODEL, "--hardware", "cpu:2", "--compare", "--time-limit", "2"]
    assert main([*question, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["plans"]) == {"ddp", "fsdp", "megatron", "two-stage", "joint"}
    assert all(row["feasible"] for row in found["plans"].values()), "without --memory nothing is infeasible"
    assert found["budget_bytes"] is None
    peaks = {name: row["peak_bytes"] for name, row in found["plans"].items()}
    budget = (peaks["ddp"] + min(peaks.values())) // 2
    assert peaks["ddp"] > budget
    assert main([*question, "--memory", f"{budget}B", "--json", "-"]) == 0
    tight = json.loads(capsys.readouterr().out)
    assert tight["budget_bytes"] == budget
    assert tight["plans"]["ddp"]["feasible"] is False
    assert tight["plans"]["ddp"]["step_s"] is None
    assert tight["plans"]["joint"]["peak_bytes"] <= budget


def test_the_fastest_of_several_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--hardware", "cpu:2", "--optimizer", "adamw,sgd", "--json", "-"]) == 0
    plan = Plan.parse(capsys.readouterr().out)
    assert plan.optimizer in ("adamw", "sgd")
    other = {"adamw": "sgd", "sgd": "adamw"}[plan.optimizer]
    assert any(f"{plan.optimizer} was chosen" in note and other in note for note in plan.notes)


def test_a_plan_is_checked_without_solving(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.from_json(plan_path)
    assert main(["check", str(plan_path), *OF_A_PLAN, "--json", "-"]) == 0
    again = Plan.parse(capsys.readouterr().out)
    assert again.predicted.peak_bytes == plan.predicted.peak_bytes
    assert main(["check", str(plan_path), *OF_A_PLAN, "--memory", f"{plan.predicted.peak_bytes - 1}B"]) == 1
    assert "more would do" in capsys.readouterr().err


def test_a_plan_is_explained(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(plan_path), *OF_A_PLAN]) == 0
    assert "layers.{0-1}.up:linear" in capsys.readouterr().out
    assert main(["explain", str(plan_path), "no.such.module", *OF_A_PLAN]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_plan_is_trained_and_resumed(plan_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed equals uninterrupted, and the options of the plan need not be said again."""
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    train = ["train", PLAIN, "--plan", str(plan_path), "--lr", "0.01", "--metrics", str(metrics)]
    assert main([*train, "--steps", "6"]) == 0
    assert "6 steps on 2 ranks" in capsys.readouterr().out
    whole = _losses(metrics)
    assert main([*train, "--steps", "3", "--checkpoint", str(checkpoints)]) == 0
    assert main([*train, "--steps", "6", "--checkpoint", str(checkpoints), "--resume"]) == 0
    assert "3 steps on 2 ranks" in capsys.readouterr().out.splitlines()[-3]
    assert _losses(metrics) == whole
    assert len(whole) == 6
    assert whole[-1] < whole[0]


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def test_a_plan_is_verified(plan_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "report.html"
    assert main(["verify", PLAIN, "--plan", str(plan_path), "--json", "-", "--html", str(out)]) == 0
    report = Report.parse(capsys.readouterr().out)
    assert report.passed
    assert len(report.peak_bytes) == 2
    assert "Predicted against measured" in out.read_text(encoding="utf8")


def test_a_budget_that_is_exceeded_does_not_verify(tmp_path: Path) -> None:
    path = str(tmp_path / "tight.json")
    assert main(["plan", PLAIN, "--hardware", "cpu:2", "--solver", "fsdp", "-o", path]) == 0
    plan = Plan.from_json(path)
    plan.model_copy(update={"budget_bytes": plan.predicted.peak_bytes // 2}).to_json(path)
    assert main(["verify", PLAIN, "--plan", path]) == 1


def test_another_model_is_the_users_mistake(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{ROOT}/examples/own_model.py:build", "--plan", str(plan_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow  # tests/runtime/test_nodes.py starts them by two torchruns
def test_the_ranks_that_torchrun_started_are_used(plan_path: Path, folder: Path) -> None:
    command = ["-m", "trainwright", "train", PLAIN, "--plan", str(plan_path), "--steps", "2"]
    done = _torchrun(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 steps on 2 ranks") == 1, "one rank speaks"


@pytest.mark.slow  # tests/runtime/test_own_model.py starts such a script by torchrun
def test_the_example_script_trains(plan_path: Path, folder: Path) -> None:
    plan = folder / "example.json"
    assert main(["plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "-o", str(plan)]) == 0
    done = _torchrun(str(ROOT / "examples" / "train.py"), str(plan))
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0]


def test_the_example_of_an_own_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{ROOT}/examples/own_model.py:build"
    assert main(["plan", spec, "--set", "width=64", "--batch-size", "8", "--hardware", "cpu:2", "--json", "-"]) == 0
    assert Plan.parse(capsys.readouterr().out).batch["0"].shape == (8, 32)


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


SMALL_GPT2 = ["n_layer=1", "n_embd=48", "n_head=3", "n_positions=64", "vocab_size=260"]
DEMOS = [
    (ModelOptions(PLAIN, batch_size=4, settings=["depth=2"]), (0.6,)),
    (ModelOptions("zoo:gpt2", batch_size=4, seq_len=64, settings=SMALL_GPT2), (0.9,)),
    (ModelOptions("zoo:gpt2", batch_size=4, seq_len=64, settings=SMALL_GPT2), (0.05, 0.9)),
]


@pytest.mark.parametrize(("model", "shares"), slow_but(DEMOS[:1], DEMOS), ids=["plain", "gpt2", "gpt2-twice"])
def test_the_demo(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: ModelOptions,
    shares: tuple[float, ...],
) -> None:
    """The whole tour on a model that is smaller still."""
    monkeypatch.setattr(demo, "MODEL", model)
    monkeypatch.setattr(demo, "BUDGET_SHARES", shares)
    monkeypatch.setattr(
        tw, "calibrate", lambda *_, **__: tw.hardware("cpu:2")
    )  # tests/hardware/test_hardware.py measures
    assert main(["demo", "--steps", "5", "--html", str(tmp_path / "demo.html")]) == 0
    printed = capsys.readouterr().out
    for part in ("ddp does not fit", "joint", "5 steps on 2 ranks", "verified: 2 ranks", "peak, rank 1"):
        assert part in printed, part
    page = (tmp_path / "demo.html").read_text(encoding="utf8")
    for part in ("Predicted against measured", "Memory over the step", "The recipes side by side", "Decisions"):
        assert part in page, part


def test_the_demo_reads_the_same_files_everywhere() -> None:
    files = demo.python_library()
    assert len(files) > 50
    assert files == demo.python_library()
    sizes = [os.path.getsize(path) for path in files]
    assert sizes == sorted(sizes, reverse=True)
