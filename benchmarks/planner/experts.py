"""Mixtures of experts on 64 H100: what is planned, in what time, beside what Megatron-Core publishes for Mixtral.

    python -m benchmarks.planner.experts [MODEL …] [--splits]

TFLOP/s count what a dense step of the active parameters takes, 6 a parameter and token, and causal attention's half square;
reruns and the embedding's lookup do not count. Seconds of a step are the cost model's; nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from torch import nn

import trainwright as tw
from trainwright.artifacts import Refusal

HARDWARE, SEQUENCES, LENGTH = "8x8xh100", 64, 4096
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
SETTINGS: dict[str, dict[str, Any]] = {"deepseek-v3": {"num_hidden_layers": 16}}
"""All 61 layers take 8 bytes a parameter, 78 GiB a device for the parameters, gradients and moments alone."""
SPLITS = {"mixtral-8x7b": ("f", "e", "t.0+e", "t.0")}
RESULT = Path(__file__).parent.parent / "results" / "planner-experts.jsonl"


def flops_of(model: nn.Module, num_tokens: int, length: int) -> float:
    """Return the FLOPs of one step, forward and backward."""
    config: Any = model.config
    total = sum(parameter.numel() for parameter in model.parameters()) - config.vocab_size * config.hidden_size
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3)
    num = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or config.n_routed_experts
    active = total - routed * (1 - config.num_experts_per_tok / num)
    keys = (
        getattr(config, "qk_head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    width = config.num_attention_heads * (keys + (getattr(config, "v_head_dim", None) or keys))
    return num_tokens * (6 * active + 3 * config.num_hidden_layers * length * width)


def row(name: str, split: str | None, imbalance: float, time_limit_s: float) -> dict[str, Any]:
    """Plan one model, its experts' split along the GPUs of a node free or pinned."""
    model, batch = tw.zoo.build(name, batch_size=SEQUENCES, seq_len=LENGTH, dtype="bf16", **SETTINGS.get(name, {}))
    found = {"model": name, **SETTINGS.get(name, {}), "split": split or "free", "imbalance": imbalance}
    pins = () if split is None else (f"*experts:experts=shard({split})@gpu",)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        plan = tw.plan(
            model,
            batch,
            hardware=HARDWARE,
            pins=pins,
            expert_imbalance=imbalance,
            time_limit_s=time_limit_s,
            mesh=(8, 8),
        )
    except Refusal as refusal:
        return {**found, "refused": str(refusal), "cpu_s": round(time.process_time() - cpu, 1)}
    flops = flops_of(model, SEQUENCES * LENGTH, LENGTH)
    return {
        **found,
        "chosen": sorted({" ".join(op.split) for key, op in plan.modules.items() if key.endswith(":experts")}),
        "step_s": plan.predicted.step_s,
        "tflops_a_gpu": flops / plan.num_ranks / plan.predicted.step_s / 1e12,
        "exposed_comm_s": plan.predicted.exposed_comm_s,
        "peak_gib": plan.predicted.peak_bytes / 2**30,
        "gap": plan.solver.gap,
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }


def main() -> None:
    """Print and keep a row for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--splits", action="store_true")
    parser.add_argument("--imbalance", type=float, default=1.25)
    parser.add_argument("--time-limit", type=float, default=30.0)
    asked = parser.parse_args()
    for name in asked.models:
        for split in SPLITS.get(name, ()) if asked.splits else (None,):
            text = json.dumps(row(name, split, asked.imbalance, asked.time_limit))
            print(text, flush=True)
            with RESULT.open("a", encoding="utf8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
