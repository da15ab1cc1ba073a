"""`tw.train`: the loop of the command line as a function, on the ranks that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.pool import Pool
from tests.training_cases import Squares
from trainwright.cli import main
from trainwright.launch import listening


def planned(num_ranks: int, solver: str) -> tw.Plan:
    parts = Squares.build()
    return tw.plan(
        parts["model"],
        parts["batch"],
        loss_fn=parts["loss_fn"],
        hardware=f"cpu:{num_ranks}",
        optimizer="sgd",
        solver=solver,
    )


@pytest.fixture(scope="module")
def alone() -> tw.Plan:
    return planned(1, "joint")


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron"])
def test_two_ranks_train_as_one_process_does(pool2: Pool, tmp_path: Path, solver: str) -> None:
    for found in pool2.run(
        "tests.training_cases:trains_as_one_process", plan=planned(2, solver).to_json(), folder=str(tmp_path / "run")
    ):
        assert found["losses"] < 1e-12
        assert found["weights"] < 1e-12
        assert found["resumed"]
        assert found["same_weights"]
        assert found["steps"] == [0, 1, 2, 3, 4]


def test_a_run_says_at_which_step_it_begins_the_first_one_too(alone: tw.Plan) -> None:
    """One that is started anew before its first checkpoint repeats its steps: whoever counts them has to know."""
    told: list[dict[str, Any]] = []
    with listening(told.append):
        tw.train(Squares.build, alone, steps=2, lr=0.01)
    assert [event["step"] for event in told if event.get("kind") == "begun"] == [0]


def test_data_takes_the_place_of_the_models_own(alone: tw.Plan, tmp_path: Path) -> None:
    parts = Squares.build()
    batch, keywords = parts["batch"], {"loss_fn": Squares.loss, "steps": 3, "lr": 0.01}
    once = tw.train(parts["model"], alone, batch, **keywords, metrics=tmp_path / "run.jsonl")
    several = tw.train(Squares.build()["model"], alone, [batch] * 3, **keywords)
    own = tw.train(Squares.build, alone, steps=3, lr=0.01)
    assert once.losses == several.losses != own.losses
    lines = [json.loads(line)["loss"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert tuple(lines) == once.losses


def test_it_runs_what_the_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the model that was planned hold in Python too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef build(batch_size=4, width=8):\n"
        "    loss_fn = lambda output, batch: output.square().mean()\n"
        "    return torch.nn.Linear(6, width), (torch.randn(batch_size, 6),), loss_fn\n"
    )
    model = ["train.py:build", "--set", "width=5", "--batch-size", "2"]
    assert main(["plan", *model, "--hardware", "cpu:1", "--optimizer", "sgd", "-o", "plan.json"]) == 0
    assert (
        main(
            [
                "train",
                "train.py:build",
                "--plan",
                "plan.json",
                "--steps",
                "3",
                "--json",
                "run.json",
                "--metrics",
                "m.jsonl",
            ]
        )
        == 0
    )
    run = tw.train("train.py:build", tw.Plan.from_json("plan.json"), steps=3)
    assert run.losses == tuple(json.loads(line)["loss"] for line in Path("m.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("model", "keywords", "message"),
    [
        (Squares.build, {"steps": 0}, "a number of steps is needed, 1 or more; got 0"),
        (
            Squares.build,
            {"resume": True},
            "resume needs the directory of the checkpoints; got none; add checkpoint=DIR",
        ),
        (Squares.build, {"checkpoint_every": 5}, "checkpoint_every needs the directory"),
        (Squares.build, {"data": [], "dataset": []}, "got data and dataset"),
        (Squares.build, {"data": [(torch.zeros(4, 6).double(),)], "steps": 2}, "it ended before step 1"),
        (Squares.build, {"optimizer": "adahesian"}, "did you mean adahessian"),
        (torch.nn.Linear(6, 4), {}, "data to train on is needed beside a model; got none; give data=BATCHES"),
        (lambda: torch.nn.Linear(6, 4), {}, "returned Linear; return one of those"),
        (3, {}, "a model is needed as an nn.Module, zoo:NAME, .* got int"),
    ],
)
def test_mistakes_are_the_users(alone: tw.Plan, model: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        tw.train(model, alone, **keywords)


def test_more_ranks_than_there_are_say_how_to_start_them() -> None:
    with pytest.raises(tw.UserError, match="2 ranks are needed by this plan"):
        tw.train(Squares.build, planned(2, "ddp"))
