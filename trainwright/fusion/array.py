"""`Fused`: the values that one tensor has in each of B models, behind the shape that a single model sees.

A model's own forward runs once on these. Each call of a torch function comes here, in this order:

    rule       one call for all models: grouped convolution, batched product, …   `rules`, filled by the files `rules_*`
    vmap       `torch.func.vmap` of that one function
    B times    the function once a model, each with its own random stream          `fallback`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from ..torch_internals.private import without_storage

Rule = Callable[..., Any]
rules: dict[Any, Rule] = {}
"""By torch function (`torch.nn.functional.linear`, `torch.Tensor.view`, …): what it does to fused arguments."""


class Fused(Tensor):
    """A tensor of each of B models; `raw` [B, …] holds them, and what the model sees is the shape without B.

    It stands in for a tensor: torch functions and methods take it. Values cannot be read as one number unless all models have
    the same (`UserError`): a branch on them would part the models.
    """

    raw: Tensor

    # A class of its own that only passed for a tensor (`__class__`) would do in Python, but torch's C++ asks `isinstance` too,
    # and reads the memory of what it takes for a tensor: `torch.pow(x, 3.0)` does, to see whether x is a number.
    @staticmethod
    def __new__(cls, raw: Tensor) -> Fused:
        return without_storage(cls, raw.shape[1:], raw.dtype, raw.device)

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What C++ does with a fused tensor that it was handed among plain arguments."""
        if func is torch.ops.aten._local_scalar_dense.default:  # a number is taken of it
            return _agreed(args[0])
        raise UserError(
            f"functions that ask their arguments' class (__torch_function__) are needed for several models at once; {func} was "
            "called by one that does not; name the module in fuse(unfused=[…])"
        )

    shape = property(lambda self: self.raw.shape[1:])  # type: ignore[assignment]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.raw.dim() - 1

    ndim = property(dim)
    ndimension = dim

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    dtype = property(lambda self: self.raw.dtype)
    device = property(lambda self: self.raw.device)
    layout = property(lambda self: self.raw.layout)
    requires_grad = property(lambda self: self.raw.requires_grad)
    is_cuda = property(lambda self: self.raw.is_cuda)
    is_meta = property(lambda self: self.raw.is_meta)
    is_sparse = is_quantized = is_nested = is_mps = is_xpu = is_mkldnn = property(lambda self: False)
    grad_fn = property(lambda self: self.raw.grad_fn)

    def is_floating_point(self) -> bool:
        return self.raw.is_floating_point()

    def is_complex(self) -> bool:
        return self.raw.is_complex()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def __iter__(self) -> Iterator[Fused]:
        return iter([Fused(each) for each in self.raw.unbind(1)])

    def item(self) -> Any:
        return _agreed(self)

    tolist = item

    def __bool__(self) -> bool:
        return bool(_agreed(self))

    def __int__(self) -> int:
        return int(_agreed(self))

    def __float__(self) -> float:
        return float(_agreed(self))

    __index__ = __int__

    def __format__(self, how: str) -> str:
        return repr(self)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fused({len(self.raw)} models, {list(self.shape)}, {self.dtype})"

    def __hash__(self) -> int:
        return id(self)


def _agreed(fused: Fused) -> Any:
    """Return the value that all models have."""
    first, *others = fused.raw.tolist()
    if any(other != first for other in others):
        raise UserError(
            f"a value that all models share is needed where the forward reads one in Python; the {len(others) + 1} models have "
            f"{', '.join(map(str, fused.raw.tolist()))[:120]}; train them apart, or name the module in fuse(unfused=[…])"
        )
    return first


def _operator(name: str) -> Callable[..., Any]:
    func = getattr(Tensor, name)

    def run(self: Fused, *args: Any) -> Any:
        return dispatch(func, (self, *args), {})

    return run


_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod pow rpow ipow matmul rmatmul neg "
    "abs invert eq ne lt le gt ge and rand or ror xor rxor getitem setitem"
)
for _name in _OPERATORS.split():
    setattr(Fused, f"__{_name}__", _operator(f"__{_name}__"))


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` gives of arguments some of which are fused."""
    rule = rules.get(func)
    if rule is None:
        from .fallback import without_rule

        return without_rule(func, args, kwargs)
    found = rule(*args, **kwargs)
    if found is NotImplemented:
        from .fallback import without_rule

        return without_rule(func, args, kwargs)
    return found


def is_fused(value: Any) -> bool:
    """Tell whether `value` is a `Fused`."""
    return type(value) is Fused


def num_models(*values: Any) -> int:
    """Return B, off the first fused value."""
    return next(len(value.raw) for value in values if type(value) is Fused)


def raw_of(value: Any, num: int) -> Tensor:
    """Return `[B, …]` of a fused value, or of a tensor that all share (no copy)."""
    return value.raw if type(value) is Fused else value.expand(num, *value.shape)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the functions that have these names in torch, torch.Tensor or torch.nn.functional."""

    def register(function: Rule) -> Rule:
        for name in names:
            for func in functions_named(name):
                rules[func] = function
        return function

    return register


def functions_named(name: str) -> list[Any]:
    """Return what torch, its tensors and `torch.nn.functional` call so."""
    places = (torch, Tensor, torch.nn.functional, torch.special, torch.linalg)
    found = [getattr(place, name) for place in places if hasattr(place, name)]
    return [func for func in found if callable(func)]
