"""Clients and models that several tests of `trainwright.federated` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainwright.federated import ClientUpdate


def start(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=2)}


def towards(number: int) -> ClientUpdate:
    """Half the way to a goal of the client's own, and less the more often it has been asked."""
    goal = start(100 + number)

    def update(state: dict[str, Any], arrays: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        count = int(state.get("count", 0))
        pull = state.get("pull", np.zeros(2))
        delta = {"w": (goal["w"] - arrays["w"]) / np.float32(count + 2), "b": (goal["b"] - arrays["b"]) / 3 + pull}
        return delta, {"count": count + 1, "pull": pull + 0.01 * number, "metric.loss": float(count)}

    return update


def planned_work(plan: str) -> dict[str, Any]:
    """On the ranks of a pool: a client whose model is laid out by `plan`, beside the same client in one process."""
    import functools

    import torch
    from torch import nn

    import trainwright as tw
    from trainwright.artifacts import Plan
    from trainwright.federated import LocalTraining, model_arrays

    parsed, (model, data) = Plan.parse(plan), planned_problem()
    module = tw.parallelize(model, parsed, loss_fn=nn.CrossEntropyLoss())
    make = functools.partial(tw.optim.create, "adan", lr=0.01)
    alone = LocalTraining(
        model,
        data,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        make,
        num_steps=4,
        batch_size=8,
    )
    together = LocalTraining(
        module, data, lambda module, batch: module(*parsed.shard_batch(batch)).loss, make, num_steps=4, batch_size=8
    )  # fmt: skip
    arrays = {name: np.array(value) for name, value in model_arrays(model).items()}
    state: dict[str, Any] = {}
    other: dict[str, Any] = {}
    largest = 0.0
    for _ in range(2):
        delta, state = together(state, arrays, {})
        expected, other = alone(other, arrays, {})
        largest = max(largest, *(float(np.abs(delta[name] - expected[name]).max()) for name in arrays))
        arrays = {name: arrays[name] + delta[name] for name in arrays}
    split = sum(value.to_local().numel() < value.numel() for value in module.parameters() if hasattr(value, "to_local"))
    return {
        "largest": largest,
        "works": state["works"],
        "moved": float(torch.tensor(delta["0.weight"]).abs().max()),
        "split": split,
    }


def planned_problem() -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return model, (torch.randn(16, 6, dtype=torch.float64), torch.arange(16) % 4)
