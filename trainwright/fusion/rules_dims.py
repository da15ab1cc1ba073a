"""Rules of functions that name dims, or change them: B stands in front, so a dim counted from the front is one further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .array import Fused, functions_named, num_models, raw_of, rule, rules

_REDUCTIONS = "sum mean amax amin var std logsumexp norm any all nansum prod argmax argmin count_nonzero"
_ALONG = "softmax log_softmax softmin cumsum cumprod cummax cummin sort argsort topk roll glu normalize unflatten"
_MOVES = "transpose swapaxes unsqueeze narrow select chunk split tensor_split unbind diff"
_DIM_AT = {"transpose": (1, 2), "swapaxes": (1, 2), "topk": (2,), "chunk": (2,), "split": (2,), "tensor_split": (2,), "roll": (2,),
           "normalize": (2,), "diff": (2,)}  # fmt: skip
"""Where the dims stand among the arguments, if not right behind the tensor."""
_KEYS = ("dim", "dims", "dim0", "dim1", "axis", "axis0", "axis1")
_DEFAULT = {"argsort": -1, "sort": -1, "topk": -1, "glu": -1, "normalize": 1, "chunk": 0, "split": 0, "unbind": 0, "diff": -1,
            "tensor_split": 0}  # fmt: skip
_VIEWS = "view reshape expand permute flatten squeeze repeat"


def shifted(dim: Any) -> Any:
    """Return a dim, or several, as they are behind B.

    >>> shifted(0), shifted(-1), shifted((1, -2))
    (1, -1, (2, -2))
    """
    if isinstance(dim, (tuple, list)):
        return type(dim)(shifted(each) for each in dim)
    return dim + 1 if isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 else dim


def wrapped(found: Any) -> Any:
    """Return raw results, in whatever tuple, as fused."""
    if isinstance(found, Tensor):
        return Fused(found)
    if isinstance(found, (tuple, list)):
        parts = [wrapped(each) for each in found]
        return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)
    return found


def _along(func: Any, name: str) -> Callable[..., Any]:
    places = _DIM_AT.get(name, (1,))

    def run(*args: Any, **kwargs: Any) -> Any:
        if not args or type(args[0]) is not Fused or not _in_range(args, kwargs, places):
            return NotImplemented
        given = [shifted(arg) if at in places else arg for at, arg in enumerate(args)]
        named = {key: shifted(value) if key in _KEYS else value for key, value in kwargs.items()}
        if name in _DEFAULT and len(args) <= places[0] and not _says_dim(kwargs):
            named["dim"] = shifted(_DEFAULT[name])
        given[0] = args[0].raw
        return wrapped(func(*given, **named))

    return run


def _reduction(func: Any, name: str) -> Callable[..., Any]:
    along = _along(func, name)
    of_all = name in ("argmax", "argmin", "prod", "norm", "any", "all")
    at = 2 if name == "norm" else 1

    def run(*args: Any, **kwargs: Any) -> Any:
        if not args or type(args[0]) is not Fused or any(type(each) in (Fused, bool) for each in args[1:]):
            return NotImplemented
        dim_given = (len(args) > at and args[at] is not None) or _says_dim(kwargs)
        if name == "norm" and (dim_given or len(args) > 2):
            return NotImplemented
        if dim_given:
            return along(*args, **kwargs)
        raw = args[0].raw
        rest = {key: value for key, value in kwargs.items() if value is not None or key not in _KEYS}
        if of_all:
            flat = raw.reshape(raw.shape[0], -1)
            return _norm_of_all(flat, *args[1:], **rest) if name == "norm" else Fused(func(flat, dim=1, **rest))
        return Fused(
            func(raw, dim=tuple(range(1, raw.dim())), **rest)
            if raw.dim() > 1
            else func(raw.unsqueeze(1), dim=1, **rest)
        )

    return run


def _norm_of_all(flat: Tensor, p: Any = "fro", **others: Any) -> Any:
    """Return each model's norm of all its elements, of which the Frobenius norm is the Euclidean one."""
    if p == "nuc" or any(others.values()):
        return NotImplemented
    return Fused(torch.linalg.vector_norm(flat, 2 if p == "fro" else p, dim=1))


def _says_dim(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(key) is not None for key in _KEYS)


