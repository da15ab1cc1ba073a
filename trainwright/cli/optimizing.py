"""The options that say which optimizer, under which settings, in which form: of `plan` and of `train`."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Optimizer"
OptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizer-option", metavar="KEY=VALUE", rich_help_panel=PANEL,
        help="A setting of the optimizer, such as betas=0.9,0.95; repeatable. groups=false: embeddings and heads "
        "as all other parameters. --lr is the learning rate.",
    ),
]  # fmt: skip
FormOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer-form", metavar="FORM", rich_help_panel=PANEL,
        help="How its step runs: fused, foreach or loop. Default: fused where there is that, else loop.",
    ),
]  # fmt: skip
