"""What a GPU would do otherwise than the CPU on which the fakes run: sizes by hand, and the allocator rule by rule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from profiler_models import gpt2, llama, mlp
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trainwright.hardware import resolve
from trainwright.models import zoo
from trainwright.profiler import profile
from trainwright.profiler.caching import CachingAllocator
from trainwright.profiler.gpu import GpuForms, attention, attention_kernel
from trainwright.profiler.tracker import MemoryTracker
from trainwright.profiler.values import KnownValues
from trainwright.torch_internals.fakes import faked, new_mode

aten = torch.ops.aten
KIB, MIB = 2**10, 2**20
H200, A100 = resolve("h200"), resolve("a100")
B, H, S, D = 2, 4, 48, 16


def kept_bytes(call, *shapes, dtype=torch.bfloat16) -> int:
    """What autograd holds after `call` on fakes in the forms of a GPU, the arguments included, each storage once."""
    mode, storages = new_mode(), {}
    with mode:
        leaves = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]

    def keep(tensor):
        storages[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with KnownValues(mode), GpuForms(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call(*leaves)
        num_bytes = sum(storages.values())
        out.sum().backward()
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    return num_bytes


QUERY = (B, H, S, D)
SEEDS = 3 * 8
"""The flash kernel's seed and offset, and one value unused."""
FUSED = {
    "flash, dropout": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        torch.bfloat16,
        4 * B * H * S * D * 2 + 4 * B * H * S + SEEDS,
    ),
    "flash, causal fp16": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        torch.float16,
        4 * B * H * S * D * 2 + 4 * B * H * S + SEEDS,
    ),
    "efficient, fp32": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        torch.float32,
        4 * B * H * S * D * 4 + 4 * B * H * 64 + 2 * 8,  # its log-sum-exp in whole rows of 32
    ),
    "efficient, boolean mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool)),
        torch.bfloat16,
        4 * B * H * S * D * 2 + 2 * S * S + 4 * B * H * 64 + 2 * 8,
    ),
    "scores, fp64 with dropout": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        torch.float64,
        # scaled q and k, v, the softmax, a mask of bytes, the weights
        3 * B * H * S * D * 8 + 2 * B * H * S * S * 8 + B * H * S * S,
    ),
}


@pytest.mark.parametrize(("call", "dtype", "num_bytes"), FUSED.values(), ids=FUSED)
def test_attention_keeps_what_its_kernel_keeps(call, dtype, num_bytes):
    assert kept_bytes(call, QUERY, QUERY, QUERY, dtype=dtype) == num_bytes


def test_shared_heads_stay_shared_in_the_flash_kernel_and_are_repeated_beside_a_mask():
    def shared(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool), enable_gqa=True)

    key = (B, H // 2, S, D)
    one = B * H * S * D * 2
    assert kept_bytes(shared, QUERY, key, key) == 2 * one + 2 * (one // 2) + 4 * B * H * S + SEEDS
    assert kept_bytes(masked, QUERY, key, key) == 4 * one + 2 * S * S + 4 * B * H * 64 + 2 * 8


def test_head_dims_that_flash_does_not_take_are_padded():
    shape = (B, H, S, 13)
    padded = 4 * B * H * S * 16 * 2 + 4 * B * H * S + SEEDS
    assert kept_bytes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), shape, shape, shape) == padded


@pytest.mark.parametrize(
    ("dtype", "shape", "mask", "causal", "kernel"),
    [
        (torch.bfloat16, QUERY, None, True, "flash"),
        (torch.float16, (B, H, S, 256), None, False, "flash"),
        (torch.float16, (B, H, S, 264), None, False, "efficient"),
        (torch.bfloat16, QUERY, torch.ones(S, S), False, "efficient"),
        (torch.float32, QUERY, None, True, "efficient"),
        (torch.float32, (B, H, S, 13), None, True, "math"),
        (torch.float64, QUERY, None, True, "math"),
        (torch.bfloat16, (B * H, S, D), None, True, "math"),
    ],
)
def test_the_kernel_that_takes_the_arguments(dtype, shape, mask, causal, kernel):
    query = torch.empty(shape, dtype=dtype, device="meta")
    assert attention_kernel(query, query, query, mask, causal) == kernel


