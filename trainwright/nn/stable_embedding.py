"""An embedding whose outputs are normalised, for optimizers with 8-bit states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class StableEmbedding(nn.Embedding):
    """Look up rows drawn by Xavier's uniform rule, then layer-normalise them in fp32.

    Takes what `torch.nn.Embedding` takes; input: indices of any shape, output: [..., embedding_dim] in the weight's
    dtype. Against an ordinary embedding, rows start smaller and no row's scale reaches the next layer, so gradients of
    rare and frequent rows are of more similar sizes. Add position embeddings after it, not before. The padding row is
    zero in the weight, and its output is the norm's bias.

    Give its weight fp32 states: `trainwright.optim.eight_bit_groups(model)` makes such groups. Not for tied weights: an
    output layer that shares the weight sees rows that are not normalised.

    >>> embedding = StableEmbedding(10, 4)
    >>> found = embedding(torch.tensor([[1, 2, 2]]))
    >>> found.shape, bool(found.mean(-1).abs().max() < 1e-5)
    (torch.Size([1, 3, 4]), True)

    Source: Dettmers, Lewis, Shleifer, Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*, ICLR 2022.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **options)
        self.norm = nn.LayerNorm(embedding_dim, device=self.weight.device)

    def reset_parameters(self) -> None:
        """Draw the rows anew, by Xavier's uniform rule; the padding row is zero."""
        nn.init.xavier_uniform_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised rows."""
        rows, norm = super().forward(input).float(), self.norm
        scale, shift = (None if value is None else value.float() for value in (norm.weight, norm.bias))
        return nn.functional.layer_norm(rows, norm.normalized_shape, scale, shift, norm.eps).to(self.weight.dtype)
