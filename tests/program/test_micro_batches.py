"""A step in several micro-batches: the whole batch's loss and gradients, in less memory; how many is chosen."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.models import micro
from tests.pool import Pool
from trainwright.cli import main
from trainwright.planner import Task
from trainwright.planner.best_first import solve_on
from trainwright.planner.search.effort import GAP
from trainwright.planner.search.solve import Answer
from trainwright.program.micro_batches import capture_step
from trainwright.request import PlanRequest
from trainwright.runtime.batch import own_rows

PEAK_BAR = 0.01
MODELS = [("gpt2-tiny", 0.55), ("llama-tiny", 0.55), ("vit-tiny", 0.6), ("t5-tiny", 0.5)]
IN_CI = {"vit-tiny"}
GRID = [pytest.param(*case, id=case[0], marks=() if case[0] in IN_CI else pytest.mark.slow) for case in MODELS]
OWN = "tests/models/micro.py"


@cache
def loaded(spec: str) -> Any:
    options = {"batch_size": 8} if spec.startswith("zoo:") else {}
    return tw.load_model(spec, **options)


@cache
def planned(
    spec: str, num: int | str, share: float | None = None, mesh: tuple[int, ...] = (2,), **more: Any
) -> tw.Plan:
    """A plan; `share` is its budget as a share of what one micro-batch without recomputation takes.

    It is asked whether plans run as they say, not how good they are: a few seconds of search find one.
    """
    found = loaded(spec)
    num_ranks = torch.Size(mesh).numel()
    memory = None if share is None else int(share * planned(spec, 1, None, mesh).predicted.peak_bytes)
    return tw.plan(found.model, found.batch, loss_fn=found.loss_fn, hardware=f"cpu:{num_ranks}", mesh=mesh, memory=memory,
                   micro_batches=num, **{"time_limit_s": 6.0, **more})  # fmt: skip


def verified(pool: Pool, spec: str, plan: tw.Plan) -> tw.Report:
    options = {"batch_size": 8} if spec.startswith("zoo:") else {}
    payload = {"spec": spec, "options": options}
    results = pool.run(
        "trainwright.cli.workers:verify", timeout_s=280, model=payload, plan=plan.to_json(), dtype="float64"
    )
    report = tw.Report.model_validate(results[0])
    assert report.passed, report
    assert plan.budget_bytes is None or max(report.peak_bytes) <= plan.budget_bytes
    return report


@pytest.mark.parametrize(("model", "share"), GRID)
def test_sharded_and_recomputed_in_two(pool2: Pool, model: str, share: float) -> None:
    plan = planned(f"zoo:{model}", 2, share)
    assert plan.micro_batches == 2
    assert any(op.recomputed for op in plan.modules.values())
    report = verified(pool2, f"zoo:{model}", plan)
    assert max(report.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=PEAK_BAR)


@pytest.mark.parametrize(
    ("name", "corrections"),
    [
        ("uneven_labels", {"weighted"}),
        pytest.param("weighted_classes", {"weighted"}, marks=pytest.mark.slow),
        pytest.param("uneven_likelihood", {"weighted"}, marks=pytest.mark.slow),
        ("summed", {4.0}),
        pytest.param("over_batch_size", {4.0, 0.25}, marks=pytest.mark.slow),
        ("masked_mean", {4.0, "whole-sum"}),
        pytest.param("regularised", {"weighted"}, marks=pytest.mark.slow),
        ("sloped", {4.0, 0.25}),
        ("drawn", {"weighted"}),
        pytest.param("torchs_encoder", {"weighted"}, marks=pytest.mark.slow),
    ],
)
def test_every_way_to_average_is_exact(pool2: Pool, name: str, corrections: set[Any]) -> None:
    spec = f"{OWN}:{name}"
    plan = planned(spec, 4)
    assert set(plan.corrections.values()) == corrections
    report = verified(pool2, spec, plan)
    assert report.max_relative_error_gradient < 1e-12


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("contrastive", "each by itself"),
        ("centred", "uses an average over all of them for each"),
        ("squared", "is not linear"),
        ("numbered", "numbers the examples"),
        ("sized", "numbers that do not depend on the batch's size"),
        ("shuffled", "numbers that do not depend on the batch's size"),
    ],
)
def test_a_loss_that_has_no_parts_is_refused(name: str, why: str) -> None:
    model, batch = getattr(micro, name)()
    with pytest.raises(tw.UserError, match=f"4 micro-batches need .*{why}"):
        tw.plan(model, batch, hardware="cpu:2", micro_batches=4)


def test_batch_norm_is_refused_by_name() -> None:
    found = loaded("zoo:resnet-tiny")
    with pytest.raises(tw.UserError, match="normalization:batch_norm takes the whole batch together"):
        tw.plan(found.model, found.batch, hardware="cpu:2", micro_batches=2)


@pytest.mark.parametrize("num", [3, 0, "many"])
def test_a_number_that_cannot_be_is_refused(num: Any) -> None:
    model, batch = micro.summed()
    with pytest.raises(tw.UserError, match="number of micro-batches"):
        tw.plan(model, batch, hardware="cpu:2", micro_batches=num)


def test_corrections_are_found_on_single_rows_too() -> None:
    found = loaded("zoo:vit-tiny")
    program = capture_step(found.model, found.batch, None, None, 8)
    assert program.num_runs == 8
    assert program.corrections == {":cross_entropy": "weighted"}


@pytest.mark.slow
def test_a_budget_that_nothing_else_meets_is_met_with_more(pool2: Pool) -> None:
    spec = "zoo:gpt2-tiny"
    with pytest.raises(tw.Refusal, match="--micro-batches auto may cut this one"):
        planned(spec, 1, 0.3)
    plan = planned(spec, "auto", 0.3)
    assert plan.micro_batches > 1
    assert any(f"{plan.micro_batches} micro-batches were chosen" in note for note in plan.notes)
    report = verified(pool2, spec, plan)
    assert max(report.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=PEAK_BAR)


def test_one_is_chosen_where_memory_is_ample() -> None:
    assert planned("zoo:gpt2-tiny", "auto").micro_batches == 1


def test_rows_of_all_ranks_are_the_batch() -> None:
    plan = planned(f"{OWN}:summed", 2, solver="ddp")
    rows = [own_rows(plan, (rank,)) for rank in range(2)]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]
    model, batch = micro.summed()
    program = capture_step(model, batch, None, None, 2)
    assert program.inputs[0].shape == (4, micro.WIDTH)
    assert plan.batch["0"].shape == (8, micro.WIDTH)


@pytest.mark.parametrize("solver", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_parameters_may_travel_in_buckets_in_every_run(pool2: Pool, solver: str) -> None:
    """A plan that is edited so is checked and runs: each run then opens its buckets, and gradients add up all the same."""
    spec = "tests.models.micro:uneven_labels"
    plan = planned(spec, 4, solver=solver).model_copy(update={"overlap": "buckets"})
    found = loaded(spec)
    checked = tw.check(plan, found.model, found.batch, loss_fn=found.loss_fn)
    assert checked.predicted.comm_bytes
    assert verified(pool2, spec, checked).passed


def test_gradients_of_replicated_parameters_are_reduced_once() -> None:
    one, four = (planned(f"{OWN}:summed", num, solver="ddp") for num in (1, 4))
    weights = sum(parameter.numel() for parameter in micro.summed()[0].parameters()) * 4
    loss = 4
    assert one.predicted.comm_bytes["all_reduce"] == weights + loss
    assert four.predicted.comm_bytes["all_reduce"] == weights + 4 * loss


@pytest.mark.parametrize("function", ["dropout", "resumes", "evaluates", "second_backward", "accumulates_by_hand"])
def test_in_training(pool2: Pool, function: str, tmp_path: Any) -> None:
    plan = planned(f"{OWN}:with_dropout" if function in ("dropout", "resumes") else f"{OWN}:uneven_labels", 4)
    results = pool2.run(f"tests.micro_cases:{function}", plan=plan.to_json(), folder=str(tmp_path))
    assert all(result == "ok" for result in results), results


def test_what_the_solver_minimises_is_what_is_priced() -> None:
    model, batch = micro.summed()
    for num in (1, 4):
        question = PlanRequest(model, batch, "cpu:2", mesh=(2,), offload="none", micro_batches=num).question()
        (place,) = Task(**question).places
        answer = solve_on(place, "joint")
        assert isinstance(answer, Answer)
        assert answer.objective_s == pytest.approx(place.price(answer.simulation).step_s, rel=1e-6)


def test_from_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spec, path, page = f"{OWN}:uneven_labels", str(tmp_path / "plan.json"), tmp_path / "plan.html"
    assert main(["plan", spec, "--hardware", "cpu:2", "--micro-batches", "4", "-o", path, "--html", str(page)]) == 0
    assert "4 micro-batches" in capsys.readouterr().out
    assert "4 micro-batches" in page.read_text()
    assert tw.Plan.from_json(path).micro_batches == 4
    assert main(["check", path, "--model", spec]) == 0
    assert main(["explain", path, "--model", spec]) == 0
    assert "4 micro-batches" in capsys.readouterr().out
    other = str(tmp_path / "other.json")
    assert main(["plan", spec, "--hardware", "cpu:2", "--micro-batches", "auto", "-o", other]) == 0
    capsys.readouterr()
    assert main(["diff", path, other]) == 0
    assert "micro" in capsys.readouterr().out
    assert main(["plan", spec, "--hardware", "cpu:2", "--micro-batches", "some"]) == 2
    assert "a number of micro-batches is needed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_frontier_is_better_with_more_to_choose_from(pool2: Pool) -> None:
    found = loaded("zoo:gpt2-tiny")
    # the time is ample: on a loaded machine a search that the clock ends has looked at one micro-batch alone
    asked = {"hardware": "cpu:2", "num_points": 2, "time_limit_s": 150.0}
    points, one = (tw.frontier(found.model, found.batch, micro_batches=num, **asked) for num in ("auto", 1))
    assert {point.micro_batches for point in points} > {1}
    assert points[0].predicted.peak_bytes < one[0].predicted.peak_bytes
    for each in one:
        among = [point for point in points if point.predicted.peak_bytes <= each.predicted.peak_bytes]
        assert min(point.predicted.step_s for point in among) <= each.predicted.step_s * (1 + GAP)
    peaks = [point.predicted.peak_bytes for point in points]
    steps = [point.predicted.step_s for point in points]
    assert peaks == sorted(peaks)
    assert steps == sorted(steps, reverse=True)
    verified(pool2, "zoo:gpt2-tiny", points[0])


@pytest.mark.slow
def test_with_offloading(pool2: Pool) -> None:
    plan = planned("zoo:gpt2-tiny", 2, 0.5, offload="disk", pins=("transformer.h.*=offload",))
    assert any(op.offloaded for op in plan.modules.values())
    report = verified(pool2, "zoo:gpt2-tiny", plan)
    assert max(report.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=PEAK_BAR)
