"""A step at declared rates, against what no order can beat, against the prediction, and against fixed rules.

`python -m benchmarks.tiers.rates DIR [--record]`. A stack of equal blocks whose computation is a sleep of declared length (so
that the cores are the disks' alone), trained by AdamW through the runtime's own residence, updates and store; a token bucket
lets no more bytes a second pass than the table says. The planner is told of a device that computes as long as the sleeps and of
a disk of those rates.

    planned                 what stays is chosen by the planner among what memory has room for; update during the backward
    all states out          nothing stays
    half                    half of what memory has room for: the last blocks with their states
    update after            gradients to the disk, update after the backward, as ZeRO-Infinity orders it; the last blocks stay
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright as tw
from trainwright.artifacts import Tier
from trainwright.hardware import resolve
from trainwright.program.plan_text import decisions_of
from trainwright.runtime import TierOptions
from trainwright.tiers import Layer, Policy, Rates, StoreOptions, bound_s, placed, simulate

RECORD = Path(__file__).parents[1] / "results" / "tiers-rates"
NUM_BLOCKS, WIDTH = 16, 512
FORWARD_S = 0.2
"""Of a block; its backward takes twice as long, but for the first one's, whose input has no gradient."""
BLOCK_BYTES = 4 * WIDTH * WIDTH
WINDOW_BYTES = 16 * BLOCK_BYTES
ROOM_BYTES = 6 * 3 * BLOCK_BYTES
"""What memory has room for beside the window: six blocks with their states."""
RATES = (5e6, 10e6, 40e6)
RULES = {
    "planned": {},
    "all states out": {"keep_bytes": 0},
    "half": {"keep_bytes": ROOM_BYTES // 2},
    "update after": {"update": "after", "keep_bytes": ROOM_BYTES},
}


class Timed(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward_s: float) -> torch.Tensor:
        time.sleep(FORWARD_S)
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None


def layers(update_s: float) -> list[Layer]:
    states = (BLOCK_BYTES, BLOCK_BYTES)
    seconds = [2 * FORWARD_S if block else FORWARD_S for block in range(NUM_BLOCKS)]
    return [Layer(BLOCK_BYTES, states, BLOCK_BYTES, FORWARD_S, backward_s, update_s) for backward_s in seconds]


def hardware(rate: float) -> tw.Cluster:
    """Return a device whose products take what the sleeps take, all else nothing, and a disk of the rate."""
    cluster = resolve("cpu:1")
    device = cluster.device.model_copy(
        update={
            "flops_per_s": {"fp32": 2 * WIDTH * WIDTH / FORWARD_S}, "bandwidth_bytes_per_s": 1e15, "launch_s": 0.0,
        }
    )  # fmt: skip
    disk = Tier(write_bytes_per_s=rate, read_bytes_per_s=rate)
    return cluster.model_copy(update={"device": device, "offload": {"disk": disk}, "fingerprint": ""})


def net_of() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))), (torch.ones(1, WIDTH),)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def plan_of(rate: float, is_planned: bool) -> tw.Plan:
    net, batch = net_of()
    policy = Policy(WINDOW_BYTES, ROOM_BYTES) if is_planned else None
    return tw.plan(net, batch, loss_fn=loss_fn, hardware=hardware(rate), tier=policy)


def module_of(plan: tw.Plan, tier: TierOptions | None) -> Any:
    """Return the planned stack, each block's op taking its time, and its optimizer."""
    net, batch = net_of()
    module = tw.parallelize(net, plan, loss_fn=loss_fn, tier=tier).train()
    executor = module.steps.planned.executor
    num = 0
    for each in executor.local.instructions:
        if "linear" in str(each.key):
            executor.calls[each.index] = timed(executor.calls[each.index], each.outputs[0], num == 0)
            num += 1
    assert num == NUM_BLOCKS
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    if tier is not None:
        module.tier.attach(optimizer)
    return module, optimizer, batch


def timed(call: Any, output: int, is_first: bool) -> Any:
    def run(env: dict[int, Any], state: Any) -> None:
        call(env, state)
        env[output] = Timed.apply(env[output], FORWARD_S if is_first else 2 * FORWARD_S)

    return run


