"""A profile that answers repeated calls from earlier ones and runs one step is the profile that follows everything."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiler_models import Built, cnn, gpt2, gru, length_dependent, llama_checkpointed, lstm, mlp, t5, tied
from torch import nn

from tests.grids import slow_but
from trainwright.hardware import resolve
from trainwright.models import zoo
from trainwright.profiler import profile
from trainwright.profiler.values import KnownValues
from trainwright.torch_internals.fakes import new_mode
from trainwright.torch_internals.private import FakeTensor
from trainwright.torch_internals.repeats import RepeatedCalls, signature

aten = torch.ops.aten


class Uneven(nn.Module):
    """Blocks that look alike and are not: one is wider, one is frozen, one skips its activation."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 24, 40, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, w), nn.GELU(), nn.Linear(w, 24)) for w in widths)
        self.blocks[1].requires_grad_(False)
        self.blocks[3][1] = nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Unused(nn.Module):
    """A parameter without a gradient: what the optimizer's state is made from cannot be known before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x):
        return self.used(x).square().mean()


class KeepsTable(nn.Module):
    """The first forward makes a table for all that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(16, 16), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, 16)[None] * torch.ones(400, 1)
        return (self.layer(x) * self.table[: len(x)]).mean()


class Counts(nn.Module):
    """From the second forward on, another layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.later, self.num_calls = nn.Linear(16, 16), nn.Linear(16, 16), 0

    def forward(self, x):
        self.num_calls += 1
        x = self.layer(x)
        return (self.later(x) if self.num_calls > 1 else x).square().mean()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.embed(ids)).mean()


def uneven() -> Built:
    return Uneven(), (torch.randn(10, 24),), None


def unused() -> Built:
    return Unused(), (torch.randn(10, 16),), None


def keeps_table() -> Built:
    return KeepsTable(), (torch.randn(10, 16),), None


def counts() -> Built:
    return Counts(), (torch.randn(10, 16),), None


def sparse() -> Built:
    return Sparse(), (torch.randint(0, 40, (3, 5)),), None


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def unabridged(monkeypatch, build, make_optimizer, hardware):
    """The profile with every call followed by torch, each one priced anew, and the second of two real steps reported."""
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedCalls, "__call__", lambda self, func, args, kwargs: self._run(func, args, kwargs))
        patch.setattr(sys.modules["trainwright.profiler.cost"], "signature", lambda *_: None)
        patch.setattr(sys.modules["trainwright.profiler.run"], "rehearse_update", lambda *_: None)
        return taken(build, make_optimizer, hardware)


def taken(build, make_optimizer=adamw, hardware=None):
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    found = profile(model, batch, loss_fn=loss_fn, make_optimizer=make_optimizer, hardware=hardware)
    return found.model_dump(exclude={"profile_s"})


SINGLE_STEP = (gpt2, t5, gru, lstm, mlp, cnn, length_dependent, llama_checkpointed, uneven)
TWO_STEPS = (tied, unused, keeps_table, counts)
SLOW = (t5, gru, gpt2)


@pytest.mark.parametrize(
    "build",
    slow_but([build for build in (*SINGLE_STEP, *TWO_STEPS) if build not in SLOW], (*SINGLE_STEP, *TWO_STEPS)),
    ids=lambda build: build.__name__,
)
def test_the_short_way_gives_the_same_profile_to_the_byte(build, monkeypatch):
    assert taken(build) == unabridged(monkeypatch, build, adamw, None)


@pytest.mark.parametrize("build", [uneven, unused, sparse], ids=lambda build: build.__name__)
def test_so_it_does_for_other_optimizers_and_devices(build, monkeypatch):
    h200 = resolve("h200")
    assert taken(build, momentum, h200) == unabridged(monkeypatch, build, momentum, h200)


@pytest.mark.parametrize(("build", "num_steps"), [(mlp, 1), (lstm, 1), (uneven, 1), (unused, 2), (counts, 2)])
def test_one_step_is_run_where_it_is_a_steady_one(build, num_steps, monkeypatch):
    module, steps = sys.modules["trainwright.profiler.run"], []
    original = module.reference_step
    monkeypatch.setattr(module, "reference_step", lambda *args, **kwargs: steps.append(1) or original(*args, **kwargs))
    taken(build)
    assert len(steps) == num_steps


def test_what_only_the_first_step_does_is_not_reported():
    """A counter and a table change what the second step is, and it is the second that is told."""
    assert "later" in {point["path"] for point in taken(counts)["timeline"]}
    assert not any(point["op"] == "aten.linspace" for point in taken(keeps_table)["timeline"])


def test_unused_parameters_get_no_state():
    found = taken(unused)
    assert found["optimizer_bytes"] == 2 * 4 * (16 * 16 + 16) + 2 * 4
    assert found["grad_bytes"] == 4 * (16 * 16 + 16)


def test_a_repeated_call_makes_what_the_first_one_made():
    mode = new_mode()
    with mode:
        x = torch.empty(4, 6, 8).transpose(0, 2)
    calls = (
        (aten.mul.Tensor, (x, x), {}),
        (aten.view.default, (x, [8, 2, 3, 4]), {}),
        (aten.split.Tensor, (x, 3, 1), {}),
        (aten.native_layer_norm.default, (x, [4], None, None, 1e-5), {}),
        (aten.sum.dim_IntList, (x, [1], True), {"dtype": torch.float64}),
        (aten.select.int, (x, 1, 2), {}),
    )
    for func, args, kwargs in calls:
        with KnownValues(mode) as known:
            first, second = func(*args, **kwargs), func(*args, **kwargs)
        assert signature(func, args, kwargs) in known._on_fakes._recipes
        for one, other in zip(_listed(first), _listed(second), strict=True):
            assert one is not other
            assert _looks(one) == _looks(other)
            shares = one.untyped_storage() is x.untyped_storage()
            assert (other.untyped_storage() is x.untyped_storage()) == shares
            assert (one.untyped_storage() is other.untyped_storage()) == shares


SIZES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 6]), max_size=4)


@settings(max_examples=300)
@given(
    SIZES,
    st.one_of(SIZES, st.lists(st.sampled_from([-1, 1, 2, 3, 4, 6, 12, 24]), max_size=4)),
    st.sampled_from(["whole", "a part", "turned"]),
)
def test_a_view_is_that_of_torch_whatever_its_sizes(shape, sizes, how):
    mode = new_mode()
    with mode:
        x = torch.empty([shape[0] + 1, *shape[1:]])[1:] if how == "a part" and shape else torch.empty(shape)
        x = x.mT if how == "turned" and x.dim() > 1 else x
        expected = _view_or_none(x, sizes)
    with KnownValues(mode) as known:
        found = _view_or_none(x, sizes)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert _looks(found) == _looks(expected)
        assert found.storage_offset() == expected.storage_offset()
        assert found.untyped_storage() is x.untyped_storage()
    if expected is not None and x.numel() > 0 and x.stride() == torch.empty(x.shape).stride():
        assert signature(aten.view.default, (x, sizes), {}) not in known._on_fakes._recipes, "its sizes say it all"


def _view_or_none(x, sizes):
    try:
        return x.view(sizes)
    except (RuntimeError, ValueError):
        return None


def test_a_call_in_place_gives_back_its_argument():
    mode = new_mode()
    with mode:
        x, y = torch.empty(3, 5), torch.empty(3, 5)
    with KnownValues(mode):
        assert aten.addcmul_.default(x, y, y) is x
        assert aten.addcmul_.default(y, x, x) is y


def test_numbers_types_and_layouts_tell_calls_apart():
    with new_mode():
        x = torch.empty(3, 5)
    keys = [
        signature(aten.mul.Tensor, (x, 1), {}),
        signature(aten.mul.Tensor, (x, 1.0), {}),
        signature(aten.mul.Tensor, (x, True), {}),
        signature(aten.mul.Tensor, (x.t(), 1), {}),
        signature(aten.mul.Tensor, (x.double(), 1), {}),
        signature(aten.sum.dim_IntList, (x, [0]), {}),
        signature(aten.sum.dim_IntList, (x, [0], True), {}),
        signature(aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float64}),
    ]
    assert len(set(keys)) == len(keys)
    assert None not in keys


def test_what_depends_on_more_than_shapes_has_no_signature():
    with new_mode():
        x = torch.empty(3, 5)
    assert signature(aten.nonzero.default, (x,), {}) is None
    assert signature(aten.mul.Tensor, (torch.zeros(3, 5), 2), {}) is None
    assert signature(aten.as_strided.default, (x, [3], [1]), {}) is None


def test_of_eighty_layers_few_calls_are_followed(monkeypatch):
    """Deterministic where seconds are not: how many calls torch itself is asked to follow, of all that a step makes."""
    followed = []
    original = KnownValues._follow
    monkeypatch.setattr(KnownValues, "_follow", lambda *args: followed.append(args[1]) or original(*args))
    model, batch = zoo.build("llama-3-70b", dtype="bf16", num_hidden_layers=8)
    found = profile(model, batch, timeline=False)
    assert found.num_ops > 2000
    assert len(followed) < 500


def _listed(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _looks(tensor):
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad)


SLICES = [(0, 1, 5), (1, 0, 3, 2), (-1, -4, -1), (0, None, None), (1, 7, 3), (0, -100, 100, 3), (1, 2)]


@pytest.mark.parametrize("asked", SLICES)
def test_a_part_is_cut_where_torch_cuts_it(asked):
    """From a view that begins within its memory, and is not contiguous; the second time it is not torch that answers."""
    mode = new_mode()
    with mode:
        base = torch.empty(8, 6, 5)
    real = torch.empty(8, 6, 5).transpose(0, 1)[1:]
    with KnownValues(mode):
        view = base.transpose(0, 1)[1:]
        parts = [aten.slice.Tensor(view, *asked) for _ in range(2)]
    expected = aten.slice.Tensor(real, *asked)
    for part in parts:
        assert (part.shape, part.stride()) == (expected.shape, expected.stride())
        assert part.storage_offset() == expected.storage_offset() or not expected.numel()
        assert part.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_views_of_different_places_in_one_buffer_keep_their_places():
    mode = new_mode()
    with mode:
        flat = torch.empty(40)
    with KnownValues(mode):
        parts = [flat.narrow(0, start, 12).view(3, 4).t()[1] for start in (0, 5, 28)]
        halves = [part.view(torch.bfloat16) for part in (flat[4:8], flat[8:12])]
    assert [part.storage_offset() for part in parts] == [1, 6, 29]
    assert [part.storage_offset() for part in halves] == [8, 16]
    assert all(part.stride() == (4,) for part in parts)


def test_a_part_along_a_dimension_that_is_not_there_is_refused():
    mode = new_mode()
    with mode:
        x = torch.empty(3, 4)
    with KnownValues(mode), pytest.raises(IndexError):
        aten.slice.Tensor(x, 2, 0, 1)


def test_memory_that_others_fill_has_no_values() -> None:
    """What a collective or a fetch allocates is written by nobody in a simulation: small or not, it holds no indices."""
    known = torch.arange(4)
    for fills_memory in (True, False):
        mode = new_mode()
        with KnownValues(mode, fills_memory=fills_memory):
            for made in (torch.empty(3, dtype=torch.long), known.new_empty(3), torch.empty_like(known)):
                assert isinstance(made, FakeTensor) is not fills_memory
            assert torch.zeros(3).sum().item() == 0


class UpdatedInBackward(nn.Module):
    """Wide layers, each of which drops its gradient as soon as it is there, as a loop does that updates in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)])
        self.is_hooked = False

    def forward(self, x):
        if not self.is_hooked:
            self.is_hooked = True
            for param in self.parameters():
                param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        return self.layers(x).square().mean()


def test_gradients_that_no_step_holds_reserve_nothing():
    model = UpdatedInBackward()
    found = profile(
        model,
        (torch.zeros(2, 2048),),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        hardware=resolve("a100"),
    )
    layer_bytes = 4 * 2048**2
    assert found.param_bytes == 16 * layer_bytes
    assert found.peak_bytes < 19 * layer_bytes
    assert found.reserved_bytes < 20 * layer_bytes
