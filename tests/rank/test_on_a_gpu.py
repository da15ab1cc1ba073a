"""A rank's program on another device than the one where the model was captured: fakes on `meta` stand for a GPU's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.builders import task, tiny_program
from trainwright.planner.best_first import solve_on
from trainwright.planner.search.answer import Answer
from trainwright.program.layout import local_shape
from trainwright.rank.execute import Executor
from trainwright.rank.instructions import Compute
from trainwright.rank.local import build_local
from trainwright.rank.reshard import SimulatedCommunicator
from trainwright.rank.run_state import Call, RunState
from trainwright.torch_internals.fakes import new_mode

DEVICE = torch.device("meta")


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron"])
@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny", "vit-tiny", "resnet-tiny"]
)
def test_every_tensor_of_a_step_is_on_the_ranks_device(name: str, solver: str) -> None:
    program = tiny_program(name)
    (place,) = task(program, "2xh100", mesh=(2,)).places
    answer = solve_on(place, solver)
    assert isinstance(answer, Answer)
    communicator = SimulatedCommunicator((2,), device=DEVICE)
    local = build_local(program, answer.decisions, communicator)
    executor = Executor(local)
    for instruction in local.instructions:
        if isinstance(instruction, Compute):
            executor.calls[instruction.index] = checked(executor.calls[instruction.index], instruction)
    with new_mode(), torch.device(DEVICE):
        sources = {}
        for tensor, index in local.sources.items():
            shape = local_shape(tensor.shape, tensor.slots, local.values[index].layout, (2,), communicator.coords)
            value = torch.empty(shape, dtype=tensor.dtype)
            sources[tensor] = nn.Parameter(value, tensor.requires_grad) if tensor.role == "param" else value
    with new_mode():
        loss = executor.run(sources, RunState(dropout=False))[program.captured.loss_index]
        loss.backward()
    grads = [value.grad for tensor, value in sources.items() if tensor.role == "param" and tensor.requires_grad]
    assert grads
    assert all(grad is not None and grad.device == DEVICE for grad in grads)


def checked(call: Call, instruction: Compute) -> Call:
    def run(env: dict[int, object], state: RunState) -> None:
        call(env, state)
        for index in instruction.outputs:
            value = env[index]
            assert not isinstance(value, torch.Tensor) or value.device == DEVICE, instruction.key

    return run
