"""A digest of everything in a model, a batch and a loss that a capture may depend on.

Two models of equal digest have the same tree of modules with the same plain attributes, the same code, parameters of the
same shapes and buffers of the same values. What cannot be looked into to the end (an object of a C type, a tensor whose
values are not at hand) raises `NotStorable`: such a model is captured anew each time.

Code of installed packages is named by its bytecode alone; of the user's own functions, the globals that they name are part
of the digest too, and so on from function to function. What is not seen: globals reached by a computed name, files and
environment variables that a forward reads.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import private
from .stored import NotStorable

__all__ = ["digest_of"]

LARGEST_BUFFERS = 64 * 2**20
"""Bytes of values to look at; a model with more of them in buffers is not stored."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice,
          torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)  # fmt: skip
_BUILT_IN = (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
             types.MemberDescriptorType, types.ModuleType, types.GenericAlias, types.UnionType, logging.Logger)  # fmt: skip
"""What is named and not looked into: code in C, whole modules, types."""
_CODE = (types.FunctionType, staticmethod, classmethod, property)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_BOOKKEEPING = {
    "__module__",
    "__dict__",
    "__weakref__",
    "__doc__",
    "__annotations__",
    "__qualname__",
    "__firstlineno__",
    "__static_attributes__",
    "__abstractmethods__",
    "_abc_impl",
    "__slotnames__",
    "__parameters__",
    "__orig_bases__",
}
"""Members of a class that Python keeps for itself."""
_OTHER_EACH_TIME = {"_original_object_hash"}
"""Attributes of transformers' that hold a hash, other in each process, of what is looked at anyway."""


def digest_of(*things: Any, is_own_file: Callable[[str], bool] = lambda path: False) -> str:
    """Return a digest of models, batches, functions and values; `NotStorable` where one cannot be looked into.

    is_own_file: whether a file of Python code is the user's own, whose globals are looked at.

    >>> digest_of({"x": torch.ones(2)}) == digest_of({"x": torch.ones(2)}) != digest_of({"x": torch.zeros(2)})
    True
    """
    found = _Description(is_own_file)
    try:
        for thing in things:
            found.add(thing)
    except RecursionError:
        raise NotStorable("the model is nested too deep to be looked into") from None
    return found.digest.hexdigest()


