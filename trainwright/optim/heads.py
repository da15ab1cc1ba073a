"""The weights that methods for hidden matrices leave alone: embeddings and output heads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
HEADS = ("lm_head", "head", "classifier", "fc", "score", "output", "unembed", "decoder")
"""Last names of modules that are output heads."""


def embeddings_and_heads(model: nn.Module, heads: Iterable[str] = HEADS) -> set[int]:
    """Return the ids of the weights of embeddings, and of output heads with their biases.

    A head is a layer with one of the names `heads` outside any numbered block, or a linear layer with as many outputs as an
    embedding has rows: one score for each word.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> [id(param) in embeddings_and_heads(model) for param in model.parameters()]
    [True, False, False, True, True]
    """
    names, rows = set(heads), {each.weight.shape[0] for each in model.modules() if isinstance(each, EMBEDDINGS)}
    found: set[int] = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, EMBEDDINGS):
            found.add(id(weight))
        elif isinstance(weight, Tensor) and weight.dim() == 2 and _is_head(name, module, names, rows):
            found.update(id(param) for param in module.parameters(recurse=False))
    return found


def _is_head(name: str, module: nn.Module, names: set[str], rows: set[int]) -> bool:
    parts = name.split(".")
    is_named = parts[-1] in names and not any(part.isdigit() for part in parts)
    return is_named or (isinstance(module, nn.Linear) and module.out_features in rows)
