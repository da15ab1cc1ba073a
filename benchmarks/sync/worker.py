"""One rank of `slow_links`: a classifier on scikit-learn's digits, by each method, and what a round takes beside its price."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainwright import sync
from trainwright.launch import process_group, rank, world_size
from trainwright.sync import Network

GOAL, MOST_STEPS, BATCH, EVERY = 0.25, 400, 32, 10
SGD, ADAM = {"lr": 0.05, "momentum": 0.9}, {"lr": 3e-3}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("sgd", {}),
    "data-parallel, AdamW": ("adamw", {}),
    "local-sgd": ("sgd", {"period": 8}),
    "powersgd": ("sgd", {"rank": 4, "start_step": 10}),
    "post-local-sgd": ("sgd", {"period": 8, "shared_steps": 10}),
    "diloco": ("adamw", {"period": 20}),
    "streaming-diloco": ("adamw", {"period": 20, "fragments": 4, "delay": 1, "mix": 0.5}),
    "easgd": ("sgd", {"period": 8}),
    "lsgd": ("sgd", {"group_period": 4, "global_period": 8, "num_groups": 2}),
    "decentlam": ("sgd", {}),
    "gossip": ("sgd", {}),
    "1-bit-adam": ("adamw", {"freeze_step": 30}),
    "1-bit-lamb": ("adamw", {"freeze_step": 30}),
}


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's share of the training examples, and those held out by all."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return x[400 + rank() :: world_size()], y[400 + rank() :: world_size()], x[:400], y[:400]


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def until_the_goal(
    title: str, seed: int, net: nn.Module, step: Callable[[Tensor, Tensor], None], sent_bytes: Callable[[], int]
) -> dict[str, Any]:
    """Step until the mean of all workers' parameters would do, or `MOST_STEPS` times; return the row.

    step: takes one on a batch of inputs and labels. sent_bytes: of this rank so far. Looks at the loss count in neither.
    """
    inputs, labels, held_x, held_y = data()
    generator = torch.Generator().manual_seed(100 * seed + rank())
    spent_s, steps, sent, loss = 0.0, 0, 0, float("inf")
    while loss > GOAL and steps < MOST_STEPS:
        dist.barrier()
        began_s, before = time.perf_counter(), sent_bytes()
        for _ in range(EVERY):
            rows = torch.randint(len(inputs), (BATCH,), generator=generator)
            step(inputs[rows], labels[rows])
        spent_s += time.perf_counter() - began_s
        steps += EVERY
        sent += sent_bytes() - before
        loss = _loss_of_mean(net, held_x, held_y)
    total = torch.tensor([sent])
    dist.all_reduce(total)
    return {
        "method": title,
        "reached": loss <= GOAL,
        "steps": steps,
        "KiB sent by all": int(total) / 1024,
        "seconds": spent_s,
        "loss": loss,
    }


def trained(title: str, seed: int) -> dict[str, Any]:
    """One of our methods, its bytes by its own count."""
    name = title.partition(",")[0]
    kind, options = METHODS[title]
    torch.manual_seed(seed)
    model = classifier()
    optimizer = (
        torch.optim.SGD(model.parameters(), **SGD) if kind == "sgd" else torch.optim.AdamW(model.parameters(), **ADAM)
    )
    joined = sync.create(name, model, optimizer, **options)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        joined.step(loss)

    return until_the_goal(title, seed, model, step, lambda: joined.traffic.sent_bytes)


def on_the_wire() -> int:
    """Return the bytes that this rank's interface has sent, headers and acknowledgements too."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def by_decent_dp(seed: int) -> dict[str, Any]:
    """The same by decent-dp, where it is installed, on a ring: its hooks step and exchange in the backward pass."""
    from decent_dp.ddp import DecentralizedDataParallel

    torch.manual_seed(seed)
    net = classifier()
    model = DecentralizedDataParallel(
        net, lambda named: torch.optim.SGD([param for _, param in named], **SGD), topology="ring", _local_world_size=1
    )

    def step(x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()

    return until_the_goal("decent-dp, ring, SGD", seed, net, step, on_the_wire)


def by_torchft(seed: int) -> dict[str, Any]:
    """The same by torchft's DiLoCo, where it is installed, with a lighthouse beside the first rank."""
    from torchft import Manager, ProcessGroupGloo
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo

    own, found = os.environ["OWN_ADDR"], [""]
    if rank() == 0:
        server = LighthouseServer(bind="0.0.0.0:0", min_replicas=world_size(), join_timeout_ms=2000)
        found[0] = f"http://{own}:{server.address().rpartition(':')[2]}"
    dist.broadcast_object_list(found)
    torch.manual_seed(seed)
    model = classifier()
    inner = torch.optim.AdamW(model.parameters(), **ADAM)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)  # as `diloco` has them by default
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(), min_replica_size=world_size(), use_async_quorum=False, rank=0, world_size=1, init_sync=False,
        store_addr=own, store_port=store.port, lighthouse_addr=found[0], replica_id=f"replica-{rank()}", hostname=own,
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    )  # fmt: skip

    def step(x: Tensor, y: Tensor) -> None:
        inner.zero_grad()
        cross_entropy(model(x), y).backward()
        inner.step()

    with DiLoCo(manager, [model], inner, outer, sync_every=METHODS["diloco"][1]["period"]):
        row = until_the_goal("torchft's DiLoCo", seed, model, step, on_the_wire)
    dist.barrier()  # the lighthouse stays until all have done with it
    return row


