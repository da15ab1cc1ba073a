"""Asynchronous servers of others on the same counted clock: appfl's FedAsync and FedBuff.

appfl 1.12 asks for torch 2.14 and CUDA through `piq`, and for Globus, W&B and boto3, none of which its aggregators use. It was
installed beside the torch of this package: `pip install --no-deps appfl omegaconf opacus opt_einsum pandas …`, as its import asked.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from trainwright.federated import AsyncFedAvg, Server

STALENESS = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}


def is_there() -> bool:
    return importlib.util.find_spec("appfl") is not None


class AppflServer(Server):
    """An aggregator of appfl's behind `Server`'s calls: it decides what the next model is, at each reply."""

    aggregator: Any
    given: dict[str, Any]

    @classmethod
    def of(cls, name: str, **configs: Any) -> Any:
        """Return a function that makes such a server, with the aggregator's class and its settings."""

        def make(arrays: Any, rule: Any, **options: Any) -> AppflServer:
            from appfl.algorithm import aggregator
            from omegaconf import DictConfig

            server = cls(arrays, AsyncFedAvg(weighted=False), **options)
            settings = DictConfig({"optimize_memory": False, **STALENESS, **configs})
            server.aggregator, server.given = getattr(aggregator, name)(None, settings), {}
            server.aggregator.global_state = as_tensors(server.arrays)
            return server

        return make

    def send(self, client: str, now_s: float = 0.0) -> Any:
        self.aggregator.get_parameters(client_id=client)
        self.given[client] = self.arrays
        return super().send(client, now_s)

    def receive(self, delta: Any, version: int, client: str, now_s: float = 0.0) -> Any:
        reached = {name: self.given[client][name] + value for name, value in delta.items()}
        new = self.aggregator.aggregate(client, as_tensors(reached))
        moved = {name: value.numpy() - self.arrays[name] for name, value in new.items()}
        return super().receive(moved, version, client, now_s)


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in arrays.items()}


def kinds(num_clients: int, size: int) -> dict[str, dict[str, Any]]:
    """Return the rows of appfl's: as its server sets the weight of one of `num_clients`, and as the papers have it."""
    if not is_there():
        return {}
    rule = AsyncFedAvg(weighted=False)
    settings: dict[str, dict[str, Any]] = {
        "FedAsync (appfl, α 0.9 / 100, its server's)": {"name": "FedAsyncAggregator", "alpha": 0.9, "num_clients": num_clients},
        "FedAsync (appfl, α 0.6, the paper's)": {"name": "FedAsyncAggregator", "alpha": 0.6, "num_clients": 1},
        f"FedBuff({size}) (appfl, α 0.9 / 100, its server's)": {
            "name": "FedBuffAggregator", "alpha": 0.9, "num_clients": num_clients, "K": size,
        },
        f"FedBuff({size}) (appfl, α 1 / {size}, the paper's)": {
            "name": "FedBuffAggregator", "alpha": 1.0, "num_clients": size, "K": size,
        },
    }  # fmt: skip
    return {row: {"rule": rule, "server_of": AppflServer.of(**options)} for row, options in settings.items()}
