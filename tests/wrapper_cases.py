"""One training step of torch's own wrappers on real ranks: what they send and the most they hold."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.runtime import baselines, models
from trainwright import optim
from trainwright.profiler.kernels.allocator import measure

SETTLE_S = 3e-3
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": baselines.ddp,
    "fsdp": partial(baselines.fsdp, reshard_after_forward=False),
    "megatron": baselines.megatron,
}


def wrapped_step(wrapper: str, model: str) -> dict[str, Any]:
    """Return the bytes sent by collective, and the peak over two whole steps, of `wrapper` (ddp, fsdp, megatron) on this rank.

    A model of several buckets is needed: `DistributedDataParallel` makes them anew in the first step, where they are seen.
    """
    built, batch = models.build(model)
    part = batch if wrapper == "megatron" else models.part(batch, dist.get_rank(), dist.get_world_size())
    module = WRAPPERS[wrapper](built)
    del built
    optimizer = optim.create("adamw", module.parameters())

    def step() -> None:
        with loss_parallel() if wrapper == "megatron" else nullcontext():
            output = module(**part)
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    static = sum(_local(tensor).untyped_storage().nbytes() for tensor in [*module.parameters(), *module.buffers()])
    with settling():
        record = measure(step, num_steps=2)
    return {"peak": static + record.peak_delta_bytes, "sent": sent_bytes(step)}


def sent_bytes(step: Callable[[], None]) -> dict[str, int]:
    """Return the bytes that gloo was given during `step`, by collective."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    found: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.name.startswith("gloo:"):
            found[event.name.removeprefix("gloo:")] += 4 * sum(math.prod(shape) for shape in event.input_shapes)
    return dict(found)


@contextmanager
def settling() -> Iterator[None]:
    """Wait after each collective, as our communicator does while a peak is measured."""
    kind = dist.Work
    before = kind.wait

    def wait(work: Any, *args: Any) -> Any:
        result = before(work, *args)
        time.sleep(SETTLE_S)
        return result

    kind.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.wait = before  # type: ignore[method-assign]


def _local(tensor: torch.Tensor | nn.Parameter) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
