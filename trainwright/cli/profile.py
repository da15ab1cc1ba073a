"""`trainwright profile`: what one training step of a model costs, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from .model import ModelOptions, takes_model
from .output import HtmlOption, JsonOption, answer, quiet_stdout, remarks, status


@takes_model
def profile(
    model: ModelOptions,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="See `trainwright optimizers`.")] = "adamw",
    hardware: Annotated[
        str | None, typer.Option(metavar="H", help="One device of it is modelled and the step's time predicted.")
    ] = None,
    depth: Annotated[int, typer.Option(metavar="N", min=0, help="Levels of modules in the table.")] = 2,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
) -> None:
    """Predict memory, FLOPs and, with --hardware, time of a training step. Nothing is run, no memory taken."""
    with quiet_stdout(), status(f"profiling {model.spec}"):
        import trainwright as tw

        loaded = model.load()
        found = tw.profile(
            loaded.model,
            loaded.batch,
            loss_fn=loaded.loss_fn,
            optimizer=optimizer,
            autocast=model.autocast,
            hardware=hardware,
            name=loaded.ref.name,
        )
        if html_path is not None:
            found.to_html(html_path)
    remarks(loaded.notes)
    answer(found.table(depth), found.to_json, json_path)
