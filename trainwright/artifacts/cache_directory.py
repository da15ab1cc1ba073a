"""A private folder of files that can be made again: bounded, safe for several processes, never in the way.

What cannot be read, written or trusted is as if it were not there: a run must not fail for lack of a cache.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIMIT_BYTES", "OFF", "CacheDirectory", "cache_directory", "cache_folder", "without_cache"]

VARIABLE = "TRAINWRIGHT_CACHE"
"""The environment variable that names the folder of all that is kept; by default `trainwright` in the user's own."""
OFF = "TRAINWRIGHT_NO_CACHE"
"""The environment variable that, set to anything, turns the cache of captures off."""
LIMIT_BYTES = 256 * 2**20
_ABANDONED_S = 3600.0
"""After which a file that a process was about to write is taken for abandoned."""
_TEMPORARY = ".tmp"
_warned: set[Path] = set()


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Use no cache of captures inside the `with` block, nor in processes that are started there."""
    before = os.environ.get(OFF)
    os.environ[OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[OFF]
        else:
            os.environ[OFF] = before


def cache_folder() -> Path:
    """Return the folder of all that is kept: `$TRAINWRIGHT_CACHE`, else `$XDG_CACHE_HOME/trainwright` or `~/.cache/trainwright`."""
    if said := os.environ.get(VARIABLE):
        return Path(said)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright"


def cache_directory() -> CacheDirectory | None:
    """Return the cache of captures, the folder `captures` in `cache_folder()`.

    `None` where `TRAINWRIGHT_NO_CACHE` is set, or where the folder is another user's or others may write to it.
    """
    if os.environ.get(OFF):
        return None
    try:
        base = cache_folder() / "captures"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _not_private(base)
    except (OSError, RuntimeError):
        return None
    if problem:
        if base not in _warned:
            _warned.add(base)
            warnings.warn(
                f"the cache {base} is not used: {problem}; chmod 700 it, or set {VARIABLE} to another", stacklevel=2
            )
        return None
    return CacheDirectory(base)


@dataclass(frozen=True)
class CacheDirectory:
    """Files by name in one folder; `limit_bytes` bounds them, the least recently used go first."""

    path: Path
    limit_bytes: int = LIMIT_BYTES

    def read(self, name: str) -> bytes | None:
        """Return what was written under `name`, and note that it was used; `None` where there is nothing."""
        path = self.path / name
        try:
            found = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return found

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole, so that no reader ever sees half of it; a quarter of the limit is the largest kept."""
        if len(content) > self.limit_bytes // 4:
            return
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(suffix=_TEMPORARY, dir=self.path)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, self.path / name)
            self._trim()
        except OSError:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file that turned out to be of no use."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files."""
        for path, _ in self.files():
            self.remove(path.name)

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the files that are there, the least recently used first."""
        found = []
        for path in self.path.iterdir():
            with contextlib.suppress(OSError):
                seen = path.lstat()
                if stat.S_ISREG(seen.st_mode):
                    found.append((path, seen))
        return sorted(found, key=lambda each: each[1].st_mtime_ns)

    def _trim(self) -> None:
        files = self.files()
        total = sum(seen.st_size for _, seen in files)
        for path, seen in files:
            abandoned = path.suffix == _TEMPORARY and time.time() - seen.st_mtime > _ABANDONED_S
            if total > self.limit_bytes or abandoned:
                self.remove(path.name)
                total -= seen.st_size


def _not_private(folder: Path) -> str:
    """Say what is wrong with a folder to which others than this user might write; empty: nothing."""
    if not hasattr(os, "getuid"):
        return ""
    found = folder.stat()
    if found.st_uid != os.getuid():
        return "it is another user's"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return ""
