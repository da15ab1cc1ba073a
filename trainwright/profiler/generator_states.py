"""The random generator's states: memory that `torch.utils.checkpoint` keeps and that no dispatch mode sees appear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seen_generator_states(note: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `note` with each state of the CPU's generator that is asked for (5 kB; one a checkpointed segment).

    A state is made beside torch's dispatcher, so `torch.get_rng_state` itself is stood in for while the context lasts.

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
