"""Reports allocations that no dispatch mode sees: states of the random generator, and resized storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seen_generator_states(note: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `note` with each state of the CPU's generator that is read while the context lasts (5 kB a checkpointed segment).

    A state is allocated without torch's dispatcher, so `torch.get_rng_state` itself is patched.

    >>> found = []
    >>> with seen_generator_states(found.append):
    ...     state = torch.get_rng_state()
    >>> found[0] is state
    True
    """
    original = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = original()
        note(state)
        return state

    modules = (torch, torch.random)
    for module in modules:
        setattr(module, "get_rng_state", get_rng_state)  # noqa: B010  (a plain assignment does not type-check)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, "get_rng_state", original)  # noqa: B010


@contextmanager
def seen_resizes(note: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Call `note` with each storage whose `resize_` has been called while the context lasts.

    >>> found = []
    >>> with seen_resizes(found.append):
    ...     _ = torch.zeros(3).untyped_storage().resize_(0)
    >>> [storage.nbytes() for storage in found]
    [0]
    """
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, *args: int, **kwargs: int) -> torch.UntypedStorage:
        found = original(self, *args, **kwargs)
        note(self)
        return found

    setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.UntypedStorage, "resize_", original)  # noqa: B010
