"""Packages that only a part of this one needs: is one installed, and what to say where it is not."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from .record import UserError

VERSIONS = {"transformers": "transformers>=5.0", "flwr": "trainwright[federated]"}
"""What to install, where a release matters."""


def is_installed(package: str) -> bool:
    """Return whether `package` can be imported, without importing it.

    >>> is_installed("json"), is_installed("no_such_package")
    (True, False)
    """
    return importlib.util.find_spec(package) is not None


def need(package: str, user: str) -> None:
    """Raise `UserError` unless `package` is installed, which `user` (the zoo, an option) needs.

    >>> need("no_such_package", "the poem")
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: the poem needs the package no_such_package; it is not installed; \
try pip install no_such_package
    """
    if not is_installed(package):
        wanted = VERSIONS.get(package, package)
        quoted = f"'{wanted}'" if wanted != package else package
        raise UserError(f"{user} needs the package {package}; it is not installed; try pip install {quoted}")


def needed(package: str, user: str) -> Any:
    """Import `package` and return it; `UserError` where it is not installed."""
    need(package, user)
    return importlib.import_module(package)
