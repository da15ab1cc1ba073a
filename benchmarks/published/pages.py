"""The record as a page and two scatter plots, and the figures that the bars are about."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .causes import FITTED_TO, cause_of, cause_of_ratio
from .learned import learnings
from .rows import Pair, Row, load, pairs

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "benchmarks" / "results" / "published.md"
PLOTS = ROOT / "docs"
Known = dict[str, Any]
Errors = list[tuple[Row, float]]
Ratios = list[tuple[Pair, float]]
MEMORY_MISS, TIME_MISS = 0.03, 0.15


def memory_errors(rows: list[Row], known: Known, kind: str) -> Errors:
    """Return predicted / published − 1 of `allocated` or `reserved`, where there are both."""
    return _errors(rows, known, f"{kind}_bytes", lambda row: getattr(row, f"{kind}_bytes"))


def time_errors(rows: list[Row], known: Known) -> Errors:
    """Return predicted / published − 1 of the step's time; a laptop's times are left out."""
    return _errors(rows, known, "step_s", lambda row: row.step_s if row.is_time_comparable else None)


def ratio_errors(rows: list[Row], known: Known) -> Ratios:
    """Return the same of the ratio of two rows' times, for each pair of `pairs` that both have one."""
    timed = [row for row in rows if row.step_s and known.get(row.id, {}).get("step_s")]
    return [
        (pair, known[pair.second.id]["step_s"] / known[pair.first.id]["step_s"] / pair.published - 1)
        for pair in pairs(timed)
    ]


def _errors(rows: list[Row], known: Known, key: str, published: Callable[[Row], float | None]) -> Errors:
    pairs = [(row, known.get(row.id, {}).get(key), published(row)) for row in rows]
    return [(row, predicted / figure - 1) for row, predicted, figure in pairs if predicted and figure]


def summary(known: Known) -> list[tuple[str, int, str, str]]:
    """Return by bar: what, how many rows, what was found, what is wanted."""
    rows = load()
    alone = [row for row in rows if row.num_gpus == 1]
    several = [row for row in rows if row.num_gpus > 1]
    judged = [row for row in rows if row.source not in FITTED_TO]
    allocated, shared = memory_errors(alone, known, "allocated"), memory_errors(several, known, "allocated")
    within = sum(abs(error) <= MEMORY_MISS for _, error in allocated)
    ratios = ratio_errors(judged, known)
    return [
        ("memory, one GPU, allocated", len(allocated), f"median {_median(allocated)}, {within} within 3 %", "0.5 %, 95 %"),
        ("memory, several GPUs, allocated", len(shared), f"median {_median(shared)}", "3 %"),
        ("memory, reserved", *_counted(memory_errors(rows, known, "reserved")), "5 %"),
        ("step time, sources not fitted to", *_counted(time_errors(judged, known)), "10 %"),
        ("step time, all sources", *_counted(time_errors(rows, known)), "–"),
        (
            "ratios within a source, not fitted to", len(ratios),
            f"median {_median(ratios)}, worst {_worst(ratios)}", "3 %, 10 %",
        ),
    ]  # fmt: skip


def _counted(errors: Errors) -> tuple[int, str]:
    return len(errors), f"median {_median(errors)}"


def _median(errors: Errors | Ratios) -> str:
    return f"{statistics.median(abs(error) for _, error in errors):.1%}" if errors else "–"


def _worst(errors: Errors | Ratios) -> str:
    return f"{max(abs(error) for _, error in errors):.0%}" if errors else "–"


def line(row: Row, found: dict[str, Any]) -> str:
    """Return one row for the terminal."""
    if "reason" in found:
        return f"{row.id:40} {found['reason']}"
    cells = [f"{name} {error:+.1%}" for name, error in _of_row(row, found) if error is not None]
    return f"{row.id:40} " + "  ".join(cells)


