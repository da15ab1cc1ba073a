"""Steps of models with OPT's shapes whose blocks rest in bf16 on the host or a disk: time, traffic, peaks.

    python -m benchmarks.streaming.large 1.3b host
    python -m benchmarks.streaming.large 6.7b DIR --steps 2

The values are random; a step takes as long as with trained ones. The device is the CPU; its peak is what the memory tracker counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from trainwright.optim.mezo import MeZO
from trainwright.streaming import DiskStore, HostStore, Streamed, peak_of_step, predicted_peak, without_values

SHAPES = {"125m": (768, 12, 12), "1.3b": (2048, 24, 32), "6.7b": (4096, 32, 32)}


def build(name: str) -> Any:
    """Return an OPT of that size without values."""
    from transformers import OPTConfig, OPTForCausalLM

    width, depth, heads = SHAPES[name]
    config = OPTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        word_embed_proj_dim=width,
    )
    with without_values():
        return OPTForCausalLM(config)


def values(name: str, param: torch.nn.Parameter) -> torch.Tensor:
    """Return small random values; norms begin at 1, biases at 0."""
    if param.dim() > 1:
        return torch.empty(param.shape).normal_(0, 0.02)
    return torch.ones(param.shape) if "norm" in name and "weight" in name else torch.zeros(param.shape)


def main() -> None:
    """Take the steps and print a row of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("place", help="host, or an empty directory")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = build(asked.size).train(False)
    num_params = sum(param.numel() for param in model.parameters())
    ids = torch.randint(50_000, (1, asked.tokens))
    predicted = predicted_peak(
        model, ids, lambda model, ids: model(input_ids=ids, labels=ids).loss, storage=torch.bfloat16
    )
    store: Any = HostStore() if asked.place == "host" else DiskStore([asked.place])
    optimizer = MeZO(model.parameters(), lr=1e-7)
    begun = time.perf_counter()
    streamed = Streamed(model, optimizer, store, storage=torch.bfloat16, source=values, in_turns=True)
    largest = max(streamed.resting.num_bytes.values())
    head = {
        "model": asked.size, "place": asked.place, "params": num_params, "laid_down_s": round(time.perf_counter() - begun, 1),
        "block_bytes": largest, "predicted_peak": predicted,
    }  # fmt: skip
    print(json.dumps(head), flush=True)
    try:
        for step in range(asked.steps):
            read, written, begun = streamed.resting.num_read, streamed.resting.num_written, time.perf_counter()
            cpu_s = time.process_time()
            peak = peak_of_step(streamed, lambda: streamed.step(lambda: model(input_ids=ids, labels=ids).loss), ids)
            step_s = time.perf_counter() - begun
            row = {
                "step": step + 1, "slope": optimizer.slope, "step_s": round(step_s, 1),
                "cpu_s": round(time.process_time() - cpu_s, 1),
                "read": streamed.resting.num_read - read, "written": streamed.resting.num_written - written,
                "peak": peak, "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "io": Path("/proc/self/io").read_text(encoding="utf8").split()[9::2],
            }  # fmt: skip
            print(json.dumps(row), flush=True)
    finally:
        if isinstance(store, DiskStore):
            store.close()


if __name__ == "__main__":
    main()
