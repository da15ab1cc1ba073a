"""What moving tensors to a disk and back reaches: a file as a plan's `--tier` uses it.

A file without a name in the folder of temporary files is written, forced to the disk, and read again, past the page cache where the
system can: once alone, and once beside matrix products on the same process. With `--offload disk` alone files go through the
cache, so what is read again may come faster than this, as long as nobody else asks for that memory.

A commit of a run that rests there (`trainwright.tiers`) waits for a file to be on the disk and replaces a small one: its seconds
are those beyond the transfers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ..tiers.buffers import aligned_empty, memory_at
from ..tiers.files import StripeFile
from ..tiers.store import CHUNK_BYTES
from .beside import overlap_of, timed

_MIB = 2**20
_PAGE = 4096


def disk_rates(quick: bool, folder: str | None = None) -> dict[str, float]:
    """Return bytes per second `written` and `read`, the `overlap` (the share of a transfer that computing hides) and `commit_s`.

    Nothing where the folder cannot hold the file: 32 MiB, `quick` 8. The overlap is (transfer + products − together) /
    min(transfer, products), for products that take about as long.
    """
    size = (8 if quick else 32) * _MIB
    try:
        file = StripeFile.unnamed(Path(folder or tempfile.gettempdir()), is_direct=True)
        try:
            found = _rates(file, size)
        finally:
            file.close()
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

        return statistics.median(timed(commit) for _ in range(5))


def _rates(file: StripeFile, size: int) -> dict[str, float]:
    held = aligned_empty(size)
    data = memory_at(held.data_ptr(), size)
    data[:] = os.urandom(_MIB) * (size // _MIB)

    def write() -> None:
        for begin in range(0, size, CHUNK_BYTES):
            file.write(data[begin : begin + CHUNK_BYTES], begin)
        os.fdatasync(file.fd)

    def read() -> None:
        for begin in range(0, size, CHUNK_BYTES):
            file.read(data[begin : begin + CHUNK_BYTES], begin)

    def begin() -> Callable[[], None]:
        thread = threading.Thread(target=write)
        thread.start()
        return thread.join

    written_s = min(timed(write) for _ in range(3))
    read_s = min(timed(read) for _ in range(3))
    return {"written": size / written_s, "read": size / read_s, "overlap": overlap_of(begin, written_s)}
