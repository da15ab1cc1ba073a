"""Saves checkpoints atomically, in the background of the training, and restores them under any plan.

    folder/step-00000039/    .metadata, __N_0.distcp   weights and optimizer, in the user's names and shapes
                             state.pt                  settings, schedule, random numbers: plain values
                             plan.json, config.json    what ran, for whoever reads it later; adapter.json of PEFT's
                             position.json             step and position in the data; written last
    folder/.step-00000079.tmp/                         an unfinished one: being written, or left by a run that ended

A save copies this rank's part to the CPU; a thread writes the copy, using a process group of its own, and at the end
renames the temporary directory. So after a crash at any moment the newest complete checkpoint is intact.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from ...artifacts import Plan, UserError
from ...launch import group_inside
from ..module import ParallelModule
from ..storage import Piece, StoredTensors, write_pieces
from .sync_state import numbers_of, restore_sync, vectors_of
from .training_state import (
    optimizer_settings,
    pieces_of,
    random_states,
    restore_groups,
    restore_random_states,
    restore_tensors,
)

KEEP = 2
"""The number of checkpoints that are kept; older ones are deleted once a newer one is complete."""
MARKER, STATE, PLAN, CONFIG, ADAPTER = "position.json", "state.pt", "plan.json", "config.json", "adapter.json"
FORMAT_VERSION = 1


class Checkpointer:
    """Saves and restores a training run under `folder`: weights, optimizer, schedule, random numbers, data position.

    A run that is resumed under the same plan continues bit for bit; under another plan, mesh or number of ranks it continues
    with the same weights, optimizer state and data, but sums in another order. Every method is a collective call of the
    module's ranks, and `folder` must be the same directory for all of them.

    scheduler: anything with `state_dict` and `load_state_dict`, such as those of `torch.optim.lr_scheduler`.
    sampler: what `plan.sampler` returned, or anything with its `start_at`; resuming moves it to the next batch, and calls its
    `load_state_dict`, if it has one, with the saved state (the subset of `SelectedBatches`).
    sync: what `tw.sync.create` returned; every rank's state of it is saved. Each replica needs a folder of its own.
    keep: the number of newest complete checkpoints that are kept. asynchronous: write a copy in the background, which takes
    as many bytes of host memory as this rank holds of weights and optimizer state; else `save` returns when all is written.
    say: called, at the first save in the background, with a message if that copy exceeds the plan's budget, on devices whose
    memory is the host's; default: `warnings.warn`.

    To hand weights alone to another program, use `export_weights`.

    Raises `UserError` where the directory cannot be written, is full, or holds another run's or model's checkpoints.

    >>> import tempfile, trainwright as tw
    >>> model = torch.nn.Linear(3, 2)
    >>> loss_fn = lambda output, batch: output.square().mean()
    >>> plan = tw.plan(model, (torch.ones(4, 3),), hardware="cpu:1", loss_fn=loss_fn)
    >>> module = tw.parallelize(model, plan, loss_fn=loss_fn, seed=0)
    >>> optimizer = torch.optim.AdamW(module.parameters())
    >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, module, optimizer) as checkpointer:
    ...     checkpointer.save(step=9)
    ...     checkpointer.wait()
    ...     checkpointer.load_latest()
    9
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        module: ParallelModule,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        sampler: Any = None,
        sync: Any = None,
        keep: int = KEEP,
        asynchronous: bool = True,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        if keep < 1:
            raise UserError(f"at least 1 checkpoint has to stay; got keep={keep}; give 1 or more")
        self.folder = Path(folder)
        self.keep, self.asynchronous = keep, asynchronous
        self._module, self._optimizer = module, optimizer
        self._scheduler, self._sampler, self._sync = scheduler, sampler, sync
        self._replicas = module.replicas
        self._left: tuple[str, ...] = ()
        self.has_schedule = False
        """Whether the loaded checkpoint has a schedule's state."""
        self._say: Callable[[str], None] | None = say if asynchronous and module.device.type == "cpu" else None
        # Of its own: the writing thread's collectives must not come between those of the step.
        self._group = group_inside(self._replicas, "gloo")
        self._writing: _Writing | None = None
        self._on_first_rank(lambda: _prepare(self.folder))

    @property
    def left(self) -> tuple[str, ...]:
        """Return the names of the sync method's saved state that could not be restored for this number of replicas or plan."""
        return self._left

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose state is saved."""
        return self._optimizer

    def move_to(self, folder: str | os.PathLike[str]) -> None:
        """Use another folder for saves and loads from now on; a collective call."""
        self.wait()
        self.folder = Path(folder)
        self._on_first_rank(lambda: _prepare(self.folder))

    def save(self, step: int, num_batches: int | None = None) -> None:
        """Save the state after `step`; wait for the previous save first, and return when this rank's part is copied.

        num_batches: the number of batches consumed so far; default step + 1.

        Raises `UserError` when this save or the previous one cannot be written; earlier checkpoints stay.
        """
        self.wait()
        copy = _copy_to_host if self.asynchronous else _on_host
        pieces = pieces_of(self._module, self._optimizer, copy) | vectors_of(self._sync, self._replicas.rank, copy)
        texts = self._texts(step, step + 1 if num_batches is None else num_batches)
        temporary = self.folder / f".{_name(step)}.tmp"
        needed = sum(piece.num_bytes for piece in pieces.values())
        self._on_first_rank(lambda: _begin(temporary, needed))
        if self._say is not None:
            _say_what_is_over(self._module.plan, needed, self._say)
            self._say = None
        self._writing = _Writing(lambda: self._write(pieces, texts, temporary, self.folder / _name(step)))
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is on the disk; raise the error that stopped it, if any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def load(self, path: Path) -> int:
        """Restore a complete checkpoint, from any folder, and return its step; a collective call."""
        self.wait()
        return self._load(path)

    def load_latest(self) -> int | None:
        """Restore the newest complete checkpoint and return its step; if there is none, change nothing and return `None`."""
        self.wait()
        newest = self.newest()
        return self._load(newest) if newest is not None else None

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, as rank 0 sees it; a collective call."""
        held: list[Path | None] = [next(reversed(complete(self.folder)), None)]
        dist.broadcast_object_list(held, self._replicas.ranks[0], group=self._group)
        return held[0]

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()

    def _load(self, path: Path) -> int:
        position, saved = read_position(path), _read_state(path)
        module, same_layout = self._module, _layout(self._module) == saved["layout"]
        restore_groups(module, self._optimizer, saved["optimizer"])
        restore_tensors(module, self._optimizer, StoredTensors(path), saved["optimizer"], same_layout)
        module.num_steps = saved["module"]["num_steps"]
        if position.get("replica", 0) == self._replicas.index:
            module.seed = saved["module"]["seed"]
        self.has_schedule = saved["scheduler"] is not None
        if self._scheduler is not None:
            if saved["scheduler"] is None:
                raise UserError(f"a checkpoint with a schedule is needed; {path} has none; leave out scheduler=")
            self._scheduler.load_state_dict(saved["scheduler"])
        if self._sampler is not None:
            self._sampler.start_at(position["num_batches"])
            if saved.get("sampler") is not None:
                self._sampler.load_state_dict(saved["sampler"])
        if len(saved["random"]) == self._replicas.size and position.get("replica", 0) == self._replicas.index:
            restore_random_states(saved["random"][self._replicas.rank])
        if self._sync is not None:
            self._left = restore_sync(
                self._sync, self._replicas.rank, StoredTensors(path), saved.get("sync"), same_layout
            )
        return int(position["step"])

    def _texts(self, step: int, num_batches: int) -> dict[str, bytes]:
        """Return the contents of the files beside the tensors, by name, the marker last; a collective call."""
        here = self._replicas
        own: list[Any] = [None] * here.size
        dist.all_gather_object(own, (random_states(), numbers_of(self._sync)), group=self._group)
        module = self._module
        state = {
            "optimizer": optimizer_settings(module, self._optimizer),
            "module": {"num_steps": module.num_steps, "seed": module.seed},
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "sampler": self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else None,
            "random": [random for random, _ in own],
            "sync": [numbers for _, numbers in own] if self._sync is not None else None,
            "layout": _layout(module),
        }
        position = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "num_batches": num_batches,
            "num_ranks": module.plan.num_ranks,
            "mesh": module.plan.mesh,
            "fingerprint": module.plan.fingerprint,
            "torch_version": torch.__version__,
            **({} if here.is_only else {"replica": here.index, "num_replicas": here.number}),
        }
        config = getattr(module, "config", None)
        texts = {STATE: _as_bytes(state), PLAN: module.plan.to_json().encode()}
        if config is not None and hasattr(config, "to_json_string"):
            texts[CONFIG] = config.to_json_string().encode()
        if module.adapter is not None:
            texts[ADAPTER] = json.dumps(asdict(module.adapter)).encode()
        return {**texts, MARKER: json.dumps(position).encode()}

    def _write(self, pieces: Mapping[str, Piece], texts: Mapping[str, bytes], temporary: Path, final: Path) -> None:
        """Write the tensors of all ranks, then the other files, then rename the directory; runs in the background thread."""
        try:
            write_pieces(pieces, temporary, self._group)
        except CheckpointException as error:
            self._discard(temporary)
            raise _disk_error(error.failures, self.folder) from None
        self._on_first_rank(lambda: self._commit(texts, temporary, final))

    def _commit(self, texts: Mapping[str, bytes], temporary: Path, final: Path) -> None:
        try:
            for name, data in texts.items():
                _write_durably(temporary / name, data)
            _replace(temporary, final)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in complete(self.folder)[: -self.keep]:
            _remove(old)

    def _discard(self, temporary: Path) -> None:
        if self._replicas.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0; every rank raises its error, if any."""
        told: list[str | None] = [None]
        if self._replicas.rank == 0:
            try:
                action()
            except (OSError, UserError) as error:
                told = [str(error if isinstance(error, UserError) else _disk_error({0: error}, self.folder))]
        dist.broadcast_object_list(told, self._replicas.ranks[0], group=self._group)
        if told[0] is not None:
            raise UserError(told[0])


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints under `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{MARKER}"))


def read_position(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's `position.json`; raise `UserError` for another format version."""
    position: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf8"))
    if position.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"a checkpoint of format version {FORMAT_VERSION} is needed; {path} has {position.get('format_version')!r}; "
            "resume it with the release that wrote it"
        )
    return position


