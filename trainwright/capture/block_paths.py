"""Finds a model's repeated blocks by the paths of its calls, and calls that belong to a block though no module of it made them.

A block is an element of a list of modules (`transformer.h.3`). Where the elements of an outer list do nothing but run an inner
list (the stages of a ResNet), the inner elements are the blocks. Where the elements are dicts or lists of layers that a forward
outside combines, what that forward computes between two layers of one element is part of the block too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import fx

MIN_OPS_PER_BLOCK = 4


def block_containers(paths: Sequence[str], below: str | None = None) -> set[str]:
    """Return the module lists whose elements are blocks, among `paths` that lie under the prefix `below`."""
    elements: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for prefix, index, _ in _numbered(path):
            if below is None or prefix.startswith(below + "."):
                elements[prefix][index].append(path)
                break
    found: set[str] = set()
    for prefix, members in elements.items():
        num_ops = sum(len(paths_in) for paths_in in members.values())
        for index, inside in members.items():
            inner = block_containers(inside, f"{prefix}.{index}" if prefix else index)
            covered = sum(any(before in inner for before, _, _ in _numbered(path)) for path in inside)
            if inner and covered >= len(inside) - 2:
                found |= inner
        if (
            len(members) >= 2
            and num_ops >= MIN_OPS_PER_BLOCK * len(members)
            and not any(other.startswith(prefix + ".") for other in found)
        ):
            found.add(prefix)
    return found


def block_of(path: str, containers: set[str]) -> str | None:
    """Return the path of the deepest block that contains `path`, or None outside the blocks."""
    found = None
    for prefix, index, _ in _numbered(path):
        if prefix in containers:
            found = f"{prefix}.{index}" if prefix else index
    return found


def _numbered(path: str) -> list[tuple[str, str, str]]:
    """Return every numeric part of a path, as (the parts before it, the number, the parts after it)."""
    parts = path.split(".")
    return [(".".join(parts[:k]), part, ".".join(parts[k + 1 :])) for k, part in enumerate(parts) if part.isdigit()]


def place_in_blocks(graph: fx.Graph) -> None:
    """Give calls that stand between two calls of one block, made by a forward outside it, the path of the block.

    A block that is called again reads parameters that it has read before; what stands between two calls of it is left out.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and not node.meta["constant"]]
    containers = block_containers([node.meta["path"] for node in calls])
    last: str | None = None
    read: set[fx.Node] = set()
    between: list[fx.Node] = []
    for node, block, own in _blocks(calls, containers):
        if block is None:
            between.append(node)
            continue
        if block != last or own & read:
            last, read = block, set()
        elif all(_is_outside(each.meta["path"], block) for each in between):
            for each in between:
                each.meta["path"] = block
        read |= own
        between = []


def _blocks(calls: Sequence[fx.Node], containers: set[str]) -> Iterator[tuple[fx.Node, str | None, set[fx.Node]]]:
    """Yield each call with its block and the parameters that it reads."""
    for node in calls:
        params = {other for other in node.all_input_nodes if other.meta.get("role") == "param"}
        yield node, block_of(node.meta["path"], containers), params


def _is_outside(path: str, block: str) -> bool:
    """Return True if the module at `path` contains the block."""
    return not path or block.startswith(path + ".")
