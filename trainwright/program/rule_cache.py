"""Stores the loops that were found for ops without a rule: one small JSON file for an op and kind of call."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

from ..artifacts.cache_directory import cache_folder

FORMAT = 2
"""The version of the files and of the search for loops; older files are ignored."""


class RuleCache:
    """The stored loops of one op, called in one way.

    Files lie in `$TRAINWRIGHT_CACHE`, by default the folder `trainwright` of the user's cache.
    """

    def __init__(self, schema: str, pattern: str) -> None:
        self._key = [FORMAT, torch.__version__, schema, pattern]
        digest = hashlib.blake2b(json.dumps(self._key).encode(), digest_size=12).hexdigest()
        self.path = cache_folder() / "rules" / f"{digest}.json"

    def read(self) -> list[Any] | None:
        """Return the stored loops, or `None` if there is no valid file."""
        try:
            data = json.loads(self.path.read_text())
            return list(data["loops"]) if data["key"] == self._key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, loops: list[Any]) -> None:
        """Store `loops`. If the folder cannot be written, the next process searches anew."""
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"key": self._key, "loops": loops}, indent=1) + "\n")
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
