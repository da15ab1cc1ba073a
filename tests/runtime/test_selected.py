"""Training on a dataset of examples, all or a chosen subset: batches, ranks, and the command line."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.grids import slow_but
from tests.models import clusters
from tests.pool import Pool
from trainwright.artifacts import BatchEntry, Plan, UserError
from trainwright.cli import main
from trainwright.cli.selecting import SelectOption
from trainwright.runtime import ExampleBatches, PaddedDataset, PlanSampler, SelectedBatches
from trainwright.selection import selections

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


def test_an_epoch_is_as_many_whole_batches_as_there_are_in_a_new_order() -> None:
    batches = batches_of("drawn", seed=1)
    epochs = [[tuple(row) for _ in range(18) for row in next(batches)[0].tolist()] for _ in range(4)]  # 300 in 16s
    assert all(len(set(epoch)) == 288 for epoch in epochs)
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 4, "others are left out each time"
    assert [row.tolist() for row in next(batches_of("drawn", seed=2))[0]] != [list(row) for row in epochs[0][:16]]


@pytest.mark.parametrize(("step", "last"), [(0, "drop"), (9, "drop"), (9, "pad")])
def test_a_loader_with_the_plans_sampler_takes_the_same_batches(step: int, last: str) -> None:
    """Over the ends of epochs (23 examples in fours), from a step that a run goes on at, and with what is left out or padded."""
    entries = {
        name: BatchEntry(shape=(4, *rest), dtype="int64", layout=("S0",))
        for name, rest in (("x", (2,)), ("labels", ()))
    }
    plan = Plan.model_construct(batch=entries, mesh={"a0": 2}, modules={"head:cross_entropy": None}, literals={})
    examples = [{"x": torch.tensor([index, -index]), "labels": index} for index in range(23)]
    data = PaddedDataset(plan, examples) if last == "pad" else examples
    batches = ExampleBatches(plan, data, seed=7, first_step=step, last=last)
    samplers = [PlanSampler(plan, data, seed=7, last=last, coords=(rank,)) for rank in range(2)]
    for sampler in samplers:
        sampler.start_at(step)
    parts = [itertools.chain.from_iterable(itertools.repeat(sampler)) for sampler in samplers]
    num_padded = 0
    for _ in range(14):
        expected = next(batches)["labels"].tolist()
        assert [int(data[index]["labels"]) for part in parts for index in next(part)] == expected
        num_padded += expected.count(-100)
    assert num_padded == (2 if last == "pad" else 0), "one row each at the ends of two epochs of six batches"


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


@pytest.mark.parametrize(
    ("name", "solver"),
    slow_but(
        [("drawn", "megatron"), ("weighted", "fsdp")],
        [("drawn", "ddp"), ("drawn", "megatron"), ("weighted", "fsdp"), ("images", "joint")],
    ),
)
def test_the_planned_module_chooses_as_one_process_does(pool2: Pool, name: str, solver: str) -> None:
    results = pool2.run(CASES + "chosen_like_one_process", plan=planned(name, solver), name=name)
    for found in results:
        assert found["logits"] < 1e-12
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
    assert one["num_selections"] == 4  # 60 of 300 examples, batches of 16: before steps 0, 3, 6 and 9
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


@pytest.mark.slow
def test_selecting_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = trained(
        folder, "images", "--select", "craig", "--select-fraction", "0.25", "--select-every", "4", "--steps", "14",
        "--lr", "0.003",
    )  # fmt: skip
    assert status == 0
    chosen = [row["step"] for row in rows if row["selection_s"] > 0]
    assert chosen == [0, 4, 8, 12]  # 24 or a few more of 96 in batches of 16: one whole batch an epoch
    printed = capsys.readouterr().out
    assert f"of 96 examples, chosen {len(chosen)} times in" in printed
    assert "% of the run" in printed
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_subset(folder: Path) -> None:
    """A new choice at step 3 would be another: the model has changed."""
    options = ["--select", "craig", "--select-fraction", "0.2", "--select-every", "2", "--lr", "0.05"]
    status, whole = trained(folder, "drawn", *options, "--steps", "10")
    assert status == 0
    assert [row["step"] for row in whole if row["selection_s"] > 0] == [0, 6]
    checkpoints = ["--checkpoint", str(folder / "checkpoints")]
    assert trained(folder, "drawn", *options, *checkpoints, "--steps", "3")[0] == 0
    status, rest = trained(folder, "drawn", *options, *checkpoints, "--steps", "10", "--resume")
    assert status == 0
    assert [row["step"] for row in rest if row["selection_s"] > 0] == [6]
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[3:]]


def test_strong_copies_are_the_same_on_every_rank_and_when_taken_up_again(pool2: Pool) -> None:
    found = pool2.run(CASES + "augmented", plan=planned("drawn"))
    assert found[0] == found[1]
    assert found[0]["resumed"]
    assert (
        found[0]["num_strong"] == found[0]["num_chosen"] == 32
    )  # equally from four classes: a tenth of 300, rounded up
    assert found[0]["num_distinct"] == 320, "of 332 rows twenty batches, none twice"
    assert 20 <= found[0]["num_new"] <= 32


def test_random_ones_are_drawn_anew_without_a_pass_over_the_examples(pool2: Pool) -> None:
    one, other = pool2.run(CASES + "random_choices", plan=planned("drawn"))
    assert one == other
    assert one["resumed"]
    assert len(set(map(tuple, one["subsets"]))) == 3
    assert one["num_forwards"] == 0


def test_every_way_to_select_is_named_in_the_help_and_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(SelectOption.__metadata__[0].help)  # type: ignore[attr-defined]
    assert [name for name in (way.name for way in selections()) if name not in text] == []
    assert len(selections()) >= 5
    status, rows = trained(folder, "augmentable", "--select", "augment", "--steps", "24", "--lr", "0.02")
    assert status == 0
    assert [row["step"] for row in rows if row["selection_s"] > 0] == [0]  # 332 rows an epoch, every 5 epochs
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert "subset 32 of 300 examples" in capsys.readouterr().out


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
        (
            "drawn",
            ["--select", "cragi"],
            "one of craig, augment, augment-coreset, augment-loss, augment-all, augment-random, "
            "largest-loss, random; got 'cragi'; did you mean craig?",
        ),
        ("drawn", ["--select", "augment"], "returns none; add to its function's dict an `augment`"),
        ("drawn", ["--select", "craig", "--select-fraction", "0"], "--select-fraction in (0, 1]; got 0.0"),
        ("drawn", ["--select", "craig", "--select-every", "0"], "--select-every of at least 1; got 0"),
        ("drawn", ["--select-every", "2"], "--select-every needs a way to select; got no --select"),
        ("drawn", ["--select", "craig", "--data", FILE], "--select needs examples by index; got --data"),
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
