"""What torch refuses for its types' sake: shape functions, which fakes are run by, do not look at all types.

Torch itself is asked, on one-element tensors of the same types and numbers of dims, once for every op and types. Where it
refuses, that may be for the call's numbers, which were meant for other sizes; so the same call is tried with other types.
Only if one of those is taken it is the types that are wrong, and the nearest of them is the remedy.

Asked are ops of which the table of ops says what they run over: with every loop of length 1, one element of each tensor
is a whole, consistent call. Kernels are not safe with others: what a user cannot call is not checked, and ends the process.
"""

from __future__ import annotations

import functools
import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..artifacts import UserError
from ..ops.registry import find
from ..torch_internals import private

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_MOST_ANSWERS = 50_000
_OTHER_TYPES = (torch.float32, torch.int64, torch.bool)
_NARROW = (torch.float16, torch.bfloat16)
_MOST_OPERANDS = 8
_BELOW_AUTOGRAD = {"native_batch_norm", "_native_batch_norm_legit", "nll_loss_forward", "nll_loss2d_forward"}
"""What a profile sees in place of ops of the table, and takes their operands."""
_OF_SEVERAL_GATES = {f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")}
"""Their gates share a dim, so that one element is no such call; `torch.nn` looks at their types itself."""
_SPREADS = {"std", "std_mean", "var", "var_mean"}
"""One element has no spread, of which torch warns on standard error; they take all types that a mean takes."""
_DIVIDED_BY_ZERO = "ZeroDivisionError"


@dataclass(frozen=True)
class Operand:
    """What counts of one tensor of a call."""

    dtype: torch.dtype
    num_dims: int
    differentiated: bool = False
    """Whether its gradient is asked for."""
    label: str = field(default="", compare=False)
    """What the tensor is to the user: `batch entry x`."""


@dataclass(frozen=True)
class Refused:
    """A call that torch refuses for its types."""

    said: str
    """Torch's own words."""
    names: tuple[str, ...]
    """The tensors' names in the op's schema, in their order, and what they are to the user."""
    dtypes: tuple[torch.dtype, ...]
    accepted: tuple[torch.dtype, ...]
    """The nearest types that torch takes."""

    @property
    def found(self) -> str:
        """The types that were given: `input: float64, weight: float32`."""
        return ", ".join(f"{name}: {_short(dtype)}" for name, dtype in zip(self.names, self.dtypes))

    @property
    def wanted(self) -> str:
        """What to convert: `input to float32`."""
        both = zip(self.names, self.dtypes, self.accepted)
        return " and ".join(f"{name} to {_short(to)}" for name, dtype, to in both if dtype != to)

    def message(self, target: Any, where: str) -> str:
        """Return *what is needed, what was found, what to try*."""
        return (
            f"types that torch takes together are needed; {private.packet(target)} at {where} is given {self.found}, and torch "
            f"says: {self.said}; convert {self.wanted}, in the batch or before the call"
        )


class WrongTypes(TypeError):
    """Raised amid a run on fakes, where torch would refuse the types of a call on real tensors."""

    def __init__(self, target: Any, refused: Refused) -> None:
        super().__init__(refused.message(target, "this line"))
        self.target, self.refused = target, refused


def check_types(graph: fx.Graph) -> None:
    """Raise `UserError` for the first call of a captured graph whose types torch refuses, in the forward or the backward."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = refused(node.target, *map_arg((node.args, node.kwargs), _operand_of))
        if found is not None:
            path, line = node.meta["path"], node.meta["stack"]
            own = [line] if line and not line.startswith(_STANDARD_LIBRARY) else []
            raise UserError(
                found.message(node.target, " in ".join([*own, *([path] if path else [])]) or "the model or its loss")
            )


def _operand_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    label = f"{_ROLES[node.meta['role']]} {node.meta['name']}" if node.op == "placeholder" else ""
    return Operand(value.dtype, value.dim(), bool(node.meta.get("requires_grad")), label)


_ROLES = {"input": "batch entry", "param": "parameter", "buffer": "buffer", "const": "constant"}


_ANSWERS: dict[Any, Refused | None] = {}


def refused(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refused | None:
    """Return why torch refuses the types of a call on fakes; None where it takes them, or nobody knows.

    In place of tensors there may be `Operand`s; where a gradient is asked for, the backward is tried too.

    >>> x, weight = torch.empty(8, 3, dtype=torch.float64), torch.empty(5, 3)
    >>> found = refused(torch.ops.aten.linear.default, (x, weight), {})
    >>> found.found, found.wanted
    ('input: float64, weight: float32', 'input to float32')
    """
    if not _is_asked(target):
        return None
    bound = private.bound(target, args, kwargs)
    tensors = list(_tensors(list(bound.values())))
    if not 0 < len(tensors) <= _MOST_OPERANDS or any(isinstance(each, Tensor) and not each.numel() for each in tensors):
        return None
    operands = tuple(map(_operand, tensors))
    key = (target, repr(_without_tensors(bound)), operands)
    if key not in _ANSWERS:
        if len(_ANSWERS) > _MOST_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[key] = _ask(target, bound, operands)
    found = _ANSWERS[key]
    return found and replace(found, names=tuple(_names(bound)))


@functools.cache
def _is_asked(target: Any) -> bool:
    if not isinstance(target, private.OpOverload) or target.namespace != "aten":
        return False
    name = private.packet(target).removesuffix("_")
    if not find(name).is_described and name not in _BELOW_AUTOGRAD:
        return False
    if name in _OF_SEVERAL_GATES or name in _SPREADS or "backward" in name:
        return False
    by_value = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return (
        not any(tag in target.tags for tag in by_value)
        and not private.is_view(target)
        and not private.is_random(target)
    )


def _ask(target: Any, bound: dict[str, Any], operands: tuple[Operand, ...]) -> Refused | None:
    bound = _with_ones(bound)
    with private.without_modes(), torch.autocast("cpu", enabled=False):
        error = _error_of(target, bound, operands)
        if error is None or str(error).startswith(_DIVIDED_BY_ZERO):  # whole numbers are zeros, as indices must be
            return None
        dtypes = tuple(operand.dtype for operand in operands)
        if isinstance(error, NotImplementedError) and any(dtype in _NARROW for dtype in dtypes):
            return None  # a kernel that the CPU lacks, and a GPU may have
        for other in _nearest(dtypes):
            asked = tuple(Operand(dtype, own.num_dims, own.differentiated) for dtype, own in zip(other, operands))
            if _error_of(target, bound, asked) is None:
                return Refused(_first_line(error), (), dtypes, other)
    return None


def _nearest(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[torch.dtype, ...]]:
    """Yield other types for the operands, those first that change the fewest."""
    candidates = dict.fromkeys((*dtypes, *_OTHER_TYPES))
    for num in range(1, len(dtypes) + 1):
        for places in itertools.combinations(range(len(dtypes)), num):
            for chosen in itertools.product(candidates, repeat=num):
                if all(dtypes[place] != dtype for place, dtype in zip(places, chosen)):
                    changed = dict(zip(places, chosen))
                    yield tuple(changed.get(place, dtype) for place, dtype in enumerate(dtypes))


def _error_of(target: Any, bound: dict[str, Any], operands: tuple[Operand, ...]) -> Exception | None:
    """Run the call, and where asked its backward, on one element of each type."""
    queue = iter(operands)
    leaves: list[Tensor] = []
    is_written = private.is_mutating(target)

    def fill(value: Any) -> Any:
        if isinstance(value, Tensor | Operand):
            leaves.append(_one(next(queue)))
            return leaves[-1].clone() if is_written else leaves[-1]  # autograd takes no write to a leaf
        return [fill(each) for each in value] if isinstance(value, list | tuple) else value

    try:
        differentiated = any(operand.differentiated and operand.dtype.is_floating_point for operand in operands)
        with torch.set_grad_enabled(differentiated):
            out = private.called(target, {name: fill(value) for name, value in bound.items()})
            if differentiated:
                outs = [each for each in private.flatten(out)[0] if isinstance(each, Tensor) and each.requires_grad]
                asked = [leaf for leaf in leaves if leaf.requires_grad]
                torch.autograd.grad(outs, asked, [torch.ones_like(each) for each in outs], allow_unused=True)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # NotImplementedError is a RuntimeError
        return error.with_traceback(None)  # whose frames would keep the tensors of all callers
    return None


def _one(operand: Operand) -> Tensor:
    """A tensor of one element: 1, or 0 where it may be an index."""
    make = torch.ones if operand.dtype.is_floating_point else torch.zeros
    requires_grad = operand.differentiated and operand.dtype.is_floating_point
    return make([1] * operand.num_dims, dtype=operand.dtype, device="cpu", requires_grad=requires_grad)


def _operand(tensor: Any) -> Operand:
    return tensor if isinstance(tensor, Operand) else Operand(tensor.dtype, tensor.dim())


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | Operand):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _names(bound: dict[str, Any]) -> Iterator[str]:
    for argument, value in bound.items():
        is_list = isinstance(value, list | tuple)
        for place, tensor in enumerate(_tensors(value)):
            name, label = f"{argument}[{place}]" if is_list else argument, getattr(tensor, "label", "")
            yield f"{name} ({label})" if label else name


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor | Operand):
        return ...
    if isinstance(value, dict):
        return {key: _without_tensors(each) for key, each in value.items()}
    return [_without_tensors(each) for each in value] if isinstance(value, list | tuple) else value


def _with_ones(value: Any) -> Any:
    """Make sizes 1, as the tensors' are: those of a normalised shape, numbers of groups."""
    if isinstance(value, dict):
        return {key: _with_ones(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_ones(each) for each in value]
    return 1 if type(value) is int and value > 1 else value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
