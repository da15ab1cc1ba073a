"""GPT-2 XL, 25 GB of fp32 weights, gradients and AdamW states, on disks: `python -m benchmarks.tiers.gpt2_xl DIR`.

A process of its own, whose memory is limited (RLIMIT_DATA: heap, stacks and private mappings, all that torch takes), plans
within what the limit leaves beside the interpreter, builds the model in files, and trains as the plan says. Its disk traffic is
held against the plan by /proc/self/io, from the second step on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30


def io_bytes() -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def memory_of(name: str) -> int:
    """Return a line of this process's status: VmHWM (largest resident set), VmData (what RLIMIT_DATA limits), RssAnon."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def stage(found: dict[str, Any], name: str) -> None:
    """Keep what the process holds at this point, and say so."""
    found[name] = {each: memory_of(each) for each in ("VmData", "RssAnon", "VmHWM")}
    shown = ", ".join(f"{each} {num_bytes / GIB:.2f}" for each, num_bytes in found[name].items())
    print(f"{time.strftime('%H:%M:%S')} {name}: {shown} GiB", file=sys.stderr, flush=True)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Run in the limited process; return what was planned and measured."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(options.limit * GIB),) * 2)
    import torch

    import trainwright as tw
    from trainwright.models import zoo
    from trainwright.runtime import TierOptions
    from trainwright.tiers import Policy
    from trainwright.training import built_on, made, optimizer_of

    stages: dict[str, Any] = {}
    stage(stages, "imported")
    began = time.perf_counter()
    fewer: dict[str, Any] = {} if options.layers is None else {"num_hidden_layers": options.layers}
    name, shape = options.model.removeprefix("zoo:"), {"batch_size": options.batch, "seq_len": options.length, **fewer}
    example_model, example = zoo.build(name, **shape)
    num_params = sum(param.numel() for param in example_model.parameters())
    budget = int((options.limit - options.beside) * GIB)
    policy = Policy(int(options.window * GIB))
    plan = tw.plan(example_model, example, hardware="cpu:1", memory=budget, time_limit_s=60.0, tier=policy)
    planned_s = time.perf_counter() - began
    stage(stages, "planned")
    tier = TierOptions([options.folder])
    with built_on(tier):
        model, _ = zoo.build(name, device="cpu", **shape)
    stage(stages, "built")
    module = tw.parallelize(model, plan, seed=0, tier=tier).train()
    chosen, _ = optimizer_of(plan, model=model)
    optimizer = made(chosen, module, 1e-4)
    assert module.tier is not None
    module.tier.attach(optimizer)
    loaded_s = time.perf_counter() - began - planned_s
    stage(stages, "loaded")
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (options.batch, options.length))
    batch = {name: ids if name in ("input_ids", "labels") else torch.ones_like(ids) for name in plan.batch}
    steps = []
    for step in range(options.steps):
        module.tier.told()
        before, began_step = io_bytes(), time.perf_counter()
        loss = module(**plan.shard_batch(batch)).loss
        stage(stages, f"forward {step}")
        loss.backward()
        stage(stages, f"backward {step}")
        optimizer.step()
        told = module.tier.told()
        read, written = (now - then for now, then in zip(io_bytes(), before, strict=True))
        steps.append(
            {
                "step": step,
                "loss": loss.item(),
                "step_s": time.perf_counter() - began_step,
                "read": read,
                "written": written,
                **{name: value for name, value in told.items() if name != "tier_rates"},
            }
        )
        print(json.dumps(steps[-1]), file=sys.stderr, flush=True)
    moved = module.tier.planned()
    found = {
        "model": options.model, "num_params": num_params, "limit_gib": options.limit, "peak_rss": memory_of("VmHWM"),
        "stages": stages, "planned_s": planned_s, "loaded_s": loaded_s,
        "planned_read": moved.read_bytes, "planned_written": moved.written_bytes,
        "planned_peak": plan.predicted.peak_bytes, "kept": plan.tier.keep_bytes if plan.tier else 0,
        "recompute_s": plan.predicted.recompute_s, "moved": plan.predicted.moved_bytes,
        "on_disk": module.tier.store.num_bytes, "direct": module.tier.store.is_direct, "window_gib": options.window,
        "arguments": [each for each in sys.argv[2:] if each not in ("--inside", "--record")],
        "batch": options.batch, "length": options.length, "threads": torch.get_num_threads(), "steps": steps,
        "written_a_day": moved.written_a_day(steps[-1]["step_s"]),
    }  # fmt: skip
    module.tier.close()
    module.tier.store.remove()
    return found


