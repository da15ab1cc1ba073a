"""Blocks are found by their paths; what a forward outside computes within one is part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import plain
from trainwright.capture.block_paths import block_containers, block_of
from trainwright.capture.export import capture
from trainwright.program.program import Program, build_program
from trainwright.program.stages import boundaries


def _program(model: nn.Module, batch: object) -> Program:
    return build_program(capture(model, batch))  # type: ignore[arg-type]


def test_the_innermost_lists_that_do_all_the_work_are_the_blocks() -> None:
    stages = [f"stages.{k}.layers.{j}.{layer}" for k in range(2) for j in range(3) for layer in ("a", "b", "c", "d")]
    assert block_containers(stages) == {"stages.0.layers", "stages.1.layers"}
    assert block_of("stages.1.layers.2.b", {"stages.0.layers", "stages.1.layers"}) == "stages.1.layers.2"
    assert block_containers([f"h.{k}.{layer}" for k in range(2) for layer in ("a", "b")]) == set()  # too little work
    assert block_of("head", {"h"}) is None


def test_a_forward_that_combines_the_layers_of_each_block_has_blocks() -> None:
    program = _program(*plain.build_inline())
    blocks = [found for found in program.classes if found.representative.path is not None]
    assert [[region.path for region in found.members] for found in blocks] == [["blocks.0", "blocks.1", "blocks.2"]]
    assert {op.path for op in blocks[0].representative.ops if op.name == "gelu"} == {"blocks.0"}
    assert set(boundaries(program)) >= {"blocks.1", "blocks.2"}


class Again(nn.Module):
    """Runs its first block three times in a row, and halves what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[0], self.blocks[0], self.blocks[1]):
            for layer in block:
                x = F.relu(layer(x))
            x = x / 2
        return x.sum()


def test_a_block_that_is_called_again_is_another_block() -> None:
    program = _program(Again(), (torch.ones(2, 4),))
    paths = [region.path for region in program.regions]
    assert paths.count("blocks.0") == 3
    assert paths.count("blocks.1") == 1
