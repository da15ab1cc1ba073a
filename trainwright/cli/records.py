"""What a run leaves for others to read, written by rank 0: a line of JSON a step, and TensorBoard's files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..artifacts import UserError, need
from ..artifacts.record import write_atomically

FIELDS = ("step", "loss", "step_s", "samples_per_s", "tokens_per_s", "peak_bytes", "comm_s", "update_s", "selection_s", "lr",
          "grad_norm", "grad_norm_1", "eval_loss", "num_batches", "expert_imbalance", "expert_dropped",
          "sync_bytes", "sync_rounds")  # fmt: skip
ALWAYS = ("step", "loss", "step_s", "samples_per_s", "peak_bytes")


class Records:
    """Takes the events of steps; a loss that is not finite is written as null.

    first_step: where this run goes on. A file of an earlier part of it is kept up to there and no further, so that each step
    stands in it once; at step 0 it begins anew.

    Raises `UserError` where a file cannot be written, or where TensorBoard is asked for and not installed.
    """

    def __init__(self, metrics: str | None, tensorboard: str | None, first_step: int) -> None:
        self._writers: list[Callable[[dict[str, Any]], None]] = []
        if metrics is not None:
            self._writers.append(_JsonLines(Path(metrics), first_step).write)
        if tensorboard is not None:
            self._writers.append(_TensorBoard(tensorboard, first_step).write)

    def write(self, event: dict[str, Any]) -> None:
        known = {name: event.get(name) for name in FIELDS}
        values: dict[str, Any] = {name: value for name, value in known.items() if value is not None or name in ALWAYS}
        if not math.isfinite(event["loss"]):
            values["loss"] = None
        for writer in self._writers:
            writer(values)


class _JsonLines:
    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        kept = _lines_before(path, first_step) if first_step > 0 and path.is_file() else []
        with _writable(path, "--metrics"):
            if kept or path.is_file():  # a device or a pipe is written as it is
                write_atomically(path, "".join(kept))
            self._file = path.open("a", encoding="utf8")

    def write(self, values: dict[str, Any]) -> None:
        with _writable(self._path, "--metrics"):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def _lines_before(path: Path, step: int) -> list[str]:
    """The whole lines of earlier steps: a run that was killed may have left half a line, and steps that come again."""
    lines = []
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            known = json.loads(line)["step"] < step
        except (ValueError, KeyError, TypeError):
            continue
        if known:
            lines.append(line + "\n")
    return lines


class _TensorBoard:
    def __init__(self, folder: str, first_step: int) -> None:
        need("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._folder = Path(folder)
        with _writable(self._folder, "--tensorboard"):
            self._writer = SummaryWriter(folder, purge_step=first_step or None)  # type: ignore[no-untyped-call]

    def write(self, values: dict[str, Any]) -> None:
        with _writable(self._folder, "--tensorboard"):
            for name, value in values.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, values["step"])  # type: ignore[no-untyped-call]
            self._writer.flush()  # type: ignore[no-untyped-call]


@contextmanager
def _writable(path: Path, option: str) -> Iterator[None]:
    """Turn an error of the disk into the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{option} needs a place that can be written to; {path} cannot ({error.strerror}); choose another"
        ) from None
