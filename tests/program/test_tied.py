"""Parameters that several regions read: gathered once and reduced once, or once for each, as the plan says."""

from __future__ import annotations

from functools import cache

import pytest

import trainwright as tw
from tests.builders import PEAK_BAR, check_on_ranks, price_of, task, tiny_program
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.models import zoo
from trainwright.planner.best_first import solve_on
from trainwright.program.decisions import OVERLAPS, Overlap

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


@pytest.mark.parametrize("model", slow_but(["gpt2-tiny"], list(READERS)))
def test_each_further_reader_sends_the_parameter_once_more(model: str) -> None:
    name, num_readers = READERS[model]
    plan = fsdp(model)
    assert {key: entry.shared for key, entry in plan.params.items() if entry.shared} == {name: ("R",)}
    size = dict(zoo.build(model, device="meta")[0].named_parameters())[name].nbytes
    one, each = plan.predicted, changed(model, plan, ()).predicted
    for kind in ("all_gather", "reduce_scatter"):
        assert each.comm_bytes[kind] - one.comm_bytes[kind] == (num_readers - 1) * size > 0
    assert each.comm_s > one.comm_s


@pytest.mark.parametrize("shared", [("R",), pytest.param((), marks=pytest.mark.slow)], ids=["one copy", "a copy each"])
@pytest.mark.parametrize("overlap", [pytest.param(OVERLAPS[0], marks=pytest.mark.slow), OVERLAPS[1]])
@pytest.mark.parametrize("model", ["gpt2-tiny", pytest.param("t5-tiny", marks=pytest.mark.slow)])
def test_it_computes_and_holds_what_was_promised(
    pool2: Pool, model: str, overlap: Overlap, shared: tuple[str, ...]
) -> None:
    check_on_ranks(pool2, model, changed(model, fsdp(model, 0.8), shared, overlap))


@pytest.mark.slow  # test_micro_batches.py holds two micro-batches without a tie
def test_in_two_micro_batches(pool2: Pool) -> None:
    plan = fsdp("gpt2-tiny", None, 2)
    assert plan.params["transformer.wte.weight"].shared == ("R",)
    check_on_ranks(pool2, "gpt2-tiny", plan)


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron", "joint"])
@pytest.mark.parametrize("model", slow_but(["gpt2-tiny"], list(READERS)))
def test_the_objective_is_the_price_of_what_runs(model: str, solver: str) -> None:
    (place,) = task(tiny_program(model)).places
    answer = solve_on(place, solver)
    assert answer.objective_s == pytest.approx(price_of(place, answer.decisions), rel=1e-6)


@pytest.mark.slow  # two searches of gpt2-tiny
def test_under_a_tight_budget_each_reader_gathers_its_own() -> None:
    question = {"hardware": "cpu:2", "solver": "fsdp"}
    model = zoo.build("gpt2-tiny", device="meta", n_layer=4, vocab_size=256, batch_size=16, seq_len=64)
    tight, wide = (tw.plan(*model, **question, memory=size) for size in (5_200_000, 5_600_000))
    assert tight.params["transformer.wte.weight"].shared == ()
    assert wide.params["transformer.wte.weight"].shared == ("R",)


def test_a_plan_on_two_axes_reads_back() -> None:
    model = zoo.build("gpt2-tiny", device="meta")
    plan = tw.plan(*model, hardware="cpu:4", mesh=(2, 2), solver="fsdp")
    again = tw.Plan.parse(plan.to_json())
    assert again.params["transformer.wte.weight"].shared == ("R R",)
    assert tw.check(again, *model).predicted == plan.predicted
    entry = again.params["transformer.wte.weight"].model_copy(update={"shared": ("R",)})
    with pytest.raises(tw.UserError, match="needs one entry for each of the mesh's 2 axes; it has 'R'"):
        tw.check(again.model_copy(update={"params": again.params | {"transformer.wte.weight": entry}}), *model)


def test_explain_counts_the_copy_once() -> None:
    model, plan = zoo.build("gpt2-tiny", device="meta"), fsdp("gpt2-tiny")
    each = changed("gpt2-tiny", plan, ())
    (one,), (two,) = (tw.explain(found, *model, "transformer.wte.weight").rows for found in (plan, each))
    assert one.comm_s > 0
    assert two.comm_s == pytest.approx(2 * one.comm_s)
    assert "gathered once for all readers" in plan.table()
    assert tw.diff(plan, each).decisions


@pytest.mark.parametrize("share", slow_but([None], [None, 0.88]))
def test_layers_that_are_all_alike_share_too(pool2: Pool, share: float | None) -> None:
    spec = "tests/models/tied.py:one_weight_in_all_layers"
    found = tw.load_model(spec)
    question = {"hardware": "cpu:2", "solver": "fsdp", "loss_fn": found.loss_fn}
    plan = tw.plan(found.model, found.batch, **question)
    assert {key for key, entry in plan.params.items() if entry.shared} == {
        "layers.0.shared.weight",
        "layers.0.shared.bias",
    }
    if share is not None:
        plan = tw.plan(found.model, found.batch, **question, memory=int(share * plan.predicted.peak_bytes))
    payload = {"spec": spec, "options": {}}
    results = pool2.run("trainwright.cli.workers:verify", model=payload, plan=plan.to_json(), dtype="float64")
    report = tw.Report.model_validate(results[0])
    assert report.passed, report
    assert max(report.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=PEAK_BAR)
