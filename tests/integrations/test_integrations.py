"""Hugging Face's Trainer, Accelerate and Fabric with a planned model on two ranks, beside the stock library in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests import integration_cases as cases
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.integrations.accelerate import PlannedAccelerator
from trainwright.integrations.fabric import PlannedStrategy
from trainwright.integrations.hf import PlannedTrainer
from trainwright.integrations.hf_arguments import check_arguments
from trainwright.integrations.label_counts import counted_labels, reads_num_items
from trainwright.program.micro_batches import capture_step

CASES = "tests.integration_cases:"


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    tw.plan(cases.tiny(), cases.batch(), hardware="cpu:2", solver="fsdp").to_json(path)
    return str(path)


# The Trainer


@pytest.fixture(scope="module")
def trained(pool2: Pool, plan_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the stock Trainer in this process, one of ours on two ranks, and where ours saved."""
    folder = tmp_path_factory.mktemp("trainer")
    ours = pool2.run(CASES + "trainer_run", folder=str(folder / "ours"), plan=plan_path)
    return {"ours": ours, "stock": cases.trainer_run(str(folder / "stock")), "folder": folder}


def test_the_trainer_logs_what_the_stock_trainer_logs(trained: dict[str, Any]) -> None:
    ours, stock = trained["ours"][0]["log"], trained["stock"]["log"]
    assert len(stock) == 10, "six updates, three evaluations, the end"
    assert [row.keys() for row in ours] == [row.keys() for row in stock]
    for row, expected in zip(ours, stock):
        for key, value in expected.items():
            assert f"{row[key]:.4g}" == f"{value:.4g}", (key, row, expected)  # as the Trainer prints it
    assert stock[-2]["eval_accuracy"] > 0.1


def test_the_trainer_predicts_and_keeps_what_the_stock_trainer_does(trained: dict[str, Any]) -> None:
    (first, second), stock = trained["ours"], trained["stock"]
    assert first == second, "both ranks see the same"
    for key in ("best", "kept", "seen", "shape"):
        assert first[key] == stock[key], key
    assert first["predicted"] == pytest.approx(stock["predicted"], rel=1e-4, abs=1e-3)
    assert first["metrics"] == pytest.approx(stock["metrics"], rel=1e-5)


def test_saved_weights_load_by_from_pretrained(trained: dict[str, Any]) -> None:
    from transformers import GPT2LMHeadModel

    for name in ("final", trained["stock"]["best"]):  # the best model was loaded at the end
        ours, stock = (GPT2LMHeadModel.from_pretrained(trained["folder"] / who / name) for who in ("ours", "stock"))
        for (key, weight), (_, expected) in zip(ours.state_dict().items(), stock.state_dict().items()):
            assert torch.allclose(weight, expected, atol=2e-4), key
        assert ours.lm_head.weight is ours.transformer.wte.weight


def test_the_trainer_goes_on_bit_for_bit_from_the_last_complete_checkpoint(
    pool2: Pool, plan_path: str, tmp_path: Path
) -> None:
    first, _ = pool2.run(CASES + "trainer_resumes", folder=str(tmp_path), plan=plan_path)
    whole, resumed = first["losses"]
    assert len(whole) == 6
    assert resumed == whole
    assert first["weights"]
    assert first["num_weights"] == 29


