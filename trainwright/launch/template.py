"""A process that has imported torch and forks ranks: they start in milliseconds and share the memory of what was imported.

A fresh interpreter takes about three seconds of processor time to import what a rank needs, and ranks of one machine
share its cores. Here one interpreter, the template, imports it once; it computes nothing and has one thread, so that a
fork of it is as good as a fresh process. A request holds a rank's ends of its pipes and all that differs from rank to
rank: environment, folder, `sys.path`. The template reports which process ended, and how; it ends when its caller does.

It serves on Linux, for ranks on CPUs. Where it does not, or does not start, a rank is a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from ..collecting import rarely_collecting

PACKAGES = ("torch", "transformers", __name__.partition(".")[0])
"""Packages of which the template imports, before it forks, the modules that its caller has imported."""
_NEEDED = ("torch", "torch.distributed", f"{__package__}.group", f"{__package__}.worker")
"""Modules that every rank needs."""
_READ_AS_THEY_LOAD = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "PYTHON", "LD_", "MALLOC_")
"""Variables that libraries read once, as they are loaded: with others, another template is needed.

Numbers of threads are set anew in each rank.
"""
_MESSAGE_BYTES = 1 << 20
_START = (
    f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import serve; serve(int(sys.argv[2]))"
)

Environment = dict[str, str]


@dataclass(eq=False)
class Forked:
    """A rank that a template forked, with the part of `subprocess.Popen` that its caller needs."""

    pid: int
    stdin: IO[bytes]
    stderr: IO[bytes]
    template: Template
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return how the rank ended, as `Popen` does, or `None`."""
        if self.returncode is None:
            self.returncode = self.template.status_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for the rank's end and return how it ended."""
        while (status := self.poll()) is None:
            self.template.wait()
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to a rank that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Template:
    """The caller's side of one template process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner, self.loaded_with = os.getpid(), _read_as_they_load()
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self.is_alive = True
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(_paths()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )

    @property
    def serves(self) -> bool:
        """True where it runs, belongs to this process, and loaded its libraries under today's variables."""
        return self.is_alive and self.owner == os.getpid() and self.loaded_with == _read_as_they_load()

    def fork(self, environment: Environment, channel: int, channel_variable: str) -> Forked | None:
        """Return a new rank with `channel` (a file descriptor) open, its number in `channel_variable`; `None` on failure."""
        ends = [os.pipe(), os.pipe()]
        (stdin_read, stdin_write), (stderr_read, stderr_write) = ends
        request = {
            "environment": environment, "folder": os.getcwd(), "path": _paths(), "modules": _imported(),
            "channel_variable": channel_variable,
        }  # fmt: skip
        pid = None
        try:
            with self._lock, contextlib.suppress(OSError):
                message = json.dumps(request).encode()
                socket.send_fds(self._socket, [message], [stdin_read, stderr_write, channel])
                pid = self._answer()
        finally:
            os.close(stdin_read)
            os.close(stderr_write)
        stdin, stderr = os.fdopen(stdin_write, "wb"), os.fdopen(stderr_read, "rb", buffering=0)
        if pid is None:
            stdin.close()
            stderr.close()
            return None
        self._running.add(pid)
        return Forked(pid, stdin, stderr, self)

    def retire(self) -> None:
        """Close it, unless ranks of it run: it has to tell of their end."""
        if not self._running:
            self.close()

    def close(self) -> None:
        """Let the template end, and wait for that."""
        if self.owner == os.getpid():
            self._socket.close()
            self.is_alive = False
            self._process.wait()

    def status_of(self, pid: int) -> int | None:
        """Return the status that the template reported of `pid`, `None` while it runs."""
        with self._lock:
            while self.is_alive and pid not in self._ended and self._receive(socket.MSG_DONTWAIT) is not None:
                pass
        if self.is_alive or pid in self._ended:
            return self._ended.get(pid)
        return None if _exists(pid) else -signal.SIGKILL  # nobody is left to tell how it ended

    def wait(self) -> None:
        """Wait until the template has something to say, at most a moment."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.select(0.05)

    def _answer(self) -> int | None:
        while self.is_alive:
            message = self._receive(0)
            if message is not None and "pid" in message:
                return message["pid"]  # type: ignore[no-any-return]
        return None

    def _receive(self, flags: int) -> dict[str, Any] | None:
        """Return the next message, `None` where there is none; note processes that ended."""
        try:
            text = self._socket.recv(_MESSAGE_BYTES, flags)
        except BlockingIOError:
            return None
        except OSError:
            text = b""
        if not text:
            self.is_alive = False
            return None
        message: dict[str, Any] = json.loads(text)
        if "ended" in message:
            self._ended[message["ended"]] = message["status"]
            self._running.discard(message["ended"])
        return message


_template: Template | None = None


def fork(environment: Environment, channel: int, channel_variable: str) -> Forked | None:
    """Return a rank forked from this process's template, started now where there is none; `None` where it cannot be."""
    global _template
    if sys.platform != "linux":
        return None
    if _template is None or not _template.serves:
        if _template is not None:
            _template.retire()
        _template = Template()
        atexit.register(_template.close)
    return _template.fork(environment, channel, channel_variable)


def _read_as_they_load() -> Environment:
    settings = ((name, value) for name, value in os.environ.items() if name.startswith(_READ_AS_THEY_LOAD))
    return {name: value for name, value in settings if not name.endswith("_NUM_THREADS")}


def _paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]


def _imported() -> list[str]:
    """The modules of `PACKAGES` that this process has imported by name."""
    loaded = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    return [name for name, module in loaded if getattr(module, "__spec__", None) and not name.endswith("__main__")]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The template's side


def serve(file_descriptor: int) -> NoReturn:
    """Fork what is asked for until the caller's end closes."""
    caller = socket.socket(fileno=file_descriptor)
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        for each in (caller, woken):
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                _report(caller)
            if caller in ready:
                _fork(caller, (woken, wake, selector))


def _report(caller: socket.socket) -> None:
    """Tell of every process that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            caller.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _fork(caller: socket.socket, own: Sequence[Any]) -> None:
    message, files, _, _ = socket.recv_fds(caller, _MESSAGE_BYTES, 3)
    if not message:
        os._exit(0)
    request = json.loads(message)
    _import([*_NEEDED, *request["modules"]])
    pid = os.fork() if len(os.listdir("/proc/self/task")) == 1 else None
    if pid == 0:
        for each in (*own, caller):
            each.close()
        _become_rank(request, files)
    for each in files:
        os.close(each)
    caller.send(json.dumps({"pid": pid}).encode())


def _import(names: list[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    if not missing:
        return
    with rarely_collecting():
        for name in missing:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to these pages, and copy them


def _become_rank(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Make this fork what a fresh interpreter would be, and serve calls."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        stdin, stderr, channel = files
        os.dup2(stdin, 0)
        os.dup2(stderr, 2)
        os.close(stdin)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(request["environment"] | {request["channel_variable"]: str(channel)})
        os.chdir(request["folder"])
        sys.path[:], sys.argv[:] = request["path"], ["-c"]
        importlib.invalidate_caches()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # Python's own generator is seeded anew by itself
        from .worker import main

        main()
    finally:
        os._exit(1)
