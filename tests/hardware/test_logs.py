"""Logs of other loops as runs to learn from: torchtitan's, Hugging Face's Trainer's, our own metrics."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import trainwright as tw
from trainwright.artifacts import Cluster, Compared, Run, UserError
from trainwright.cli import main
from trainwright.hardware.learn import learn, left_out
from trainwright.hardware.logs import read_log, run_of_log
from trainwright.models import zoo

TITAN = "\n".join(
    f"[rank0]:\x1b[31mstep: {step:2}  \x1b[32mloss: {8 - step / 10:.4f}  \x1b[33mmemory: {40 + (step > 5)}.50GiB(51.20%)  "
    f"\x1b[34mtps: {1000 if step == 1 else 5_000 + step:,}  \x1b[36mtflops: 333.10  \x1b[35mmfu: 33.68%\x1b[39m"
    for step in range(1, 11)
)
TRAINER = """
{'loss': 3.1, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.5}
{'train_runtime': 20.0, 'train_samples_per_second': 40.0, 'train_steps_per_second': 2.5, 'train_loss': 2.9, 'epoch': 1.0}
"""
OURS = "".join(
    json.dumps(
        {
            "step": step,
            "loss": 1.0,
            "step_s": 0.5 if step > 1 else 9.0,
            "samples_per_s": 8.0,
            "peak_bytes": 10**6 + step,
        }
    )
    + "\n"
    for step in range(8)
)


@cache
def planned(batch_size: int = 4) -> tw.Plan:
    model, batch = zoo.build("gpt2-tiny", batch_size=batch_size)
    return tw.plan(model, batch, hardware="2xh100", solver="fsdp")


def test_what_each_kind_of_log_says() -> None:
    titan = read_log(TITAN)
    assert (titan.num_steps, titan.device_tokens_per_s, titan.step_s) == (8, 5006.5, None)  # the first two are warm-up
    assert titan.peak_bytes == round(41.5 * 2**30)
    trainer = read_log(TRAINER)
    assert (trainer.num_steps, trainer.step_s, trainer.peak_bytes) == (50, 0.4, None)
    ours = read_log(OURS + '{"step": 8, "step_s": 0.')
    assert (ours.num_steps, ours.step_s, ours.peak_bytes) == (6, 0.5, 10**6 + 7)


def test_tokens_of_one_device_become_seconds_of_a_step() -> None:
    plan = planned()
    tokens = plan.batch["input_ids"].shape[0] * plan.batch["input_ids"].shape[1]
    run = run_of_log(TITAN, plan)
    assert run.step_s.measured == pytest.approx(tokens / 2 / 5006.5)
    assert run.step_s.predicted == plan.predicted.step_s
    assert run.peak_bytes == Compared(predicted=plan.predicted.peak_bytes, measured=round(41.5 * 2**30))
    assert learn([run]).device.factors["compute"] == pytest.approx(run.step_s.measured / run.step_s.predicted, rel=1e-3)


def test_a_text_that_is_no_log_is_named() -> None:
    with pytest.raises(UserError, match=r"slurm\.out has no line of `train --metrics`, of torchtitan"):
        read_log("srun: job 12 queued", "slurm.out")


def slower(run: Run, factor: float) -> Run:
    parts = {name: getattr(run, name) for name in ("step_s", "compute_s")}
    return run.model_copy(
        update={name: part.model_copy(update={"measured": factor * part.predicted}) for name, part in parts.items()}
    )


def test_what_is_learned_is_held_against_runs_it_was_not_learned_from() -> None:
    run = run_of_log(TRAINER, planned())
    both = [slower(run, 2.0), slower(run, 3.0)]
    found = left_out(both)
    assert [each.error_before for each in found] == pytest.approx([1 / 2 - 1, 1 / 3 - 1])
    assert [each.error_after for each in found] == pytest.approx([3 / 2 - 1, 2 / 3 - 1])
    assert left_out(both[:1]) == []


def test_what_other_runs_teach_is_what_a_new_plan_predicts() -> None:
    """The error after is that of the same plan priced for the corrected hardware."""
    run = slower(run_of_log(TRAINER, planned()), 2.0)
    cluster = learn([run])
    again = tw.check(planned().model_copy(update={"cluster": cluster}), *zoo.build("gpt2-tiny", batch_size=4))
    (first, _) = left_out([slower(run, 2.5), run])
    assert first.error_after == pytest.approx(again.predicted.step_s / (2.5 * run.step_s.predicted) - 1, abs=0.02)


def test_from_a_log_to_corrected_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, size in enumerate((4, 8)):
        planned(size).to_json(tmp_path / f"plan{number}.json")
    (tmp_path / "titan.log").write_text(TITAN)
    (tmp_path / "trainer.log").write_text(TRAINER)
    logs = ["--learn", str(tmp_path / "titan.log"), "--learn", str(tmp_path / "trainer.log")]
    plans = ["--plan", str(tmp_path / "plan0.json"), "--plan", str(tmp_path / "plan1.json")]
    out = str(tmp_path / "ours.json")
    assert main(["calibrate", *logs, *plans, "-o", out]) == 0
    shown = capsys.readouterr().out
    assert "learned: compute" in shown
    assert shown.count("with what the other runs teach") == 2
    assert len(Cluster.from_json(out).learned) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--learn", "titan.log"], "got 1 logs and 0 plans"),
        (["--learn", "gone.log", "--plan", "plan.json"], "gone.log"),
        (["--plan", "plan.json"], "add --learn LOG"),
        (["--learn", "other.log", "--plan", "plan.json"], "other.log has no line"),
    ],
)
def test_wrong_logs_are_clear_errors(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    planned().to_json("plan.json")
    Path("titan.log").write_text(TITAN)
    Path("other.log").write_text("hello")
    assert main(["calibrate", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
