"""A step at declared rates, against what no order can beat, against the prediction, and against fixed rules.

`python -m benchmarks.tiers.rates DIR [--record]`. A stack of equal blocks whose computation is a sleep of declared length (so
that the cores are the disks' alone; one that wakes late makes the next one shorter), trained by AdamW through the runtime's own
residence, updates and store; a token bucket lets no more bytes a second pass than the table says. The planner is told of a device
that computes as long as the sleeps and of a disk of those rates. Every cell is a process of its own; all run at the same time, so
that other load on the machine is the same for all.

    planned                 what stays is chosen by the planner among what memory has room for; update during the backward
    planned, host           the same in the host's memory, which is as fast as the disk here, and never gets what stays
    all states out          nothing stays
    half                    half of what memory has room for: the last blocks with their states
    update after            gradients to the disk, update after the backward, as ZeRO-Infinity orders it; the last blocks stay
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright as tw
from benchmarks.solvers import record
from trainwright.artifacts import Tier
from trainwright.hardware import resolve
from trainwright.program.plan_text import decisions_of
from trainwright.runtime import TierOptions
from trainwright.tiers import Layer, Policy, Rates, StoreOptions, bound_s, placed, simulate

NUM_BLOCKS, WIDTH = 16, 512
FORWARD_S = 0.8
"""Of a block; its backward takes twice as long, but for the first one's, whose input has no gradient."""
BLOCK_BYTES = 4 * WIDTH * WIDTH
WINDOW_BYTES = 16 * BLOCK_BYTES
ROOM_BYTES = 6 * 3 * BLOCK_BYTES
"""What memory has room for beside the window: six blocks with their states."""
RATES = (1.25e6, 2.5e6, 10e6)
RULES = {
    "planned": {},
    "planned, host": {"host": True},
    "all states out": {"keep_bytes": 0},
    "half": {"keep_bytes": ROOM_BYTES // 2},
    "update after": {"update": "after", "keep_bytes": ROOM_BYTES},
}


class Timed(torch.autograd.Function):
    """Takes its time in both directions, with the block's weight in memory, as a product would."""

    late_s = 0.0
    """The seconds by which the sleeps so far were longer than declared."""

    @classmethod
    def compute(cls, seconds: float) -> None:
        """Sleep so long that all sleeps together take what was declared."""
        began = time.perf_counter()
        time.sleep(max(0.0, seconds - cls.late_s))
        cls.late_s += time.perf_counter() - began - seconds

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, backward_s: float) -> torch.Tensor:
        Timed.compute(FORWARD_S)
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (_,) = ctx.saved_tensors
        Timed.compute(ctx.backward_s)
        return grads[0], None, None


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
    return cluster.model_copy(update={"device": device, "offload": {"disk": disk, "host": disk}, "fingerprint": ""})


def net_of() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))), (torch.ones(1, WIDTH),)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def plan_of(rate: float, is_planned: bool, place: str = "disk") -> tw.Plan:
    net, batch = net_of()
    policy = Policy(WINDOW_BYTES, ROOM_BYTES, place=place) if is_planned else None
    return tw.plan(net, batch, loss_fn=loss_fn, hardware=hardware(rate), tier=policy)


def module_of(plan: tw.Plan, tier: TierOptions | None) -> Any:
    """Return the planned stack, each block's op taking its time, and its optimizer."""
    net, batch = net_of()
    module = tw.parallelize(net, plan, loss_fn=loss_fn, tier=tier).train()
    executor = module.steps.planned.executor
    num = 0
    for each in executor.local.instructions:
        if "linear" in str(each.key):
            executor.calls[each.index] = timed(executor.calls[each.index], each, num == 0)
            num += 1
    assert num == NUM_BLOCKS
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    if tier is not None:
        module.tier.attach(optimizer)
    return module, optimizer, batch


def timed(call: Any, instruction: Any, is_first: bool) -> Any:
    _, weight = instruction.inputs
    (output,) = instruction.outputs

    def run(env: dict[int, Any], state: Any) -> None:
        call(env, state)
        env[output] = Timed.apply(env[output], env[weight], FORWARD_S if is_first else 2 * FORWARD_S)

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


def in_memory(num_steps: int) -> dict[str, Any]:
    """Return the seconds of steps without a tier: what computes."""
    return {"steps_s": steps_of(*module_of(plan_of(RATES[0], False), None), num_steps + 1)[1:]}