class _Writing:
    """Runs a save in a background thread; `finish` waits for it and raises its error."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        # A daemon: a rank that fails meanwhile must be able to end.
        self._thread = threading.Thread(target=self._run, args=(action,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._error = error


def _say_what_is_over(plan: Plan, copy_bytes: int, say: Callable[[str], None]) -> None:
    """Call `say` if the background copy, together with the step's peak, exceeds the plan's budget."""
    over = plan.predicted.peak_bytes + copy_bytes - plan.budget_bytes if plan.budget_bytes is not None else 0
    if over > 0:
        copied, beyond = (f"{size / 2**20:.1f} MiB" for size in (copy_bytes, over))
        say(
            f"saving in the background keeps a copy of {copied} on this rank until it is written; at the step's peak that is "
            f"{beyond} above the plan's budget; if this machine does not have it, save synchronously (--sync-checkpoints, "
            "asynchronous=False), or plan for a budget that is smaller by the copy"
        )


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _layout(module: ParallelModule) -> dict[str, Any]:
    """Return what an optimizer's own tensors depend on: the mesh, the stages and each parameter's layout."""
    pipeline = module.plan.pipeline
    stages: dict[str, Any] = {} if pipeline is None else {"begins": list(pipeline.begins)}
    if pipeline is not None and pipeline.virtual > 1:
        stages["virtual"] = pipeline.virtual
    return {
        "mesh": list(module.plan.mesh.values()),
        "params": {n: list(p.layout) for n, p in module.plan.params.items()},
        **stages,
    }


def _prepare(folder: Path) -> None:
    """Create the directory, and remove or complete what an interrupted run has left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for replaced in folder.glob(".step-*.old"):
        final = folder / replaced.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(final)
    for unfinished in (*folder.glob(".step-*.tmp"), *folder.glob(".step-*.gone")):
        shutil.rmtree(unfinished, ignore_errors=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


def _begin(temporary: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(temporary.parent).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _replace(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final` and synchronise the directory; an old checkpoint of that name is moved aside until then."""
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    with contextlib.suppress(OSError):  # some file systems have no directories to synchronise
        handle = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path) -> None:
    """Rename a checkpoint and delete it, so that one that is deleted half-way is never read, and removed at the next start."""
    gone = path.with_name(f".{path.name}.gone")
    with contextlib.suppress(OSError):
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _as_bytes(state: dict[str, Any]) -> bytes:
    """Return the serialised state; raise `UserError` for values that cannot be loaded without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise UserError(
            f"a checkpoint can store only plain values and tensors of scheduler and optimizer; {error}; "
            "leave anything else out of their state_dict()"
        ) from None
    return buffer.getvalue()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path / STATE, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"resuming needs a complete checkpoint; {path / STATE} cannot be read ({error}); try an earlier one"
        ) from None
    return found


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _disk_error(failures: Mapping[int, Any], folder: Path) -> UserError | RuntimeError:
    """Return an error that names the rank that could not write, and why: a `UserError` if the disk is the cause."""
    rank, failure = min(failures.items())
    error = failure[0] if isinstance(failure, tuple) else failure
    of_disk = next((each for each in _causes(error) if isinstance(each, OSError)), None)
    if of_disk is None and "inline_container" not in str(error):
        return RuntimeError(f"rank {rank} could not write the checkpoint: {type(error).__name__}: {error}")
    reason = of_disk.strerror if of_disk is not None else "the file could not be written to its end"
    free = _free_bytes(folder)
    return UserError(
        f"checkpoints need a directory that can be written to, with enough space; {folder} failed: {reason} (rank {rank}{free}); "
        "free some space, keep fewer, or choose another directory; the previous checkpoint is intact"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _free_bytes(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free} bytes free"
    except OSError:
        return ""
