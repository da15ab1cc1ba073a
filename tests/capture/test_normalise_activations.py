"""Activations that a model spells out become the one op they are; whatever is nearly one stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_step, eager_step, graph_step
from torch import Tensor, nn

from tests.grids import slow_but
from trainwright.capture.export import capture
from trainwright.models import zoo

ROOT = math.sqrt(2 / math.pi)


def cubic(x: Tensor, root: float = ROOT, third: float = 0.044715) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(root * (x + third * torch.pow(x, 3))))


SPELT_OUT: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gpt2": ("gelu", cubic),
    "by products": ("gelu", lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))),
    "by sigmoid": ("gelu", lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x**3))),
    "by erf": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "swish": ("silu", lambda x: x * torch.sigmoid(x)),
    "swish by exp": ("silu", lambda x: x / (1 + torch.exp(-x))),
    "swish in place": ("silu", lambda x: x.clone().mul_(torch.sigmoid(x))),
    "mish": ("mish", lambda x: x * torch.tanh(F.softplus(x))),
    "mish by logarithm": ("mish", lambda x: x * torch.tanh(torch.log1p(torch.exp(x)))),
    "beside its input": ("silu", lambda x: x + x * torch.sigmoid(x)),
    "twice": ("gelu", lambda x: cubic(cubic(x))),
}
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "coarse": lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4142)),
    "two tensors": lambda x: x[:, :4] * torch.sigmoid(x[:, 4:]),
    "one of it detached": lambda x: x * torch.sigmoid(x.detach()),
    "gate read again": lambda x: (lambda gate: x * gate + gate)(torch.sigmoid(x)),
    "half read again": lambda x: (lambda half: half * (1 + torch.erf(x / math.sqrt(2.0))) + half.square())(0.5 * x),
    "far kink": lambda x: x.clamp(-500, 500) * torch.sigmoid(x),
    "another sign": lambda x: x * torch.sigmoid(-x),
    "of tanh": lambda x: torch.tanh(x) * torch.sigmoid(x),
    "rounded": lambda x: torch.div(x, 1 + torch.exp(-x), rounding_mode="floor") + x,
}


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.function = nn.Linear(5, 8), function
        self.second = nn.LazyLinear(3)
        self.second(function(self.first(torch.ones(2, 5))))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x))).square().mean()


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor]:
    return (4 * torch.randn(7, 5, dtype=dtype, generator=torch.Generator().manual_seed(5)),)


def names(model: nn.Module, **options: object) -> list[str]:
    found = capture(model, batch(torch.float32), **options)  # type: ignore[arg-type]
    nodes = [node for node in found.graph.nodes if node.op == "call_function"]
    return [node.meta["key"].partition(":")[2].partition("#")[0] for node in nodes]


def assert_same(function: Callable[[Tensor], Tensor]) -> None:
    model = Model(function).double()
    captured = capture(model, batch())
    assert_same_step(graph_step(captured, model, batch()), eager_step(model, batch()), 1e-9, 1e-9)


@pytest.mark.parametrize("kind", SPELT_OUT)
def test_an_activation_spelt_out_is_one_op(kind: str) -> None:
    name, function = SPELT_OUT[kind]
    found = names(Model(function))
    assert set(found) <= {"linear", name, "square", "pow", "mean", "add"}
    assert found.count(name) == (2 if kind == "twice" else 1)
    assert found.count("add") == (1 if kind == "beside its input" else 0)
    assert_same(function)


@pytest.mark.parametrize("kind", OTHER)
def test_what_is_nearly_an_activation_stays(kind: str) -> None:
    assert not {"gelu", "silu", "mish"} & set(names(Model(OTHER[kind])))
    assert_same(OTHER[kind])


@settings(max_examples=20)
@given(st.floats(1e-6, 0.5), st.booleans(), st.booleans())
def test_a_constant_that_is_off_is_seen(off: float, up: bool, of_root: bool) -> None:
    factor = 1 + off if up else 1 - off
    root, third = (ROOT * factor, 0.044715) if of_root else (ROOT, 0.044715 * factor)
    assert "gelu" not in names(Model(lambda x: cubic(x, root, third)))


@pytest.mark.parametrize("kind", ["gpt2", "by erf", "swish", "mish"])
def test_under_autocast_its_result_keeps_its_type(kind: str) -> None:
    name, function = SPELT_OUT[kind]
    model = Model(function)
    captured = capture(model, batch(torch.float32), autocast=torch.bfloat16)
    (found,) = [node for node in captured.graph.nodes if node.op == "call_function" and f":{name}" in node.meta["key"]]
    assert found.meta["val"].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        wanted = eager_step(model, batch(torch.float32))
    assert_same_step(graph_step(captured, model, batch(torch.float32)), wanted, 2e-2, 5e-2)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: (x * torch.sigmoid(x)).bfloat16().float(), ["silu", "to", "to"]),
        (lambda x: (lambda narrow: narrow * torch.sigmoid(narrow))(x.bfloat16()).float(), ["to", "silu", "to"]),
        (lambda x: x * torch.sigmoid(x.bfloat16()).float(), ["to", "sigmoid", "to"]),
        (lambda x: cubic(x.double()).float(), ["to", "gelu", "to"]),
        (lambda x: (x * torch.sigmoid(x.double())).float(), ["to", "silu", "to"]),
    ],
    ids=["narrowed after", "narrowed before", "narrowed inside", "widened before", "widened inside"],
)
def test_the_models_own_casts_stay(function: Callable[[Tensor], Tensor], wanted: list[str]) -> None:
    found = names(Model(function))
    start = found.index("linear") + 1
    assert found[start : start + 3] == wanted
    model = Model(function)
    captured = capture(model, batch(torch.float32))
    assert_same_step(
        graph_step(captured, model, batch(torch.float32)), eager_step(model, batch(torch.float32)), 1e-2, 2e-2
    )


@pytest.mark.parametrize("model", slow_but(["gpt2-tiny"], ["gpt2-tiny", "gpt2"]))
def test_gpt2_runs_one_kernel_an_activation(model: str) -> None:
    found = capture(*zoo.build(model))
    own = [node.meta["key"] for node in found.graph.nodes if node.op == "call_function" and ".act:" in node.meta["key"]]
    assert own
    assert all(key.endswith(".act:gelu") for key in own)
