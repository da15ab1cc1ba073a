"""`profile --hardware a,b`: which device can train a model, whole, with LoRA, with QLoRA."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import trainwright as tw
from trainwright.artifacts import Fitting
from trainwright.cli import main
from trainwright.models.lora import with_adapters
from trainwright.reports.fitting import fitting_table

ASKED = ["profile", "zoo:llama-tiny", "--dtype", "bf16", "--batch-size", "4"]


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Fitting, str]:
    status = main([*ASKED, *arguments, "--json", "-"])
    printed = capsys.readouterr()
    return status, Fitting.parse(printed.out), printed.err


def peak(way: str, batch_size: int) -> int:
    model, batch = tw.zoo.build("llama-tiny", dtype="bf16", batch_size=batch_size)
    model = model if way == "full" else with_adapters(model, way)
    return tw.profile(model, batch, hardware="a100", capture=False).peak_bytes


def test_each_row_is_a_profile_with_the_fewest_changes_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between = (peak("full", 4) + peak("qlora", 4)) // 2
    page = tmp_path / "page.html"
    status, found, _ = answered(capsys, "--hardware", "a100,rtx3090", "--fits", f"{between}B", "--html", str(page))
    assert status == 0
    assert [(row.device, row.way) for row in found.rows] == [
        (device, way) for device in ("a100", "rtx3090") for way in ("full", "lora", "qlora")
    ]
    full, _, qlora = found.rows[:3]
    assert qlora.fits
    assert qlora.peak_bytes == peak("qlora", 4)
    assert not qlora.changes
    assert full.changes
    assert all(row.fits == (row.peak_bytes <= row.budget_bytes) and row.step_s > 0 for row in found.rows)
    assert "QLoRA" in page.read_text(encoding="utf8")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", fitting_table(found)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "gradient checkpointing" in " ".join(" ".join(lines).split())


def test_without_a_budget_each_device_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = answered(capsys, "--hardware", "a100-40gb,h100", "--fits", "auto")
    assert status == 0
    own = [int(0.9 * tw.hardware(name).device.memory_bytes) for name in ("a100-40gb", "h100")]
    assert [row.budget_bytes for row in found.rows[::3]] == own


def test_where_nothing_fits_the_answer_is_no(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, err = answered(capsys, "--set", "num_hidden_layers=1", "--hardware", "a100,h100", "--fits", "1KiB")
    assert status == 1
    assert not found.fits
    assert "none of these has it" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "a100,h100", "--sweep", "batch-size"], "one device is needed for --sweep"),
        (["--hardware", "a100,h10"], "did you mean"),
        (["--fits", "auto"], "a device is needed for --fits auto"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *arguments]) == 2
    assert message in capsys.readouterr().err
