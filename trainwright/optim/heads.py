"""The weights that methods for hidden matrices leave alone: embeddings and output heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
HEADS = ("lm_head", "head", "classifier", "fc", "score", "output", "unembed", "decoder")
"""Last names of modules that are output heads."""


def embeddings_and_heads(model: nn.Module, heads: Iterable[str] = HEADS) -> set[int]:
    """Return the ids of the weights of embeddings, and of output heads with their biases.

    A head is a layer with one of the names `heads` outside any numbered block, or the one linear layer with as many outputs as an
    embedding has rows: a score for each word. Where several layers have so many, that is the width of blocks, which a table of
    positions may be as long as.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> [id(param) in embeddings_and_heads(model) for param in model.parameters()]
    [True, False, False, True, True]
    """
    tables = [module.weight for module in model.modules() if isinstance(module, EMBEDDINGS)]
    outputs = Counter(module.out_features for module in model.modules() if isinstance(module, nn.Linear))
    scores = {len(table) for table in tables if outputs[len(table)] == 1}
    found = {id(table) for table in tables}
    for name, module in model.named_modules():
        if _is_named(name, module, set(heads)) or (isinstance(module, nn.Linear) and module.out_features in scores):
            found.update(id(param) for param in module.parameters(recurse=False))
    return found


def _is_named(name: str, module: nn.Module, heads: set[str]) -> bool:
    parts, weight = name.split("."), getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return is_matrix and parts[-1] in heads and not any(part.isdigit() for part in parts)
