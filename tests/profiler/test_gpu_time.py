"""Times of a GPU's kernels follow what decides them: shape, layout, type, length, and the host that issues them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.artifacts import Device, Overheads
from trainwright.hardware import resolve
from trainwright.ops.flops import bytes_moved
from trainwright.profiler import op_seconds, profile
from trainwright.profiler.caching import CachingAllocator
from trainwright.profiler.kernels.workspace_native import operand_copies

aten = torch.ops.aten
A100 = resolve("a100").device


def seconds(device: Device, func, *args, out, **kwargs) -> float:
    return op_seconds(device, func, args, kwargs, out) - device.launch_s


def empty(*shape: int, dtype: torch.dtype = torch.half) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def product(rows: int, depth: int, columns: int, dtype: torch.dtype = torch.half, device: Device = A100) -> float:
    args = empty(rows, depth, dtype=dtype), empty(depth, columns, dtype=dtype)
    return seconds(device, aten.mm.default, *args, out=empty(rows, columns, dtype=dtype))


def rate(rows: int, depth: int, columns: int) -> float:
    return 2 * rows * depth * columns / product(rows, depth, columns)


def test_products_reach_less_where_tiles_do_not_fill_the_units() -> None:
    large = rate(8192, 8192, 8192)
    assert 0.9 * A100.flops_per_s["fp16"] < large <= A100.flops_per_s["fp16"]
    assert rate(512, 8192, 512) < 0.7 * large  # few tiles
    assert rate(8192, 64, 8192) < 0.5 * large  # a short sum
    tiles_of_one_wave = 108 * 128
    assert product(tiles_of_one_wave + 1, 4096, 256) > 1.2 * product(tiles_of_one_wave, 4096, 256)


def test_an_expanded_scalar_is_copied_and_the_copy_takes_time() -> None:
    whole, scalar = empty(4096, 4096), torch.empty((), dtype=torch.half, device="meta").expand(4096, 4096)
    assert operand_copies([whole, whole.t()]) == 0
    times = [seconds(A100, aten.mm.default, left, whole, out=whole) for left in (whole, scalar)]
    assert operand_copies([whole, scalar]) > 0
    assert times[0] < times[1]


def convolution(x: torch.Tensor, device: Device = A100) -> float:
    weight = empty(64, 64, 3, 3, dtype=x.dtype).contiguous(memory_format=torch.channels_last)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return seconds(
        device, aten.convolution.default, *args, out=empty(*x.shape, dtype=x.dtype).contiguous(memory_format=_layout(x))
    )


def _layout(x: torch.Tensor) -> torch.memory_format:
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def test_images_that_do_not_lie_channels_last_are_reordered_for_tensor_cores() -> None:
    images = empty(64, 64, 56, 56)
    last = images.contiguous(memory_format=torch.channels_last)
    moved_bytes = 2 * 2 * images.numel() * 2  # input and output, read and written
    added_s = convolution(images) - convolution(last)
    assert added_s == pytest.approx(moved_bytes / A100.reorder_bytes_per_s)


def test_fp32_convolutions_round_to_tf32_where_there_are_units_and_products_where_it_is_said() -> None:
    images = empty(64, 64, 56, 56, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    plain = A100.model_copy(update={"conv_flops_per_s": {**A100.conv_flops_per_s, "fp32": A100.flops_per_s["fp32"]}})
    assert convolution(images) < 0.5 * convolution(images, plain)
    told = A100.with_tf32()
    assert product(4096, 4096, 4096, torch.float32, told) < 0.3 * product(4096, 4096, 4096, torch.float32)
    v100 = resolve("v100").device
    assert v100.with_tf32() is v100


def attention(length: int, causal: bool, backward: bool = False) -> float:
    q = empty(4, 16, length, 128, dtype=torch.bfloat16)
    if backward:
        func = aten._scaled_dot_product_flash_attention_backward.default
        args = (q, q, q, q, q, empty(4, 16, length), None, None, length, length, 0.0, causal, None, None)
        return seconds(A100, func, *args, out=(q, q, q))
    func = aten._scaled_dot_product_flash_attention.default
    return seconds(A100, func, q, q, q, 0.0, causal, out=(q, empty(4, 16, length)))


def test_attention_does_half_when_causal_and_reaches_less_when_short() -> None:
    assert attention(4096, True) == pytest.approx(attention(4096, False) / 2, rel=0.06)
    assert attention(4096, True, backward=True) == pytest.approx(attention(4096, False, backward=True) / 2)
    for causal, slower in ((False, 1.15), (True, 1.45)):
        per_pair = [attention(length, causal) / length**2 for length in (512, 4096)]
        assert per_pair[0] > slower * per_pair[1]
    assert attention(4096, False, backward=True) > 2.5 * attention(
        4096, False
    )  # 2.5 times the products, at a lower rate


def test_small_steps_take_what_the_host_takes() -> None:
    cluster = resolve("a100")
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    small, twice = (
        profile(net, (torch.zeros(size, 8),), loss_fn=lambda out, batch: out.sum(), hardware=cluster).step_s
        for size in (4, 8)
    )
    assert small == pytest.approx(twice, rel=0.02)
    quick = cluster.device.model_copy(update={"overheads": Overheads()})
    beside = cluster.model_copy(update={"device": quick})
    found = profile(net, (torch.zeros(4, 8),), loss_fn=lambda out, batch: out.sum(), hardware=beside)
    assert found.step_s < 0.5 * small


def test_blocks_count_whole_where_no_rest_is_split_off() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate("a", 16_000_000) == 16 * 2**20  # of its own segment; less than 1 MiB would remain
    assert allocator.allocate("b", 3 * 2**20) == 3 * 2**20
    assert allocator.allocated_bytes == 19 * 2**20


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_allocated_is_the_sum_of_the_blocks_and_reserved_is_all_of_them(expandable: bool) -> None:
    sizes = [100, 2**20, 3 * 2**20, 50 * 2**20, 16_000_000, 5000, 40 * 2**20, 700 * 2**10]
    allocator, alive = CachingAllocator(None, expandable), {}
    for turn in range(400):
        key = (turn * 7) % 13
        if key in alive:
            allocator.free(key)
            del alive[key]
        else:
            alive[key] = allocator.allocate(key, sizes[(turn * 5) % len(sizes)])
        assert allocator.allocated_bytes == sum(alive.values()) <= allocator.reserved_bytes
    for key in alive:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    free = sum(block.num_bytes for pool in allocator._pools.values() for block in pool.blocks.values())
    assert free == allocator.reserved_bytes


def test_expandable_segments_reuse_what_others_leave_in_pieces() -> None:
    reserved = []
    for expandable in (False, True):
        allocator = CachingAllocator(None, expandable)
        for round_ in range(4):  # each needs a little more than the one before, and leaves nothing
            allocator.allocate("x", (100 + 10 * round_) * 2**20)
            allocator.free("x")
        reserved.append(allocator.peak_reserved_bytes)
    assert reserved[0] == 460 * 2**20
    assert 130 * 2**20 <= reserved[1] < 160 * 2**20


def test_gradients_that_are_zeroed_are_there_during_the_forward() -> None:
    net = nn.Linear(300, 300, bias=False)
    batch = (torch.zeros(2, 300),)
    how = {"loss_fn": lambda out, batch: out.sum(), "make_optimizer": lambda params: torch.optim.SGD(params, lr=1.0)}
    dropped, kept = (profile(net, batch, keep_grads=keep, **how) for keep in (False, True))
    assert kept.peak_bytes - dropped.peak_bytes >= 0.9 * 4 * 300 * 300
    forward = [point.grad_bytes for point in kept.timeline if point.phase == "forward"]
    assert set(forward) == {4 * 300 * 300}


def test_an_update_in_place_of_lists_writes_what_its_schema_says() -> None:
    """Adam in one kernel reads parameter, gradient and both moments, and writes all but the gradient."""
    lists = [[empty(1000, dtype=torch.float)] for _ in range(4)]
    assert bytes_moved(aten._fused_adamw_.default, (*lists, [], []), None) == 4 * 1000 * (
        4 + 4
    )  # gradients too, by the schema
    assert bytes_moved(aten._foreach_add_.List, (lists[0], lists[1]), None) == 4 * 1000 * 3


def test_an_8_bit_optimizer_is_one_kernel_a_parameter_on_a_gpu() -> None:
    """Gradient and parameter in fp32, two moments of a byte, which are written too; the host's pace aside."""
    layer = nn.Linear(4096, 4096, bias=False)
    model, batch = nn.Sequential(layer), (torch.zeros(4, 4096),)
    bare = resolve("a100")
    bare = bare.model_copy(update={"device": bare.device.model_copy(update={"overheads": Overheads()})})
    found = {
        name: tw.profile(model, batch, loss_fn=lambda out, _: out.sum(), optimizer=name, hardware=bare, capture=False)
        for name in ("adamw", "adamw8bit")
    }
    updates = [op for op in found["adamw8bit"].ops if op.phase == "update"]
    (update,) = [op for op in updates if "one_pass" in op.op]
    num = layer.weight.numel()
    scales = 2 * 4 * num // 256
    assert update.calls == 1
    assert update.time_s == pytest.approx(
        (num * (4 + 4 + 4 + 2 + 2) + 2 * scales) / bare.device.bandwidth_bytes_per_s + bare.device.launch_s, rel=1e-3
    )
    assert found["adamw8bit"].step_s < found["adamw"].step_s
    assert found["adamw8bit"].optimizer_bytes < 0.27 * found["adamw"].optimizer_bytes


