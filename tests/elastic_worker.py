"""One worker of a run whose workers come and go, as a script: `tests/test_sync_faults.py` starts, kills and stops some.

    python elastic_worker.py HOST:PORT NUM_WORKERS METHOD NUM_STEPS [SILENCE_S]

It prints a line a step, `step NUMBER SECONDS SIZE DIGEST`, and `finished DIGEST` or `error TEXT` at its end.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from tests.sync_cases import adam, loss_of, net, plain, sgd
from trainwright import sync
from trainwright.artifacts import UserError

METHODS = {
    "diloco": (adam, {"period": 4}),
    "local-sgd": (sgd, {"period": 2}),
    "lsgd": (sgd, {"group_period": 2, "global_period": 2}),
    "lsgd-asynchronous": (sgd, {"group_period": 2, "global_period": 2, "asynchronous": True}),
    "decentlam": (sgd, {}),
    "just-one-byte": (plain, {"num_samples": 2}),
    "data-parallel": (sgd, {}),
}


def main(address: str, num_workers: str, name: str, num_steps: str, silence_s: str = "1.0") -> None:
    torch.set_num_threads(1)
    make, options = METHODS[name]
    model = net()
    optimizer = make(model.parameters())
    meeting = sync.Meeting(address, int(num_workers), silence_s=float(silence_s))
    joined = sync.create(name.removesuffix("-asynchronous"), model, optimizer, meeting=meeting, **options)
    number = joined.engine.number
    print("joined", number, flush=True)
    counts_rounds = name.endswith("asynchronous")
    while (joined.method.num_rounds * 2 if counts_rounds else joined.method.num_steps) < int(num_steps):
        step = joined.method.num_steps
        time.sleep(0.02)
        if joined.record.takes == "closure":
            joined.step(lambda sample=0: loss_of(model, number, 100 * step + sample))
        else:
            optimizer.zero_grad()
            loss = loss_of(model, number, step)
            loss.backward()
            joined.step(loss)
        digest = joined.method.replica.digest().hex()[:12]
        print("step", joined.method.num_steps, f"{time.monotonic():.3f}", joined.engine.place.size, digest, flush=True)
    joined.finish()
    print("finished", joined.method.replica.digest().hex()[:12], flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        print("error", error, flush=True)
    sys.stdout.flush()
    os._exit(0)
