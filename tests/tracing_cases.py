"""What the tests of traces run on every rank."""

from __future__ import annotations

import itertools
from unittest import mock

import torch

import trainwright as tw
from trainwright.runtime.training.tracing import StepTrace
from trainwright.runtime.training.train import train_loop


def traced(path: str, steps: int) -> bool:
    """Train llama-tiny under data parallelism, a buffer of gradients a region; say whether recording has ended."""
    with mock.patch("trainwright.rank.travel.ENOUGH_BYTES", 0):
        model, batch = tw.zoo.build("llama-tiny")
        plan = tw.plan(model, batch, hardware="cpu:2", mesh=(2,), solver="ddp")
        assert plan.overlap == "buckets"
        module = tw.parallelize(tw.zoo.build("llama-tiny", device="cpu")[0], plan, seed=0)
    batches = itertools.repeat(tw.zoo.build("llama-tiny", device="cpu")[1])
    trace = StepTrace(module.communicator.activity)
    train_loop(module, torch.optim.SGD(module.parameters(), 0.1), batches, steps=steps, trace=trace)
    trace.write(path)
    return module.communicator.activity.recorder is None


def traced_stages(path: str, plan: str, steps: int) -> bool:
    """Train gpt2-tiny under a plan with stages; say whether recording has ended."""
    model, batch = tw.zoo.build("gpt2-tiny", device="cpu")
    module = tw.parallelize(model, tw.Plan.parse(plan), seed=0)
    trace = StepTrace(module.communicator.activity)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    train_loop(module, optimizer, itertools.repeat(batch), steps=steps, trace=trace)
    trace.write(path)
    return module.communicator.activity.recorder is None
