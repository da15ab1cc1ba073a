"""Divides a model into the parts that are streamed, its blocks, and the parts that stay on the device.

block       an element of a list of modules; rests in the store, loaded when the forward enters it
staying     a module outside the blocks (embedding, head); rests on the device, perturbed by ±ε z when it is entered
standing    a parameter that is read anywhere (of a module around blocks, tied across blocks); perturbed once a step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..artifacts import UserError

_ALIGNMENT = 16


@dataclass(eq=False)
class Part:
    """Modules whose parameters are loaded and released together."""

    name: str
    modules: list[nn.Module]
    stays: bool
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    def layout(self, dtypes: dict[str, torch.dtype]) -> tuple[dict[str, int], int]:
        """Return each parameter's offset in the part's bytes, and their number."""
        places, end = {}, 0
        for name, param in self.params.items():
            places[name] = end
            end += -(-param.numel() * dtypes[name].itemsize // _ALIGNMENT) * _ALIGNMENT
        return places, end


@dataclass(frozen=True)
class Parts:
    """A model divided into parts, with the parameters that belong to none."""

    parts: list[Part]
    standing: dict[str, nn.Parameter]

    @property
    def blocks(self) -> list[Part]:
        """Return the parts that rest in the store."""
        return [part for part in self.parts if not part.stays]


def block_names(model: nn.Module) -> list[str]:
    """Return the paths of the blocks: the elements, with parameters, of lists of modules.

    If an element has all its parameters in an inner list (a stage of a ResNet), the inner elements are the blocks.

    >>> stages = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(2)]
    >>> block_names(nn.Sequential(*stages))
    ['0.0', '0.2', '1.0', '1.2']
    """
    seen: set[int] = set()
    return [name for name, module in _found(model, "") if id(module) not in seen and not seen.add(id(module))]  # type: ignore[func-returns-value]


def _found(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    elements = [(name, child) for name, child in children if name.isdigit() and _num(child)]
    is_list = len(elements) >= 2 and all(name.isdigit() for name, _ in children)
    for name, child in children:
        inner = list(_found(child, f"{path}{name}."))
        if is_list and _num(child) and _num_of(inner) < _num(child):
            yield f"{path}{name}", child
        else:
            yield from inner


def _num(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _num_of(found: Sequence[tuple[str, nn.Module]]) -> int:
    return sum(_num(module) for _, module in found)


def find_parts(model: nn.Module, blocks: Sequence[str] | None = None, standing: Sequence[str] = ()) -> Parts:
    """Return the parts of a model.

    blocks: paths of the blocks, `*` for any (`h.*`); default: those of `block_names`. standing: names of parameters that stay
    on the device all the time. Raises `UserError` if no block is found.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    paths = block_names(model) if blocks is None else _matching(named, blocks)
    if not paths:
        raise UserError(
            f"blocks to stream are needed; {type(model).__name__} has no list of modules with parameters; "
            "name its blocks: blocks=['encoder.*', …], or --stream-blocks"
        )
    found = {id(named[path]): Part(path, [named[path]], stays=False) for path in paths}
    around = {id(module) for path, module in named.items() if any(inner.startswith(_below(path)) for inner in paths)}
    owner: dict[int, Part] = {}
    for module in named.values():
        if id(module) in found:
            owner.update(dict.fromkeys((id(each) for each in module.modules()), found[id(module)]))
    for path, module in named.items():  # parents come before their children
        if id(module) not in owner and id(module) not in around and any(True for _ in module.parameters()):
            part = Part(path, [module], stays=True)
            owner.update(dict.fromkeys((id(each) for each in module.modules() if id(each) not in owner), part))
    return _shared_out(model, owner, set(standing))


def _shared_out(model: nn.Module, owner: dict[int, Part], standing: set[str]) -> Parts:
    """Assign each parameter to the part that owns it; parts outside the blocks that share one are merged."""
    owners: dict[int, list[Part | None]] = defaultdict(list)
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if (part := owner.get(id(module))) not in owners[id(param)]:
                owners[id(param)].append(part)
    stand: dict[str, nn.Parameter] = {}
    joined: dict[Part, Part] = {}

    def whole(part: Part) -> Part:
        while part in joined:
            part = joined[part]
        return part

    for name, param in model.named_parameters():
        parts = owners[id(param)]
        own = [whole(part) for part in parts if part is not None]
        if name in standing or len(own) < len(parts) or (len(set(own)) > 1 and not all(part.stays for part in own)):
            stand[name] = param
            continue
        for other in own[1:]:
            if other is not own[0]:
                joined[other] = own[0]
                own[0].modules += other.modules
                own[0].params.update(other.params)
        own[0].params[name] = param
    parts_in_order = dict.fromkeys(whole(owner[id(module)]) for module in model.modules() if id(module) in owner)
    return Parts([part for part in parts_in_order if part.params], stand)


def _below(path: str) -> str:
    return f"{path}." if path else ""


def _matching(named: dict[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    found = []
    for pattern in patterns:
        matched = [
            path
            for path, module in named.items()
            if path and path.count(".") == pattern.count(".") and fnmatchcase(path, pattern) and _num(module)
        ]
        if not matched:
            raise UserError(
                f"modules with parameters are needed for the blocks {pattern!r}; the model has none of that path; it has "
                f"{', '.join(list(named)[1:6])} …"
            )
        found += matched
    inside = [path for path in found if any(path.startswith(f"{other}.") for other in found)]
    return [path for path in dict.fromkeys(found) if path not in inside]
