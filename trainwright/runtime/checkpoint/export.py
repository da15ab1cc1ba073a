"""Exports a checkpoint's weights as safetensors files, for programs that know nothing of plans."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ...artifacts import UserError
from .. import adapters
from ..extents import whole_extent
from ..storage import StoredTensors
from ..weights import checkpoint_folder
from .checkpoint import ADAPTER, CONFIG

MAX_FILE_BYTES = 5 * 10**9
"""The largest file, as in Hugging Face's own models."""
PREFIX = "model."
"""The prefix of the weights' names in a checkpoint."""


def export_weights(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], max_file_bytes: int = MAX_FILE_BYTES
) -> list[Path]:
    """Write a checkpoint's weights to the folder `out` as safetensors, and return the files; no ranks are needed.

    checkpoint: one that `Checkpointer` wrote, or a folder of them, of which the newest is taken. Names, shapes and dtypes are
    the model's own. For a Hugging Face model, `config.json` is written too, so that `from_pretrained(out)` loads it.
    For a model that PEFT has wrapped, only the adapter is written, as PEFT does: `PeftModel.from_pretrained(base, out)`.
    max_file_bytes: the largest file; several files get an index. One file's weights are in memory at a time.

    To continue training, which needs the optimizer's state too, use `Checkpointer.load_latest`.

    Raises `UserError` when there is no checkpoint, or `out` cannot be written.
    """
    folder, target = checkpoint_folder(Path(checkpoint)), Path(out)
    if folder is None:
        raise UserError(f"a checkpoint is needed; {checkpoint} has none; give the --checkpoint of a training run")
    stored = StoredTensors(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if (folder / ADAPTER).is_file():
            return _export_adapter(stored, json.loads((folder / ADAPTER).read_text(encoding="utf8")), target)
        plans = list(_files(stored, max_file_bytes))
        written: list[Path] = []
        for number, names in enumerate(plans, start=1):
            path = target / _file_name(number, len(plans))
            _save({name: _read(stored, name) for name in names}, path)
            written.append(path)
        written += _beside(stored, plans, folder, target)
    except OSError as error:
        raise UserError(
            f"a writable folder is needed; {out} is not ({error.strerror or error}); choose another"
        ) from None
    return written


def _export_adapter(stored: StoredTensors, adapter: dict[str, Any], target: Path) -> list[Path]:
    _save({theirs: _read(stored, ours) for ours, theirs in adapter["names"].items()}, target / adapters.WEIGHTS)
    return [target / adapters.WEIGHTS, adapters.write_config(adapter["config"], target)]


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path.with_suffix(".tmp"), metadata={"format": "pt"})
    os.replace(path.with_suffix(".tmp"), path)


def _files(stored: StoredTensors, max_file_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the weights in each file, at least one a file."""
    held: list[str] = []
    held_bytes = 0
    for name in sorted(each.removeprefix(PREFIX) for each in stored.names if each.startswith(PREFIX)):
        num_bytes = stored.num_bytes(PREFIX + name)
        if held and held_bytes + num_bytes > max_file_bytes:
            yield held
            held, held_bytes = [], 0
        held.append(name)
        held_bytes += num_bytes
    if held:
        yield held


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _read(stored: StoredTensors, name: str) -> Tensor:
    return stored.read(PREFIX + name, whole_extent(stored.shape(PREFIX + name)))


def _beside(stored: StoredTensors, plans: list[list[str]], folder: Path, target: Path) -> list[Path]:
    """Write the index, if there are several files, copy the model's configuration, if any, and return the paths."""
    written = []
    if len(plans) > 1:
        places = {name: _file_name(number, len(plans)) for number, names in enumerate(plans, 1) for name in names}
        total = sum(stored.num_bytes(PREFIX + name) for name in places)
        index = target / "model.safetensors.index.json"
        index.write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1), encoding="utf8"
        )
        written.append(index)
    if (folder / CONFIG).is_file():
        written.append(Path(shutil.copyfile(folder / CONFIG, target / CONFIG)))
    return written
