"""Ordinary training code goes on working: loaders, schedules, clipping, accumulation, autocast, evaluation; the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import trainwright as tw
from tests.checkpoint_cases import DROPOUT_OFF
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.artifacts import BatchEntry, Plan
from trainwright.cli import main
from trainwright.cli.progress import comparison
from trainwright.cli.records import Records
from trainwright.models import zoo
from trainwright.runtime import PaddedDataset, PlanSampler, export_weights

CASES = "tests.training_cases:"
ROOT = Path(__file__).parents[2]


@cache
def planned(solver: str, mesh: tuple[int, ...] = (2,), autocast: str | None = None, name: str = "llama-tiny") -> str:
    dtype = {} if autocast else {"dtype": "fp64"}
    model, batch = zoo.build(name, **dtype, **DROPOUT_OFF[name])
    num_ranks = 1
    for size in mesh:
        num_ranks *= size
    return tw.plan(model, batch, hardware=f"cpu:{num_ranks}", solver=solver, mesh=mesh, autocast=autocast).to_json()


@pytest.mark.parametrize("solver", slow_but(["joint"], ["ddp", "fsdp", "megatron", "joint"]))
def test_a_whole_loop_equals_one_process(pool2: Pool, solver: str) -> None:
    found = pool2.run(CASES + "whole_loop", plan=planned(solver), name="llama-tiny")[0]
    # The model itself takes its loss in fp32, which a split vocabulary sums in another order, and Adam divides by |g|.
    assert found["weights"] < 2e-6
    assert found["values"] < 2e-6


@pytest.mark.parametrize(("solver", "share"), [("ddp", 0.5), ("megatron", 1.0)])
def test_each_rank_loads_its_rows(pool2: Pool, solver: str, share: float) -> None:
    for found in pool2.run(CASES + "loads_its_rows", plan=planned(solver)):
        assert found == {"same": True, "share": share, "goes_on": True, "shuffled": True}


def test_each_rank_loads_its_rows_on_two_axes(pool4: Pool) -> None:
    for found in pool4.run(CASES + "loads_its_rows", plan=planned("joint", (2, 2))):
        assert found["same"]


def test_a_padded_last_batch_has_the_loss_of_its_real_rows(pool2: Pool) -> None:
    for num_examples in (5, 7):
        found = pool2.run(CASES + "padded_loss", plan=planned("ddp"), name="llama-tiny", num_examples=num_examples)[0]
        assert found["num_batches"] == 2
        assert found["difference"] < 1e-6  # the model itself takes its loss in fp32


def test_a_batch_larger_than_planned_is_refused_with_the_remedy(pool2: Pool) -> None:
    with pytest.raises(
        tw.UserError, match=r"shape \[4, 32\], as planned, or smaller is needed; got \[5, 32\]; plan for a batch"
    ):
        pool2.run(CASES + "other_shape", plan=planned("ddp"), num_rows=5)


@pytest.mark.slow  # test_integrations.py: bf16 is the plan's
@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
def test_bf16_autocast_keeps_weights_in_fp32(pool2: Pool, solver: str) -> None:
    found = pool2.run(CASES + "autocast", plan=planned(solver, autocast="bf16"), name="llama-tiny")[0]
    assert found["dtypes"] == ["torch.float32"]
    assert found["fell"]
    assert found["worst"] < 5e-3


# What needs no ranks.


def stand_in(layout: str = "S0", modules: tuple[str, ...] = ("lm_head:cross_entropy",)) -> Plan:
    """Of a plan, what samplers read."""
    entries = {name: BatchEntry(shape=(4, 8), dtype="int64", layout=(layout,)) for name in ("input_ids", "labels")}
    return Plan.model_construct(batch=entries, mesh={"a0": 2}, modules=dict.fromkeys(modules))


def test_a_sampler_visits_each_example_once_an_epoch() -> None:
    samplers = [PlanSampler(stand_in(), range(23), seed=1, coords=(rank,)) for rank in range(2)]
    for _ in range(2):
        batches = [[*own, *other] for own, other in zip(*samplers)]
        assert [len(batch) for batch in batches] == [4] * 5
        assert len({index for batch in batches for index in batch}) == 20, "the last three are left out"


def test_what_samplers_refuse() -> None:
    plan = stand_in()
    labelled = [{"input_ids": torch.ones(8), "labels": torch.ones(8, dtype=torch.int64)}] * 6
    with pytest.raises(tw.UserError, match="at least 4 examples"):
        PlanSampler(plan, range(3), coords=(0,))
    with pytest.raises(tw.UserError, match="drop, short, pad"):
        PlanSampler(plan, range(9), last="wrap", coords=(0,))
    with pytest.raises(tw.UserError, match=r"wrap it as plan\.padded"):
        PlanSampler(plan, labelled, last="pad", coords=(0,))
    with pytest.raises(tw.UserError, match="integer `labels`"):
        PaddedDataset(plan, [{"input_ids": 1, "labels": 0.5}])
    with pytest.raises(tw.UserError, match="integer `labels`"):
        PaddedDataset(stand_in(modules=("head:mse_loss",)), labelled)
    with pytest.raises(tw.UserError, match="batch norm"):
        PaddedDataset(stand_in(modules=("x:cross_entropy", "y:batch_norm")), labelled)
    narrow = Plan.model_construct(
        batch={"x": BatchEntry(shape=(2, 8), dtype="int64", layout=("S0",))}, mesh={"a0": 3}, modules={}
    )
    with pytest.raises(tw.UserError, match="every rank needs at least one row"):
        PlanSampler(narrow, range(9), coords=(2,))


def _event(step: int, loss: float = 1.0) -> dict[str, object]:
    return {
        "step": step, "loss": loss, "step_s": 0.5, "samples_per_s": 8.0, "tokens_per_s": 64.0, "peak_bytes": 10,
        "comm_s": 0.1, "update_s": 0.05, "comm_bytes": {"all_reduce": 30},
    }  # fmt: skip


def test_records_hold_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Records(str(path), None, 0)
    for step in range(4):
        first.write(_event(step, float("nan") if step == 1 else 1.0))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the midst of a line
    again = Records(str(path), None, 3)
    again.write(_event(3))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows] == [1.0, None, 1.0, 1.0]


def test_tensorboard_files_hold_the_same_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = Records(None, str(tmp_path), 0)
    for step in range(3):
        records.write(_event(step, float(step)))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.value for scalar in read.Scalars("loss")] == [0.0, 1.0, 2.0]
    assert {"step_s", "tokens_per_s", "peak_bytes"} <= set(read.Tags()["scalars"])


def test_predicted_is_held_against_measured() -> None:
    plan = Plan.parse(planned("ddp"))
    lines = comparison([_event(step) for step in range(5)], plan)
    names = [line.split()[0] for line in lines[1:]]
    assert names == ["step", "compute", "exchange", "update", "all_reduce", "peak"]
    assert "500 ms" in lines[1]
    assert "350 ms" in lines[2]
    assert "50 ms" in lines[4]


# The examples, as a user runs them.


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "plan.json"
    command = ["plan", "zoo:gpt2-tiny", "--batch-size", "4", "--hardware", "cpu:2", "--solver", "fsdp", "-o", str(path)]
    assert main(command) == 0
    return path


def run_example(name: str, *arguments: str, processes: int = 2) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*torchrun, str(ROOT / "examples" / name)]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_plain_loop_goes_on_where_it_was(plan_path: Path, tmp_path: Path) -> None:
    first = run_example("plain_loop.py", str(plan_path), str(tmp_path)).splitlines()
    losses = [float(line.split()[3]) for line in first if line.startswith("step")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    newest = sorted(tmp_path.glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()  # as if it had been killed before the last checkpoint
    again = run_example("plain_loop.py", str(plan_path), str(tmp_path)).splitlines()
    assert again == first[8:], "the same losses, rates and validation, to the last digit"


@pytest.mark.slow
def test_a_loop_under_a_plan_that_estimates_gradients_learns_too() -> None:
    exact, sampled, named = run_example("sampled_gradients.py", processes=1).splitlines()
    assert float(sampled.split()[-1]) == pytest.approx(float(exact.split()[-1]), rel=0.1)
    assert float(sampled.split()[1]) < float(exact.split()[1]), "MiB at the peak"
    assert "mlp.c_fc" in named


@pytest.mark.slow
def test_the_loop_of_stages_goes_on_without_stages(tmp_path: Path) -> None:
    """The same losses and norms by two stages of either order, by one after the other, and by a plan without any.

    The model has no dropout, whose masks differ from layout to layout.
    """
    printed: dict[str, list[str]] = {}
    staged = ["--pipeline", "2", "--mesh", "1", "--micro-batches", "4", "--pipeline-schedule"]
    for name, options in {"zero-bubble": [*staged, "zero-bubble"], "1f1b": [*staged, "1f1b"], "none": []}.items():
        plan = tmp_path / f"{name}.json"
        command = ["plan", "zoo:llama-tiny", "--batch-size", "8", "--hardware", "cpu:2", *options, "-o", str(plan)]
        assert main(command) == 0
        printed[name] = run_example("pipeline_loop.py", str(plan), str(tmp_path / name)).splitlines()
        assert len(printed[name]) == 12
    newest = sorted((tmp_path / "zero-bubble").glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    again = run_example("pipeline_loop.py", str(tmp_path / "none.json"), str(tmp_path / "zero-bubble")).splitlines()
    assert len(again) == 4
    for line, *others in zip(*(own[8:] for own in printed.values()), again):
        figures = [float(line.split()[place]) for place in (3, 5)]
        for other in others:
            assert [float(other.split()[place]) for place in (3, 5)] == pytest.approx(figures, rel=1e-4)


@pytest.mark.slow
def test_accelerate_runs_a_planned_model(plan_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in run_example("accelerate_loop.py", str(plan_path)).splitlines()]
    assert len(losses) == 8, "two epochs of eight batches, two to an update"
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_accelerate_runs_replicas_of_a_plan(plan_path: Path) -> None:
    *printed, last = run_example("accelerate_replicas.py", str(plan_path), "diloco", "4", processes=4).splitlines()
    losses = [float(line.split()[-1]) for line in printed]
    assert len(losses) == 16, "two epochs of eight batches a replica, told by one process"
    assert losses[-1] < losses[0]
    assert last.startswith("diloco: 4 rounds, ")


@pytest.mark.slow
def test_fabric_runs_a_planned_model(plan_path: Path, tmp_path: Path) -> None:
    printed = run_example("fabric_loop.py", str(plan_path), str(tmp_path)).splitlines()
    losses = [float(line.split()[-1]) for line in printed if line.startswith("loss")]
    assert len(losses) == 8, "two epochs of eight batches, two to an update, told by one rank"
    assert losses[-1] < losses[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rest.pt", "step-00000000"]


@pytest.mark.slow  # test_integrations.py trains by the Trainer and loads what it saved
def test_the_trainer_runs_a_planned_model_and_its_weights_load_elsewhere(plan_path: Path, tmp_path: Path) -> None:
    import transformers

    printed = run_example("hf_trainer.py", str(plan_path), str(tmp_path)).splitlines()
    losses = [float(line.split()[-1]) for line in printed if line.startswith("loss")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "weights").eval()
    ids = (torch.arange(32) % 200)[None]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss < losses[0], "it has learnt to count"


# Weights for other programs.


@pytest.mark.slow
def test_a_checkpoint_is_exported_in_several_files(plan_path: Path, tmp_path: Path) -> None:
    import transformers

    train = ["train", "zoo:gpt2-tiny", "--plan", str(plan_path), "--steps", "1", "--lr", "0", "--seed", "5"]
    assert main([*train, "--checkpoint", str(tmp_path / "saved")]) == 0
    assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "out"), "--max-file", "50KB"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    own = tw.load_model("zoo:gpt2-tiny", device="cpu", seed=5).model
    for name, param in own.named_parameters():
        assert torch.equal(loaded.get_parameter(name), param), name


def test_what_export_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert "a checkpoint is needed" in capsys.readouterr().err
    with pytest.raises(tw.UserError, match="a checkpoint is needed"):
        export_weights(tmp_path, tmp_path / "out")
