"""Federated learning: FedAvg, asynchronous FedAvg, FedBuff and FedFix as one rule, FedSpeed, and FZooS.

Nothing here needs a framework: `Server` holds the update rule, `simulate` runs clients of all speeds on a counted clock.
`trainwright.federated.flower` brings the same server to Flower (`pip install 'trainwright[federated]'`).

    rule = FedFix(seconds=0.5)     when to aggregate, with what weights     `rules`
    server = Server(model, rule)   the model, and what is awaited from whom `server`
    client_update(state, arrays, config) -> (delta, state)                 `local`, `fedspeed`, `fzoos`, or a function of yours
"""

from __future__ import annotations

from . import fedspeed, fzoos, rules
from .arrays import Arrays, digest, norm, num_bytes
from .clock import ClientUpdate, SimulatedClient, Simulation, State, replay, simulate
from .fedspeed import FedSpeed, FedSpeedAverage
from .fzoos import FZooS, FZooSClient, FZooSRun, FZooSSettings
from .local import (
    Batches,
    LocalMethod,
    LocalTraining,
    LossTaking,
    Plain,
    load_arrays,
    model_arrays,
)
from .record import StrategyRecord
from .rules import AsyncFedAvg, FedAvg, FedBuff, FedFix, Rule, fedfix_interval_s
from .server import Event, Limits, RefusedReply, Sent, Server, Traffic
from .store import load_extra, load_server, save_server
from .surrogate import GaussianProcess, RandomFeatures, default_length_scale
from .vectorised import VectorisedTraining
from .world import Speeds, dirichlet_split, predicted_work_s

__all__ = [
    "Arrays",
    "AsyncFedAvg",
    "Batches",
    "ClientUpdate",
    "Event",
    "FZooS",
    "FZooSClient",
    "FZooSRun",
    "FZooSSettings",
    "FedAvg",
    "FedBuff",
    "FedFix",
    "FedSpeed",
    "FedSpeedAverage",
    "GaussianProcess",
    "Limits",
    "LocalMethod",
    "LocalTraining",
    "LossTaking",
    "Plain",
    "RandomFeatures",
    "RefusedReply",
    "Rule",
    "Sent",
    "Server",
    "SimulatedClient",
    "Simulation",
    "Speeds",
    "State",
    "StrategyRecord",
    "Traffic",
    "VectorisedTraining",
    "default_length_scale",
    "digest",
    "dirichlet_split",
    "fedfix_interval_s",
    "load_arrays",
    "load_extra",
    "load_server",
    "model_arrays",
    "norm",
    "num_bytes",
    "predicted_work_s",
    "replay",
    "save_server",
    "simulate",
    "table",
]


def records() -> tuple[StrategyRecord, ...]:
    """Return the records of all strategies.

    >>> [record.name for record in records()]
    ['fedavg', 'async-fedavg', 'fedfix', 'fedbuff', 'fedspeed', 'fzoos']
    """
    return (*rules.RECORDS, *fedspeed.RECORDS, *fzoos.RECORDS)


def table() -> list[dict[str, str]]:
    """Return a row a strategy: what it keeps where, what it sends, what it assumes, its paper."""
    return [record.row() for record in records()]
