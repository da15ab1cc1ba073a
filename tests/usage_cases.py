"""What ordinary models have, beside one process: several losses and outputs, buffers, frozen and tied parameters, dropout.

Called by `tests/artifacts/test_usage.py` on real ranks; the process group is initialised.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw
from trainwright import optim
from trainwright.artifacts import Plan
from trainwright.runtime import LossOutput

NUM_STEPS, VOCAB, WIDTH = 3, 24, 16


class Block(nn.Module):
    """Attention of a fused projection and a gated layer, with a frozen scale and a mask that is a buffer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (part.view(b, s, 4, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(attended.transpose(1, 2).reshape(b, s, -1))) * self.scale * self.gain


class Model(nn.Module):
    """Returns two losses, their sum and logits; its head is the embedding; a running mean is a buffer that training writes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, labels: Tensor, returns: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits, values = self.head(x), self.value(self.norm(x.transpose(1, 2)).transpose(1, 2)).squeeze(-1)
        next_loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        value_loss = functional.mse_loss(values, returns)
        return {"loss": next_loss + 0.3 * value_loss, "next": next_loss, "value": value_loss, "logits": logits}


def build(dropout: float = 0.0) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(5)
    ids, labels = torch.randint(0, VOCAB, (2, 4, 8))
    return Model(dropout).double(), {"ids": ids, "labels": labels, "returns": torch.randn(4, 8, dtype=torch.float64)}


def steps(plan: str, optimizer: str) -> dict[str, Any]:
    """Train some steps with `optimizer` beside one process; the largest differences, and what has to stay as it was."""
    parsed, (alone, batch) = Plan.parse(plan), build()
    module = tw.parallelize(copy.deepcopy(alone), parsed, seed=0)
    part = parsed.shard_batch(batch)
    before = copy.deepcopy(alone.state_dict())
    said: list[list[float]] = []
    for current, fed in ((module, part), (alone, batch)):
        chosen = optim.create(optimizer, current.parameters(), lr=1e-2)
        losses = []
        for _ in range(NUM_STEPS):
            chosen.zero_grad()
            output = current(**fed)
            output["loss"].backward()
            chosen.step()
            losses += [float(output[name].detach()) for name in ("loss", "next", "value")]
        said.append(losses)
    found, reference = tw.full_state_dict(module), alone.state_dict()
    logits = output["logits"]
    whole = module(**part)["logits"]
    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    moved = {name for name, value in reference.items() if not torch.equal(value, before[name])}
    return {
        "names": sorted(set(found) ^ set(reference)),
        "values": max(abs(a - b) / abs(b) for a, b in zip(*said)),
        "weights": max(float((found[name].double() - value.double()).abs().max()) for name, value in reference.items()),
        "frozen_as_it_was": all(torch.equal(found[name], before[name]) for name in before if name.endswith(".scale")),
        "tied": torch.equal(found["head.weight"], found["embedding.weight"]),
        "moved": len(moved),
        "logits": list(whole.shape) == list(logits.shape),
    }


def dropped(plan: str) -> dict[str, Any]:
    """Losses and gradients of two modules with one seed, of another seed, and of a module that goes on from a later step."""
    from trainwright.runtime.module import full_gradients

    parsed, (model, batch) = Plan.parse(plan), build(0.3)
    part = parsed.shard_batch(batch)

    def run(seed: int, first: int = 0) -> tuple[list[float], dict[str, Tensor]]:
        module = tw.parallelize(copy.deepcopy(model), parsed, seed=seed)
        module.num_steps = first
        losses = []
        for _ in range(first, 3):
            module.zero_grad()
            loss = module(**part)["loss"]
            loss.backward()
            losses.append(float(loss.detach()))
        return losses, dict(full_gradients(module))

    (one, grads), (again, same), (other, _), (later, _) = run(3), run(3), run(4), run(3, first=2)
    return {
        "same": one == again and all(torch.equal(grads[name], same[name]) for name in grads),
        "other": all(a != b for a, b in zip(one, other)),
        "each_step": len(set(one)) == 3,
        "goes_on": later == one[2:],
        "losses": one,
    }


def with_loss_fn(plan: str) -> dict[str, float]:
    """A loss of several outputs, given as a function: the output beside it is the model's own."""
    parsed = Plan.parse(plan)
    model, batch = two_headed()
    alone = copy.deepcopy(model)
    module = tw.parallelize(model, parsed, loss_fn=two_losses, seed=0)
    output = module(*parsed.shard_batch(batch))
    assert isinstance(output, LossOutput)
    output.loss.backward()
    reference = two_losses(alone(*batch), batch)
    reference.backward()
    grads = {name: param.grad.full_tensor() for name, param in module.named_parameters()}
    return {
        "loss": abs(float(output.loss.detach()) - float(reference.detach())),
        "gradients": max(
            float((grads[name].reshape(p.shape) - p.grad).abs().max()) for name, p in alone.named_parameters()
        ),
        "outputs": float(len(output.output)),
    }


class TwoHeaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden), self.second(hidden)


def two_headed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(6)
    return TwoHeaded().double(), (torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,)))


def two_losses(output: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean() + functional.cross_entropy(output[1], batch[1])
