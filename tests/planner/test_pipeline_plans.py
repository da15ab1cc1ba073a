"""Plans with stages from beginning to end: fake runs promise the bytes, check finds the same, edits and pins are obeyed."""

from __future__ import annotations

import json
from typing import Any

import pytest

import trainwright as tw
from tests.builders import with_disk
from tests.pool import Pool
from trainwright.artifacts import OffloadPlan, Plan, Refusal, Tier, UserError
from trainwright.planner import schedule_of
from trainwright.runtime.pipe import check_stages

CLOSE = 1e-9


def built(name: str = "gpt2-tiny", **config: Any) -> dict[str, Any]:
    model, batch = tw.zoo.build(name, batch_size=8, **config)
    return {"model": model, "batch": batch}


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return built(n_layer=4)


ASKED: dict[str, Any] = {"hardware": "cpu:2", "mesh": 1, "micro_batches": 4, "pipeline": 2}
ONE_ORDER = {**ASKED, "pipeline_schedule": "1f1b"}


@pytest.fixture(scope="module")
def plan(model: dict[str, Any]) -> Plan:
    return tw.plan(**model, **ASKED)


def test_a_plan_with_stages_reads_back_as_it_was_written(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert data["format_version"] == 2
    assert data["mesh"] == {"pipe": 2, "a0": 1}
    again = Plan.parse(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest() == plan.solver.digest
    assert plan.num_ranks == 2
    assert plan.inner_mesh == {"a0": 1}


def test_the_peak_is_the_fullest_stage_s_and_check_finds_it_again(plan: Plan, model: dict[str, Any]) -> None:
    stages = plan.predicted.stages
    assert len(stages) == 2
    assert plan.predicted.peak_bytes == max(stage.peak_bytes for stage in stages)
    checked = tw.check(plan, **model)
    assert checked.predicted == plan.predicted
    predicted = plan.predicted
    told = predicted.compute_s + predicted.exposed_comm_s + predicted.recompute_s + predicted.bubble_s
    assert told == pytest.approx(predicted.step_s)
    schedule = schedule_of(plan)
    assert schedule is not None
    assert schedule.step_s == pytest.approx(predicted.step_s)
    assert {span.micro for span in schedule.spans if span.kind == "forward"} == {0, 1, 2, 3}


def test_a_budget_is_kept_by_what_each_stage_recomputes(plan: Plan, model: dict[str, Any]) -> None:
    budget = int(0.9 * plan.predicted.peak_bytes)
    tight = tw.plan(**model, **ONE_ORDER, memory=budget)
    assert tight.predicted.peak_bytes <= budget
    assert tight.predicted.step_s >= plan.predicted.step_s
    assert tight.solver.gap is not None
    with pytest.raises(Refusal, match=r"stage \d of 2 holds most"):
        tw.plan(**model, **ONE_ORDER, memory=int(0.2 * plan.predicted.peak_bytes))


def test_joint_is_never_slower_than_the_recipes(model: dict[str, Any], plan: Plan) -> None:
    found = tw.compare(**model, **ONE_ORDER, memory=int(0.92 * plan.predicted.peak_bytes))
    assert set(found) == {"even", "balanced", "pipeline-dp", "joint"}
    joint = found["joint"]
    assert isinstance(joint, Plan)
    others = [each for each in found.values() if isinstance(each, Plan)]
    assert all(joint.predicted.step_s <= other.predicted.step_s for other in others)


def test_a_mesh_of_one_stage_is_taken_on_gpus_with_a_host_too(model: dict[str, Any]) -> None:
    found = tw.plan(**model, hardware="2x2xh100", mesh=2, micro_batches=4, pipeline=2)
    assert list(found.mesh.values()) == [2, 2]


@pytest.mark.slow  # three orders are planned, checked and explained
def test_another_order_is_taken_where_its_step_is_shorter(model: dict[str, Any], plan: Plan) -> None:
    found = {name: tw.plan(**model, **ASKED, pipeline_schedule=name) for name in ("1f1b", "interleaved", "zero-bubble")}
    fastest = min(each.predicted.step_s for each in found.values())
    assert plan.predicted.step_s == pytest.approx(fastest, rel=1e-9)
    interleaved, split = found["interleaved"].pipeline, found["zero-bubble"].pipeline
    assert interleaved is not None
    assert split is not None
    assert interleaved.num_pieces == interleaved.virtual * 2 >= 4
    assert split.split_backward
    for each in found.values():
        checked = tw.check(each, **model)
        assert checked.predicted == each.predicted
        schedule = schedule_of(each)
        assert schedule is not None
        assert schedule.step_s == pytest.approx(each.predicted.step_s)
        assert Plan.parse(each.to_json()) == each
        assert tw.explain(each, **model, key="transformer.h.0.mlp.c_fc").cuts
    assert "zero bubble" in found["zero-bubble"].table()
    assert "interleaved" in found["interleaved"].table()


FAST_DISK = with_disk(Tier(write_bytes_per_s=2e9, read_bytes_per_s=2e9, latency_s=1e-6), "cpu:2")


@pytest.mark.slow
def test_what_stages_offload_fits_where_nothing_else_does_and_is_faster(model: dict[str, Any], pool2: Pool) -> None:
    asked = {**ONE_ORDER, "hardware": FAST_DISK}
    with pytest.raises(Refusal, match="joint found none"):
        tw.plan(**model, **asked, offload="none", memory="1.45MiB")
    found = tw.plan(**model, **asked, offload="disk", memory="1.45MiB")
    kept = tw.plan(**model, **asked, offload="none", memory="1.6MiB")
    assert found.offload is not None
    assert found.predicted.step_s < kept.predicted.step_s
    assert found.predicted.peak_bytes <= 1.45 * 2**20
    predicted = found.predicted
    told = predicted.compute_s + predicted.exposed_comm_s + predicted.recompute_s + predicted.bubble_s
    assert told + predicted.transfer_s == pytest.approx(predicted.step_s)
    assert tw.check(found, **model).predicted == predicted
    assert all(stage.moved_bytes > 0 for stage in predicted.stages)
    assert "offloaded" in found.table()
    assert "offloaded" in tw.explain(found, **model, key="transformer.h.0.mlp.c_fc").text()
    for report in pool2.run("tests.pipeline_cases:verified_plan", timeout_s=280, text=found.to_json()):
        assert report["passed"], report
        assert report["max_relative_error_gradient"] < 1e-12


@pytest.mark.slow
def test_stages_that_may_offload_are_never_slower(model: dict[str, Any]) -> None:
    """Slow disks and fast, budgets that bind and that do not; none offloads without need."""
    slow = with_disk(Tier(write_bytes_per_s=2e7, read_bytes_per_s=5e7, latency_s=1e-5, overlap=0.5), "cpu:2")
    free = tw.plan(**model, **ASKED)
    for hardware in (slow, FAST_DISK):
        for memory in (None, int(0.8 * free.predicted.peak_bytes), int(0.66 * free.predicted.peak_bytes)):
            asked = {**ASKED, "hardware": hardware, "memory": memory}
            steps = [tw.plan(**model, **asked, offload=offload).predicted.step_s for offload in ("none", "disk")]
            assert steps[1] <= steps[0] * (1 + CLOSE)
            if memory is None:
                assert steps[1] == steps[0]


@pytest.mark.slow
def test_the_last_stage_takes_its_loss_in_chunks_where_nothing_fits_without(pool2: Pool) -> None:
    options = {"n_layer": 2, "seq_len": 64, "vocab_size": 1024}
    wide = built(**options)
    asked = {**ONE_ORDER, "micro_batches": 2, "memory": "3.5MiB"}
    with pytest.raises(Refusal, match="joint found none"):
        tw.plan(**wide, **asked, loss_chunks="none")
    found = tw.plan(**wide, **asked)
    assert found.loss_chunks > 1
    assert found.predicted.peak_bytes <= 3.5 * 2**20
    assert tw.check(found, **wide).predicted == found.predicted
    ran = {"layers": options.pop("n_layer"), **options}
    for report in pool2.run("tests.pipeline_cases:verified_plan", timeout_s=280, text=found.to_json(), **ran):
        assert report["passed"], report
        assert report["max_relative_error_gradient"] < 1e-12
    with pytest.raises(Refusal, match="about"):
        tw.plan(**wide, **{**asked, "memory": "0.5MiB"})


def test_gpus_offload_to_their_hosts_unless_told_otherwise(model: dict[str, Any]) -> None:
    asked = {**ONE_ORDER, "hardware": "2xh100", "memory": "1.9MiB"}
    auto, host, none = (tw.plan(**model, **asked, offload=offload) for offload in ("auto", "host", "none"))
    assert auto.offload is not None
    assert auto.offload.tier == "host"
    assert auto.predicted.step_s == host.predicted.step_s < none.predicted.step_s
    assert none.offload is None


def test_pins_and_edits_say_where_stages_begin(plan: Plan, model: dict[str, Any]) -> None:
    pinned = tw.plan(**model, **ONE_ORDER, pins="transformer.h.1=begin(1)")
    assert pinned.pipeline is not None
    assert pinned.pipeline.begins == ("transformer.h.1",)
    assert pinned.predicted.step_s >= plan.predicted.step_s * (1 - 1e-9)
    edited = plan.model_copy(update={"pipeline": pinned.pipeline})
    checked = tw.check(edited, **model)
    assert checked.is_edited
    assert checked.predicted.step_s == pytest.approx(pinned.predicted.step_s, rel=1e-6)
    wrong = plan.pipeline.model_copy(update={"begins": ("transformer.h.9",)})  # type: ignore[union-attr]
    with pytest.raises(UserError, match="block at which a stage can begin"):
        tw.check(plan.model_copy(update={"pipeline": wrong}), **model)


def test_explain_says_what_the_next_best_cut_costs(plan: Plan, model: dict[str, Any]) -> None:
    found = tw.explain(plan, **model, key="transformer.h.0.mlp.c_fc")
    (cut,) = found.cuts
    assert plan.pipeline is not None
    assert cut.begins == plan.pipeline.begins[0]
    assert cut.other != cut.begins
    assert cut.extra_s is not None
    assert cut.extra_s >= -1e-12
    assert "stage 1 begins at" in found.text()


def test_tables_and_diffs_show_stages(plan: Plan, model: dict[str, Any]) -> None:
    table = plan.table()
    assert "in flight" in table
    assert "the busiest stage waits" in table
    other = tw.plan(**model, **ASKED, pins="transformer.h.1=begin(1)")
    found = tw.artifacts.diff(plan, other)
    assert "stage 0 peak_bytes" in [row.name for row in found.stages]
    assert "stages" in found.table()


def test_auto_takes_no_pipeline_where_none_is_better(model: dict[str, Any]) -> None:
    alone = tw.plan(**model, hardware="cpu:2", micro_batches=4)
    free = tw.plan(**model, hardware="cpu:2", micro_batches=4, pipeline="auto")
    assert free.predicted.step_s <= alone.predicted.step_s * (1 + 1e-9)
    if free.pipeline is None:
        assert any("none are faster" in note for note in free.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline": 3}, "cuts cpu:2 into equal parts"),
        ({"pipeline": 0}, "number of pipeline stages"),
        ({"offload": "host"}, "host is the memory of a CPU; try disk"),
        ({"hardware": "2xh100", "offload": "disk"}, "hardware with a disk tier is needed"),
        ({"optimizer": "sophiah", "micro_batches": 1}, "one forward and backward"),
        ({"pins": "h.*=recompute"}, "pins of layouts"),
        ({"pins": "transformer.h.77=begin(1)"}, "names none"),
        ({"pins": "transformer.h.1=begin(2)"}, "a stage from 1 to 1"),
        ({"pipeline_schedule": "dualpipe"}, "1f1b, interleaved, zero-bubble, or auto"),
        ({"pipeline": 1, "pipeline_schedule": "1f1b"}, "and no stages; try --pipeline auto"),
        ({"solver": "ddp"}, "even, balanced, pipeline-dp, joint"),
    ],
)
def test_what_stages_cannot_do_is_refused_with_what_can(
    model: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        tw.plan(**model, **{**ASKED, **options})


def test_optimizer_states_stay_on_the_device(plan: Plan, model: dict[str, Any]) -> None:
    away = {key: each.model_copy(update={"offloaded": {"state": "all"}}) for key, each in plan.params.items()}
    edited = plan.model_copy(update={"params": away, "offload": OffloadPlan(tier="disk", in_flight_bytes=0)})
    with pytest.raises(UserError, match="optimizer states that stay on the device"):
        tw.check(edited, **model)
    with pytest.raises(UserError, match="whose optimizer states stay on the device"):
        check_stages(edited)


def test_a_note_names_what_leaves_to_no_effect_on_any_stage(plan: Plan, model: dict[str, Any]) -> None:
    def with_offloaded(key: str, fates: dict[str, str]) -> Plan:
        changed = {name: each.model_copy(update={"offloaded": fates}) if name.endswith(key) else each
                   for name, each in plan.modules.items()}  # fmt: skip
        assert changed != plan.modules
        return plan.model_copy(update={"modules": changed, "offload": OffloadPlan(tier="disk", in_flight_bytes=4096)})

    found = tw.check(with_offloaded("mlp.c_fc:linear", {"out": "all"}), **model)
    assert all(stage.moved_bytes > 0 for stage in found.predicted.stages)
    assert found.predicted.peak_bytes < plan.predicted.peak_bytes
    assert not any("no effect" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline": {"begins": ["transformer.h.1"], "in_flight": [1, 2]}}, "may not rise"),
        ({"pipeline": {"begins": ["transformer.h.1"], "in_flight": [2]}}, "for each of 2 stages"),
        ({"pipeline": {"begins": ["transformer.h.1"], "in_flight": [9, 1]}}, "number of micro-batches"),
        ({"mesh": {"a0": 1, "pipe": 2}}, "as its first axis"),
        ({"format_version": 1}, "format version 2"),
        ({"pipeline": {"begins": ["transformer.h.1"], "in_flight": [2, 1], "virtual": 2}}, "of two stages or more"),
        ({"format_version": 3}, "format version 1 or 2"),
    ],
)
def test_files_that_contradict_themselves_are_refused(plan: Plan, changes: dict[str, Any], words: str) -> None:
    data = {**json.loads(plan.to_json()), **changes}
    with pytest.raises(UserError, match=words):
        Plan.parse(json.dumps(data))


def test_files_without_stages_are_as_before(model: dict[str, Any]) -> None:
    text = tw.plan(**model, hardware="cpu:1").to_json()
    assert json.loads(text)["format_version"] == 1
    assert "pipeline" not in json.loads(text)
    assert not {"stages", "bubble_s"} & set(json.loads(text)["predicted"])
