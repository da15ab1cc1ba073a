"""Checks the folders of a tier: that they exist, are empty, have room, and are on a disk."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..artifacts import UserError

IN_MEMORY = {"tmpfs", "ramfs"}


def check_folders(folders: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the folders as paths; raise `UserError` for none, a duplicate, a missing or an unwritable one.

    Warns of a folder on tmpfs, whose files stay in memory.
    """
    if not folders:
        raise UserError("at least one folder is needed for a tier; got none; name one on a disk")
    paths = [Path(each) for each in folders]
    for path in paths:
        if not path.is_dir():
            found = "is a file" if path.exists() else "is not there"
            raise UserError(f"a folder is needed for a tier; {path} {found}; make it, or name another")
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"a folder that can be written is needed for a tier; {path} cannot; name another")
        if (kind := file_system(path)) in IN_MEMORY:
            warnings.warn(
                f"{path} is on {kind}: what is moved there stays in memory; name a folder on a disk", stacklevel=2
            )
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"different folders are needed for a tier; got one twice in {', '.join(map(str, paths))}")
    return paths


def check_empty(paths: Sequence[Path]) -> None:
    """Raise `UserError` for a folder that is not empty, so that no file of the user's is ever overwritten."""
    for path in paths:
        if (found := next(path.iterdir(), None)) is not None:
            raise UserError(
                f"an empty folder is needed for a new tier; {path} holds {found.name}; empty it, name another, or go on with "
                "what a run left there (resume)"
            )


def check_room(paths: Sequence[Path], bytes_each: Sequence[int]) -> None:
    """Raise `UserError` unless every file system has room for the bytes of all its folders."""
    wanted: dict[int, int] = {}
    for path, num_bytes in zip(paths, bytes_each, strict=True):
        wanted[path.stat().st_dev] = wanted.get(path.stat().st_dev, 0) + num_bytes
    for path in paths:
        free, needed = shutil.disk_usage(path).free, wanted[path.stat().st_dev]
        if needed > free:
            raise UserError(
                f"{needed} bytes are needed on the disk of {path}; {free} are free; free some, or name a further folder on "
                "another disk"
            )


def file_system(path: Path) -> str:
    """Return the type of file system of `path` (ext4, tmpfs …); empty if the system does not tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf8").splitlines()
    except OSError:
        return ""
    found, resolved = ("", ""), path.resolve()
    for line in mounts:
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if resolved.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]
