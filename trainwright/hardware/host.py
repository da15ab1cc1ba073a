"""What copies between a device and the host's memory reach, made as a run makes them whose tensors rest there (`tiers.copies`).

On a CPU the device is a budget within the machine's memory, and threads copy; on a GPU copies are from and to page-locked memory,
on a stream for each direction. Each direction is measured alone, then one of them beside matrix products.
"""

from __future__ import annotations

import statistics
from typing import Any

from .beside import overlap_of, timed

_MIB = 2**20
_SMALL = 4096


def host_rates(quick: bool, device: str = "cpu") -> dict[str, float]:
    """Return bytes per second `written` (from the device) and `read`, the `latency_s` of a transfer, and the `overlap`.

    64 MiB are copied, `quick` 32: more than caches hold. Nothing where the host has no room for them. The overlap is the share of a
    transfer that computing hides.
    """
    import torch

    from ..artifacts import UserError
    from ..tiers import copies_of

    size, own = (32 if quick else 64) * _MIB, torch.device(device)
    copies = copies_of(own)
    try:
        tensor, buffer = torch.zeros(size, dtype=torch.uint8, device=own), copies.buffer(size)
    except (UserError, RuntimeError):  # torch's error where a device has no room
        return {}
    small, small_buffer = tensor[:_SMALL], buffer[:_SMALL]

    def copy(direction: str, into: Any, source: Any) -> None:
        copies.copy(direction, into, source).finish()

    def write() -> None:
        copy("write", buffer, tensor)

    def read() -> None:
        copy("read", tensor, buffer)

    write()  # takes the buffer's pages
    read()
    written_s, read_s = (min(timed(each) for _ in range(5)) for each in (write, read))
    latency_s = statistics.median(timed(lambda: copy("write", small_buffer, small)) for _ in range(21))
    overlap = overlap_of(lambda: copies.copy("write", buffer, tensor).finish, written_s, device)
    copies.close()
    return {"written": size / written_s, "read": size / read_s, "latency_s": latency_s, "overlap": overlap}
