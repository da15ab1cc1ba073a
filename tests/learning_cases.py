"""Schedules, held-out losses, growing batches and per-sample gradients on real ranks; the process group is initialised."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import trainwright as tw
from tests.second_derivative_cases import Words
from trainwright.artifacts import Plan
from trainwright.runtime import sample_gradients

NUM_STEPS = 6


def build() -> dict[str, Any]:
    torch.manual_seed(2)
    model = nn.Sequential(Words(), nn.Dropout(0.1)).double()
    data = [(torch.randint(12, (8, 5)), torch.arange(8) % 6) for _ in range(40)]
    return {
        "model": model, "batch": data[0], "loss_fn": nn.CrossEntropyLoss(), "data": data,
        "eval_batch": (torch.randint(12, (4, 5)), torch.arange(4)),
    }  # fmt: skip


def resumes_as_uninterrupted(plan: str, folder: str, **learning: Any) -> dict[str, Any]:
    """Go on from the middle of a run; tell how the losses, rates and weights differ from the run's own."""
    import torch.distributed as dist

    parsed = Plan.parse(plan)
    whole, half = Path(folder) / "whole", Path(folder) / "half"
    seen: dict[str, list[dict[str, Any]]] = {"whole": [], "half": []}
    common = {"steps": NUM_STEPS, "lr": 0.05, "eval_every": 2, **learning}
    run = tw.train(build, parsed, checkpoint=whole, checkpoint_every=3, keep=5, on_step=seen["whole"].append, **common)
    if dist.get_rank() == 0:
        half.mkdir()
        shutil.copytree(next(whole.glob("step-*2")), half / next(whole.glob("step-*2")).name)
    dist.barrier()
    again = tw.train(build, parsed, checkpoint=half, resume=True, on_step=seen["half"].append, **common)
    weights = tw.full_state_dict(run.model)
    return {
        "first_step": again.first_step,
        "same_weights": all(
            torch.equal(value, weights[name]) for name, value in tw.full_state_dict(again.model).items()
        ),
        "same_losses": list(run.losses[3:]) == list(again.losses),
        "rates": [event["lr"] for event in seen["whole"]],
        "later_rates": [event["lr"] for event in seen["half"]],
        "held_out": [event.get("eval_loss") for event in seen["whole"]],
        "later_held_out": [event.get("eval_loss") for event in seen["half"]],
        "num_batches": [event.get("num_batches") for event in seen["whole"]],
    }


def held_out_alone(steps: int) -> float:
    """The loss of the held-out batch on one process, before any training."""
    parts = build()
    model = parts["model"].eval()
    x, y = parts["eval_batch"]
    return float(parts["loss_fn"](model(x), y).detach()) + 0 * steps


def gradients_of_samples(plan: str) -> dict[str, float]:
    """The largest difference of a per-sample gradient from torch.func's, and the size of the largest gradient."""
    parsed, parts = Plan.parse(plan), build()
    model, (x, y), loss_fn = parts["model"][0], parts["batch"], parts["loss_fn"]
    module = tw.parallelize(model, parsed, loss_fn=loss_fn).train()

    def loss(params: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return loss_fn(functional_call(model, params, (one[None],)), label[None])

    params = {name: param.detach() for name, param in model.named_parameters()}
    wanted = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    worst = size = 0.0
    for index, found in enumerate(sample_gradients(module, (x, y))):
        for name, value in wanted.items():
            size = max(size, float(value[index].abs().max()))
            worst = max(worst, float((found[name].full_tensor() - value[index]).abs().max()))
    return {"worst": worst, "size": size, "num_steps": module.num_steps, "num": index + 1}


def noise(plan: str) -> dict[str, float]:
    """The statistics of a batch's noise under a plan, beside those of one process."""
    from trainwright.growing import noise_of
    from trainwright.schedules import measure_noise
    from trainwright.schedules import sample_gradients as alone

    parsed, parts = Plan.parse(plan), build()
    model, (x, y), loss_fn = parts["model"][0], parts["batch"], parts["loss_fn"]
    wanted = measure_noise(lambda: alone(model, lambda net, one: loss_fn(net(one[0][None]), one[1][None]), (x, y)))
    found = noise_of(tw.parallelize(model, parsed, loss_fn=loss_fn).train(), (x, y))
    return {
        "num": found.num_samples, "square": found.squared_mean / wanted.squared_mean, "spread": found.variance / wanted.variance
    }  # fmt: skip
