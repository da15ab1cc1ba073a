"""A captured graph as JSON and tensors, and back: exactly the same, or not at all.

    Captured  →  {"nodes": […], "form": …, …}, {constant's name: tensor}     (`as_data`)
    data, tensors  →  Captured                                              (`from_data`)

A graph of ATen ops on tensors, numbers and torch's own types can be written. One that calls anything else (an op of the
user's, a lifted `autograd.Function`) cannot: what such an op computes is code, and code is not stored.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ..ops.experts import EXPERTS, GATES
from ..ops.functional import linear_io
from ..torch_internals import private
from ..torch_internals.fakes import new_mode
from .export import Captured

__all__ = ["NotStorable", "as_data", "from_data"]

Data = dict[str, Any]
_OURS: dict[str, Callable[..., Any]] = {"getitem": operator.getitem, "linear_io": linear_io}
"""Functions beside ATen's ops that a normalised graph calls."""
_ATEN = re.compile(r"aten\.(\w+)\.(\w+)")
_EXPERTS = "experts"
_TYPES = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_META = ("role", "name", "path", "key", "stack", "constant", "mutates", "mutated", "touches_written",
         "requires_grad", "loss_index")  # fmt: skip


class NotStorable(Exception):
    """The capture, or what it hangs on, has a part that cannot be written down exactly."""


def as_data(captured: Captured) -> tuple[Data, dict[str, Tensor]]:
    """Return a capture as JSON and the values of its constants by name; `NotStorable` where that would not be exact."""
    index = {node: place for place, node in enumerate(captured.graph.nodes)}
    values: dict[str, Tensor] = {}
    nodes = [_node_data(node, index, values) for node in captured.graph.nodes]
    return {
        "nodes": nodes,
        "form": _form_data(captured.out_spec),
        "aliases": captured.aliases,
        "capture_s": captured.capture_s,
        "notes": list(captured.notes),
    }, values


def from_data(data: Data, values: Mapping[str, Tensor]) -> Captured:
    """Return the capture that `as_data` wrote, in a graph of its own with fakes of a mode of its own."""
    graph, fakes = fx.Graph(), _Fakes()
    nodes: list[fx.Node] = []
    for each in data["nodes"]:
        args, kwargs = _parsed(each["args"], nodes), _parsed(each["kwargs"], nodes)
        if each["target"] == _EXPERTS and args[7] not in GATES:
            raise NotStorable(f"nobody has defined the gate {args[7]} in this process")
        target = _target(each["target"]) if each["op"] == "call_function" else each["target"]
        node = graph.create_node(each["op"], target, args, kwargs, each["name"])
        if node.name != each["name"]:
            raise ValueError(f"two nodes are called {each['name']}")
        node.meta.update(each["meta"])
        if "val" in each:
            node.meta["val"] = _parsed(each["val"], nodes, fakes)
        if "value" in each:
            node.meta["value"] = None if each["value"] is None else values[each["value"]]
        nodes.append(node)
    graph.lint()
    return Captured(graph, StoredForm(data["form"]), data["aliases"], data["capture_s"], tuple(data["notes"]))


class StoredForm:
    """The form of a model's output, read when an output is made: not before are its classes needed."""

    def __init__(self, data: Data) -> None:
        self._data = data

    @property
    def num_leaves(self) -> int:
        """The number of leaves of the tree."""
        return int(self._data["num_leaves"])

    @cached_property
    def spec(self) -> Any:
        """The form as torch has it."""
        for module, _ in self._data["classes"]:
            if module not in sys.modules:
                raise RuntimeError(f"the model's output is of a class of {module}, which was not imported")
        return private.form_from_text(self._data["text"])

    def unflatten(self, leaves: list[Any]) -> Any:
        """Return the tree with these leaves."""
        return private.unflatten(leaves, self.spec)


def _form_data(spec: Any) -> Data:
    if isinstance(spec, StoredForm):
        return spec._data
    try:
        text = private.form_to_text(spec)
        if private.form_from_text(text) != spec:
            raise NotStorable("the form of the output is another one once it is read again")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotStorable(f"the form of the output: {error}") from None
    classes = sorted([kind.__module__, kind.__qualname__] for kind in private.classes_in_form(spec))
    return {"text": text, "num_leaves": spec.num_leaves, "classes": classes}


