"""`torch.autograd.Function` in a captured model: its own backward, in the graph and in plans; what is refused, and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import trainwright as tw
from tests.models import own_backwards as models
from tests.oracle import assert_same_step, eager_step, graph_step
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.capture.export import capture
from trainwright.torch_internals import private

BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4),)
SPEC = {"spec": "tests/models/own_backwards.py:net", "options": {}}


def targets(model: Any, batch: Any = BATCH, **options: Any) -> list[Any]:
    """The ops of Functions in the model's graph."""
    nodes = capture(model, batch, **options).graph.nodes
    return [node.target for node in nodes if "autograd_functions" in str(node.target)]


def test_the_graph_has_the_users_backward() -> None:
    model, batch = models.net()
    captured = capture(model, batch)
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch))
    keys = [node.meta["key"] for node in captured.graph.nodes if node.op == "call_function"]
    assert [key for key in keys if key in (":Doubled", ":Doubled#4", ":Sign#4", ":Reverse")] == [
        ":Doubled", ":Doubled#4", ":Sign#4", ":Reverse",
    ]  # fmt: skip
    assert not any("grad_enabled" in key or "square" in key for key in keys), keys


def test_an_op_is_made_for_what_a_function_is_given_beside_tensors() -> None:
    half, same, third = (targets(models.Calls(models.Reverse, scale)) for scale in (0.5, 0.5, 0.3))
    assert half == same != third
    assert str(half[0]).startswith("autograd_functions.Reverse.")


def test_its_name_says_what_it_does_in_any_process() -> None:
    """A class defined anew has an op of its own, whose name differs where its text, or what it is given, does."""
    (first,) = targets(models.Calls(models.Reverse, 0.5))
    again: Any = type("Reverse", (models.Reverse,), {"__qualname__": "Reverse", "__module__": models.__name__})
    (second,) = targets(models.Calls(again, 0.5))
    (other,) = targets(models.Calls(models.Reverse, 0.25))
    assert first is not second
    # a suffix counts the ops of one name in this process, where other tests may have made some
    names = [re.sub(r"_\d+$", "", str(target)) for target in (first, second, other)]
    assert names[0] == names[1] != names[2]


def test_where_no_gradient_passes_the_forward_is_followed() -> None:
    model = models.Calls(models.Sign).requires_grad_(False)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))

    def loss(output: Tensor, _: Any) -> Tensor:
        return output * model.scale

    assert targets(model, loss_fn=loss) == []


def test_under_autocast_its_forward_runs_under_autocast() -> None:
    model, batch = models.net()
    dtype = torch.bfloat16
    with torch.autocast("cpu", dtype=dtype):
        wanted = eager_step(model, batch)
    captured = capture(model, batch, autocast=dtype)
    assert_same_step(graph_step(captured, model, batch), wanted, rtol_gradient=1e-2)  # sums in bf16, in another order
    made = next(node for node in captured.graph.nodes if node.meta.get("key") == ":Doubled")
    assert [node.meta.get("role") for node in made.args] == [None, "param", "param"]  # converted inside, not before


def test_random_numbers_inside_are_known() -> None:
    (target,) = targets(models.Calls(models.Noisy))
    assert private.is_random(target)
    (target,) = targets(models.Calls(models.Sign))
    assert not private.is_random(target)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (models.FromOutside, ("every tensor it uses", "[4]", "pass it to apply")),
        (models.OnlyBackwards, ("every tensor it uses", "OnlyBackwards")),
        (models.InPlace, ("in place", "copy")),
        (models.OnCtx, ("save_for_backward", "ctx.masks")),
        (models.Numpy, ("memory", "custom_op", "register_fake")),
        (models.Pointer, ("memory", "custom_op")),
        (models.Nothing, ("gives a tensor", "Nothing")),
    ],
)
def test_what_a_graph_cannot_follow_is_refused(function: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        capture(models.Calls(function), BATCH)
    for word in (function.__name__, *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("solver", "pins", "memory"),
    [
        pytest.param("fsdp", [], None, marks=pytest.mark.slow),
        pytest.param("joint", [":Doubled=shard(l0)@cpu", ":Sign=shard(l0)@cpu"], None, marks=pytest.mark.slow),
        ("fsdp", [], 42_000),
        pytest.param("joint", [], 42_000, marks=pytest.mark.slow),
    ],
)
def test_plans_run_with_the_users_backward(pool2: Pool, solver: str, pins: list[str], memory: int | None) -> None:
    model, batch = models.net()
    plan = tw.plan(model, batch, hardware="cpu:2", solver=solver, pins=pins, memory=memory)
    assert any("found by trying" in note and "autograd_functions::Doubled" in note for note in plan.notes)
    results = pool2.run("trainwright.cli.workers:verify", model=SPEC, plan=plan.to_json(), dtype="float64")
    report = tw.Report.model_validate(results[0])
    assert report.passed, report
