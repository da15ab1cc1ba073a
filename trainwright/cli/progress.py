"""The progress of a training run: a bar on a terminal, a line now and then elsewhere; predicted against measured."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..artifacts import Compared, Plan, Run
from ..reports.units import format_bytes, format_count, format_s
from ..reports.wrapping import wrapped
from .output import remark

if TYPE_CHECKING:
    from rich.text import Text

_LINE_EVERY_S = 10.0
COMPARED_AFTER = 5
"""Steps after which the prediction is held against what was measured; the first ones are slower."""
NUM_WARMUP = 2
_PACE_STEPS = 50
"""The latest steps, by whose pace the time left is told."""
_BAR_WIDTH, _LEAST_BAR_WIDTH = 24, 8


class StepProgress:
    """A context manager that shows the steps of a run on standard error as they come, and keeps them in `steps`.

    plan: what the run is held against, once, after its first steps; None: a run without one.
    """

    def __init__(self, num_steps: int, plan: Plan | None, text: str = "training") -> None:
        self.steps: list[dict[str, Any]] = []
        self._num_steps, self._plan = num_steps, plan
        self._bar = _Bar(num_steps, text) if sys.stderr.isatty() else None
        self._said_at_s = float("-inf")
        self._compared = False
        self._held_out: list[str] = []

    def on_event(self, event: dict[str, Any]) -> None:
        """Take an event of rank 0; its steps count from 0."""
        if event.get("kind") == "step":
            self.steps.append(event)
            self._show(event)
            self._compare()
        elif event.get("kind") == "begun":  # again, where ranks were lost: what came after the checkpoint is repeated
            self.steps = [step for step in self.steps if step["step"] < event["step"]]
        elif event.get("kind") == "part":
            self._show_part(event)
        elif "text" in event:
            self.say(f"note: {event['text']}")

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
        if event.get("skipped"):
            self.say(f"note: step {event['step'] + 1} is left out: loss or gradients were not finite")
        if self._bar is not None:
            self._bar.advance_to(event["step"] + 1, [*self._losses(event), *_pace(event, self._plan)])
        elif (
            event["step"] + 1 == self._num_steps
            or event.get("eval_loss") is not None
            or time.monotonic() - self._said_at_s > _LINE_EVERY_S
        ):
            self._said_at_s = time.monotonic()
            parts = [f"step {event['step'] + 1}/{self._num_steps}", *self._losses(event)]
            remark("  ".join([*parts, *_pace(event, self._plan)]))

    def _show_part(self, event: dict[str, Any]) -> None:
        """Tell how far a step has come that takes long."""
        where = f"part {event['part']} of {event['num_parts']}"
        if self._bar is not None:
            self._bar.advance_to(event["step"], [where])
        else:
            remark(f"step {event['step'] + 1}/{self._num_steps}  {where}")

    def _losses(self, event: dict[str, Any]) -> list[str]:
        """The loss, and the latest one on data that is held out."""
        if event.get("eval_loss") is not None:
            self._held_out = [f"held out {event['eval_loss']:.4f}"]
        return [f"loss {event['loss']:.4f}", *self._held_out]

    def _compare(self) -> None:
        if self._plan is not None and not self._compared and len(of_planned_shape(self.steps)) == COMPARED_AFTER:
            self._compared = True
            for line in comparison(self.steps, self._plan):
                self.say(line)

    def say(self, text: str) -> None:
        """Say something beside the progress."""
        if self._bar is not None:
            self._bar.say(text)
        else:
            remark(text)


def _pace(event: Mapping[str, Any], plan: Plan | None) -> list[str]:
    """How long a step took, how much memory the run has taken of what it may, and how fast that is."""
    tokens, samples = event.get("tokens_per_s"), event["samples_per_s"]
    rate = f"{format_count(tokens)} tokens/s" if tokens else f"{format_count(samples)} samples/s"
    if not event["peak_bytes"]:
        return [format_s(event["step_s"]), rate]
    budget = f" of {format_bytes(plan.budget_bytes)}" if plan is not None and plan.budget_bytes else ""
    return [format_s(event["step_s"]), f"peak {format_bytes(event['peak_bytes'])}{budget}", rate]


def of_planned_shape(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events of those steps whose batch had the planned shape."""
    return [step for step in steps if step.get("planned", True)]