def _node_data(node: fx.Node, index: Mapping[fx.Node, int], values: dict[str, Tensor]) -> Data:
    data: Data = {"op": node.op, "name": node.name, "target": _target_name(node)}
    data["args"], data["kwargs"] = _data(node.args, index), _data(dict(node.kwargs), index)
    data["meta"] = {key: _plain(node.meta[key]) for key in _META if key in node.meta}
    if "val" in node.meta:
        data["val"] = _data(node.meta["val"], index)
    if "value" in node.meta:
        data["value"] = _keep(node.meta["value"], node.name, values)
    return data


def _plain(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, str):
        raise NotStorable(f"a mark of a node is a {type(value).__name__}")
    return value


def _keep(value: Tensor | None, name: str, values: dict[str, Tensor]) -> str | None:
    """Take the value of a constant, whose memory is as safetensors lays it out."""
    if value is None:
        return None
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or not value.is_contiguous() or value.is_complex() or value.is_quantized:
        raise NotStorable(f"the constant {name} is not a plain tensor")
    values[name] = value.detach()
    return name


def _target_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    for name, function in _OURS.items():
        if node.target is function:
            return name
    if node.target is EXPERTS:
        return _EXPERTS
    name = str(node.target)
    if not isinstance(node.target, private.OpOverload) or not _ATEN.fullmatch(name) or _target(name) is not node.target:
        raise NotStorable(f"{name} is not an op of torch's")
    return name


def _target(name: str) -> Any:
    if name in _OURS:
        return _OURS[name]
    if name == _EXPERTS:
        return EXPERTS
    found = _ATEN.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not an op of torch's")
    return getattr(getattr(torch.ops.aten, found[1]), found[2])


def _data(value: Any, index: Mapping[fx.Node, int]) -> Any:
    """Write an argument: JSON's own values as they are, lists as lists, anything else as `{kind: what}`."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if isinstance(value, Tensor):
        return {"fake": _fake_data(value)}
    if isinstance(value, (list, tuple)):
        items = [_data(item, index) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [[_data(key, index), _data(item, index)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [_data(part, index) for part in (value.start, value.stop, value.step)]}
    if kind is torch.device:
        return {"device": str(value)}
    if kind in _TYPES:
        return {_TYPES[kind]: str(value).removeprefix("torch.")}
    raise NotStorable(f"an argument is a {kind.__name__}")


def _fake_data(value: Tensor) -> list[Any]:
    known = isinstance(value, private.FakeTensor) and value.layout == torch.strided and value.device.type == "cpu"
    if not known or not all(type(size) is int for size in (*value.shape, *value.stride())):
        raise NotStorable("a value is no plain fake tensor")
    return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch."), value.requires_grad]


class _Fakes:
    """Makes fake CPU tensors of one mode."""

    def __init__(self) -> None:
        self._make = private.FakeMaker(new_mode())
        self._cpu = torch.device("cpu")

    def __call__(self, shape: list[int], stride: list[int], dtype: str, requires_grad: bool) -> Tensor:
        plain = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
        return self._make(plain, self._cpu).requires_grad_(requires_grad)


def _parsed(data: Any, nodes: list[fx.Node], fakes: _Fakes | None = None) -> Any:
    """Read what `_data` wrote."""
    if isinstance(data, list):
        return [_parsed(item, nodes, fakes) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, found),) = data.items()
    if kind == "float":
        return float.fromhex(found)
    if kind == "complex":
        return complex(*map(float.fromhex, found))
    if kind == "node":
        return nodes[found]
    if kind == "fake" and fakes is not None:
        return fakes(*found)
    if kind == "tuple":
        return tuple(_parsed(item, nodes, fakes) for item in found)
    if kind == "dict":
        return {_parsed(key, nodes, fakes): _parsed(item, nodes, fakes) for key, item in found}
    if kind == "slice":
        return slice(*(_parsed(part, nodes, fakes) for part in found))
    if kind == "device":
        return torch.device(found)
    if kind in _TYPES.values():
        return getattr(torch, found)
    raise ValueError(f"{kind} is no kind of argument")
