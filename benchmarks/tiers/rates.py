"""A step at declared rates, against what no order can beat, against the prediction, and against fixed rules.

`python -m benchmarks.tiers.rates DIR [--record]`. A stack of equal blocks whose computation is a sleep of declared length (so
that the cores are the disks' alone and the table does not depend on the machine), trained by AdamW through the runtime's own
residence, updates and store; a token bucket lets no more bytes a second pass than the table says.

    planned                 update during the backward, what memory has room for stays in it
    all states out          the same with nothing kept
    half                    half of what memory has room for
    update after            gradients to the disk, update after the backward, as ZeRO-Infinity orders it
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright as tw
from trainwright.runtime import TierOptions
from trainwright.tiers import Layer, Policy, Rates, StoreOptions, bound_s, simulate

RECORD = Path(__file__).parents[1] / "results" / "tiers-rates"
NUM_BLOCKS, WIDTH = 16, 512
FORWARD_S, BACKWARD_S = 0.08, 0.16
BLOCK_BYTES = 4 * WIDTH * WIDTH
WINDOW_BYTES = 16 * BLOCK_BYTES
ROOM_BYTES = 6 * 3 * BLOCK_BYTES
"""What memory has room for beside the window: six blocks with their states."""
RATES = (12e6, 24e6, 96e6)
RULES = {
    "planned": {"keep_bytes": ROOM_BYTES},
    "all states out": {},
    "half": {"keep_bytes": ROOM_BYTES // 2},
    "update after": {"update": "after", "keep_bytes": ROOM_BYTES},
}


class Timed(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grads[0]


def layers(forward_s: float, backward_s: float, update_s: float) -> list[Layer]:
    share = (forward_s / NUM_BLOCKS, backward_s / NUM_BLOCKS, update_s)
    return [Layer(BLOCK_BYTES, (BLOCK_BYTES, BLOCK_BYTES), BLOCK_BYTES, *share)] * NUM_BLOCKS


def in_memory(num_steps: int) -> tuple[float, float]:
    """Return the median seconds of the forward and of the backward without a tier: what computes."""
    module, _, batch = module_of(None, 1.0)
    taken = []
    for _ in range(num_steps + 1):
        began = time.perf_counter()
        loss = module(*batch).loss
        halfway = time.perf_counter()
        loss.backward()
        taken.append((halfway - began, time.perf_counter() - halfway))
    forward, backward = zip(*taken[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def module_of(folder: Path | None, rate: float, **options: Any) -> Any:
    """Return the planned stack on the disk, each block's op taking its time, and its optimizer."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))
    batch = (torch.ones(1, WIDTH),)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    plan = tw.plan(net, batch, loss_fn=loss_fn, hardware="cpu:1")
    store = StoreOptions(chunk_bytes=2**18, buffer_bytes=2**22, read_rate=rate, write_rate=rate)
    tier = None if folder is None else TierOptions([folder], window_bytes=WINDOW_BYTES, store=store, **options)
    module = tw.parallelize(net, plan, loss_fn=loss_fn, tier=tier).train()
    executor = module.steps.planned.executor
    for each in executor.local.instructions:
        if "mm" in str(each.key) or "linear" in str(each.key):
            executor.calls[each.index] = timed(executor.calls[each.index], each.outputs[0])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    if tier is not None:
        module.tier.attach(optimizer)
    return module, optimizer, batch


def timed(call: Any, output: int) -> Any:
    def run(env: dict[int, Any], state: Any) -> None:
        call(env, state)
        env[output] = Timed.apply(env[output])

    return run


def measure(folder: Path, rate: float, options: dict[str, Any], num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a step, and of one block's update."""
    folder.mkdir(parents=True)
    module, optimizer, batch = module_of(folder, rate, **options)
    taken = []
    busy_s = 0.0
    for step in range(num_steps + 1):
        if step == 1:
            busy_s = module.tier.updates.busy_s
        began = time.perf_counter()
        optimizer.zero_grad()
        module(*batch).loss.backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    update_s = (module.tier.updates.busy_s - busy_s) / num_steps / NUM_BLOCKS
    module.tier.close()
    shutil.rmtree(folder)
    return statistics.median(taken[1:]), update_s


def rows(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    found = []
    for rate in RATES:
        forward_s, backward_s = in_memory(num_steps)
        for name, options in RULES.items():
            step_s, update_s = measure(folder / "cell", rate, options, num_steps)
            policy = Policy(WINDOW_BYTES, options.get("keep_bytes", 0), options.get("update", "during"))
            own, rates = layers(forward_s, backward_s, update_s), Rates(rate, rate)
            predicted = simulate(own, policy, rates)
            found.append(
                {"rate": rate, "rule": name, "step_s": step_s, "predicted_s": predicted.step_s, "compute_s": predicted.compute_s,
                 "bound_s": bound_s(own, policy, rates), "update_s": update_s}
            )  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "# Steps on a disk of declared rates", "", __doc__ or "", "",
        f"{NUM_BLOCKS} blocks, {BLOCK_BYTES / 2**20:g} MiB, forward {FORWARD_S * 1e3:g} ms, backward {BACKWARD_S * 1e3:g} ms.", "",
        "rate, each way | rule | compute | bound | step | step / bound | predicted | exposed, predicted | exposed | ratio",
        "---|---|---|---|---|---|---|---|---|---",
    ]  # fmt: skip
    for row in found:
        exposed, predicted = row["step_s"] - row["compute_s"], row["predicted_s"] - row["compute_s"]
        lines.append(
            f"{row['rate'] / 1e6:g} MB/s | {row['rule']} | {row['compute_s']:.2f} s | {row['bound_s']:.2f} s | "
            f"{row['step_s']:.2f} s | "
            f"{row['step_s'] / row['bound_s']:.3f} | {row['predicted_s']:.2f} s | {predicted:.2f} s | {exposed:.2f} s | "
            f"{exposed / predicted:.2f}"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(Path(options.folder), options.steps)
    print(table(found))
    if options.record:
        RECORD.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        RECORD.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
