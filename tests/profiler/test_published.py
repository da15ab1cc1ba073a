"""The comparison with published runs: every row is predicted or says why not, and the record is of these rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.published import compare, learned, pages, rows
from benchmarks.published.causes import FITTED_TO
from benchmarks.published.program import CannotExpress, Program
from benchmarks.published.programs import program_of

ROWS = rows.load()
KNOWN = json.loads(compare.RECORD.read_text(encoding="utf8"))["rows"]


def row(name: str) -> rows.Row:
    return next(found for found in ROWS if found.id == name)


def test_rows_have_figures_in_bytes_and_a_source() -> None:
    assert len(ROWS) == 143
    assert row("hf-bert-4x256-sdpa").allocated_bytes == pytest.approx(764.834e6)
    fsdp = row("titan-l2-7b-fsdp2-sac")
    assert (fsdp.allocated_bytes, fsdp.reserved_bytes) == (49.54 * 2**30, 59.41 * 2**30)
    assert row("hf-v100-fp32-bs4").reserved_bytes == 13606 * 2**20  # less CUDA's context
    assert row("tutorial-ddp2-adam-linear").allocated_bytes == 1697e6  # after the step, not before
    assert {found.source for found in ROWS} == set(rows.SOURCES.values())
    assert not row("hf-pythia410m-1x1024-sdpa").is_time_comparable


def test_every_row_is_a_program_or_says_why_not() -> None:
    for found in ROWS:
        if found.source in ("timm", "lambda", "nvidia-dle"):  # they need timm
            continue
        try:
            assert isinstance(program_of(found), Program)
        except CannotExpress as reason:
            said = str(reason)
        else:
            said = "predicted, as the record has it"
        assert len(said) > 20, found.id


def test_a_row_is_predicted_as_the_record_says() -> None:
    small = row("hf-bert-4x256-sdpa")
    found = compare.predicted(small)
    assert found["allocated_bytes"] == pytest.approx(KNOWN[small.id]["allocated_bytes"], rel=1e-3)
    assert found["step_s"] == pytest.approx(KNOWN[small.id]["step_s"], rel=1e-3)


def test_the_page_is_the_records() -> None:
    assert set(KNOWN) <= {found.id for found in ROWS}
    assert pages.PAGE.read_text(encoding="utf8") == pages.as_markdown(KNOWN)
    bars = {what: found for what, _, found, _ in pages.summary(KNOWN)}
    assert {"timm", "lambda"} <= FITTED_TO
    assert all("median" in found for found in bars.values())


def test_without_matplotlib_the_page_is_written_and_the_rest_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, record = tmp_path / "published.md", tmp_path / "published.json"
    record.write_text(json.dumps({"rows": {}}), encoding="utf8")
    monkeypatch.setattr(pages, "PAGE", page)
    monkeypatch.setattr(compare, "RECORD", record)
    monkeypatch.setattr(sys, "argv", ["compare", "--pages"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare.main() == 2
    assert page.read_text(encoding="utf8").startswith("# Predictions")
    assert "matplotlib is needed for the plots" in capsys.readouterr().err


def test_errors_are_of_the_right_sign_and_ratios_of_one_source() -> None:
    some = row("hf-bert-4x256-sdpa"), row("hf-bert-16x512-sdpa")
    known = {some[0].id: {"allocated_bytes": 2 * 764.834e6, "step_s": 0.017}, some[1].id: {"step_s": 0.022}}
    assert [error for _, error in pages.memory_errors(list(some), known, "allocated")] == [pytest.approx(1.0)]
    assert pages.ratio_errors(list(some), known) == []  # two things were asked otherwise
    eager = row("hf-bert-4x256-eager")
    known[eager.id] = {"step_s": 0.046}
    ((pair, error),) = pages.ratio_errors([eager, *some], known)
    assert (pair.first, pair.second, pair.changed) == (eager, some[0], "attention")
    assert error == pytest.approx((0.017 / 0.046) / (0.017 / 0.023) - 1)


def test_a_source_that_is_too_fast_throughout_is_told_by_one_of_its_runs_and_not_by_others() -> None:
    some = [row(f"foundry-7b-s2048-{count}xh100-mb6") for count in (8, 128)]
    other = row("lambda-resnet50-amp-h100")
    assert all(found.step_s for found in (*some, other))
    known = {
        found.id: {"step_s": share * (found.step_s or 0.0), "hardware": "8xh100"}
        for found, share in [(some[0], 0.5), (some[1], 0.5), (other, 2.0)]
    }
    by_one, by_others = learned.learnings([*some, other], known)
    assert (by_one.num_told, by_one.before, by_one.after) == (2, 0.5, pytest.approx(0.0, abs=1e-9))
    assert (by_others.num_told, by_others.after) == (3, pytest.approx(0.75))  # too fast by 2, slowed by half once more


def test_pairs_are_of_one_date_and_differ_in_one_thing() -> None:
    found = {(pair.first.id, pair.second.id): pair.changed for pair in rows.pairs(ROWS)}
    assert found["titan-8b-reshard-default", "titan-8b-reshard-never"] == "wrapper"
    assert found["titan-8b-8h100-bs2-sac-eager", "titan-8b-8h100-bs2-sac-compile"] == "compilation"
    assert found["titan-l2-7b-fsdp2-full", "titan-l2-7b-fsdp2-sac"] == "recomputation"
    assert ("titan-8b-toml-699", "titan-8b-1881-fsdp8") not in found  # a year apart
    assert ("hf-v100-fp32-bs4", "hf-v100-amp-bs1-ga4-gc") not in found  # three things
    assert not any(first.startswith("timm") for first, _ in found)  # each of its models ran once
