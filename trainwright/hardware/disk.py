"""What moving tensors to a disk and back reaches: the file that a plan's `--offload disk` would use, as a run uses it.

A file without a name in the folder of temporary files is written, forced to the disk, and read again: once alone, and once
beside matrix products on the same process. The system keeps what it can of such files in memory that nobody else asks
for, so a read may be faster than the disk; it is what a run sees as long as that memory lasts.

A commit of a run that rests there (`trainwright.tiers`) waits for a file to be on the disk and replaces a small one: its seconds
are those beyond the transfers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

_MIB = 2**20
_PAGE = 4096


def disk_rates(quick: bool, folder: str | None = None) -> dict[str, float]:
    """Return bytes per second `written` and `read`, the `overlap` (the share of a transfer that computing hides) and `commit_s`.

    Nothing where the folder cannot hold the file: 32 MiB, `quick` 8. The overlap is (transfer + products − together) /
    min(transfer, products), for products that take about as long.
    """
    size = (8 if quick else 32) * _MIB
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            found = _rates(file.fileno(), bytearray(os.urandom(_MIB)) * (size // _MIB))
        return {**found, "commit_s": _commit_s(folder)}
    except OSError:
        return {}


def _commit_s(folder: str | None) -> float:
    """Return the median seconds in which a page is sure to be on the disk and a small file, which says so, is replaced."""
    with tempfile.TemporaryDirectory(dir=folder) as place, open(os.path.join(place, "data"), "wb", buffering=0) as data:

        def commit() -> None:
            data.write(bytes(_PAGE))
            os.fdatasync(data.fileno())
            with open(os.path.join(place, "new"), "wb") as said:
                said.write(bytes(_PAGE))
                said.flush()
                os.fsync(said.fileno())
            os.replace(os.path.join(place, "new"), os.path.join(place, "said"))
            entries = os.open(place, os.O_RDONLY)
            os.fsync(entries)
            os.close(entries)

        return statistics.median(_timed(commit) for _ in range(5))


def _rates(file: int, data: bytearray) -> dict[str, float]:
    def write() -> None:
        os.pwrite(file, data, 0)
        os.fdatasync(file)

    def read() -> None:
        os.preadv(file, [data], 0)

    written_s = min(_timed(write) for _ in range(3))
    read_s = min(_timed(read) for _ in range(3))
    return {"written": len(data) / written_s, "read": len(data) / read_s, "overlap": _overlap(write, written_s)}


def _overlap(transfer: Callable[[], None], alone_s: float) -> float:
    import torch

    left = torch.randn(256, 256)

    def compute(num: int) -> None:
        for _ in range(num):
            left @ left

    compute(3)
    num = max(1, round(alone_s / (_timed(lambda: compute(20)) / 20)))
    compute_s = _timed(lambda: compute(num))

    def both() -> None:
        thread = threading.Thread(target=transfer)
        thread.start()
        compute(num)
        thread.join()

    together_s = _timed(both)
    return min(1.0, max(0.0, (alone_s + compute_s - together_s) / min(alone_s, compute_s)))


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return max(1e-9, time.perf_counter() - began)