def test_what_one_stream_gave_back_serves_no_request_of_another() -> None:
    for expandable in (False, True):
        allocator = CachingAllocator(None, expandable)
        allocator.allocate("a", 64 * 2**20, stream=1)
        allocator.free("a")
        before = allocator.reserved_bytes
        allocator.allocate("b", 64 * 2**20, stream=1)
        assert allocator.reserved_bytes == before
        allocator.allocate("c", 64 * 2**20, stream=2)
        assert allocator.reserved_bytes == pytest.approx(2 * before, abs=20 * 2**20)


class _Beside(nn.Module):
    """Makes its two results on the default stream, or each on a stream of its own, and gives the first back between."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.streams = [torch.cpu.Stream() for _ in range(streams)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stream in self.streams or [torch.cpu.current_stream()] * 2:
            with torch.cpu.stream(stream):
                x.repeat(2)
        return self.weight.sum()


def test_a_profile_keeps_streams_apart() -> None:
    """`fully_shard` gathers and reduces on streams of its own."""
    x = torch.zeros(32 * 2**20)
    one, two = (
        tw.profile(_Beside(streams), (x,), hardware="a100", capture=False, optimizer="sgd") for streams in (0, 2)
    )
    assert one.peak_bytes == two.peak_bytes
    assert two.reserved_bytes - one.reserved_bytes == 256 * 2**20
