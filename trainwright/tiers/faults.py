"""Names the faults of a disk, raises them as errors, and injects them at chosen transfers for tests.

    full        a write finds no space                     gone      a file or a folder has disappeared
    short read  fewer bytes are read than requested        checksum  the bytes read are not those written
    EIO         the device reports an error                slow      one transfer takes longer than the limit

A planted `kill` ends the process in the middle of a write, as a power cut would.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..artifacts import UserError

KINDS = ("full", "short read", "EIO", "checksum", "slow", "gone")
_OF_ERRNO = {
    errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EFBIG: "full", errno.EIO: "EIO", errno.ENOENT: "gone", errno.ENODEV: "gone",
    errno.EBADF: "gone", errno.ESTALE: "gone", errno.EROFS: "gone", errno.ENXIO: "gone",
}  # fmt: skip
_REMEDIES = {
    "full": "free some space there, or name a folder on another disk",
    "short read": "check the file system there, and start again from the last whole step with --resume",
    "EIO": "check the disk (dmesg, smartctl), and start again from the last whole step on another one",
    "checksum": "check the disk and its cable, and start again from the last whole step with --resume",
    "slow": "look at what else uses the disk, or allow more seconds a transfer",
    "gone": "mount it again, and start again from the last whole step with --resume",
}


class TierFault(UserError):
    """Raised for a transfer that the disk failed to complete; `kind` is one of `KINDS`.

    >>> raise_for("EIO", "/mnt/a", "to read 4096 bytes")
    Traceback (most recent call last):
    ...
    trainwright.tiers.faults.TierFault: a disk that works is needed in /mnt/a to read 4096 bytes; fault: EIO; check the disk \
(dmesg, smartctl), and start again from the last whole step on another one
    """

    kind = ""


def raise_for(kind: str, folder: str, doing: str, said: str = "") -> None:
    """Raise the `TierFault` of `kind` for a transfer in `folder`."""
    told = f"; the system says: {said}" if said else ""
    fault = TierFault(f"a disk that works is needed in {folder} {doing}; fault: {kind}{told}; {_REMEDIES[kind]}")
    fault.kind = kind
    raise fault


def raise_as_fault(error: OSError, folder: str, doing: str) -> None:
    """Raise the `TierFault` for an `OSError`; unknown error numbers count as `EIO`."""
    raise_for(_OF_ERRNO.get(error.errno or 0, "EIO"), folder, doing, error.strerror or str(error))


@dataclass(frozen=True)
class Fault:
    """A fault to inject: `kind` at the `at`-th transfer of a chunk in its direction, counted from 0."""

    kind: str
    at: int = 0
    delay_s: float = 0.0
    """The delay of a `slow` fault."""

    @property
    def direction(self) -> str:
        """Return the direction that the fault affects, `write` or `read`."""
        return "write" if self.kind in ("full", "slow", "gone", "kill") else "read"


class Planted:
    """Counts transfers, and gives each one its fault, if one is to be injected."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self.counts = {"read": 0, "write": 0}
        self._lock = threading.Lock()

    def next(self, direction: str) -> Fault | None:
        """Count the next transfer in `direction`, and return its fault, if it has one."""
        with self._lock:
            number = self.counts[direction]
            self.counts[direction] += 1
        return next((each for each in self.faults if each.direction == direction and each.at == number), None)


def happen_to_write(fault: Fault, fd: int, data: memoryview, offset: int) -> None:
    """Inject a fault instead of, or before, a write."""
    if fault.kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.kind == "gone":
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    if fault.kind == "slow":
        time.sleep(fault.delay_s)
    if fault.kind == "kill":
        os.pwrite(fd, data[: len(data) // 2 // 4096 * 4096], offset)
        os.kill(os.getpid(), signal.SIGKILL)


def happen_to_read(fault: Fault, data: memoryview, num: int) -> int:
    """Inject a fault into `data`, which a read of `num` bytes has filled; return the number of bytes read."""
    if fault.kind == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if fault.kind == "checksum":
        data[0] ^= 1  # not in what fills up the last page
    return num // 2 if fault.kind == "short read" else num
