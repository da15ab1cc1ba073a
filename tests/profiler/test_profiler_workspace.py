"""What single kernels take inside, modelled or seen, against the allocator's records of the very call."""

from __future__ import annotations

import pytest
import torch
from profiler_models import skip_without_bf16_lstm
from torch.utils.checkpoint import checkpoint

from trainwright.ops.flops import flops
from trainwright.profiler import MemoryTracker, measure
from trainwright.profiler.kernels import probe as probe_module
from trainwright.profiler.kernels.fake_kernels import run_fake_kernel
from trainwright.profiler.kernels.generator_states import seen_generator_states
from trainwright.profiler.kernels.probe import Probe, probe
from trainwright.profiler.kernels.workspace import output_bytes, workspace_bytes
from trainwright.profiler.values import KnownValues
from trainwright.torch_internals.fakes import new_mode

aten = torch.ops.aten
BF16 = torch.bfloat16
SCALARS_BYTES = 32
"""Numbers that become tensors, left out of the model."""


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def taken(func, *args, **kwargs) -> int:
    """What the real call takes beside its results."""
    results = []
    func(*args, **kwargs)
    record = measure(lambda: results.append(func(*args, **kwargs)), num_steps=1)
    return record.peak_delta_bytes - record.end_delta_bytes


def predicted(func, *args, **kwargs) -> int:
    return workspace_bytes(func, args, kwargs, func(*args, **kwargs))


