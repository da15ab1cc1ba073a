"""`trainwright export`: a checkpoint's weights for other programs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import parse_bytes
from .output import quiet_stdout, status


def export(
    checkpoint: Annotated[str, typer.Argument(metavar="DIR", help="Of `train --checkpoint`, or one of its step-N.")],
    out: Annotated[str, typer.Option("-o", "--out", metavar="DIR", help="Where the safetensors files go.")],
    max_file: Annotated[str, typer.Option(metavar="SIZE", help="Weights beyond that go to further files.")] = "5GB",
) -> None:
    """Write a checkpoint's weights as safetensors, with config.json where the model is of Hugging Face; of PEFT's, the adapter."""
    with quiet_stdout(), status("exporting"):
        from ..runtime.checkpoint.export import export_weights

        written = export_weights(checkpoint, out, parse_bytes(max_file))
    for path in written:
        print(path)
