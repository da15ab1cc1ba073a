"""When `train` saves, and where it goes on: the checkpoints of a run, on each of its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from ..artifacts import UserError
from ..launch import replica_folder
from .places import check_folder

if TYPE_CHECKING:
    import torch

    from ..runtime import ParallelModule

KEEP = 2
CheckpointOption = Annotated[str | None, typer.Option(metavar="DIR", help="Write checkpoints there.")]
CheckpointEveryOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Steps between checkpoints; the last step has one too.")
]
KeepOption = Annotated[int, typer.Option(metavar="N", min=1, help="Checkpoints that stay, the newest.")]
SyncOption = Annotated[
    bool, typer.Option("--sync-checkpoints", help="Wait for the disk: saves a copy of weights and states in memory.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the newest in --checkpoint.")]


@dataclass(frozen=True)
class SavePolicy:
    """What the user said about checkpoints. restarted: this run takes the place of one that failed."""

    folder: str | None = None
    every: int | None = None
    keep: int = KEEP
    asynchronous: bool = True
    resume: bool = False
    restarted: bool = False


class Saving:
    """A context manager around the loop: resumes at `first_step`, saves every so many steps and after the last one.

    At its end all is on the disk. A run that stops before a step whose loss is not finite saves what it has.

    Raises `UserError` where there is nothing to resume from, or where another run's checkpoints would be mixed with these.
    """

    def __init__(
        self, policy: SavePolicy, module: ParallelModule, optimizer: torch.optim.Optimizer, num_steps: int,
        sampler: Any = None, schedule: Any = None, sync: Any = None,
    ) -> None:  # fmt: skip
        from ..launch import emit, rank
        from ..runtime import Checkpointer

        self._policy, self._module, self._num_steps, self._sampler = policy, module, num_steps, sampler
        self._has_schedule = schedule is not None
        self._checkpointer = None
        if policy.folder is not None:
            self._checkpointer = Checkpointer(
                _folder_of(policy.folder, module.replicas.index, sync),
                module,
                optimizer,
                scheduler=schedule,
                sampler=sampler,
                sync=sync,
                keep=policy.keep,
                asynchronous=policy.asynchronous,
                say=lambda text: emit({"kind": "note", "text": text}) if rank() == 0 else None,
            )
        self._sync = sync
        self.first_step = self._resume() if sync is None else self._resume_replicas()
        self._last_done = self._last_saved = self.first_step - 1
        self._num_forwards = module.num_steps

    def after_step(self, step: int) -> None:
        self._last_done, self._num_forwards = step, self._module.num_steps
        due = self._policy.every is not None and (step + 1) % self._policy.every == 0
        if due or step + 1 == self._num_steps:
            self._save(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        from ..runtime.training.nonfinite import NotFinite

        tier = self._module.tier
        is_whole = tier is None or tier.can_take_back
        if kind is not None and issubclass(kind, NotFinite) and is_whole and self._last_saved < self._last_done:
            self._module.num_steps = self._num_forwards  # of the step that did not count, too, there was a forward
            self._save(self._last_done)
        if self._checkpointer is not None and (kind is None or issubclass(kind, NotFinite)):
            self._checkpointer.wait()

    def _save(self, step: int) -> None:
        if self._checkpointer is not None:
            self._checkpointer.save(step, getattr(self._sampler, "num_batches", None))
            self._last_saved = step

    def _resume(self) -> int:
        policy = self._policy
        if self._checkpointer is None:
            return 0
        if not (policy.resume or policy.restarted or _restarted_by_torchrun()):
            if self._checkpointer.newest() is not None:
                raise _is_used(policy.folder)
            return 0
        step = self._checkpointer.load_latest()
        if step is None and policy.resume:
            raise _has_none(policy.folder)
        if step is not None and self._checkpointer.has_schedule and not self._has_schedule:
            raise UserError(
                f"the schedule of the run in {policy.folder} is needed to go on with it; got none; give --schedule as before"
            )
        return 0 if step is None else step + 1

    def _resume_replicas(self) -> int:
        """Go on from the newest step that all replicas have saved; one that is new goes on from another's."""
        from ..launch import emit

        policy, here = self._policy, self._module.replicas
        if self._checkpointer is None:
            return 0
        folder = Path(policy.folder or "")
        wanted = policy.resume or policy.restarted or _restarted_by_torchrun()
        found = _of_first_rank(lambda: newest_of_replicas(folder))
        if not wanted or found is None:
            if found is not None:
                raise _is_used(policy.folder)
            if policy.resume:
                raise _has_none(policy.folder)
            return 0
        step, number = found
        own = here.index % number
        done = self._checkpointer.load(folder / replica_folder(own) / f"step-{step:08d}")
        if here.rank == 0 and here.index == 0:
            for text in _not_carried(number, here.number, self._checkpointer.left):
                emit({"kind": "note", "text": text})
        return done + 1

    def save_finished(self, step: int) -> None:
        """Save what all replicas have agreed upon, as a run without replicas does; called by all of them."""
        policy = self._policy
        if self._checkpointer is None or policy.folder is None:
            return
        self._checkpointer.wait()
        if self._module.replicas.index == 0:
            self._checkpointer.move_to(policy.folder)
            self._checkpointer.save(step)
            self._checkpointer.wait()


