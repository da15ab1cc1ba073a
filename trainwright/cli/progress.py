"""The progress of a training run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from .output import remark

_LINE_EVERY_S = 10.0


class StepProgress:
    """A context manager that shows the steps of a run on standard error as they come, and keeps them in `steps`."""

    def __init__(self, num_steps: int, text: str = "training") -> None:
        self.steps: list[dict[str, Any]] = []
        self._num_steps = num_steps
        self._bar = _Bar(num_steps, text) if sys.stderr.isatty() else None
        self._said_at_s = float("-inf")

    def on_event(self, event: dict[str, Any]) -> None:
        """Take an event of rank 0; its steps count from 0."""
        if event.get("kind") == "step":
            self.steps.append(event)
            self._show(event)
        elif "text" in event:
            remark(f"note: {event['text']}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, event: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.advance_to(event["step"] + 1, event["loss"])
        elif event["step"] + 1 == self._num_steps or time.monotonic() - self._said_at_s > _LINE_EVERY_S:
            self._said_at_s = time.monotonic()
            remark(f"step {event['step'] + 1}/{self._num_steps}  loss {event['loss']:.4f}  {event['step_s']:.3f} s")


class _Bar:
    """A rich progress bar that also shows the loss."""

    def __init__(self, num_steps: int, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(text, total=num_steps, loss="–")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def advance_to(self, step: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}")
