"""Checkpoints through `torch.distributed.checkpoint`: whole or not there at all, and readable under another plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..artifacts import UserError
from .module import ParallelModule

KEPT = 2
"""Checkpoints that stay; older ones go once a newer one is complete."""


def save(folder: str | Path, step: int, module: ParallelModule, optimizer: torch.optim.Optimizer) -> Path:
    """Write the state after `step` under `folder`; a collective call. A crash leaves the checkpoint before."""
    folder = Path(folder)
    final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.tmp"
    if dist.get_rank() == 0:
        _prepare(folder, temporary)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(temporary))
    dist.barrier()
    if dist.get_rank() == 0:
        position = {
            "step": step,
            "num_steps": module.num_steps,
            "seed": module.seed,
            "fingerprint": module.plan.fingerprint,
        }
        (temporary / "position.json").write_text(json.dumps(position), encoding="utf8")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in _complete(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def _prepare(folder: Path, temporary: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise UserError(f"a writable directory is needed for checkpoints; {folder} is not ({error.strerror})") from None


def load_latest(folder: str | Path, module: ParallelModule, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest complete checkpoint under `folder` and return its step; a collective call.

    The plan and the number of ranks may differ from the run that wrote it, as long as weights are stored in the same
    shapes. Raises `UserError` when there is none, or when it is another model's.
    """
    found = _complete(Path(folder))
    if not found:
        raise UserError(
            f"a checkpoint to resume from is needed; {folder} has none; check the path, or leave out --resume"
        )
    position = json.loads((found[-1] / "position.json").read_text(encoding="utf8"))
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        dcp.load(state, checkpoint_id=str(found[-1]))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UserError(f"a checkpoint of this model is needed; {found[-1]} does not fit it ({reason})") from None
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    module.num_steps, module.seed = position["num_steps"], position["seed"]
    return int(position["step"])


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints under `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob("step-*/position.json"))
