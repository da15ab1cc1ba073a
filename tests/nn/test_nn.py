"""`StableEmbedding`: an embedding, drawn smaller and normalised in fp32."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from trainwright.nn import StableEmbedding


def test_it_is_an_embedding_and_a_layer_norm() -> None:
    embedding = StableEmbedding(11, 6)
    indices = torch.tensor([[1, 4, 4], [10, 0, 2]])
    rows = embedding.weight[indices]
    spread = (rows - rows.mean(-1, keepdim=True)) / (rows.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(embedding(indices), spread, rtol=1e-5, atol=1e-5)
    embedding(indices).square().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[3].count_nonzero() == 0


def test_rows_are_drawn_by_xaviers_rule() -> None:
    bound = math.sqrt(6 / (500 + 40))
    weight = StableEmbedding(500, 40).weight
    assert bound * 0.98 < weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_padding_row_is_zero_and_stays() -> None:
    embedding = StableEmbedding(7, 4, padding_idx=2)
    assert embedding.weight[2].count_nonzero() == 0
    embedding(torch.tensor([2, 3])).pow(3).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[2].count_nonzero() == 0
    assert embedding(torch.tensor([2])).count_nonzero() == 0


def test_narrow_weights_are_normalised_in_fp32() -> None:
    wide = StableEmbedding(9, 8)
    narrow = copy.deepcopy(wide).bfloat16()
    indices = torch.arange(9)
    assert narrow(indices).dtype == torch.bfloat16
    expected = nn.functional.layer_norm(narrow.weight.float(), (8,)).bfloat16()
    torch.testing.assert_close(narrow(indices), expected, rtol=0, atol=0)


def test_a_state_survives_and_meta_costs_nothing() -> None:
    first, second = StableEmbedding(5, 4), StableEmbedding(5, 4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(torch.arange(5)), second(torch.arange(5)))
    assert StableEmbedding(5, 4, device="meta").norm.weight.is_meta