def newest_of_replicas(folder: Path) -> tuple[int, int] | None:
    """Return the newest step that all replicas of a run have saved, and how many they are; None where there is none."""
    from ..runtime.checkpoint.checkpoint import complete, read_position

    for path in reversed(complete(folder / replica_folder(0))):
        position = read_position(path)
        number = position.get("num_replicas", 1)
        if all((folder / replica_folder(index) / path.name / "position.json").is_file() for index in range(number)):
            return position["step"], number
    return None


def _folder_of(folder: str, index: int, sync: Any) -> str:
    return folder if sync is None else str(Path(folder) / replica_folder(index))


def _of_first_rank(find: Any) -> Any:
    """Return what rank 0 of all finds; a collective call."""
    import torch.distributed as dist

    held = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, 0)
    return held[0]


def _not_carried(before: int, now: int, left: tuple[str, ...]) -> list[str]:
    """Say what of a run does not go on with another number of replicas."""
    texts = []
    if now > before:
        texts.append(
            f"replicas {before} to {now - 1} are new: each begins with the state of the one {before} before it"
        )
    if now < before:
        texts.append(f"replicas {now} to {before - 1} do not go on; what they alone have learned is lost")
    if left:
        texts.append(f"of the sync method's state, {', '.join(left)} could not be carried over and began anew")
    return texts


def _restarted_by_torchrun() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def check_saving(checkpoint: str | None, checkpoint_every: int | None, resume: bool, restarts: int) -> None:
    """Raise `UserError` for an option about checkpoints without a directory, and for a directory that will not do.

    That is one that cannot be written to, one with another run's checkpoints, and with --resume one that has none.
    """
    for option, given in (
        ("--checkpoint-every", checkpoint_every is not None),
        ("--resume", resume),
        ("--restarts", restarts > 0),
    ):
        if given and checkpoint is None:
            raise UserError(f"{option} needs the directory of the checkpoints; got none; add --checkpoint DIR")
    if checkpoint is None:
        return
    from ..runtime.checkpoint.checkpoint import complete

    check_folder("--checkpoint", checkpoint)
    folder = Path(checkpoint)
    has_any = bool(complete(folder)) or any(folder.glob(".step-*.old"))  # one that a crash has left half replaced
    has_any = has_any or bool(complete(folder / replica_folder(0)))
    if has_any and not resume and not _restarted_by_torchrun():
        raise _is_used(checkpoint)
    if resume and not has_any:
        raise _has_none(checkpoint)


def _is_used(folder: str | None) -> UserError:
    return UserError(
        f"this run needs a directory of its own for its checkpoints; {folder} has those of another run; add --resume to "
        "continue that run, or choose another directory"
    )


def _has_none(folder: str | None) -> UserError:
    return UserError(f"--resume needs a checkpoint; there is none in {folder}; check the path, or leave out --resume")
