"""What a capture hangs on beside the model: versions, installed packages, files of code, torch's own settings.

Before a capture   `surroundings()`     part of the key: releases, what is installed, our own sources, the user's files
After it           `loaded_files()`     kept with the entry: every file of Python code that was loaded by then
Before it is used  `unchanged(files)`   each of those files is as it was
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .export_errors import OUR_ROOT
from .stored import NotStorable

__all__ = ["is_own_file", "loaded_files", "surroundings", "unchanged"]

_SETTLED_NS = 2 * 10**9
"""A further change of a file within the clock of its file system might not show; no such clock is coarser than this."""
_digests: dict[str, tuple[tuple[int, int, int], str]] = {}
"""A file → its last change, size and number, and the digest of its text."""
_of_packages: dict[str, Any] = {}
"""A module's name → the module, if its file is not the user's own: of thousands, few have to be looked at before a capture."""
_loaded: dict[str, list[int]] = {}
"""A file of a package that this process has loaded → its stamp when that was first looked at: what runs is not what came later."""
Files = dict[str, list[int] | str]
"""A file → the time of its last change and its size, or of the user's files a digest of the text."""


def surroundings() -> list[Any]:
    """Return what decides, beside model, batch and loss, how they are captured; JSON.

    `NotStorable` where code was typed in: it has no file that could be looked at again.
    """
    if _is_typed_in(sys.modules.get("__main__")):
        raise NotStorable("code that was typed in has no file")
    return [
        sys.version,
        torch.__version__,
        _our_sources(),
        _installed(),
        {path: _digest(path) for path in _own_files()},
        [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled(),
         torch.are_deterministic_algorithms_enabled()],
    ]  # fmt: skip


def is_own_file(path: str) -> bool:
    """Tell whether a file of code is the user's own: no installed package's, not of Python's library, not ours.

    >>> is_own_file(torch.__file__), is_own_file(__file__), is_own_file("/home/me/train.py")
    (False, False, True)
    """
    return bool(path) and not path.startswith("<") and not _is_ours_or_installed(path)


def loaded_files() -> Files:
    """Return the files of all modules loaded, ours and Python's own left out: packages' as when first seen here, yours as now."""
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    found: Files = {}
    for path in _files():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a module may name a file that is none
            if is_own_file(path):
                found[path] = _digest(path)
            elif not path.startswith(OUR_ROOT + os.sep) and ("-packages" in path or not path.startswith(standard)):
                if path not in _loaded:
                    _loaded[path] = _stamp(path)
                found[path] = _loaded[path]
    return found


def unchanged(files: Mapping[str, list[int] | str]) -> bool:
    """Tell whether each of the files is as it was."""
    try:
        return all(
            seen == (_digest(path) if isinstance(seen, str) else _loaded.get(path) or _stamp(path))
            for path, seen in files.items()
        )
    except OSError:
        return False


def _files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py"):
            yield path


def _own_files() -> list[str]:
    """Return the user's files of code that are loaded, sorted."""
    found = set()
    for name, module in list(sys.modules.items()):
        if _of_packages.get(name) is module:
            continue
        path = getattr(module, "__file__", None)
        if not isinstance(path, str):
            continue
        if not path.endswith(".py") or not is_own_file(path):
            _of_packages[name] = module
        elif os.path.isfile(path):
            found.add(path)
    return sorted(found)


@functools.cache
def _is_ours_or_installed(path: str) -> bool:
    """Whether a file is of a package, Python's or ours: asked of thousands of modules before each capture."""
    return path.startswith((*_roots(), OUR_ROOT + os.sep))


def _is_typed_in(main: Any) -> bool:
    """Whether a main module without a file defines functions or classes."""
    if main is None or getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None:
        return False
    return any(getattr(value, "__module__", None) == "__main__" for value in vars(main).values())


@functools.cache
def _roots() -> tuple[str, ...]:
    """The folders of installed packages, Python's own library and commands, each with a separator at its end."""
    paths = sysconfig.get_paths()
    named = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders = [*named, *site.getsitepackages(), site.getusersitepackages()]
    both = {*folders, *(os.path.realpath(folder) for folder in folders)}
    return tuple(sorted(folder.rstrip(os.sep) + os.sep for folder in both))


def _installed() -> list[str]:
    """The names of installed distributions, which hold their versions."""
    folders = {path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)}
    return sorted(name for path in folders for name in os.listdir(path) if name.endswith((".dist-info", ".egg-info")))


@functools.cache
def _our_sources() -> str:
    """A digest of the code that captures: it may be a checkout that is being worked on."""
    digest = hashlib.blake2b(digest_size=20)
    for folder in ("torch_internals", "capture", "ops"):
        for path in sorted((Path(OUR_ROOT) / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(path: str) -> str:
    """Return a digest of the text; a file that the system has not changed since is not read again."""
    found = os.stat(path)
    change = (found.st_ctime_ns, found.st_size, found.st_ino)
    known = _digests.get(path)
    if known is not None and known[0] == change:
        return known[1]
    digest = hashlib.blake2b(Path(path).read_bytes(), digest_size=20).hexdigest()
    if time.time_ns() - found.st_ctime_ns > _SETTLED_NS:
        _digests[path] = (change, digest)
    return digest


def _stamp(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_mtime_ns, found.st_size]