def _loss_of_mean(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The held-out loss at the mean of all workers' parameters, which nobody takes over."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    total = flat.clone()
    dist.all_reduce(total)
    nn.utils.vector_to_parameters(total / world_size(), model.parameters())
    with torch.no_grad():
        found = float(cross_entropy(model(x), y))
    nn.utils.vector_to_parameters(flat, model.parameters())
    return found


def round_seconds(name: str, network: Network, options: dict[str, Any], steps: int = 11) -> dict[str, Any]:
    """Measure a step that exchanges, beside what the record predicts of the link and what the stepping thread computes.

    Two steps warm up, three are asked for their processor seconds, six for their seconds.
    """
    width = width_on(network, name)
    model, optimizer = with_gradients(name, width)
    joined = sync.create(name, model, optimizer, **options)
    first, timed = 2, 5
    taken, computed = [], []
    for _ in range(steps):
        dist.barrier()
        time.sleep(0.02)  # as long as a link needs to be idle for a burst
        began_s, worked_s = time.perf_counter(), time.thread_time()
        joined.step(torch.zeros(()))
        own = torch.tensor([time.perf_counter() - began_s, time.thread_time() - worked_s])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        taken.append(float(own[0]))
        computed.append(float(own[1]))
    record, size = joined.record, joined.size
    joined.close()
    later = steps * record.exchange_s(size, network, 0.0, steps) - first * record.exchange_s(size, network, 0.0, first)
    shared = max(1.0, world_size() / (os.cpu_count() or 1))
    link_s, own_s, measured = (
        later / (steps - first),
        shared * statistics.median(computed[first:timed]),
        statistics.median(taken[timed:]),
    )
    return {
        "method": name,
        "parameters": size.num_params,
        "link s": link_s,
        "simulated s": simulated_seconds(name, network, options, world_size(), steps, first) if rank() == 0 else None,
        "computing s": own_s,
        "measured s": measured,
        "off": (link_s + own_s) / measured - 1,
    }


def width_on(network: Network, name: str) -> int:
    """The width of a layer whose exchange takes about as long on any link, and by methods that compress it, up to a bound."""
    wider = 4 if name in COMPRESSED else 1
    return min(2560, 2 * round(128 * wider * math.sqrt(network.bytes_per_s / 1.25e6)))


def with_gradients(name: str, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return width · (width + 1) parameters whose gradients are there, and an optimizer that the method takes."""
    model = nn.Linear(width, width)
    for param in model.parameters():
        nn.init.zeros_(param)
        param.grad = torch.ones_like(param)
    if name.startswith("1-bit"):
        return model, torch.optim.AdamW(model.parameters())
    return model, torch.optim.SGD(model.parameters(), lr=0.0 if name != "decentlam" else 1e-3)


def simulated_seconds(
    name: str, network: Network, options: dict[str, Any], num_workers: int, steps: int, first: int
) -> float:
    """Return the same of simulated workers, by the clock, with pauses in which a link is idle as between the real steps."""
    pause_s = 0.02

    def program() -> Any:
        model, optimizer = with_gradients(name, width_on(network, name))
        joined = yield from sync.join(name, model, optimizer, **options)
        taken = []
        for _ in range(steps):
            yield sync.AllReduce(torch.zeros(()))
            yield sync.Compute()  # all begin together, on idle links
            began_s = yield sync.Now()
            yield from joined.steps(torch.zeros(()))
            taken.append((yield sync.Now()) - began_s)
        return taken

    ranks = sync.simulate([program() for _ in range(num_workers)], network, pause_s).results
    return statistics.median(max(each) for each in list(zip(*ranks))[first:])


COMPRESSED = ("powersgd", "1-bit-adam", "1-bit-lamb")
ROUNDS: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "local-sgd": {"period": 1},
    "post-local-sgd": {"period": 1, "shared_steps": 1},
    "powersgd": {"start_step": 2, "rank": 8},
    "diloco": {"period": 1},
    "streaming-diloco": {"period": 2, "fragments": 2, "delay": 0, "mix": 0.0},
    "easgd": {"period": 1},
    "lsgd": {"group_period": 1, "global_period": 1},
    "gossip": {},
    "decentlam": {},
    "1-bit-adam": {"freeze_step": 2},
    "1-bit-lamb": {"freeze_step": 2},
    "cr-psgd": {"growth": 1.01},
}
"""Each exchanges in every step: what a round takes."""


def main(what: str, link: str = "") -> None:
    torch.set_num_threads(1)
    with process_group("cpu"):
        if what == "rounds":
            rows = [round_seconds(name, Network(**json.loads(link)), options) for name, options in ROUNDS.items()]
        else:
            rows = [trained(title, seed=0) for title in METHODS]
            rows += [by_decent_dp(seed=0)] if importlib.util.find_spec("decent_dp") else []
            rows += [by_torchft(seed=0)] if importlib.util.find_spec("torchft") else []
        if rank() == 0:
            print("ROWS " + json.dumps(rows), flush=True)
        dist.barrier()
    os._exit(0)  # threads of torchft's managers would hold the process


if __name__ == "__main__":
    main(*sys.argv[1:])