def cell(folder: Path, rate: float, name: str, num_steps: int) -> dict[str, Any]:
    """Measure one rule at one rate, and predict it with the seconds of updates and commits that were measured."""
    options, place = RULES[name], "host" if "host" in RULES[name] else "disk"
    plan = plan_of(rate, name.startswith("planned"), place)
    folder.mkdir(parents=True)
    # Several threads wait for the bucket at a time, so that one that wakes late costs no bytes of the rate.
    store = StoreOptions(chunk_bytes=2**18, buffer_bytes=2**23, num_threads=6, read_rate=rate, write_rate=rate)
    folders = [folder] if place == "disk" else []
    tier = TierOptions(folders, store=store, **({} if plan.tier else {"window_bytes": WINDOW_BYTES}), **options)
    module, optimizer, batch = module_of(plan, tier)
    steps_of(module, optimizer, batch, 1)
    busy_s, commits = module.tier.updates.busy_s, timed_commits(module.tier.store)
    taken = steps_of(module, optimizer, batch, num_steps)
    update_s = (module.tier.updates.busy_s - busy_s) / num_steps / NUM_BLOCKS
    module.tier.close()
    shutil.rmtree(folder)
    policy = Policy(WINDOW_BYTES, options.get("keep_bytes", 0), options.get("update", "during"), place=place)
    own = placed(layers(update_s), policy) if plan.tier is None else fates(layers(update_s), plan)
    commit_s = statistics.mean(commits or [0.0])
    rates = Rates(rate, rate, commit_s)
    predicted = simulate(own, policy, rates)
    return {
        "rate": rate, "rule": name, "steps_s": taken, "predicted_s": predicted.step_s, "compute_s": predicted.compute_s,
        "bound_s": bound_s(own, policy, rates), "update_s": update_s, "commit_s": commit_s, "stays": kept_text(plan, own),
    }  # fmt: skip


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
    """Run all cells at the same time, and the step without a tier beside them."""
    cells = ["memory", *(f"{rate}:{name}" for rate in RATES for name in RULES)]
    command = [sys.executable, "-m", "benchmarks.tiers.rates", str(folder), "--steps", str(num_steps), "--cell"]
    begun = [subprocess.Popen([*command, each], stdout=subprocess.PIPE, text=True) for each in cells]
    told = [json.loads(each.communicate()[0].splitlines()[-1]) for each in begun]
    compute_s, load = statistics.median(told[0]["steps_s"]), os.getloadavg()[1]
    found = [{**each, "step_s": statistics.median(each["steps_s"]), "in_memory_s": compute_s} for each in told[1:]]
    for each in found:
        planned = next(other for other in found if other["rule"] == "planned" and other["rate"] == each["rate"])
        pairs = zip(planned["steps_s"], each["steps_s"], strict=True)
        each["planned_over"], each["load"] = sorted(own / other for own, other in pairs), load
    return found


def of_cell(folder: Path, text: str, num_steps: int) -> dict[str, Any]:
    if text == "memory":
        return in_memory(num_steps)
    rate, name = text.split(":")
    return cell(folder / text.replace(" ", "-"), float(rate), name, num_steps)


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
        "Seconds of updates and of commits (`fsync`, and a small file replaced) are measured and part of what is predicted.",
        f"Medians of {len(found[0]['steps_s'])} steps; *planned / rule* pairs steps of one number, which ran at the same time:",
        f"median (least to most). The machine's load over five minutes was {found[0]['load']:.1f} on {os.cpu_count()} cores.", "",
        "rate | rule | stays | in memory | bound | commit | step | step / bound | predicted | "
        "exposed, predicted | exposed | ratio | planned / rule",
        "---|---|---|---|---|---|---|---|---|---|---|---|---",
    ]  # fmt: skip
    for row in found:
        exposed, predicted, pairs = (
            row["step_s"] - row["in_memory_s"],
            row["predicted_s"] - row["compute_s"],
            row["planned_over"],
        )
        lines.append(
            f"{row['rate'] / 1e6:g} MB/s | {row['rule']} | {row['stays']} | {row['in_memory_s']:.2f} s | "
            f"{row['bound_s']:.2f} s | {row['commit_s']:.2f} s | "
            f"{row['step_s']:.2f} s | "
            f"{row['step_s'] / row['bound_s']:.3f} | {row['predicted_s']:.2f} s | {predicted:.2f} s | {exposed:.2f} s | "
            f"{exposed / predicted:.2f} | {statistics.median(pairs):.4f} ({pairs[0]:.4f} to {pairs[-1]:.4f})"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cell:
        print(json.dumps(of_cell(Path(options.folder), options.cell, options.steps)))
        return
    found = rows(Path(options.folder), options.steps)
    record.write_text("tiers-rates", found, table(found), options.record)


if __name__ == "__main__":
    main()
