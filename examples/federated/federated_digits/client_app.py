"""A client: local steps of an optimizer of trainwright's on its own digits."""

import functools

import torch

import trainwright as tw
from trainwright.federated.flower import client_app

from .task import build_model, loss_fn, share


@functools.lru_cache(maxsize=8)
def work(partition: int, settings: tuple) -> tw.federated.LocalTraining:
    """Return the work of one client; kept, for Flower asks for it at each message."""
    torch.set_num_threads(1)
    config = dict(settings)
    return tw.federated.LocalTraining(
        build_model(config["seed"]),
        share(partition, config["num-clients"], config["alpha"], config["seed"]),
        loss_fn,
        functools.partial(tw.optim.create, config["optimizer"], lr=config["lr"]),
        num_steps=config["num-steps"],
        seed=partition,
        method=tw.federated.FedSpeed(radius=0.05) if config["strategy"] == "fedspeed" else None,
    )


def work_of(context):
    """Return the work of the node that asks."""
    config = context.run_config
    partition = int(context.node_config.get("partition-id", 0)) % config["num-clients"]
    return work(partition, tuple(sorted(config.items())))


def describe(context):
    """Return what the server may know beforehand: how many examples there are."""
    return {"num-examples": len(work_of(context).batches.data[1])}


app = client_app(work_of, describe)
