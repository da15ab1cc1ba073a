"""The captured graph against the model: same loss, every gradient, every buffer; and what the graph must look like."""

from __future__ import annotations

import copy
import functools
import operator
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import broken, plain
from oracle import assert_same_step, assert_stored_whole, eager_step, graph_step, run_graph
from torch import Tensor, fx, nn

from tests.grids import slow_but
from trainwright.artifacts import UserError
from trainwright.capture.export import Captured, capture
from trainwright.capture.passes.constants import Causal, constant_nodes, evaluate_constants, uniform
from trainwright.models import zoo
from trainwright.ops.functional import linear_io

TINY = [name for name in zoo.names() if name.endswith("tiny")]
FEW = ("gpt2-tiny", "resnet-tiny", "t5-tiny", "mamba-2-tiny")
"""The kinds of model that differ most; the others join them in the full grid."""
BUILDERS = [*plain.GOOD, functools.partial(plain.build_nano, fused=False)]


def _name(build: Any) -> str:
    return getattr(build, "__name__", "build_nano_eager")


def _calls(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.graph.nodes if node.op == "call_function"]


def _named(captured: Captured, name: str) -> list[fx.Node]:
    return [node for node in _calls(captured) if node.meta["key"].partition(":")[2].partition("#")[0] == name]


def _keys(captured: Captured) -> list[str]:
    return [node.meta["key"] for node in _calls(captured)]


def _on_meta(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _on_meta(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_on_meta(part) for part in tree)
    return tree.to("meta") if isinstance(tree, Tensor) else tree


def _user_model(build: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(1)
    model, batch, *loss_fn = build()
    return model, batch, loss_fn[0] if loss_fn else None


@functools.cache
def _captured(build: Any) -> tuple[nn.Module, Any, Any, Captured]:
    """A user's model, its batch and loss, and its capture, for tests that leave all of them as they are."""
    model, batch, loss_fn = _user_model(build)
    return model, batch, loss_fn, capture(model, batch, loss_fn)


@pytest.mark.parametrize("name", slow_but(FEW, TINY))
def test_zoo_model_computes_what_the_model_computes(name: str) -> None:
    model, batch = zoo.build(name, device="cpu")
    captured = capture(*zoo.build(name))  # captured on meta, run with real tensors
    wanted, found = eager_step(model, batch), graph_step(captured, model, batch)
    assert_same_step(found, wanted)
    assert type(found.output) is type(wanted.output)
    assert found.output.keys() == wanted.output.keys()
    assert_stored_whole(captured, model, batch)


@pytest.mark.parametrize("build", BUILDERS, ids=_name)
def test_user_model_computes_what_the_model_computes(build: Any) -> None:
    model, batch, loss_fn, captured = _captured(build)
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch, loss_fn))
    if build is not plain.build_autocast:  # whose output is a dataclass, a form that torch cannot write down
        assert_stored_whole(captured, model, batch)


@pytest.mark.parametrize("build", slow_but(BUILDERS[::2], BUILDERS), ids=_name)
def test_capture_on_meta_is_the_same_graph(build: Any) -> None:
    model, batch, loss_fn = _user_model(build)
    if model.__class__ is plain.TiedFrozen:
        pytest.skip("holds a plain tensor attribute, whose value meta loses")
    on_meta = copy.deepcopy(model).to("meta")
    meta_batch = _on_meta(batch)
    real, fake = (_keys(capture(*each, loss_fn)) for each in ((model, batch), (on_meta, meta_batch)))
    if isinstance(model, plain.NanoGPT) and model.fused:  # on meta the mask's values are lost, and the mask stays
        assert set(real) < set(fake)
    else:
        assert real == fake


