"""Reads and writes one file of a tier, by direct I/O if the system and the file system support it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from .buffers import ALIGNMENT, _pages


class StripeFile:
    """A file that is read and written in whole pages; `is_direct` tells whether it bypasses the page cache."""

    def __init__(self, fd: int, path: Path, folder: Path, is_direct: bool) -> None:
        self.fd, self.path, self.folder = fd, path, folder
        self.is_direct = is_direct and self._set_direct()

    @classmethod
    def open(cls, path: Path, is_new: bool) -> StripeFile:
        """Return the file at `path`, opened for direct I/O where that works."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0)
        return cls(os.open(path, flags, 0o600), path, path.parent, is_direct=True)

    @classmethod
    def unnamed(cls, folder: Path, is_direct: bool) -> StripeFile:
        """Return a new file in `folder` that disappears with the process, however it ends; its `path` is the folder's.

        is_direct: whether it is to bypass the page cache where that works.
        """
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return cls(os.dup(file.fileno()), folder, folder, is_direct)

    def _set_direct(self) -> bool:
        """Set the file to direct I/O, and return whether that works; some systems and file systems (old tmpfs) cannot."""
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return False
        import fcntl

        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | flag)
            os.preadv(self.fd, [_pages(ALIGNMENT)], 0)  # some accept the flag and refuse the transfer
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            return False
        return True

    def reserve(self, num_bytes: int) -> None:
        """Allocate disk space for `num_bytes`, so that no later write finds the disk full; where unsupported, extend the file."""
        if num_bytes <= os.fstat(self.fd).st_size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, 0, num_bytes)
        else:
            os.ftruncate(self.fd, num_bytes)

    def write(self, data: memoryview, offset: int) -> int:
        """Write `data` at `offset`; return the number of bytes written."""
        done = 0
        while done < len(data):
            num = os.pwrite(self.fd, data[done:], offset + done)
            if num <= 0:
                break
            done += num
        return done

    def read(self, into: memoryview, offset: int) -> int:
        """Read into `into` from `offset`; return the number of bytes read."""
        done = 0
        while done < len(into):
            num = (
                os.preadv(self.fd, [into[done:]], offset + done)
                if hasattr(os, "preadv")
                else self._read(into[done:], offset + done)
            )
            if num <= 0:
                break
            done += num
        return done

    def _read(self, into: memoryview, offset: int) -> int:
        found = os.pread(self.fd, len(into), offset)
        into[: len(found)] = found
        return len(found)

    def sync(self) -> None:
        """Wait until all written bytes are on the disk; without direct I/O, also drop the file from the page cache."""
        getattr(os, "fdatasync", os.fsync)(self.fd)
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
