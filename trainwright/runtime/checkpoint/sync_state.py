"""Saves and restores a sync method's state in a checkpoint: each rank's vectors as pieces, the rest as plain values.

`sync` is what `tw.sync.create` returned, which has `state_dict` and `load_state_dict`; `None` has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...artifacts import UserError
from ..extents import whole_extent
from ..storage import Piece, StoredTensors


def vectors_of(sync: Any, rank: int, copy: Callable[[Tensor], Tensor]) -> dict[str, Piece]:
    """Return this rank's vectors of the state as pieces, named `sync.NAME.rankN`; `copy` takes each to the CPU."""
    if sync is None:
        return {}
    state = sync.state_dict()["state"]
    vectors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {_place(name, rank): Piece(whole_extent(value.shape), copy(value)) for name, value in vectors.items()}


def numbers_of(sync: Any) -> dict[str, Any] | None:
    """Return the rest of the state as plain values, and the names of the vectors."""
    if sync is None:
        return None
    saved = sync.state_dict()
    state = saved.pop("state")
    return {
        **saved,
        "state": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
        "vectors": [name for name, value in state.items() if isinstance(value, Tensor)],
    }


def restore_sync(
    sync: Any, rank: int, stored: StoredTensors, saved: Sequence[Mapping[str, Any]] | None, same_layout: bool
) -> tuple[str, ...]:
    """Restore the sync method's state, and return the names of the entries that could not be restored.

    Those are entries that only fit the old number of workers and, under another layout of the parameters, all vectors.
    Raises `UserError` for a checkpoint of a run without a sync method, or with another one.
    """
    if saved is None:
        raise UserError(
            f"a checkpoint of a run with a sync method is needed; {stored.folder} has none; leave out --sync"
        )
    own = dict(saved[rank] if same_layout else saved[0])
    names = own.pop("vectors")
    vectors = {}
    for name in names if same_layout else ():
        place = _place(name, rank)
        vectors[name] = stored.read(place, whole_extent(stored.shape(place)))
    left = tuple(sync.load_state_dict({**own, "state": {**own["state"], **vectors}}))
    return left if same_layout else (*left, *(name for name in names if name not in left))


def _place(name: str, rank: int) -> str:
    return f"sync.{name}.rank{rank}"
