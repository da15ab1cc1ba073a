"""Parameters that several regions read: gathered once and reduced once, or once for each, as the plan says."""

from __future__ import annotations

from functools import cache

import pytest

import trainwright as tw
from tests.pool import Pool
from tests.test_plans_run import check
from trainwright.capture import zoo
from trainwright.capture.schedule import OVERLAPS, Overlap

READERS = {"gpt2-tiny": ("transformer.wte.weight", 2), "t5-tiny": ("shared.weight", 3)}
"""The tied parameter of a model, and how many regions read it."""


@cache
def fsdp(model: str, share: float | None = None, num_micro: int = 1) -> tw.Plan:
    """The recipe's plan; `share` is its budget as a share of what it takes without one."""
    loaded = tw.load_model(f"zoo:{model}")
    memory = None if share is None else int(share * fsdp(model).predicted.peak_bytes)
    return tw.plan(
        loaded.model, loaded.batch, hardware="cpu:2", solver="fsdp", memory=memory, model_ref=loaded.ref,
        micro_batches=num_micro,
    )  # fmt: skip


def changed(model: str, plan: tw.Plan, shared: tuple[str, ...], overlap: Overlap = "buckets") -> tw.Plan:
    """The same plan with other layouts in which one copy serves all, its prediction made anew."""
    name = READERS[model][0]
    params = plan.params | {name: plan.params[name].model_copy(update={"shared": shared})}
    plan = plan.model_copy(update={"params": params, "overlap": overlap, "budget_bytes": None})
    return tw.check(plan, *zoo.build(model, device="meta"))


@pytest.mark.parametrize("model", READERS)
def test_each_further_reader_sends_the_parameter_once_more(model: str) -> None:
    name, num_readers = READERS[model]
    plan = fsdp(model)
    assert {key: entry.shared for key, entry in plan.params.items() if entry.shared} == {name: ("R",)}
    size = dict(zoo.build(model, device="meta")[0].named_parameters())[name].nbytes
    one, each = plan.predicted, changed(model, plan, ()).predicted
    for kind in ("all_gather", "reduce_scatter"):
        assert each.comm_bytes[kind] - one.comm_bytes[kind] == (num_readers - 1) * size > 0
    assert each.comm_s > one.comm_s


@pytest.mark.parametrize("shared", [("R",), ()], ids=["one copy", "a copy each"])
@pytest.mark.parametrize("overlap", OVERLAPS[:2])
@pytest.mark.parametrize("model", READERS)
def test_it_computes_and_holds_what_was_promised(
    pool2: Pool, model: str, overlap: Overlap, shared: tuple[str, ...]
) -> None:
    check(pool2, model, changed(model, fsdp(model, 0.8), shared, overlap))