class _LooksInside(nn.Module):
    """Looks at two activations of one shape without a gradient, by ops that have nothing to do, and goes on with both."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.first, self.second, self.look = nn.Linear(4, 4), nn.Linear(4, 4), look

    def forward(self, x: Tensor) -> Tensor:
        hidden, other = self.first(x), self.second(x)
        with torch.no_grad():
            best = (self.look(hidden) + 2 * self.look(other)).argmax(-1, keepdim=True)
        return self.second(hidden).gather(-1, best).sum() + other.square().mean()


IDLE = {
    "to": lambda x: x.to(torch.float32), "type_as": lambda x: x.type_as(x), "contiguous": lambda x: x.contiguous(),
    "positive": lambda x: +x, "real": torch.real, "flatten": lambda x: x.flatten(1), "detach": lambda x: x.detach(),
    "dropout": lambda x: F.alpha_dropout(x, 0.5, training=False), "list": lambda x: torch.broadcast_tensors(x, x)[1],
}  # fmt: skip


@pytest.mark.parametrize("look", IDLE)
def test_what_a_region_without_gradients_returns_unchanged_keeps_its_gradient(look: str) -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = _LooksInside(IDLE[look]), (torch.randn(3, 4),), _itself
    captured = capture(model, batch, loss_fn)
    wanted, found = eager_step(model, batch, loss_fn), graph_step(captured, model, batch)
    assert wanted.gradients.keys() == found.gradients.keys()
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)


@pytest.mark.parametrize(
    "write", [lambda x: x.clamp_(min=-0.1), lambda x: x[:, 0].mul_(2.0).unsqueeze(1)], ids=["whole", "part"]
)
def test_a_write_past_autograd_that_is_read_later_is_refused(write: Any) -> None:
    with pytest.raises(UserError, match=r"written under autograd are needed; .* under torch.no_grad\(\)"):
        capture(_LooksInside(write), (torch.randn(3, 4),), _itself)


def _itself(output: Tensor, batch: Any) -> Tensor:
    return output


@pytest.mark.parametrize("name", slow_but(FEW, TINY))
def test_evaluation_graph_is_the_evaluated_model(name: str) -> None:
    model, batch = zoo.build(name, device="cpu")
    captured = capture(model, batch, training=False)
    model.eval()
    with torch.no_grad():
        wanted, found = model(**batch).loss, run_graph(captured.graph, model, batch)[captured.loss_index]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert not _named(captured, "dropout")


@pytest.mark.parametrize("build", BUILDERS, ids=_name)
def test_form_of_the_graph(build: Any) -> None:
    model, _, _, captured = _captured(build)
    names = {
        "param": {name for name, _ in model.named_parameters()},
        "buffer": {name for name, _ in model.named_buffers()},
    }
    seen = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            assert node.meta["role"] in ("param", "buffer", "input", "const")
            assert node.meta["name"] in names.get(node.meta["role"], {node.meta["name"]})
            seen.append((node.meta["role"], node.meta["name"]))
        if node.op in ("placeholder", "call_function"):
            values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
            assert all(value.device.type == "cpu" for value in values)
            assert all(type(value).__name__ == "FakeTensor" for value in values)
        if node.op == "call_function":
            assert isinstance(node.target, torch._ops.OpOverload) or node.target in (operator.getitem, linear_io)
            assert isinstance(node.meta["path"], str)
            model.get_submodule(node.meta["path"])
    assert len(set(seen)) == len(seen)
    keys = [node.meta["key"] for node in _calls(captured)]
    assert len(set(keys)) == len(keys)


def test_frozen_tied_and_nested_are_named() -> None:
    model, batch, _ = _user_model(plain.build_tied)
    captured = capture(model, batch)
    by_name = {node.meta["name"]: node for node in captured.graph.nodes if node.op == "placeholder"}
    assert not by_name["frozen.weight"].meta["val"].requires_grad
    assert by_name["embed.weight"].meta["val"].requires_grad
    assert captured.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in by_name
    assert {name for name, node in by_name.items() if node.meta["role"] == "input"} == {
        "inputs.ids",
        "inputs.weight",
        "labels",
    }
    assert [node.meta["mutates"] for node in _calls(captured) if "mutates" in node.meta] == ["average", "average"]
    assert [node.meta["key"] for node in _calls(captured) if node.meta["path"] == "twice"] == [
        "twice:linear",
        "twice:linear#2",
    ]


RESHAPED = {
    "unsqueeze": lambda h: h.unsqueeze_(1).reshape(-1, 6),
    "squeeze": lambda h: h.unsqueeze(1).squeeze_(1),
    "transpose": lambda h: h.t_().transpose_(0, 1),
    "swapaxes": lambda h: h.swapaxes_(0, 1).t(),
    "written after": lambda h: (h * 1).unsqueeze_(0).mul_(2.0).reshape(-1, 6),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_a_shape_changed_in_place_is_a_view(name: str) -> None:
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(RESHAPED[name](2 * self.inner(x))).square().mean()

    batch = {"x": torch.ones(3, 4)}
    captured = capture(Reshaped(), batch)
    assert not [node for node in _calls(captured) if node.target._schema.is_mutable]
    assert_same_step(graph_step(captured, Reshaped(), batch), eager_step(Reshaped(), batch))


def test_operands_that_a_loss_makes_alike_are_expanded_where_they_have_to_be() -> None:
    """`mse_loss` and others begin with `broadcast_tensors`, an op of several results."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            rows = self.inner(x)
            alike, other = torch.broadcast_tensors(rows[:, None], y[None])
            return F.mse_loss(rows, y) + (alike * other).mean()

    model, batch = Net(), {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}
    captured = capture(model, batch)
    assert not _named(captured, "broadcast_tensors")
    assert len(_named(captured, "expand")) == 2
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch))


