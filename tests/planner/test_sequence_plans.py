"""Attention along the sequence is in the planner's space, at the price of the work that each rank has."""

from __future__ import annotations

import trainwright as tw
from tests.sequence_cases import attention_groups, program_of
from trainwright.models import zoo
from trainwright.planner.costs.costs import cost_model
from trainwright.profiler.saved import record


def test_rows_cost_what_heads_do() -> None:
    """Two ranks with half of the rows each have as much to compute as two with half of the heads each; rows exchange besides."""
    program = program_of("llama-tiny", batch_size=1, seq_len=8192)
    cluster = tw.hardware("2xh100")
    axes = tuple(cluster.mesh())
    device = cluster.device.model_copy(update={"launch_s": 0.0})
    costs = cost_model(program, device, axes, record(program, "gpu"), 1.0)
    (group, *_) = attention_groups(program)
    at = {loop.name: (index,) for index, loop in enumerate(group.loops)}
    by_rows, by_heads = (sum(costs.op_s(group, group.head, at[name])) for name in ("q", "h"))
    assert 0.9 < by_rows / by_heads < 1.1, (by_rows, by_heads)
    assert sum(costs.inner_s(group, group.head, at["q"])) > 0 == sum(costs.inner_s(group, group.head, at["h"]))
    work = sum(call.flops for call in costs._own_record(group, group.head, at["q"]).forward)  # type: ignore[union-attr]
    # Blocks 0 and 3 of 4, the squares on the diagonal counted whole: 1 + 4 of the 16 blocks.
    assert work == 5 * sum(call.flops for call in costs.records[group.head].forward) / 16


def test_more_devices_than_heads() -> None:
    """Two heads of keys leave no other way to four devices and one sample than the sequence, alone or with heads."""
    plan = tw.plan(*zoo.build("llama-tiny", batch_size=1, seq_len=64), hardware="cpu:4")
    splits = {op.split for key, op in plan.modules.items() if key.endswith(":sdpa")}
    assert splits <= {("q",), ("q", "h"), ("h", "q"), ("q", "q")}, splits