def steps_of(module: Any, optimizer: Any, batch: Any, num_steps: int) -> list[float]:
    taken = []
    for _ in range(num_steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        module(*batch).loss.backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return taken


def in_memory(num_steps: int) -> float:
    """Return the median seconds of a step without a tier: what computes."""
    return statistics.median(steps_of(*module_of(plan_of(RATES[0], False), None), num_steps + 1)[1:])


def measure(
    folder: Path, plan: tw.Plan, rate: float, options: dict[str, Any], num_steps: int
) -> tuple[float, float, float]:
    """Return the median seconds of a step, and the mean ones of a block's update and of a step's commit."""
    folder.mkdir(parents=True)
    # Several threads wait for the bucket at a time, so that one that wakes late costs no bytes of the rate.
    store = StoreOptions(chunk_bytes=2**18, buffer_bytes=2**23, num_threads=6, read_rate=rate, write_rate=rate)
    tier = TierOptions([folder], store=store, **({} if plan.tier else {"window_bytes": WINDOW_BYTES}), **options)
    module, optimizer, batch = module_of(plan, tier)
    steps_of(module, optimizer, batch, 1)
    busy_s, commits = module.tier.updates.busy_s, timed_commits(module.tier.store)
    taken = steps_of(module, optimizer, batch, num_steps)
    update_s = (module.tier.updates.busy_s - busy_s) / num_steps / NUM_BLOCKS
    module.tier.close()
    shutil.rmtree(folder)
    return statistics.median(taken), update_s, statistics.mean(commits)


def timed_commits(store: Any) -> list[float]:
    """Return a list that gets the seconds of each commit: what the disk takes to have everything, and the small file replaced."""
    commit, taken = store.commit, list[float]()

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        commit(*args)
        taken.append(time.perf_counter() - began)

    store.commit = timed
    return taken


def rows(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    found = []
    for rate in RATES:
        compute_s = in_memory(num_steps)
        for name, options in RULES.items():
            plan, rates = plan_of(rate, name == "planned"), Rates(rate, rate)
            step_s, update_s, commit_s = measure(folder / "cell", plan, rate, options, num_steps)
            policy = Policy(WINDOW_BYTES, options.get("keep_bytes", 0), options.get("update", "during"))
            own = placed(layers(update_s), policy) if plan.tier is None else fates(layers(update_s), plan)
            predicted = simulate(own, policy, rates)
            predicted_s = commit_s + (predicted.step_s if plan.tier is None else plan.predicted.step_s)
            found.append(
                {"rate": rate, "rule": name, "step_s": step_s, "in_memory_s": compute_s, "predicted_s": predicted_s,
                 "compute_s": predicted.compute_s, "bound_s": bound_s(own, policy, rates), "update_s": update_s,
                    "commit_s": commit_s,
                 "stays": kept_text(plan, own)}
            )  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def fates(own: list[Layer], plan: tw.Plan) -> list[Layer]:
    """Return the layers with what the plan lets stay in memory."""
    module, _, _ = module_of(plan.in_memory(), None)
    names = [name for name, _ in module.named_parameters()]
    decisions = decisions_of(module.program, plan)
    values = {tensor.key for tensor in decisions.offloaded_params}
    states = {tensor.key for tensor in decisions.offloaded_states}
    return [
        replace(layer, param_stays=name not in values, states_stay=name not in states)
        for layer, name in zip(own, names, strict=True)
    ]


def kept_text(plan: tw.Plan, own: list[Layer]) -> str:
    return f"{sum(each.param_stays for each in own)} blocks, {sum(each.states_stay for each in own)} blocks' states"


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "# Steps on a disk of declared rates", "", __doc__ or "", "",
        f"{NUM_BLOCKS} blocks, {BLOCK_BYTES / 2**20:g} MiB, forward {FORWARD_S * 1e3:g} ms, backward {2 * FORWARD_S * 1e3:g} ms;",
        "*in memory* is the step without disks, measured beside the others: what of a step is exposed is what it takes longer.",
        "Seconds of updates and of commits (`fsync`, and a small file replaced) are measured and part of what is predicted.", "",
        "rate | rule | stays | in memory | bound | commit | step | step / bound | predicted | exposed, predicted | exposed | ratio",
        "---|---|---|---|---|---|---|---|---|---|---|---",
    ]  # fmt: skip
    for row in found:
        exposed, predicted = row["step_s"] - row["in_memory_s"], row["predicted_s"] - row["compute_s"]
        lines.append(
            f"{row['rate'] / 1e6:g} MB/s | {row['rule']} | {row['stays']} | {row['in_memory_s']:.2f} s | "
            f"{row['bound_s']:.2f} s | {row['commit_s']:.2f} s | "
            f"{row['step_s']:.2f} s | "
            f"{row['step_s'] / row['bound_s']:.3f} | {row['predicted_s']:.2f} s | {predicted:.2f} s | {exposed:.2f} s | "
            f"{exposed / predicted:.2f}"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=2)
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
