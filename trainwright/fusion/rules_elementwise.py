"""Rules of functions that take elements one by one: the function itself, on shapes aligned behind B."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .array import Fused, functions_named, rules

_NAMES = """
abs absolute acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp
clamp_max clamp_min clip copysign cos cosh deg2rad div divide elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide
fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose isfinite
isinf isnan ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logical_and logical_not
logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative
not_equal positive pow reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinc sinh softplus
softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc where xlogy add addcdiv
addcmul to float double half bfloat16 int long bool type type_as detach clone contiguous requires_grad_ __add__
__radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
__floordiv__ __rfloordiv__ __mod__ __pow__ __rpow__ __ipow__ __neg__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__
__gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ zeros_like ones_like full_like empty_like
"""


def aligned(values: Iterable[Any]) -> list[Any]:
    """Return the raw tensors of fused values, with dims of one behind B so that all broadcast; anything else as it is.

    >>> import torch
    >>> one, two = aligned([Fused(torch.ones(3, 4)), torch.ones(2, 4)])
    >>> one.shape, two.shape
    (torch.Size([3, 1, 4]), torch.Size([2, 4]))
    """
    values = list(values)
    rank = max((_rank(value) for value in values), default=0)
    return [_with_rank(value, rank) for value in values]


def _rank(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _with_rank(value: Any, rank: int) -> Any:
    if type(value) is not Fused:
        return value
    raw = value.raw
    if raw.dim() - 1 < rank:
        raw = raw.reshape(raw.shape[0], *(1,) * (rank - raw.dim() + 1), *raw.shape[1:])
    return raw


def _elementwise(func: Any, in_place: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = aligned((*args, *kwargs.values()))
        found = func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :])))
        return args[0] if in_place else Fused(found)

    def run_in_place(first: Any, *args: Any, **kwargs: Any) -> Any:
        if type(first) is not Fused:
            return NotImplemented
        return run(first, *args, **kwargs)

    return run_in_place if in_place else run


for _name in _NAMES.split():
    for _func in functions_named(_name):
        rules[_func] = _elementwise(_func, in_place=_name.startswith("__i") and _name != "__invert__")
    if not _name.startswith("__"):
        for _func in functions_named(f"{_name}_"):
            rules[_func] = _elementwise(_func, in_place=True)
for _name in ("zero_", "fill_", "copy_"):
    for _func in functions_named(_name):
        rules[_func] = _elementwise(_func, in_place=True)
