"""Keeps the process groups that modules make, so that a process that runs several plans has each group once.

A group of gloo has threads and sockets of its own until nothing refers to it; a hundred modules one after the other had a thousand.
What is kept ends with the default group: a thread that still releases a tensor while Python ends aborts the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch.distributed as dist

_kept: dict[Hashable, Any] = {}
_world: weakref.ref[Any] | None = None
"""The default group under which they were made."""


def _forget(kept: dict[Hashable, Any], _: object) -> None:
    kept.clear()


def made_once(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return what `make` made for `key` under the present default group, making it the first time.

    Making groups is a collective call. Every rank asks for the same keys in the same order, so it is made on all or on none.
    """
    global _world
    world = dist.group.WORLD
    if _world is None or _world() is not world:
        _kept.clear()
        _world = weakref.ref(world, partial(_forget, _kept))  # while Python ends, globals are gone
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]