def held_against(steps: Sequence[Mapping[str, Any]], plan: Plan, fingerprint: str | None = None) -> Run:
    """Return what was measured beside what the plan predicted, by category; `steps` are the events of at least one step.

    Steps on batches of another shape than planned are left out where there are others. Times are medians, the first steps
    left out; on a GPU communication runs beside the rest and has no time of its own.
    """
    steps = of_planned_shape(steps) or steps
    later, predicted = steps[NUM_WARMUP:] or steps, plan.predicted
    median = {name: statistics.median(s.get(name) or 0.0 for s in later) for name in ("step_s", "comm_s", "update_s")}
    step = Compared(predicted=predicted.step_s, measured=median["step_s"])
    parts: dict[str, Any] = {"compute_s": step}
    if plan.cluster.device.kind == "cpu":
        update_s = predicted.update_s and median["update_s"]  # a plan of an earlier release does not say
        compute_s = predicted.compute_s + predicted.recompute_s + predicted.transfer_s - predicted.update_s
        rest_s = max(0.0, median["step_s"] - median["comm_s"] - update_s)
        parts["compute_s"] = Compared(predicted=max(0.0, compute_s), measured=rest_s)
        parts["comm_s"] = Compared(predicted=predicted.comm_s, measured=median["comm_s"])
        if predicted.update_s:
            parts["update_s"] = Compared(predicted=predicted.update_s, measured=max(0.0, update_s))
    sent, peak_bytes = later[-1]["comm_bytes"], max(step["peak_bytes"] or 0 for step in steps)
    kinds = sorted(predicted.comm_bytes.keys() | sent.keys())
    return Run(
        model=plan.model.name, optimizer=plan.optimizer, num_ranks=plan.num_ranks, num_steps=len(later), cluster=plan.cluster,
        fingerprint=fingerprint, step_s=step, **parts,
        comm_bytes={kind: Compared(predicted=predicted.comm_bytes.get(kind, 0), measured=sent.get(kind, 0)) for kind in kinds},
        peak_bytes=Compared(predicted=predicted.peak_bytes, measured=peak_bytes) if peak_bytes else None,
    )  # fmt: skip


def comparison(steps: Sequence[Mapping[str, Any]], plan: Plan) -> list[str]:
    """Return a line a category, predicted against measured: time, what was sent, and the peak."""
    run = held_against(steps, plan)
    rows: list[tuple[str, Compared | None, Any]] = [("step", run.step_s, format_s)]
    if run.comm_s is not None:
        rows += [("compute", run.compute_s, format_s), ("exchange", run.comm_s, format_s)]
    rows.append(("update", run.update_s, format_s))
    rows += [(kind, found, format_bytes) for kind, found in run.comm_bytes.items()]
    rows.append(("peak", run.peak_bytes, format_bytes))
    head = f"{'after ' + str(len(steps)) + ' steps':16}{'predicted':>12}{'measured':>12}"
    return [head, *(_row(name, found, shown) for name, found, shown in rows if found is not None)]


def _row(name: str, found: Compared, shown: Any) -> str:
    off = f"{found.measured / found.predicted - 1:+10.1%}" if found.predicted else ""
    return f" {name:15}{shown(found.predicted):>12}{shown(found.measured):>12}{off}"


class _Bar:
    """One line on the terminal, redrawn as steps come; `bar_line` says what of it there is room for."""

    def __init__(self, num_steps: int, text: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._num_steps, self._text, self._done = num_steps, text, 0
        self._parts: Sequence[str] = ()
        self._came_s: deque[float] = deque(maxlen=_PACE_STEPS)
        self._console = Console(stderr=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._line,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(wrapped(text, self._console.width), highlight=False, markup=False)

    def advance_to(self, step: int, parts: Sequence[str]) -> None:
        self._done, self._parts = step, parts
        self._came_s.append(time.monotonic())

    def _line(self) -> Text:
        from rich.text import Text

        line = bar_line(self._console.width, self._text, self._done, self._num_steps, self._left_s(), self._parts)
        return Text(line, no_wrap=True, overflow="crop")

    def _left_s(self) -> float | None:
        """The seconds until the last step at the pace of the latest ones; `None` before there is a pace."""
        if len(self._came_s) < 2:
            return None
        step_s = (self._came_s[-1] - self._came_s[0]) / (len(self._came_s) - 1)
        since_s = time.monotonic() - self._came_s[-1]
        return max(0.0, step_s * (self._num_steps - self._done) - min(since_s, step_s))


def bar_line(width: int, text: str, done: int, num_steps: int, left_s: float | None, parts: Sequence[str] = ()) -> str:
    """Return the line of a run's progress in at most `width` columns.

    The number of steps and the time left always stand in it. Of `parts` (the last step's loss, its time, …) there are as
    many as fit, then the bar and `text`.

    >>> bar_line(70, "training", 30, 100, 75.0, ["loss 3.1", "40.6 ms"])
    '━━━━━━━                    30/100  0:01:15 left  loss 3.1  40.6 ms'
    >>> bar_line(31, "training", 30, 100, 75.0, ["loss 3.1", "40.6 ms"])
    ' 30/100  0:01:15 left  loss 3.1'
    """
    count = f"{done:{len(str(num_steps))}}/{num_steps}"
    always = [count, *([] if done >= num_steps else [f"{_clock(left_s)} left"])]
    room = width - len("  ".join(always))
    told = []
    for part in parts:
        if room < len(part) + 2:
            break
        told.append(part)
        room -= len(part) + 2
    bar_width = min(_BAR_WIDTH, room - 2)
    bar = [("━" * (bar_width * done // max(1, num_steps))).ljust(bar_width)] if bar_width >= _LEAST_BAR_WIDTH else []
    room -= sum(len(part) + 2 for part in bar)
    title = [text] if room >= len(text) + 2 else []
    return "  ".join([*title, *bar, *always, *told])


def _clock(seconds: float | None) -> str:
    """A duration as hours, minutes and seconds."""
    if seconds is None:
        return "-:--:--"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
