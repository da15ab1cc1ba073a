"""The same servers behind Flower's Message API: strategies for a `ServerApp`, `client_app` for a `ClientApp`.

    FedFix, FedBuff, AsyncFedAvg   `start` is a loop of push_messages and pull_messages: no round waits for anybody
    FedAvg, FedSpeed, FZooS        in rounds

Needs the extra: `pip install 'trainwright[federated]'` (flwr 1.24 to 1.42).
"""

from __future__ import annotations

from ...artifacts import need

need("flwr", "trainwright.federated.flower")

from .client import client_app, message_update  # noqa: E402
from .content import array_record, arrays_of  # noqa: E402
from .exchange import Timing  # noqa: E402
from .strategies import AsyncFedAvg, FedAvg, FedBuff, FedFix, FedSpeed, ServerStrategy  # noqa: E402
from .zeroth_order import FZooS  # noqa: E402

__all__ = [
    "AsyncFedAvg",
    "FZooS",
    "FedAvg",
    "FedBuff",
    "FedFix",
    "FedSpeed",
    "ServerStrategy",
    "Timing",
    "array_record",
    "arrays_of",
    "client_app",
    "message_update",
]
