"""Fixtures for all tests: pools of ranks, started when first asked for and shared by the session."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.pool import Pool, leave_tests_out

# The first call of a test imports and traces; a time limit on each example would judge that.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Share captures within a session, and let `cpu:N` be guessed for one machine wherever the tests run: plans hang on the guess.

    Tests of capturing call `capture`, which keeps nothing; a plan's model is captured once for all tests and their ranks.
    """
    if "TRAINWRIGHT_CACHE" not in os.environ:
        # Compiled code stays for the next session.
        os.environ["TRAINWRIGHT_CACHE"] = str(config.cache.mkdir("trainwright"))
        for kept in ("captures", "locks", "exact"):
            shutil.rmtree(Path(os.environ["TRAINWRIGHT_CACHE"]) / kept, ignore_errors=True)
    # Two workers and their ranks share the cores: a thread that spins while it waits takes them from one that computes.
    # OpenMP reads this as a process starts, so it holds for workers of pytest-xdist, pools and commands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # And one thread computes for each, as for their ranks; tests of more set their number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell script's processes in the background ignore Ctrl-C, and so would the commands that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    presets = importlib.import_module("trainwright.hardware.presets")
    presets.num_cores = lambda: 2
    presets.machine.cpu_flags = lambda: frozenset({"avx512f", "avx512_bf16"})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let a run end whose worker has died."""
    from tests.scheduler import Files

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection() -> None:
    """Import without the garbage collector, which went through a million objects again and again: 6 of 15 s."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take what importing made out of the garbage collector's sight, and let it look through all the rest a tenth as often.

    Programs and plans that tests share stay until the end: full collections went through them in 4 of 100 s.
    """
    if "trainwright.capture.surroundings" in sys.modules:
        leave_tests_out()
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out of the search for docstring examples what only tests import: they know it by another name.

    Loaded under both, a file would register its ops twice, and torch frees the first ones under the models that call them.
    """
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_helper and Path(__file__).parent in collection_path.parents else None


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """Leave the process group that a script of a test has joined "until the process ends": the next test is no rank."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch: small tensors of simulated workers gain nothing from several, which wait for one another."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Let a test compile as in a process of its own: torch gives up on code that it has compiled eight times, of whatever test."""
    torch = importlib.import_module("torch")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
