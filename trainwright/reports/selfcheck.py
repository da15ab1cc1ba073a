"""A self-check for the terminal, and as Markdown that can be sent as an issue."""

from __future__ import annotations

from rich.text import Text

from ..artifacts import Checked, Report, SelfCheck
from .text import note_lines, plain_table, rendered, title_line
from .units import format_bytes, format_ratio, format_s

__all__ = ["selfcheck_markdown", "selfcheck_table"]
_DASH = "–"
_COLUMNS = ("model", "peak predicted", "measured", "error", "step predicted", "measured", "error", "reserved")


def selfcheck_table(found: SelfCheck) -> str:
    """Return one line a model, the medians, and what was not measured."""
    grid = plain_table(*_COLUMNS, right=_COLUMNS[1:], drop=("reserved", "step predicted"))
    for row in found.rows:
        grid.add_row(*_cells(row))
    title = title_line(found.device, f"predicted for {found.predicted_for}")
    verified = [] if found.verification is None else [Text(_verdict(found.verification))]
    return rendered(title, grid, Text(_medians(found)), *verified, *note_lines(_notes(found)))


def selfcheck_markdown(found: SelfCheck) -> str:
    """Return the report: the table, the medians, the verification, versions and all figures as JSON."""
    lines = [f"# Self-check on {found.num_devices} × {found.device}", ""]
    command = f" `{found.command}`" if found.command else ""
    lines += [f"Predicted for {found.predicted_for}. {found.date}.{command}", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in found.rows]
    lines += ["", _medians(found)]
    if found.verification is not None:
        lines += ["", _verdict(found.verification)]
    lines += ["", *(f"* {note}" for note in _notes(found))]
    lines += ["", *(f"* {name} {version}" for name, version in found.versions.items())]
    lines += [
        "",
        "<details><summary>All figures</summary>",
        "",
        "```json",
        found.to_json().rstrip(),
        "```",
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Checked) -> list[str]:
    size = f"{row.model}:{row.batch_size}" + (f":{row.seq_len}" if row.seq_len else "")
    how = f"{size} {row.dtype}" + (f", autocast {row.autocast}" if row.autocast else "")
    peaks, steps = (row.predicted_peak_bytes, row.measured_peak_bytes), (row.predicted_step_s, row.measured_step_s)
    reserved = format_ratio(row.predicted_reserved_bytes, row.measured_reserved_bytes)
    return [
        how,
        *(_DASH if size is None else format_bytes(size) for size in peaks),
        format_ratio(*peaks),
        *(_DASH if seconds is None else format_s(seconds) for seconds in steps),
        format_ratio(*steps),
        reserved,
    ]


def _medians(found: SelfCheck) -> str:
    """One sentence; what was not measured is left out."""
    named = (("peak", "peak"), ("reserved", "reserved bytes"), ("step", "step"))
    known = [(text, found.median_error(what)) for what, text in named]
    parts = [f"{text} {100 * error:.1f} %" for text, error in known if error is not None]
    return f"median error: {', '.join(parts)}" if parts else "nothing was measured"


def _verdict(report: Report) -> str:
    verdict = "computes the same as one process" if report.passed else "does NOT compute the same as one process"
    worst = max(report.peak_bytes, default=0)
    error = max(report.max_relative_error_loss, report.max_relative_error_gradient)
    return (
        f"a plan over {report.num_ranks} devices {verdict} (largest relative difference {error:.1e}); peak "
        f"{format_bytes(report.predicted_peak_bytes)} predicted, {format_bytes(worst)} measured"
    )


def _notes(found: SelfCheck) -> list[str]:
    return [
        *found.notes,
        *(f"{row.model} was not measured: {row.not_measured}" for row in found.rows if row.not_measured),
    ]
