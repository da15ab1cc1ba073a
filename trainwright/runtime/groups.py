"""Keeps the process groups that modules make, so that a process that runs several plans has each group once.

A group of gloo has threads and sockets of its own until the process ends; a hundred modules one after the other had a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch.distributed as dist

_kept: dict[Hashable, Any] = {}
_world: Any = None
"""The default group under which they were made; they end with it."""


def made_once(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return what `make` made for `key` under the present default group, making it the first time.

    Making groups is a collective call. Every rank asks for the same keys in the same order, so it is made on all or on none.
    """
    global _world
    if dist.group.WORLD is not _world:
        _kept.clear()
        _world = dist.group.WORLD
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]
