"""DiLoCo of torchft beside ours: the same two replicas, rates and data, and how far apart their parameters end.

python -m benchmarks.sync.by_torchft     needs `pip install torchft`; writes benchmarks/results/sync-by-torchft.{md,json}

torchft has a lighthouse, which this starts, and a manager in each replica; both are processes of this machine.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.solvers.record import write
from trainwright import sync

STEPS, PERIOD, REPLICAS, OUTER_LR, OUTER_MOMENTUM = 40, 10, 2, 0.7, 0.9


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def backward(model: nn.Module, rank: int, step: int) -> Tensor:
    """Leave the gradients of a step's batch, which differs between replicas, and return the loss."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    model.zero_grad()
    loss = (model(x) - (x[:, :2] * (rank + 1)).sin()).square().mean()
    loss.backward()
    return loss.detach()


def theirs(rank: int, lighthouse: str, found: Any) -> None:
    """One replica under torchft, in a process of its own."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, inner = built()
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(), min_replica_size=REPLICAS, use_async_quorum=False, rank=0, world_size=1, init_sync=False,
        store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"replica-{rank}",
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    )  # fmt: skip
    began_s = time.perf_counter()
    with DiLoCo(manager, [model], inner, outer, sync_every=PERIOD):
        for step in range(STEPS):
            backward(model, rank, step)
            inner.step()
    seconds = time.perf_counter() - began_s
    found.put((rank, sync.Replica(model, inner).read().tolist(), manager.current_step(), seconds))
    found.close()
    found.join_thread()
    manager.shutdown()
    os._exit(0)  # its threads would hold the process


def ours() -> list[Tensor]:
    def program(rank: int) -> Any:
        model, inner = built()
        joined = yield from sync.join(
            "diloco", model, inner, period=PERIOD, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM
        )
        for step in range(STEPS):
            yield from joined.steps(backward(model, rank, step))
        return joined.method.replica.read()

    return sync.simulate([program(rank) for rank in range(REPLICAS)]).results


def main() -> None:
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS, join_timeout_ms=2000)
    lighthouse = f"http://localhost:{server.address().rpartition(':')[2]}"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for rank in range(REPLICAS):
        context.Process(target=theirs, args=(rank, lighthouse, queue)).start()
    found = sorted(queue.get(timeout=180) for _ in range(REPLICAS))
    rows = [
        {
            "replica": rank,
            "rounds": rounds,
            "seconds under torchft": seconds,
            "largest difference": float((torch.tensor(values, dtype=torch.float64) - own).abs().max()),
        }
        for (rank, values, rounds, seconds), own in zip(found, ours())
    ]
    remarks = (
        f"DiLoCo, H = {PERIOD}, {STEPS} steps of a linear model of 14 parameters in float64, inner SGD, outer Nesterov "
        f"{OUTER_LR} and {OUTER_MOMENTUM}; seconds hold the first meeting of the replicas on a loaded machine",
    )
    write("sync-by-torchft", {"torchft's DiLoCo and ours": rows}, remarks, packages=("torchft",))
    server.shutdown()


if __name__ == "__main__":
    main()