def floats(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def strided(*shape, dtype=torch.float32) -> torch.Tensor:
    """The same shape, its last two dims the other way round in memory."""
    return floats(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def image(layout: str, dtype=torch.float32) -> torch.Tensor:
    x = floats(2, 8, 6, 4, dtype=dtype)
    return x.to(memory_format=torch.channels_last) if layout == "channels last" else strided(2, 8, 6, 4, dtype=dtype)


X, T, B = floats(4, 9, 16), strided(4, 9, 16), floats(4, 9, 16, dtype=BF16)
INTEGERS, MASK = torch.arange(4 * 9 * 16).view(4, 9, 16), floats(4, 9, 16) > 0
LABELS, INDEX = torch.arange(36) % 16, torch.arange(4 * 9 * 16).view(4, 9, 16) % 4
ONES, ROWS = torch.ones(16), torch.ones(4, 9, 1)
HALVES = [True, True, True]
ELEMENTWISE = [
    (aten.add.Tensor, X, B),
    (aten.mul.Tensor, B, X[0, 0]),
    (aten.sub.Tensor, X, INTEGERS),
    (aten.div.Tensor, INTEGERS, INTEGERS),
    (aten.div.Tensor, X, B),
    (aten.eq.Tensor, B, X),
    (aten.maximum.default, X, B),
    (aten.addcmul.default, X, B, X),
    (aten.where.self, MASK, X, B),
    (aten.masked_fill.Scalar, X, MASK, 0.0),
    (aten.add_.Tensor, floats(4, 9, 16, dtype=BF16), X),
    (aten.add_.Tensor, floats(4, 9, 16), B),
    (aten.mul.Tensor, X, T),
    (aten.clone.default, X),
    (aten.silu_backward.default, T, X),
]
COPIES = [
    (aten._log_softmax.default, X, 1, False),
    (aten._log_softmax.default, T, 2, False),
    (aten._softmax.default, T, 1, False),
    (aten._log_softmax_backward_data.default, T, X, 2, torch.float32),
    (aten._softmax_backward_data.default, T, T, 2, torch.float32),
    (aten._safe_softmax.default, X, -1),
    (aten._safe_softmax.default, T, -1),
    (aten.native_layer_norm.default, T, [16], ONES, ONES, 1e-5),
    (aten.native_layer_norm_backward.default, T, X, [16], ROWS, ROWS, ONES, ONES, HALVES),
    (aten.native_layer_norm_backward.default, T, T, [16], ROWS, ROWS, ONES, ONES, [True, False, False]),
    (aten.native_layer_norm_backward.default, B, B, [16], ROWS, ROWS, ONES, ONES, HALVES),
    (aten.gelu_backward.default, T, X),
    (aten.gelu_backward.default, X, T),
    (aten.nll_loss_forward.default, strided(36, 16), LABELS, None, 1, -100),
    (aten.embedding.default, floats(30, 16), torch.arange(9).expand(4, 9)),
    (aten.embedding_dense_backward.default, T, torch.arange(36).view(4, 9), 40, -1, False),
    (aten.roll.default, X, [1, 2, 3], [0, 1, 2]),
    (aten.roll.default, X, [1], [0]),
    (aten.logsumexp.default, X, [1]),
    (aten.mse_loss.default, X, T),
    (aten.mse_loss.default, X, X, 0),
    (aten.smooth_l1_loss.default, X, X),
    (aten.huber_loss.default, X, X),
    (aten.binary_cross_entropy_with_logits.default, X, X.sigmoid()),
    (aten._cdist_forward.default, T, X, 2.0, None),
    (aten._cdist_backward.default, strided(4, 9, 9), X, T, 2.0, floats(4, 9, 9).abs()),
    (aten._euclidean_dist.default, X, X[:, :5]),
    (aten._euclidean_dist.default, T, X),
    (aten.searchsorted.Tensor, torch.arange(5.0), T),
    (aten.median.default, X),
    (aten.median.dim, T, 1),
    (aten.median.dim, T, 2),
    (aten.median.dim, X[0, 0, 0], 0),
    (aten._euclidean_dist.default, floats(64, 8), floats(32, 8)),
    (aten.cholesky_solve.default, floats(9, 2), torch.eye(9)),
    (aten.linalg_inv_ex.default, torch.eye(40).repeat(3, 1, 1)),
    (aten._linalg_svd.default, floats(40, 30)),
    (aten.linalg_matrix_exp.default, 3 * floats(40, 40)),
    (aten.linalg_matrix_exp.default, floats(6, 40, 40)),
]
REDUCED = [
    (aten.sum.dim_IntList, B, [0, 2]),
    (aten.sum.dim_IntList, B, [0, 1]),
    (aten.sum.dim_IntList, B, [1]),
    (aten.sum.dim_IntList, strided(4, 9, 16, dtype=BF16), [0, 1]),
    (aten.sum.default, B),
    (aten.sum.default, MASK),
    (aten.mean.dim, B, [1]),
    (aten.mean.default, B),
    (aten.mean.dim, X, [1]),
    (aten.gather.default, B, 0, INDEX),
    (aten.gather.default, X, 0, INDEX),
    (aten.scatter_add.default, B, 0, INDEX, B),
    (aten.scatter_add.default, X, 0, INDEX, X),
    (aten.scatter.src, B, 0, INDEX, B),
]

EXPANDED = torch.ones(()).expand(40, 50)
PRODUCTS = [
    (aten.mm.default, strided(12, 8), floats(8, 5)),
    (aten.mm.default, strided(12, 8).t(), floats(12, 5)),
    (aten.mm.default, floats(12, 8)[:, :4], floats(8, 5)[:4]),
    (aten.mm.default, EXPANDED.t(), floats(40, 7)),
    (aten.mv.default, strided(12, 8), floats(8)),
    (aten.addmm.default, floats(5), strided(12, 8), floats(8, 5)),
    (aten.bmm.default, strided(3, 4, 5), floats(3, 5, 6)),
    (aten.bmm.default, strided(3, 40, 50), floats(3, 50, 60)),
    (aten.bmm.default, floats(3, 50, 40).mT, floats(3, 50, 60)),
    (aten.baddbmm.default, floats(3, 40, 60), EXPANDED.expand(3, 40, 50), floats(3, 50, 60)),
]
WAVES, SPECTRA = floats(12, 8, dtype=torch.cfloat), floats(3, 40, 50, dtype=torch.cfloat)
CONJUGATES = [
    (aten.mm.default, WAVES.conj(), floats(8, 5, dtype=torch.cfloat)),
    (aten.mm.default, WAVES.t().conj(), WAVES.conj()),
    (aten.bmm.default, SPECTRA.conj(), floats(3, 50, 60, dtype=torch.cfloat)),
    (aten.bmm.default, SPECTRA.mT, SPECTRA.conj()),
    (aten.mul.Tensor, WAVES.conj(), WAVES),
    (aten._fft_c2r.default, SPECTRA.conj(), [2], 2, 98),
    (aten.clone.default, WAVES.conj()),
    (aten.transpose.int, WAVES.conj(), 0, 1),
]
GRID = floats(2, 5, 5, 2).tanh()
UNWRITTEN = [
    (aten._trilinear.default, floats(20, 16), floats(4, 16, 16), floats(20, 16), [1, 3], [0], [1, 2], [2, 3]),
    (aten._fft_r2c.default, X, [1], 0, True),
    (aten._fft_c2r.default, torch.fft.rfft(X, dim=1), [1], 2, 9),
    (aten._fft_c2c.default, torch.fft.fft(X, dim=1), [1], 0, False),
    (aten.avg_pool3d_backward.default, floats(2, 4, 2, 2, 2), floats(2, 4, 4, 4, 4), [2], [], [0], False, True, None),
    (aten.upsample_trilinear3d_backward.default, floats(2, 4, 4, 4, 4), [4, 4, 4], [2, 4, 2, 2, 2], False, None),
    (
        aten.grid_sampler_2d_backward.default,
        floats(2, 8, 5, 5),
        image("channels last"),
        GRID,
        0,
        0,
        False,
        [True, True],
    ),
    (aten.replication_pad2d_backward.default, floats(2, 8, 8, 6), image("strided"), [1, 1, 1, 1]),
    (aten.soft_margin_loss_backward.default, ONES[0], X, X.sign(), 1),
    (aten.sort.default, X, 1, False),
    (aten.kthvalue.default, X, 3, 1, False),
    (aten.dist.default, X, T),
]


@pytest.mark.parametrize(
    "call", [*ELEMENTWISE, *COPIES, *REDUCED, *PRODUCTS, *CONJUGATES, *UNWRITTEN], ids=lambda call: str(call[0])
)
def test_native_kernels(call):
    assert predicted(*call) == pytest.approx(taken(*call), abs=SCALARS_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("layouts", [("strided", "channels last"), ("channels last",) * 2, ("contiguous",) * 2])
def test_batch_norm_backward(layouts, dtype):
    grad, x = (
        floats(2, 8, 6, 4, dtype=dtype) if layout == "contiguous" else image(layout, dtype) for layout in layouts
    )
    ones = torch.ones(8)
    call = (aten.native_batch_norm_backward.default, grad, x, ones, ones, ones, ones, ones, True, 1e-5, HALVES)
    assert predicted(*call) == pytest.approx(taken(*call), abs=3 * 8 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("length", "others"), [(37, 37), (5, 700), (200, 40), (800, 30)])
def test_flash_attention(length, others, dtype):
    query, key = floats(2, 3, length, 24, dtype=dtype), floats(2, 3, others, 24, dtype=dtype)
    call = (aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, key)
    assert predicted(*call) == taken(*call)
    out, log_sums = call[0](query, key, key)
    back = (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        out,
        query,
        key,
        key,
        out,
        log_sums,
        0.0,
        False,
    )
    assert predicted(*back) == taken(*back)
    if dtype is torch.float32:
        assert workspace_bytes(back[0], back[1:], {}, (), probe=False) == taken(*back)


CONVOLUTIONS = [
    # n, c_in, c_out, kernel, stride, groups
    (3, 3, 32, 3, 1, 1),
    (3, 20, 10, 1, 2, 1),
    (2, 24, 24, 3, 1, 24),
    (1, 17, 31, 3, 1, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
@pytest.mark.parametrize(("n", "c_in", "c_out", "kernel", "stride", "groups"), CONVOLUTIONS)
def test_convolutions_are_seen(n, c_in, c_out, kernel, stride, groups, dtype):
    x, weight = floats(n, c_in, 14, 14, dtype=dtype), floats(c_out, c_in // groups, kernel, kernel, dtype=dtype)
    how = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    call = (aten.convolution.default, x, weight, None, *how)
    assert predicted(*call) == taken(*call)
    gradient = aten.convolution.default(*call[1:]).mean((2, 3), keepdim=True)
    view = gradient.expand(
        n, c_out, *aten.convolution.default(*call[1:]).shape[2:]
    )  # as the backward of a mean gives it
    back = (aten.convolution_backward.default, view, x, weight, [0], *how, [True, True, False])
    assert predicted(*back) == taken(*back)


LARGE_CONVOLUTIONS = [
    # n, c_in, c_out, size, kernel, stride, groups; the last two take what no formula here says
    (20, 3, 384, (128, 128), 32, 32, 1),
    (20, 32, 64, (32, 32), 3, 1, 1),
    (20, 48, 48, (56, 56), 7, 1, 48),
    (12, 128, 256, (1, 4, 4), 3, 1, 1),
]


@pytest.mark.parametrize(("n", "c_in", "c_out", "size", "kernel", "stride", "groups"), LARGE_CONVOLUTIONS)
def test_convolutions_too_large_to_be_made(monkeypatch, n, c_in, c_out, size, kernel, stride, groups):
    sides = len(size)
    x, weight = floats(n, c_in, *size), floats(c_out, c_in // groups, *[kernel] * sides)
    padding = 0 if kernel == stride else kernel // 2
    how = ([stride] * sides, [padding] * sides, [1] * sides, False, [0] * sides, groups)
    call = (aten.convolution.default, x, weight, None, *how)
    out = aten.convolution.default(*call[1:])
    mask = [c_in > 3, True, False]
    back = (aten.convolution_backward.default, torch.randn_like(out), x, weight, [0], *how, mask)
    for each, result in ((call, out), (back, aten.convolution_backward.default(*back[1:]))):
        seen = taken(*each)
        monkeypatch.setattr(probe_module, "LIMIT_FLOPS", flops(each[0], each[1:], {}, result)[0] - 1)
        assert probe(each[0], each[1:], {}, result) is None
        assert predicted(*each) == pytest.approx(seen, rel=0.003, abs=16384)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_lstm_layer_keeps_and_takes_what_is_seen(dtype):
    if dtype is BF16:
        skip_without_bf16_lstm()
    x, state = floats(20, 5, 32, dtype=dtype), floats(5, 48, dtype=dtype)
    weights = [floats(192, size, dtype=dtype) for size in (32, 48)] + [floats(192, dtype=dtype)] * 2
    call = (x, *weights, state, state, False, [], 2, 48, 2, True, False, True, True)
    out = aten.mkldnn_rnn_layer.default(*call)
    assert predicted(aten.mkldnn_rnn_layer.default, *call) == taken(aten.mkldnn_rnn_layer.default, *call)
    with new_mode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in call]
        fake_out = aten.mkldnn_rnn_layer.default(*fakes)
    assert output_bytes(aten.mkldnn_rnn_layer.default, tuple(fakes), fake_out) == {3: out[3].nbytes}
    given = (*out[:3], out[0], state, state, False, 2, 48, 2, True, True, False, [], True, out[3])
    back = (aten.mkldnn_rnn_layer_backward.default, x, *weights, state, state, *given)
    assert predicted(*back) == taken(*back)


@pytest.mark.parametrize("shape", [(64, 111, 64), (96, 768, 24)])
def test_products_in_bf16(shape):
    rows, inner, columns = shape
    call = (aten.mm.default, floats(inner, rows, dtype=BF16).t(), floats(inner, columns, dtype=BF16))
    assert predicted(*call) == taken(*call)
    assert predicted(aten.mm.default, floats(rows, inner), floats(inner, columns)) == 0


def test_large_calls_are_not_made(monkeypatch):
    monkeypatch.setattr(probe_module, "_make_call", lambda *call: pytest.fail("a call was made"))
    x = torch.empty(1000, 5000, device="meta", dtype=BF16)
    assert probe(aten.mm.default, (x, x.t()), {}, torch.empty(1000, 1000, device="meta")) is None
    small = torch.empty(3000, 3000, device="meta", dtype=BF16)  # within the bytes, beyond the FLOPs
    assert probe(aten.mm.default, (small[:900], small), {}, small[:900]) is None


def test_a_call_is_made_once_a_signature_and_in_peace():
    x, weight = floats(2, 4, 9, 9), floats(5, 4, 3, 3)
    call = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    state = torch.get_rng_state()
    with KnownValues(new_mode()), MemoryTracker() as tracker, torch.autocast("cpu", dtype=BF16):
        found = probe(aten.convolution.default, call, {}, torch.empty(2, 5, 7, 7))
        assert tracker.num_ops == 1  # the empty one
    assert isinstance(found, Probe)
    assert found is probe(aten.convolution.default, call, {}, torch.empty(2, 5, 7, 7))
    assert found.output_bytes == (4 * 2 * 5 * 7 * 7,)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_profilers_session_is_left_alone():
    x, weight = floats(2, 4, 11, 11), floats(5, 4, 3, 3)
    call = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with torch.profiler.profile() as session:
        out = aten.convolution.default(*call)
        assert probe(aten.convolution.default, call, {}, out) is None
    assert "aten::convolution" in {event.name for event in session.events()}
    assert probe(aten.convolution.default, call, {}, out) is not None


def test_a_call_that_fails_has_a_formula():
    x, weight = floats(2, 4, 9, 9), floats(5, 3, 3, 3)  # channels that do not fit
    call = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert probe(aten.convolution.default, call, {}, torch.empty(2, 5, 7, 7)) is None


def test_generator_states_count_and_the_function_comes_back():
    original, weight = torch.get_rng_state, torch.ones(50, requires_grad=True)
    state_bytes = original().nbytes
    with MemoryTracker() as tracker, tracker.phase("forward"):
        out = checkpoint(torch.sin, weight, use_reentrant=False)
        assert tracker.live_bytes == out.nbytes + state_bytes
    with pytest.raises(ZeroDivisionError), seen_generator_states(lambda state: None):
        raise ZeroDivisionError
    assert torch.get_rng_state is original
    assert torch.random.get_rng_state is original
    with MemoryTracker("gpu") as tracker:
        kept = torch.get_rng_state()
        assert (tracker.live_bytes, kept.nbytes) == (0, state_bytes)


def test_grouped_products_have_a_shape():
    rows, matrices, ends = floats(20, 16), floats(4, 16, 8), torch.tensor([3, 8, 8, 20], dtype=torch.int32)
    for call in ((rows, matrices, ends), (rows.t(), floats(20, 8), ends), (floats(4, 5, 16), matrices)):
        found = run_fake_kernel(aten._grouped_mm.default, call, {})
        assert found.shape == aten._grouped_mm.default(*call).shape
    assert run_fake_kernel(aten.mm.default, (rows, rows.t()), {}) is NotImplemented


def test_ctc_has_a_shape_where_lengths_are_known():
    scores, labels = floats(11, 2, 32).log_softmax(-1), torch.arange(1, 8)
    lengths, targets = torch.tensor([11, 11]), torch.tensor([4, 3])
    for func, given in ((aten._ctc_loss.Tensor, (lengths, targets)), (aten._ctc_loss.default, ([11, 11], [4, 3]))):
        found = run_fake_kernel(func, (scores, labels, *given), {})
        assert [part.shape for part in found] == [part.shape for part in func(scores, labels, *given)]
    with new_mode() as mode:
        unknown = mode.from_tensor(targets)
    assert run_fake_kernel(aten._ctc_loss.Tensor, (scores, labels, lengths, unknown), {}) is NotImplemented
