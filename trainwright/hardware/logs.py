"""Logs of training runs → what a step took: our own metrics, torchtitan's lines, those of Hugging Face's Trainer.

    ours          a line of JSON a step: step_s, peak_bytes                     step_s as it stands
    torchtitan    step: 10  loss: 7.1  memory: 40.36GiB(42.5%)  tps: 5,762     tokens of one device / tps
    HF Trainer    {'train_steps_per_second': 1.5, …}, at the end of a run      1 / steps a second, the whole run's mean

`run_of_log` holds that against a plan, as a `Run` that `learn` takes.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..artifacts import Compared, Plan, Run, UserError
from ..artifacts.offers import num_tokens

WARM_UP = 2
"""Steps, or lines of a log, at the beginning that are left out: caches and allocators fill."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([\d,]+(?:\.\d+)?)"
_TITAN = re.compile(rf"\bstep:\s*(\d+)\b.*?\bmemory:\s*{_NUMBER}\s*GiB.*?\btps:\s*{_NUMBER}")
_TRAINER = re.compile(r"\{[^{}]*['\"]train_steps_per_second['\"][^{}]*\}")
_GIB = 2**30


@dataclass(frozen=True)
class Logged:
    """What a log says: seconds of a step where it does, else tokens a second of one device; the largest peak it names."""

    num_steps: int
    step_s: float | None = None
    device_tokens_per_s: float | None = None
    peak_bytes: int | None = None


def read_log(text: str, where: str = "the log") -> Logged:
    """Return what the log `text` says of a step: the median over its lines, the first ones left out.

    Raises `UserError` where it is none that is known.

    >>> read_log("step:  1  loss: 8.1  memory: 40.00GiB(50%)  tps: 5,000\\n" * 4).device_tokens_per_s
    5000.0
    """
    text = _COLOUR.sub("", text)
    for parse in (_ours, _titan, _trainer):
        if (found := parse(text)) is not None:
            return found
    raise UserError(
        f"a log of training steps is needed; {where} has no line of `train --metrics`, of torchtitan (step: … memory: …GiB … "
        "tps: …) or of Hugging Face's Trainer (train_steps_per_second); give one of these"
    )


def is_log(text: str) -> bool:
    """Return whether `text` is a log, and not the one document that `train --json` writes."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return True
    return isinstance(document, dict) and isinstance(document.get("step_s"), float)  # a log of one line


def run_of_log(text: str, plan: Plan, where: str = "the log") -> Run:
    """Return the run that a log tells of, held against the plan that stands for it.

    plan: of the same model, batch, optimizer and hardware, layouts as they were run (`plan --solver fsdp`, with pins).
    """
    logged = read_log(text, where)
    step_s = logged.step_s or _seconds(plan, logged, where)
    compared = Compared(predicted=plan.predicted.step_s, measured=step_s)
    peak = logged.peak_bytes
    return Run(
        model=plan.model.name,
        optimizer=plan.optimizer,
        num_ranks=plan.num_ranks,
        num_steps=logged.num_steps,
        cluster=plan.cluster,
        fingerprint=None,
        step_s=compared,
        compute_s=compared,
        peak_bytes=None if peak is None else Compared(predicted=plan.predicted.peak_bytes, measured=peak),
    )


def _seconds(plan: Plan, logged: Logged, where: str) -> float:
    tokens = num_tokens(plan)
    if tokens is None or not logged.device_tokens_per_s:
        raise UserError(
            f"a batch of tokens is needed to turn the tokens a second of {where} into seconds; the plan's has none; give the plan "
            "of that run"
        )
    return tokens / plan.num_ranks / logged.device_tokens_per_s


def _ours(text: str) -> Logged | None:
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith("{") and '"step_s"' in line:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:  # a line that was being written when the run ended
                continue
    return _median(rows, lambda row: row["step_s"], lambda row: row.get("peak_bytes"), "step_s")


def _titan(text: str) -> Logged | None:
    rows = [match.groups() for match in _TITAN.finditer(text)]
    return _median(rows, lambda row: _number(row[2]), lambda row: _number(row[1]) * _GIB, "device_tokens_per_s")


def _trainer(text: str) -> Logged | None:
    """The last summary of a run; its mean has the start of the run in it."""
    found = [ast.literal_eval(match.group()) for match in _TRAINER.finditer(text)]
    if not found:
        return None
    last = found[-1]
    rate, seconds = float(last["train_steps_per_second"]), float(last.get("train_runtime", 0.0))
    if rate <= 0:
        return None
    return Logged(num_steps=max(1, round(rate * seconds)), step_s=1 / rate)


def _median(
    rows: list[Any], value: Callable[[Any], float], peak: Callable[[Any], float | None], name: str
) -> Logged | None:
    if not rows:
        return None
    counted = rows[WARM_UP:] if len(rows) > 2 * WARM_UP else rows
    peaks = [found for row in rows if (found := peak(row))]
    measured = statistics.median(value(row) for row in counted)
    return Logged(num_steps=len(counted), peak_bytes=round(max(peaks)) if peaks else None, **{name: measured})


def _number(text: str) -> float:
    return float(text.replace(",", ""))
