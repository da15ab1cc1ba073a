"""Compiled plans: the choice against brute force, the promise against inductor's own code, edits and refusals."""

from __future__ import annotations

import itertools
import random
from contextlib import closing
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from tests.plans import cluster
from tests.pool import Pool
from trainwright.artifacts import Plan, Refusal, UserError
from trainwright.optim.chosen import of_plan
from trainwright.planner.compiled import choose
from trainwright.planner.costs.simulate_compiled import SpanCost
from trainwright.runtime.verification.verify import verify

WIDTH = 64


class Block(nn.Module):
    """A block of which the partitioner keeps more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Equal blocks between two linear maps."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def build(num_blocks: int = 4) -> Any:
    """Return the net and a batch."""
    torch.manual_seed(0)
    return Net(num_blocks), (torch.randn(256, WIDTH), torch.randint(0, 10, (256,)))


@cache
def planned(share: float | None = None) -> Plan:
    """A compiled plan; `share` is its budget as a share of what the compiler's own choice takes."""
    memory = None if share is None else int(share * planned().predicted.peak_bytes)
    return tw.plan(*build(), hardware=cluster(1), memory=memory, compile=True)


def peak_of(costs: list[list[SpanCost]], chosen: tuple[int, ...]) -> float:
    """The peak of a mixture by the rows' own model."""
    peak = 0.0
    for region, option in enumerate(chosen):
        own = costs[option]
        before = sum(costs[other][earlier].saved_bytes for earlier, other in enumerate(chosen[:region]))
        alone = sum(span.saved_bytes for span in own[:region])
        kept = own[region].saved_bytes
        peak = max(peak, before + own[region].forward_peak - alone)
        peak = max(peak, before + kept + own[region].backward_peak - alone - kept)
    return peak


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_fastest_of_all_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    costs: list[list[SpanCost]] = []
    for option in range(3):
        spans, alive = [], 100
        for region in range(5):
            kept = (option + 1) * draw.randint(5, 20)
            alive += kept
            spans.append(
                SpanCost(
                    region, kept, alive + draw.randint(0, 30), alive + draw.randint(0, 40), 9.0 - option + draw.random()
                )
            )
        costs.append(spans)
    everything = list(itertools.product(range(3), repeat=5))
    budget = sorted(peak_of(costs, chosen) for chosen in everything)[60]
    found = choose(costs, [], budget)
    assert found is not None
    seconds = {chosen: sum(costs[option][r].seconds for r, option in enumerate(chosen)) for chosen in everything}
    best = min(seconds[chosen] for chosen in everything if peak_of(costs, chosen) <= budget)
    assert peak_of(costs, tuple(found)) <= budget * (1 + 1e-6)
    assert seconds[tuple(found)] <= best * 1.002
    least = choose(costs, [], None)
    assert least is not None
    assert peak_of(costs, tuple(least)) <= 1.001 * min(peak_of(costs, chosen) for chosen in everything)
    assert choose(costs, [], int(peak_of(costs, tuple(least)) * 0.9)) is None


def test_equal_blocks_keep_more_the_later_they_are() -> None:
    costs = [
        [SpanCost(r, kept, 100, 100 + kept * (r + 1), seconds) for r in range(4)]
        for kept, seconds in ((1, 2.0), (10, 1.0))
    ]
    found = choose(costs, [(0, 1), (1, 2), (2, 3)], 125)
    assert found == sorted(found or [])
    assert 0 < sum(found or []) < 4


def test_a_plan_without_need_keeps_what_the_compiler_does() -> None:
    plan = planned()
    assert plan.compile == {}
    assert plan.predicted.recompute_s == 0
    assert Plan.parse(plan.to_json()) == plan
    assert "keeps 100%" in plan.table()
    assert '"compile"' not in tw.plan(*build(1), hardware=cluster(1)).to_json()


@pytest.mark.slow
def test_a_budget_below_is_met_by_keeping_less_and_said_in_the_plan() -> None:
    plan = planned(0.8)
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.compile
    assert plan.predicted.step_s > planned().predicted.step_s
    model, batch = build()
    again = tw.check(plan, model, batch)
    assert again.predicted.peak_bytes == plan.predicted.peak_bytes
    tighter = plan.model_copy(update={"compile": {"blocks.{0-3}": {"0": "all"}}})
    checked = tw.check(tighter, model, batch)
    assert checked.predicted.peak_bytes < plan.predicted.peak_bytes
    assert checked.is_edited
    with pytest.raises(Refusal, match=r"a budget of .* would do"):
        tw.plan(model, batch, hardware=cluster(1), memory=int(0.3 * plan.predicted.peak_bytes), compile=True)


@pytest.mark.slow
def test_inductors_own_code_computes_the_same_within_the_promised_peak() -> None:
    with closing(Pool(1)) as pool:
        for plan in (planned(0.8), planned()):
            (report,) = pool.run("tests.planner.test_compiled_plans:verified", timeout_s=600, text=plan.to_json())
            assert report["passed"], report
            assert 0.98 <= report["peak"] / plan.predicted.peak_bytes <= 1.001


def verified(text: str) -> dict[str, Any]:
    """Verify a plan on this rank, and measure its peak."""
    plan = Plan.parse(text)
    report = verify(build, plan, make_optimizer=of_plan(plan).make)
    return {"passed": report.passed, "peak": report.peak_bytes[0]}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"blocks.{0-3}": {"2": "0"}}, "a share from 0"),
        ({"blocks.{0-3}": {"0.5": "0-1", "0": "1"}}, "has two for block 1"),
        ({"blocks.{0-3}": {"0.5": "7"}}, "blocks are needed as in 0-3"),
        ({"block": {"0.5": "all"}}, "none"),
    ],
)
def test_edits_that_cannot_be_are_refused_by_name(entry: Any, says: str) -> None:
    model, batch = build()
    with pytest.raises(UserError, match=says):
        tw.check(planned().model_copy(update={"compile": entry}), model, batch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hardware": cluster(2)}, "one device"),
        ({"micro_batches": 2}, "one batch a step"),
        ({"loss_chunks": 2}, "whole logits"),
        ({"hardware": "a100", "offload": "host"}, "nothing offloaded"),
        ({"pins": ("blocks.*=keep",)}, "no pins"),
        ({"solver": "fsdp"}, "the solver joint"),
        ({"keep_graph": True}, "one backward a step"),
    ],
)
def test_what_is_not_planned_together_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"a compiled plan .* needs {says}"):
        tw.plan(*build(1), compile=True, **{"hardware": cluster(1), **options})
