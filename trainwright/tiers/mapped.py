"""Builds models whose parameters lie in files instead of memory, with the values that they have in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .faults import raise_as_fault

SMALLEST_BYTES = 2**16
"""Parameters below this stay in memory: a mapping takes whole pages, and a process may have some ten thousand."""


@contextmanager
def parameters_in_files(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Let the parameters of modules that are built in the `with` block lie in unnamed files in `folder`.

    The system reads and writes their pages as they are used and keeps in memory what there is room for, once the block ends nothing
    in the process's own. A limit of the process's own memory does not count them. Parameters are the same objects with the same
    values as without, whatever initialises them; the files disappear with the parameters. Raises `TierFault` where the disk has
    no room.

    It is for models that are then taken apart (`parallelize(…, tier=…)`), not for training: every use may wait for the disk.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = torch.manual_seed(0)
    ...     with parameters_in_files(folder):
    ...         layer = nn.Linear(256, 128)
    ...     _ = torch.manual_seed(0)
    ...     bool(torch.equal(layer.weight, nn.Linear(256, 128).weight))
    True
    """
    own = nn.Module.register_parameter
    mapped: dict[int, nn.Parameter] = {}

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and id(param) not in mapped and _is_large(param):
            param.data = _in_file(param.data, folder)
            mapped[id(param)] = param
        own(self, name, param)

    setattr(nn.Module, "register_parameter", register)  # noqa: B010  # a method of torch's, for the time of the block
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", own)  # noqa: B010
        for param in mapped.values():
            release_pages(param)


_PAGES: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""The mappings that parameters lie in, by address."""


def release_pages(value: Tensor) -> None:
    """Take the pages of a tensor that lies in a file out of the process's memory; its values stay, and are read when used."""
    pages = _PAGES.get(value.data_ptr()) if value.device.type == "cpu" else None
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def _is_large(param: Tensor) -> bool:
    return param.device.type == "cpu" and not param.is_sparse and param.numel() * param.element_size() >= SMALLEST_BYTES


def _in_file(value: Tensor, folder: str | os.PathLike[str]) -> Tensor:
    """Return a copy of `value` whose memory is a file."""
    num_bytes = value.numel() * value.element_size()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), num_bytes)
            pages: Any = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise_as_fault(error, os.fspath(folder), f"to hold a parameter of {num_bytes} bytes while the model is built")
    found = torch.frombuffer(pages, dtype=value.dtype).view(value.shape)
    found.copy_(value)
    _PAGES[found.data_ptr()] = pages
    return found


def _reserve(file: int, num_bytes: int) -> None:
    """Take room on the disk now: a page without any would end the process when it is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.truncate(file, num_bytes)
