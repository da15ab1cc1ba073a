"""`suite`: the calls that are measured, of every kind that training steps make: products, convolutions, attention, and what
moves memory, each from small sizes to large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class KernelCall(NamedTuple):
    """One call of an ATen op on real tensors."""

    func: Any
    args: tuple[Any, ...]
    dtype: str
    kwargs: Mapping[str, Any] = MappingProxyType({})


def suite(quick: bool) -> Iterator[KernelCall]:
    """Yield the calls to measure, from small sizes to large."""
    for dtype in ("fp32",) if quick else ("fp32", "bf16"):
        yield from _products(dtype, quick)
        yield from _grouped(dtype, quick)
        yield from _attention(dtype, quick)
        yield from _movers(dtype, quick)
        yield from _in_rows(dtype, quick or dtype != "fp32")
    yield from _convolutions("fp32", quick)
    yield from _pooling_and_gathers(quick)
    if not quick:
        yield from _products("fp64", quick=True)


def _products(dtype: str, quick: bool) -> Iterator[KernelCall]:
    """Rows, reduced and columns over what layers have; those of many seconds are left out."""
    import torch

    aten, sizes = torch.ops.aten, ((64, 512) if quick else (16, 64, 256, 1024, 4096))
    limit = 2e8 if quick else 4e9 if dtype == "fp32" else 1e9
    for m, k, n in itertools.product(sizes, repeat=3):
        if 2 * m * k * n <= limit:
            left, weight = _random(dtype, m, k), _random(dtype, n, k)
            yield KernelCall(aten.mm.default, (left, _random(dtype, k, n)), dtype)
            yield KernelCall(aten.addmm.default, (weight[:, 0].clone(), left, weight.t()), dtype)
    for b, m, k in itertools.product((16,), (32, 128, 512), (64,)) if quick else _batched():
        yield KernelCall(aten.bmm.default, (_random(dtype, b, m, k), _random(dtype, b, m, k).transpose(1, 2)), dtype)
        yield KernelCall(aten.bmm.default, (_random(dtype, b, m, m), _random(dtype, b, m, k)), dtype)
    one_token_each = () if quick else itertools.product((8, 512), (64, 256), (64, 256))
    for b, m, k in one_token_each:
        yield KernelCall(aten.bmm.default, (_random(dtype, b, m, k), _random(dtype, b, k, 1)), dtype)
        yield KernelCall(aten.bmm.default, (_random(dtype, b, m, 1), _random(dtype, b, 1, k)), dtype)


def _batched() -> Iterator[tuple[int, int, int]]:
    yield from itertools.product((8, 64), (16, 64, 256), (16, 64))
    yield from itertools.product((16,), (128, 512), (32, 128))


def _grouped(dtype: str, quick: bool) -> Iterator[KernelCall]:
    """The products of experts: as many rows for each, of two widths."""
    import torch

    from ..ops.grouped import grouped_mm  # noqa: F401 - registers the ops

    ours = torch.ops.trainwright
    sizes = ((8,), (16, 128), (64, 256)) if quick else ((4, 32), (8, 64, 512), (64, 512))
    for groups, rows, width in itertools.product(*sizes):
        inner = 2 * width
        ends = rows * torch.arange(1, groups + 1, dtype=torch.int32)
        wide, narrow = _random(dtype, groups * rows, inner), _random(dtype, groups * rows, width)
        for left, columns in ((narrow, inner), (wide, width)):
            matrices = _random(dtype, groups, left.shape[1], columns)
            yield KernelCall(ours.grouped_mm.default, (left, matrices, ends), dtype)
            back = matrices.transpose(1, 2)
            yield KernelCall(ours.grouped_mm.default, (_random(dtype, groups * rows, columns), back, ends), dtype)
        yield KernelCall(ours.grouped_outer.default, (narrow, wide, ends), dtype)


def _attention(dtype: str, quick: bool) -> Iterator[KernelCall]:
    import torch

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    lengths, widths = ((64, 512), (64,)) if quick else ((16, 64, 256, 1024), (16, 64, 128))
    for s, d, causal in itertools.product(lengths, widths, (False, True)):
        q, k, v, grad = (_random(dtype, 2, 4, s, d) for _ in range(4))
        yield KernelCall(forward, (q, k, v, 0.0, causal), dtype)
        out, log_sum = forward(q, k, v, 0.0, causal)
        yield KernelCall(backward, (grad, q, k, v, out, log_sum, 0.0, causal), dtype)


def _convolutions(dtype: str, quick: bool) -> Iterator[KernelCall]:
    import torch

    aten = torch.ops.aten
    channels = (16, 128) if quick else (8, 32, 128, 512)
    sizes, widths = (14, 28) if quick else (7, 14, 56), (1, 3, 7)
    for c_in, c_out, size, kernel in itertools.product((3, *channels), channels, sizes, widths):
        if (kernel == 7) != (c_in == 3) or 4 * size * size * c_in * c_out * kernel**2 > 1.5e9:
            continue
        yield from _convolution(aten, dtype, c_in, c_out, size, kernel, groups=1)
    for c, size, kernel in itertools.product(channels, (14, 28), (3, 7)):
        yield from _convolution(aten, dtype, c, c, size, kernel, groups=c)


def _convolution(
    aten: Any, dtype: str, c_in: int, c_out: int, size: int, kernel: int, groups: int
) -> Iterator[KernelCall]:
    x, weight = _random(dtype, 4, c_in, size, size), _random(dtype, c_out, c_in // groups, kernel, kernel)
    grad, rest = _random(dtype, 4, c_out, size, size), ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    yield KernelCall(aten.convolution.default, (x, weight, None, *rest), dtype)
    yield KernelCall(aten.convolution_backward.default, (grad, x, weight, None, *rest, [True, True, False]), dtype)
    if c_in == 3:
        yield KernelCall(aten.convolution_backward.default, (grad, x, weight, None, *rest, [False, True, False]), dtype)


def _movers(dtype: str, quick: bool) -> Iterator[KernelCall]:
    """What moves memory, on rows of 256 elements."""
    import torch

    sizes = (16, 4096) if quick else (1, 8, 64, 1024, 8192, 65536) if dtype == "fp32" else (4, 4096)
    for num_rows in sizes:
        x, y = _random(dtype, num_rows, 256), _random(dtype, num_rows, 256)
        for func, args in itertools.chain(_unary(x, y), _binary(x, y), _updates(x, y)):
            yield KernelCall(func, args, dtype)
        by_tanh = {"approximate": "tanh"}
        yield KernelCall(torch.ops.aten.gelu.default, (x,), dtype, by_tanh)
        yield KernelCall(torch.ops.aten.gelu_backward.default, (x, y), dtype, by_tanh)
        in_order = {"memory_format": torch.contiguous_format}
        yield KernelCall(torch.ops.aten.clone.default, (_out_of_order(x),), dtype, in_order)


def _unary(x: Any, y: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    import torch

    aten = torch.ops.aten
    for name in ("gelu", "silu", "tanh", "relu", "sigmoid", "exp", "rsqrt", "neg", "clone", "sqrt", "cos"):
        yield getattr(aten, name).default, (x.abs() if name.endswith("sqrt") else x,)
    yield aten.pow.Tensor_Scalar, (x, 2.0)
    yield aten.zeros_like.default, (x,)
    yield aten.mean.dim, (x, [-1], True)
    yield aten.sum.dim_IntList, (x, [0], True)
    for name in ("gelu", "silu", "tanh", "sigmoid"):
        yield getattr(aten, f"{name}_backward").default, (x, y)
    yield aten.threshold_backward.default, (x, y, 0)
    yield aten.native_dropout.default, (x, 0.1, True)
    if x.dtype is torch.float32:
        yield aten._to_copy.default, (x,)


def _binary(x: Any, y: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    import torch

    aten = torch.ops.aten
    yield aten.add.Tensor, (x, y)
    yield aten.mul.Tensor, (x, y)
    yield aten.div.Tensor, (x, y)
    mask = (torch.arange(x.shape[1]) < x.shape[1] // 2).repeat(
        x.shape[0], 1
    )  # in runs, as a model's are, not by chance
    yield aten.where.self, (mask, x, y)
    yield aten.masked_fill.Scalar, (x, mask, 0.0)
    yield aten.cat.default, ([x, y], -1)
    yield aten.mul.Tensor, (_out_of_order(x), y.view(-1, 8, 4, 8))
    yield aten.slice_backward.default, (y, [x.shape[0], 512], 1, 0, 256, 1)


def _in_rows(dtype: str, quick: bool) -> Iterator[KernelCall]:
    """Softmax and norms, over rows of several lengths."""
    import torch

    aten = torch.ops.aten
    sizes = ((64, 256), (4096, 256)) if quick else itertools.product((64, 1024, 8192), (32, 256, 2048))
    for num_rows, length in sizes:
        x, y = _random(dtype, num_rows, length), _random(dtype, num_rows, length)
        weight = x[0].clone()
        yield KernelCall(aten._softmax.default, (x, -1, False), dtype)
        yield KernelCall(aten._safe_softmax.default, (x, -1), dtype)
        yield KernelCall(aten._softmax_backward_data.default, (x, y, -1, x.dtype), dtype)
        yield KernelCall(aten._log_softmax.default, (x, -1, False), dtype)
        yield KernelCall(aten._log_softmax_backward_data.default, (x, y, -1, x.dtype), dtype)
        norm = (x, [length], weight, weight, 1e-5)
        yield KernelCall(aten.native_layer_norm.default, norm, dtype)
        _, *stats = aten.native_layer_norm.default(*norm)
        backward = (y, x, [length], *stats, weight, weight, [True, True, True])
        yield KernelCall(aten.native_layer_norm_backward.default, backward, dtype)


def _updates(x: Any, y: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """What optimizers and gradient accumulation do in place; the values settle, they do not overflow."""
    import torch

    aten, z = torch.ops.aten, x.abs() + 1.0
    yield aten.mul_.Tensor, (x.clone(), torch.tensor(0.999, dtype=x.dtype))
    yield aten.add_.Tensor, (x.clone() * 0, y)
    yield aten.lerp_.Scalar, (x.clone(), y, 0.1)
    yield aten.addcmul_.default, (x.clone(), y, z)
    yield aten.addcdiv_.default, (x.clone(), y, z)
    yield aten.fill_.Scalar, (x.clone(), 0.0)
    yield aten.bernoulli_.float, (x.clone(), 0.9)  # a dropout's mask: many times an addition
    yield aten.copy_.default, (x.clone(), y)


def _out_of_order(x: Any) -> Any:
    """Heads before positions, as attention reads what a projection wrote."""
    return x.view(-1, 4, 8, 8).transpose(1, 2)


def _pooling_and_gathers(quick: bool) -> Iterator[KernelCall]:
    import torch

    aten = torch.ops.aten
    for size in (14, 28) if quick else (14, 28, 56, 112):
        x = _random("fp32", 4, 64, size, size)
        stats = (torch.ones(64), torch.zeros(64), torch.zeros(64), torch.ones(64))
        yield KernelCall(aten.native_batch_norm.default, (x, *stats, True, 0.1, 1e-5), "fp32")
        kept = (torch.zeros(64), torch.ones(64))
        backward = (x, x, stats[0], stats[2], stats[3], *kept, True, 1e-5, [True, True, True])
        yield KernelCall(aten.native_batch_norm_backward.default, backward, "fp32")
        pool = ([3, 3], [2, 2], [1, 1], [1, 1], False)
        yield KernelCall(aten.max_pool2d_with_indices.default, (x, *pool), "fp32")
        out, places = aten.max_pool2d_with_indices.default(x, *pool)
        yield KernelCall(aten.max_pool2d_with_indices_backward.default, (out, x, *pool, places), "fp32")
    for num_rows, num_entries in ((64, 4096), (1024, 4096)) if quick else ((64, 128), (1024, 4096), (8192, 131072)):
        table, rows = _random("fp32", num_entries, 256), torch.arange(num_rows) % num_entries
        yield KernelCall(aten.embedding.default, (table, rows), "fp32")
    for num_rows, width, num_entries in _tables(quick):
        grad, rows = _random("fp32", num_rows, width), torch.arange(num_rows) % num_entries
        yield KernelCall(aten.embedding_dense_backward.default, (grad, rows, num_entries, -1, False), "fp32")
    for num_rows, width in ((64, 256), (256, 4096)) if quick else ((16, 64), (64, 1024), (256, 16384), (512, 65536)):
        table, rows = _random("fp32", 16, width), torch.arange(num_rows) % 16
        yield KernelCall(aten.index.Tensor, (table, [rows]), "fp32")
        yield KernelCall(aten.index_put.default, (table, [rows], _random("fp32", num_rows, width), True), "fp32")
    for num_rows, num_classes in ((64, 16), (1024, 1024)) if quick else ((64, 16), (1024, 1024), (512, 32768)):
        logits, labels = _random("fp32", num_rows, num_classes), torch.arange(num_rows) % num_classes
        reduced = (None, 1, -100)
        yield KernelCall(aten.nll_loss_forward.default, (logits, labels, *reduced), "fp32")
        loss, weight = aten.nll_loss_forward.default(logits, labels, *reduced)
        yield KernelCall(aten.nll_loss_backward.default, (loss, logits, labels, *reduced, weight), "fp32")


def _tables(quick: bool) -> Iterator[tuple[int, int, int]]:
    """Yield rows, width and entries of tables: of words, wide and long, and of positions' distances, narrow and short."""
    yield from itertools.product((64, 4096) if quick else (64, 1024, 16384), (8, 256), (32, 4096))
    if not quick:
        yield 8192, 256, 131072


def _random(dtype: str, *shape: int) -> Any:
    """Values of any spread will do; a generator of its own leaves the global one alone."""
    import torch

    kinds = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    generator = torch.Generator().manual_seed(math.prod(shape) % 2**31)
    return torch.randn(*shape, generator=generator).to(kinds[dtype])
