"""A generator for each place and time of a run, from numbers that a checkpoint holds anyway."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def seeded(seed: int, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator that depends on `seed` and `counters` (a step, a rank, …) alone.

    The same on every rank that names the same numbers, and again after a resume, with no generator state to save.
    Neighbouring counters give unrelated streams (splitmix64, Steele, Lea & Flood 2014).

    >>> draws = [torch.randint(100, (3,), generator=seeded(7, step)).tolist() for step in (1, 2, 1)]
    >>> draws[0] == draws[2], draws[0] == draws[1]
    (True, False)
    """
    mixed = _mix(seed & _MASK)
    for counter in counters:
        mixed = _mix(mixed ^ (counter & _MASK))
    # The CPU's engine reads the low 32 bits only, so both halves are folded into them.
    return torch.Generator(device=device).manual_seed((mixed ^ (mixed >> 32)) & 0x7FFFFFFFFFFFFFFF)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
