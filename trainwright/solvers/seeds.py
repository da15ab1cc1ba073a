"""`as_generator`, `as_numpy_generator`: a seed or a generator, never the global state; `need_count`: whole numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from ..artifacts import UserError


def as_generator(seed: int | torch.Generator, device: torch.device | str = "cpu") -> torch.Generator:
    """Return `seed` itself where it is a generator (on its own device), else a new generator on `device`.

    >>> torch.rand(1, generator=as_generator(7)) == torch.rand(1, generator=as_generator(7))
    tensor([True])
    """
    if isinstance(seed, torch.Generator):
        if seed.device.type != torch.device(device).type:
            raise UserError(
                f"a generator on {torch.device(device).type} is needed; got one on {seed.device}; make it there"
            )
        return seed
    if whole(seed) is None or seed < 0:
        raise UserError(f"seed as a non-negative int or a torch.Generator is needed; got {seed!r}; give such a seed")
    return torch.Generator(device=device).manual_seed(operator.index(seed))


def as_numpy_generator(seed: int | np.random.Generator) -> np.random.Generator:
    """Return `seed` itself where it is a NumPy generator, else a new one of that seed.

    >>> int(as_numpy_generator(7).integers(10)) == int(as_numpy_generator(7).integers(10))
    True
    """
    if isinstance(seed, np.random.Generator):
        return seed
    number = whole(seed)
    if number is None or number < 0:
        raise UserError(
            f"seed as a non-negative int or a numpy.random.Generator is needed; got {seed!r}; give such a seed"
        )
    return np.random.default_rng(number)


def need_count(name: str, value: Any, low: int) -> int:
    """Return a whole number of at least `low`; `2.5`, `None` and `True` are refused.

    >>> need_count("batch_size", np.int64(3), 1)
    3
    """
    found = whole(value)
    if found is None or found < low:
        raise UserError(f"{name} of at least {low}, a whole number, is needed; got {value!r}; give such a value")
    return found


def whole(value: Any) -> int | None:
    """Return Python's int of a whole number (of NumPy too), `None` for anything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several numbers
        return None