def test_the_kernel_is_the_first_in_the_order_that_the_script_asks_for():
    query = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="meta")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert attention_kernel(query, query, query, None, True) == "cudnn"
        assert attention_kernel(query.float(), query.float(), query.float(), None, True) == "math"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attention_kernel(query, query, query, None, True) == "efficient"
    assert attention_kernel(query, query, query, None, True) == "flash"


def test_rms_norm_is_one_kernel_where_types_agree():
    def ops(dtype):
        model = torch.nn.RMSNorm(64, dtype=dtype)
        x = torch.zeros(4, 64, dtype=torch.bfloat16)
        costs = profile(model, (x,), loss_fn=lambda out, batch: out.sum(), hardware=resolve("h100"), capture=False)
        return {op.op for op in costs.ops if op.phase == "forward"}

    assert ops(torch.bfloat16) == {"aten.native_layer_norm", "aten.sum"}
    assert "aten.rsqrt" in ops(torch.float32)  # a weight of another type: elementwise ops


def test_causal_attention_over_more_keys_than_queries_is_not_flash():
    query, key = torch.empty(QUERY, dtype=torch.bfloat16), torch.empty(B, H, S + 1, D, dtype=torch.bfloat16)
    assert attention_kernel(query, key, key, None, True) == "efficient"
    assert attention_kernel(query, key, key, None, False) == "flash"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": True}, {"bias": True}])
def test_scores_are_the_attention_of_the_definition(options):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(B, H, S, D, generator=generator, dtype=torch.float64) for _ in range(3))
    kwargs = {name: options[name] for name in ("is_causal", "scale") if name in options}
    if "mask" in options:
        kwargs["attn_mask"] = torch.rand(S, S, generator=generator) > 0.3
    if "bias" in options:
        kwargs["attn_mask"] = torch.randn(B, 1, S, S, generator=generator, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value, **kwargs)
    torch.testing.assert_close(attention(query, key, value, **kwargs), expected, rtol=1e-9, atol=1e-9)


def test_dropout_keeps_bytes_and_so_does_that_inside_torchs_own_functions():
    assert kept_bytes(lambda x: F.dropout(x, 0.3), (6, 8)) == 6 * 8
    assert kept_bytes(lambda x: F.dropout(x, 0.3, training=False), (6, 8)) == 0
    assert "ScaledDotProductFlashAttentionBackward0" in _nodes_of_multihead_attention()
    assert F.dropout.__module__ == "torch.nn.functional"


class Powers(nn.Module):
    """Blocks with an op of autocast's list, checkpointed or not."""

    def __init__(self, num_blocks: int, is_checkpointed: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_blocks))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.is_checkpointed else self.block(layer, x)
        return x.float().mean()

    @staticmethod
    def block(layer, x):
        return F.dropout(torch.pow(layer(x), 3.0).tanh(), 0.1)


@pytest.mark.parametrize("autocast", ["fp16", "bf16"])
def test_checkpointed_blocks_are_recomputed_in_the_forms_that_they_had(autocast):
    batch = (torch.zeros(256, 16),)
    six, eight = (
        profile(Powers(num_blocks, True), batch, autocast=autocast, hardware=resolve("h100")).peak_bytes
        for num_blocks in (6, 8)
    )
    per_block = 256 * 16 * 4 + 3 * (16 * 16 * 4 + 512)  # its input; weight and rounded bias, and two of AdamW's states
    assert eight - six == 2 * per_block


def _nodes_of_multihead_attention() -> set[str]:
    mode = new_mode()
    module = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True, dtype=torch.bfloat16)
    with faked(module, mode) as copy, mode, GpuForms():
        x = torch.empty(B, S, 16, dtype=torch.bfloat16)
        return _nodes(copy(x, x, x, need_weights=False)[0].grad_fn)


def _nodes(node) -> set[str]:
    found, pending = set(), [node]
    while pending:
        node = pending.pop()
        found.add(node.name())
        pending.extend(source for source, _ in node.next_functions if source is not None)
    return found


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: F.softmax(x, -1), torch.float32),
        (lambda x: x.softmax(-1), torch.float32),
        (lambda x: F.layer_norm(x, (8,)), torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: torch.exp(x), torch.float32),
        (lambda x: x @ x.t(), torch.bfloat16),
        (lambda x: F.gelu(x), torch.bfloat16),
        (lambda x: x + x, torch.bfloat16),
    ],
)
def test_autocast_widens_what_cuda_widens(call, dtype):
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), GpuForms():
        assert call(x).dtype is dtype
    with GpuForms():
        assert call(x).dtype is torch.bfloat16


