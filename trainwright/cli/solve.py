"""`trainwright solve`: run a solver on a problem of the user's."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

import typer

from ..artifacts import UserError
from .errors import FAILED, OK
from .model import parse_settings
from .output import HtmlOption, JsonOption, answer, quiet_stdout, remark, status

KEYS = ("solver", "arguments", "options")
_LARGE = 100_000
"""Numbers of a solution from which on the JSON has its shape alone."""


def solve(
    problem: Annotated[
        str,
        typer.Argument(metavar="PROBLEM", help="FILE.py:function or package.module:function", show_default=False),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Keyword argument for the function; repeatable."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="KEY=VALUE", help="Of the solver: max_iterations=500, seed=1, rtol=1e-6; repeatable."
        ),
    ] = None,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
) -> int:
    """Solve a problem: minimax, bilevel, transport, linear, constrained …

    PROBLEM's function returns a dict: `solver` (a family such as transport, a name such as linear.solve_sor, or a function),
    `arguments` (a list) and `options` (a dict). --html draws the history. Exit status 1 when the solver did not succeed.
    """
    with quiet_stdout(), status(f"solving {problem}") as tell:
        task = _task(problem, parse_settings(settings), parse_settings(options))
        began = time.perf_counter()
        found = _run(task, tell if sys.stderr.isatty() else remark)
        record = as_record(task.name, found, time.perf_counter() - began)
        if html_path is not None:
            from ..reports.html_solved import write_solved

            write_solved(record, html_path, problem)
    answer(_text(record), lambda: record, json_path)
    return OK if found.success else FAILED


@dataclass(frozen=True)
class _Task:
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def _task(problem: str, settings: Mapping[str, str], given: Mapping[str, str]) -> _Task:
    """Build the problem and hold its arguments against the solver's parameters, before anything runs."""
    from ..models.targets import built
    from ..models.targets import parse_settings as read

    place, _, name = problem.rpartition(":")
    if not place or not name or place == "zoo":
        raise UserError(
            f"a problem is needed as FILE.py:function or package.module:function; got {problem!r}; name its function"
        )
    parts = _parts(built(problem, settings), problem)
    name, function = _solver(parts["solver"], problem)
    options = {**parts.get("options", {}), **read(given)}
    accepted = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    unknown = [] if takes_any else [key for key in options if key not in accepted]
    if unknown:
        takes = ", ".join(key for key, each in accepted.items() if each.kind is each.KEYWORD_ONLY)
        raise UserError(f"{name} has no option {unknown[0]!r}; it takes {takes}; change options, or --option")
    try:
        inspect.signature(function).bind(*parts.get("arguments", ()), **options)
    except TypeError as error:
        raise UserError(
            f"the arguments of {name} are needed; {problem} returned others: {error}; see its page"
        ) from None
    return _Task(name, function, tuple(parts.get("arguments", ())), options)


def _parts(found: Any, problem: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping) or "solver" not in found:
        kind = (
            f"a dict without solver: {sorted(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
        )
        raise UserError(f"a dict with {', '.join(KEYS)} is needed; {problem} returned {kind}; return such a dict")
    unknown = [key for key in found if key not in KEYS]
    if unknown:
        raise UserError(f"the keys {', '.join(KEYS)} are needed; {problem} returned {unknown[0]!r}; rename it")
    if not isinstance(found.get("arguments", ()), list | tuple) or not isinstance(found.get("options", {}), Mapping):
        raise UserError(
            f"arguments as a list and options as a dict are needed; {problem} returned others; wrap a single argument: [x]"
        )
    return found


def _solver(given: Any, problem: str) -> tuple[str, Callable[..., Any]]:
    from ..solvers.registry import solver

    if isinstance(given, str):
        named = solver(given)
        return named.name, named.function
    if not callable(given):
        raise UserError(
            f"a solver's name or function is needed; {problem} returned {type(given).__name__}; take for example 'transport'"
        )
    return getattr(given, "__name__", type(given).__name__), given


def _run(task: _Task, tell: Callable[[str], None]) -> Any:
    from ..models.targets import with_user_errors
    from ..solvers.outcome import Result

    accepted = inspect.signature(task.function).parameters
    ours = {key: value for key, value in (("keep_history", True), ("progress", tell)) if key in accepted}
    with with_user_errors(f"{task.name} failed"):
        found = task.function(*task.arguments, **{**ours, **task.options})
    if not isinstance(found, Result):
        raise UserError(
            f"a solver that returns a Result is needed; {task.name} returned {type(found).__name__}; take one of "
            "trainwright.solvers"
        )
    return found


def as_record(name: str, found: Any, seconds: float) -> dict[str, Any]:
    """Return a result as data: what the run was, its numbers, `x`, and the history by column."""
    head = {"solver": name, "status": found.status.name, "success": found.success, "message": found.message}
    numbers = {
        each.name: _plain(getattr(found, each.name))
        for each in fields(found)
        if isinstance(getattr(found, each.name), int | float) and each.name != "success"
    }
    history = {column: [_plain(value) for value in values] for column, values in found.history.items()}
    return {**head, "seconds": seconds, **numbers, "x": _plain(found.x), "history": history}


def _plain(value: Any) -> Any:
    """Return what JSON can say: numbers that are not finite are null, a large array is its shape."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    if hasattr(value, "tolist"):
        return _plain(value.tolist()) if getattr(value, "size", 1) <= _LARGE else {"shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return type(value).__name__


def _text(record: Mapping[str, Any]) -> str:
    """Return the answer for the terminal: how it ended, then a line a number."""
    head = [f"{record['solver']}: {record['message']}", ""]
    shown = {"objective": record["fun"], "residual": last_residual(record), "iterations": record["nit"]}
    shown |= {"evaluations": record["nfev"], "seconds": record["seconds"]}
    left_out = {"fun", "nit", "nfev", "seconds", "solver", "status", "success", "message", "x", "history"}
    shown |= {key.replace("_", " "): value for key, value in record.items() if key not in left_out}
    rows = [f" {key:16}{_number(value):>14}" for key, value in shown.items() if value is not None]
    return "\n".join([*head, *rows, "", f" x  {_short(record['x'])}"])


def last_residual(record: Mapping[str, Any]) -> float | None:
    """Return the last residual that is known; `None` where the method has none."""
    known = [value for value in record["history"].get("residual", ()) if value is not None]
    return known[-1] if known else None


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(x: Any, most: int = 6) -> str:
    if isinstance(x, list):
        more = f", … {len(x)} in all" if len(x) > most else ""
        return f"[{', '.join(_short(each, 3) for each in x[:most])}{more}]"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key}: {_short(value, 3)}" for key, value in x.items()) + "}"
    return _number(x)
