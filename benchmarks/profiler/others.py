"""Peak memory and FLOPs as other tools give them, beside ours and the allocator's, on the same models in one run.

    python -m benchmarks.profiler.others [NAME ...] [--out FILE.json]

torchinfo      forward: parameters, input and the outputs of all modules; it knows no backward and no optimizer
accelerate     `estimate-memory`'s rule for training with Adam: four times the parameters
DeepSpeed      its ZeRO-2 estimate of model states for one GPU, nothing offloaded; no activations
MemTracker     torch's own (`torch.distributed._tools`), over two real steps
fvcore         FLOPs of the forward (multiply-adds, hence twice its figure)

Wants `pip install torchinfo accelerate fvcore deepspeed` beside the package. A tool that fails on a model says so in its place.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwright.profiler import measure, profile, reference_step, static_bytes

from .architectures import find

DEFAULT = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mamba", "lstm", "unet")
_ADAM_COPIES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(DEFAULT), help="of benchmarks/profiler/architectures.py")
    parser.add_argument("--out", type=Path, help="write the record there, and a table beside it (.md)")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    record = {
        "command": "python -m benchmarks.profiler.others",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rows": [row(name) for name in arguments.names],
    }
    print(table(record))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
        arguments.out.with_suffix(".md").write_text(table(record), encoding="utf8")


def row(name: str) -> dict[str, Any]:
    """One model: the allocator's peak of a steady-state step, and each tool's answer with the seconds that it took."""
    model, batch, loss_fn = find(name).build()
    optimizer = adamw(model)
    record = measure(lambda: reference_step(model, optimizer, batch, loss_fn))
    found: dict[str, Any] = {
        "model": name,
        "allocator_bytes": static_bytes(model) + record.peak_of_step(1),
        "tools": {},
    }
    for tool, ask in TOOLS.items():
        model, batch, loss_fn = find(name).build()
        begin = time.perf_counter()
        try:
            answer = ask(model, batch, loss_fn)
        except Exception as error:  # a tool that fails is a result
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"}
        found["tools"][tool] = {**answer, "seconds": time.perf_counter() - begin}
    return found


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)


def ours(model: Any, batch: Any, loss_fn: Any) -> dict[str, float]:
    predicted = profile(model, batch, loss_fn=loss_fn)
    return {"peak_bytes": predicted.peak_bytes, "forward_flops": predicted.forward_flops}


def torchinfo(model: Any, batch: Any, loss_fn: Any) -> dict[str, float]:
    import torchinfo

    given = (
        {"input_data": dict(batch)} if isinstance(batch, dict) else {"input_data": tuple(batch)[: num_inputs(model)]}
    )
    found = torchinfo.summary(model, verbose=0, mode="train", **given)
    return {"peak_bytes": found.total_input + found.total_output_bytes + found.total_param_bytes}


def accelerate(model: Any, batch: Any, loss_fn: Any) -> dict[str, float]:
    from accelerate.utils import calculate_maximum_sizes

    return {"peak_bytes": _ADAM_COPIES * calculate_maximum_sizes(model)[0]}


def deepspeed(model: Any, batch: Any, loss_fn: Any) -> dict[str, float]:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    num_params = sum(param.numel() for param in model.parameters())
    _, gpu_bytes = estimate_zero2_model_states_mem_needs(
        num_params, num_gpus_per_node=1, num_nodes=1, cpu_offload=False
    )
    return {"peak_bytes": gpu_bytes}


def mem_tracker(model: Any, batch: Any, loss_fn: Any) -> dict[str, float]:
    from torch.distributed._tools.mem_tracker import MemTracker

    optimizer, tracker = adamw(model), MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        reference_step(model, optimizer, batch, loss_fn)
        tracker.reset_mod_stats()
        reference_step(model, optimizer, batch, loss_fn)
    return {"peak_bytes": sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())}


def fvcore(model: Any, batch: Any, loss_fn: Any) -> dict[str, float]:
    from fvcore.nn import FlopCountAnalysis

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            out = self.model(**dict(zip(batch, values))) if isinstance(batch, dict) else self.model(*values)
            return out.loss if hasattr(out, "loss") else out

    values = tuple(batch.values()) if isinstance(batch, dict) else tuple(batch)[: num_inputs(model)]
    count = FlopCountAnalysis(Forward(), values).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return {"forward_flops": 2 * count.total()}


def num_inputs(model: Any) -> int:
    import inspect

    return len(inspect.signature(model.forward).parameters)


TOOLS: dict[str, Callable[[Any, Any, Any], dict[str, float]]] = {
    "trainwright": ours,
    "MemTracker": mem_tracker,
    "torchinfo": torchinfo,
    "accelerate": accelerate,
    "DeepSpeed": deepspeed,
    "fvcore": fvcore,
}


def table(record: dict[str, Any]) -> str:
    """The record as tables in Markdown: error of the peak, and the forward's FLOPs."""
    tools = [tool for tool in TOOLS if tool != "fvcore"]
    lines = [
        "# Other tools on the same models",
        "",
        f"`{record['command']}` on {record['date']}, {record['machine']}, {record['num_threads']} threads, "
        f"torch {record['torch']}. Small models (`benchmarks/profiler/architectures.py`), AdamW, fp32.",
        "",
        "Error of the peak of a steady-state step against the allocator's records, and the seconds that the answer took:",
        "",
        "| model | allocator | " + " | ".join(tools) + " |",
        "|---|---|" + "---|" * len(tools),
    ]
    for found in record["rows"]:
        cells = [_peak(found["tools"][tool], found["allocator_bytes"]) for tool in tools]
        lines.append(f"| {found['model']} | {found['allocator_bytes'] / 2**20:.2f} MiB | " + " | ".join(cells) + " |")
    lines += ["", "Forward FLOPs:", "", "| model | trainwright | fvcore |", "|---|---|---|"]
    for found in record["rows"]:
        mine, other = found["tools"]["trainwright"], found["tools"]["fvcore"]
        lines.append(f"| {found['model']} | {_flops(mine)} | {_flops(other)} |")
    lines += [
        "",
        "torchinfo's figure is of a forward alone; accelerate's and DeepSpeed's know no activations and are meant for large "
        "models. fvcore leaves out what it does not know (attention in one kernel).",
    ]
    return "\n".join(lines) + "\n"


def _peak(answer: dict[str, Any], truth: int) -> str:
    if "failed" in answer:
        return "failed"
    return f"{answer['peak_bytes'] / truth - 1:+.2%} ({answer['seconds']:.2f} s)"


def _flops(answer: dict[str, Any]) -> str:
    return "failed" if "failed" in answer else f"{answer['forward_flops']:.4g}"


if __name__ == "__main__":
    main()
