"""C++ files of this package, compiled for this machine when first used, and work split over torch's threads."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno")
_COMPILERS = ("g++",)


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """Return the compiled `source`, from the cache of earlier runs where it is the same for the same processor.

    The cache is `$TRAINWRIGHT_CACHE`, by default `trainwright` in the user's cache folder. The compiler is `$CXX`, or
    g++: GCC's vector extensions are needed. Raises `RuntimeError` where there is no compiler or it refuses the file.
    """
    compiler = os.environ.get("CXX") or next((name for name in _COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise RuntimeError("compiled kernels need g++; found none; install it or set CXX")
    code = source.read_bytes()
    key = hashlib.sha256(b"\0".join([code, compiler.encode(), " ".join(_FLAGS).encode(), _processor()]))
    target = _cache_folder() / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, source, target)
    return ctypes.CDLL(str(target))


def over_threads(run: Callable[[int, int], None], num_items: int, least: int) -> None:
    """Call `run(begin, end)` for parts of `num_items` on as many threads as torch uses, each part of at least `least`.

    >>> parts = []
    >>> over_threads(lambda begin, end: parts.append((begin, end)), 10, least=10)
    >>> parts
    [(0, 10)]
    """
    num_parts = max(1, min(torch.get_num_threads(), num_items // max(least, 1)))
    edges = [num_items * part // num_parts for part in range(num_parts + 1)]
    if num_parts == 1:
        return run(0, num_items)
    others = [_pool(os.getpid()).submit(run, begin, end) for begin, end in itertools.pairwise(edges[1:])]
    run(edges[0], edges[1])
    for other in others:
        other.result()
    return None


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1)


def _compile(compiler: str, source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(source), "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise RuntimeError(
                f"compiled kernels need a compiler that takes {source.name}; {compiler} says: {said.strip()[-500:]}; "
                "set CXX to another g++"
            ) from error
        os.replace(made, target)  # ranks that compile at once each leave a whole file


def _cache_folder() -> Path:
    if chosen := os.environ.get("TRAINWRIGHT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright"


def _processor() -> bytes:
    """What the machine's code depends on: folders may be shared by unlike machines."""
    described = platform.machine().encode()
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return described + platform.processor().encode()
    return described + b"".join(line for line in lines if line.startswith((b"flags", b"Features")))[:4096]
