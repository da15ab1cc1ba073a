"""Llama-3-8B on long sequences: what is planned for 64 H100, and what other splits of attention would take.

    python -m benchmarks.planner.long_contexts [--only WORD]

TFLOP/s count 6 FLOPs a parameter and token (embeddings not), and causal attention's half square; reruns do not count. Seconds of a
step are the cost model's; nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import trainwright as tw
from trainwright.artifacts import Refusal

MODEL = "llama-3-8b"
ATTENTION = "*self_attn:sdpa"
QUESTIONS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "128k": ("8x8xh100", 8, 131072, ()),
    "1M": ("8x8xh100", 1, 1048576, ()),
    "1M rows alone": ("8x8xh100", 1, 1048576, ("shard(q)@node", "shard(q)@gpu")),
    "1M heads over nodes": ("8x8xh100", 1, 1048576, ("shard(h)@node", "shard(q)@gpu")),
    "128k one node": ("8xh100", 1, 131072, ()),
    "2M": ("8x8xh100", 1, 2097152, ()),
}
"""By name: hardware, sequences, their length, and what attention's split is pinned to."""
RESULT = Path(__file__).parent.parent / "results" / "planner-long-contexts.jsonl"


def flops_of(config: Any, num_params: int, num_tokens: int, length: int) -> float:
    """Return the FLOPs of one step, forward and backward."""
    dense = num_params - config.vocab_size * config.hidden_size
    return num_tokens * (6.0 * dense + 6.0 * config.num_hidden_layers * length * config.hidden_size)


def row(name: str, time_limit_s: float) -> dict[str, Any]:
    """Answer one question."""
    hardware, sequences, length, pins = QUESTIONS[name]
    model, batch = tw.zoo.build(MODEL, batch_size=sequences, seq_len=length, dtype="bf16")
    found: dict[str, Any] = {"question": name, "hardware": hardware, "sequences": sequences, "length": length}
    cpu = time.process_time()
    mesh = tuple(int(size) for size in hardware.split("x")[:-1])
    named = {"hardware": hardware, "time_limit_s": time_limit_s, "mesh": mesh}
    try:
        plan = tw.plan(model, batch, pins=tuple(f"{ATTENTION}={pin}" for pin in pins), **named)
    except Refusal as refusal:
        return {**found, "refused": str(refusal), "cpu_s": round(time.process_time() - cpu, 1)}
    flops = flops_of(model.config, sum(p.numel() for p in model.parameters()), sequences * length, length)
    attention = [op for key, op in plan.modules.items() if key.endswith(":sdpa")]
    return {
        **found,
        "attention": sorted({" ".join(op.split) for op in attention}),
        "loss_chunks": plan.loss_chunks,
        "step_s": plan.predicted.step_s,
        "tflops_a_gpu": flops / plan.num_ranks / plan.predicted.step_s / 1e12,
        "exposed_comm_s": plan.predicted.exposed_comm_s,
        "recompute_s": plan.predicted.recompute_s,
        "peak_gib": plan.predicted.peak_bytes / 2**30,
        "gap": plan.solver.gap,
        "cpu_s": round(time.process_time() - cpu, 1),
    }


def main() -> None:
    """Print and keep a row for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the questions whose name has this word")
    parser.add_argument("--time-limit", type=float, default=30.0)
    asked = parser.parse_args()
    for name in QUESTIONS:
        if asked.only in name:
            text = json.dumps(row(name, asked.time_limit))
            print(text, flush=True)
            with RESULT.open("a", encoding="utf8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
