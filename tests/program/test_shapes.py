"""Batches smaller than planned: fewer rows, shorter sequences; loss, gradients and buffers are one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainwright as tw
from tests import shape_cases
from tests.docs_files.train import MyModel
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.artifacts import Plan, Refusal, UserError
from trainwright.capture.cached import cached_capture
from trainwright.models import zoo
from trainwright.planner import simulate
from trainwright.program.other_shapes import decisions_at
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import build_program
from trainwright.runtime.batch import Cut, global_batch_size
from trainwright.runtime.steps import batch_like

BAR = {"t5-tiny": 1e-6}
"""T5 computes its norms in fp32 whatever the model's dtype; of the others the largest error is 1e-10."""
ROWS = {"gpt2-tiny": [(1, None), (3, 5), (4, 7), (1, 1), (2, 32), (1, None)], "net": [(n, None) for n in (5, 1, 6, 2)],
        "t5-tiny": [(1, None), (3, 5)], "bert-tiny": [(1, None), (3, 9)], "resnet-tiny": [(1, None), (3, None)],
        "vit-tiny": [(1, None), (3, None)], "masked": [(1, None), (3, 4), (2, 1)],
        "uneven_labels": [(n, None) for n in range(1, 8)]}  # fmt: skip
BESIDE = "tests.shape_cases:beside_one_process"


def _holds(found: list[dict[str, Any]], name: str, captured: int | None = None) -> None:
    for report in found:
        assert report["error"] <= BAR.get(name, 1e-10), report
        assert captured is None or report["captured"] == captured


def _plan(name: str, num_ranks: int = 2, **options: Any) -> Plan:
    with shape_cases.exact():
        model, batch, loss_fn = shape_cases.build(name)
        return tw.plan(model, batch, loss_fn=loss_fn, hardware=f"cpu:{num_ranks}", **options)


@pytest.fixture(scope="module")
def net() -> Plan:
    return _plan("net", solver="fsdp")


@pytest.mark.parametrize(
    ("name", "solver", "captured"),
    [
        pytest.param("net", "ddp", 3, marks=pytest.mark.slow),  # the tests below do with one plan
        pytest.param("net", "fsdp", 3, marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", "megatron", 5, marks=pytest.mark.slow),
    ],
)
def test_recipes_on_smaller_batches(pool2: Pool, name: str, solver: str, captured: int) -> None:
    plan = _plan(name, solver=solver).to_json()
    _holds(pool2.run(BESIDE, plan=plan, name=name, shapes=ROWS[name]), name, captured)


@pytest.mark.parametrize(
    ("name", "seed"),
    slow_but(
        [("net", 1), ("masked", 1)],
        [("net", 1), ("masked", 1), ("gpt2-tiny", 3), ("t5-tiny", 1), ("vit-tiny", 1)]
        + [(name, 2) for name in ("net", "masked", "gpt2-tiny", "bert-tiny", "resnet-tiny")],
    ),
)
def test_random_plans_on_smaller_batches(pool2: Pool, name: str, seed: int) -> None:
    plan = {"mesh": [2], "seed": seed}
    _holds(pool2.run(BESIDE, 280, plan=plan, name=name, shapes=ROWS[name]), name)


def test_a_plan_that_offloads(pool2: Pool) -> None:
    plan = {"mesh": [2], "seed": 4, "offload": 0.5}
    _holds(pool2.run(BESIDE, plan=plan, name="masked", shapes=ROWS["masked"]), "masked")


@pytest.mark.slow  # two ranks are tested on each change
@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [("net", [4], 5), ("net", [4], 6), ("masked", [2, 2], 5), ("gpt2-tiny", [2, 2], 5)],
)
def test_random_plans_on_four_ranks(pool4: Pool, name: str, mesh: list[int], seed: int) -> None:
    """Five rows over four ranks leave the last without any: batch norm still counts on its share of the statistics, and a
    result that autograd does not follow elsewhere is not followed there."""
    plan = {"mesh": mesh, "seed": seed}
    _holds(pool4.run(BESIDE, 100, plan=plan, name=name, shapes=ROWS[name]), name)


