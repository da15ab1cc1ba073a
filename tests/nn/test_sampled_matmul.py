"""Products of activations that keep some rows: exact result and first gradient, an unbiased second, rows of each head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import trainwright as tw
from trainwright.artifacts import UserError
from trainwright.nn import sampled_matmul
from trainwright.ops.sampled import weighted_rows

BATCH, HEADS, NUM, WIDTH = 2, 3, 40, 5


def attention(q: Tensor, k: Tensor, v: Tensor, budget: float | None) -> Tensor:
    """Attention with both products sampled."""
    product = torch.matmul if budget is None else lambda a, b: sampled_matmul(a, b, budget, min_rows=1)
    return product(F.softmax(product(q, k.mT) / math.sqrt(WIDTH), -1), v)


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(BATCH, HEADS, NUM, WIDTH, dtype=torch.float64) for _ in range(3)]
    made[0] *= torch.exp(torch.randn(BATCH, HEADS, NUM, 1, dtype=torch.float64))
    return [each.requires_grad_() for each in made]


def gradients(budget: float | None, slopes: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((attention(*OPERANDS, budget) * slopes).sum(), OPERANDS))


OPERANDS = operands()


def test_gradients_of_attention_are_unbiased_and_its_result_exact() -> None:
    slopes = torch.randn(BATCH, HEADS, NUM, WIDTH, dtype=torch.float64)
    assert torch.equal(attention(*OPERANDS, 0.3), attention(*OPERANDS, None))
    exact = gradients(None, slopes)
    draws = [gradients(0.3, slopes) for _ in range(300)]
    for place, value in enumerate(exact):
        found = torch.stack([draw[place] for draw in draws])
        error = ((found - value).square().sum((1, 2, 3, 4)).mean() / value.square().sum()).item()
        bias = ((found.mean(0) - value).norm() / value.norm()).item()
        assert bias <= 4 * math.sqrt(error / len(draws)) + 1e-12, place
        assert (error > 1e-3) == (place > 0), "the queries' gradient goes through no sampled product"


def test_each_head_chooses_for_itself() -> None:
    scores = torch.rand(BATCH, HEADS, NUM, dtype=torch.float64).exp() ** 6
    numbers, weights = weighted_rows(scores, 10, torch.Generator().manual_seed(0))
    assert numbers.shape == weights.shape == (BATCH, HEADS, 10)
    sure = [(weights[b, h] == 1).sum().item() for b in range(BATCH) for h in range(HEADS)]
    assert len(set(sure)) > 1, "another c for each"
    for b in range(BATCH):
        for h in range(HEADS):
            first = numbers[b, h][weights[b, h] == 1]
            assert torch.equal(first.sort().values, scores[b, h].topk(len(first)).indices.sort().values)


def test_kept_are_k_rows_of_each_matrix() -> None:
    a, b = (torch.randn(BATCH, HEADS, NUM, NUM), torch.randn(BATCH, HEADS, NUM, WIDTH, requires_grad=True))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        sampled_matmul(a, b, 0.25, min_rows=1)
    sizes = sorted(t.untyped_storage().nbytes() for t in saved)
    assert sizes == sorted([10 * BATCH * HEADS * NUM * 4, 10 * BATCH * HEADS * 8, b.untyped_storage().nbytes()])


def test_is_a_product_where_nothing_is_to_be_left_out() -> None:
    a, b = torch.randn(2, 8, 4), torch.randn(2, 4, 3, requires_grad=True)
    for found in (sampled_matmul(a, b), sampled_matmul(a, b, 0.5, min_rows=1, training=False)):
        assert torch.equal(found, a @ b)
        assert "Sampled" not in type(found.grad_fn).__name__


def test_mistakes_are_said() -> None:
    a, b = torch.randn(2, 8, 4), torch.randn(2, 4, 3)
    with pytest.raises(UserError, match="budget"):
        tw.nn.sampled_matmul(a, b, 1.0)
    for other in (b[0], torch.randn(2, 5, 3), torch.randn(3, 4, 3)):
        with pytest.raises(UserError, match="same leading dims"):
            tw.nn.sampled_matmul(a, other)