class Attends(nn.Module):
    """One attention with dropout over its inputs, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum()


def test_a_profile_for_a_gpu_takes_the_fused_kernel_and_one_for_a_cpu_the_quadratic_path():
    def batch():
        return tuple(torch.zeros(QUERY, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    gpu, cpu = profile(Attends(), batch(), hardware=H200), profile(Attends(), batch())
    out, rows = 2 * math.prod(QUERY), 4 * B * H * S
    rounded = sum(_rounded(size) for size in (out, rows, 16, 8, 2))  # out, log-sum-exp, seed, offset, the loss
    assert gpu.saved_bytes == rounded
    assert cpu.saved_bytes > 2 * B * H * S * S
    assert gpu.forward_flops == 2 * 2 * B * H * S * S * D == cpu.forward_flops
    assert gpu.backward_flops == 5 * 2 * B * H * S * S * D
    assert gpu.timeline[0].op == "aten._scaled_dot_product_flash_attention"


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, 300))

    def forward(self, x):
        return (x @ self.weight).sum()


@pytest.mark.parametrize(("hardware", "workspace"), [(H200, 32 * MIB), (A100, 8519680)])
def test_a_product_by_hand(hardware, workspace):
    """x [70, 1000] · w [1000, 300]: weight, its gradient, Adam's two moments, the product, the loss; two workspaces."""
    found = profile(Twice(), (torch.zeros(70, 1000),), hardware=hardware)
    weight, product = _rounded(4 * 300_000), _rounded(4 * 70 * 300)
    assert found.param_bytes == found.grad_bytes == weight
    # its counter of steps stays on the host; a block keeps a rest of its segment that is under 1 MiB, once here on the A100
    rest = found.optimizer_bytes - 2 * weight
    assert rest == 0 if hardware is H200 else 0 < rest < MIB
    assert found.saved_bytes == 512 + product * 0  # the loss; the product's input is the batch's, which is not counted
    # at the update: the moments, gradient, weight, loss, and the two buffers of the denominator
    assert found.peak_bytes - 2 * workspace - 4 * weight - 512 - 2 * weight - rest in (0, rest)
    assert found.peak_at.startswith("update")


def test_what_is_reserved_is_more_than_what_is_alive_and_in_whole_segments():
    model, batch, _ = llama()
    found = profile(model, batch, hardware=H200)
    assert found.reserved_bytes >= found.peak_bytes
    assert found.reserved_bytes % (2 * MIB) == 0
    assert profile(model, batch).reserved_bytes is None


@pytest.mark.parametrize("build", [gpt2, mlp], ids=lambda build: build.__name__)
def test_a_gpu_changes_no_parameters_and_no_flops_of_products(build):
    model, batch, loss_fn = build()
    cpu = profile(model, batch, loss_fn=loss_fn, timeline=False)
    gpu = profile(model, batch, loss_fn=loss_fn, hardware=A100, timeline=False)
    assert gpu.forward_flops == cpu.forward_flops
    assert (gpu.num_params, gpu.target) == (cpu.num_params, "a100")
    assert gpu.step_s > 0
    assert cpu.step_s is None


def test_dropout_no_longer_makes_attention_quadratic():
    """gpt2-tiny with its dropout of 0.1: four times the length, and what a GPU saves grows four times, not sixteen."""
    short, long = (
        profile(*zoo.build("gpt2-tiny", seq_len=length, dtype="bf16", n_positions=64), hardware=H200, timeline=False)
        for length in (16, 64)
    )
    assert long.saved_bytes < 5 * short.saved_bytes


# Workspaces


def test_a_workspace_counts_for_the_peak_and_is_given_back():
    tracker = MemoryTracker("gpu")
    tracker.allocator = CachingAllocator()
    x = torch.zeros(2, 8, 9, 9, dtype=torch.bfloat16)
    weight = torch.zeros(16, 8, 3, 3, dtype=torch.bfloat16)
    with tracker:
        tracker.watch([x, weight], "input")
        F.conv2d(x, weight, padding=1)
        own = _rounded(2 * 2 * 16 * 81)
    assert tracker.peak_bytes == own + _rounded(2 * (x.numel() + weight.numel() + 2 * 16 * 81))
    assert tracker.live_bytes == tracker.allocator.allocated_bytes == 0


