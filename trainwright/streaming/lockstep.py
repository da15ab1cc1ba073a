"""Forwards that run in turns: each in a thread of its own, one at a time, from one block to the next.

A forward stops where it enters a part of the model and goes on when it is told to, so that a part that has come in serves
all forwards before it goes. Nothing is captured: any code that calls the model may run.
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
    """Ends a forward whose companion has failed."""


class Side:
    """One forward: `which` says where it wants the parameters."""

    def __init__(self, which: int | None, closure: Callable[[], Any], guard: Callable[[], Any]) -> None:
        self.which = which
        self.wants: Part | None = None
        """The part that it waits to enter."""
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
        """Let it run until it enters a part or ends; raise what it raised."""
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
        """The generators' states where it stands."""
        return self._random

    def stop(self, part: Part) -> None:
        """Wait to be let into `part`; called in its thread."""
        self.wants = part
        self._stopped.release()
        self._go.acquire()
        self._go_on()

    def end(self) -> None:
        """End the thread, whatever it is at."""
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
    """Return the forward that this thread runs, if any."""
    return _current.get()


def run_together(sides: list[Side], serve: Callable[[Part, Side], None], resume: Callable[[Side], None]) -> None:
    """Run forwards to their ends, part by part.

    resume(side): what stays is put where that side wants it, before it runs. serve(part, side): so is the part. Where all
    wait for one part, it serves all before the next is looked at; where they part ways, each gets what it waits for.
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