def test_a_model_on_the_meta_device_predicts_without_labels(
    pool2: Pool, plan_path: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    weights = str(trained["folder"] / "ours" / "final")
    found = pool2.run(CASES + "trainer_from_meta", folder=str(tmp_path), plan=plan_path, weights=weights)[0]
    assert found["same"]
    assert found["no_loss"]
    assert found["metrics"] == pytest.approx(trained["ours"][0]["metrics"])


@pytest.mark.parametrize("kind", slow_but(["ignores"], ["plain", "ignores"]))
def test_other_losses_accumulate_as_by_the_stock_trainer(pool2: Pool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "plan.json")
    tw.plan(cases.head(kind), cases.batch(), hardware="cpu:2", solver="ddp").to_json(path)
    ours = pool2.run(CASES + "head_run", folder=str(tmp_path / "ours"), kind=kind, plan=path)[0]
    stock = cases.head_run(str(tmp_path / "stock"), kind)
    assert len(ours) == 3
    assert ours == pytest.approx(stock, rel=1e-5)


def test_a_loss_with_other_terms_is_not_accumulated(tmp_path: Path) -> None:
    plan = tw.plan(cases.head("terms"), cases.batch(), hardware="cpu:1")
    args = cases.arguments(str(tmp_path), 1, eval_strategy="no", load_best_model_at_end=False)
    with pytest.raises(tw.UserError, match=r"loss of Head has other terms; set gradient_accumulation_steps=1"):
        PlannedTrainer(model=cases.head("terms"), args=args, plan=plan)


@pytest.mark.slow  # whole runs of the Trainer
def test_bf16_is_the_plans(pool2: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    tw.plan(cases.tiny(), cases.batch(), hardware="cpu:2", solver="fsdp", autocast="bf16").to_json(path)
    ours = pool2.run(CASES + "bf16_run", folder=str(tmp_path / "ours"), plan=path)[0]
    stock = cases.bf16_run(str(tmp_path / "stock"))
    assert ours["dtype"] == stock["dtype"] == "float32"
    assert ours["losses"] == pytest.approx(stock["losses"], rel=5e-3)
    with pytest.raises(tw.UserError, match="computes in bf16 on weights in fp32; got bf16=False"):
        check_arguments(
            cases.arguments(str(tmp_path), 1), tw.Plan.from_json(path).model_copy(update={"mesh": {}}), True
        )


# Accelerate and Fabric


def test_accelerate_trains_saves_and_resumes(pool2: Pool, plan_path: str, tmp_path: Path) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from transformers import GPT2LMHeadModel

    whole, resumed = pool2.run(CASES + "planned_accelerate", plan=plan_path, folder=str(tmp_path / "ours"))[0]
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=settings)
    stock = cases.accelerate_run(accelerator, str(tmp_path / "stock"))
    assert len(stock["values"]) == 6
    for found, expected in zip(whole["values"], stock["values"]):
        assert found == pytest.approx(expected, rel=1e-4)
    assert whole["values"][3:] == resumed["values"]
    for key in ("predicted", "labels"):
        assert whole[key] == stock[key] == resumed[key]
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "ours" / "pretrained")
    expected = GPT2LMHeadModel.from_pretrained(tmp_path / "stock" / "pretrained")
    assert torch.allclose(loaded.transformer.wte.weight, expected.transformer.wte.weight, atol=2e-4)
    assert (tmp_path / "ours" / "model" / "model.safetensors").is_file()


