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
