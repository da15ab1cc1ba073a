"""Is a batch one that the plan knows? Its names, its dtypes, and what in it is no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from ..artifacts import Plan, UserError
from ..capture._torch_private import flatten_batch


def check_entries(plan: Plan, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; `UserError` unless they are the plan's, of its dtypes and numbers of dims.

    A step of the plan reads the entries that it was planned with and no other, so an unknown one would be ignored. What is
    no tensor (`use_cache=False`) is part of the planned step: it may be left out, and may not differ.
    """
    named = dict(flatten_batch(batch)[0])
    unknown = [name for name in named if name not in plan.batch and name not in plan.literals]
    missing = [name for name in plan.batch if name not in named]
    if unknown or missing:
        raise UserError(_wrong_names(plan, named, unknown, missing))
    for name, value in plan.literals.items():
        if name in named and not _same(named[name], value):
            raise UserError(
                f"the batch that was planned is needed, with {name}={value!r}; got {name}={_shown(named[name])}; plan with "
                "that, or leave it out of the loader"
            )
    tensors = {}
    for name in plan.batch:
        tensors[name] = _checked(plan, name, named[name])
    return tensors


def _wrong_names(plan: Plan, named: Mapping[str, Any], unknown: list[str], missing: list[str]) -> str:
    """Say which entries are unknown and which are missing, and which of them may be one and the same."""
    found, hints = [], []
    if unknown:
        found.append(f"the plan does not know {_listed(unknown)}, and a step would ignore {_it(unknown)}")
    if missing:
        found.append(f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for name in unknown:
        near = get_close_matches(name, [*(missing or plan.batch), *plan.literals], n=1)
        hints += [f"rename {name} to {near[0]} if that is what it is"] if near else []
    if unknown:
        hints.append(f"plan with {_it(unknown)} in the batch, or leave {_it(unknown)} out of the loader")
    elif missing:
        hints.append(f"add {_it(missing)}, or plan without")
    return f"a batch with {', '.join(plan.batch)} is needed, as planned; {'; '.join(found)}; {'; '.join(hints)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"entry {name}" if name.isdigit() else name for name in names)


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _checked(plan: Plan, name: str, leaf: Any) -> Tensor:
    entry = plan.batch[name]
    if not isinstance(leaf, Tensor):
        raise UserError(
            f"a tensor {name} of shape {list(entry.shape)} is needed, as planned; got {_shown(leaf)}; give one, or plan for "
            "that batch"
        )
    dtype = str(leaf.dtype).removeprefix("torch.")
    if dtype != entry.dtype or leaf.dim() != len(entry.shape):
        raise UserError(
            f"a batch entry {name} of type {entry.dtype} and shape {list(entry.shape)} is what was planned; got {dtype} of "
            f"shape {list(leaf.shape)}; convert it, or plan for the other"
        )
    return leaf


def _same(found: Any, planned: Any) -> bool:
    if isinstance(found, Tensor):
        return False
    try:
        return bool(found == planned)
    except Exception:  # what cannot be compared is not known to be the same
        return False


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
