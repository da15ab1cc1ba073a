"""Textbook ways to train on several devices are points of the planner's space: each is pinned and sends its textbook volume.

Data parallelism, ZeRO-3 under a budget and Megatron stand in `test_planner.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.builders import task, tiny_program
from tests.plans import plan_of
from tests.recipe_points import ANY, optimus, restricted
from trainwright.capture.cached import cached_capture
from trainwright.models import zoo
from trainwright.planner.best_first import solve_on
from trainwright.planner.model.decode import Choice, decisions_from
from trainwright.planner.model.sharding import wants_of
from trainwright.planner.search.solve import Answer
from trainwright.planner.task import Place
from trainwright.program.program import build_program

FP32 = 4


def gathered_again(place, answer: Answer):
    """The same plan, every gathered weight dropped after the forward and gathered again for the backward."""
    again = {(use, want): use.count for use in place.problem.uses if use.source.is_param for want in wants_of(use)}
    return place.simulate(decisions_from(place.problem, Choice(answer.choice.options, {}, again)))


def test_zero_2_sends_what_data_parallelism_does_and_zero_3_half_as_much_again():
    program = tiny_program("llama-tiny")
    (place,) = task(program).places
    num_bytes = sum(tensor.num_bytes for tensor in program.params)
    whole = solve_on(place, "ddp").simulation
    zero_2 = solve_on(place, "fsdp")
    zero_3 = gathered_again(place, zero_2)
    # On a ring an all-reduce is a reduce-scatter and an all-gather.
    assert whole.comm_bytes["all_reduce"] == pytest.approx(num_bytes, rel=1e-3)
    for simulation, num_gathers in ((zero_2.simulation, 1), (zero_3, 2)):
        assert simulation.comm_bytes["reduce_scatter"] == pytest.approx(num_bytes, rel=1e-2)
        assert simulation.comm_bytes["all_gather"] == pytest.approx(num_gathers * num_bytes, rel=1e-2)
    assert zero_2.simulation.breakdown["optimizer"] == pytest.approx(whole.breakdown["optimizer"] / 2, rel=1e-2)
    assert zero_3.peak_bytes < zero_2.simulation.peak_bytes < whole.peak_bytes


LLAMA_SEQUENCE = {
    ":embedding": ["b1"],
    "layernorm:": ["d1"],
    "}:add": ["d1"],
    "norm:": ["d1"],
    "q_proj:": ["o.0"],
    "k_proj:": ["o.0"],
    "v_proj:": ["o.0"],
    ":sdpa": ["h"],
    "o_proj:": ["i.0"],
    "gate_proj:": ["o"],
    "up_proj:": ["o"],
    "act_fn:": ["d2"],
    "down_proj:": ["i"],
    "lm_head:": ["b1"],
}


def test_sequence_parallelism_gathers_and_scatters_where_megatron_reduces():
    """Two gathers and two scatters a layer and direction, each of an activation: the volume of Megatron's all-reduces."""
    sent = []
    for num_layers in (2, 3):
        model, batch = zoo.build("llama-tiny", num_hidden_layers=num_layers)
        program = build_program(cached_capture(model, batch))
        (place,) = task(program).places
        rest = {"_proj.weight": ANY, "norm.weight": ["R"], "embed_tokens.weight": ["R"], "lm_head.weight": ["R"]}
        answer = restricted(place, {**rest, **LLAMA_SEQUENCE})
        assert isinstance(answer, Answer)
        sent.append(answer.simulation.comm_bytes)
    activation = 4 * 32 * 64 * FP32
    for kind in ("all_gather", "reduce_scatter"):
        assert sent[1][kind] - sent[0][kind] == 4 * activation, kind
    # A norm's weight meets its rank's positions alone: its gradient, of 64 numbers, is summed.
    assert 0 <= sent[1].get("all_reduce", 0) - sent[0].get("all_reduce", 0) <= 2 * 64 * FP32 + 64