def _of_row(row: Row, found: dict[str, Any]) -> list[tuple[str, float | None]]:
    figures = {"allocated": row.allocated_bytes, "reserved": row.reserved_bytes, "time": row.step_s}
    keys = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "time": "step_s"}
    return [(name, found[keys[name]] / figure - 1 if figure else None) for name, figure in figures.items()]


def write(known: Known) -> None:
    """Write the page and the plots."""
    PAGE.write_text(as_markdown(known), encoding="utf8")
    plot(known)


def as_markdown(known: Known) -> str:
    """Return the page: the bars, then a table a source."""
    rows = load()
    lines = [
        "# Predictions beside published measurements", "",
        "`python -m benchmarks.published.compare`. Each row is a training run of a public repository "
        "(`benchmarks/published/rows.json`, with commit or date); nothing was measured here. Error: predicted / published − 1. "
        f"Constants of time were fitted to {', '.join(sorted(FITTED_TO))}, whose times judge nothing.", "",
        "| what | rows | found | wanted |", "|---|--:|---|---|",
        *(f"| {what} | {count} | {found} | {wanted} |" for what, count, found, wanted in summary(known)),
    ]  # fmt: skip
    for source in dict.fromkeys(row.source for row in rows):
        lines += ["", f"## {source}", ""]
        lines += _table([row for row in rows if row.source == source], known)
    return "\n".join([*lines, "", *_firsts(rows, known), "", *_ratios(rows, known), "", *_learned(rows, known)]) + "\n"


