"""`MemoryTracker` and `measure`: storages followed one by one, against sizes known by hand and the allocator."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.artifacts import Device
from trainwright.profiler import MemoryTracker, measure, op_seconds, static_bytes, storage_bytes
from trainwright.profiler.kernels.workspace import workspace_bytes
from trainwright.profiler.time import rate
from trainwright.profiler.values import KnownValues
from trainwright.torch_internals.fakes import new_mode

aten = torch.ops.aten


@pytest.fixture(params=["real", "fake"])
def tensors(request):
    """Run the test on real tensors, and on fake ones."""
    if request.param == "real":
        yield
    else:
        with new_mode():
            yield


def test_a_storage_counts_once_and_until_its_last_view_dies(tensors):
    with MemoryTracker() as tracker:
        x = torch.ones(100)
        view = x.view(10, 10).t()[2:]
        assert (tracker.live_bytes, tracker.num_ops) == (400, 4)
        del x
        assert tracker.live_bytes == 400
        del view
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 400)


def test_what_autograd_holds_is_alive_and_called_saved(tensors):
    weight = torch.ones(50, requires_grad=True)
    with MemoryTracker() as tracker:
        tracker.watch([weight], "param")
        with tracker.phase("forward"):
            hidden = weight.exp()
            loss = hidden.sin().sum()
            del hidden
            saved = tracker.mark_forward_end()
        # exp keeps its output, which is what sin keeps too; the loss is a scalar
        assert saved == tracker.saved_bytes == 200 + 4
        assert tracker.live_breakdown["saved"] == 204
        with tracker.phase("backward"):
            loss.backward()
        assert tracker.live_breakdown["grad"] == 200
        assert tracker.live_bytes == 200 + 200 + 4


def test_categories_of_a_whole_step(tensors):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with MemoryTracker() as tracker:
        x = torch.ones(16, 8)
        tracker.watch([x], "input")
        tracker.watch(model.parameters(), "param")
        for _ in range(2):
            optimizer.zero_grad()
            with tracker.phase("forward"):
                loss = model(x).square().sum()
                tracker.mark_forward_end()
            with tracker.phase("backward"):
                loss.backward()
            with tracker.phase("update"):
                optimizer.step()
            del loss
        size = 4 * (8 * 4 + 4)
        expected = {"param": size, "grad": size, "optimizer": 2 * size + 2 * 4}
        assert {key: value for key, value in tracker.live_breakdown.items() if value} == expected
        assert tracker.live_bytes == 4 * size + 8


def test_the_peak_names_op_phase_and_module(tensors):
    with MemoryTracker() as tracker:
        tracker.path = "block.3"
        with tracker.phase("forward"):
            big = torch.ones(1000).exp()
        del big
        tracker.path = ""
        torch.ones(10)
    assert tracker.peak_at == "forward: aten.exp in block.3"
    assert tracker.peak_bytes == sum(tracker.peak_breakdown.values()) == 8000
    tracker.reset_peak()
    assert tracker.peak_bytes == tracker.live_bytes == 0


def test_a_gpu_target_rounds_each_storage():
    with MemoryTracker("gpu") as tracker:
        kept = [torch.ones(1), torch.ones(128), torch.ones(129)]
        assert tracker.live_bytes == 512 + 512 + 1024
        del kept


def test_sparse_gradients_count_their_parts():
    table = nn.Embedding(100, 8, sparse=True)
    with MemoryTracker() as tracker:
        tracker.watch(table.parameters(), "param")
        with tracker.phase("backward"):
            table(torch.tensor([1, 2, 3])).sum().backward()
        assert tracker.live_breakdown["grad"] == 3 * 8 * 4 + 3 * 8


def test_gradients_added_by_the_engine_take_no_third_buffer():
    """The engine adds in place unless a dispatch mode watches it: the watched peak is the unwatched one."""
    x = torch.ones(1000, requires_grad=True)

    def step():
        y = x.exp()
        (y.sin().sum() + y.cos().sum() + y.tanh().sum()).backward()
        x.grad = None

    check_watched_peak(step)


def check_watched_peak(step):
    """Check that the peak of a backward that a dispatch mode watches is that of one that nothing watches."""
    step()
    peak = measure(step, num_steps=1).peak_delta_bytes
    with MemoryTracker() as tracker, tracker.phase("backward"):
        step()
    assert tracker.peak_bytes == pytest.approx(peak, abs=64)


INDEX = torch.arange(100).view(10, 10) % 10
ROW = INDEX[0].clone()
PICKS = {
    "gather": lambda x: x.gather(0, INDEX),
    "cummax": lambda x: x.cummax(0)[0],
    "max": lambda x: x.max(1)[0],
    "median": lambda x: x.median(0)[0],
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(3, 1)[0],
    "index_select": lambda x: x.index_select(0, ROW),
    "index": lambda x: x[ROW],
    "take": lambda x: x.take(INDEX),
    "trace": lambda x: x.trace(),
}


@pytest.mark.parametrize("name", PICKS)
def test_gradients_of_what_was_picked_are_scattered_in_place(name):
    """Under a dispatch mode torch scatters them into a copy of its own zeros."""
    x = torch.randn(10, 10, requires_grad=True)

    def step():
        PICKS[name](x.exp()).sum().backward()
        x.grad = None

    check_watched_peak(step)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.binary_cross_entropy, F.soft_margin_loss]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_has_the_memory_that_its_kernel_leaves_it(loss, reduction):
    """Some give a number in the memory of the losses of all elements."""
    x, y = torch.rand(8, 5), torch.rand(8, 5)
    mode = new_mode()
    with mode:
        fakes = torch.empty(8, 5), torch.empty(8, 5)
    with KnownValues(mode):
        found = loss(*fakes, reduction=reduction)
    real = loss(x, y, reduction=reduction)
    assert (found.shape, found.untyped_storage().nbytes()) == (real.shape, real.untyped_storage().nbytes())


def test_wrapped_tensors_are_followed_to_what_they_hold():
    from torch.testing._internal.two_tensor import TwoTensor

    with MemoryTracker() as tracker:
        x = TwoTensor(torch.ones(100), torch.ones(100))
        before = tracker.live_bytes
        y = x + x
        assert tracker.live_bytes - before == 800
        del x, y
    gc.collect()
    assert tracker.live_bytes == 0


def test_bad_words_are_refused():
    with pytest.raises(ValueError, match="cpu or gpu"):
        MemoryTracker("tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="category"):
        MemoryTracker().watch([], "weights")


def test_hooks_end_with_the_tracker():
    weight = torch.ones(3, requires_grad=True)
    with MemoryTracker() as tracker:
        tracker.watch([weight], "param")
    weight.sum().backward()
    assert tracker.live_breakdown["grad"] == 0


def test_measure_tells_steps_apart():
    held = []

    def step():
        held.append(torch.ones(1000))
        torch.ones(500 * len(held))

    record = measure(step, num_steps=3)
    assert [record.peak_of_step(index) for index in range(3)] == [6000, 12000, 18000]
    assert record.peak_of_step(-1) == record.peak_delta_bytes == 18000
    assert record.end_delta_bytes == 12000


def test_measure_passes_the_steps_error_on():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 // 0)


def test_static_bytes_count_views_once():
    model = nn.BatchNorm1d(10)
    model.alias = nn.Parameter(model.weight.detach().view(2, 5))
    assert static_bytes(model) == 4 * 40 + 8
    x = torch.ones(100)
    assert storage_bytes([x, x[:10], x.t()]) == 400


CONVOLUTIONS = [
    # n, c_in, c_out, size, kernel, stride, groups
    (4, 3, 32, 32, 3, 1, 1),
    (4, 32, 64, 28, 3, 1, 1),
    (4, 32, 64, 28, 3, 2, 1),
    (4, 64, 32, 14, 1, 2, 1),
    (4, 64, 32, 14, 1, 1, 1),
    (4, 64, 64, 14, 3, 1, 64),
    (1, 17, 31, 19, 3, 1, 1),
]


@pytest.mark.parametrize(("n", "c_in", "c_out", "size", "kernel", "stride", "groups"), CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formulas_of_convolution_workspaces(n, c_in, c_out, size, kernel, stride, groups, dtype):
    if dtype is torch.float32 and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("the layouts that oneDNN takes were learnt with AVX512")
    torch.set_num_threads(1)
    x, weight = (
        torch.randn(n, c_in, size, size, dtype=dtype),
        torch.randn(c_out, c_in // groups, kernel, kernel, dtype=dtype),
    )
    call = (x, weight, None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    out = aten.convolution.default(*call)
    record = measure(lambda: aten.convolution.default(*call), num_steps=1)
    predicted = out.nbytes + workspace_bytes(aten.convolution.default, call, {}, out, probe=False)
    assert predicted == pytest.approx(record.peak_delta_bytes, rel=0.06)


def test_roofline():
    device = Device(
        name="x",
        kind="gpu",
        memory_bytes=1,
        flops_per_s={"fp32": 1e12, "bf16": 4e12},
        conv_flops_per_s={"fp32": 1e11},
        bandwidth_bytes_per_s=1e10,
        launch_s=1e-6,
    )
    a = torch.empty(1000, 1000, device="meta")
    assert op_seconds(device, aten.mm.default, (a, a), {}, a) == pytest.approx(2e-3 + 1e-6)
    half = a.to(torch.bfloat16)
    assert op_seconds(device, aten.mm.default, (half, half), {}, half) == pytest.approx(6e-4 + 1e-6)  # bandwidth binds
    assert op_seconds(device, aten.add.Tensor, (a, a), {}, a) == pytest.approx(1.2e-3 + 1e-6)
    assert op_seconds(device, aten.t.default, (a,), {}, a.t()) == 0
    image, weight = torch.empty(4, 8, 10, 10, device="meta"), torch.empty(16, 8, 3, 3, device="meta")
    call = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = F.conv2d(image, weight, padding=1)
    seconds = op_seconds(device, aten.convolution.default, call, {}, out)
    assert seconds == pytest.approx(2 * 8 * 9 * out.numel() / 1e11 + 1e-6)


def test_rates_fall_back_to_a_sibling_then_to_a_wider_type():
    assert rate({"fp32": 1.0, "bf16": 2.0}, torch.float16) == 2.0
    assert rate({"fp32": 1.0}, torch.bfloat16) == 1.0
    assert rate({"fp64": 3.0}, torch.float32) == 3.0
    with pytest.raises(ValueError, match="rate"):
        rate({}, torch.float32)


def permuted(*shape):
    """Tensors of `shape`, their memory in every order of the dims."""
    for order in itertools.permutations(range(len(shape))):
        inverse = [order.index(dim) for dim in range(len(shape))]
        yield torch.randn([shape[dim] for dim in order]).permute(inverse)


LAYOUTS = {
    "layer_norm": lambda g: aten.native_layer_norm_backward(
        g,
        torch.ones(4, 8, 16),
        [16],
        torch.ones(4, 8, 1),
        torch.ones(4, 8, 1),
        torch.ones(16),
        None,
        [True, True, False],
    ),
    "log_softmax": lambda g: aten._log_softmax_backward_data(g, torch.ones(4, 8, 16), -1, torch.float32),
    "softmax": lambda g: aten._softmax_backward_data(g, torch.ones(4, 8, 16), -1, torch.float32),
    "mse": lambda x: aten.mse_loss_backward(torch.ones(()), x, torch.ones(4, 8, 16), 1),
    "hardswish": lambda g: aten.hardswish_backward(g, torch.ones(4, 8, 16)),
    "gelu": lambda g: aten.gelu_backward(g, torch.ones(4, 8, 16)),
}
IMAGE_LAYOUTS = {
    "batch_norm": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    "batch_norm of x": lambda x: aten.native_batch_norm_backward(
        torch.ones(2, 8, 4, 6), x, None, None, None, torch.ones(8), torch.ones(8), True, 1e-5, [True, False, False]
    ),
    "convolution": lambda x: aten.convolution(
        x, torch.ones(8, 8, 3, 3), None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1
    ),
    "pooling": lambda x: aten.max_pool2d_with_indices(x, [2, 2]),
}


@pytest.mark.parametrize(
    ("call", "shape"),
    [*((call, (4, 8, 16)) for call in LAYOUTS.values()), *((call, (2, 8, 4, 6)) for call in IMAGE_LAYOUTS.values())],
    ids=[*LAYOUTS, *IMAGE_LAYOUTS],
)
def test_fake_results_lie_in_memory_as_real_ones(call, shape):
    def strides(value):
        return [None if item is None else item.stride() for item in (value if isinstance(value, tuple) else [value])]

    for x in permuted(*shape):
        expected = strides(call(x))
        with KnownValues(new_mode()):
            fake = torch.empty_strided(x.shape, x.stride())
            assert strides(call(fake)) == expected
