"""`as_generator`: a seed or a generator, never the global state."""

from __future__ import annotations

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
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UserError(f"seed as a non-negative int or a torch.Generator is needed; got {seed!r}; give such a seed")
    return torch.Generator(device=device).manual_seed(seed)
