"""Which batches a plan takes: what it does not know is refused, by name."""

from __future__ import annotations

import pytest
import torch

import trainwright as tw
from tests.models import batches
from tests.pool import Pool
from trainwright.artifacts import Plan, UserError

SAID = {
    "unknown": r"does not know mask, and a step would ignore it; plan with it in the batch, or leave it out of the loader",
    "misspelt": r"does not know idz.*; ids is missing; rename idz to ids",
    "nested": r"does not know extra\.more",
    "none": r"a tensor ids of shape \[4, 6\] is needed, as planned; got None",
    "unknown none": r"does not know mask",
    "literal": r"with scale=0\.5; got scale=0\.25; plan with that, or leave it out",
    "literal as tensor": r"with scale=0\.5; got scale=a tensor",
    "unknown literal": r"does not know scales.*rename scales to scale",
    "dtype": r"ids of type int64 and shape \[4, 6\] is what was planned; got int32",
    "rank": r"labels of type int64 and shape \[4, 6\] is what was planned; got int64 of shape",
    "positional": r"does not know entry 0, entry 1",
    "missing": r"labels is missing; add it, or plan without",
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, batch = batches.masked()
    return tw.plan(model, batch, hardware="cpu:2", solver="ddp")


@pytest.mark.parametrize("name", batches.WRONG)
def test_a_batch_that_the_plan_does_not_know_is_refused(plan: Plan, name: str) -> None:
    wrong = batches.WRONG[name](batches.masked()[1])
    with pytest.raises(UserError, match=SAID[name]):
        plan.shard_batch(wrong)


def test_the_module_refuses_what_did_not_come_from_shard_batch(pool2: Pool, plan: Plan) -> None:
    for found in pool2.run("tests.batch_cases:what_is_refused", plan=plan.to_json()):
        assert found.keys() == batches.WRONG.keys()
        assert "does not know mask" in found["unknown"]


def test_what_the_plan_has_as_a_literal_may_be_left_out(pool2: Pool, plan: Plan) -> None:
    given, left_out = pool2.run("tests.batch_cases:literal_values", plan=plan.to_json())[0]
    assert given == left_out


def test_a_tuple_with_too_many_entries_is_refused() -> None:
    x = torch.ones(4, 3)
    plan = tw.plan(torch.nn.Linear(3, 1), (x,), loss_fn=lambda output, batch: output.mean(), hardware="cpu:1")
    with pytest.raises(UserError, match="does not know entry 1, and a step would ignore it"):
        plan.shard_batch((x, x))
    with pytest.raises(UserError, match=r"planned; got float64"):
        plan.shard_batch((x.double(),))
