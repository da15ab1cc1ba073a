"""How much of a transfer a computation hides, and the seconds of a call."""

from __future__ import annotations

import time
from collections.abc import Callable


def overlap_of(begin: Callable[[], Callable[[], object]], alone_s: float, device: str = "cpu") -> float:
    """Return the share of a transfer of `alone_s` that products on the device hide.

    begin: begins the transfer, and returns what waits for its end. The share is (transfer + products − together) /
    min(transfer, products), for products that take about as long.
    """
    import torch

    left = torch.randn(256, 256, device=device)

    def compute(num: int) -> None:
        for _ in range(num):
            left @ left
        if device != "cpu":
            torch.cuda.synchronize()

    compute(3)
    num = max(1, round(alone_s / (timed(lambda: compute(20)) / 20)))
    compute_s = min(timed(lambda: compute(num)) for _ in range(3))

    def both() -> None:
        finish = begin()
        compute(num)
        finish()

    together_s = min(timed(both) for _ in range(3))
    return min(1.0, max(0.0, (alone_s + compute_s - together_s) / min(alone_s, compute_s)))


def timed(call: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return max(1e-9, time.perf_counter() - began)
