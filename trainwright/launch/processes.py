"""Ranks as processes of this machine: started together, ended together, whatever happens to one of them or to us.

`run_processes` is one call; `Workers` keeps the ranks for several. Each rank has a session of its own: on CPUs it is
forked from a process that has imported torch (`template.py`), elsewhere it is a fresh interpreter. Calls go down its
standard input and answers come up a pipe, both JSON; what it prints is passed on to our standard error. The first rank
that fails ends them all.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from .cores import threads_each
from .group import DeviceType
from .template import Forked, fork
from .worker import CHANNEL_VARIABLE
from .worker import main as serve

EventHandler = Callable[[int, dict[str, Any]], None]
_SETTLE_S = 0.6
_CAUSE_S = 3.0
"""How long the cause of what looks like an echo is awaited: sockets close a while before their process counts as ended."""
_TERMINATE_S = 2.0
_TICK_S = 0.2
_START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {serve.__module__} import main; main()"
"""What a rank runs: it finds modules where this process does."""


class WorkerError(RuntimeError):
    """A rank failed, died or gave no answer in time; all of them have been ended. `rank` is the one to look at."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def run_processes(
    worker: str,
    payload: dict[str, Any] | None = None,
    num_processes: int = 1,
    timeout_s: float | None = None,
    on_event: EventHandler | None = None,
    device: DeviceType = "cpu",
) -> list[Any]:
    """Run the function `worker` ("module:function") with the keywords `payload` on `num_processes` ranks.

    Returns what it returned on each rank, in order; payload and results are JSON. The process group is initialised when
    the function runs. Events that a rank hands to `launch.emit` reach `on_event(rank, event)` as they come.

    Raises what a rank raised, if that is one of this package's own exceptions, else `WorkerError`, which names the rank
    and the cause. No process outlives the call, nor the caller.

    >>> run_processes("trainwright.launch.group:rank", num_processes=2)
    [0, 1]
    """
    with Workers(num_processes, on_event=on_event, device=device) as workers:
        return workers.call(worker, payload, timeout_s)


