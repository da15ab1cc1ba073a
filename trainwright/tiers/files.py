"""One file of a tier: opened past the page cache where the system and the file system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .buffers import ALIGNMENT, _pages


class StripeFile:
    """A file that is read and written in whole pages; `is_direct` tells whether past the page cache."""

    def __init__(self, path: Path, is_new: bool) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0)
        self.fd = os.open(path, flags, 0o600)
        self.is_direct = self._try_direct()

    def _try_direct(self) -> bool:
        """Open the file again without the page cache; some file systems (tmpfs of older kernels) and systems cannot."""
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return False
        try:
            fd = os.open(self.path, os.O_RDWR | flag)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return False
        try:  # some accept the flag and refuse the transfer
            os.preadv(fd, [_pages(ALIGNMENT)], 0)
        except OSError:
            os.close(fd)
            return False
        os.close(self.fd)
        self.fd = fd
        return True

    def reserve(self, num_bytes: int) -> None:
        """Take that much of the disk now, so that no later write finds it full; where the system cannot, the file grows."""
        if num_bytes <= os.fstat(self.fd).st_size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, 0, num_bytes)
        else:
            os.ftruncate(self.fd, num_bytes)

    def write(self, data: memoryview, offset: int) -> int:
        """Write all of `data`; return how much was."""
        done = 0
        while done < len(data):
            num = os.pwrite(self.fd, data[done:], offset + done)
            if num <= 0:
                break
            done += num
        return done

    def read(self, into: memoryview, offset: int) -> int:
        """Fill `into`; return how much there was."""
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
        """Return when all that was written is on the disk; without the page cache, drop what is kept in memory of it."""
        getattr(os, "fdatasync", os.fsync)(self.fd)
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the file up; a second time does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
