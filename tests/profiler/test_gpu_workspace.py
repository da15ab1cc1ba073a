"""Workspaces of CUDA kernels are those seen on an H200 (torch 2.11.0+cu130): the peak of torch's allocator during a call."""

from __future__ import annotations

import pytest
import torch

from trainwright.profiler.kernels.gpu_workspace import gpu_workspace_bytes, is_uneven, reduction_bytes

aten = torch.ops.aten
FP32, BF16 = torch.float32, torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Sums


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "taken"),
    [
        (1000, 768, 0), (2048, 10, 0), (2048, 64, 262_656), (2048, 128, 2_097_664), (2048, 768, 12_583_424),
        (2048, 1000, 16_384_512), (2048, 3072, 50_332_160), (2048, 11008, 140_902_912), (2048, 50257, 0), (4096, 1024, 33_554_944),
        (8192, 3072, 138_412_544), (12608, 768, 77_464_064), (12608, 3072, 138_412_544), (16384, 10, 5632),
        (65536, 64, 8_389_120), (65536, 1000, 135_168_512), (65536, 4096, 138_412_544),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_sum_of_rows_takes_what_it_was_seen_to_take(
    num_inputs: int, num_outputs: int, taken: int, dtype: torch.dtype
) -> None:
    values = empty(num_inputs, num_outputs, dtype=dtype)
    assert gpu_workspace_bytes(aten.sum.dim_IntList, (values, [0], True), values.sum([0], keepdim=True)) == taken
    assert is_uneven(aten.sum.dim_IntList, (values, [0], True), values.sum([0], keepdim=True)) is (taken > 0)


@pytest.mark.parametrize(
    ("shape", "dims", "taken"),
    [
        ((8, 512, 768), [0, 1], 25_166_336), ((64, 197, 768), [0, 1], 77_464_064), ((8, 12, 512, 512), [0], 0),
        ((8, 12, 512, 512), [0, 1], 0), ((32, 64, 56, 56), [0, 2, 3], 0), ((4096, 768), [1], 0), ((65536, 4096), [-1], 0),
        ((65536, 4096), None, 8704), ((1000, 4096), None, 2560), ((64, 64), None, 0),
    ],
)  # fmt: skip
def test_sums_over_several_dims_and_along_memory(shape: tuple[int, ...], dims: list[int] | None, taken: int) -> None:
    values = empty(*shape)
    call, args = (aten.sum.default, (values,)) if dims is None else (aten.sum.dim_IntList, (values, dims, True))
    assert gpu_workspace_bytes(call, args, call(*args)) == taken


def test_what_decides_is_how_values_lie_in_memory() -> None:
    turned = empty(4096, 768).t()
    for dims, taken in (([1], 25_166_336), ([0], 0)):
        assert gpu_workspace_bytes(aten.sum.dim_IntList, (turned, dims, True), turned.sum(dims, keepdim=True)) == taken
    assert gpu_workspace_bytes(aten.mean.dim, (turned, [1], True), turned.mean(1, keepdim=True)) == 25_166_336
    nothing = empty(0, 4)
    assert gpu_workspace_bytes(aten.sum.default, (nothing,), nothing.sum()) == 0


def test_partial_sums_of_doubles_take_twice_the_memory() -> None:
    assert reduction_bytes(128, 8192, across=True, value_bytes=8) - 512 == 2 * (
        reduction_bytes(128, 8192, across=True) - 512
    )


# Attention


@pytest.mark.parametrize(
    ("dtype", "batch", "heads", "length", "head_dim", "taken"),
    [
        (FP32, 2, 4, 64, 64, 135_168), (FP32, 8, 12, 197, 64, 6_373_376), (FP32, 8, 12, 512, 64, 12_976_128),
        (FP32, 4, 8, 1024, 96, 16_916_480), (FP32, 4, 8, 512, 32, 4_263_936), (FP32, 4, 8, 300, 128, 6_332_928),
        (BF16, 2, 4, 64, 64, 133_632), (BF16, 8, 12, 197, 64, 6_373_376), (BF16, 8, 12, 512, 64, 12_791_808),
        (BF16, 4, 8, 1024, 128, 16_912_384), (BF16, 4, 8, 300, 128, 6_331_392), (BF16, 2, 4, 77, 40, 265_216),
    ],
)  # fmt: skip
def test_the_efficient_backward(
    dtype: torch.dtype, batch: int, heads: int, length: int, head_dim: int, taken: int
) -> None:
    query = empty(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)
    call = aten._scaled_dot_product_efficient_attention_backward.default
    found = gpu_workspace_bytes(call, (query, query, query, query), ())
    assert found == pytest.approx(taken, rel=0.04)  # a few numbers a block more, which synchronise them
    turned = query.contiguous()
    assert gpu_workspace_bytes(call, (turned, query, query, query), ()) == found + query.nbytes


@pytest.mark.parametrize(
    ("batch", "heads", "length", "head_dim", "flash", "cudnn"),
    [
        (2, 4, 64, 64, 266_240, 133_632), (8, 12, 197, 64, 6_389_760, 4_917_760), (8, 12, 512, 64, 12_779_520, 12_780_032),
        (4, 8, 1024, 96, 12_713_984, 12_714_496), (4, 8, 300, 128, 6_340_608, 4_954_112), (2, 4, 77, 40, 266_240, 101_376),
    ],
)  # fmt: skip
def test_the_fused_backwards_in_16_bits(
    batch: int, heads: int, length: int, head_dim: int, flash: int, cudnn: int
) -> None:
    query = empty(batch, length, heads, head_dim, dtype=BF16).transpose(1, 2)
    args = (query, query, query, query)
    assert gpu_workspace_bytes(aten._scaled_dot_product_flash_attention_backward.default, args, ()) == flash
    found = gpu_workspace_bytes(aten._scaled_dot_product_cudnn_attention_backward.default, args, ())
    assert found == pytest.approx(cudnn, abs=1024)


def test_heads_that_share_keys_have_gradients_of_all_first() -> None:
    query, key = empty(2, 4, 128, 64, dtype=BF16), empty(2, 2, 128, 64, dtype=BF16)
    call = aten._scaled_dot_product_flash_attention_backward.default
    alone = gpu_workspace_bytes(call, (query, query, query, query), ())
    assert gpu_workspace_bytes(call, (query, query, key, key), ()) == alone + 2 * query.nbytes


# Others


def test_the_backward_of_a_softmax_multiplies_first() -> None:
    probs = empty(4096, 768, dtype=BF16)
    assert gpu_workspace_bytes(aten._softmax_backward_data.default, (probs, probs, -1, BF16), probs) == 6_291_456


@pytest.mark.parametrize(
    ("num_indices", "dim", "num_rows", "taken"),
    [
        (512, 64, 50257, 0), (4096, 768, 50257, 14_040_576), (12608, 768, 50257, 43_218_944), (8192, 4096, 50257, 148_037_120),
        (8192, 4096, 1000, 30_031_360),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_gradient_of_an_embedding(
    num_indices: int, dim: int, num_rows: int, taken: int, dtype: torch.dtype
) -> None:
    grad, indices = empty(num_indices, dim, dtype=dtype), empty(num_indices)
    args = (grad, indices, num_rows, -1, False)
    found = gpu_workspace_bytes(aten.embedding_dense_backward.default, args, empty(num_rows, dim, dtype=dtype))
    assert found == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "shape", "memory_format", "forward", "backward"),
    [
        # batch, channels, size, output channels, kernel, stride, padding
        (BF16, (64, 64, 56, 64, 3, 1, 1), torch.contiguous_format, 51_454_464, 53_371_904),
        (BF16, (64, 64, 56, 64, 3, 1, 1), torch.channels_last, 512, 1_917_952),
        (BF16, (16, 128, 56, 128, 3, 2, 1), torch.contiguous_format, 16_351_744, 16_351_744),
        (BF16, (16, 1024, 14, 2048, 1, 2, 0), torch.contiguous_format, 9_634_304, 9_634_304),
        (BF16, (16, 3, 224, 64, 7, 2, 3), torch.contiguous_format, 38_585_856, 44_606_976),
        (BF16, (16, 3, 224, 64, 7, 2, 3), torch.channels_last, 12_895_744, 19_922_944),
        (BF16, (32, 3, 224, 768, 16, 16, 0), torch.contiguous_format, 38_470_144, 57_344_512),
        (BF16, (16, 64, 56, 64, 1, 1, 0), torch.contiguous_format, 0, None),
        (FP32, (64, 64, 56, 64, 3, 1, 1), torch.contiguous_format, 102_908_416, 104_973_312),
        (FP32, (64, 3, 224, 768, 16, 16, 0), torch.contiguous_format, 93_061_632, 93_061_632),
        (FP32, (16, 512, 7, 512, 3, 1, 1), torch.contiguous_format, 12_648_960, 14_221_824),
    ],
)  # fmt: skip
def test_convolutions_copy_what_their_kernels_do_not_read(
    dtype: torch.dtype, shape: tuple[int, ...], memory_format: torch.memory_format, forward: int, backward: int | None
) -> None:
    batch, channels, size, outputs, kernel, stride, padding = shape
    values = empty(batch, channels, size, size, dtype=dtype).to(memory_format=memory_format)
    weight = empty(outputs, channels, kernel, kernel, dtype=dtype).to(memory_format=memory_format)
    how = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    out = aten.convolution(values, weight, None, *how).to(memory_format=memory_format)
    found = gpu_workspace_bytes(aten.convolution.default, (values, weight, None, *how), out)
    assert 0 <= forward - found < 4096
    if backward is not None:  # what an algorithm splits a weight's gradient for is not counted
        args = (out, values, weight, None, *how, [True] * 3)
        assert 0 <= backward - gpu_workspace_bytes(aten.convolution_backward.default, args, ()) < 20e6


def test_convolutions_of_doubles_copy_nothing() -> None:
    values, weight = empty(2, 8, 9, 9, dtype=torch.float64), empty(16, 8, 3, 3, dtype=torch.float64)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert (
        gpu_workspace_bytes(aten.convolution.default, (values, weight, None, *how), values.new_empty(2, 16, 9, 9)) == 0
    )
