"""`kernel_of`: which kernel an ATen call runs, by what its speed depends on; what `calibrate` measures and time is told by.

products        mm [m, k, n], bmm [b, m, k, n]              work: FLOPs; those that add to a given tensor apart
convolutions    [positions, c_in, c_out, area of the kernel]  work: FLOPs; those with one channel a group apart
attention       [b·h, s_q, s_k, d], causal ones apart       work: FLOPs of the full square
rows            [rows, their length]                        work: bytes read and written; softmax and norms over them
tables          [rows, their length, entries]               work: those bytes; gradients of tables of embeddings
anything else   [bytes read and written]                     work: those bytes; copies and elementwise ops that read or
                                                             write memory out of order apart, GELU by tanh too
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .flops import bytes_moved, flops, is_convolution, is_heavy

Kind = Literal[
    "products", "convolutions", "depthwise", "attention", "batch norms", "strided", "reductions", "elementwise"
]
"""The kinds of kernels whose speed follows from their sizes in different ways on a GPU (`profiler.gpu_time`)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kind of kernel, the sizes that its speed depends on, and its work in FLOPs (products) or bytes (the rest)."""

    name: str
    dims: tuple[int, ...]
    work: int

    @property
    def kind(self) -> Kind:
        """Return the kind of the kernel; a kernel of which nothing else is known counts as elementwise.

        >>> [Kernel(name, (), 0).kind for name in ("addmm", "convolution_backward_weight", "_softmax", "clone_strided", "gelu")]
        ['products', 'convolutions', 'reductions', 'strided', 'elementwise']
        """
        if self.name in _PRODUCTS:
            return "products"
        if self.name in _BATCH_NORMS:
            return "batch norms"
        if self.name.endswith("_strided"):
            return "strided"
        if self.name.startswith(_SUMS_OF_ROWS):
            return "reductions"
        return next((kind for begin, kind in _MADE_HERE.items() if self.name.startswith(begin)), "elementwise")


def moving(num_bytes: int) -> Kernel:
    """Return the simplest kernel that moves so many bytes: one operation an element."""
    return Kernel("mul", (num_bytes,), num_bytes)


def drawing(num_bytes: int) -> Kernel:
    """Return the kernel that draws so many bytes of random numbers, as dropout does."""
    return Kernel("bernoulli_", (num_bytes,), num_bytes)


def kernel_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Kernel:
    """Return the kernel of the call `out = func(*args, **kwargs)`; only shapes and strides are read.

    >>> a, b = torch.zeros(3, 5), torch.zeros(5, 7)
    >>> kernel_of(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    Kernel(name='mm', dims=(3, 5, 7), work=210)
    >>> kernel_of(torch.ops.aten.mul.Tensor, (a, a), {}, a * a)
    Kernel(name='mul', dims=(180,), work=180)
    """
    if is_heavy(func):
        work = flops(func, args, kwargs, out)[0]
        name = _packet_name(func)
        if is_convolution(func):
            return Kernel(*_convolution(name, args, out), work)
        if "attention" in name:
            return Kernel(*_attention(func, args, kwargs), work)
        return Kernel(*_product(name, args, out), work)
    num_bytes = bytes_moved(func, args, out)
    name = _packet_name(func) + ("_tanh" if kwargs.get("approximate") == "tanh" else "")
    if name in _OVER_ROWS:
        return Kernel(name, _rows(name, args), num_bytes)
    if name == "embedding_dense_backward":  # it adds row by row: short ones take as long as long ones
        return Kernel(name, (args[1].numel(), out.shape[-1], out.shape[0]), num_bytes)
    is_apart = (name in _COPIES or torch.Tag.pointwise in getattr(func, "tags", ())) and _is_strided(args, out)
    return Kernel(f"{name}_strided" if is_apart else name, (num_bytes,), num_bytes)


def skips_half(kernel: Kernel) -> bool:
    """Tell whether it computes half of what its work counts: fused attention leaves out what a causal mask hides.

    >>> skips_half(Kernel("attention_backward_causal", (8, 64, 64, 16), 1)), skips_half(Kernel("mm", (2, 2, 2), 16))
    (True, False)
    """
    return kernel.name.endswith("_causal")


def stand_ins(name: str) -> tuple[str, ...]:
    """Return whose measurements tell this kernel's time, best first: its own, then those of its like.

    >>> stand_ins("attention_causal"), stand_ins("sub_strided")
    (('attention_causal', 'attention', 'mul'), ('sub_strided', 'mul_strided'))
    >>> stand_ins("gelu_tanh")
    ('gelu_tanh', 'gelu', 'mul')
    >>> stand_ins("addmm"), stand_ins("grouped_mm")
    (('addmm', 'mm'), ('grouped_mm', 'bmm'))
    """
    if name in _LIKE:
        return name, _LIKE[name]
    plain = name.removesuffix("_causal").removesuffix("_tanh")
    return tuple(dict.fromkeys((name, plain, family(name))))


def family(name: str) -> str:
    """Return the kernel that stands for one that was not measured: of the same kind, by its name.

    >>> family("sub"), family("addcdiv_"), family("amax"), family("copy__strided")
    ('mul', 'mul_', 'sum', 'clone_strided')
    """
    if name.endswith("_strided"):
        return "clone_strided" if name.removesuffix("_strided") in _COPIES else "mul_strided"
    if name.endswith("_") and not name.startswith("__"):
        return "mul_"
    if name.startswith(_REDUCTIONS):
        return "sum"
    return "mul"


def _product(name: str, args: tuple[Any, ...], out: Any) -> tuple[str, tuple[int, ...]]:
    if "rnn" in name:
        return name, (args[0].shape[0], args[0].shape[1], args[2].shape[-1])
    if not isinstance(out, Tensor) or out.dim() < 2:
        return "mm", (1, max(args[0].numel(), 1), 1)
    if name == "grouped_mm":  # as many rows in each run: how they fall is in no shape
        groups, inner, columns = args[1].shape
        return name, (groups, -(-args[0].shape[0] // groups), inner, columns)
    if name == "grouped_outer":
        groups, rows, columns = out.shape
        return name, (groups, rows, -(-args[0].shape[0] // groups), columns)
    left = args[1] if name.startswith(("add", "badd")) else args[0]
    inner = left.shape[-1]
    if "bmm" in name:
        return name if name in _WITH_ADDITION else "bmm", (out.shape[0], out.shape[1], inner, out.shape[2])
    columns = out.shape[-1]
    return name if name in _WITH_ADDITION else "mm", (out.numel() // max(columns, 1), inner, columns)


def _convolution(name: str, args: tuple[Any, ...], out: Any) -> tuple[str, tuple[int, ...]]:
    backward = "backward" in name
    grad_or_out = args[0] if backward else out
    weight, groups = (args[2], args[9]) if backward else (args[1], args[8] if len(args) > 8 else 1)
    kind = "depthwise" if groups > 1 and weight.shape[1] == 1 else "convolution"
    if backward:
        kind += "_backward" if args[10][0] else "_backward_weight"
    positions = grad_or_out.shape[0] * math.prod(grad_or_out.shape[2:])
    return kind, (positions, weight.shape[1] * groups, weight.shape[0], math.prod(weight.shape[2:]))


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    name = _packet_name(func)
    backward = "backward" in name
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    place = _place_of_causal(func)
    causal = kwargs.get("is_causal", args[place] if place is not None and place < len(args) else False)
    kind = "attention_cudnn" if "cudnn" in name else "attention"
    kind += ("_backward" if backward else "") + ("_causal" if causal is True else "")
    return kind, (math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1])


@functools.cache
def _place_of_causal(func: Any) -> int | None:
    """Return where `is_causal` stands among the arguments: each kernel's forward and backward has an order of its own."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return next((place for place, argument in enumerate(arguments) if argument.name == "is_causal"), None)


def _rows(name: str, args: tuple[Any, ...]) -> tuple[int, int]:
    values = args[1] if name == "native_layer_norm_backward" else args[0]
    places = {"native_layer_norm": 1, "native_layer_norm_backward": 2}
    if name in places:
        length = math.prod(args[places[name]])
    else:
        length = values.shape[args[2 if "backward" in name else 1]] if values.dim() else 1
    return values.numel() // max(length, 1), length


def _packet_name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func).__name__)


