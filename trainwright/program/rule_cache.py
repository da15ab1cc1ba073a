"""What was found out about ops without a rule, one small JSON file an op and kind of call, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

from ..artifacts.cache_directory import cache_folder

FORMAT = 1
"""Of the files, and of the way in which rules are looked for."""


class RuleCache:
    """The loops of one op, called in one way. The folder is `$TRAINWRIGHT_CACHE`, else `trainwright` in the user's."""

    def __init__(self, schema: str, pattern: str) -> None:
        self._key = [FORMAT, torch.__version__, schema, pattern]
        digest = hashlib.blake2b(json.dumps(self._key).encode(), digest_size=12).hexdigest()
        self.path = cache_folder() / "rules" / f"{digest}.json"

    def read(self) -> list[Any] | None:
        """Return the loops that were found, or `None`."""
        try:
            data = json.loads(self.path.read_text())
            return list(data["loops"]) if data["key"] == self._key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, loops: list[Any]) -> None:
        """Keep `loops`; a folder that cannot be written costs the next search, nothing else."""
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"key": self._key, "loops": loops}, indent=1) + "\n")
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
