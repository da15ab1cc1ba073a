"""Training on a dataset of examples, all or a chosen subset: batches, ranks, and the command line."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.models import clusters
from tests.pool import Pool
from trainwright.artifacts import Plan, UserError
from trainwright.cli import main
from trainwright.runtime import ExampleBatches, SelectedBatches

CASES = "tests.selected_cases:"
FILE = str(Path(clusters.__file__))


@cache
def planned(name: str, solver: str = "ddp", num_ranks: int = 2) -> str:
    built = getattr(clusters, name)()
    return tw.plan(
        built["model"], built["batch"], loss_fn=built.get("loss_fn"), hardware=f"cpu:{num_ranks}", solver=solver
    ).to_json()


def batches_of(name: str, **options: Any) -> ExampleBatches:
    return ExampleBatches(Plan.parse(planned(name)), getattr(clusters, name)()["dataset"], **options)


def test_an_epoch_takes_every_example_once_in_a_new_order() -> None:
    batches = batches_of("drawn", seed=1)
    stream = [tuple(row) for _ in range(75) for row in next(batches)[0].tolist()]  # 4 epochs of 300 in batches of 16
    epochs = [stream[start : start + 300] for start in range(0, 1200, 300)]
    assert all(len(set(epoch)) == 300 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [row.tolist() for row in next(batches_of("drawn", seed=2))[0]] != [list(row) for row in stream[:16]]


def test_a_run_that_goes_on_sees_what_an_uninterrupted_one_would() -> None:
    whole, rest = batches_of("drawn"), batches_of("drawn", first_step=30)
    for _ in range(30):
        next(whole)
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(next(whole), next(rest)))


def test_examples_are_drawn_in_proportion_to_their_weights() -> None:
    """In every epoch the number of times is the expected one, rounded down or up."""
    batches = batches_of("drawn")
    weights = torch.tensor([0.0, 1.0, 2.5, 10.0, *[0.5] * 28], dtype=torch.float64)  # one epoch is two batches of 16
    indices = torch.arange(100, 132)
    batches.use(indices, weights)
    rows = {tuple(clusters.examples(300)[0][index].tolist()): place for place, index in enumerate(indices.tolist())}
    for _ in range(3):
        count = Counter(rows[tuple(row)] for _ in range(2) for row in next(batches)[0].tolist())
        for place, weight in enumerate((weights * 32 / weights.sum()).tolist()):
            assert weight - 1 < count[place] < weight + 1


def test_weights_stand_in_a_batch_that_has_room_for_them() -> None:
    batches = batches_of("weighted")
    assert next(batches)[2].tolist() == [1.0] * 16
    batches.use(torch.arange(5), torch.arange(1.0, 6.0))
    x, _, weight = next(batches)
    assert weight.dtype == torch.float64
    all_x = clusters.examples(300)[0]
    assert all(torch.equal(row, all_x[int(own) - 1]) for row, own in zip(x, weight))
    assert sorted(weight[:5].tolist()) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1]), r"len\(\) and examples by index is needed; got list_iterator"),
        ([], "at least one example"),
        ([torch.zeros(6)], "examples as dicts or tuples are needed; the dataset has Tensor"),
        ([(torch.zeros(6).double(),)], "entries of the batch, 0, 1, are needed; the dataset's have 0;"),
        ([(torch.zeros(5).double(), 1)], r"0 has shape \[6\] and type float64 are needed .* has \[5\] and float64"),
        ([(torch.zeros(6), 1)], r"type float64 are needed .* float32"),
        ([("text", object())], "tensors, arrays or numbers"),
    ],
)
def test_wrong_examples_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ExampleBatches(Plan.parse(planned("drawn")), dataset)


@pytest.mark.parametrize(("name", "solver"), [("drawn", "ddp"), ("drawn", "megatron"), ("weighted", "fsdp"),
                                              ("images", "joint")])  # fmt: skip
def test_the_planned_module_chooses_as_one_process_does(pool2: Pool, name: str, solver: str) -> None:
    results = pool2.run(CASES + "chosen_like_one_process", plan=planned(name, solver), name=name)
    for found in results:
        assert found["logits"] < (1e-5 if name == "images" else 1e-12)
        assert found["labels"]
        assert found["indices"]
        assert found["weights"] < 1e-12
        assert found["training"]
        assert found["seconds"] > 0


@pytest.mark.parametrize("solver", ["ddp", "joint"])
def test_training_with_weights_equals_one_process(pool2: Pool, solver: str) -> None:
    one, other = pool2.run(CASES + "weighted_steps_equal_one_process", plan=planned("weighted", solver))
    assert one["losses"] < 1e-9
    assert one["parameters"] < 1e-9
    assert one["num_selections"] == 3  # 60 of 300 examples, batches of 16: before steps 0, 4 and 8
    assert one["num_weights"] > 2
    assert one["subset"] == other["subset"]


def test_a_choice_is_taken_up_again(pool2: Pool) -> None:
    found = pool2.run(CASES + "resumed_equals_uninterrupted", plan=planned("drawn"))[0]
    assert found == {"equal": True, "num_selections": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("selected")


def trained(folder: Path, name: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Plan and train a model of the file; return the exit status and the metrics."""
    plan, metrics = folder / f"{name}.json", folder / f"{name}.jsonl"
    if not plan.exists():
        assert main(["plan", f"{FILE}:{name}", "--hardware", "cpu:2", "-o", str(plan)]) == 0
    metrics.unlink(missing_ok=True)
    status = main(["train", f"{FILE}:{name}", "--plan", str(plan), "--metrics", str(metrics), *options])
    return status, [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_selecting_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = trained(
        folder, "images", "--select", "craig", "--select-fraction", "0.25", "--select-every", "4", "--steps", "14",
        "--lr", "0.003",
    )  # fmt: skip
    assert status == 0
    # 24 or a few more of 96 in batches of 16: four epochs are 6 or 7 steps
    chosen = [row["step"] for row in rows if row["selection_s"] > 0]
    assert chosen in ([0, 6, 12], [0, 7])
    printed = capsys.readouterr().out
    assert f"of 96 examples, chosen {len(chosen)} times in" in printed
    assert "% of the run" in printed
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_resumed_run_goes_on_with_its_subset(folder: Path) -> None:
    """A new choice at step 3 would be another: the model has changed."""
    options = ["--select", "craig", "--select-fraction", "0.2", "--select-every", "2", "--lr", "0.05"]
    status, whole = trained(folder, "drawn", *options, "--steps", "10")
    assert status == 0
    assert [row["step"] for row in whole if row["selection_s"] > 0] == [0, 8]
    checkpoints = ["--checkpoint", str(folder / "checkpoints")]
    assert trained(folder, "drawn", *options, *checkpoints, "--steps", "3")[0] == 0
    status, rest = trained(folder, "drawn", *options, *checkpoints, "--steps", "10", "--resume")
    assert status == 0
    assert [row["step"] for row in rest if row["selection_s"] > 0] == [8]
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[3:]]


