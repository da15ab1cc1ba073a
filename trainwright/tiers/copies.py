"""Copies bytes between a device and the host's memory beside the computation: by threads on a CPU, by streams on a GPU.

    CPU   a copy is cut into chunks, which threads of its direction copy; `wait` blocks until they have
    GPU   a copy runs on the stream of its direction, from or to page-locked memory; `wait` makes the current stream wait

On a CPU the device is what torch's allocator counts; the host's memory is mapped by itself and is not counted.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..artifacts import UserError
from .buffers import aligned_empty
from .counting import DIRECTIONS, Traffic, now
from .store import StoreOptions, Transfer
from .throttle import TokenBucket


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """See that what this thread computes next finds the copy made."""

    def finish(self) -> None:
        """Wait until the copy is made."""

    @property
    def is_done(self) -> bool:
        """Tell whether it is made."""


class Copies(Protocol):
    """Makes copies between a device and buffers in the host's memory; copies of one direction are made in their order."""

    traffic: Traffic

    def buffer(self, num_bytes: int) -> Tensor:
        """Return a new buffer of bytes in the host's memory; raise `UserError` where there is no room."""

    def copy(self, direction: str, into: Tensor, source: Tensor, after: Iterable[Any] = ()) -> Copy:
        """Begin to copy `source` to `into` once the copies `after` are made; `direction` is read (to the device) or write.

        Both are contiguous, of as many bytes, and live until the copy is waited for.
        """

    def close(self) -> None:
        """Wait for the copies under way and release what they use."""


def copies_of(device: torch.device, options: StoreOptions | None = None) -> Copies:
    """Return what makes the copies of `device`. Of the options, chunks, threads and rates hold on CPUs.

    >>> copies, into = copies_of(torch.device("cpu")), torch.empty(3)
    >>> buffer = copies.buffer(12)
    >>> copies.copy("write", buffer, torch.tensor([1.0, 2.0, 3.0])).wait()
    >>> copies.copy("read", into, buffer).wait()
    >>> into, copies.traffic.total("read").num_bytes
    (tensor([1., 2., 3.]), 12)
    >>> copies.close()
    """
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies(options or StoreOptions())


class ThreadCopies:
    """Copies by threads, which compute nothing else; they hold addresses only, so that memory is never released there."""

    def __init__(self, options: StoreOptions) -> None:
        self.options, self.traffic = options, Traffic()
        self._buckets = {"read": TokenBucket(options.read_rate), "write": TokenBucket(options.write_rate)}
        self._threads = {
            direction: ThreadPoolExecutor(options.num_threads, thread_name_prefix=f"trainwright-host-{direction}")
            for direction in DIRECTIONS
        }

    def buffer(self, num_bytes: int) -> Tensor:
        return _host_empty(num_bytes)

    def copy(self, direction: str, into: Tensor, source: Tensor, after: Iterable[Any] = ()) -> Transfer:
        num_bytes, chunk = source.numel() * source.element_size(), self.options.chunk_bytes
        target, origin, before = into.data_ptr(), source.data_ptr(), list(after)
        parts = [
            self._threads[direction].submit(
                self._move, direction, target + begin, origin + begin, min(chunk, num_bytes - begin), before
            )
            for begin in range(0, num_bytes, chunk)
        ]
        return Transfer(parts, source if direction == "write" else into)

    def _move(self, direction: str, target: int, origin: int, num_bytes: int, after: list[Transfer]) -> None:
        for earlier in after:
            for part in tuple(earlier.parts):
                part.result()
        begun = now()
        ctypes.memmove(target, origin, num_bytes)  # without the GIL
        self._buckets[direction].take(num_bytes)
        self.traffic.add(direction, num_bytes, begun, now())

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=True)


@dataclass(eq=False)
class StreamCopy:
    """A copy on a stream, with the tensor of the device, which lives until the copy is waited for."""

    device: torch.device
    event: Any
    tensor: Tensor | None

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        self.tensor = None

    def finish(self) -> None:
        self.event.synchronize()
        self.tensor = None

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())


class StreamCopies:
    """Copies on two streams, one for each direction, which wait for what the calling thread's stream has been given.

    Bytes are counted when a copy is issued: how fast a link is at a moment is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.traffic = device, Traffic()
        self._streams: dict[str, Any] = {direction: torch.cuda.Stream(device) for direction in DIRECTIONS}
        self._locked: list[Tensor] = []
        self._release = weakref.finalize(self, _unlock, device, self._locked)
        self._release.atexit = False  # CUDA may have ended by then

    def buffer(self, num_bytes: int) -> Tensor:
        """Return page-locked memory: registered, since torch's own allocator of such memory rounds to powers of two."""
        found = _host_empty(num_bytes)
        status = int(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), max(1, num_bytes), 0))
        if status != 0:
            raise UserError(
                f"{num_bytes} bytes of page-locked memory are needed on the host; CUDA refuses them (error {status}); raise the "
                "limit of locked memory, or let less rest there (a larger --memory)"
            )
        self._locked.append(found)
        return found

    def copy(self, direction: str, into: Tensor, source: Tensor, after: Iterable[Any] = ()) -> StreamCopy:
        stream = self._streams[direction]
        stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # what made the source, or last used the target's memory
        for earlier in after:
            if earlier.event is not None:
                stream.wait_event(earlier.event)
        begun = now()
        with torch.cuda.stream(stream):
            into.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8), non_blocking=True)
            event = stream.record_event()
        self.traffic.add(direction, source.numel() * source.element_size(), begun, now())
        return StreamCopy(self.device, event, source if direction == "write" else into)

    def close(self) -> None:
        self._release()


def _unlock(device: torch.device, locked: list[Tensor]) -> None:
    """Let memory be page-locked no longer, before it is released: CUDA would else take what comes to lie there for locked."""
    torch.cuda.synchronize(device)
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked[-1].data_ptr())
        locked.pop()


def _host_empty(num_bytes: int) -> Tensor:
    try:
        return aligned_empty(num_bytes)
    except OSError as error:
        raise UserError(
            f"{num_bytes} more bytes of memory are needed on the host for what rests there; the system says: {error.strerror}; "
            "free some, or let less rest there (a larger --memory)"
        ) from None
