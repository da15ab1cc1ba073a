"""Fixtures for all tests: pools of ranks, started when first asked for and shared by the session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import settings

from tests.pool import Pool

# The first call of a test imports and traces; a time limit on each example would judge that.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    """Two ranks over gloo."""
    with closing(Pool(2)) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four ranks over gloo."""
    with closing(Pool(4)) as pool:
        yield pool
