"""What the tests of sums that begin before the step run on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from trainwright.runtime.module import full_gradients

VOCABULARY = 11


class Labelled(nn.Module):
    """A mean over labels of which some do not count; they come from the batch, shifted, or from the model itself."""

    def __init__(self, own_labels: bool = False, weighted: bool = False) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.own_labels = own_labels
        self.register_buffer("weight", torch.linspace(0.5, 2.0, VOCABULARY) if weighted else None)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.inner(self.embed(tokens)).tanh())
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        if self.own_labels:
            shifted = torch.where(logits.detach().amax(-1) > 0.2, shifted, -100)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), self.weight)}


def batch() -> dict[str, torch.Tensor]:
    """Eight rows of which the first half has most labels."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (8, 6), generator=draw)
    labels = tokens.clone()
    labels[4:, 2:] = -100
    labels[7] = -100
    return {"tokens": tokens, "labels": labels}


def build(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    return Labelled(**options).double()


def trained(options: dict[str, bool], recompute: bool) -> tuple[float, int]:
    """Return the largest error of loss and gradients, and how many sums were begun before the step."""
    pins = [":cross_entropy=recompute"] if recompute else []
    plan = tw.plan(build(**options), batch(), hardware="cpu:2", mesh=(2,), solver="ddp", pins=pins)
    assert bool(plan.modules[":cross_entropy"].recomputed) == recompute
    module, model = tw.parallelize(build(**options), plan), build(**options)
    ours, eager = module(**plan.shard_batch(batch()))["loss"], model(**batch())["loss"]
    ours.backward()
    eager.backward()
    found = full_gradients(module)
    errors = [float((found[name] - p.grad).abs().max()) for name, p in model.named_parameters() if p.grad is not None]
    with torch.no_grad():
        again = module(**plan.shard_batch(batch()))["loss"]
    return max(*errors, float((ours - eager).abs()), float((again - eager).abs())), len(
        module.steps.planned.executor.early
    )
