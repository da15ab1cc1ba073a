"""A rank's program on another device than the one where the model was captured: fakes on `meta` stand for a GPU's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.builders import tiny_program
from tests.grids import slow_but
from tests.plans import random_decisions
from trainwright.program.layout import local_shape
from trainwright.rank.execute import Executor
from trainwright.rank.instructions import Compute
from trainwright.rank.local import build_local
from trainwright.rank.reshard import SimulatedCommunicator
from trainwright.rank.run_state import BoundCall, RunState
from trainwright.torch_internals.fakes import new_mode

DEVICE = torch.device("meta")
MESH = (2, 2)
MODELS = ("gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny", "vit-tiny", "resnet-tiny")


@pytest.mark.parametrize(
    ("name", "seed"),
    slow_but(
        [("gpt2-tiny", 1)],
        [(name, seed) for name in MODELS for seed in range(3)],
    ),
)
def test_every_tensor_of_a_step_is_on_the_ranks_device(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # `meta` has none
    program = tiny_program(name)
    communicator = SimulatedCommunicator(MESH, coords=(seed % 2, seed // 2), device=DEVICE)
    local = build_local(program, random_decisions(program, MESH, seed), communicator)
    executor = Executor(local)
    for instruction in local.instructions:
        if isinstance(instruction, Compute):
            executor.calls[instruction.index] = checked(executor.calls[instruction.index], instruction)
    sources = {}
    with new_mode():
        for tensor, index in local.sources.items():
            shape = local_shape(tensor.shape, tensor.slots, local.values[index].layout, MESH, communicator.coords)
            value = torch.empty(shape, dtype=tensor.dtype, device=DEVICE)
            sources[tensor] = nn.Parameter(value, tensor.requires_grad) if tensor.role == "param" else value
        loss = executor.run(sources, RunState(dropout=False))[program.captured.loss_index]
        loss.backward()
    grads = [value.grad for tensor, value in sources.items() if tensor.role == "param" and tensor.requires_grad]
    assert grads
    assert all(grad is not None and grad.device == DEVICE for grad in grads)


def checked(call: BoundCall, instruction: Compute) -> BoundCall:
    def run(env: dict[int, object], state: RunState) -> None:
        call(env, state)
        for index in instruction.outputs:
            value = env[index]
            assert not isinstance(value, torch.Tensor) or value.device == DEVICE, instruction.key

    return run
