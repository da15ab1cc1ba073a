"""`trainwright train --stream`: what users type, and what they get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainwright.cli import main

MODEL = """
import torch
from torch import nn

def build(width: int = 8, depth: int = 4):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(depth)])
    x = torch.randn(4, width)
    return {"model": model, "batch": (x,), "loss_fn": lambda output: (output - 1).square().mean(), "eval_batch": (x,)}

def no_blocks():
    model = nn.Linear(3, 3)
    return {"model": model, "batch": (torch.ones(2, 3),), "loss_fn": lambda output: output.sum()}

def diverges():
    found = build()
    return {**found, "loss_fn": lambda output: output.mean() * float("nan")}
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf8")
    return f"{tmp_path / 'model.py'}:build"


def steps_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf8"))["steps"])


def test_a_disk_and_the_host_train_alike_and_a_run_goes_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    common = ["train", model, "--optimizer", "mezo", "--lr", "1e-2", "--optimizer-option", "weight_decay=0.1"]
    runs = {}
    for name, place in (("host", "host"), ("disk", str(tmp_path / "disk"))):
        out = str(tmp_path / f"{name}.json")
        assert main([*common, "--stream", place, "--steps", "4", "--eval-every", "2", "--json", out]) == 0
        runs[name] = [(step["loss"], step.get("eval_loss")) for step in steps_of(tmp_path / f"{name}.json")]
    assert runs["host"] == runs["disk"]
    assert [held_out is not None for _, held_out in runs["host"]] == [False, True, False, True]
    assert not list((tmp_path / "disk").iterdir())
    assert "a step brings in" in capsys.readouterr().out
    saved = ["--checkpoint", str(tmp_path / "run"), "--stream", "host"]
    assert main([*common, *saved, "--steps", "2"]) == 0
    out = str(tmp_path / "rest.json")
    assert main([*common, *saved, "--steps", "2"]) == 2  # another run's steps are there
    assert main([*common, *saved, "--steps", "4", "--resume", "--json", out]) == 0
    assert [step["loss"] for step in steps_of(tmp_path / "rest.json")] == [loss for loss, _ in runs["host"][2:]]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-4"]


def test_weights_come_from_files_and_two_processes_agree(model: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    names = [
        (f"{block}.0.{kind}", (8, 8) if kind == "weight" else (8,)) for block in range(4) for kind in ("weight", "bias")
    ]
    save_file({name: torch.randn(shape) for name, shape in names}, tmp_path / "weights.safetensors")
    common = ["train", model, "--optimizer", "mezo", "--lr", "0", "--stream", "host", "--steps", "1"]
    weights = ["--stream-weights", str(tmp_path / "weights.safetensors")]
    assert main([*common, *weights, "--nproc", "2", "--checkpoint", str(tmp_path / "run")]) == 0
    for name, _ in names:
        file = next((tmp_path / "run" / "step-1").glob(f"*-{name[0]}.safetensors"))
        with safe_open(file, "pt") as found, safe_open(tmp_path / "weights.safetensors", "pt") as given:
            torch.testing.assert_close(found.get_tensor(name), given.get_tensor(name))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizer", "adamw", "--stream", "host"], "MeZO is needed"),
        (["--stream", "host"], "add --optimizer mezo"),
        (["--optimizer", "mezo", "--stream", "{tmp}/missing"], "missing"),
        (["--optimizer", "mezo", "--stream", "{tmp}"], "empty"),
        (["--optimizer", "mezo", "--stream", "host", "--stream", "{tmp}"], "leave host out"),
        (["--optimizer", "mezo", "--stream", "host", "--stream-memory", "600B"], "three times"),
        (["--optimizer", "mezo", "--stream", "host", "--stream-storage", "int8"], "--stream-storage is one of"),
        (["--optimizer", "mezo", "--stream", "host", "--stream-blocks", "layers.*"], "'layers.*'"),
        (["--optimizer", "mezo", "--stream", "host", "--stream-weights", "{tmp}/no.safetensors"], "has none"),
        (["--optimizer", "mezo", "--stream", "host", "--plan", "{tmp}/no.json"], "a streamplan file is needed"),
        (["--optimizer", "mezo", "--stream", "host", "--optimizer-option", "momentum=0.9"], "momentum"),
        (
            ["--optimizer", "mezo", "--stream", "host", "--resume", "--checkpoint", "{tmp}/run"],
            "--resume needs a streamed",
        ),
        (["--stream-storage", "bf16", "--plan", "plan.json"], "--stream-storage needs --stream"),
        ([], "a plan is needed"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["train", model, *(text.replace("{tmp}", str(tmp_path)) for text in arguments)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert [name for name in sorted(path.name for path in tmp_path.iterdir()) if name != "__pycache__"] == before


def test_a_model_without_blocks_and_one_that_diverges(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--optimizer", "mezo", "--stream", "host", "--steps", "2"]
    assert main(["train", model.replace("build", "no_blocks"), *common]) == 2
    assert "no list of modules" in " ".join(capsys.readouterr().err.split())
    assert main(["train", model.replace("build", "diverges"), *common]) == 1
    assert "a loss that is a number" in " ".join(capsys.readouterr().err.split())
    assert main(["train", model.replace("build", "diverges"), *common, "--on-nan", "skip"]) == 0
