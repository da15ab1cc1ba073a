"""`trainwright sweep`: search settings, many models at a time."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import UserError
from .errors import OK
from .model import ModelOptions, parse_settings, takes_model
from .output import JsonOption, answer, quiet_stdout, remark, rows_as_table

if TYPE_CHECKING:
    from ..fusion import Trial

PANEL = "Search"
_BUILT_BY_NAME = ("batch_size", "seq_len", "dtype")


@takes_model
def sweep(
    model: ModelOptions,
    trials: Annotated[int, typer.Option(help="How many.", min=1, rich_help_panel=PANEL)] = 16,
    steps: Annotated[int, typer.Option(help="Of training, each.", min=1, rich_help_panel=PANEL)] = 100,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=WHAT", rich_help_panel=PANEL,
            help="Searched: lr=1e-4..1e-1:log, width=32,64; or fixed: depth=3. Of the function, else of the optimizer.",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="See trainwright optimizers.", rich_help_panel=PANEL)] = "adamw",
    sampler: Annotated[str, typer.Option(help="random, tpe or qmc (Optuna's).", rich_help_panel=PANEL)] = "random",
    pruner: Annotated[str, typer.Option(help="none, asha, hyperband or median (Optuna's).", rich_help_panel=PANEL)] = "none",
    min_steps: Annotated[int, typer.Option(help="Between two looks at a trial.", min=1, rich_help_panel=PANEL)] = 10,
    eta: Annotated[int, typer.Option(help="One trial in so many goes on.", min=2, rich_help_panel=PANEL)] = 3,
    memory: Annotated[str | None, typer.Option(metavar="M", help="Train as many at once as fit.", rich_help_panel=PANEL)] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm of a model.", min=0.0, rich_help_panel=PANEL)] = None,
    json_path: JsonOption = None,
) -> int:  # fmt: skip
    """Search learning rates, widths … by training many models at once as one fused model.

    Models of one shape are fused: every setting that keeps shapes (learning rate, weight decay, dropout, seed) costs no pass of
    its own. The loss is that of `eval_batch` where MODEL gives one, else of training. --memory fits as many into one fused model
    as a profile of the step says.
    """
    import trainwright as tw

    from ..fusion import Choice, Range, SweepOptions, how_many_fit, parse_space
    from ..fusion import sweep as run

    space = parse_space(parse_settings(settings))
    if not any(isinstance(value, (Choice, Range)) for value in space.values()):
        raise UserError(
            "a setting to search is needed; got none; write for example --set lr=1e-4..1e-1:log or --set width=32,64"
        )
    build = _builder(model, optimizer, list(space))
    at_once = None
    with quiet_stdout():
        if memory is not None:
            fixed = {
                key: _first_of(value) for key, value in space.items() if key in inspect.signature(build).parameters
            }
            at_once = how_many_fit(lambda: build(**fixed), optimizer, tw.parse_bytes(memory), tw.profile)
            remark(f"{at_once} models fit {memory} at a time{'' if at_once < trials else ': all of them'}")
        options = SweepOptions(
            trials=trials, steps=steps, optimizer=optimizer, sampler=sampler, pruner=pruner, min_steps=min_steps, eta=eta,
            at_once=at_once, clip=clip, seed=model.seed or 0,
        )  # fmt: skip
        with _table() as show:
            found = run(build, space, options, progress=show)
    rows = found.rows()
    head = f"best: trial {found.best.number}, loss {found.best.loss:.4g}; {len(rows)} trials in {found.num_arrays} fused models"
    answer(f"{head}\n\n{rows_as_table(map(_shown, rows))}", lambda: {"at_once": at_once, "trials": rows}, json_path)
    return OK


def _builder(model: ModelOptions, optimizer: str, names: Sequence[str]) -> Callable[..., Any]:
    """Return a function of the settings that are the model's, whose signature names them."""
    import torch

    import trainwright as tw

    given = {key: getattr(model, key) for key in _BUILT_BY_NAME}

    def build(**own: Any) -> Any:
        own = {key: value for key, value in own.items() if key != "seed"}
        return tw.load_model(model.spec, device="cpu", seed=torch.initial_seed(), settings=own, **given)

    own = _taken_by_model(model.spec, optimizer, names)
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in own]
    build.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return build


def _taken_by_model(spec: str, optimizer: str, names: Sequence[str]) -> list[str]:
    from ..models.targets import function_of
    from ..optim import record

    if spec.startswith("zoo:"):
        taken = inspect.signature(record(optimizer).cls).parameters
        return [name for name in names if name not in taken]
    parameters = inspect.signature(function_of(spec)).parameters
    return [name for name in names if name in parameters]


def _first_of(value: Any) -> Any:
    """Return the largest model's value, as far as numbers tell."""
    from ..fusion import Choice, Range

    if isinstance(value, Range):
        return value.high
    return (
        max(value.values, key=lambda each: each if isinstance(each, (int, float)) else 0)
        if isinstance(value, Choice)
        else value
    )


@contextlib.contextmanager
def _table() -> Iterator[Callable[[list[Trial]], None]]:
    """Show the trials as they go: a table that fills on a terminal, elsewhere a line a report."""
    if not sys.stderr.isatty():
        yield lambda trials: remark(_line(trials))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False) as live:
        yield lambda trials: live.update(Text(rows_as_table([_shown(trial.row()) for trial in trials])), refresh=True)


def _line(trials: list[Trial]) -> str:
    counts = {
        state: sum(trial.state == state for trial in trials) for state in ("running", "done", "pruned", "diverged")
    }
    running = [trial for trial in trials if trial.loss == trial.loss]
    best = min(running, key=lambda trial: trial.loss, default=None)
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"step {max(trial.steps for trial in trials)}: {said}" + (
        "" if best is None else f"; lowest loss {best.loss:.4g}, trial {best.number}"
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()}
