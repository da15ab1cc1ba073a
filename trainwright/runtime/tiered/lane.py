"""Where updates run: on a GPU on a stream beside the computing one, on a CPU on the threads that run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lane:
    """Runs the device's part of updates; what it returns as moments are CUDA events, and None on a CPU.

    >>> lane = Lane(torch.device("cpu"))
    >>> with lane.running(after=lane.now()):
    ...     done = lane.now()
    >>> lane.finish(done)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def now(self) -> Any:
        """Return the moment at which all is computed that the current stream has been given."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def running(self, after: Any) -> Iterator[None]:
        """Compute what is issued in the `with` block here, after a moment."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield

    def finish(self, moment: Any) -> None:
        """Wait until that moment."""
        if moment is not None:
            moment.synchronize()

    def is_over(self, moment: Any) -> bool:
        """Tell whether that moment has passed."""
        return moment is None or bool(moment.query())
