"""Replicas of a plan that exchange by a sync method, in the Trainer, Accelerate and Fabric: against a loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests import integration_cases
from tests import replica_integration_cases as cases
from tests.grids import slow_but
from tests.integration_cases import BATCH, rows
from tests.pool import Pool
from trainwright.integrations.accelerate import PlannedAccelerator
from trainwright.integrations.fabric import PlannedStrategy
from trainwright.integrations.hf import PlannedTrainer

CASES = "tests.replica_integration_cases:"
CASES_BY = ["by_accelerate", "by_trainer", "by_fabric"]
PERIOD, STEPS = 3, 8


def plan_for(num_ranks: int, folder: Path) -> str:
    path = str(folder / "plan.json")
    tw.plan(integration_cases.tiny(), integration_cases.batch(), hardware=f"cpu:{num_ranks}", solver="fsdp").to_json(
        path
    )
    return path


def check(found: list[list[dict[str, Any]]], case: str) -> None:
    """All ranks end with the reference's parameters; each replica saw its losses, and one that was resumed the same bits."""
    losses, weights = cases.reference(case)
    for whole, resumed in found:
        own = [sum(each) / len(each) for each in zip(*losses)] if case == "by_trainer" else losses[whole["replica"]]
        assert whole["losses"] == pytest.approx(own, rel=1e-4)
        assert resumed["losses"] == whole["losses"][STEPS // 2 :]
        assert whole["rounds"] == resumed["rounds"] == STEPS // PERIOD
        for name, value in weights.items():
            assert torch.allclose(torch.tensor(whole["weights"][name]), value, atol=1e-4), name
            assert whole["weights"][name] == resumed["weights"][name], name
    assert len({rank[0]["replica"] for rank in found}) == cases.REPLICAS
    assert sum(rank[0]["sent"] for rank in found) == sum(rank[0]["declared"] for rank in found[: len(found) // 2])


@pytest.mark.parametrize("case", slow_but(["by_fabric"], CASES_BY))
def test_two_replicas_of_a_whole_model(pool2: Pool, tmp_path: Path, case: str) -> None:
    found = pool2.run(CASES + case, plan=plan_for(1, tmp_path), folder=str(tmp_path / "run"))
    check(found, case)


@pytest.mark.slow  # tests/sync/test_sync_training.py has two replicas of two shards
@pytest.mark.parametrize("case", slow_but(["by_trainer"], CASES_BY))
def test_two_replicas_each_sharded_over_two_ranks(pool4: Pool, tmp_path: Path, case: str) -> None:
    found = pool4.run(CASES + case, plan=plan_for(2, tmp_path), folder=str(tmp_path / "run"))
    check(found, case)
    if case == "by_accelerate":
        last = [losses[-1] for losses in cases.reference(case)[0]]
        for rank, _ in found:
            assert rank["joined"] == pytest.approx(last, rel=1e-4)
            assert rank["mean"] == pytest.approx(sum(last) / 2, rel=1e-4)
            assert rank["labels"] == [row["labels"].tolist() for row in rows(cases.NUM_ROWS)]
    if case == "by_trainer":  # every example counts once, those of all replicas
        assert found[0][0]["shape"][0] == 2 * BATCH + 3
        assert len({rank[0]["evaluated"] for rank in found}) == 1


def test_what_replicas_refuse(tmp_path: Path) -> None:
    whole, halves = (tw.Plan.from_json(plan_for(num, tmp_path)) for num in (1, 2))
    with pytest.raises(tw.UserError, match="1-bit-lamb needs a whole model on each worker"):
        PlannedAccelerator(halves, cpu=True, sync="1-bit-lamb")
    with pytest.raises(tw.UserError, match="just-one-byte takes a closure; take another one"):
        PlannedStrategy(whole, sync="just-one-byte")
    with pytest.raises(tw.UserError, match="there is no sync method 'dilco'; did you mean diloco"):
        PlannedAccelerator(whole, cpu=True, sync="dilco")
    with pytest.raises(tw.UserError, match="period"):
        PlannedAccelerator(whole, cpu=True, sync="diloco", sync_options={"perod": 3})
    with pytest.raises(tw.UserError, match="a method is needed for sync_options"):
        PlannedAccelerator(whole, cpu=True, sync_options={"period": 3})
    with pytest.raises(tw.UserError, match=r"2 processes a replica are needed by this plan .*Accelerate sees 1"):
        PlannedAccelerator(halves, cpu=True, sync="diloco")
    args = integration_cases.arguments(str(tmp_path), 1, per_device_train_batch_size=3, eval_strategy="no",
                                       load_best_model_at_end=False)  # fmt: skip
    with pytest.raises(tw.UserError, match="plan with --batch-size 3"):
        PlannedTrainer(model=integration_cases.tiny(), args=args, plan=whole, sync="diloco")
    accelerator = PlannedAccelerator(whole, cpu=True, sync="diloco")
    with pytest.raises(tw.UserError, match="a method between replicas is needed; there is none"):
        _ = accelerator.sync