def _is_strided(args: tuple[Any, ...], out: Any) -> bool:
    """Whether memory is read or written out of order: operands alike in layout are walked as one run."""
    tensors = [value for value in (*args[:3], out) if isinstance(value, Tensor) and value.dim() > 1]
    whole = [value for value in tensors if 0 not in value.stride() and value.numel() == tensors[-1].numel()]
    return len({_steps(value) for value in whole}) > 1


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the dims that have more than one element."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride()) if size > 1)


_WITH_ADDITION = {"addmm": "mm", "baddbmm": "bmm"}
_LIKE = {**_WITH_ADDITION, "grouped_mm": "bmm", "grouped_outer": "bmm"}
"""Products beside the plain ones, with whose measurements stand for theirs: of as many dims."""
_PRODUCTS = ("mm", "bmm", *_LIKE)
_BATCH_NORMS = ("native_batch_norm", "native_batch_norm_backward")
_SUMS_OF_ROWS = ("sum", "mean", "native_layer_norm", "_softmax", "_log_softmax", "native_group_norm")
_MADE_HERE: dict[str, Kind] = {"convolution": "convolutions", "depthwise": "depthwise", "attention": "attention"}
"""How the names that `kernel_of` makes begin, and the kind of these kernels."""
_OVER_ROWS = {"native_layer_norm", "native_layer_norm_backward", "_softmax", "_softmax_backward_data", "_safe_softmax",
              "_log_softmax", "_log_softmax_backward_data"}  # fmt: skip
_COPIES = {"clone", "copy_", "_to_copy", "_reshape_copy", "contiguous"}
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "linalg_vector_norm", "argmax", "all", "any",
               "nll_loss")  # fmt: skip
