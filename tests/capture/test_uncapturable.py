"""Models that no graph can hold: most have a profile all the same; the others say which line asks for values."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from oracle import assert_same_step, eager_step, graph_step
from torch import library, nn
from torch.utils.checkpoint import checkpoint

import trainwright as tw
from trainwright.artifacts import UserError
from trainwright.capture.export import capture
from trainwright.capture.export_errors import ValuesNeeded
from trainwright.profiler import measure, profile, reference_step, static_bytes
from trainwright.profiler.graph import MAX_FORWARD_OPS


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(24, 24), nn.Linear(24, 1)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.x * grad


class OwnBackward(Base):
    def forward(self, x, lengths):
        return self.head(Square.apply(self.body(x))).mean()


class BranchOnLengths(Base):
    def forward(self, x, lengths):
        x = self.body(x)
        if lengths.max() > 4:
            x = x.relu()
        return self.head(x).mean()


class LongestOnly(Base):
    def forward(self, x, lengths):
        return self.head(self.body(x[: int(lengths.max().item())])).mean()


class RowByRow(Base):
    def forward(self, x, lengths):
        return self.head(torch.cat([self.body(x[:n]) for n in lengths.tolist()])).mean()


class DistinctRows(Base):
    def forward(self, x, lengths):
        found, where = lengths.unique(return_inverse=True)
        return self.head(self.body(x[found])[where]).mean()


class SelectedRows(Base):
    def forward(self, x, lengths):
        return self.head(self.body(x)[lengths > 2]).mean()


class NumpyOfLengths(Base):
    def forward(self, x, lengths):
        rows = np.flatnonzero(lengths.numpy() > 2)
        return self.head(self.body(x)[torch.from_numpy(rows)]).mean()


class LayerDrop(Base):
    def forward(self, x, lengths):
        for _ in range(6):
            if torch.rand([]) > 0.5:
                x = self.body(x).relu()
        return self.head(self.body(x)).mean()


class OldCheckpoint(Base):
    def forward(self, x, lengths):
        x = checkpoint(self.body, self.body(x), use_reentrant=True, preserve_rng_state=False)
        return self.head(x).mean()


class Answer:
    def __init__(self, loss):
        self.loss = loss


class OwnOutput(Base):
    def forward(self, x, lengths):
        return Answer(self.head(self.body(x)).mean())


SURVIVORS = {
    OwnBackward: "ctx.save_for_backward",
    BranchOnLengths: "if lengths.max() > 4",
    LongestOnly: "lengths.max().item()",
    RowByRow: "lengths.tolist()",
    DistinctRows: "lengths.unique",
    SelectedRows: "lengths > 2",
    NumpyOfLengths: "lengths.numpy()",
    LayerDrop: "torch.rand([])",
    OldCheckpoint: "use_reentrant",
    OwnOutput: "Answer",
}
"""Models without a graph that run on tensors without values; what the note names."""


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 24, generator=generator), torch.tensor([1, 5, 3, 2, 7, 5, 3, 6])


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def real_peak(model, given) -> int:
    static, optimizer = static_bytes(model), adamw(model.parameters())
    return static + measure(lambda: reference_step(model, optimizer, given)).peak_of_step(1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "words"), SURVIVORS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_captured_is_profiled_and_the_note_says_why_there_is_no_plan(kind, words):
    found = profile(kind(), batch(), capture=True)
    assert found.capture_s is None
    note = next(note for note in found.notes if note.startswith("no graph"))
    assert words in note
    assert "not planned" in note
    assert "\n" not in note


@pytest.mark.parametrize("kind", [kind for kind in SURVIVORS if kind is not LayerDrop], ids=lambda kind: kind.__name__)
def test_its_peak_is_the_allocators(kind):
    """Within 64 bytes of 7 kB: a kernel's own scratch of a few numbers is not modelled."""
    measured = real_peak(kind(), batch())
    assert abs(profile(kind(), batch()).peak_bytes - measured) <= 64


