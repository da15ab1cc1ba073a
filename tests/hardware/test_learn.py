"""Learning from runs: a corrected hardware file under which what was measured would have been predicted."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import trainwright as tw
from trainwright.artifacts import Cluster, Compared, Run
from trainwright.cli import main
from trainwright.cli.progress import held_against
from trainwright.hardware.learn import learn, unlearned
from trainwright.models import zoo

RATIOS = {"compute_s": 1.7, "comm_s": 0.4, "update_s": 3.0}


@cache
def planned(solver: str = "fsdp") -> tw.Plan:
    model, batch = zoo.build("gpt2-tiny")
    return tw.plan(model, batch, hardware="cpu:2", solver=solver)


def run_of(plan: tw.Plan, ratios: dict[str, float] = RATIOS, num_steps: int = 6) -> Run:
    """A run that took `ratios` of what its plan had predicted."""
    said = plan.predicted
    predicted = {
        "compute_s": said.compute_s + said.recompute_s - said.update_s, "comm_s": said.comm_s, "update_s": said.update_s,
    }  # fmt: skip
    parts = {name: Compared(predicted=value, measured=ratios[name] * value) for name, value in predicted.items()}
    step = Compared(predicted=said.step_s, measured=sum(part.measured for part in parts.values()))
    return Run(
        model=plan.model.name, optimizer=plan.optimizer, num_ranks=2, num_steps=num_steps, cluster=plan.cluster,
        fingerprint=plan.cluster.fingerprint, step_s=step, **parts,
    )  # fmt: skip


def priced_for(plan: tw.Plan, cluster: Cluster) -> tw.Plan:
    """The same decisions, predicted for other hardware."""
    return tw.check(plan.model_copy(update={"cluster": cluster}), *zoo.build("gpt2-tiny"))


def test_a_plan_for_the_learned_file_predicts_what_was_measured() -> None:
    plan, run = planned(), run_of(planned())
    learned = learn([run])
    again = priced_for(plan, learned).predicted
    assert again.step_s == pytest.approx(run.step_s.measured, rel=0.03)
    assert again.comm_s == pytest.approx(run.comm_s.measured, rel=1e-3)
    assert again.update_s == pytest.approx(run.update_s.measured, rel=1e-3)
    assert again.compute_s - again.update_s == pytest.approx(run.compute_s.measured, rel=1e-3)
    assert again.peak_bytes == plan.predicted.peak_bytes


def test_it_serves_other_plans_too() -> None:
    """What was learned from one plan corrects another one of which the same holds."""
    truth = run_of(planned("ddp"))
    learned = learn([run_of(planned("fsdp"))])
    before = abs(planned("ddp").predicted.step_s - truth.step_s.measured)
    assert abs(priced_for(planned("ddp"), learned).predicted.step_s - truth.step_s.measured) < 0.05 * before


def test_learning_twice_is_learning_once() -> None:
    plan = planned()
    learned = learn([run_of(plan)])
    again = learn([run_of(priced_for(plan, learned), dict.fromkeys(RATIOS, 1.0))])
    assert again.device.factors == pytest.approx(learned.device.factors)
    assert unlearned(again) == plan.cluster
    further = learn([run_of(priced_for(plan, learned), dict.fromkeys(RATIOS, 2.0))])
    assert further.device.factors["communication"] == pytest.approx(
        2 * learned.device.factors["communication"], rel=1e-3
    )


def test_several_runs_are_weighed_alike() -> None:
    plan = planned()
    fast, slow = (run_of(plan, dict.fromkeys(RATIOS, ratio)) for ratio in (0.5, 8.0))
    learned = learn([fast, slow])
    assert learned.device.factors == pytest.approx(dict.fromkeys(("compute", "update", "communication"), 2.0), rel=1e-3)
    assert [record.measured_s["step"] for record in learned.learned] == [fast.step_s.measured, slow.step_s.measured]


def test_what_learning_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(planned())
    with pytest.raises(tw.UserError, match="got none"):
        learn([])
    with pytest.raises(tw.UserError, match="at least 3 measured steps"):
        learn([run_of(planned(), num_steps=2)])
    with pytest.raises(tw.UserError, match="was on another"):
        learn([run.model_copy(update={"fingerprint": "0123456789abcdef"})])
    with pytest.raises(tw.UserError, match="compute_s of"):
        learn([run_of(planned(), RATIOS | {"compute_s": 4000.0})])
    other = run.model_copy(update={"cluster": tw.hardware("cpu:4")})
    with pytest.raises(tw.UserError, match="planned for the same hardware"):
        learn([run, other])
    path = tmp_path / "run.json"
    run.to_json(path)
    assert main(["calibrate", "--learn", str(path), "--quick"]) == 2
    assert "--learn measures nothing" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["calibrate", "--learn", str(path)]) == 2
    assert "a run in JSON is needed" in capsys.readouterr().err


def test_from_training_to_a_better_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path, run_path, file = (str(tmp_path / name) for name in ("plan.json", "run.json", "hardware.json"))
    planned().model_copy(update={"model": planned().model.model_copy(update={"name": "gpt2-tiny"})}).to_json(plan_path)
    train = ["train", "zoo:gpt2-tiny", "--plan", plan_path, "--steps", "8", "--json", run_path]
    assert main([*train, "--metrics", str(tmp_path / "m.jsonl")]) == 0
    assert all("update_s" in json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines())
    run = Run.from_json(run_path)
    assert run.num_steps == 6
    assert run.peak_bytes.measured == pytest.approx(run.peak_bytes.predicted, rel=0.01)
    assert run.update_s.measured > 0
    assert run.comm_bytes["all_gather"].measured == run.comm_bytes["all_gather"].predicted
    capsys.readouterr()
    assert main(["calibrate", "--learn", run_path, "-o", file]) == 0
    assert "learned: communication" in capsys.readouterr().out
    learned = Cluster.from_json(file)
    predicted = priced_for(planned(), learned).predicted
    off = abs(predicted.step_s - run.step_s.measured)
    assert off < 0.2 * abs(planned().predicted.step_s - run.step_s.measured) + 0.02 * run.step_s.measured


def test_without_times_of_its_own_communication_is_left_alone() -> None:
    plan = planned()
    gpu = plan.cluster.model_copy(update={"device": plan.cluster.device.model_copy(update={"kind": "gpu"})})
    steps = [
        {"step": k, "step_s": 1.0, "comm_s": 0.0, "update_s": 0.0, "comm_bytes": {}, "peak_bytes": 0} for k in range(6)
    ]
    learned = learn([held_against(steps, plan.model_copy(update={"cluster": gpu}))])
    assert "communication" not in learned.device.factors
    assert learned.device.factors["compute"] == pytest.approx(1.0 / plan.predicted.step_s, rel=1e-3)
