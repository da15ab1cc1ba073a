"""PEFT's adapters over a frozen base: planned, run, verified, saved under PEFT's own names."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel

import trainwright as tw
from tests import lora_cases
from tests.pool import Pool
from trainwright.artifacts import Report
from trainwright.cli import main
from trainwright.runtime import adapters

CASES = "tests.lora_cases:"
TIGHT = {"fsdp": 0.8, "megatron": None, "joint": 0.75}
"""Budgets as shares of what plain data parallelism takes; megatron recomputes nothing."""
IN_CI = [("llama-tiny", "fsdp")]
SLOW = [(name, solver) for name in ("llama-tiny", "gpt2-tiny") for solver in TIGHT if (name, solver) not in IN_CI]
GRID = [*IN_CI, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@cache
def planned(name: str, solver: str) -> tw.Plan:
    model, batch = lora_cases.build(name)
    memory = None
    if TIGHT.get(solver) is not None:
        memory = int(TIGHT[solver] * planned(name, "ddp").predicted.peak_bytes)
    return tw.plan(model, batch, hardware="cpu:2", solver=solver, memory=memory, time_limit_s=8)


@pytest.mark.parametrize(("name", "solver"), GRID)
def test_adapters_are_trained_over_a_frozen_base(pool2: Pool, name: str, solver: str) -> None:
    plan = planned(name, solver)
    for found in pool2.run(CASES + "trained", plan=plan.to_json(), name=name):
        assert found["same_names"]
        assert found["adapter_names"]
        assert found["frozen_gradients"] == found["frozen_moved"] == 0
        assert found["moved"] == found["states"] == found["num_adapters"] >= 8
        assert found["worst"] < 1e-6  # the model itself takes its loss in fp32, and Adam divides by |g|
        if solver == "fsdp":
            assert found["share"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow  # the test above trains beside one process
@pytest.mark.parametrize(("name", "solver"), GRID)
def test_a_plan_of_adapters_computes_and_holds_what_was_promised(pool2: Pool, name: str, solver: str) -> None:
    plan = planned(name, solver)
    report = Report.model_validate(pool2.run(CASES + "verified", plan=plan.to_json(), name=name)[0])
    assert report.passed, report
    assert max(report.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert max(report.peak_bytes) <= plan.budget_bytes


def test_a_frozen_base_is_gathered_again_for_the_backward(pool2: Pool) -> None:
    """Sharding a base whose gathered weights stayed until the backward would save nothing."""
    plan = planned("llama-tiny", "fsdp")
    frozen_bytes = sum(p.numel() * 8 for p in lora_cases.build("llama-tiny")[0].parameters() if not p.requires_grad)
    assert plan.predicted.comm_bytes["all_gather"] > 1.1 * frozen_bytes
    gathered = {key for key, module in plan.modules.items() if any("in" in part for part in module.recomputed)}
    assert any("base_layer" in key or "mlp" in key for key in gathered)


def test_an_adapter_is_saved_as_peft_does(pool2: Pool, tmp_path: Path) -> None:
    plan = planned("llama-tiny", "fsdp").to_json()
    expected = pool2.run(CASES + "saves", plan=plan, name="llama-tiny", folder=str(tmp_path))[0]
    assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "exported")]) == 0
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {adapters.WEIGHTS, adapters.CONFIG}
    for folder in ("own", "exported"):
        model, batch = lora_cases.base("llama-tiny")
        loaded = PeftModel.from_pretrained(model, str(tmp_path / folder), autocast_adapter_dtype=False)
        with torch.no_grad():
            assert float(loaded(**batch).loss) == pytest.approx(expected, rel=1e-6)
            with loaded.disable_adapter():
                assert float(loaded(**batch).loss) != pytest.approx(expected, rel=1e-3)


def test_a_base_on_the_meta_device_is_read_by_parts(pool2: Pool, tmp_path: Path) -> None:
    plan = planned("llama-tiny", "fsdp").to_json()
    for found in pool2.run(CASES + "begins_on_meta", plan=plan, name="llama-tiny", folder=str(tmp_path)):
        assert found["ups"] == 0, "an adapter begins as no change"
        assert 0.8 < found["downs"][0] <= found["downs"][1] <= 1.0, "uniform in ±1/√fan-in, as PEFT has it"
        assert found["difference"] < 1e-6


def test_adapters_computed_from_the_base_are_refused_on_the_meta_device() -> None:
    model, _ = lora_cases.build("llama-tiny", device="meta")
    model.peft_config["default"].init_lora_weights = "pissa"
    path = next(key for key, _ in model.named_modules() if key.endswith("lora_A.default"))
    with pytest.raises(tw.UserError, match="'gaussian' is needed for a model on the meta device; got 'pissa'"):
        adapters.reset_adapter(model, path)


@pytest.mark.slow  # twenty steps of an example on ranks
def test_the_example_learns_and_writes_an_adapter(pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    question = ["plan", "examples/lora.py:build", "--hardware", "cpu:2", "--solver", "fsdp", "--memory", "1.2MiB"]
    assert main([*question, "-o", str(path)]) == 0
    printed = pool2.run(CASES + "example", plan_path=str(path), folder=str(tmp_path / "adapter"))[0].splitlines()
    losses = [float(line.split()[3]) for line in printed if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert {adapters.WEIGHTS, adapters.CONFIG} <= {file.name for file in (tmp_path / "adapter").iterdir()}
