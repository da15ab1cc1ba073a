"""A sweep by fused models finds what runs alone find; trials of other shapes form arrays of their own."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainwright as tw
from trainwright import fusion
from trainwright.artifacts import UserError
from trainwright.cli import main
from trainwright.fusion import Choice, Range, SweepOptions
from trainwright.fusion.sweep import Sweep, Trial
from trainwright.models.targets import called


def build(width: int = 8, drop: float = 0.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, 3))
    data = [(x[at : at + 16], y[at : at + 16]) for at in range(0, 64, 16)]
    return {"model": model, "batch": data[0], "loss_fn": nn.CrossEntropyLoss(), "data": data, "eval_batch": (x, y)}


def alone(trial: fusion.Trial, steps: int) -> float:
    """The trial's run by hand: the seed builds the model, and begins the stream of its dropout."""
    torch.manual_seed(trial.number)
    parts = build(trial.settings["width"], trial.settings["drop"])
    optimizer = torch.optim.AdamW(parts["model"].parameters(), lr=trial.settings["lr"], weight_decay=0.1)
    torch.manual_seed(trial.number)
    for x, y in itertools.islice(itertools.cycle(parts["data"]), steps):
        optimizer.zero_grad()
        parts["loss_fn"](parts["model"](x), y).backward()
        optimizer.step()
    x, y = parts["eval_batch"]
    return parts["loss_fn"](parts["model"].eval()(x), y).item()


SPACE = {"lr": Range(1e-4, 1.0, log=True), "width": Choice((8, 16)), "drop": Range(0.0, 0.5), "weight_decay": 0.1}


@pytest.mark.parametrize("pruner", ["none", "asha"])
def test_every_trial_is_the_run_alone(pruner: str) -> None:
    options = SweepOptions(trials=7, steps=25, pruner=pruner, min_steps=5, eta=2, at_once=4)
    seen: list[int] = []
    found = fusion.sweep(build, SPACE, options, progress=lambda trials: seen.append(sum(each.steps for each in trials)))
    assert len(found.trials) == 7
    assert seen == sorted(seen)
    assert seen
    for trial in found.trials:
        assert trial.loss == pytest.approx(alone(trial, trial.steps), rel=1e-4), trial
    assert all(trial.steps == 25 for trial in found.trials if trial.state == "done")
    assert any(trial.state == "pruned" for trial in found.trials) == (pruner == "asha")
    x, y = build()["eval_batch"]
    assert nn.functional.cross_entropy(found.model.eval()(x), y).item() == pytest.approx(found.best.loss, rel=1e-6)
    assert found.rows()[0]["trial"] == found.best.number == min(
        (trial for trial in found.trials if trial.state == "done"), key=lambda trial: trial.loss
    ).number  # fmt: skip


def test_shapes_make_arrays() -> None:
    found = fusion.sweep(build, {**SPACE, "lr": 0.01, "drop": 0.1}, SweepOptions(trials=6, steps=2))
    by_array = {
        trial.group: {each.settings["width"] for each in found.trials if each.group == trial.group}
        for trial in found.trials
    }
    assert all(len(widths) == 1 for widths in by_array.values())
    assert found.num_arrays == len(by_array) == len({trial.settings["width"] for trial in found.trials})


def test_a_trial_that_diverges_leaves_the_others() -> None:
    found = fusion.sweep(build, {"lr": Choice((1e-3, math.inf))}, SweepOptions(trials=6, steps=20, optimizer="sgd"))
    states = {trial.number: (trial.settings["lr"], trial.state) for trial in found.trials}
    assert all((state == "diverged") == math.isinf(lr) for lr, state in states.values())
    assert {state for _, state in states.values()} == {"done", "diverged"}


def test_examples_become_shuffled_batches() -> None:
    def of_examples() -> dict[str, Any]:
        parts = build()
        del parts["data"]
        return {**parts, "dataset": TensorDataset(*parts["eval_batch"])}

    found = fusion.sweep(of_examples, {"lr": Range(1e-3, 1e-1, log=True)}, SweepOptions(trials=2, steps=6))
    assert all(math.isfinite(trial.loss) for trial in found.trials)


def test_the_price_of_more_models_is_what_they_take() -> None:
    def one() -> Any:
        return called(lambda: build())

    peaks = {num: fusion.peak_of([one() for _ in range(num)], "adamw", tw.profile) for num in (1, 2, 5)}
    assert peaks[5] - peaks[2] == pytest.approx(3 * (peaks[2] - peaks[1]), rel=0.01)
    assert fusion.how_many_fit(one, "adamw", peaks[5], tw.profile) in (4, 5)
    with pytest.raises(UserError, match="at least one model"):
        fusion.how_many_fit(one, "adamw", peaks[1] - 1, tw.profile)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"lr": "1..0"}, "low < high"),
        ({"lr": "0..1:log"}, "low > 0"),
        ({"lr": "a..b"}, "LOW..HIGH"),
        ({"lr": "1..2:cube"}, "LOW..HIGH"),
    ],
)
def test_ranges_that_are_none(space: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        fusion.parse_space(space)


def test_options_out_of_range() -> None:
    for wrong in ({"trials": 0}, {"steps": 0}, {"eta": 1}, {"at_once": 0}):
        with pytest.raises(UserError):
            SweepOptions(**wrong)
    with pytest.raises(UserError, match="sampler is one of"):
        fusion.sweep(build, SPACE, SweepOptions(trials=1, steps=1, sampler="poem"))
    with pytest.raises(UserError, match="all diverged"):
        fusion.sweep(build, {"lr": float("inf")}, SweepOptions(trials=1, steps=9, optimizer="sgd"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{Path(__file__)}:build"
    path = tmp_path / "found.json"
    words = [
        "--trials",
        "4",
        "--steps",
        "4",
        "--set",
        "lr=1e-3..1e-1:log",
        "--set",
        "width=8,16",
        "--memory",
        "1MiB",
        "--json",
        str(path),
    ]
    assert main(["sweep", spec, *words]) == 0
    captured = capsys.readouterr()
    assert "best: trial" in captured.out
    assert "models fit 1MiB" in captured.err
    assert len(json.loads(path.read_text())["trials"]) == 4
    for wrong, said in (
        (["--set", "lr=1"], "setting to search"),
        (["--set", "lr=1,2", "--set", "poem=1"], "no option poem"),
    ):
        assert main(["sweep", spec, "--trials", "2", "--steps", "1", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_trials_that_were_cut_short_are_ranked_by_how_far_they_came() -> None:
    """A loss after a few steps says less than having survived more of them."""
    trials = [
        Trial(0, {}, "pruned", steps=10, loss=0.2), Trial(1, {}, "done", steps=90, loss=0.5),
        Trial(2, {}, "pruned", steps=30, loss=0.9), Trial(3, {}, "done", steps=90, loss=0.4),
        Trial(4, {}, "diverged", steps=40),
    ]  # fmt: skip
    found = Sweep(trials, trials[3], torch.nn.Identity())
    assert [row["trial"] for row in found.rows()] == [3, 1, 2, 0, 4]
