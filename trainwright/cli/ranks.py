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


def run_worker(worker: str, payload: dict[str, Any], plan: Plan, nproc: int | None, on_event: OnEvent) -> Any:
    """Run `worker` ("module:function") with the keywords `payload` on the plan's ranks; return rank 0's result.

    Under torchrun, without `nproc`, on the ranks that exist: there every rank calls this, and each gets its own result.
    `on_event` is told what rank 0 emits.
    """
    if nproc is None and under_torchrun():
        return _on_existing_ranks(worker, payload, plan, on_event)
    from ..launch import run_processes

    num_processes = _num_processes(plan, nproc)

    def of_first(rank: int, event: dict[str, Any]) -> None:
        if rank == 0:
            on_event(event)

    return run_processes(worker, payload, num_processes, on_event=of_first, device=_device(plan, num_processes))[0]


def _on_existing_ranks(worker: str, payload: dict[str, Any], plan: Plan, on_event: OnEvent) -> Any:
    from ..launch import listening, process_group
    from ..launch.worker import load

    num_ranks = int(os.environ["WORLD_SIZE"])
    if num_ranks != plan.num_ranks:
        raise UserError(
            f"{plan.num_ranks} ranks are needed for this plan; torchrun started {num_ranks}; "
            f"start {plan.num_ranks}, or plan for {num_ranks}"
        )
    device = _device(plan, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    heard = on_event if is_first_rank() else _ignore
    with process_group(device), listening(heard):
        return load(worker)(**payload)


def _num_processes(plan: Plan, nproc: int | None) -> int:
    if nproc is not None and nproc != plan.num_ranks:
        raise UserError(
            f"{plan.num_ranks} processes are needed for this plan; got --nproc {nproc}; "
            f"leave it out, or plan for {nproc}"
        )
    here = plan.cluster.device.kind == "cpu" or _num_gpus() >= plan.num_ranks
    if nproc is None and not here:
        raise UserError(
            f"{plan.num_ranks} GPUs are needed for this plan ({plan.cluster.name}); this machine has {_num_gpus()}; "
            f"start it there with torchrun, or give --nproc {plan.num_ranks} to run it on the CPU"
        )
    return plan.num_ranks


def _device(plan: Plan, num_processes: int) -> Literal["cpu", "cuda"]:
    """GPUs where the plan is for GPUs and each process can have one."""
    return "cuda" if plan.cluster.device.kind == "gpu" and _num_gpus() >= num_processes else "cpu"


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ignore(event: dict[str, Any]) -> None:
    """Events of ranks that do not speak."""
