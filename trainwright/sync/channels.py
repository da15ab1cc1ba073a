"""Sends messages between two workers of which either may end, over a gloo group of the two, on two threads.

A group of two fails alone: when one process is killed, its connections break, and no other's do. Each message is a header,
[tag, dtype, elements], and the tensor; a header with the tag −1 is the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPEN_S, _TRANSFER_S, _LOOK_S = 120.0, 86_400.0, 20e-3
_LAST_TAG = -1
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.uint8, torch.int8, torch.bfloat16, torch.float16)


class Channel:
    """The channel between this worker and another; calls `deliver(tag, tensor)` for each message, and `broken()` at its end.

    connect: makes a connection to the store in which the two meet, under `key`; called on the channel's thread, since it may take
    seconds. side: 0 on one of them, 1 on the other.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        key: str,
        side: int,
        deliver: Callable[[int, Tensor], None],
        broken: Callable[[], None],
    ) -> None:
        self._connect, self._key, self._side, self._deliver, self._broken = connect, key, side, deliver, broken
        self._waiting: SimpleQueue[tuple[int, Tensor]] = SimpleQueue()
        self._all_sent = threading.Event()
        threading.Thread(target=self._open, name=f"channel {key}", daemon=True).start()

    def send(self, tag: int, tensor: Tensor) -> None:
        """Queue a tensor to be sent, in order, and return at once."""
        self._waiting.put((tag, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)))

    def close(self, is_there: Callable[[], bool]) -> None:
        """Send the last header, and wait until everything is sent, as long as the other worker is present."""
        self.send(_LAST_TAG, torch.zeros(0))
        while is_there() and not self._all_sent.wait(_LOOK_S):
            pass

    def _open(self) -> None:
        try:
            store = dist.PrefixStore(self._key, self._connect())
            group = dist.ProcessGroupGloo(store, self._side, 2, timedelta(seconds=_OPEN_S))
            group.set_timeout(timedelta(seconds=_TRANSFER_S)) if hasattr(group, "set_timeout") else None
        except RuntimeError:
            self._broken()
            return
        threading.Thread(target=self._send_all, args=(group,), name="sends", daemon=True).start()
        self._receive_all(group)

    def _send_all(self, group: Any) -> None:
        while True:
            tag, tensor = self._waiting.get()
            try:
                header = torch.tensor([tag, _DTYPES.index(tensor.dtype), tensor.numel()])
                group.send([header], 1 - self._side, 0).wait()
                if tensor.numel():
                    group.send([tensor.reshape(-1)], 1 - self._side, 1).wait()
            except RuntimeError:
                return  # the receiving thread says that the other is gone
            if tag == _LAST_TAG:
                self._all_sent.set()
                return

    def _receive_all(self, group: Any) -> None:
        header = torch.zeros(3, dtype=torch.int64)
        try:
            while True:
                group.recv([header], 1 - self._side, 0).wait()
                tag, kind, length = header.tolist()
                if tag == _LAST_TAG:
                    break
                tensor = torch.empty(length, dtype=_DTYPES[kind])
                if length:
                    group.recv([tensor], 1 - self._side, 1).wait()
                self._deliver(tag, tensor)
        except RuntimeError:
            pass
        self._broken()
