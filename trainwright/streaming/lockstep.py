"""Runs several forwards in lockstep: each in its own thread, one at a time, from one block to the next.

A forward pauses where it enters a part of the model and continues when it is told to, so that a loaded part serves all
forwards before it is released. Nothing is captured: any code that calls the model may run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch

from ..optim.mezo import random_states, set_random_states
from ..torch_internals.private import modes_entered, modes_now
from .blocks import Part


class Abandoned(BaseException):
    """Raised in a forward to end it, because another one has failed."""


class Side:
    """One forward in its thread; `which` names the perturbation of the parameters that it needs."""

    def __init__(self, which: int | None, closure: Callable[[], Any], guard: Callable[[], Any]) -> None:
        self.which = which
        self.wants: Part | None = None
        """The part at whose entry the forward has paused."""
        self.inside: Part | None = None
        self.depth = 0
        self.value: float | None = None
        self.error: BaseException | None = None
        self._random = random_states()
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._ends = False
        modes = modes_now()
        context = copy_context()
        precision = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def run() -> None:
            self._go.acquire()
            try:
                with ExitStack() as stack:
                    stack.enter_context(modes_entered(modes))
                    stack.enter_context(torch.no_grad())
                    # casts are cached by parameter, over all threads; here a parameter has other values each turn
                    torch.set_autocast_cache_enabled(False)
                    stack.enter_context(torch.autocast("cpu", precision[1], enabled=precision[0]))
                    stack.enter_context(guard())
                    stack.enter_context(_running(self))
                    self._go_on()
                    self.value = float(closure())
            except BaseException as error:  # told in the thread that waits
                self.error = error
            finally:
                self.wants = None
                self._stopped.release()

        self._thread = threading.Thread(target=context.run, args=(run,), name="trainwright-forward", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Run the forward until it enters a part or ends; raise its error, if any."""
        outside = random_states()
        set_random_states(self._random)
        self.wants = None
        self._go.release()
        self._stopped.acquire()
        self._random = random_states()
        set_random_states(outside)
        if self.error is not None:
            raise self.error

    @property
    def random(self) -> list[torch.Tensor]:
        """Return the random generators' states at which the forward has paused."""
        return self._random

    def stop(self, part: Part) -> None:
        """Pause the forward until `part` is loaded; called in the forward's thread."""
        self.wants = part
        self._stopped.release()
        self._go.acquire()
        self._go_on()

    def end(self) -> None:
        """End the thread, wherever it has paused."""
        self._ends = True
        while self._thread.is_alive():
            self._go.release()
            self._thread.join(0.05)

    def _go_on(self) -> None:
        if self._ends:
            raise Abandoned


_current: ContextVar[Side | None] = ContextVar("_current", default=None)


@contextmanager
def _running(side: Side) -> Iterator[None]:
    token = _current.set(side)
    try:
        yield
    finally:
        _current.reset(token)


def current_side() -> Side | None:
    """Return the forward that the current thread runs; None if it runs none."""
    return _current.get()


def run_together(sides: list[Side], serve: Callable[[Part, Side], None], resume: Callable[[Side], None]) -> None:
    """Run the forwards to their ends in lockstep, part by part.

    resume(side): sets the standing parameters to the side's perturbation before it continues. serve(part, side): does the same
    for the part. If all sides wait for one part, it serves all of them before the next part; if their paths differ, each gets
    the part that it waits for.
    """
    try:
        for side in sides:
            resume(side)
            side.advance()
        while (part := next((side.wants for side in sides if side.wants is not None), None)) is not None:
            for side in sides:
                while side.wants is part:
                    resume(side)
                    serve(part, side)
                    side.advance()
    finally:
        for side in sides:
            side.end()
