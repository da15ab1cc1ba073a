"""A forward's effects happen once: what is rerun writes nothing again, and sees what it saw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests import effect_cases
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.artifacts import Plan, Report
from trainwright.capture.export import capture
from trainwright.rank import local

EXACT = 1e-12


@pytest.fixture(scope="module")
def recomputed() -> Plan:
    plan = tw.plan(*effect_cases.net(), hardware="cpu:1", pins=["*:batch_norm=recompute"])
    assert {"out", "internal"} <= plan.modules["blocks.0.norm:batch_norm"].recomputed.keys()
    return plan


def test_a_recomputed_batch_norm_trains_as_one_process(recomputed: Plan) -> None:
    assert max(effect_cases.as_one_process(recomputed.to_json()).values()) < EXACT


def test_several_forwards_before_one_backward(recomputed: Plan) -> None:
    assert max(effect_cases.as_one_process(recomputed.to_json(), accumulate=2).values()) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_plans_drawn_at_random(seed: int) -> None:
    plan = effect_cases.random_plan(seed, 1)
    assert any(op.recomputed for op in plan.modules.values())
    assert max(effect_cases.as_one_process(plan.to_json()).values()) < EXACT


@pytest.mark.slow
def test_verify_finds_what_a_rerun_writes_again(recomputed: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tw.verify(effect_cases.net, recomputed)
    assert good.passed
    monkeypatch.setattr(local, "_on_copies", lambda function, places: function)
    bad = tw.verify(effect_cases.net, recomputed)
    assert not bad.passed
    assert bad.worst_buffer.endswith(("running_mean", "running_var"))
    assert bad.max_relative_error_gradient < EXACT


def test_what_runs_once_cannot_be_recomputed(recomputed: Plan) -> None:
    model, batch = effect_cases.net()
    with pytest.raises(tw.UserError, match="may run again"):
        tw.plan(model, batch, hardware="cpu:1", pins=["*:tally=recompute"])
    key = "blocks.{0-1}:clone" if "blocks.{0-1}:clone" in recomputed.modules else "blocks.0:clone"
    changed = recomputed.modules[key].model_copy(update={"recomputed": {"out": "all"}})
    edited = recomputed.model_copy(update={"modules": {**recomputed.modules, key: changed}})
    with pytest.raises(tw.UserError, match="without effects"):
        tw.parallelize(model, edited, seed=0)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.calls, self.plain = 0, torch.zeros(4)
        self.table: Tensor | None = None


def counting(self: Base, y: Tensor) -> Tensor:
    self.calls += 1
    return y * self.calls


def carrying(self: Base, y: Tensor) -> Tensor:
    self.plain = 0.9 * self.plain + y.detach().mean(0)
    return y - self.plain


def growing(self: Base, y: Tensor) -> Tensor:
    self.mean = torch.cat([self.mean, y.detach().mean(0)])
    return y


def first_batch(self: Base, y: Tensor) -> Tensor:
    if self.table is None:
        self.table = y.detach().mean(0)
    return y - self.table


def clamping(self: Base, y: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_(-1, 1)
    return y


def remembering(self: Base, y: Tensor) -> Tensor:
    self.last = y.detach()
    self.calls += 1
    return y


def tabulating(self: Base, y: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.arange(4.0).cos()
    return y * self.table


def model_of(forward: Callable[[Base, Tensor], Tensor]) -> nn.Module:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return forward(self, self.linear(x)).square().mean()

    return Model()


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (counting, "computes the same every time .* depends on calls, .*test_effects.py:"),
        (carrying, "depends on plain, .*test_effects.py:"),
        (first_batch, "depends on table, .*test_effects.py:"),
        (growing, "buffer of one shape .*test_effects.py:.* makes mean"),
        (clamping, "leaves parameters as they are .*test_effects.py:.* writes linear.weight"),
    ],
)
def test_state_that_a_graph_cannot_hold_is_refused(forward: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(tw.UserError, match=said):
        capture(model_of(forward), (torch.ones(2, 4),))


@pytest.mark.parametrize("forward", [remembering, tabulating])
def test_what_no_later_forward_depends_on_is_of_no_matter(forward: Callable[..., Tensor]) -> None:
    model = model_of(forward)
    capture(model, (torch.ones(2, 4),))
    assert model.calls == 0, "the user's model is as it was"


def test_reports_of_the_previous_version_are_read(recomputed: Plan) -> None:
    report = tw.verify(effect_cases.net, recomputed)
    compared = ["loss", "gradients", "buffers after the step", "optimizer's update", "evaluation"]
    assert [row.what for row in report.differences] == compared
    old = {name: value for name, value in report.model_dump(mode="json").items() if "_buffer" not in name}
    text = report.model_validate({**old, "format_version": 1}).to_json()
    assert "buffers after the step" not in Report.parse(text).table()
    with pytest.raises(tw.UserError, match="format version 1 or 2"):
        Report.parse(text.replace('"format_version": 1', '"format_version": 9'))


@pytest.mark.parametrize("seed", slow_but([0], [0, 1]))
def test_a_step_on_two_ranks_is_one_processes(pool2: Pool, seed: int) -> None:
    plan = effect_cases.random_plan(seed, 2).to_json()
    for worst in pool2.run("tests.effect_cases:as_one_process", plan=plan):
        assert {what: error for what, error in worst.items() if not error < 1e-12} == {}