def test_no_activation_is_written_in_place() -> None:
    model, batch, _ = _user_model(plain.build_inplace)
    captured = capture(model, batch)
    assert not [node for node in _calls(captured) if node.target._schema.is_mutable]
    assert captured.notes == ()


def test_capture_leaves_model_and_batch_alone() -> None:
    model, batch, _ = _user_model(plain.build_tied)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    model.eval()
    captured = capture(model, batch)
    assert not model.training
    assert any("evaluation mode" in note for note in captured.notes)
    after = model.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == {name: pair[0] for name, pair in before.items()}
    assert all(torch.equal(after[name], pair[1]) for name, pair in before.items())


def test_a_model_that_cannot_be_copied_is_captured_and_restored() -> None:
    model = nn.Linear(3, 1)
    model.lock = threading.Lock()  # type: ignore[assignment]
    weight = model.weight
    captured = capture(model, (torch.ones(2, 3),), lambda output, batch: output.mean())
    assert [node.meta["key"] for node in _calls(captured)] == [":linear", ":mean"]
    assert model.weight is weight
    assert type(model.weight) is nn.Parameter


def test_frozen_batch_norm_stays_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].eval()
    captured = capture(model, (torch.randn(5, 3),), lambda output, batch: output.mean())
    assert not _named(captured, "add_")


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "qwen2-tiny", "mixtral-tiny"])
def test_causal_attention_is_restored(name: str) -> None:
    captured = capture(*zoo.build(name))
    attentions = _named(captured, "sdpa")
    assert len(attentions) == 2
    for node in attentions:
        assert node.args[3] is None
        assert node.args[5] is True
        if name != "gpt2-tiny":
            assert node.kwargs["enable_gqa"]
            assert node.args[1].meta["val"].shape[1] == 2
    masks = [node for node in _calls(captured) if node.meta["val"].__class__ is not tuple and _is_square_mask(node)]
    assert not masks


def _is_square_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 4


@pytest.mark.parametrize("name", ["bert-tiny", "vit-tiny"])
def test_full_attention_has_no_mask(name: str) -> None:
    for node in _named(capture(*zoo.build(name)), "sdpa"):
        assert node.args[3] is None
        assert node.args[5] is False


def test_long_causal_mask_takes_no_memory() -> None:
    """Eight sequences of 131072: the mask alone would take 128 GiB."""
    model, batch = zoo.build("llama-tiny", batch_size=8, seq_len=131072, num_hidden_layers=1)
    (attention,) = _named(capture(model, batch), "sdpa")
    assert attention.args[5] is True


def test_padding_mask_stays_rowwise() -> None:
    """The mask from the batch is made by views: a rank with half of the rows can compute its half."""
    model, batch = zoo.build("bert-tiny", device="cpu", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    batch["attention_mask"] = torch.ones(4, 32, dtype=torch.long)
    batch["attention_mask"][1, 20:] = 0
    captured = capture(model, batch)
    assert not _named(captured, "index")
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch))


def test_causal_and_padding_mask_together() -> None:
    model, batch = zoo.build("llama-tiny", device="cpu")
    batch["attention_mask"] = torch.ones(4, 32, dtype=torch.long)
    batch["attention_mask"][2, 30:] = 0
    captured = capture(model, batch)
    assert not _named(captured, "index")
    for node in _named(captured, "sdpa"):
        assert isinstance(node.args[3], fx.Node)
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch))


