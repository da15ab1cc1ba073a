"""Experts are recognised in every family that transformers dispatches through one place, and by what users register."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import trainwright as tw
from tests.models.experts import FAMILIES, build
from tests.oracle import assert_same_step, assert_stored_whole, eager_step, graph_step
from trainwright.capture import stored
from trainwright.capture.export import Captured, capture
from trainwright.capture.stored import NotStorable, as_data, from_data
from trainwright.ops.experts import EXPERTS, GATES

QUICK = ("gpt_oss", "deepseek_v3")
"""Biases and interleaved halves; biased and grouped routing. A loop's plain form and scaled inputs join them in the full grid."""


def _num_experts(captured: Captured) -> int:
    return sum(node.target is EXPERTS for node in captured.graph.nodes)


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_families_compute_what_their_own_loop_does(family: str) -> None:
    has_aux = family in ("mixtral", "gpt_oss")
    model, batch = build(family, dtype=torch.float64, **({"output_router_logits": True} if has_aux else {}))
    captured = capture(model, batch)
    assert _num_experts(captured) == (1 if family.startswith("deepseek") else 2)
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch), 1e-12, 1e-12)
    assert model.config._experts_implementation == "eager", "the user's model stays as it was configured"


def test_transformers_dispatches_as_before_after_a_capture() -> None:
    model, batch = build("mixtral")
    before = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS.get_interface("eager", "own")
    capture(model, batch)
    assert transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS.get_interface("eager", "own") == before == "own"


class Mixture(nn.Module):
    """A loop over the experts that are hit, which an export cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.w_in, self.w_out = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, place = torch.where(ids == expert)
            gate, value = (x[rows] @ self.w_in[expert].T).chunk(2, -1)
            done = (nn.functional.silu(gate) * value) @ self.w_out[expert].T
            out = out.index_add(0, rows, done * weights[rows, place, None])
        return out


def _with_op(own: Mixture, x: torch.Tensor) -> torch.Tensor:
    weights, ids = own.router(x).softmax(-1).topk(2)
    return tw.experts(x, ids, weights, own.w_in, own.w_out)


def test_a_class_of_the_users() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Mixture(), nn.Linear(6, 2)).double(), (torch.randn(9, 6, dtype=torch.float64),)
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    tw.register_experts(Mixture, _with_op)
    captured = capture(model, batch, loss)
    assert _num_experts(captured) == 1
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch, loss), 1e-12, 1e-12)
    assert Mixture.forward is not _with_op, "the class keeps its own forward"


def test_only_classes_are_registered() -> None:
    with pytest.raises(tw.UserError, match="class of modules"):
        tw.register_experts(Mixture(), _with_op)


def test_a_capture_with_experts_is_stored_by_the_name_of_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("gpt_oss")
    captured = capture(model, batch)
    assert_stored_whole(captured, model, batch)
    data, values = as_data(captured)
    monkeypatch.setattr(stored, "GATES", {"silu": GATES["silu"]})
    with pytest.raises(NotStorable, match="nobody has defined the gate GptOssExperts"):
        from_data(data, values)


def test_post_expert_norms_take_transformers_own_form() -> None:
    model, batch = build("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
        layer.mlp.experts.post_expert_norm = nn.Identity()
    assert _num_experts(capture(model, batch)) == 0
