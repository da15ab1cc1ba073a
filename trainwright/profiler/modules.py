"""Tracks which module is running: in the forward by hooks, in the backward by the autograd nodes that its forward made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_LABEL = "trainwright_path"


class ModuleTrace:
    """Calls `enter(path)` with the path of the running module of `model`, whenever that changes.

    Autograd nodes know no module. When a module returns, it claims the nodes behind its outputs that no inner module has
    claimed; the nodes behind its inputs were claimed by its caller before it began. In the backward, a prehook of each node calls
    `enter` with the path of the node's module. Pass a copy of the user's model: the hooks stay in it.
    """

    def __init__(self, model: nn.Module, enter: Callable[[str], None]) -> None:
        self._enter = enter
        self._stack: list[str] = [""]
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._opening(path), with_kwargs=True)
            module.register_forward_hook(self._closing(path), always_call=True)

    def claim(self, value: Any) -> None:
        """Assign the autograd nodes behind `value` that no module has claimed to the running module."""
        path = self._stack[-1]
        pending = [tensor.grad_fn for tensor in _tensors(value) if tensor.grad_fn is not None]
        while pending:
            node = pending.pop()
            labels: Any = node.metadata  # a dict; torch's stub says a method
            if _LABEL in labels:
                continue
            labels[_LABEL] = path
            if not hasattr(node, "variable"):  # a leaf's node outlives the step, and is shared by all users of the leaf
                node.register_prehook(lambda _: self._enter(path))
            pending.extend(source for source, _ in node.next_functions if source is not None)

    def _opening(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.claim((args, kwargs))
            self._stack.append(path)
            self._enter(path)

        return hook

    def _closing(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.claim(out)
            if self._stack[-1] == path and len(self._stack) > 1:
                self._stack.pop()
            self._enter(self._stack[-1])

        return hook


def block_patterns(model: nn.Module) -> dict[str, str]:
    """Return, for each module's path, the path with `*` for the indices of repeated blocks.

    The elements of a list are repeated blocks if they are all of one type; the elements of a `Sequential` of several types
    keep their indices.

    >>> linear, relu = nn.Linear(2, 2), nn.ReLU()
    >>> block_patterns(nn.Sequential(nn.Sequential(linear, relu), nn.Sequential(linear, relu)))["1.0"]
    '*.0'
    """
    types = {path: type(module) for path, module in model.named_modules(remove_duplicate=False)}
    numbered: dict[str, list[type[nn.Module]]] = defaultdict(list)
    for path, kind in types.items():
        above, _, last = path.rpartition(".")
        if last.isdigit():
            numbered[above].append(kind)
    patterns = {"": ""}
    for path in types:
        above, _, last = path.rpartition(".")
        alike = last.isdigit() and len(numbered[above]) > 1 and len(set(numbered[above])) == 1
        patterns[path] = f"{patterns[above]}.{'*' if alike else last}".lstrip(".")
    return patterns


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
