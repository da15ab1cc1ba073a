"""Reads and atomically replaces the manifest, the file that names the committed version of every item."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ..artifacts import UserError

NAME = "tier.json"
PREVIOUS = "tier.previous.json"
"""The previous manifest; the versions that it names stay intact until the next step is written."""
FORMAT = "trainwright tier 1"


def write_manifest(folder: Path, data: dict[str, Any]) -> None:
    """Replace the manifest by `data` atomically: a reader finds the old or the new one, whenever the process ends."""
    body = json.dumps(data)
    beside = folder / f"{NAME}.new"
    with open(beside, "w", encoding="utf8") as file:
        json.dump({"format": FORMAT, "sum": zlib.crc32(body.encode()), "body": body}, file)
        file.flush()
        os.fsync(file.fileno())
    if (folder / NAME).exists():
        link = folder / f"{PREVIOUS}.new"
        link.unlink(missing_ok=True)
        os.link(folder / NAME, link)
        os.replace(link, folder / PREVIOUS)
    os.replace(beside, folder / NAME)
    sync_folder(folder)


def read_manifest(folder: Path, name: str = NAME) -> dict[str, Any]:
    """Return the manifest of `folder`; raise `UserError` if there is none or it is damaged."""
    path = folder / name
    try:
        held = json.loads(path.read_text(encoding="utf8"))
        body = held["body"]
        if held["format"] != FORMAT or zlib.crc32(body.encode()) != held["sum"]:
            raise ValueError(held["format"])
        found: dict[str, Any] = json.loads(body)
    except FileNotFoundError:
        raise UserError(
            f"a tier that a run left with a whole step is needed in {folder}; there is no {NAME}; begin anew in an empty folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"a whole {path} of the form {FORMAT!r} is needed; this is another; begin anew in an empty folder"
        ) from None
    return found


def sync_folder(folder: Path) -> None:
    """Synchronise a folder's entries to the disk, if the system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
