"""What a forward leaves behind in the modules' attributes: buffers given anew, and Python state that a graph has not.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)     a registered buffer: becomes a write into the buffer
    self.last = x                                     nothing that a later forward reads: of no matter
    self.calls += 1                                   refused where a later forward would compute something else

A graph is one forward. Whether the next one would be another is found by capturing twice, the second time with what
the first left behind; that is done for models alone whose forward leaves something.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ..artifacts import UserError
from ..torch_internals import private

_ABSENT = object()
_TABLES = ("_parameters", "_buffers", "_modules", "training")


@dataclass(frozen=True, eq=False)
class Change:
    """An attribute that a forward has changed."""

    module: nn.Module
    path: str
    name: str
    before: Any
    after: Any

    @property
    def key(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(eq=False)
class Watch:
    """Follows the attributes of the modules of `model` over one forward."""

    model: nn.Module
    is_inside: Callable[[str], bool]
    """Whether a source file is none of the user's."""
    changes: list[Change] = field(default_factory=list)
    lines: dict[tuple[int, str], str] = field(default_factory=dict)
    """Where attributes were last assigned, by module and name."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note what the `with` block changes; write buffers that it gave anew into those that were there."""
        attributes = {module: _attributes(module) for module in self.model.modules()}
        buffers = [
            (module, path, name, value)
            for path, module in self.model.named_modules()
            for name, value in module._buffers.items()
        ]
        with self._assignments(), _DataIsDetached():
            yield
        for module, path, name, value in buffers:
            self._write_back(module, f"{path}.{name}" if path else name, name, value)
        for path, module in self.model.named_modules():
            self.changes += _changes(module, path, attributes.get(module, {}))

    def _write_back(self, module: nn.Module, key: str, name: str, before: Tensor | None) -> None:
        after = module._buffers.get(name)
        if after is before:
            return
        line = self.lines.get((id(module), name), "a forward")
        fits = isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape
        if before is None or after is None or not fits or before.dtype != after.dtype:
            raise UserError(
                f"a buffer of one shape and type is needed, which each forward writes; {line} makes {key} "
                f"{_shown(after)} where it was {_shown(before)}; register it with the shape that it keeps"
            )
        with torch.no_grad():
            before.copy_(after)
        module._buffers[name] = before

    @contextmanager
    def _assignments(self) -> Iterator[None]:
        """Remember the line of each assignment to a module's attribute."""
        original, lines, is_inside = nn.Module.__setattr__, self.lines, self.is_inside

        def assign(module: nn.Module, name: str, value: Any) -> None:
            lines[id(module), name] = _line(is_inside)
            original(module, name, value)

        nn.Module.__setattr__ = assign  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

    def later(self, export: Callable[[], tuple[Any, Watch]], constants: Iterable[str], mode: Any) -> Any | None:
        """Return a second forward's export, begun with what the first has left behind; None where that cannot matter.

        constants: names of the plain tensors that the first one read. The modules are then as before the first.

        Raises `UserError` where a later forward goes on from what an earlier one left.
        """
        try:
            if self._are_read(constants):
                self.refuse()
            # a tensor put in the place of one that nothing read is made anew by each forward
            if all(isinstance(each.before, Tensor) and isinstance(each.after, Tensor) for each in self.changes):
                return None
            self._leave(mode)
            try:
                program, left = export()
            except Exception:  # whatever stops it did not stop the first
                self.refuse()
            left.restore()
            if left._are_read(program.constants):
                self.refuse()
            return program
        finally:
            self.restore()

    def _are_read(self, constants: Iterable[str]) -> bool:
        """Whether a plain tensor that the forward replaced was read before: it stands among the graph's constants."""
        changed = tuple(f".{change.key}" for change in self.changes if isinstance(change.before, Tensor))
        return bool(changed) and any(f".{name}".endswith(changed) for name in constants)

    def _leave(self, mode: Any) -> None:
        """Put the modules into the state that the forward left, tensors of it as fakes of `mode` without a history."""
        for change in self.changes:
            leaves, spec = private.flatten(change.after)
            with mode:
                fresh = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            vars(change.module)[change.name] = private.unflatten(fresh, spec)

    def restore(self) -> None:
        """Put the modules into the state that they had before the forward."""
        for change in self.changes:
            if change.before is _ABSENT:
                vars(change.module).pop(change.name, None)
            else:
                vars(change.module)[change.name] = change.before

    def refuse(self) -> NoReturn:
        """Raise `UserError` naming the first change."""
        change = next((each for each in self.changes if self._line_of(each)), self.changes[0])
        line = self._line_of(change)
        raise UserError(
            f"a forward that computes the same every time is needed; it depends on {change.key}, which "
            f"{line + ' changes' if line else 'the forward changes'}; make that a registered buffer, which a plan carries on, or "
            "change it outside of the forward"
        )

    def _line_of(self, change: Change) -> str:
        return self.lines.get((id(change.module), change.name), "")


class _DataIsDetached(TorchFunctionMode):
    """Reads `x.data` as `x.detach()`: the same memory, but known to be that of `x`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach() if func == _GET_DATA else func(*args, **(kwargs or {}))


_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The module's plain attributes; what can be changed in place as a copy."""
    return {name: _copied(value) for name, value in vars(module).items() if name not in _TABLES}


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value


def _changes(module: nn.Module, path: str, before: dict[str, Any]) -> Iterator[Change]:
    for name, after in vars(module).items():
        if name not in _TABLES and not _is_same(before.get(name, _ABSENT), after):
            yield Change(module, path, name, before.get(name, _ABSENT), _copied(after))


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after) or isinstance(before, Tensor):
        return False
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(_is_same, before, after))
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_is_same(before[key], after[key]) for key in before)
    try:
        return bool(before == after)
    except Exception:  # a value that cannot be compared is taken for another
        return False


def _shown(value: Any) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else "None"


def _line(is_inside: Callable[[str], bool]) -> str:
    frame = sys._getframe(2)
    while frame is not None and is_inside(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def same_calls(one: fx.Graph, other: fx.Graph) -> bool:
    """Tell whether two normalised graphs make the same calls and give the same results, whatever their constants.

    A table that the first forward computes and keeps is a constant of the second.
    """
    return _calls(one) == _calls(other)


def _calls(graph: fx.Graph) -> list[Any]:
    """The calls that are no constants, each with its operands by number."""
    names: dict[fx.Node, Any] = {}
    rows: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] != "const":
            names[node] = (node.meta["role"], node.meta["name"])
        elif node.op == "placeholder" or node.meta.get("constant"):
            shown, _ = private.flatten(node.meta["val"])
            names[node] = [_shown(value) for value in shown]
        else:
            leaves, spec = private.flatten((node.args, node.kwargs))
            names[node] = len(rows)
            rows.append((str(node.target), [_named(leaf, names) for leaf in leaves], str(spec)))
    return rows


def _named(leaf: Any, names: dict[fx.Node, Any]) -> Any:
    return ("value", names[leaf]) if isinstance(leaf, fx.Node) else leaf