def table(found: dict[str, Any]) -> str:
    rows = []
    for each in found["steps"]:
        against = [each[name] / found[f"planned_{name}"] - 1 for name in ("read", "written")]
        rows.append(
            f"{each['step']} | {each['loss']:.4f} | {each['step_s']:.0f} s | {each['tier_waited_s']:.0f} s | "
            f"{each['read'] / 1e9:.3f} | {against[0]:+.2%} | {each['written'] / 1e9:.3f} | {against[1]:+.2%}"
        )
    held = [
        f"{name} | {each['VmData'] / GIB:.2f} | {each['RssAnon'] / GIB:.2f} | {each['VmHWM'] / GIB:.2f}"
        for name, each in found["stages"].items()
    ]
    command = " ".join(["python -m benchmarks.tiers.gpt2_xl DIR", *found["arguments"]])
    return "\n".join(
        [
            f"# {found['model']} on a disk", "",
            f"`{command}`; batch {found['batch']} × {found['length']},",
            f"{found['num_params'] / 1e9:.3f} B parameters, fp32 AdamW; RLIMIT_DATA {found['limit_gib']:g} GiB,",
            f"window {found['window_gib']:g} GiB, {found['threads']} threads, past the page cache: {found['direct']}. The",
            "machine's two cores were shared with other work: the seconds say that they passed, the bytes are exact.", "",
            f"Largest resident set: {found['peak_rss'] / GIB:.2f} GiB, with pages of the files in which the model is built, which",
            "the system takes back where memory is short and RLIMIT_DATA does not count.",
            f"On disk, both versions: {found['on_disk'] / 1e9:.1f} GB.",
            f"Planned: a peak of {found['planned_peak'] / GIB:.2f} GiB, {found['kept'] / GIB:.2f} of which are what stays.",
            f"A step is planned to read {found['planned_read'] / 1e9:.3f} GB and to write {found['planned_written'] / 1e9:.3f} GB,",
            f"{found['written_a_day'] / 1e12:.2f} TB a day at this pace. The first step has no states to read.",
            f"{found['moved'] / 1e9:.3f} GB of these are activations. The columns are of /proc/self/io: what the system says",
            "has reached the disk. By the threads that move the bytes, the last step read",
            f"{found['steps'][-1]['tier_read_bytes'] / found['planned_read'] - 1:+.2%} and wrote "
            f"{found['steps'][-1]['tier_write_bytes'] / found['planned_written'] - 1:+.2%} against the plan.", "",
            "step | loss | step | waited for the disk | read, GB | against plan | written, GB | against plan",
            "---|---|---|---|---|---|---|---", *rows, "",
            f"Planned in {found['planned_s']:.0f} s, loaded in {found['loaded_s']:.0f} s, both inside the limit. In GiB:", "",
            "at | counted by RLIMIT_DATA | resident, anonymous | largest resident set so far", "---|---|---|---", *held, "",
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--model", default="zoo:gpt2-xl")
    parser.add_argument("--layers", type=int, help="fewer of them: with a smaller limit the same in minutes")
    parser.add_argument("--limit", type=float, default=6.0, help="GiB")
    parser.add_argument("--window", type=float, default=1.0, help="GiB")
    parser.add_argument("--beside", type=float, default=1.0, help="GiB of the limit for what is not the plan's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--inside", action="store_true")
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(train(options)))
        return
    from benchmarks.solvers import record

    command = [sys.executable, "-m", "benchmarks.tiers.gpt2_xl", *sys.argv[1:], "--inside"]
    found = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=dict(os.environ)).stdout.splitlines()[-1]
    )
    record.write_text("tiers-gpt2-xl", found, table(found), options.record)


if __name__ == "__main__":
    main()
