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
    "pytorch-tutorials": vision.linears,
    "torchtitan": sharded.titan,
    "torchtune": sharded.torchtune,
    "llm-foundry": sharded.foundry,
    "transformers-v100": huggingface.bert_large,
}


_REASONS = {
    "fsdp_qlora": "a base quantised or sharded by FSDP1 with the source's own loader; not written yet",
}
"""Sources without a builder."""


def program_of(row: Row) -> Program:
    """Return the row's run as a program; `CannotExpress`, with the reason, where there is none."""
    if row.data["compile"].startswith("graph_trainer"):
        raise CannotExpress("run from a captured graph by torchtitan's graph trainer, whose passes are its own")
    if row.source == "litgpt" and row.num_gpus > 1:
        raise CannotExpress(
            "its peak is of loading the whole model before it is sharded, says the row; a step is modelled"
        )
    builder = _BUILDERS.get(row.source)
    if builder is None:
        raise CannotExpress(_REASONS[row.source])
    return builder(row)