def _firsts(rows: list[Row], known: Known) -> list[str]:
    """Return the section of rows that stood here before anything was predicted for them, with what was predicted first."""
    lines = [
        "## Written before they were predicted", "",
        "Rows of sources and scripts of which none stood here, written down with their figures before anything was predicted for "
        "them: the error of the first prediction, and that of today, after the causes that it showed were mended.", "",
        "| run | allocated: first | now | reserved: first | now | step: first | now |", "|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in rows:
        if row.first and row.id in known:
            first, now = dict(_of_row(row, row.first)), dict(_of_row(row, known[row.id]))
            lines.append(
                f"| {row.id} | "
                + " | ".join(
                    _percent(each[what]) for what in ("allocated", "reserved", "time") for each in (first, now)
                )
                + " |"
            )
    return lines


def _learned(rows: list[Row], known: Known) -> list[str]:
    """Return the section of what `calibrate --learn` makes of the rows' times."""
    return [
        "## Learned from other runs", "",
        "What `trainwright calibrate --learn` would change: each step is told by factors that were learned from other rows of the "
        "same card. Median errors, before and after. A factor helps where errors have one sign; these differ by model.",
        "",
        "| learned from | steps told | before | after |", "|---|--:|--:|--:|",
        *(f"| {one.source} | {one.num_told} | {one.before:.1%} | {one.after:.1%} |" for one in learnings(rows, known)),
    ]  # fmt: skip


def _ratios(rows: list[Row], known: Known) -> list[str]:
    """Return the section of ratios."""
    lines = [
        "## Ratios", "",
        "Each pair of rows of one table or log of which a single thing that was asked differs (`rows.pairs`): the second's step "
        "over the first's. Rows of other dates are no pairs: their software differs as well.", "",
        "| source | asked otherwise | first | second | published | error | cause of a miss |", "|---|---|---|---|--:|--:|---|",
    ]  # fmt: skip
    for pair, error in ratio_errors(rows, known):
        fitted = " (fitted)" if pair.first.source in FITTED_TO else ""
        lines.append(
            f"| {pair.first.source}{fitted} | {pair.changed} | {pair.first.id} | {pair.second.id} | {pair.published:.3f} | "
            f"{_percent(error)} | {cause_of_ratio(pair.first, pair.second, error)} |"
        )
    return lines


def _table(rows: list[Row], known: Known) -> list[str]:
    lines = []
    said = [row for row in rows if "step_s" in known.get(row.id, {})]
    if said:
        reads = dict.fromkeys(known[row.id]["read"] for row in said)
        lines += [f"Written as: {read}." for read in reads] + [""]
        lines += [
            "| run | GPU | allocated | | reserved | | step | | cause of a miss |",
            "|---|---|--:|--:|--:|--:|--:|--:|---|",
        ]
        lines += [_cells(row, known[row.id]) for row in said]
    missing = [row.id for row in rows if row.id not in known]
    if missing:
        lines += ["", f"Not run for this record: {', '.join(f'`{name}`' for name in missing)}."]
    unsaid = [row for row in rows if "reason" in known.get(row.id, {})]
    if unsaid:
        lines += ["", "Not predicted:", ""] + [f"* `{row.id}`: {known[row.id]['reason']}" for row in unsaid]
    return lines


def _cells(row: Row, found: dict[str, Any]) -> str:
    figures = {
        "allocated": _gib(row.allocated_bytes), "reserved": _gib(row.reserved_bytes), "time": _ms(row.step_s),
    }  # fmt: skip
    errors = dict(_of_row(row, found))
    cells = [part for name in figures for part in (figures[name], _percent(errors[name]))]
    return (
        f"| {row.id} | {row.num_gpus}× {found['hardware'].rpartition('x')[2] or found['hardware']} | "
        + " | ".join([*cells, cause_of(row, errors)])
        + " |"
    )


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f} GiB"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:,.0f} ms"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def plot(known: Known, folder: Path = PLOTS) -> list[Path]:
    """Write the two scatter plots and return where they are."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    rows = load()
    panels = {
        "memory": ("peak memory, GiB", [(row, kind, row_bytes, known[row.id][f"{kind}_bytes"]) for row in rows
                   for kind in ("allocated", "reserved")
                   if (row_bytes := getattr(row, f"{kind}_bytes")) and "step_s" in known.get(row.id, {})], 2**30, 0.03),
        "time": ("step time, ms", [(row, "time", row.step_s, known[row.id]["step_s"]) for row in rows
                 if row.is_time_comparable and "step_s" in known.get(row.id, {})], 1e-3, 0.1),
    }  # fmt: skip
    paths = []
    for name, (label, points, unit, band) in panels.items():
        figure, axis = pyplot.subplots(figsize=(6.4, 5.6))
        _scatter(axis, points, unit, band)
        axis.set(xlabel=f"published {label}", ylabel=f"predicted {label}", xscale="log", yscale="log")
        _plain_numbers(axis)
        figure.tight_layout()
        paths.append(folder / f"published-{name}.png")
        figure.savefig(paths[-1], dpi=100)
        pyplot.close(figure)
    return paths


def _scatter(axis: Any, points: list[tuple[Row, str, float, float]], unit: float, band: float) -> None:
    sources = dict.fromkeys(row.source for row, *_ in points)
    for place, source in enumerate(sources):
        for kind, marker in (("allocated", "o"), ("reserved", "^"), ("time", "o")):
            mine = [(x / unit, y / unit) for row, what, x, y in points if row.source == source and what == kind]
            if mine:
                fitted = " (fitted)" if kind == "time" and source in FITTED_TO else ""
                label = f"{source}, reserved" if kind == "reserved" else source + fitted
                style = {"facecolors": "none"} if fitted or kind == "reserved" else {}
                axis.scatter(*zip(*mine), marker=marker, s=26, edgecolors=f"C{place % 10}", label=label,
                             **(style or {"color": f"C{place % 10}"}))  # fmt: skip
    values = [value / unit for _, _, *pair in points for value in pair]
    ends = [min(values) / 1.3, max(values) * 1.3]
    axis.plot(ends, ends, color="black", lw=1)
    axis.fill_between(ends, [end * (1 - band) for end in ends], [end * (1 + band) for end in ends], color="black",
                      alpha=0.12, lw=0, label=f"within {band:.0%}")  # fmt: skip
    axis.set(xlim=ends, ylim=ends)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_formatter(NullFormatter())
