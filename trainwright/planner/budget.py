"""The part of a memory budget that a plan may fill; the rest is reserved for memory that no simulation sees."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops import find

RESERVE_BYTES = 4096
RESERVE_DIVISOR = 1000
"""A plan leaves 4 KiB free, or a thousandth of the budget where that is more.

Real ranks take up to 2 KB beside the tensors that the simulation follows (scalars that the step makes, states of random
generators), and the measured peak is to stay under the budget always.
"""
SCRATCH_DIVISOR = 16
"""A plan leaves a sixteenth of the budget free where a CPU runs convolutions or recurrent layers: the scratch memory of
their kernels was measured to exceed its model by 1.6 to 4.5 %."""


def divisor_for(op_names: Iterable[str], device_kind: str) -> int:
    """Return the share of the budget, as a divisor, that a program of these ops leaves.

    >>> divisor_for(["linear", "conv2d"], "cpu"), divisor_for(["linear"], "cpu")
    (16, 1000)
    """
    scratch = device_kind == "cpu" and any(find(name).cpu_scratch for name in op_names)
    return SCRATCH_DIVISOR if scratch else RESERVE_DIVISOR


def usable_bytes(budget_bytes: int, divisor: int = RESERVE_DIVISOR) -> int:
    """Return the largest simulated peak that is taken to fit in `budget_bytes`.

    >>> usable_bytes(1_000_000), usable_bytes(80 * 2**30) == 80 * 2**30 - 80 * 2**30 // 1000
    (995904, True)
    """
    return budget_bytes - max(RESERVE_BYTES, budget_bytes // divisor)


def budget_for(peak_bytes: int, divisor: int = RESERVE_DIVISOR) -> int:
    """Return the smallest budget in which a simulated peak of `peak_bytes` fits.

    >>> [usable_bytes(budget_for(peak)) >= peak > usable_bytes(budget_for(peak) - 1) for peak in (0, 995_904, 10**10)]
    [True, True, True]
    """
    share = max(0, peak_bytes - 1) // (divisor - 1)
    return peak_bytes + max(RESERVE_BYTES, share)
