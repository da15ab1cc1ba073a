"""Groups stand in the order in which they run, and know when each of their ops runs among the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.builders import tiny_program
from trainwright.capture.cached import cached_capture
from trainwright.capture.export import capture
from trainwright.program.program import build_program


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_a_group_whose_ops_are_apart_stands_where_the_last_of_them_is() -> None:
    """silu(gate) · up: the product runs behind `up`, so its backward comes first, and that of silu behind that of `up`."""
    program = build_program(cached_capture(Gated(), (torch.ones(2, 4),), lambda out, _: out.square().mean()))
    groups = program.regions[0].region_class.groups
    product = next(group for group in groups if any(op.name == "silu" for op in group.ops))
    gate, up = (next(group for group in groups if group.key.startswith(name)) for name in ("gate", "up"))
    assert gate.index < up.index < product.index
    moments = {op.name: product.moment(op, groups) for op in product.ops}
    assert moments["mul"] == product.index
    assert gate.index < moments["silu"] < up.index


class Pairs(nn.Module):
    """Differences of all pairs of rows, and a matrix beside itself transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.inner(x).tanh()
        square = self.outer(rows).sigmoid()
        return (rows[:, None] - rows[None]).square().sum(-1) * (square + square.T)


def test_an_op_joins_no_group_that_would_make_one_of_two_of_its_loops() -> None:
    """Split alike, x[:, None] - x[None] would be rows of a rank's own part alone, and square + square.T its diagonal block."""
    program = build_program(cached_capture(Pairs(), (torch.ones(8, 4),), lambda out, _: out.mean()))
    groups = program.regions[0].region_class.groups
    for name in ("sub", "add"):
        group = next(group for group in groups if any(op.name == name for op in group.ops))
        op = next(op for op in group.ops if op.name == name)
        loops = [group.loop_at[op.position, loop, 0] for loop in ("d0", "d1")]
        assert len(set(loops)) == 2
        assert not any(group.loops[loop].whole for loop in loops)
        assert not {t.producer for t in op.inputs} & set(group.ops)


def test_a_fresh_tensor_is_no_part_of_a_sum() -> None:
    """Behind a linear map whose inputs are split, what has the map's group is a partial sum."""
    program = build_program(
        capture(nn.Linear(4, 6), (torch.ones(2, 4),), lambda out, _: (out * out.new_ones(6)).mean())
    )
    groups = program.regions[0].region_class.groups
    linear, fresh = (next(g for g in groups if any(op.name == name for op in g.ops)) for name in ("linear", "new_ones"))
    assert any(loop.reduced for loop in linear.loops)
    assert not any(loop.reduced for loop in fresh.loops)


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny", "vit-tiny", "resnet-tiny"]
)
def test_no_group_stands_before_one_that_it_reads_from(name: str) -> None:
    for region_class in tiny_program(name).classes:
        made_in = {op: group.index for group in region_class.groups for op in group.ops}
        for group in region_class.groups:
            for op in group.ops:
                read = {made_in[t.producer] for t in op.inputs if t.producer in made_in} - {group.index}
                assert all(made < group.moment(op, region_class.groups) <= group.index for made in read)