class _Masked(nn.Module):
    """One attention under a mask made by `make(seq)`."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.make(x.size(1))).square().mean()


def _rows(size: int) -> Tensor:
    return torch.arange(size).unsqueeze(1)


CAUSAL_MASKS = {
    "tril": lambda size: torch.tril(torch.ones(size, size, dtype=torch.bool)),
    "triu of -inf": lambda size: torch.triu(torch.full((size, size), float("-inf")), diagonal=1),
    "ge": lambda size: _rows(size) >= torch.arange(size),
    "not gt": lambda size: ~(torch.arange(size) > _rows(size)),
    "where": lambda size: torch.where(torch.arange(size) <= _rows(size), 0.0, torch.finfo(torch.float32).min),
    "masked_fill": lambda size: torch.zeros(size, size).masked_fill(_rows(size) < torch.arange(size), float("-inf")),
    "shifted": lambda size: (torch.arange(size) + 5)[None] <= _rows(size) + 5,
    "window that hides nothing": lambda size: (
        (_rows(size) >= torch.arange(size)) & (_rows(size) - torch.arange(size) < 100)
    ),
}
OTHER_MASKS = {
    "strict": lambda size: (_rows(size) > torch.arange(size)) | (_rows(size) == 0),
    "window": lambda size: (_rows(size) >= torch.arange(size)) & (_rows(size) - torch.arange(size) < 3),
    "triu": lambda size: torch.triu(torch.ones(size, size, dtype=torch.bool)),
    "alibi": lambda size: -(_rows(size) - torch.arange(size)).abs().float(),
    "soft": lambda size: torch.triu(torch.full((size, size), -5.0), diagonal=1),
    "reversed": lambda size: (size - torch.arange(size))[None] <= size - _rows(size),
}


@pytest.mark.parametrize("kind", [*CAUSAL_MASKS, *OTHER_MASKS])
def test_masks_are_recognised_exactly(kind: str) -> None:
    model, batch = _Masked({**CAUSAL_MASKS, **OTHER_MASKS}[kind]), (torch.randn(2, 7, 4),)
    captured = capture(model, batch)
    (attention,) = _named(captured, "sdpa")
    is_causal = attention.args[5] is True
    assert is_causal == (kind in CAUSAL_MASKS)
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch))


def test_constants_equal_their_evaluation() -> None:
    """Every constant of a graph, evaluated without the memory, is what the ops themselves give."""
    model, batch = zoo.build("t5-tiny", device="cpu")
    captured = capture(model, batch)
    buffers = dict(model.named_buffers())
    nodes = [node for node in constant_nodes(captured.graph) if node.op == "call_function"]
    values = evaluate_constants(captured.graph, nodes, buffers)
    assert len(values) > 10
    real: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node in values:
            real[node] = node.target(*fx.node.map_arg(node.args, real.get), **fx.node.map_arg(node.kwargs, real.get))
            torch.testing.assert_close(_dense(values[node]), real[node], rtol=0, atol=0)


def _dense(value: Tensor | Causal) -> Tensor:
    if isinstance(value, Tensor):
        return value
    lower = torch.ones(value.shape, dtype=torch.bool).tril()
    return torch.where(lower, value.inside, value.outside)


def test_uniform() -> None:
    assert uniform(torch.ones(()).expand(3, 4)) == 1
    assert uniform(torch.arange(3)) is None


# --- linear maps, autocast, losses -----------------------------------------------------------------------------------


def test_conv1d_is_an_n_dimensional_linear() -> None:
    captured = capture(*zoo.build("gpt2-tiny"))
    maps = [node for node in _calls(captured) if node.target is linear_io]
    assert len(maps) == 8
    assert all(len(node.args[0].meta["val"].shape) == 3 for node in maps)
    assert not _named(captured, "addmm")


def test_linear_io_saves_and_gives_what_conv1d_does() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    weight, bias = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    wanted = torch.autograd.grad((x @ weight + bias).square().sum(), (x, weight, bias))
    found = torch.autograd.grad(linear_io(x, weight, bias).square().sum(), (x, weight, bias))
    for each, other in zip(found, wanted):
        torch.testing.assert_close(each, other)


def test_ambient_autocast_does_not_reach_the_capture() -> None:
    model, batch, _ = _user_model(plain.build_einsum)
    plainly = [node.meta["key"] for node in _calls(capture(model, batch))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [node.meta["key"] for node in _calls(capture(model, batch))] == plainly


AUTOCASTABLE = (plain.build_einsum, plain.build_nano, plain.build_unet, plain.build_group, plain.build_tied)


@pytest.mark.parametrize("build", AUTOCASTABLE, ids=_name)
def test_autocast_as_an_option_is_autocast_around_the_model(build: Any) -> None:
    model, batch, loss_fn = _user_model(build)
    captured = capture(model, batch, loss_fn, autocast=torch.bfloat16)
    assert _named(captured, "to")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = eager_step(model, batch, loss_fn)
    assert_same_step(graph_step(captured, model, batch), wanted, rtol_gradient=1e-2)


def test_a_model_that_autocast_breaks_is_told_where() -> None:
    model, batch, _ = _user_model(plain.build_moe)
    with pytest.raises(RuntimeError, match="scatter"), torch.autocast("cpu", dtype=torch.bfloat16):
        model(*batch)
    with pytest.raises(UserError, match=r"torch\.zeros"):
        capture(model, batch, autocast=torch.bfloat16)


def test_constant_in_a_closure_is_lifted() -> None:
    weights = torch.tensor([1.0, 2.0, 4.0])
    loss_fn = nn.CrossEntropyLoss(weight=weights)
    model, batch = nn.Linear(4, 3), (torch.randn(6, 4),)
    target = torch.tensor([0, 1, 2, 0, 1, 2])

    def loss(output: Tensor, batch: Any) -> Tensor:
        return loss_fn(output, target)

    captured = capture(model, batch, loss)
    assert_same_step(graph_step(captured, model, batch), eager_step(model, batch, loss))


def test_rebuild_gives_the_models_own_output() -> None:
    model, batch, _ = _user_model(plain.build_tied)
    captured = capture(model, batch)
    output = captured.rebuild(run_graph(captured.graph, model, batch))
    assert output["rate"] == 0.8
    assert set(output["losses"]) == {"main", "size"}


# --- errors ----------------------------------------------------------------------------------------------------------

MISTAKES = {
    "Branching": ("branches", "if h.sum() > 0", "torch.where"),
    "Selecting": ("shapes", "h[x > 0]", "torch.where"),
    "Item": (".item()", "x.abs().max()"),
    "Opaque": ("_Result", "dataclasses"),
    "NoLoss": ("scalar loss", "loss_fn"),
    "Wide": ("scalar", "(3, 4)"),
    "Failing": ("no such head", "broken.py", "KeyError"),
    "Reentrant": ("use_reentrant=False",),
    "Numpy": ("numpy", "broken.py"),
}


def test_a_tensor_made_beside_the_model_is_named() -> None:
    with torch.device("meta"):
        scale = torch.ones(4)
    with pytest.raises(UserError, match=r"another one, made where .* buffer") as caught:
        capture(nn.Linear(4, 4), (torch.ones(3, 4),), lambda output, _: (output * scale).mean())
    assert "output * scale" in str(caught.value)


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_explained(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as caught:
        capture(*broken.build(kind))
    for part in MISTAKES[kind]:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ((torch.ones(3, 5),), ("float32[3, 5]", "self.linear(x)")),
        ({"y": torch.ones(3, 4)}, ("missing", "y: float32[3, 4]", "takes x")),
        (3, ("dict", "int")),
    ],
)
def test_a_batch_that_does_not_fit_is_named(batch: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        capture(broken.Wide(), batch, lambda output, batch: output.mean())
    for part in parts:
        assert part in str(caught.value)


def test_cache_is_switched_off_or_named() -> None:
    model, batch = zoo.build("gpt2-tiny")
    model.config.use_cache = True
    assert any("use_cache=False" in note for note in capture(model, batch).notes)
    with pytest.raises(UserError, match="use_cache=False"):
        capture(model, {**batch, "use_cache": True})


class Passing(nn.Module):
    """Passes keywords on to a model of transformers, whose configuration it has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return self.model(input_ids=input_ids, **kwargs)


def test_cache_is_switched_off_where_the_forward_passes_keywords_on() -> None:
    model, batch = zoo.build("gpt2-tiny")
    model.config.use_cache = True
    assert any("use_cache=False" in note for note in capture(Passing(model), batch).notes)


def test_a_print_in_forward_does_not_reach_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("a shape", x.shape)
            return super().forward(x).mean()

    capture(Talking(2, 2), (torch.ones(3, 2),))
    out, err = capsys.readouterr()
    assert out == ""
    assert "a shape" in err


def test_nothing_real_is_allocated() -> None:
    """A layer of 64 GiB, captured on this machine."""
    with torch.device("meta"):
        model = nn.Linear(2**17, 2**17)
    captured = capture(model, (torch.empty(2**12, 2**17, device="meta"),), lambda output, batch: output.mean())
    assert captured.capture_s < 30
