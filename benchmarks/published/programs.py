"""Which builder writes which row."""

from __future__ import annotations

from collections.abc import Callable

from . import huggingface, llms, sharded, vision
from .program import CannotExpress, Program
from .rows import Row

_BUILDERS: dict[str, Callable[[Row], Program]] = {
    "timm": vision.classifier,
    "lambda": vision.classifier,
    "nvidia-dle": vision.classifier,
    "litgpt": llms.litgpt,
    "transformers-bert": huggingface.bert,
    "transformers-pythia": huggingface.pythia,
    "torchtitan": sharded.titan,
    "transformers-v100": huggingface.bert_large,
}


def program_of(row: Row) -> Program:
    """Return the row's run as a program; `CannotExpress`, with the reason, where there is none."""
    if row.data["compile"].startswith("compile"):
        raise CannotExpress("compiled by inductor, which fuses and keeps what it chooses; eager steps alone are modelled")
    builder = _BUILDERS.get(row.source)
    if builder is None:
        raise CannotExpress("no builder")
    return builder(row)
