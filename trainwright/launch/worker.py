"""One rank that `processes.Workers` started: joins the group, runs the functions it is told to, answers in JSON.

Messages are JSON, one a line: calls come over the standard input, answers leave over a pipe of their own, so that
prints disturb neither and nothing is ever unpickled. When the standard input ends, the parent is gone, however it
died, and this process ends itself with everything it started.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

CHANNEL_VARIABLE = "TRAINWRIGHT_WORKER_CHANNEL"


def emit(event: dict[str, Any]) -> None:
    """Send `event` (JSON) to the process that started this rank, whose `on_event` gets it.

    Elsewhere it goes to the handler of `listening`, and to nobody where there is none.
    """
    if _channel is not None:
        _channel.send({"event": event})
    elif _listener is not None:
        _listener(event)


@contextmanager
def listening(handler: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Hand what this process emits to `handler`: for ranks that something else has started, such as torchrun.

    >>> with listening(print):
    ...     emit({"step": 1})
    {'step': 1}
    """
    global _listener
    before, _listener = _listener, handler
    try:
        yield
    finally:
        _listener = before


def fail(error: BaseException) -> NoReturn:
    """End this rank at once with `error`, from whatever thread: for when the main one will not come back.

    The process that started this rank raises it; under another launcher it goes to standard error, and the exit status is 1.
    """
    if _channel is not None:
        _channel.send({"error": describe(error)})
    else:
        print(f"error: {error}", file=sys.stderr)
    _exit(1)


def main() -> None:
    """Serve calls until told to close. The first message describes the group."""
    global _channel
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _channel = _Channel()
    setup = _channel.receive()
    try:
        _join(setup)
        while (message := _channel.receive()) != {"close": True}:
            _channel.send({"result": _call(message["call"], message["payload"])})
        _leave()
    except BaseException as error:
        _channel.send({"error": describe(error)})
        _exit(1)
    _exit(0)


def describe(error: BaseException) -> dict[str, Any]:
    """Return what the parent needs to tell of `error` or to raise it again: text, trace, names of its types."""
    return {
        "text": str(error),
        "types": [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__],
        "trace": "".join(traceback.format_exception(error)),
    }


def load(reference: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


class _Channel:
    """The two pipes to the parent. A thread reads, so that the parent's end is noticed whatever else goes on."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ.pop(CHANNEL_VARIABLE)), "w", encoding="utf8")
        os.set_inheritable(self._out.fileno(), False)
        self._lock = threading.Lock()
        self._in = os.fdopen(os.dup(0), encoding="utf8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)  # standard output belongs to the parent's own answer
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> Any:
        return self._messages.get()

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message)
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()

    def _read(self) -> None:
        for line in self._in:
            self._messages.put(json.loads(line))
        os.killpg(0, signal.SIGKILL)


_channel: _Channel | None = None
_listener: Callable[[dict[str, Any]], None] | None = None


def _join(setup: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from .group import join

    torch.set_num_threads(setup["num_threads"])
    store = dist.FileStore(setup["store"], setup["num_ranks"])
    join(setup["device"], store=store, index=setup["rank"], num_ranks=setup["num_ranks"])


def _leave() -> None:
    from .group import leave

    leave()


def _call(reference: str, payload: dict[str, Any]) -> Any:
    return load(reference)(**payload)


def _exit(status: int) -> NoReturn:
    """End without the interpreter's tear-down, where a late thread of a library may still abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
