"""Runtime behaviour on real ranks, called by `tests/runtime/test_runtime.py`; the process group is initialised."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainwright as tw
from trainwright.artifacts import Plan
from trainwright.models import zoo
from trainwright.runtime.module import full_gradients

LR = 1e-2


def _model(name: str, device: str = "cpu") -> tuple[nn.Module, dict[str, Any]]:
    return zoo.build(name, device=device, dtype="fp64")


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def steps_equal_one_process(plan: str, name: str, clip: float = 0.0, num_steps: int = 3) -> dict[str, float]:
    """Train some steps, clipped, beside one process; the largest difference of a weight, of the loss in evaluation."""
    parsed = Plan.parse(plan)
    model, batch = _model(name)
    alone = _without_dropout(copy.deepcopy(model))
    module = tw.parallelize(model, parsed, seed=0)
    module.use_dropout = False
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LR, foreach=False) for m in (module, alone)]
    part = parsed.shard_batch(batch)
    for _ in range(num_steps):
        for current, optimizer, fed in ((module, optimizers[0], part), (alone, optimizers[1], batch)):
            optimizer.zero_grad()
            current(**fed).loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(current.parameters(), clip)
            optimizer.step()
    found, reference = tw.full_state_dict(module), alone.state_dict()
    worst = max(float((found[key].double() - value.double()).abs().max()) for key, value in reference.items())
    module.eval()
    alone.eval()
    with torch.no_grad():
        difference = abs(float(module(**part).loss) - float(alone(**batch).loss))
    return {"weights": worst, "eval": difference, "num_keys": float(len(set(reference) - set(found)))}


def initialised_alike(plan: str, name: str) -> dict[str, Any]:
    """Initialise a meta model; a digest of the whole weights, and whether any is all zeros that should not be."""
    parsed = Plan.parse(plan)
    module = tw.parallelize(_model(name, "meta")[0], parsed, seed=3)
    found = tw.full_state_dict(module)
    sums = {key: float(value.double().abs().sum()) for key, value in found.items() if value.is_floating_point()}
    local = sum(param.to_local().numel() for param in module.parameters())
    buffers = {key: float(value.double().sum()) for key, value in module.named_buffers()}
    return {"sums": sums, "local": local, "buffers": buffers}


def weights_from_file(plan: str, name: str, folder: str) -> float:
    """Write a model's weights as safetensors on rank 0, read each shard's part; the largest difference."""
    from safetensors.torch import save_file

    parsed = Plan.parse(plan)
    model, _ = _model(name)
    path = Path(folder) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({key: value.contiguous() for key, value in model.named_parameters()}, path)
    dist.barrier()
    module = tw.parallelize(_model(name, "meta")[0], parsed, weights=path, seed=0)
    found = tw.full_state_dict(module)
    return max(float((found[key] - value).abs().max()) for key, value in model.named_parameters())


def dropout_is_reproducible(plan: str, name: str) -> dict[str, float]:
    """Two runs with one seed give one loss, another seed another; gradients are equal, reruns included."""
    parsed = Plan.parse(plan)
    model, batch = _model(name)
    losses, gradients = [], []
    for seed in (5, 5, 6):
        module = tw.parallelize(copy.deepcopy(model), parsed, seed=seed)
        loss = module(**parsed.shard_batch(batch)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(full_gradients(module))
    worst = max(float((gradients[0][key] - value).abs().max()) for key, value in gradients[1].items())
    return {"same": abs(losses[0] - losses[1]), "other": abs(losses[0] - losses[2]), "gradients": worst}