class Experts(nn.Module):
    """A mixture of experts with fixed capacity (GShard): groups of tokens are dispatched by a mask to slots of experts."""

    def __init__(self, num_experts: int, capacity: int, width: int, hidden: int) -> None:
        super().__init__()
        self.shape = num_experts, capacity, width
        self.scale = nn.Parameter(torch.rand(width))
        self.up = nn.Parameter(torch.rand(num_experts, width, hidden))
        self.down = nn.Parameter(torch.rand(num_experts, hidden, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        num_experts, capacity, width = self.shape
        groups = x.shape[0]
        sent = torch.bmm(mask.transpose(1, 2), x * self.scale).view(groups, num_experts, capacity, width)
        slots = sent.transpose(0, 1).reshape(num_experts, groups * capacity, width)
        slots = torch.bmm(torch.relu(torch.bmm(slots, self.up)), self.down)
        back = slots.view(num_experts, groups, capacity, width).transpose(0, 1)
        return torch.bmm(mask, back.reshape(groups, num_experts * capacity, width)).square().mean()


def test_expert_parallelism_exchanges_tokens_and_no_gradients_of_experts():
    groups, tokens, num_experts, capacity, width, hidden = 4, 10, 2, 3, 6, 14
    model = Experts(num_experts, capacity, width, hidden)
    batch = (torch.rand(groups, tokens, width), torch.rand(groups, tokens, num_experts * capacity))
    program = build_program(cached_capture(model, batch, lambda out, _: out))
    (place,) = task(program).places
    # The batch of the outer products is groups of tokens, that of the inner ones experts.
    products = {":bmm": ["b"], "up": ["d0"], "down": ["d0"], "scale": ["R"]}
    answer = restricted(place, {**products, ":mul": ["d0"], ":square": ["d0"], ":mean": ["d0"]})
    assert isinstance(answer, Answer)
    slots = groups * num_experts * capacity * width * FP32
    # There and back, forward and backward; what stays on its rank is not sent.
    assert answer.simulation.comm_bytes["all_to_all"] == 4 * slots // 2
    assert answer.simulation.comm_bytes["all_reduce"] <= width * FP32 + 16, "the scale's gradient and the loss"
    assert set(answer.simulation.comm_bytes) == {"all_to_all", "all_reduce"}


class OneLinear(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.linear = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale).square().mean()


def test_optimus_sends_blocks_of_activations_and_weights():
    """A product of [32, 48] and [48, 192] on 2 × 2: q (b s h + h · 4 h) / p = 5376 numbers forward, twice that backward."""
    program = build_program(cached_capture(OneLinear(48, 192), (torch.rand(32, 48),), lambda out, _: out))
    (place,) = task(program, "cpu:4", mesh=(2, 2)).places
    rest = {"linear.weight": ["d1/d0"], "scale": ["R/d0"]}
    cut = {key: ["d0/d1"] for key in (":mul", ":square", ":mean")}
    answer = restricted(place, {**rest, **cut, ":linear": ["b0/o"]})
    assert isinstance(answer, Answer)
    forward = 2 * (32 * 48 + 48 * 192) // 4
    assert forward == 5376
    small = answer.simulation.comm_bytes
    assert small["all_gather"] // FP32 == forward
    again = {(use, want): use.count for use in place.problem.uses for want in wants_of(use)}
    dropped = place.simulate(decisions_from(place.problem, Choice(answer.choice.options, {}, again))).comm_bytes
    assert dropped["reduce_scatter"] // FP32 == forward
    assert dropped["all_gather"] // FP32 == 2 * forward, "gathered again: with the scatters, twice the forward"


@functools.cache
def optimus_of(name: str) -> tuple[Place, Answer]:
    (place,) = task(tiny_program(name), "cpu:4", mesh=(2, 2)).places
    answer = optimus(place)
    assert isinstance(answer, Answer)
    return place, answer


def test_optimus_holds_a_quarter_of_every_activation():
    """The whole model: no weight and no activation between blocks is whole along either axis."""
    place, answer = optimus_of("llama-tiny")
    program = place.problem.program
    cut = [d for d in place.problem.groups if d.key.endswith(("}:add", "}:add#2")) or ":linear" in d.key]
    assert len(cut) >= 9
    assert all(min(d.options[answer.choice.options[d]]) >= 0 for d in cut)
    large = [tensor for tensor in program.params if tensor.num_bytes > 10_000]
    assert large
    assert all(min(answer.decisions.params[tensor]) >= 0 for tensor in large)


@pytest.mark.slow  # four ranks; what it splits and sends is tested above
def test_optimus_computes_what_one_process_does(pool4):
    place, answer = optimus_of("llama-tiny")
    plan = plan_of(place.problem.program, answer.decisions)
    model = {"spec": "zoo:llama-tiny", "options": {}}
    asked = {"model": model, "plan": plan.to_json(), "dtype": "float64"}
    report = pool4.run("trainwright.cli.workers:verify", timeout_s=280, **asked)[0]
    assert report["passed"], report