def _in_range(args: tuple[Any, ...], kwargs: dict[str, Any], places: tuple[int, ...]) -> bool:
    """Tell whether no dim that is counted from the back reaches B: torch's own message is better than a wrong result."""
    dims = [args[at] for at in places if at < len(args)] + [value for key, value in kwargs.items() if key in _KEYS]
    flat = [each for dim in dims for each in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    return all(each >= -max(1, args[0].dim()) for each in flat if isinstance(each, int)) and args[0].dim() > 0


for _name in (*_ALONG.split(), *_MOVES.split()):
    for _func in functions_named(_name):
        rules[_func] = _along(_func, _name)
for _name in _REDUCTIONS.split():
    for _func in functions_named(_name):
        rules[_func] = _reduction(_func, _name)


def _extreme(func: Any, all_of: Any) -> Callable[..., Any]:
    along = _along(func, "max")

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())) or type(x) is not Fused:
            return NotImplemented
        return along(x, *args, **kwargs) if args or kwargs else Fused(all_of(x.raw, dim=tuple(range(1, x.raw.dim()))))

    return run


for _name, _all_of in (("max", torch.amax), ("min", torch.amin)):
    for _func in functions_named(_name):
        rules[_func] = _extreme(_func, _all_of)


def _sizes(given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    listed = given or tuple(kwargs.values())
    return tuple(listed[0]) if len(listed) == 1 and isinstance(listed[0], (tuple, list, torch.Size)) else tuple(listed)


@rule("view", "reshape", "view_as", "reshape_as")
def _view(x: Any, *shape: Any, **kwargs: Any) -> Any:
    if type(x) is not Fused or (shape and isinstance(shape[0], torch.dtype)):
        return NotImplemented
    if shape and isinstance(shape[0], Tensor):
        shape = tuple(shape[0].shape)
    return Fused(x.raw.reshape(x.raw.shape[0], *_sizes(shape, kwargs)))


@rule("expand", "expand_as")
def _expand(x: Any, *sizes: Any, **kwargs: Any) -> Any:
    if type(x) is not Fused:
        return NotImplemented
    wanted = tuple(sizes[0].shape) if sizes and isinstance(sizes[0], Tensor) else _sizes(sizes, kwargs)
    raw = x.raw.reshape(x.raw.shape[0], *(1,) * (len(wanted) - x.dim()), *x.shape)
    return Fused(raw.expand(raw.shape[0], *wanted))


@rule("permute")
def _permute(x: Any, *dims: Any, **kwargs: Any) -> Any:
    wanted = _sizes(dims, kwargs)
    return Fused(x.raw.permute(0, *(dim % x.dim() + 1 for dim in wanted)))


@rule("flip")
def _flip(x: Any, *dims: Any, **kwargs: Any) -> Any:
    return Fused(x.raw.flip(tuple(dim % x.dim() + 1 for dim in _sizes(dims, kwargs))))


@rule("repeat")
def _repeat(x: Any, *sizes: Any, **kwargs: Any) -> Any:
    wanted = _sizes(sizes, kwargs)
    raw = x.raw.reshape(x.raw.shape[0], *(1,) * (len(wanted) - x.dim()), *x.shape)
    return Fused(raw.repeat(1, *wanted))


@rule("flatten")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() == 0:
        return Fused(x.raw.unsqueeze(1))
    return Fused(x.raw.flatten(start_dim % x.dim() + 1, end_dim % x.dim() + 1))


@rule("squeeze")
def _squeeze(x: Any, dim: Any = None) -> Any:
    if dim is None:
        dim = tuple(range(x.dim()))
    wanted = (dim,) if isinstance(dim, int) else tuple(dim)
    return Fused(x.raw.squeeze(tuple(each % x.dim() + 1 for each in wanted)) if x.dim() else x.raw)


@rule("t")
def _t(x: Any) -> Any:
    return Fused(x.raw.transpose(1, 2) if x.dim() == 2 else x.raw)


for _func in (Tensor.T.__get__, Tensor.mT.__get__):  # type: ignore[attr-defined]
    rules[_func] = lambda x: Fused(x.raw.transpose(-1, -2)) if x.dim() == 2 else NotImplemented
rules[Tensor.data.__get__] = lambda x: Fused(x.raw.detach())  # type: ignore[attr-defined]


def _joining(func: Any) -> Callable[..., Any]:
    def run(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
        num = num_models(*tensors)
        return Fused(func([raw_of(each, num) for each in tensors], dim=shifted(dim), **kwargs))

    return run


for _func in (torch.cat, torch.concat, torch.stack):
    rules[_func] = _joining(_func)


@rule("__getitem__")
def _getitem(x: Any, index: Any) -> Any:
    if type(x) is not Fused or not _is_basic(index):
        return NotImplemented
    return Fused(x.raw[(slice(None), *(index if isinstance(index, tuple) else (index,)))])


@rule("__setitem__")
def _setitem(x: Any, index: Any, value: Any) -> Any:
    if type(x) is not Fused or not _is_basic(index):
        return NotImplemented
    part = Fused(x.raw[(slice(None), *(index if isinstance(index, tuple) else (index,)))])
    part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)
    return None


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool))
        for part in parts
    )
