"""Checks that a batch is one that the plan was made for: its names, dtypes, shapes and literals, and whose rows it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any
from weakref import WeakSet

from torch import Tensor

from ..artifacts import Plan, UserError
from ..torch_internals.private import flatten_batch


def check_entries(plan: Plan, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; raise `UserError` unless they have the plan's names, dtypes and numbers of dims.

    A step of the plan reads only the entries that it was planned with, so an unknown one would be ignored. A value that is
    no tensor (`use_cache=False`) is part of the planned step: it may be left out, but may not differ.
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
    """Return the message about unknown and missing entries, with renamings that may mend it."""
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


def check_within(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `UserError` unless a global batch of `shapes` fits, in every dim, within a batch that was planned."""
    planned = [{name: entry.shape for name, entry in plan.batch.items()}, *(each.batch for each in plan.shapes)]
    if any(0 in shape for shape in shapes.values()):
        empty = next(name for name, shape in shapes.items() if 0 in shape)
        raise UserError(f"a batch of at least one row is needed; {empty} has shape {list(shapes[empty])}; leave it out")
    if not any(all(_fits(shapes[name], most[name]) for name in shapes) for most in planned):
        wrong = next((name for name in shapes if not _fits(shapes[name], planned[0][name])), next(iter(shapes)))
        others = "".join(f" or {list(most[wrong])}" for most in planned[1:] if most[wrong] != planned[0][wrong])
        raise UserError(
            f"a batch entry {wrong} of shape {list(planned[0][wrong])}{others}, as planned, or smaller is needed; got "
            f"{list(shapes[wrong])}; plan for a batch of that shape (plan --shapes takes several)"
        )


def _fits(shape: Sequence[int], most: Sequence[int]) -> bool:
    return len(shape) == len(most) and all(size <= limit for size, limit in zip(shape, most))


_SAMPLERS: WeakSet[Any] = WeakSet()


def remember_sampler(sampler: Any) -> None:
    """Register a sampler that yields a plan's batches, as long as it exists, for `rows_meant`."""
    _SAMPLERS.add(sampler)


def rows_meant(plan: Plan, num: int, num_own: int, most: int) -> str:
    """Return whether a batch of `num` rows, fewer than planned, is the whole global batch, `all`, or this rank's rows, `own`.

    num_own: this rank's number of rows in a planned batch; most: the largest such number of any rank. The registered samplers
    decide; without one, more rows than `most` are a whole batch, and fewer raise `UserError`.
    """
    meant = {sampler.rows_meant(num) for sampler in _SAMPLERS if sampler.deals_for(plan)} - {None}
    if len(meant) == 1:
        return str(meant.pop())
    if not meant and num > most:
        return "all"
    rows = next((entry.shape[0] for entry in plan.batch.values() if entry.shape), 1)
    raise UserError(
        f"a batch of the {rows} rows that were planned is needed, or a word on what these are; got {num}, which may be a whole "
        f"batch that is short or this rank's part (its own would be {num_own}) of a longer one; say "
        'plan.shard_batch(batch, rows="all") or rows="own"'
    )