def test_a_short_batch_in_micro_batches(pool2: Pool) -> None:
    plan = _plan("uneven_labels", solver="ddp", micro_batches=4)
    _holds(pool2.run(BESIDE, plan=plan.to_json(), name="uneven_labels", shapes=ROWS["uneven_labels"]), "uneven_labels")


@settings(max_examples=12)
@given(rows=st.integers(1, 24))
def test_micro_batches_of_a_short_batch_are_equal_and_no_larger_than_planned(rows: int) -> None:
    entry = {"x": {"shape": (24, 2), "dtype": "float32", "layout": ("S0",)}}
    plan = Plan.model_construct(
        batch={k: tw.artifacts.BatchEntry(**v) for k, v in entry.items()}, mesh={"a": 2}, micro_batches=4
    )
    num = Cut(plan, {"x": (rows, 2)}).num_runs
    assert rows % num == 0
    assert rows // num <= 6
    assert all(rows % fewer or rows // fewer > 6 for fewer in range(1, num))


@pytest.fixture(scope="module")
def masked() -> Plan:
    return _plan("masked", solver="ddp")


@settings(max_examples=8)
@given(rows=st.integers(1, 4), length=st.integers(1, 6))
def test_any_smaller_batch(pool2: Pool, masked: Plan, rows: int, length: int) -> None:
    _holds(pool2.run(BESIDE, plan=masked.to_json(), name="masked", shapes=[(rows, length)]), "masked")


@pytest.mark.parametrize(("num_examples", "rows"), [(16, [3, 3, 4]), (15, [6, 6, 3])])
def test_a_loader_with_a_short_last_batch(pool2: Pool, net: Plan, num_examples: int, rows: list[int]) -> None:
    """Three rows are short of six, and what a rank has of six: then every rank loads all rows of all batches."""
    assert global_batch_size(net) == 6
    for found in pool2.run(
        "tests.shape_cases:loader_with_a_short_batch", plan=net.to_json(), num_examples=num_examples
    ):
        assert found["rows"] == 2 * rows
        assert found["error"] <= 1e-10


def test_rows_that_could_be_either_are_refused(net: Plan) -> None:
    image, wanted = torch.zeros(6, 3, 8, 8).double(), torch.zeros(6, 5).double()

    def shard(num: int, rows: Any = None) -> int:
        part = tw.runtime.batch.shard_batch(net, {"image": image[:num], "wanted": wanted[:num]}, (1,), rows)
        return len(part["image"])

    for num in (1, 2, 3):
        with pytest.raises(UserError, match=rf"got {num}, which may be a whole batch that is short.*rows=\"all\""):
            shard(num)
    assert [shard(num) for num in (4, 5, 6)] == [2, 2, 3], "more than any rank has of a full batch: it is whole"
    assert shard(3, "own") == 3
    assert shard(3, "all") == 1
    assert shard(1, "all") == 1, "one row is not split: every rank computes it"
    dealt = net.sampler(range(13))
    assert shard(3) == 3
    short = net.sampler(range(8), last="short")
    assert shard(2) == 1
    both = net.sampler(range(9), last="short")
    with pytest.raises(UserError, match="may be a whole batch"):
        shard(3)
    del dealt, short, both
    with pytest.raises(UserError, match=r'"all" or "own"'):
        shard(3, "mine")
    with pytest.raises(UserError, match=r"rows of the batch entry image.*got \[2"):
        shard(2, "own")
    with pytest.raises(UserError, match=r"image of shape \[6, 3, 8, 8\], as planned, or smaller is needed; got \[7"):
        net.shard_batch({"image": torch.zeros(7, 3, 8, 8).double(), "wanted": wanted}, rows="all")
    with pytest.raises(UserError, match="at least one row"):
        shard(0, "all")


def test_a_part_whose_batch_cannot_be_known_is_refused(pool2: Pool, masked: Plan) -> None:
    """Three rows over two ranks are two and one: the first rank's part alone looks like one of four rows."""
    for rank, said in enumerate(pool2.run("tests.shape_cases:refused", plan=masked.to_json(), name="masked")):
        assert rank == 0 or "as it returned it" in said["unmarked"]
        assert "the parts of one batch are needed" in said["mixed"]


def _tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of the documentation's model, and of gpt2-tiny."""
    return {name: torch.zeros(rows, length, dtype=torch.long) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("name", slow_but(["plain"], ["plain", "gpt2-tiny"]))
def test_one_plan_for_several_shapes(name: str) -> None:
    """Within a budget that the largest batch alone would fill, a longer one of fewer rows has to fit too."""
    names = [(4, 32), (1, 96), (4, 32), (2, 16)]
    model = MyModel(depth=2) if name == "plain" else zoo.build(name)[0]
    batch, *others = [_tokens(*shape) for shape in names]
    question: dict[str, Any] = {"hardware": "cpu:2", "optimizer": "sgd", "solver": "fsdp"}
    free = tw.plan(model, batch, shapes=others[:1], **question)
    assert free.shapes[0].peak_bytes > free.predicted.peak_bytes, "the longer batch is what is in the way"
    budget = int(0.9 * free.shapes[0].peak_bytes)
    plan = tw.plan(model, batch, shapes=others, memory=budget, **question)
    assert [each.batch["input_ids"] for each in plan.shapes] == [(1, 96), (2, 16)]
    assert max(plan.predicted.peak_bytes, *(each.peak_bytes for each in plan.shapes)) <= budget == plan.budget_bytes
    assert free.predicted.step_s <= plan.predicted.step_s
    assert Plan.parse(plan.to_json()) == plan
    assert "1×96" in plan.table()
    checked = tw.check(plan, model, batch)
    assert checked.shapes == plan.shapes
    with pytest.raises(Refusal, match=r"a batch of input_ids \[1, 96\]|at input_ids \[1, 96\]|has none"):
        tw.check(plan, model, batch, memory=plan.shapes[0].peak_bytes - 1)
    assert tw.runtime.batch.shard_batch(plan, _tokens(1, 96), (0,), "all")["input_ids"].shape == (1, 96)
    with pytest.raises(
        UserError, match=r"input_ids of shape \[4, 32\] or \[1, 96\] or \[2, 16\], as planned, or smaller"
    ):
        tw.runtime.batch.shard_batch(plan, {name: torch.zeros(2, 33).long() for name in plan.batch}, (0,), "all")
    with pytest.raises(UserError, match="the same entries, of as many dims"):
        tw.plan(model, batch, shapes=[{"input_ids": batch["input_ids"]}], **question)
    with pytest.raises(UserError, match="one micro-batch is needed to plan for several shapes"):
        tw.plan(model, batch, shapes=others, micro_batches=2, **question)


@pytest.mark.slow  # plans and simulations of whole models, several batches each
@pytest.mark.parametrize(("name", "solver"), [("gpt2-tiny", "fsdp"), ("resnet-tiny", "ddp"), ("gpt2-tiny", "joint")])
def test_smaller_batches_peak_no_higher_than_planned(name: str, solver: str) -> None:
    with shape_cases.exact():
        model, batch, _ = shape_cases.build(name)
        plan = tw.plan(model, batch, hardware="cpu:2", solver=solver, optimizer="sgd")
        planned = build_program(cached_capture(model, batch))
        decisions = decisions_of(planned, plan)
        make = lambda params: torch.optim.SGD(params, lr=1e-2)  # noqa: E731
        most = simulate(planned, decisions, make).peak_bytes
        for rows, length in [(3, None), (1, None), (4, 9)] if name == "gpt2-tiny" else [(3, None), (1, None)]:
            fed = shape_cases.cut(batch, rows, length)
            cut = Cut(plan, {key: tuple(fed[key].shape) for key in plan.batch})
            program = build_program(cached_capture(model, batch_like(plan, cut.shapes)))
            inputs = {key: entry.layout for key, entry in cut.entries().items()}
            found = simulate(program, decisions_at(program, planned, decisions, inputs), make)
            assert found.peak_bytes <= most, (rows, length)


def test_what_is_captured_without_a_models_casts_is_not_kept_as_the_models() -> None:
    def casts() -> int:
        model, batch, _ = shape_cases.build("gpt2-tiny")
        return sum(op.name == "to" for op in build_program(cached_capture(model, batch)).ops)

    with shape_cases.exact():
        assert casts() == 0
    assert casts() == 1
    with shape_cases.exact():
        assert casts() == 0
