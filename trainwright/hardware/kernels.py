"""What the kernels of a training step reach here, each measured alone: a table from kernel and sizes to work per second.

suite          the calls that are measured: products, convolutions, attention, and what moves memory
rates          the table: (kernel, dtype, sizes, FLOPs or bytes per second)
overheads      what a step adds to its kernels: recording for the backward, running it, calling modules
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Clock = Callable[[Callable[[], Any], float], float]
"""(what to run, seconds to spend) → seconds of one run: `measure` has that of several ranks."""


class Call(NamedTuple):
    """One call of an ATen op on real tensors."""

    func: Any
    args: tuple[Any, ...]
    dtype: str


def rates(quick: bool, clock: Clock) -> list[list[Any]]:
    """Return the rows [kernel, dtype, sizes, work per second] of this process, by one clock."""
    from ..ops.kernels import kernel_of

    rows, budget_s = [], 0.01 if quick else 0.03
    for call in suite(quick):
        begin = time.perf_counter()
        out = call.func(*call.args)
        once_s = time.perf_counter() - begin
        kernel = kernel_of(call.func, call.args, {}, out)
        num_held = _num_held(_num_bytes(out), once_s, budget_s)
        del out
        taken_s = clock(_holding(call, num_held), budget_s) / num_held
        rows.append([kernel.name, call.dtype, list(kernel.dims), kernel.work / taken_s])
    return rows


def suite(quick: bool) -> Iterator[Call]:
    """Yield the calls to measure, from small sizes to large."""
    for dtype in ("fp32",) if quick else ("fp32", "bf16"):
        yield from _products(dtype, quick)
        yield from _attention(dtype, quick)
        yield from _movers(dtype, quick)
    yield from _convolutions("fp32", quick)
    yield from _pooling_and_gathers(quick)
    if not quick:
        yield from _products("fp64", quick=True)


def overheads(clock: Clock) -> dict[str, float]:
    """Return the seconds that a step takes beyond the kernels called directly: per op of a phase, per call of a module.

    The engine of the backward and torch's own functions call a kernel in less time than a direct call does, so that a
    figure may be negative.
    """
    import torch
    from torch import nn

    num_ops, aten = 256, torch.ops.aten
    plain, scale = torch.ones(8), torch.ones(8)
    recorded = torch.ones(8, requires_grad=True)

    def chain(value: Any) -> Any:
        for _ in range(num_ops):
            value = value * scale
        return value

    def direct() -> None:
        for _ in range(num_ops):
            aten.mul.Tensor(plain, scale)

    layers = nn.Sequential(*(nn.Identity() for _ in range(num_ops)))
    direct_s = clock(direct, 0.05) / num_ops
    forward_s = clock(lambda: chain(recorded), 0.05) / num_ops
    both_s = clock(lambda: chain(recorded).sum().backward(), 0.1) / num_ops
    update_s = clock(lambda: [plain.mul_(scale) for _ in range(num_ops)], 0.05) / num_ops
    return {
        "forward_s": forward_s - direct_s,
        "backward_s": both_s - forward_s - direct_s,
        "update_s": update_s - direct_s,
        "module_s": clock(lambda: layers(plain), 0.05) / num_ops,
    }


def _products(dtype: str, quick: bool) -> Iterator[Call]:
    """Rows, reduced and columns over what layers have; those of many seconds are left out."""
    import torch

    aten, sizes = torch.ops.aten, ((64, 512) if quick else (16, 128, 768, 3072))
    limit = 2e8 if quick else 4e9 if dtype == "fp32" else 1e9
    for m, k, n in itertools.product(sizes, repeat=3):
        if 2 * m * k * n <= limit:
            yield Call(aten.mm.default, (_random(dtype, m, k), _random(dtype, k, n)), dtype)
    for m, k in itertools.product((32, 128, 512), (64,) if quick else (32, 128)):
        b = 16
        yield Call(aten.bmm.default, (_random(dtype, b, m, k), _random(dtype, b, k, m)), dtype)
        yield Call(aten.bmm.default, (_random(dtype, b, m, m), _random(dtype, b, m, k)), dtype)


def _attention(dtype: str, quick: bool) -> Iterator[Call]:
    import torch

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    lengths, widths = ((64, 512), (64,)) if quick else ((32, 256, 1024), (32, 128))
    for s, d, causal in itertools.product(lengths, widths, (False, True)):
        q, k, v, grad = (_random(dtype, 2, 4, s, d) for _ in range(4))
        yield Call(forward, (q, k, v, 0.0, causal), dtype)
        out, log_sum = forward(q, k, v, 0.0, causal)
        yield Call(backward, (grad, q, k, v, out, log_sum, 0.0, causal), dtype)


def _convolutions(dtype: str, quick: bool) -> Iterator[Call]:
    import torch

    aten = torch.ops.aten
    channels = (16, 128) if quick else (16, 64, 256)
    sizes, widths = (14, 28) if quick else (7, 14, 56), (1, 3, 7)
    for c_in, c_out, size, kernel in itertools.product((3, *channels), channels, sizes, widths):
        if (kernel == 7) != (c_in == 3) or 4 * size * size * c_in * c_out * kernel**2 > 1.5e9:
            continue
        yield from _convolution(aten, dtype, c_in, c_out, size, kernel, groups=1)
    for c, size, kernel in itertools.product(channels, (14, 28), (3, 7)):
        yield from _convolution(aten, dtype, c, c, size, kernel, groups=c)


def _convolution(aten: Any, dtype: str, c_in: int, c_out: int, size: int, kernel: int, groups: int) -> Iterator[Call]:
    x, weight = _random(dtype, 4, c_in, size, size), _random(dtype, c_out, c_in // groups, kernel, kernel)
    grad, rest = _random(dtype, 4, c_out, size, size), ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    yield Call(aten.convolution.default, (x, weight, None, *rest), dtype)
    yield Call(aten.convolution_backward.default, (grad, x, weight, None, *rest, [True, True, False]), dtype)
    if c_in == 3:
        yield Call(aten.convolution_backward.default, (grad, x, weight, None, *rest, [False, True, False]), dtype)


def _movers(dtype: str, quick: bool) -> Iterator[Call]:
    """What moves memory, on rows of 256 elements."""
    sizes = (16, 4096) if quick else (4, 256, 4096, 65536) if dtype == "fp32" else (4, 4096)
    for num_rows in sizes:
        x, y = _random(dtype, num_rows, 256), _random(dtype, num_rows, 256)
        for func, args in itertools.chain(_unary(x, y), _binary(x, y), _in_rows(x, y), _updates(x, y)):
            yield Call(func, args, dtype)


def _unary(x: Any, y: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    import torch

    aten = torch.ops.aten
    for name in ("gelu", "silu", "tanh", "relu", "sigmoid", "exp", "rsqrt", "neg", "clone", "sqrt", "cos"):
        yield getattr(aten, name).default, (x.abs() if name.endswith("sqrt") else x,)
    yield aten.pow.Tensor_Scalar, (x, 2.0)
    yield (
        aten.clone.default,
        (x.view(-1, 4, 8, 8).transpose(1, 2),),
    )
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
    yield aten.where.self, (x > 0, x, y)
    yield aten.masked_fill.Scalar, (x, x > 0, 0.0)
    yield aten.cat.default, ([x, y], -1)


def _in_rows(x: Any, y: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    import torch

    aten, weight = torch.ops.aten, x[0].clone()
    yield aten._softmax.default, (x, -1, False)
    yield aten._softmax_backward_data.default, (x, y, -1, x.dtype)
    yield aten._log_softmax.default, (x, -1, False)
    yield aten._log_softmax_backward_data.default, (x, y, -1, x.dtype)
    yield aten.mean.dim, (x, [-1], True)
    yield aten.sum.dim_IntList, (x, [0], True)
    yield aten.native_layer_norm.default, (x, [256], weight, weight, 1e-5)
    _, mean, inverse = aten.native_layer_norm.default(x, [256], weight, weight, 1e-5)
    yield aten.native_layer_norm_backward.default, (y, x, [256], mean, inverse, weight, weight, [True, True, True])


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


def _pooling_and_gathers(quick: bool) -> Iterator[Call]:
    import torch

    aten = torch.ops.aten
    for size in (14, 28) if quick else (14, 28, 56, 112):
        x = _random("fp32", 4, 64, size, size)
        stats = (torch.ones(64), torch.zeros(64), torch.zeros(64), torch.ones(64))
        yield Call(aten.native_batch_norm.default, (x, *stats, True, 0.1, 1e-5), "fp32")
        kept = (torch.zeros(64), torch.ones(64))
        backward = (x, x, stats[0], stats[2], stats[3], *kept, True, 1e-5, [True, True, True])
        yield Call(aten.native_batch_norm_backward.default, backward, "fp32")
        pool = ([3, 3], [2, 2], [1, 1], [1, 1], False)
        yield Call(aten.max_pool2d_with_indices.default, (x, *pool), "fp32")
        out, places = aten.max_pool2d_with_indices.default(x, *pool)
        yield Call(aten.max_pool2d_with_indices_backward.default, (out, x, *pool, places), "fp32")
    for num_rows in (64, 1024) if quick else (64, 1024, 8192):
        table, rows = _random("fp32", 4096, 256), torch.arange(num_rows) % 4096
        yield Call(aten.embedding.default, (table, rows), "fp32")
        yield Call(
            aten.embedding_dense_backward.default, (_random("fp32", num_rows, 256), rows, 4096, -1, False), "fp32"
        )


_HELD_BYTES = 64 << 20


def _holding(call: Call, num_held: int) -> Callable[[], None]:
    """The call repeated with its outputs held and then dropped together, as the forward of a step holds what it saves."""
    func, args = call.func, call.args

    def run() -> None:
        held = [func(*args) for _ in range(num_held)]
        held.clear()

    return run


def _num_held(num_bytes: int, once_s: float, budget_s: float) -> int:
    return max(1, min(16, _HELD_BYTES // max(num_bytes, 1), int(budget_s / max(once_s, 1e-9))))


def _num_bytes(out: Any) -> int:
    tensors = out if isinstance(out, (tuple, list)) else [out]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if hasattr(tensor, "element_size"))


def _random(dtype: str, *shape: int) -> Any:
    """Values of any spread will do; a generator of its own leaves the global one alone."""
    import torch

    kinds = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    generator = torch.Generator().manual_seed(math.prod(shape) % 2**31)
    return torch.randn(*shape, generator=generator).to(kinds[dtype])
