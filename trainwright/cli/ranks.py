"""Running a plan: on ranks that torchrun has started, else on processes of this machine started here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from ..artifacts import Plan, UserError

NprocOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Processes to start on this machine; the plan's ranks. Not under torchrun."),
]
OnEvent = Callable[[dict[str, Any]], None]


def under_torchrun() -> bool:
    """Return whether this process is one of several ranks, started by torchrun or its like."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return whether this process is the one that speaks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def num_ranks_given(nproc: int | None) -> int | None:
    """Return how many ranks there are, or are to be, as torchrun or `--nproc` say; None where nobody has said."""
    return int(os.environ["WORLD_SIZE"]) if nproc is None and under_torchrun() else nproc


def run_worker(
    worker: str, payload: dict[str, Any], plan: Plan, nproc: int | None, on_event: OnEvent, replicas: int = 1
) -> Any:
    """Run `worker` ("module:function") with the keywords `payload` on the plan's ranks, `replicas` times as many; return
    rank 0's result.

    Under torchrun, without `nproc`, on the ranks that exist: there every rank calls this, and each gets its own result.
    `on_event` is told what rank 0 emits.
    """
    if nproc is None and under_torchrun():
        return _on_existing_ranks(worker, payload, plan, on_event, replicas)
    from ..launch import run_processes

    num_processes = _num_processes(plan, nproc, replicas)

    def of_first(rank: int, event: dict[str, Any]) -> None:
        if rank == 0:
            on_event(event)

    return run_processes(worker, payload, num_processes, on_event=of_first, device=_device(plan, num_processes))[0]


def run_alone(worker: str, payload: dict[str, Any], num_ranks: int, on_event: OnEvent) -> Any:
    """Run `worker` without a plan: in this process, on ranks that torchrun started, or on processes started here."""
    from ..launch import listening, process_group, run_processes
    from ..launch.worker import load

    if under_torchrun():
        with process_group("cpu"), listening(on_event if is_first_rank() else _ignore):
            return load(worker)(**payload)
    if num_ranks == 1:
        with listening(on_event):
            return load(worker)(**payload)
    return run_processes(worker, payload, num_ranks, on_event=lambda rank, event: on_event(event))[0]


def _on_existing_ranks(worker: str, payload: dict[str, Any], plan: Plan, on_event: OnEvent, replicas: int) -> Any:
    from ..launch import listening, process_group
    from ..launch.worker import load

    num_ranks = int(os.environ["WORLD_SIZE"])
    needed = plan.num_ranks * replicas
    if num_ranks != needed:
        raise UserError(
            f"{needed} ranks are needed for this plan; torchrun started {num_ranks}; "
            f"start {needed}, or plan for {num_ranks}"
        )
    device = _device(plan, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    heard = on_event if is_first_rank() else _ignore
    with process_group(device), listening(heard):
        return load(worker)(**payload)


def _num_processes(plan: Plan, nproc: int | None, replicas: int) -> int:
    needed = plan.num_ranks * replicas
    if nproc is not None and nproc != needed:
        raise UserError(
            f"{needed} processes are needed for this plan; got --nproc {nproc}; leave it out, or plan for {nproc}"
        )
    here = plan.cluster.device.kind == "cpu" or _num_gpus() >= needed
    if nproc is None and not here:
        raise UserError(
            f"{needed} GPUs are needed for this plan ({plan.cluster.name}); this machine has {_num_gpus()}; "
            f"start it there with torchrun, or give --nproc {needed} to run it on the CPU"
        )
    return needed


def _device(plan: Plan, num_processes: int) -> Literal["cpu", "cuda"]:
    """GPUs where the plan is for GPUs and each process can have one."""
    return "cuda" if plan.cluster.device.kind == "gpu" and _num_gpus() >= num_processes else "cpu"


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ignore(event: dict[str, Any]) -> None:
    """Events of ranks that do not speak."""
