"""Whether what a command will read and write can be read and written: asked before the work begins, not after."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..artifacts import UserError
from .output import STDOUT


def check_file(option: str, path: str | None) -> None:
    """Raise `UserError` where the file of `option` could not be written; nothing is left behind.

    >>> check_file("--json", "no/such/folder/a.json")
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: --json needs a file in a directory that exists; there is no directory \
no/such/folder; make it, or choose another
    """
    if path is None or path == STDOUT:
        return
    place = Path(path)
    if place.is_dir():
        raise UserError(f"{option} needs a file; {path} is a directory; name a file in it")
    if place.exists():
        if not os.access(place, os.W_OK):
            raise UserError(f"{option} needs a file that can be written; {path} is read-only; choose another")
    elif not place.parent.is_dir():
        raise UserError(
            f"{option} needs a file in a directory that exists; there is no directory {place.parent}; make it, or choose another"
        )
    else:
        _check_writable(option, place.parent)


def check_folder(option: str, path: str | None) -> None:
    """Raise `UserError` where the directory of `option` is not there and could not be made, or not be written to."""
    if path is None:
        return
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{option} needs a directory; {place} is a file; choose another")
    _check_writable(option, place)


def check_readable(option: str, paths: Sequence[str]) -> None:
    """Raise `UserError` for the first of the files that cannot be read."""
    for path in paths:
        if not Path(path).is_file():
            found = "is a directory" if Path(path).is_dir() else "does not exist"
            raise UserError(f"{option} needs a file; {path} {found}; check the path")
        if not os.access(path, os.R_OK):
            raise UserError(f"{option} needs a file that can be read; {path} cannot; change its permissions")


def check_tensorboard(folder: str | None) -> None:
    """Raise `UserError` where TensorBoard's files are asked for and it is not installed, or they cannot be written."""
    if folder is None:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--tensorboard needs the package tensorboard; it is not installed; pip install 'trainwright[tensorboard]', "
            "or use --metrics"
        )
    check_folder("--tensorboard", folder)


def _check_writable(option: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{option} needs a directory that can be written to; {folder} cannot ({error.strerror}); choose another"
        ) from None
