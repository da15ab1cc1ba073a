"""C++ files of this package, compiled for this machine when first used.

They run on OpenMP's threads, which are torch's too: threads of another kind would wait for those to stop spinning.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno")
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


def address(tensor: Tensor, dtype: torch.dtype, num_elements: int) -> int:
    """Return where a tensor's memory begins, for a kernel that reads so many elements of that dtype there and cannot check it.

    Raises `ValueError` for any other tensor: a kernel would read and write what lies behind it.

    >>> address(torch.zeros(3), torch.float32, 4)
    Traceback (most recent call last):
    ValueError: a compiled kernel needs 4 elements of torch.float32; got 3 of torch.float32; a state that was loaded ...
    """
    if tensor.dtype != dtype or tensor.numel() != num_elements:
        raise ValueError(
            f"a compiled kernel needs {num_elements} elements of {dtype}; got {tensor.numel()} of {tensor.dtype}; a state that "
            "was loaded is another parameter's: load what was saved for this one"
        )
    return tensor.data_ptr()


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
