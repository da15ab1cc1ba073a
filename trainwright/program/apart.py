"""Runs a function in a child process, so that a kernel which writes past its operands breaks no other process."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch


def apart(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, a value that JSON can express; None if it raised, or its process died.

    The child is a fork: it knows every op that is registered here. What it prints is dropped. Where forks are not safe (macOS,
    Windows), the function runs in this process.
    """
    if sys.platform != "linux":
        try:
            return function()
        except Exception:
            return None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # that other threads exist: the child uses none of their locks
        child = os.fork()
    if child == 0:
        _answer(function, reading, writing)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else None


def _answer(function: Callable[[], Any], reading: int, writing: int) -> None:
    """Write the result into the pipe, and end the process whatever happens."""
    status = 1
    try:
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)  # the words of an allocator that finds its heap broken
        faulthandler.disable()
        torch.set_num_threads(1)  # the threads of a pool do not survive a fork
        text = json.dumps(function())
        with os.fdopen(writing, "w") as pipe:
            pipe.write(text)
        status = 0
    finally:
        os._exit(status)