class SideEffects(Base):
    """Counts, keeps its history in a list, and leaves an output behind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.history = 0, []
        self.seen = torch.zeros(3, dtype=torch.long)

    def forward(self, x, lengths):
        self.num_calls += 1
        self.seen += 1
        x = self.body(x)
        self.history.append(tuple(x.shape))
        return self.head(x).mean()


class AnyKeywords(Base):
    def forward(self, **given):
        return {"loss": self.head(self.body(given["x"])).mean(), "rest": sorted(given)}


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.body.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x, lengths):
        return self.head(self.body(x)).mean()


class Penalised(Base):
    """A gradient inside the forward."""

    def forward(self, x, lengths):
        x = x.detach().requires_grad_()
        out = self.head(self.body(x).tanh()).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()


@pytest.mark.parametrize("kind", [SideEffects, Hooked, Penalised], ids=lambda kind: kind.__name__)
def test_python_around_the_tensors_is_followed(kind):
    model = kind()
    measured = real_peak(kind(), batch())
    assert math.isclose(profile(model, batch()).peak_bytes, measured, rel_tol=0.01)


def test_what_python_keeps_on_the_side_stays_as_it_was():
    model = SideEffects()
    profile(model, batch())
    assert (model.num_calls, model.history, model.seen.tolist()) == (0, [], [0, 0, 0])


def test_a_batch_of_any_keywords():
    x, lengths = batch()
    found = profile(AnyKeywords(), {"x": x, "lengths": lengths, "note": "a string"})
    assert found.forward_flops == 2 * 8 * 24 * 25


class Batched(Base):
    def forward(self, x):
        return torch.vmap(self.head)(x).mean()


class Derived(Base):
    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: self.head(row).sum()))(x).mean()


class Tangent(Base):
    def forward(self, x):
        return torch.func.jvp(self.head, (x,), (x,))[1].mean()


@pytest.mark.parametrize(
    ("build", "line"), [(Batched, "torch.vmap(self.head)"), (Derived, "torch.func.grad"), (Tangent, "func.jvp")]
)
def test_transforms_are_refused_by_name(build, line):
    with pytest.raises(UserError, match=r"without transforms of torch.func .* has one; write vmap as ops") as error:
        capture(build(), {"x": torch.randn(4, 24)})
    assert line in str(error.value)


class SlopeOf(nn.Module):
    """A gradient inside the forward, through a module of each kind."""

    def __init__(self, middle):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(24, 16), middle, nn.Linear(16, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        h = self.middle(self.body(x))
        (slope,) = torch.autograd.grad(self.head(h[0] if isinstance(h, tuple) else h).sum(), x, create_graph=True)
        return slope.square().mean()


SIMPLE = [nn.ReLU(), nn.GELU(), nn.Softmax(-1), nn.RMSNorm(16), nn.Unflatten(1, (2, 8)), nn.PReLU()]
COMPOUND = [nn.LayerNorm(16), nn.BatchNorm1d(16), nn.GroupNorm(2, 16), nn.Dropout(0.3), nn.LSTM(16, 16)]


@pytest.mark.parametrize("middle", SIMPLE, ids=lambda middle: type(middle).__name__)
def test_a_gradient_within_the_forward_is_part_of_the_graph(middle):
    width = 8 if isinstance(middle, nn.Unflatten) else 16
    model = SlopeOf(middle)
    model.head = nn.Linear(width, 1)
    captured = capture(model, {"x": torch.randn(4, 24)})
    assert not [node for node in captured.graph.nodes if node.meta.get("role") == "const"]


class Patches(nn.Module):
    """A critic of convolutions alone, whose gradient reads nothing that a composite op has saved."""

    def __init__(self, transposed):
        super().__init__()
        make = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.inner, self.outer = make(3, 4, 3, 2, 1), make(4, 1, 3, 2, 1)

    def forward(self, image):
        image = image.detach().requires_grad_()
        scores = self.outer(nn.functional.leaky_relu(self.inner(image), 0.2))
        (slope,) = torch.autograd.grad(scores.sum(), image, create_graph=True)
        return slope.flatten(1).norm(dim=1).mean()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [8, 9])
def test_the_gradient_of_a_convolutions_input_is_a_convolution(transposed, size):
    torch.manual_seed(2)
    model, batch = Patches(transposed), {"image": torch.randn(2, 3, size, size)}
    assert_same_step(graph_step(capture(model, batch), model, batch), eager_step(model, batch))


@pytest.mark.parametrize("middle", COMPOUND, ids=lambda middle: type(middle).__name__)
def test_a_gradient_through_a_compound_op_is_refused_by_name(middle):
    with pytest.raises(UserError, match=r"that goes through simple ops is needed .* goes through .*write that op"):
        capture(SlopeOf(middle), {"x": torch.randn(4, 24)})


class BranchOnActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Routed(), Routed()])

    def forward(self, x, lengths):
        for block in self.blocks:
            x = block(x)
        return x.mean()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        if x.sum() > 0:
            return self.wide(x).relu()
        return self.narrow(x)


class Rescaled(Base):
    def forward(self, x, lengths):
        x = self.body(x)
        return self.head(x / x.abs().max().item()).mean()


class PositiveRows(Base):
    def forward(self, x, lengths):
        x = self.body(x)
        return self.head(x[x[:, 0] > 0]).mean()


class NumpyOfActivations(Base):
    def forward(self, x, lengths):
        x = self.body(x)
        return self.head(x / float(np.abs(x.detach().numpy()).max())).mean()


class Experts(Base):
    """Each token goes to the expert of its largest entry: how many, nobody knows."""

    def forward(self, x, lengths):
        x, out = self.body(x), torch.zeros_like(x)
        best = x.argmax(-1)
        for expert in range(3):
            rows = torch.where(best % 3 == expert)[0]
            out[rows] = self.body(x[rows])
        return self.head(out).mean()


class Counted(Base):
    """What is written into known zeros is unknown: it must not be read as zeros."""

    def forward(self, x, lengths):
        x = self.body(x)
        counts = torch.zeros(24, dtype=torch.long)
        counts.scatter_add_(0, x.argmax(-1), torch.ones(8, dtype=torch.long))
        return self.head(x[: counts.tolist()[0] + 1]).mean()


@library.custom_op("trainwright_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_autograd(lambda ctx, grad: grad / 2)


class OwnOp(Base):
    def forward(self, x, lengths):
        return self.head(halved(self.body(x))).mean()


ASKING = {
    BranchOnActivations: ("if x.sum() > 0", "in blocks.0", "torch.where"),
    Rescaled: (".item()", "test_uncapturable.py", "torch.where"),
    PositiveRows: ("x[x[:, 0] > 0]", "test_uncapturable.py", "torch.where"),
    NumpyOfActivations: (".numpy()", "test_uncapturable.py", "torch.where"),
    Experts: ("torch.where(best % 3 == expert)", "test_uncapturable.py", "masks"),
    Counted: ("counts.tolist()", "test_uncapturable.py", "torch.where"),
    OwnOp: ("trainwright_tests::halved", "test_uncapturable.py", "register_fake"),
}
"""Models whose forward asks for values; what the message names: line, module, remedy."""


@pytest.mark.parametrize(("kind", "words"), ASKING.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_who_asks_for_values_is_told_the_line_and_a_remedy(kind, words):
    with pytest.raises(ValuesNeeded) as caught:
        profile(kind(), batch())
    for word in (*words, "--run"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ASKING, ids=lambda kind: kind.__name__)
def test_on_request_two_real_steps_are_run_instead(kind):
    torch.manual_seed(0)
    model = kind()
    found = profile(model, batch(), run=True)
    assert any(note.startswith("found by running two real steps") for note in found.notes)
    assert abs(found.peak_bytes - real_peak(model, batch())) <= 64


def test_a_run_leaves_weights_batch_and_generator_alone():
    model, given = BranchOnActivations(), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    profile(model, given, run=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(given[0], batch()[0])


def test_what_runs_without_values_is_never_run():
    found = profile(OwnBackward(), batch(), run=True)
    assert found.peak_bytes == profile(OwnBackward(), batch()).peak_bytes
    assert found.notes == ()


def test_without_values_nothing_can_be_run():
    with torch.device("meta"):
        model = BranchOnActivations()
    with pytest.raises(UserError, match="meta device"):
        profile(model, batch(), run=True)


class BranchThenWrong(Base):
    """Asks for a value first, and fails on real tensors for another reason."""

    def forward(self, x, lengths):
        if self.body(x).sum() > -1e9:
            return self.head(x[:, :5]).mean()
        return self.head(x).mean()


def test_where_real_steps_were_asked_for_their_own_error_is_told():
    with pytest.raises(UserError) as caught:
        profile(BranchThenWrong(), batch(), run=True)
    assert not isinstance(caught.value, ValuesNeeded)
    for word in ("self.head(x[:, :5])", "cannot be multiplied", "in head"):
        assert word in str(caught.value)


def test_a_step_that_only_real_tensors_can_run_is_run():
    """Whatever the reason is for which the fakes could not."""
    model = NoShapes()
    with pytest.raises(UserError, match="no fakes here"):
        profile(model, batch())
    found = profile(model, batch(), run=True)
    assert any(note.startswith("found by running two real steps") for note in found.notes)


class NoShapes(Base):
    def forward(self, x, lengths):
        if type(x) is not torch.Tensor:
            raise RuntimeError("no fakes here")
        return self.head(self.body(x)).mean()


def test_a_line_of_somebody_elses_package_is_not_the_users_to_change(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "theirlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def pick(x):\n    return x[x[:, 0] > 0]\n", encoding="utf8")
    monkeypatch.syspath_prepend(str(package.parent))
    pick = importlib.import_module("theirlib").pick

    class PicksByLibrary(Base):
        def forward(self, x, lengths):
            return self.head(pick(self.body(x))).mean()

    for run in (lambda: profile(PicksByLibrary(), batch()), lambda: capture(PicksByLibrary(), batch())):
        with pytest.raises(ValuesNeeded) as caught:
            run()
        for word in ("asks for a value", "in theirlib (__init__.py:2)", "an option of it", "in its place"):
            assert word in str(caught.value)
        assert "torch.where" not in str(caught.value)


def test_random_branches_are_drawn_the_same_each_time_and_said():
    model, given = LayerDrop(), batch()
    state = torch.get_rng_state()
    first, second = profile(model, given), profile(model, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.num_ops == second.num_ops
    assert any(note.startswith("6 single random numbers") for note in first.notes)
    kept = sum(point.op == "aten.relu" for point in first.timeline)
    assert 0 < kept < 6


def test_a_captured_model_has_its_seconds_and_no_note():
    found = tw.profile(Base2(), (batch()[0],), loss_fn=lambda out, given: out.mean())
    assert found.capture_s > 0
    assert found.notes == ()
    assert tw.profile(Base2(), (batch()[0],), loss_fn=lambda out, given: out.mean(), capture=False).capture_s is None


class Base2(Base):
    def forward(self, x):
        return self.head(self.body(x))


class Long(Base):
    def forward(self, x):
        for _ in range(MAX_FORWARD_OPS):
            x = x + 1.0
        return self.head(self.body(x)).mean()


def test_a_long_forward_is_captured_on_request_only():
    found = tw.profile(Long(), (batch()[0],))
    assert found.capture_s is None
    assert any("was not tried" in note and "--capture" in note for note in found.notes)
