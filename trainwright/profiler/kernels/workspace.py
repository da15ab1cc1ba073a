"""Predicts the workspace of a CPU kernel: what it allocates and frees inside one call, which no dispatch mode sees.

Three kinds of kernel, all found with the allocator's own records (`benchmarks/profiler`):

    ATen's own         a formula, exact                                 `workspace_native`, `workspace_attention`
    oneDNN's, small    the call is run once, on zeros, and measured     `probe`
    oneDNN's, large    a formula for the layouts that it mostly picks, checked against a call on a few images
                                                                        `workspace_convolution`, `workspace_recurrent`

The fake kernel of one op understates an output: what an LSTM layer saves for its backward (`output_bytes`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...torch_internals.trees import tensors_in
from .probe import probe as make_call
from .workspace_attention import attention_backward_bytes, attention_bytes
from .workspace_convolution import checked, convolution_backward_bytes, convolution_bytes
from .workspace_native import Estimate, conjugated_bytes, estimate_of, is_reduced
from .workspace_recurrent import lstm_backward_bytes, lstm_bytes, lstm_kept_bytes

aten = torch.ops.aten


def workspace_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, probe: bool = True) -> int:
    """Return the peak of the bytes that the CPU kernel of `func` allocates, beyond its outputs.

    Only shapes, strides and dtypes of args, kwargs and out are read. `probe=False`: formulas alone, no call is run.

    >>> x, w = torch.empty(8, 32, 32, 32), torch.empty(64, 32, 3, 3)
    >>> call = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    >>> out = torch.empty(8, 64, 32, 32)
    >>> workspace_bytes(torch.ops.aten.convolution.default, call, {}, out) >= 4 * out.numel()  # a copy of the output
    True
    """
    takes_conjugates = func in _TAKE_CONJUGATES or getattr(func, "is_view", False)
    copied = 0 if takes_conjugates else conjugated_bytes(args)
    return copied + _kernel_bytes(func, args, kwargs, out, probe)


def is_uneven(func: Any) -> bool:
    """Tell whether a share of the call of `func` may take another share of its workspace: oneDNN picks layouts by the shapes."""
    return func in _ONEDNN


def _kernel_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, probe: bool) -> int:
    estimate, is_private = _known(func)
    if is_private is None and estimate is None:
        return 0
    if probe and is_private is not None and (is_private or any(map(is_reduced, tensors_in(args)))):
        found = make_call(func, args, kwargs, out)
        if found is not None:
            return max(0, found.workspace_bytes)
        if func in _CONVOLUTIONS and estimate is not None:
            return max(0, checked(func, estimate, args, out))
    return 0 if estimate is None else max(0, estimate(args, out))


def output_bytes(func: Any, args: tuple[Any, ...], out: Any, *, probe: bool = True) -> dict[int, int]:
    """Return the true sizes, by position, of outputs that the fake kernel of `func` makes too small."""
    if func is not aten.mkldnn_rnn_layer.default or type(out[3]) is Tensor:
        return {}
    found = make_call(func, args, {}, out) if probe else None
    return {3: lstm_kept_bytes(args[0], args[2].shape[1]) if found is None else found.output_bytes[3]}


_CONVOLUTIONS: dict[Any, Estimate] = {
    aten.convolution.default: convolution_bytes,
    aten.convolution_backward.default: convolution_backward_bytes,
}
_ONEDNN: dict[Any, Estimate] = {
    **_CONVOLUTIONS,
    aten.mkldnn_rnn_layer.default: lstm_bytes,
    aten.mkldnn_rnn_layer_backward.default: lstm_backward_bytes,
}
_ATTENTION: dict[Any, Estimate] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_bytes,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward_bytes,
}
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default)
"""Matrix products, which oneDNN runs in bf16 and fp16."""
_TAKE_CONJUGATES = (
    *_PRODUCTS, aten.mv.default, aten.clone.default, aten.copy_.default, aten._to_copy.default, aten.empty_like.default,
)  # fmt: skip
"""Ops that read conjugates as they are, or whose copies of them have a formula, beside views."""
_UNWRITTEN = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bicubic2d_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.im2col.default,
    aten.col2im.default,
    aten._fused_rms_norm.default,
    aten._trilinear.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
    aten._fft_c2c.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_trilinear3d_backward.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bicubic2d_aa_backward.default,
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    aten._embedding_bag_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.sort.default,
    aten.sort.stable,
    aten.kthvalue.default,
    aten.dist.default,
    aten.isinf.default,
    aten.ldexp.Tensor,
)
"""ATen's own kernels whose temporaries follow from many small rules that are not modelled here, so they are measured."""


@functools.cache
def _known(func: Any) -> tuple[Estimate | None, bool | None]:
    """Return the formula of an op's workspace, and when a measurement replaces it.

    True: wherever the call is small enough to run; False: in bf16 and fp16 only; None: never.
    """
    if func in _ONEDNN or func in _UNWRITTEN:
        return _ONEDNN.get(func), True
    if func in _ATTENTION or func in _PRODUCTS:
        return _ATTENTION.get(func) or estimate_of(func), False
    return estimate_of(func), None
