"""The difference of two profiles or two plans as text for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from ..artifacts.difference import Change, Difference, ModuleChange, NumberChange
from .text import Grid, plain_table, rendered, title_line
from .tree import BLOCK_NUMBER
from .units import category_name, format_bytes, format_count, format_flops, format_ratio, format_s

__all__ = ["diff_table"]

_MAX_MODULES, _MAX_LISTED = 12, 8
_MODULE_COLUMNS = (
    "at_peak_bytes",
    "saved_bytes",
    "param_bytes",
    "forward_flops",
    "backward_flops",
    "forward_s",
    "backward_s",
)


def diff_table(found: Difference) -> str:
    """Return every total with its change, then what differs by module or by decision, the most important first."""
    parts: list[RenderableType] = [title_line(f"{found.before} → {found.after}", f"two {found.kind}s")]
    if found.is_empty:
        return rendered(*parts, Text("no difference"))
    if found.settings:
        parts.append(_changes_table("made with", found.settings))
    parts.append(_numbers_table("in all", found.totals))
    if found.breakdown:
        named = [number.model_copy(update={"name": f"{number.name}_bytes"}) for number in found.breakdown]
        parts.append(_numbers_table("at the peak", named))
    if found.stages:
        parts.append(_numbers_table("stages", found.stages))
    if found.modules:
        parts += _module_parts(found.modules)
    if found.decisions:
        parts.append(_changes_table("decision", found.decisions))
    parts += [_listed(word, names) for word, names in (("added", found.added), ("removed", found.removed)) if names]
    return rendered(*parts)


def _numbers_table(title: str, numbers: Sequence[NumberChange]) -> Grid:
    table = plain_table(title, "before", "after", "change", "")
    for number in numbers:
        if not number.before and not number.after:
            continue
        table.add_row(_label(number.name), *_cells(number), style="dim" if number.same() else "")
    return table


def _cells(number: NumberChange) -> tuple[str, ...]:
    change = "" if number.same() else shown(number.name, number.absolute, signed=True)
    ratio = "" if number.same() else format_ratio(number.after, number.before)
    return shown(number.name, number.before), shown(number.name, number.after), change, ratio


def shown(name: str, value: float | None, signed: bool = False) -> str:
    """Return a number as its name says: bytes, seconds, FLOPs, or a count; `signed` with its sign.

    >>> shown("peak_bytes", 2048), shown("step_s", -0.5, signed=True), shown("num_ops", 7, signed=True)
    ('2 KiB', '-500 ms', '+7')
    """
    if value is None:
        return "–"
    sign = ("-" if value < 0 else "+") if signed else ""
    size = abs(value) if signed else value
    if name.endswith("bytes"):
        return sign + format_bytes(size)
    if name.endswith("_s"):
        return sign + format_s(size)
    return sign + (format_flops(size) if name.endswith("_flops") else format_count(size))


def _module_parts(modules: Sequence[ModuleChange]) -> list[RenderableType]:
    """One row for each module, or for blocks that changed alike; a column for each number that changed anywhere."""
    alike: dict[tuple[object, ...], list[ModuleChange]] = defaultdict(list)
    for module in modules:
        alike[BLOCK_NUMBER.sub("*", module.path), module.changes].append(module)
    rows = list(alike.values())
    names = [name for name in _MODULE_COLUMNS if any(name == number.name for row in rows for number in row[0].changes)]
    labels = [_label(name) for name in names]
    table = plain_table("module", *labels, drop=labels[:0:-1])
    for row in rows[:_MAX_MODULES]:
        changes = {number.name: number for number in row[0].changes}
        table.add_row(_modules_name(row), *(_arrow(changes.get(name)) for name in names))
    return [table, *_more(len(rows) - _MAX_MODULES, "modules")]


def _modules_name(alike: Sequence[ModuleChange]) -> Text:
    path = alike[0].path or "(all)"
    return Text(path if len(alike) == 1 else f"{BLOCK_NUMBER.sub('*', path)} ×{len(alike)}")


def _arrow(number: NumberChange | None) -> str:
    if number is None:
        return ""
    return f"{shown(number.name, number.before)} → {shown(number.name, number.after)}"


def _changes_table(title: str, changes: Sequence[Change]) -> Grid:
    table = plain_table(title, "before", "after", left=3)
    for change in changes:
        table.add_row(Text(change.name.replace("_", " ") if title == "made with" else change.name), *_sides(change))
    return table


def _sides(change: Change) -> tuple[Text, Text]:
    return _side(change.name, change.before), _side(change.name, change.after)


def _side(name: str, value: str | None) -> Text:
    if value is None or value == "None":
        return Text("–")
    return Text(shown(name, float(value)) if name.endswith("_bytes") else value)


def _label(name: str) -> str:
    """How a field is called: `forward_flops` → `forward`, categories of memory by their names."""
    plain = name.removesuffix("_bytes").removesuffix("_flops").removesuffix("_s").removeprefix("num_")
    names = {"param": "parameters", "params": "number of parameters", "at_peak": "alive at the peak", "saved": "saved"}
    times = " time" if name in ("forward_s", "backward_s") else ""
    return names.get(plain, category_name(plain)).replace("_", " ") + times


def _listed(word: str, names: Sequence[str]) -> Text:
    """The outermost of the names, and how many lie in them."""
    known = set(names)
    outer = [name for name in names if not any(above in known for above in _above(name))]
    inner = f", with {len(names) - len(outer)} inside" if len(names) > len(outer) else ""
    more = f" and {len(outer) - _MAX_LISTED} more" if len(outer) > _MAX_LISTED else ""
    return Text(f"{word}: {', '.join(outer[:_MAX_LISTED])}{more}{inner}")


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _more(count: int, what: str) -> list[RenderableType]:
    return [Text(f"and {count} more {what}; --json lists all", style="dim")] if count > 0 else []
