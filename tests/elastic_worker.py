"""A server that forks workers of a run in which they come and go: `tests/sync/test_sync_faults.py` kills, stops and adds some.

It reads a line of JSON a worker, `[OUTPUT, HOST:PORT, NUM_WORKERS, METHOD, NUM_STEPS, SILENCE_S, CONNECT_S, NUM_MEMBERS]`, and
prints its process id. Each further connection of the worker to the store takes CONNECT_S seconds, and NUM_STEPS are those that so
many members took; without the last two, 0 and any number. The worker writes `joined NUMBER`, a line a step, `step NUMBER SECONDS
SIZE DIGEST`, and `finished DIGEST` or `error TEXT` to OUTPUT.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch

from tests.sync_cases import adam, loss_of, net, plain, sgd
from trainwright import sync
from trainwright.artifacts import UserError

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "diloco": (adam, {"period": 4}),
    "local-sgd": (sgd, {"period": 2}),
    "lsgd": (sgd, {"group_period": 2, "global_period": 2}),
    "lsgd-asynchronous": (sgd, {"group_period": 2, "global_period": 2, "asynchronous": True}),
    "decentlam": (sgd, {}),
    "just-one-byte": (plain, {"num_samples": 2}),
    "data-parallel": (sgd, {}),
    "gradient-coding": (plain, {"stragglers": 1, "patience": 0.5}),
    "gradient-coding-cyclic": (plain, {"stragglers": 1, "patience": 0.5, "cyclic": True}),
    "sr-sgc": (plain, {"most": 2, "patience": 0.5}),
    "m-sgc": (plain, {"patience": 0.5}),
    "1-bit-adam": (adam, {"freeze_step": 4}),
}


class SlowToConnect:
    """A client of a store whose clones take `connect_s` to connect, as where the lookup of a name takes its time."""

    def __init__(self, store: Any, connect_s: float) -> None:
        self._store, self._connect_s = store, connect_s

    def clone(self) -> Any:
        time.sleep(self._connect_s)
        return self._store.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class SlowMeeting(sync.Meeting):
    connect_s = 0.0

    def store(self) -> Any:
        return SlowToConnect(super().store(), self.connect_s)


def work(
    address: str,
    num_workers: int,
    name: str,
    num_steps: int,
    silence_s: float,
    connect_s: float = 0.0,
    num_members: int = 0,
) -> None:
    make, options = METHODS[name]
    model = net()
    optimizer = make(model.parameters())
    SlowMeeting.connect_s = connect_s
    meeting = SlowMeeting(address, num_workers, silence_s=silence_s)
    joined = sync.create(
        name.removesuffix("-asynchronous").removesuffix("-cyclic"), model, optimizer, meeting=meeting, **options
    )
    engine, method = joined.engine, joined.method
    assert isinstance(engine, sync.Elastic)
    print("joined", engine.number, flush=True)
    num_together = 0

    def taken() -> int:
        if num_members:
            return num_together
        return 2 * method.num_rounds if name.endswith("asynchronous") else method.num_steps

    while taken() < num_steps:
        step = method.num_steps
        time.sleep(0.01)
        if joined.record.takes == "closure":
            number = 0 if method.keeps_places else engine.number  # the copies of a chunk have to be alike
            joined.step(functools.partial(_loss, model, number, 100 * step))
        else:
            optimizer.zero_grad()
            loss = loss_of(model, engine.number, step)
            loss.backward()
            joined.step(loss)
        num_together += engine.place.size >= num_members
        digest = method.replica.digest().hex()[:12]
        print("step", method.num_steps, f"{time.monotonic():.3f}", engine.place.size, digest, flush=True)
    joined.finish()
    print("finished", method.replica.digest().hex()[:12], flush=True)


def _loss(model: Any, number: int, step: int, sample: int, job: int = 0) -> Any:
    return loss_of(model, number, step + sample)


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    plain(net().parameters())  # an optimizer's constructor imports for seconds: once here, not in each worker
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            _be_a_worker(output, arguments)
        print(child, flush=True)


def _be_a_worker(output: str, arguments: list[Any]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        work(*arguments)
    except UserError as error:
        print("error", error, flush=True)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    serve()
