"""The rules of lookups in a table: what of the lookups and of the table may be split."""

from __future__ import annotations

import pytest
import torch

from trainwright.ops import Call, Signature, TensorSpec, signature_of

TABLE, INDICES, ROWS = (
    TensorSpec((9, 6), torch.float32),
    TensorSpec((4, 5), torch.int64),
    TensorSpec((4, 5, 6), torch.float32),
)


def looked_up(**options: bool) -> Signature:
    return signature_of(Call("embedding", (TABLE, INDICES), options, (ROWS,)))


def test_lookups_features_and_vocabulary_may_be_split() -> None:
    signature = looked_up()
    assert not signature.whole
    assert signature.reduced == {"v"}


def test_gradients_by_frequency_leave_the_features_alone_to_split() -> None:
    """How often a row was looked up, a rank with a part of the lookups does not know."""
    signature = looked_up(scale_grad_by_freq=True)
    assert set(signature.sizes) - signature.whole == {"m"}


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}])
def test_a_part_of_the_lookups_has_a_part_of_the_gradient_but_by_frequency(options: dict[str, bool]) -> None:
    table, indices = torch.randn(9, 6, dtype=torch.float64, requires_grad=True), torch.arange(20).view(4, 5) % 3

    def gradient(part: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(part, table, **options)
        found = torch.autograd.grad(rows.square().sum(), table)[0]
        return found.to_dense() if found.is_sparse else found

    parts = sum(gradient(part) for part in indices.chunk(2))
    assert torch.allclose(parts, gradient(indices)) == ("sparse" in options)