def test_a_subset_of_another_dataset_is_refused() -> None:
    selected = SelectedBatches(None, batches_of("drawn"), None, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="with example 300; got 300 examples"):
        selected.load_state_dict({"since": 0, "indices": torch.tensor([3, 300]), "weights": torch.ones(2)})


def test_a_dataset_alone_is_trained_on_in_epochs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = trained(folder, "drawn", "--steps", "40", "--lr", "0.02")
    assert status == 0
    assert "same batch" not in capsys.readouterr().err
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert "selection_s" not in rows[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_examples", ["--select", "craig"], "return a dict with model, batch and dataset"),
        ("drawn", ["--select", "best"], "train needs --select one of craig; got 'best'"),
        ("drawn", ["--select", "craig", "--select-fraction", "0"], "--select-fraction in (0, 1]; got 0.0"),
        ("drawn", ["--select", "craig", "--select-every", "0"], "--select-every of at least 1; got 0"),
        ("drawn", ["--select-every", "2"], "--select-every needs a way to select; got no --select"),
        ("drawn", ["--select", "craig", "--data", FILE], "--select needs examples with classes; got --data"),
        ("only_a_loss", ["--select", "craig"], "logits [16, classes] are needed to select; the model returned []"),
        ("other_examples", [], "0 has shape [6]"),
    ],
)
def test_what_cannot_be_selected_from_is_the_users_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], message: str
) -> None:
    assert trained(folder, name, "--steps", "2", *options)[0] == 2
    printed = capsys.readouterr().err
    assert message in " ".join(printed.split())
    assert "Traceback" not in printed