class _Description:
    def __init__(self, is_own_file: Callable[[str], bool]) -> None:
        self.digest = hashlib.blake2b(digest_size=20)
        self._is_own_file = is_own_file
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []
        """What was seen, alive, so that no other object gets its id."""
        self._bytes_left = LARGEST_BUFFERS

    def _say(self, *words: Any) -> None:
        self.digest.update(repr(words).encode("utf8", "backslashreplace"))

    def add(self, value: Any) -> None:
        """Take in one value and all that it holds."""
        kind = type(value)
        if kind in _PLAIN:
            self._say(kind.__name__, value)
            return
        if id(value) in self._seen:
            self._say("again", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._held)
        self._held.append(value)
        self._compound(value, kind)

    def _all(self, word: str, values: Iterable[Any]) -> None:
        found = list(values)
        self._say(word, len(found))
        for value in found:
            self.add(value)

    def _pairs(self, word: str, mapping: Mapping[Any, Any]) -> None:
        self._all(word, (part for pair in mapping.items() for part in pair))

    def _compound(self, value: Any, kind: type) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif kind in (list, tuple):
            self._all(kind.__name__, value)
        elif kind is dict:
            self._pairs("dict", value)
        elif kind in (set, frozenset):
            self._say(kind.__name__, sorted(digest_of(item, is_own_file=self._is_own_file) for item in value))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, enum.Enum):
            self._say("enum", kind.__module__, kind.__qualname__, value.name)
        elif isinstance(value, _BUILT_IN) or kind.__module__ == "typing":
            self._say("named", kind.__name__, getattr(value, "__module__", ""), getattr(value, "__name__", str(value)))
        elif isinstance(value, (private.OpOverload, type(torch.ops.aten.add))):
            self._say("op", str(value))
        else:
            self._callable_or_object(value, kind)

    def _callable_or_object(self, value: Any, kind: type) -> None:
        if kind is types.FunctionType:
            self._function(value)
        elif kind is types.MethodType:
            self._all("method", (value.__func__, value.__self__))
        elif kind is functools.partial:
            self._all("partial", (value.func, value.args, value.keywords))
        elif kind in (staticmethod, classmethod):
            self._all(kind.__name__, (value.__func__,))
        elif kind is property:
            self._all("property", (value.fget, value.fset, value.fdel))
        elif kind is types.CodeType:
            self._code(value)
        elif kind is types.MappingProxyType:
            self._pairs("proxy", value)
        else:
            self._object(value, kind)

    def _tensor(self, value: Tensor) -> None:
        """Form of a tensor; and its values, unless the export sees a stand-in of it."""
        if value.layout is not torch.strided:
            raise NotStorable(f"a tensor of layout {value.layout}")
        self._say(
            "tensor", type(value).__qualname__, tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        )
        if isinstance(value, nn.Parameter):
            return
        self._say(value.device.type)
        if value.device.type == "meta" or isinstance(value, private.FakeTensor):
            return
        self._bytes_left -= value.numel() * value.element_size()
        if value.device.type != "cpu" or type(value) is not Tensor or self._bytes_left < 0:
            raise NotStorable("a tensor whose values are not at hand")
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        self.digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)

    def _module(self, module: nn.Module) -> None:
        own = dict(vars(module))
        for name in _HOOKS:
            if own.pop(name, None) and not name.endswith("dict_hooks"):
                raise NotStorable("a module with hooks")
        tables = {name: own.pop(name) for name in ("_parameters", "_buffers", "_modules")}
        self.add(type(module))
        for table in tables.values():
            self._pairs("table", table)
        self._pairs("attributes", own)

    def _class(self, kind: type) -> None:
        """A class made in Python: its bases, its code, and of the user's own classes everything else in them too."""
        self._say("class", kind.__module__, kind.__qualname__)
        if kind in (object, nn.Module) or not kind.__flags__ & _MADE_BY_PYTHON:
            return
        self._all("bases", kind.__bases__)
        is_own = self._is_own_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
        for name, value in sorted(vars(kind).items()):
            if name in _BOOKKEEPING:
                continue
            self._say("member", name, type(value).__name__)
            if is_own or type(value) in _CODE:
                self.add(value)

    def _function(self, function: types.FunctionType) -> None:
        self._say("function", function.__module__, function.__qualname__)
        self._code(function.__code__)
        self._say("annotations", {name: str(kind) for name, kind in function.__annotations__.items()})
        self._all("defaults", (function.__defaults__, function.__kwdefaults__))
        held = [_content(cell) for cell in function.__closure__ or ()]
        if self._is_own_file(function.__code__.co_filename):
            self._all("closure", held)
            self._globals(function)
        else:  # an installed package's decorators hold what they like; their files say what
            self._all("closure", (each for each in held if type(each) in (*_CODE, *_PLAIN)))

    def _globals(self, function: types.FunctionType) -> None:
        """The globals that a function of the user's names, and of the user's modules among them the members that it names."""
        names = sorted(set(_names_in(function.__code__)))
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            self._say("global", name)
            self.add(value)
            if isinstance(value, types.ModuleType) and self._is_own_file(getattr(value, "__file__", None) or ""):
                self._all("members", (vars(value)[each] for each in names if each in vars(value)))

    def _code(self, code: types.CodeType) -> None:
        self._say("code", code.co_qualname, code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        self._all("constants", code.co_consts)

    def _object(self, value: Any, kind: type) -> None:
        """An object all of whose state lies in its attributes and items; no other can be known."""
        self._say("object", kind.__module__, kind.__qualname__)
        self.add(kind)
        if isinstance(value, dict):
            self._pairs("items", dict(value))
        elif isinstance(value, (list, tuple)):
            self._all("items", list(value))
        elif not _is_all_python(value):
            raise NotStorable(f"an object of {kind.__module__}.{kind.__qualname__}")
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        self._all("slots", (part for name in slots for part in (name, getattr(value, name))))
        own = getattr(value, "__dict__", {})
        self._pairs("attributes", {name: held for name, held in own.items() if name not in _OTHER_EACH_TIME})


_MADE_BY_PYTHON = 1 << 9
"""CPython's flag of types made while the program runs."""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty as yet
        return ...


def _names_in(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def _is_all_python(value: Any) -> bool:
    """Whether an object has no state but attributes: what Python would need more than those to copy it has."""
    kind = type(value)
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    try:
        object.__reduce_ex__(value, 2)
    except Exception:
        return False
    return kind.__new__ is object.__new__ or isinstance(kind.__new__, types.FunctionType)