def test_fabric_trains_saves_and_resumes(pool2: Pool, plan_path: str, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    whole, resumed = pool2.run(CASES + "planned_fabric", plan=plan_path, folder=str(tmp_path / "ours"))[0]
    stock = cases.fabric_run(Fabric(accelerator="cpu", devices=1), str(tmp_path / "stock"), cases.BATCH)
    assert len(stock) == 7
    for found, expected in zip(whole, stock):
        assert found == pytest.approx(expected, rel=1e-4)
    assert whole[3:] == resumed


# Pipeline stages


@pytest.fixture(scope="module")
def staged_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of two stages, of which no block is the same: what torch's own clipping sees is one stage's norm."""
    path = tmp_path_factory.mktemp("staged") / "plan.json"
    tw.plan(
        cases.tiny(), cases.batch(), hardware="cpu:2", mesh=1, pipeline=2, micro_batches=2, pipeline_schedule="1f1b"
    ).to_json(path)
    return str(path)


@pytest.mark.slow  # whole runs of the Trainer
def test_the_trainer_trains_stages_as_the_stock_trainer_does(
    pool2: Pool, staged_path: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    first, second = pool2.run(CASES + "trainer_run", folder=str(tmp_path), plan=staged_path)
    stock = trained["stock"]
    assert first == second, "both stages see the same"
    assert [row.keys() for row in first["log"]] == [row.keys() for row in stock["log"]]
    for row, expected in zip(first["log"], stock["log"]):  # losses, and norms over both stages before clipping
        for key, value in expected.items():
            assert row[key] == pytest.approx(value, rel=2e-4), (key, row, expected)
    assert first["predicted"] == pytest.approx(stock["predicted"], rel=1e-4, abs=1e-3)


@pytest.mark.slow  # on each change: the Trainer
def test_accelerate_trains_stages(pool2: Pool, staged_path: str, tmp_path: Path) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    found = pool2.run(CASES + "planned_accelerate", plan=staged_path, folder=str(tmp_path / "ours"))
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=settings)
    stock = cases.accelerate_run(accelerator, str(tmp_path / "stock"))
    for whole, resumed in found:
        for values, expected in zip(whole["values"], stock["values"]):
            assert values == pytest.approx(expected, rel=1e-4)
        assert whole["values"][3:] == resumed["values"]
        for key in ("predicted", "labels"):
            assert whole[key] == stock[key] == resumed[key]


@pytest.mark.slow  # on each change: the Trainer
def test_fabric_trains_stages(pool2: Pool, staged_path: str, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    found = pool2.run(CASES + "planned_fabric", plan=staged_path, folder=str(tmp_path / "ours"))
    stock = cases.fabric_run(Fabric(accelerator="cpu", devices=1), str(tmp_path / "stock"), cases.BATCH)
    for whole, resumed in found:
        for values, expected in zip(whole, stock):
            assert values == pytest.approx(expected, rel=1e-4)
        assert whole[3:] == resumed


def test_other_batches_on_each_rank_are_noticed(pool2: Pool, plan_path: str) -> None:
    with pytest.raises(tw.UserError, match="the same batches on every rank are needed"):
        pool2.run(CASES + "differing_batches", plan=plan_path)


# What is refused


@pytest.fixture(scope="module")
def alone() -> Any:
    """A plan for one process."""
    return tw.plan(cases.tiny(), cases.batch(), hardware="cpu:1", solver="fsdp")


REFUSED = {
    "gradient_checkpointing": (True, "the plan recomputes"),
    "bf16": (True, r"computes in fp32; got bf16=True"),
    "fp16": (True, "fp16 is not for planned models"),
    "torch_compile": (True, "torch_compile is not for planned models"),
    "auto_find_batch_size": (True, "the plan says which batch fits"),
    "neftune_noise_alpha": (5.0, "no place for the noise"),
    "label_smoothing_factor": (0.1, "plan with a loss_fn that smooths"),
    "use_liger_kernel": (True, "apply it to the model"),
    "save_on_each_node": (True, "one folder that all nodes see"),
    "train_sampling_strategy": ("group_by_length", "batches of one shape"),
    "optim": ("adafactor", "got adafactor; .* optimizer_cls_and_kwargs"),
    "per_device_train_batch_size": (3, "set per_device_train_batch_size=4, or plan with --batch-size 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_go_with_a_plan_are_refused_by_name(alone: Any, tmp_path: Path, name: str) -> None:
    value, message = REFUSED[name]
    try:
        args = cases.arguments(str(tmp_path), 1, **{name: value})
    except (ImportError, ValueError) as error:  # what the Trainer itself refuses on this machine
        pytest.skip(str(error))
    with pytest.raises(tw.UserError, match=message):
        check_arguments(args, alone, True)


def test_what_the_integrations_refuse(alone: Any, tmp_path: Path) -> None:
    args = cases.arguments(str(tmp_path), 1)
    with pytest.raises(tw.UserError, match=r"a model is needed.*model_init"):
        PlannedTrainer(args=args, plan=alone, model_init=cases.tiny)
    with pytest.raises(tw.UserError, match="got compute_loss_func"):
        PlannedTrainer(model=cases.tiny(), args=args, plan=alone, compute_loss_func=print)
    with pytest.raises(tw.UserError, match=r"2 processes are needed by this plan.*Accelerate sees 1"):
        PlannedAccelerator(alone.model_copy(update={"mesh": {"cpu": 2}}), cpu=True)
    with pytest.raises(tw.UserError, match="computes in fp32; got mixed_precision='bf16'"):
        PlannedAccelerator(alone, cpu=True, mixed_precision="bf16")
    accelerator = PlannedAccelerator(alone, cpu=True)
    with pytest.raises(tw.UserError, match=r"batches of at most 4 is needed.*got 8; change the loader"):
        accelerator.prepare(torch.utils.data.DataLoader(cases.rows(8), 8))
    with pytest.raises(tw.UserError, match="an optimizer of the model's own parameters"):
        accelerator.prepare(cases.tiny(), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1))
    with pytest.raises(tw.UserError, match="one of each"):
        PlannedStrategy(alone).save_checkpoint(tmp_path, {"epoch": 1})


# How batches weigh


def test_labels_are_counted_as_the_loss_counts_them(alone: Any) -> None:
    counted = counted_labels(capture_step(cases.tiny(), cases.batch(), None, None))
    assert counted is not None
    labels = cases.batch()["labels"]
    assert int(counted.count({"labels": labels})) == int((labels[:, 1:] != -100).sum())
    assert reads_num_items(cases.tiny(), alone)
    assert counted_labels(capture_step(cases.tiny(), cases.batch(), lambda out, _: out.loss * 2, None)) is None
