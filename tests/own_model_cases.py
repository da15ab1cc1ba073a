"""A model of x with a loss of torch's, planned: called by `tests/runtime/test_own_model.py` on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import trainwright as tw
from trainwright.artifacts import Plan, UserError
from trainwright.runtime import ExampleBatches, train_loop

LR = 0.1


class Net(nn.Module):
    """Two layers, of x alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu())


def build(form: str) -> tuple[nn.Module, Any, Any]:
    """Return the model in float64, a batch as a tuple or a dict, and its loss."""
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    return model, {"x": x, "labels": y} if form == "dict" else (x, y), nn.CrossEntropyLoss(label_smoothing=0.1)


def trains_like_one_process(plan: str, form: str) -> float:
    """Train three steps beside a loop that anybody would write; the largest difference of a loss or a weight."""
    parsed = Plan.parse(plan)
    alone, batch, criterion = build(form)
    module = tw.parallelize(build(form)[0], parsed, loss_fn=criterion)
    x, y = batch.values() if form == "dict" else batch
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in (module, alone)]
    part, worst = parsed.shard_batch(batch), 0.0
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = module(**part) if form == "dict" else module(*part)
        wanted = criterion(alone(x), y)
        for loss, optimizer in zip((found.loss, wanted), optimizers):
            loss.backward()
            optimizer.step()
        worst = max(worst, abs(float(found.loss) - float(wanted)))
    weights = tw.full_state_dict(module)
    return max(worst, *(float((weights[name] - value).abs().max()) for name, value in alone.state_dict().items()))


def trains_on_examples(plan: str) -> list[float]:
    """Train on a dataset of pairs; return the differences of the losses from one process on the same batches."""
    parsed = Plan.parse(plan)
    alone, _, criterion = build("tuple")
    examples = [(torch.full((4,), float(k), dtype=torch.float64), k % 3) for k in range(20)]
    module = tw.parallelize(build("tuple")[0], parsed, loss_fn=criterion)
    found = train_loop(
        module, torch.optim.SGD(module.parameters(), lr=LR), ExampleBatches(parsed, examples, seed=1), steps=3
    )
    optimizer, wanted = torch.optim.SGD(alone.parameters(), lr=LR), []
    for x, y in (batch for batch, _ in zip(ExampleBatches(parsed, examples, seed=1), range(3))):
        optimizer.zero_grad()
        loss = criterion(alone(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(float(loss))
    return [one - other for one, other in zip(found, wanted)]


def verifies(plan: str, form: str) -> dict[str, Any]:
    """Verify the plan in float64, and as the model stands."""
    parsed = Plan.parse(plan)
    exact = tw.verify(lambda: build(form), parsed)
    plain = tw.verify(lambda: build(form), parsed, dtype="fp32")
    return {"passed": exact.passed and plain.passed, "error": exact.max_relative_error_gradient}


def forgets_the_loss(plan: str) -> str:
    """Return what is said where the loss that the plan was made with is not given."""
    try:
        tw.parallelize(build("tuple")[0], Plan.parse(plan))
    except UserError as error:
        return str(error)
    return "nothing"
