"""LoRA adapters over a frozen base on real ranks, called by `tests/runtime/test_lora.py`; the process group is initialised."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model

import trainwright as tw
from tests.checkpoint_cases import DROPOUT_OFF
from trainwright.artifacts import Plan, Report
from trainwright.models import zoo
from trainwright.runtime import Checkpointer
from trainwright.runtime import verify as compare

NUM_STEPS = 3


def base(name: str, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(1)
    return zoo.build(name, device=device, dtype="fp64", batch_size=4, **DROPOUT_OFF[name])


def build(name: str, device: str = "cpu", begin: bool = True) -> tuple[PeftModel, dict[str, Any]]:
    """A wrapped model whose adapters, with `begin` false, are no longer zero, so that every weight has a gradient."""
    model, batch = base(name, device)
    gpt2 = name.startswith("gpt2")
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["c_attn", "c_fc"] if gpt2 else ["q_proj", "v_proj", "down_proj"],
            fan_in_fan_out=gpt2,
            task_type="CAUSAL_LM",
        ),
    )
    wrapped = wrapped.double()
    if not begin:
        torch.manual_seed(2)
        for key, param in wrapped.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(param, std=0.02)
    return wrapped, batch


def verified(plan: str, name: str) -> dict[str, Any]:
    """The report of `verify`, on a model whose adapters have moved."""
    parsed = Plan.parse(plan)
    report: Report = compare(
        lambda: build(name, begin=False), parsed, make_optimizer=lambda params: torch.optim.AdamW(params, foreach=False)
    )
    return report.model_dump(mode="json")


def trained(plan: str, name: str) -> dict[str, Any]:
    """Train beside one process: the largest difference of an adapter's weight, and what became of the base."""
    parsed = Plan.parse(plan)
    wrapped, batch = build(name)
    alone = copy.deepcopy(wrapped)
    module = tw.parallelize(wrapped, parsed, seed=0)
    part = parsed.shard_batch(batch)
    for current, fed in ((module, part), (alone, batch)):
        optimizer = torch.optim.AdamW(current.parameters(), lr=1e-2, foreach=False)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            current(**fed).loss.backward()
            optimizer.step()
    frozen = {key: param for key, param in module.named_parameters() if not param.requires_grad}
    found, reference = tw.full_state_dict(module), alone.state_dict()
    adapter = tw.full_state_dict(module, trainable=True)
    return {
        "same_names": set(found) == set(reference),
        "adapter_names": sorted(adapter) == sorted(key for key, p in alone.named_parameters() if p.requires_grad),
        "frozen_gradients": sum(param.grad is not None for param in frozen.values()),
        "states": len(optimizer.state),
        "frozen_moved": sum(
            not torch.equal(found[key], value) for key, value in wrapped.named_parameters() if key in frozen
        ),
        "moved": sum(
            not torch.equal(adapter[key], value) for key, value in wrapped.named_parameters() if key in adapter
        ),
        "num_adapters": len(adapter),
        "worst": max(float((adapter[key] - reference[key]).abs().max()) for key in adapter),
        "share": sum(p.to_local().numel() for p in frozen.values()) / sum(p.numel() for p in frozen.values()),
    }


def saves(plan: str, name: str, folder: str) -> float:
    """Train, save the adapter through PEFT and through a checkpoint; the loss that both should give elsewhere."""
    parsed = Plan.parse(plan)
    wrapped, batch = build(name)
    module = tw.parallelize(wrapped, parsed, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    part = parsed.shard_batch(batch)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        module(**part).loss.backward()
        optimizer.step()
    adapter = tw.full_state_dict(module, trainable=True)
    if dist.get_rank() == 0:
        wrapped.save_pretrained(Path(folder) / "own", state_dict=adapter)
    with Checkpointer(Path(folder) / "saved", module, optimizer) as checkpointer:
        checkpointer.save(NUM_STEPS - 1)
    with torch.no_grad():
        return float(module(**part).loss)


def example(plan_path: str, folder: str) -> str:
    """Run `examples/lora.py` as its own last lines do, on these ranks; what it prints."""
    path = Path(__file__).parent.parent / "examples" / "lora.py"
    spec = importlib.util.spec_from_file_location("lora_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module.main(plan_path, folder)
    dist.barrier()
    return printed.getvalue()


def begins_on_meta(plan: str, name: str, folder: str) -> dict[str, Any]:
    """Read the base from files into a model on the meta device: how its adapters begin, and the first loss."""
    from safetensors.torch import save_file

    parsed, path = Plan.parse(plan), Path(folder) / "base.safetensors"
    real, batch = base(name)
    if dist.get_rank() == 0:
        save_file({key: value.contiguous() for key, value in real.named_parameters()}, path)
    dist.barrier()
    module = tw.parallelize(build(name, device="meta")[0], parsed, weights=path, seed=0)
    values = tw.full_state_dict(module, trainable=True)
    with torch.no_grad():
        losses = float(module(**parsed.shard_batch(batch)).loss), float(real(**batch).loss)
    bounds = [float(v.abs().max()) * v.shape[1] ** 0.5 for key, v in values.items() if "lora_A" in key]
    return {
        "ups": sum(int(value.count_nonzero()) for key, value in values.items() if "lora_B" in key),
        "downs": [min(bounds), max(bounds)],
        "difference": abs(losses[0] - losses[1]) / losses[1],
    }
