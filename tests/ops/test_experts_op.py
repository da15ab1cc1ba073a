"""The experts' op against a loop written by hand, in float64: value, gradients, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainwright as tw
from trainwright.artifacts import UserError
from trainwright.ops.expert_routes import planned_rows
from trainwright.ops.grouped import grouped_mm, grouped_outer


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _case(transposed: bool, biased: bool, num: int = 5, hidden: int = 7, inner: int = 6) -> dict[str, Tensor | None]:
    torch.manual_seed(3)
    ids = torch.stack([torch.randperm(num - 1)[:2] for _ in range(13)])  # the last expert is never chosen
    return {
        "tokens": _leaf(13, hidden), "ids": ids, "weights": _leaf(13, 2),
        "w_in": _leaf(num, hidden, 2 * inner) if transposed else _leaf(num, 2 * inner, hidden),
        "w_out": _leaf(num, inner, hidden) if transposed else _leaf(num, hidden, inner),
        "b_in": _leaf(num, 2 * inner) if biased else None, "b_out": _leaf(num, hidden) if biased else None,
    }  # fmt: skip


def _by_hand(case: dict, transposed: bool, interleaved: bool) -> Tensor:
    rows = []
    for token, ids, weights in zip(case["tokens"], case["ids"], case["weights"]):
        total = torch.zeros_like(token)
        for expert, weight in zip(ids.tolist(), weights):
            w_in, w_out = (case[name][expert] for name in ("w_in", "w_out"))
            up = token @ (w_in if transposed else w_in.T)
            up = up if case["b_in"] is None else up + case["b_in"][expert]
            gate, value = (up[::2], up[1::2]) if interleaved else up.chunk(2)
            out = (F.silu(gate) * value) @ (w_out if transposed else w_out.T)
            total = total + weight * (out if case["b_out"] is None else out + case["b_out"][expert])
        rows.append(total)
    return torch.stack(rows)


tw.register_gate("silu_pairs", lambda up: F.silu(up[..., ::2]) * up[..., 1::2], interleaved=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_loop_by_hand(transposed: bool, biased: bool, interleaved: bool) -> None:
    case = _case(transposed, biased)
    gate = "silu_pairs" if interleaved else "silu_glu"
    found = tw.experts(**case, gate=gate, transposed=transposed, interleaved=interleaved)
    wanted = _by_hand(case, transposed, interleaved)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [x for x in case.values() if x is not None and x.requires_grad]
    given_grad = torch.randn_like(wanted)
    for own, by_hand in zip(
        torch.autograd.grad(found, leaves, given_grad), torch.autograd.grad(wanted, leaves, given_grad)
    ):
        torch.testing.assert_close(own, by_hand, rtol=1e-12, atol=1e-12)
        assert own.is_contiguous(), "a gradient is stored as its parameter"


def test_gradients_are_differentiable() -> None:
    case = _case(False, True, num=3, hidden=3, inner=2)
    names = [name for name in case if name != "ids"]
    run = lambda *leaves: tw.experts(**dict(zip(names, leaves)), ids=case["ids"])  # noqa: E731
    assert torch.autograd.gradgradcheck(run, [case[name] for name in names], atol=1e-6, fast_mode=True)


def test_what_is_frozen_takes_no_gradient_and_changes_no_other() -> None:
    case = _case(True, True)
    whole = torch.autograd.grad(tw.experts(**case, transposed=True).square().sum(), [case["tokens"], case["b_in"]])
    for name in ("w_in", "w_out", "weights", "b_out"):
        case[name] = case[name].detach()
    part = torch.autograd.grad(tw.experts(**case, transposed=True).square().sum(), [case["tokens"], case["b_in"]])
    assert all(torch.equal(a, b) for a, b in zip(whole, part))


def test_leading_dims_and_types() -> None:
    case = {name: x if x is None or name == "ids" else x.detach() for name, x in _case(False, False).items()}
    flat = tw.experts(**case)
    cut = {name: x[:12].view(3, 4, -1) if name in ("tokens", "ids", "weights") else x for name, x in case.items()}
    torch.testing.assert_close(tw.experts(**cut).view(12, -1), flat[:12])
    low = {
        name: x.bfloat16() if x is not None and name in ("tokens", "w_in", "w_out") else x for name, x in case.items()
    }
    assert tw.experts(**low).dtype == torch.bfloat16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 4))
def test_grouped_products_are_a_product_a_run(lengths: list[int], width: int, out: int) -> None:
    torch.manual_seed(sum(lengths))
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32)
    rows, matrices = torch.randn(sum(lengths), width), torch.randn(len(lengths), width, out)
    runs = rows.split(lengths)
    torch.testing.assert_close(grouped_mm(rows, matrices, ends), torch.cat([r @ m for r, m in zip(runs, matrices)]))
    right = torch.randn(sum(lengths), out)
    wanted = torch.stack([r.T @ g for r, g in zip(runs, right.split(lengths))])
    torch.testing.assert_close(grouped_outer(rows, right, ends), wanted)


@given(st.integers(1, 500), st.integers(1, 4), st.integers(1, 8), st.floats(1.0, 4.0))
def test_planned_rows_are_enough_and_not_more_than_there_can_be(tokens: int, k: int, held: int, factor: float) -> None:
    planned, worst = planned_rows(tokens, k, held, 8, factor), planned_rows(tokens, k, held, 8, math.inf)
    assert planned <= worst == tokens * min(k, held)
    assert planned == worst or planned >= factor * tokens * k * held / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "swish"}, "register_gate"),
        ({"gate": "silu"}, r"need w_in of shape \[5, 6, 7\]"),
        ({"ids": torch.zeros(13, 2)}, "integers"),
        ({"weights": torch.zeros(13, 3)}, "weights of shape"),
        ({"b_in": torch.zeros(5, 6)}, "b_in of shape"),
        ({"transposed": True}, "of shape"),
    ],
)
def test_what_does_not_fit_is_said(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tw.experts(**{**_case(False, False), **change})


@pytest.mark.parametrize(
    "gate",
    [
        lambda up: up.chunk(2, -1)[0].softmax(-1),
        lambda up: up.chunk(2, -1)[0] - up.mean(0),
        lambda up: F.dropout(up.chunk(2, -1)[0]),
        lambda up: up,
    ],
)
def test_a_gate_that_mixes_rows_or_features_is_refused(gate) -> None:
    with pytest.raises(UserError, match="each row and feature for itself"):
        tw.register_gate("mixes", gate)


def test_a_gate_that_hands_its_rows_on_keeps_them() -> None:
    tw.register_gate("identity", lambda up: up, parts=1)
    tokens, ids, weights = torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.long), torch.full((2, 1), 0.5)
    w_in, w_out = torch.ones(1, 4, 3, requires_grad=True), torch.ones(1, 3, 4)
    out = tw.experts(tokens, ids, weights, w_in, w_out, gate="identity")
    out.sum().backward()
    torch.testing.assert_close(out, torch.full((2, 3), 6.0))
    torch.testing.assert_close(w_in.grad, torch.full((1, 4, 3), 3.0))
