"""Choosing examples on real ranks, called by `tests/runtime/test_selected.py`; the process group is initialised."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import default_collate

import trainwright as tw
from tests.models import clusters
from trainwright.artifacts import Plan
from trainwright.runtime import ExampleBatches, SelectedBatches, train_loop
from trainwright.runtime.training.selected import all_logits
from trainwright.selection import CRAIG, last_layer_gradients, logit_gradients, selection

FRACTION = 0.2


def chosen_like_one_process(plan: str, name: str) -> dict[str, Any]:
    """Compare logits and choice of the planned module with those of the whole model in one process."""
    parsed, built = Plan.parse(plan), _built(name)
    alone = copy.deepcopy(built["model"])
    module = tw.parallelize(built["model"], parsed, loss_fn=built.get("loss_fn"), seed=0)
    module.train()
    batches = ExampleBatches(parsed, built["dataset"])
    logits, labels = all_logits(module, batches)
    selected = SelectedBatches(module, batches, CRAIG(FRACTION, normalise=True), logit_gradients, every=2)
    selected.select()
    gradients, wanted = _by_hand(alone, built["dataset"])
    reference = CRAIG(FRACTION, normalise=True).fit(gradients, wanted)
    return {
        "logits": float((logit_gradients(logits, labels) - gradients).abs().max()),
        "labels": bool(torch.equal(labels, wanted)),
        "indices": bool(torch.equal(batches.indices, reference.indices_)),
        "weights": float((batches.weights - reference.weights_).abs().max()),
        "training": module.training,
        "seconds": selected.seconds_of(0),
    }


def _built(name: str) -> dict[str, Any]:
    """The model with its examples, the same on every rank."""
    torch.manual_seed(0)
    return getattr(clusters, name)()


def _by_hand(model: Any, dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(dataset[0], tuple):
        return last_layer_gradients(lambda_module(model), [default_collate([dataset[i] for i in range(len(dataset))])])
    batch = default_collate([dataset[i] for i in range(len(dataset))])
    model.eval()
    with torch.no_grad():
        return logit_gradients(model(pixel_values=batch["pixel_values"]).logits, batch["labels"]), batch["labels"]


def lambda_module(model: Any) -> torch.nn.Module:
    """The model as x to logits."""

    class OfX(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x, torch.zeros(len(x), dtype=torch.long))

    return OfX()


def weighted_steps_equal_one_process(plan: str, num_steps: int = 12) -> dict[str, Any]:
    """Train on the subset with the weights in the loss, beside one process that takes the same batches."""
    parsed, built = Plan.parse(plan), _built("weighted")
    alone = copy.deepcopy(built["model"])
    module = tw.parallelize(built["model"], parsed, loss_fn=built["loss_fn"], seed=0)
    module.train()
    batches = ExampleBatches(parsed, built["dataset"], seed=3)
    selected = SelectedBatches(module, batches, CRAIG(FRACTION), logit_gradients, every=1)
    seen: list[Any] = []
    recorded = (seen.append(batch) or batch for batch in selected)  # type: ignore[func-returns-value]
    losses = train_loop(module, _optimizer(module), recorded, steps=num_steps)
    optimizer, expected = _optimizer(alone), []
    for batch in seen:
        optimizer.zero_grad()
        loss = clusters.weighted_loss(alone(*batch), batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    found = tw.full_state_dict(module)
    return {
        "losses": max(abs(one - other) for one, other in zip(losses, expected)),
        "parameters": max(float((found[name] - value).abs().max()) for name, value in alone.state_dict().items()),
        "num_selections": selected.num_selections,
        "num_weights": len({float(weight) for _, _, weights in seen for weight in weights}),
        "subset": batches.indices.tolist(),
    }


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)


def resumed_equals_uninterrupted(plan: str) -> dict[str, Any]:
    """Batches of an iteration that was stopped and taken up again, beside those of one that was not."""
    parsed, built = Plan.parse(plan), _built("drawn")
    module = tw.parallelize(built["model"], parsed, loss_fn=built["loss_fn"], seed=0)
    make = lambda first: SelectedBatches(  # noqa: E731
        module, ExampleBatches(parsed, built["dataset"], first_step=first), CRAIG(FRACTION), logit_gradients, every=2
    )
    whole = make(0)
    batches = [next(whole) for _ in range(6)]
    stopped = make(0)
    for _ in range(4):
        next(stopped)
    again = make(4)
    again.load_state_dict(stopped.state_dict())
    rest = [next(again) for _ in range(2)]
    equal = all(torch.equal(one, other) for pair in zip(batches[4:], rest) for one, other in zip(*pair))
    return {"equal": equal, "num_selections": again.num_selections}


def augmented(plan: str, num_steps: int = 21) -> dict[str, Any]:
    """An epoch of everything and strong copies of a coreset, beside one that is taken up again in the midst."""
    parsed, built = Plan.parse(plan), _built("augmentable")
    module = tw.parallelize(built["model"], parsed, loss_fn=built["loss_fn"], seed=0)
    way = selection("augment")

    def make(first: int) -> SelectedBatches:
        batches = ExampleBatches(parsed, built["dataset"], first_step=first, strong=built["augment"])
        return SelectedBatches(module, batches, way.make(0.1, 0), logit_gradients, compose=way.compose)

    whole, rest = make(0), make(15)
    rows = [next(whole) for _ in range(num_steps - 1)]  # 332 rows, in 16s: twenty batches
    rest.load_state_dict(whole.state_dict())
    again = [next(rest) for _ in range(num_steps - 16)]
    plain = {tuple(x.tolist()) for x, _ in built["dataset"]}
    seen = [tuple(row) for x, _ in rows for row in x.tolist()]
    return {
        "resumed": all(torch.equal(a, b) for pair in zip(rows[15:], again) for a, b in zip(*pair)),
        "num_chosen": whole.num_chosen,
        "num_strong": int(whole.batches.is_strong.sum()),
        "num_new": len({row for row in seen if row not in plain}),
        "num_distinct": len(set(seen)),
        "sum": float(sum(x.sum() for x, _ in rows)),
    }


def random_choices(plan: str) -> dict[str, Any]:
    """Subsets of three selections, and whether a run that was stopped goes on with the second and draws the same third."""
    parsed, built = Plan.parse(plan), _built("drawn")
    module = tw.parallelize(built["model"], parsed, loss_fn=built["loss_fn"], seed=0)
    way = selection("random")

    def make(first: int) -> SelectedBatches:
        batches = ExampleBatches(parsed, built["dataset"], first_step=first)
        return SelectedBatches(module, batches, lambda step: way.make(FRACTION, step), None, every=1)

    whole, subsets = make(0), []
    for step in range(9):  # 60 of 300 in batches of 16: three batches an epoch
        next(whole)
        if step % 3 == 0:
            subsets.append(whole.batches.indices.tolist())
        if step == 4:
            state = whole.state_dict()
    again = make(5)
    again.load_state_dict(state)
    for _ in range(4):
        next(again)
    return {
        "subsets": subsets,
        "resumed": again.batches.indices.tolist() == subsets[2],
        "num_forwards": module.num_steps,
    }