# The caching allocator


def reserved(*sizes: int) -> int:
    allocator = CachingAllocator()
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    return allocator.reserved_bytes


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ((1,), 2 * MIB),
        ((0,), 0),
        ((MIB,), 2 * MIB),
        ((MIB, MIB), 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB),
        ((MIB + 1,), 20 * MIB),
        ((5 * MIB,) * 4, 20 * MIB),
        ((5 * MIB,) * 5, 40 * MIB),
        ((10 * MIB - 512,), 20 * MIB),
        ((10 * MIB,), 10 * MIB),
        ((10 * MIB + 1,), 12 * MIB),
        ((33 * MIB,), 34 * MIB),
    ],
)
def test_segments(sizes, segments):
    assert reserved(*sizes) == segments


def test_a_request_is_rounded_and_a_small_block_is_split_to_the_last_granule():
    allocator = CachingAllocator()
    allocator.allocate("a", 513)
    assert allocator.allocated_bytes == 1024
    allocator.allocate("b", MIB)
    allocator.allocate("c", MIB - 1024)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 2 * MIB)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    allocator = CachingAllocator()
    allocator.allocate("a", 11 * MIB)  # a segment of 12 MiB: 1 MiB more, which is not enough to split
    assert allocator.allocated_bytes == 12 * MIB
    allocator.free("a")
    allocator.allocate("b", 11 * MIB - 512)  # now it is
    assert allocator.allocated_bytes == 11 * MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_the_first_of_equals():
    allocator = CachingAllocator()
    for key, size in (("40", 40 * MIB), ("12", 12 * MIB), ("12 again", 12 * MIB), ("20", 20 * MIB)):
        allocator.allocate(key, size)
    for key in ("40", "20", "12 again", "12"):
        allocator.free(key)
    allocator.allocate("x", 12 * MIB)
    assert allocator._used["x"].address == (1, 0)
    allocator.allocate("y", 13 * MIB)
    assert allocator._used["y"].address == (3, 0)


def test_neighbours_that_are_free_become_one_block():
    allocator = CachingAllocator()
    for key in "abc":
        allocator.allocate(key, 6 * MIB)
    for key in "acb":
        allocator.free(key)
    allocator.allocate("all", 20 * MIB - 512)
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator._used["all"].address == (0, 0)


def test_small_and_large_requests_do_not_share_segments():
    allocator = CachingAllocator()
    allocator.allocate("large", 2 * MIB)
    allocator.free("large")
    allocator.allocate("small", KIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_free_segments_are_given_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    allocator.allocate("a", 40 * MIB)
    allocator.allocate("b", 12 * MIB)
    allocator.free("a")
    allocator.allocate("c", 50 * MIB)
    assert allocator.reserved_bytes == 62 * MIB
    assert allocator.peak_reserved_bytes == 62 * MIB


def test_a_key_that_holds_nothing_is_freed_in_peace():
    allocator = CachingAllocator()
    allocator.allocate("empty", 0)
    allocator.free("empty")
    allocator.free("unknown")
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30 * MIB)), max_size=60))
def test_blocks_never_overlap_and_all_comes_back(requests):
    allocator = CachingAllocator()
    held = set()
    for key, size in requests:
        if key in held:
            allocator.free(key)
            held.remove(key)
        else:
            allocator.allocate(key, size)
            held.add(key)
        used = sorted((block.address, block.num_bytes) for block in allocator._used.values())
        free = sorted(
            (block.address, block.num_bytes) for pool in allocator._pools.values() for block in pool.blocks.values()
        )
        everything = sorted(used + free)
        for (first, num_bytes), (second, _) in itertools.pairwise(everything):
            assert first[0] != second[0] or first[1] + num_bytes == second[1]
        assert sum(num_bytes for _, num_bytes in everything) == allocator.reserved_bytes
        assert sum(num_bytes for _, num_bytes in used) == allocator.allocated_bytes
    for key in held:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    assert all(
        block.before is block.after is None for pool in allocator._pools.values() for block in pool.blocks.values()
    )
