"""`trainwright selfcheck`: two small models on the processor, in the terminal, as JSON and as a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainwright import self_checking
from trainwright.artifacts import Checked, Report, SelfCheck, UserError
from trainwright.cli import main
from trainwright.hardware import DEVICES, resolve
from trainwright.hardware.presets import preset_called
from trainwright.launch import WorkerError
from trainwright.reports.selfcheck import selfcheck_markdown, selfcheck_table
from trainwright.self_checking import CPU_CASES, GPU_CASES, Case, selfcheck

GIB = 2**30
DRIVERS = {
    "Tesla V100-SXM2-16GB": (16, "v100-16gb"),
    "Tesla V100-SXM2-32GB": (32, "v100"),
    "Tesla T4": (15, "t4"),
    "NVIDIA A100-SXM4-80GB": (79, "a100"),
    "NVIDIA A100-SXM4-40GB": (39.4, "a100-40gb"),
    "NVIDIA A10G": (22.1, "a10g"),
    "NVIDIA RTX A6000": (47.5, "a6000"),
    "NVIDIA GeForce RTX 3080 Ti": (11.7, "rtx3080ti"),
    "NVIDIA GeForce RTX 3090": (23.7, "rtx3090"),
    "NVIDIA GeForce RTX 4090": (23.6, "rtx4090"),
    "NVIDIA H100 80GB HBM3": (79.1, "h100"),
    "NVIDIA H100 PCIe": (79.1, "h100-pcie"),
    "NVIDIA GH200 480GB": (94.5, "gh200"),
    "NVIDIA H200": (139.8, "h200"),
    "NVIDIA B200": (178, "b200"),
    "NVIDIA L4": (22, "l4"),
    "NVIDIA L40S": (44.4, "l40s"),
    "AMD Instinct MI300X": (191, "mi300x"),
}


@pytest.mark.parametrize(
    "models", [("resnet-tiny:2",), pytest.param(("gpt2-tiny:2:16", "resnet-tiny:2"), marks=pytest.mark.slow)], ids=len
)
def test_models_are_predicted_and_measured(
    models: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, figures = tmp_path / "report.md", tmp_path / "figures.json"
    assert main(["selfcheck", *models, "-o", str(report), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    found = SelfCheck.from_json(figures)
    assert [row.model for row in found.rows] == [model.partition(":")[0] for model in models]
    for row in found.rows:
        assert row.measured_peak_bytes == pytest.approx(row.predicted_peak_bytes, rel=3e-3)
        assert row.measured_step_s is not None
        assert row.measured_step_s > 0
        assert row.not_measured == ""
    assert found.verification is not None
    assert found.verification.passed
    assert found.verification.num_ranks == 2
    assert "a plan over 2 devices computes the same as one process" in shown
    text = report.read_text(encoding="utf8")
    assert all(f"| {model} fp32 |" in text for model in models)
    (held,) = re.findall(r"```json\n(.*)```", text, re.DOTALL)
    assert SelfCheck.parse(held) == found
    assert f"selfcheck {' '.join(models)} -o {report}" in found.command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt2-tiny"], "NAME:BATCH or NAME:BATCH:LENGTH; got 'gpt2-tiny'"),
        (["gpt2-tiny:0"], "got 'gpt2-tiny:0'"),
        (["no-such-model:2"], "no-such-model"),
        (["gpt2-tiny:2:16", "--minutes", "0"], "minutes above 0"),
        (["gpt2-tiny:2:16@int3"], "int3"),
        (["gpt2-tiny:2:16", "-o", "nowhere/report.md"], "nowhere"),
        (["gpt2-tiny:2:16", "--gpu"], "a GPU is needed"),
    ],
)
def test_what_cannot_be_checked_is_a_clear_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["selfcheck", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_model_that_fails_or_does_not_fit_has_the_reason_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(worker: str, payload: dict[str, Any], *_: Any, **__: Any) -> list[dict[str, Any]]:
        if payload["case"]["name"] == "vit-tiny":
            raise WorkerError("rank 0 failed\nRuntimeError: out of memory")
        return [{"measured_peak_bytes": 2 * 10**6, "measured_step_s": 0.5}]

    monkeypatch.setattr("trainwright.launch.run_processes", run)
    small = resolve("cpu:1")
    tiny = small.model_copy(update={"device": small.device.model_copy(update={"memory_bytes": 4 * 2**20})})
    found = selfcheck(tiny, "cpu", [Case("gpt2-tiny", 64, 64), Case("vit-tiny", 1), Case("resnet-tiny", 1)])
    assert [row.not_measured for row in found.rows] == [
        "it takes more memory than the device has",
        "RuntimeError: out of memory",
        "",
    ]
    assert found.rows[2].measured_step_s == 0.5
    assert found.median_error("reserved") is None
    assert "vit-tiny was not measured: RuntimeError: out of memory" in selfcheck_table(found)


def test_after_its_minutes_no_further_model_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 100.0])
    monkeypatch.setattr(self_checking.time, "monotonic", lambda: next(now))
    monkeypatch.setattr("trainwright.launch.run_processes", lambda *_, **__: [{"measured_peak_bytes": 1}])
    cases = [Case("resnet-tiny", 1), Case("resnet-tiny", 2)]
    found = selfcheck(resolve("cpu:1"), "cpu", cases, minutes=1)
    assert [row.not_measured for row in found.rows] == ["", "the 1 minutes were over"]


@pytest.mark.parametrize("name", DRIVERS)
def test_the_preset_of_a_driver_s_name(name: str) -> None:
    memory_gib, preset = DRIVERS[name]
    assert preset_called(name, int(memory_gib * GIB)) == preset


def test_a_gpu_without_a_preset_is_named() -> None:
    with pytest.raises(UserError, match=r"a preset of Quadro K420 is needed .* say --hardware"):
        preset_called("Quadro K420", GIB)


def test_the_models_of_both_lists_are_of_the_zoo_and_ten() -> None:
    from trainwright.models import zoo

    for cases in (CPU_CASES, GPU_CASES):
        assert len(set(cases)) == 10
        assert {case.name for case in cases} <= set(zoo.names())
    assert len(DEVICES) > 15


def test_errors_are_predicted_over_measured() -> None:
    row = Checked(
        model="m", batch_size=1, dtype="fp32", optimizer="sgd", predicted_peak_bytes=110, measured_peak_bytes=100,
        predicted_reserved_bytes=90, measured_reserved_bytes=120, predicted_step_s=0.5, measured_step_s=1.0,
    )  # fmt: skip
    assert row.peak_error == pytest.approx(0.1)
    assert row.reserved_error == pytest.approx(-0.25)
    assert row.step_error == pytest.approx(-0.5)
    other = row.model_copy(update={"measured_peak_bytes": 220})
    report = Report(
        num_ranks=2, dtype="float64", max_relative_error_loss=0.5, max_relative_error_gradient=0.1, worst_gradient="w",
        bar_loss=1e-9, bar_gradient=1e-9, passed=False, predicted_peak_bytes=1, peak_bytes=(2,), budget_bytes=None,
    )  # fmt: skip
    found = SelfCheck(
        device="d", num_devices=2, predicted_for="p", versions={"torch": "x"}, date="2026-01-01", rows=(row, other),
        verification=report,
    )  # fmt: skip
    assert found.median_error("peak") == pytest.approx(0.3)
    text = selfcheck_markdown(found)
    assert "does NOT compute the same as one process (largest relative difference 5.0e-01)" in text
    assert "median error: peak 30.0 %, reserved bytes 25.0 %, step 50.0 %" in text
    assert json.loads(found.to_json())["rows"][0]["model"] == "m"
