"""`trainwright diff`: what is different between two profiles, or between two plans."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts.difference import diff as difference
from .output import JsonOption, answer


def diff(
    before: Annotated[str, typer.Argument(metavar="A.json", help="A profile or a plan.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B.json", help="Another of the same kind.", show_default=False)],
    json_path: JsonOption = None,
) -> None:
    """Compare two profiles (`profile --json`) or two plans (`plan -o`): totals, modules, decisions."""
    found = difference(before, after)
    answer(found.table(), found.to_json, json_path)
