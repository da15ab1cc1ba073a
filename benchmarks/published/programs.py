"""Which builder writes which row."""

from __future__ import annotations

from collections.abc import Callable

from . import adapters, foundry, huggingface, llms, nanogpt, sharded, thunder, tune, vision
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
    "torchtune": tune.torchtune,
    "llm-foundry": foundry.foundry,
    "transformers-v100": huggingface.bert_large,
    "fsdp_qlora": adapters.fsdp_qlora,
    "lightning-thunder": thunder.thunder,
    "torchao": sharded.titan,
    "nanogpt": nanogpt.nanogpt,
}


def program_of(row: Row) -> Program:
    """Return the row's run as a program; `CannotExpress`, with the reason, where there is none."""
    if row.data["compile"].startswith("graph_trainer"):
        raise CannotExpress("run from a captured graph by torchtitan's graph trainer, whose passes are its own")
    if row.source == "litgpt" and row.num_gpus > 1:
        raise CannotExpress(
            "its peak is of loading the whole model before it is sharded, says the row; a step is modelled"
        )
    return _BUILDERS[row.source](row)
