"""A linear map and its cross-entropy in chunks give what the two functions give, and hold no more than a chunk's logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from trainwright.ops.linear_loss import linear_cross_entropy
from trainwright.profiler.tracker import MemoryTracker
from trainwright.torch_internals.fakes import new_mode


@given(
    rows=st.integers(1, 12), chunks=st.integers(1, 15), seed=st.integers(0, 99), smoothing=st.sampled_from([0.0, 0.2]),
    reduction=st.sampled_from(["mean", "sum"]), input_first=st.booleans(), has_bias=st.booleans(), weighted=st.booleans(),
)  # fmt: skip
def test_is_the_loss_of_whole_logits(
    rows: int, chunks: int, seed: int, smoothing: float, reduction: str, input_first: bool, has_bias: bool, weighted: bool
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    x, weight, bias = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in [(rows, 4), (7, 4), (7,)]
    )
    labels = torch.randint(7, (rows,))
    labels[1:][torch.rand(rows - 1) < 0.3] = -100
    class_weight = torch.rand(7, dtype=torch.float64) + 0.1 if weighted else None
    own_bias = bias if has_bias else None
    leaves = [x, weight, *([bias] if has_bias else [])]
    whole = F.cross_entropy(
        F.linear(x, weight, own_bias), labels, class_weight, reduction=reduction, label_smoothing=smoothing
    )
    stored = weight.t() if input_first else weight
    number = 1 if reduction == "mean" else 2
    args = (x, labels, class_weight, stored, own_bias, number, -100, smoothing, input_first, None, chunks)
    found = linear_cross_entropy(*args)
    assert torch.allclose(found, whole, rtol=1e-12, atol=1e-13)
    pairs = zip(torch.autograd.grad(-3.0 * found, leaves), torch.autograd.grad(-3.0 * whole, leaves), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-13) for one, other in pairs)


def test_gradients_of_low_precision_add_up_in_fp32() -> None:
    """In 64 chunks a bf16 sum would lose what each adds; the error stays that of one rounding."""
    torch.manual_seed(0)
    x, weight = torch.randn(2048, 8).bfloat16(), torch.randn(16, 8).bfloat16().requires_grad_()
    labels = torch.randint(16, (2048,))
    exact = torch.autograd.grad(F.cross_entropy(x.double() @ weight.double().t(), labels), [weight])[0]
    errors = []
    for chunks in (1, 64):
        args = (x, labels, None, weight, None, 1, -100, 0.0, False, torch.float32, chunks)
        found = torch.autograd.grad(linear_cross_entropy(*args), [weight])[0]
        errors.append(float((found.double() - exact.double()).norm() / exact.double().norm()))
    assert errors[1] < 2 * errors[0] < 0.02, errors


@pytest.mark.parametrize("chunks", [4, 32])
def test_holds_a_chunk_of_logits(chunks: int) -> None:
    rows, classes, features = 4096, 1000, 16
    with new_mode():
        x, weight = torch.empty(rows, features, requires_grad=True), torch.empty(classes, features, requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64)
        with MemoryTracker("cpu") as tracker:
            loss = linear_cross_entropy(x, labels, None, weight, None, num_chunks=chunks)
            loss.backward()
    logits = 4 * rows * classes
    assert logits / chunks < tracker.peak_bytes < 3 * logits / chunks + 4 * 4 * (rows + classes) * features


def test_without_gradients_none_is_computed() -> None:
    with new_mode(), torch.no_grad():
        x, weight = torch.empty(64, 512, requires_grad=True), torch.empty(8, 512, requires_grad=True)
        labels = torch.empty(64, dtype=torch.int64)
        with MemoryTracker("cpu") as tracker:
            linear_cross_entropy(x, labels, None, weight, None, num_chunks=2)
    assert tracker.peak_bytes - 4 * (64 + 8) * 512 < 4 * 8 * 512  # beside the operands
