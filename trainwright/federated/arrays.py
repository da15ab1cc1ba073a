"""Named NumPy arrays, in which models and their changes travel: checks, sums, sizes, digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..artifacts import UserError

Arrays = Mapping[str, np.ndarray]
"""A model's arrays, or their change, by name. Nothing here writes into one that it was given."""


def as_arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return `values` as arrays of their own that cannot be written to; tensors, lists and numbers will do.

    Raises `UserError` where there is none, or one is not finite or not of floating point.

    >>> as_arrays({"w": [1.0, 2.0]})["w"].dtype
    dtype('float64')
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"arrays of a model by name are needed; got {type(values).__name__}; of a module take model_arrays(module)"
        )
    found = {str(name): np.array(value) for name, value in values.items()}
    if not found:
        raise UserError("arrays of a model are needed; got none; give its parameters by name")
    for name, value in found.items():
        if value.dtype.kind != "f":
            raise UserError(
                f"arrays of floating point are needed, which can be averaged; {name} is {value.dtype}; leave it out"
            )
        if not np.isfinite(value).all():
            raise UserError(f"finite arrays are needed to start from; {name} is not; check the model's initial values")
        value.flags.writeable = False
    return found


def num_bytes(arrays: Arrays) -> int:
    """Return the bytes that the arrays take in a message.

    >>> num_bytes({"w": np.zeros((2, 3), np.float32)})
    24
    """
    return sum(value.nbytes for value in arrays.values())


def norm(arrays: Arrays) -> float:
    """Return the Euclidean norm of all arrays together.

    >>> norm({"w": np.array([3.0]), "b": np.array([4.0])})
    5.0
    """
    return math.sqrt(math.fsum(float(np.vdot(flat, flat)) for flat in map(_flat, arrays.values())))


def difference(new: Arrays, old: Arrays) -> dict[str, np.ndarray]:
    """Return new - old, array by array, under old's names.

    >>> difference({"w": np.array([3.0])}, {"w": np.array([1.0])})
    {'w': array([2.])}
    """
    return {name: new[name] - value for name, value in old.items()}


def clipped(delta: Arrays, max_norm: float | None) -> tuple[Arrays, bool]:
    """Return `delta` scaled down to the norm `max_norm` where it is larger, and whether it was.

    >>> clipped({"w": np.array([3.0, 4.0])}, 1.0)
    ({'w': array([0.6, 0.8])}, True)
    """
    if max_norm is None or (size := norm(delta)) <= max_norm:
        return delta, False
    return {name: value * value.dtype.type(max_norm / size) for name, value in delta.items()}, True


def fault_of(delta: Any, like: Arrays) -> str | None:
    """Return why `delta` cannot be added to `like`, `None` where it can.

    >>> fault_of({"w": np.array([np.nan])}, {"w": np.zeros(1)})
    'w holds what is not finite'
    """
    if not isinstance(delta, Mapping):
        return f"arrays by name are needed, it sent a {type(delta).__name__}"
    if set(delta) != set(like):
        missing, unknown = sorted(set(like) - set(delta)), sorted(set(delta) - set(like))
        return f"its arrays are others: {_listed('lacks', missing)}{_listed('has', unknown)}".rstrip("; ")
    for name, value in delta.items():
        if (fault := _fault_of_one(name, value, like[name])) is not None:
            return fault
    return None


def _listed(verb: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    return f"{verb} {shown}; " if names else ""


def _fault_of_one(name: str, value: Any, like: np.ndarray) -> str | None:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return f"{name} is no array of floating point"
    if value.shape != like.shape:
        return f"{name} has the shape {list(value.shape)}, the model's is {list(like.shape)}"
    return None if np.isfinite(value).all() else f"{name} holds what is not finite"


def digest(arrays: Arrays) -> str:
    """Return a hash of names, types, shapes and values: equal digests are equal bits.

    >>> digest({"w": np.zeros(2)}) == digest({"w": np.zeros(2)}), digest({"w": np.zeros(2)}) == digest({"w": -np.zeros(2)})
    (True, False)
    """
    found = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {value.dtype.str} {arrays[name].shape} ".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def _flat(value: np.ndarray) -> np.ndarray:
    return value.reshape(-1).astype(np.float64)


class Sum:
    """Σ w_k a_k in float64, one array after the other: the order of the terms is the order of the calls.

    >>> total = Sum({"w": np.zeros(1)})
    >>> total.add({"w": np.array([2.0])}, 0.5)
    >>> total.added_to({"w": np.array([1.0], np.float32)})
    {'w': array([2.], dtype=float32)}
    """

    def __init__(self, like: Arrays, values: Arrays | None = None) -> None:
        source = values if values is not None else {name: np.zeros(like[name].shape) for name in like}
        self.values = {name: np.array(value, dtype=np.float64) for name, value in source.items()}

    def add(self, arrays: Arrays, weight: float = 1.0) -> None:
        """Add `weight` times the arrays."""
        for name, value in self.values.items():
            value += np.multiply(arrays[name], weight, dtype=np.float64)

    def added_to(self, arrays: Arrays, factor: float = 1.0) -> dict[str, np.ndarray]:
        """Return arrays + factor · sum, in the arrays' own types, not to be written to."""
        found = {name: (value + factor * self.values[name]).astype(value.dtype) for name, value in arrays.items()}
        for value in found.values():
            value.flags.writeable = False
        return found
