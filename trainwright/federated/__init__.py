"""Federated learning: FedAvg, asynchronous FedAvg, FedBuff and FedFix as one rule."""

from .arrays import Arrays, digest
from .clock import SimulatedClient, Simulation, replay, simulate
from .rules import AsyncFedAvg, FedAvg, FedBuff, FedFix, Rule, fedfix_interval_s
from .server import Event, Limits, RefusedReply, Sent, Server
from .store import load_server, save_server