class Workers:
    """`num_processes` ranks that stay, for several calls. A context manager; a failed call ends it."""

    def __init__(self, num_processes: int, on_event: EventHandler | None = None, device: DeviceType = "cpu") -> None:
        if num_processes < 1:
            raise ValueError(f"at least 1 process is needed; got {num_processes}")
        self.num_processes = num_processes
        self._on_event = on_event
        self._selector = selectors.DefaultSelector()
        self._folder = tempfile.mkdtemp(prefix="trainwright-")
        self._ranks: list[_Rank] = []
        try:
            for index in range(num_processes):
                self._ranks.append(self._start(index, device))
        except BaseException:
            self.kill()
            raise

    def call(self, worker: str, payload: dict[str, Any] | None = None, timeout_s: float | None = None) -> list[Any]:
        """Run `worker` on every rank and return the results in order; see `run_processes`."""
        if self.closed:
            raise WorkerError("a call needs running ranks; these were closed, or ended by an earlier failure")
        try:
            for rank in self._ranks:
                rank.begin({"call": worker, "payload": payload or {}})
            self._wait(timeout_s)
            if failed := self._failed():
                raise _as_exception(failed, self.num_processes)
        except BaseException:
            self.kill()
            raise
        return [rank.result for rank in self._ranks]

    def close(self) -> None:
        """Let the ranks leave the group and end; end those by force that have not within ten seconds."""
        if self.closed:
            return
        for rank in self._ranks:
            rank.send({"close": True})
        deadline = time.monotonic() + 10
        while any(rank.running for rank in self._ranks) and time.monotonic() < deadline:
            self._pump()
        self.kill()

    def kill(self) -> None:
        """End all ranks and what they started, at once: SIGTERM, and SIGKILL for those that linger."""
        self._on_event = None
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATE_S
        while any(rank.running for rank in self._ranks) and time.monotonic() < deadline:
            self._pump()
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.discard()
        self._ranks = []
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def closed(self) -> bool:
        return not self._ranks

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in order."""
        return [rank.process.pid for rank in self._ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            self.kill()

    def _start(self, index: int, device: DeviceType) -> _Rank:
        read_end, write_end = os.pipe()
        num_threads = threads_each(self.num_processes)
        environment = _environment(index, self.num_processes, num_threads)
        forked = fork(environment, write_end, CHANNEL_VARIABLE) if device == "cpu" else None
        process = forked or _fresh(environment, write_end)
        os.close(write_end)
        rank = _Rank(index, process, os.fdopen(read_end, "rb", buffering=0))
        self._selector.register(rank.answers, selectors.EVENT_READ, (rank, "answers"))
        self._selector.register(rank.log, selectors.EVENT_READ, (rank, "log"))
        setup = {"rank": index, "num_ranks": self.num_processes, "device": device, "num_threads": num_threads}
        rank.send({**setup, "store": os.path.join(self._folder, "store")})
        return rank

    def _wait(self, timeout_s: float | None) -> None:
        """Pump messages until every rank has answered, one has failed, or time is up."""
        deadline = time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))
        while any(rank.busy for rank in self._ranks) and not self._failed():
            self._pump()
            if time.monotonic() > deadline:
                raise self._timed_out(timeout_s)

    def _failed(self) -> list[_Rank]:
        """The ranks that failed. After the first, the others get a moment: an echo may come before its cause.

        The cause may be the end of a rank that has answered.
        """
        started = time.monotonic()
        while failed := [rank for rank in self._ranks if rank.failed]:
            echoes = all(_blame(rank) == _ECHO for rank in failed) and len(failed) < len(self._ranks)
            waited_s = time.monotonic() - started
            is_awaited = any(rank.busy and not rank.failed for rank in self._ranks) and waited_s < _SETTLE_S
            if not (is_awaited or (echoes and waited_s < _CAUSE_S)):
                break
            self._pump()
        return failed

    def _timed_out(self, timeout_s: float | None) -> WorkerError:
        late = [rank for rank in self._ranks if rank.busy]
        for rank in late:
            rank.ask_for_stack()
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            self._pump()
        names = ", ".join(str(rank.index) for rank in late)
        return WorkerError(
            f"every rank has to answer within {timeout_s:g} s; of {self.num_processes} ranks, {names} did not; "
            f"rank {late[0].index} was at:\n" + "\n".join(late[0].tail),
            late[0].index,
        )

    def _pump(self) -> None:
        """Handle what has come within one tick, and notice ranks that died without a word."""
        for key, _ in self._selector.select(_TICK_S):
            rank, stream = key.data
            chunk = os.read(key.fd, 1 << 16)
            if not chunk:
                self._selector.unregister(key.fileobj)
                rank.at_end = rank.at_end or stream == "answers"
            for line in rank.split(stream, chunk):
                if stream == "log":
                    self._relay(rank, line)
                else:
                    self._receive(rank, json.loads(line))
        for rank in self._ranks:
            rank.notice_death()

    def _receive(self, rank: _Rank, message: dict[str, Any]) -> None:
        if "event" in message:
            if self._on_event is not None:
                self._on_event(rank.index, message["event"])
        else:
            rank.answer(message)

    def _relay(self, rank: _Rank, line: str) -> None:
        rank.tail.append(line)
        prefix = f"[rank {rank.index}] " if self.num_processes > 1 else ""
        print(f"{prefix}{line}", file=sys.stderr)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, number)


@dataclass(eq=False)
class _Rank:
    """One child process and what has come from it."""

    index: int
    process: subprocess.Popen[bytes] | Forked
    answers: IO[bytes]
    busy: bool = False
    result: Any = None
    error: dict[str, Any] | None = None
    at_end: bool = False
    _died_at_s: float = 0.0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    _partial: dict[str, bytes] = field(default_factory=lambda: {"answers": b"", "log": b""})

    @property
    def log(self) -> IO[bytes]:
        assert self.process.stderr is not None
        return self.process.stderr

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def begin(self, message: dict[str, Any]) -> None:
        self.busy, self.result = True, None
        self.send(message)

    def send(self, message: dict[str, Any]) -> None:
        """Write to the rank; one that has died is noticed elsewhere."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def split(self, stream: str, chunk: bytes) -> list[str]:
        """Return the lines that `chunk` completes; at the end of the stream (an empty chunk), also what is left."""
        *lines, rest = (self._partial[stream] + chunk).split(b"\n")
        if not chunk and stream == "log" and rest:
            lines, rest = [*lines, rest], b""
        self._partial[stream] = rest
        return [line.decode("utf8", "replace") for line in lines]

    def answer(self, message: dict[str, Any]) -> None:
        self.busy = False
        self.result, self.error = message.get("result"), message.get("error")

    def notice_death(self) -> None:
        """Record a death that no message explains, once all that the rank wrote has been read.

        Its pipe may be held open by a process that it forked, so the end of the stream is not waited for long.
        """
        if self.failed or self.running:
            return
        self._died_at_s = self._died_at_s or time.monotonic()
        if self.at_end or time.monotonic() - self._died_at_s > 2 * _TICK_S:
            status = self.process.wait()
            cause = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self.answer({"error": {"died": cause}})

    def ask_for_stack(self) -> None:
        """Have the rank print where it is."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def discard(self) -> None:
        self.process.wait()
        for stream in (self.process.stdin, self.log, self.answers):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()


def _as_exception(failed: list[_Rank], num_ranks: int) -> Exception:
    """Return what to raise: this package's own exception as it was, else a `WorkerError` for the likeliest cause."""
    rank = min(failed, key=_blame)
    error = rank.error
    assert error is not None
    if "died" in error:
        said = "; it last wrote:\n" + "\n".join(rank.tail) if rank.tail else "; it wrote nothing"
        return WorkerError(f"rank {rank.index} of {num_ranks} {error['died']}{said}", rank.index)
    if own := _own_type(error["types"]):
        return own(error["text"])
    name = error["types"][0][1]
    return WorkerError(f"rank {rank.index} of {num_ranks} raised {name}: {error['text']}\n{error['trace']}", rank.index)


def _blame(rank: _Rank) -> int:
    """Order failures by how likely they are the cause: a lost connection is mostly the echo of another rank's end."""
    error = rank.error or {}
    if "died" in error:
        return 1
    if _own_type(error["types"]) is not None:
        return 0
    return _ECHO if any(word in error["text"] for word in _ECHOES) else 2


_ECHO = 3
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "NCCL")


def _own_type(types: list[list[str]]) -> type[Exception] | None:
    """Return the exception's class if this package defines it, so that a user's error stays one across processes."""
    module, name = types[0]
    if module.partition(".")[0] != __name__.partition(".")[0]:
        return None
    found = getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _fresh(environment: dict[str, str], channel: int) -> subprocess.Popen[bytes]:
    """Start a rank as an interpreter of its own, with the file descriptor `channel` open."""
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps([path or os.getcwd() for path in sys.path])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(channel,),
        start_new_session=True,
        env=environment | {CHANNEL_VARIABLE: str(channel)},
    )


def _environment(index: int, num_processes: int, num_threads: int) -> dict[str, str]:
    """What torchrun sets, for code that reads it, and the loopback interface for gloo."""
    numbers = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    environment = os.environ | {name: str(number) for name, number in numbers.items()}
    environment |= {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return environment | ({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})
