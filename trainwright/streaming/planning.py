"""Plans which blocks stream: of those that keep the peak within the device's memory, the fewest.

peak(S)     a step with the blocks S streamed, on fakes                                            `predict.cost_of_step`
step(S)     in the order of reads, updates and writes                                              `schedule.step_s`
S           evenly spaced, so that what stays computes beside what comes in; fewer blocks move less and compute the same

Compute is two forwards and the directions: each op by the device's rates, each number drawn by `DRAWN_S`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..artifacts import Cluster, ModelRef, Refusal, StreamPlan, StreamPredicted, Tier, UserError
from .blocks import find_parts
from .predict import StepCost, cost_of_step
from .schedule import step_s

Loss = Callable[[nn.Module, Any], Any]


def plan_stream(
    model: nn.Module, batch: Any, loss: Loss, cluster: Cluster, *, place: Literal["host", "disk"] = "host",
    memory_bytes: int | None = None, storage: torch.dtype | None = None, blocks: Sequence[str] | None = None,
    exact: bool = False, ref: ModelRef | None = None,
) -> StreamPlan:  # fmt: skip
    """Return the plan of a streamed step of `loss(model, batch)` that moves least within `memory_bytes` of the device.

    model: on any device, meta included. cluster: its device computes; its tier `place` has the rates (a CPU's own memory, that
    of copying). memory_bytes: default nine tenths of the device's. blocks: patterns of what may stream; the other arguments are
    those of `Streamed` and `MeZO`. Raises `Refusal` where not even all blocks streamed fit.

    >>> from trainwright.hardware import resolve
    >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    >>> found = plan_stream(model, torch.ones(1, 64), lambda model, x: model(x).sum(), resolve("cpu:1"), memory_bytes=180_000)
    >>> 3 < len(found.blocks) < 12, found.predicted.peak_bytes <= 180_000
    (True, True)
    """
    budget = int(0.9 * cluster.device.memory_bytes) if memory_bytes is None else memory_bytes
    names = [part.name for part in find_parts(model, blocks).blocks]
    costs: dict[int, StepCost] = {}

    def cost(num: int) -> StepCost:
        if num not in costs:
            costs[num] = cost_of_step(
                model, batch, loss, cluster.device, storage=storage, blocks=_spaced(names, num), exact=exact
            )
        return costs[num]

    num = _fewest(len(names), lambda num: cost(num).peak_bytes <= budget)
    if num is None:
        raise Refusal(
            f"{cost(len(names)).peak_bytes} bytes of the device are needed where every block streams; there are {budget}; raise "
            "the memory, store in bf16, cut the model into smaller blocks, or take a smaller batch"
        )
    found, chosen = cost(num), _spaced(names, num)
    rates = _rates(cluster, place)
    read_s, written_s = found.read_bytes / rates.read_bytes_per_s, found.written_bytes / rates.write_bytes_per_s
    used = {name: param.dtype for name, param in model.named_parameters()}
    rests = {name: storage or dtype for name, dtype in used.items()}
    parts = find_parts(model, chosen).blocks
    return StreamPlan(
        model=ref or ModelRef(name=type(model).__name__),
        fingerprint=fingerprint(model),
        hardware=cluster.name,
        place=place,
        storage=None if storage is None else str(storage).removeprefix("torch."),
        blocks=tuple(chosen),
        num_blocks=len(names),
        block_bytes=max(part.layout(rests)[1] for part in parts),
        budget_bytes=memory_bytes,
        predicted=StreamPredicted(
            step_s=step_s(found.parts, found.beside_s, rates.read_bytes_per_s, rates.write_bytes_per_s),
            compute_s=found.compute_s, read_s=read_s, written_s=written_s,
            read_bytes=found.read_bytes, written_bytes=found.written_bytes, peak_bytes=found.peak_bytes,
        ),
    )  # fmt: skip


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the names, shapes and types of a model's parameters."""
    told = [(name, tuple(param.shape), str(param.dtype)) for name, param in model.named_parameters()]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def check_plan(plan: StreamPlan, model: nn.Module) -> None:
    """Raise `UserError` where the plan is another model's."""
    if plan.fingerprint != fingerprint(model):
        raise UserError(
            f"the model that was planned is needed, {plan.model.name} ({plan.fingerprint}); this one has other parameters "
            f"({fingerprint(model)}); name it with the same options, or plan anew"
        )


def _spaced(names: Sequence[str], num: int) -> list[str]:
    """Return `num` of the names, evenly spaced.

    >>> _spaced("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    return [names[index * len(names) // num] for index in range(num)]


def _fewest(most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest number that fits, where more fit better than fewer; None where not even the largest does."""
    if not fits(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _rates(cluster: Cluster, place: str) -> Tier:
    if place == "host" and cluster.device.kind == "cpu":
        half = cluster.device.bandwidth_bytes_per_s / 2  # read and written once each
        return Tier(write_bytes_per_s=half, read_bytes_per_s=half)
    return cluster.tier(place)
