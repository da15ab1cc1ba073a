"""Time against memory: each point a plan that fits its budget, none both slower and larger than another."""

from __future__ import annotations

import functools
import importlib
import itertools
import json

import pytest
from typer.testing import CliRunner

from tests.builders import blocks_program, make_optimizer, question, tiny_program
from trainwright import optim
from trainwright.artifacts import Plan, Refusal, UserError
from trainwright.cli.app import app
from trainwright.planner import check, frontier, make_plan


def rising(points: list[Plan]) -> bool:
    """Whether each plan is larger and faster than the one before it."""
    found = [(plan.predicted.peak_bytes, plan.predicted.step_s) for plan in points]
    return all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(found))


def program_of(name: str):
    return blocks_program(3, 2048) if name == "blocks" else tiny_program(name)


@functools.cache
def drawn(name: str) -> list[Plan]:
    return frontier(**question(program_of(name)), num_points=5)


@pytest.mark.parametrize("name", ["blocks", pytest.param("gpt2-tiny", marks=pytest.mark.slow)])
def test_every_point_is_a_plan_that_fits_and_time_never_rises_with_memory(name):
    program, points = program_of(name), drawn(name)
    assert len(points) >= 4
    assert rising(points)
    for plan in points:
        again = check(plan, program, plan.budget_bytes, optim.record("adamw"), make_optimizer)
        assert again.predicted == plan.predicted
        with pytest.raises(Refusal):
            check(plan, program, plan.budget_bytes - 1, optim.record("adamw"), make_optimizer)
    fastest = make_plan(**question(program))
    assert points[-1].predicted.step_s == pytest.approx(fastest.predicted.step_s, rel=2e-3)


def test_the_order_of_a_frontier_is_checked_on_a_fault():
    assert not rising(drawn("blocks")[::-1])


def test_a_frontier_ends_at_the_budget():
    program = program_of("blocks")  # without a budget the largest of its points takes 307,016 bytes
    points = frontier(**question(program, budget_bytes=290_000), num_points=2, solver="fsdp")
    assert points
    assert all(plan.predicted.peak_bytes < 290_000 for plan in points)
    with pytest.raises(Refusal, match="the smallest found takes"):
        frontier(**question(program, budget_bytes=200_000), num_points=2, solver="fsdp")


def test_without_any_plan_there_is_a_refusal(monkeypatch):
    module = importlib.import_module("trainwright.planner.frontier")  # the package's attribute is the function
    monkeypatch.setattr(module, "_points", lambda *_: iter(()))
    with pytest.raises(Refusal, match="fewer pins"):
        frontier(**question(tiny_program("gpt2-tiny")))


@pytest.mark.parametrize(("options", "message"), [({"num_points": 1}, "at least 2"), ({"solver": "ddp"}, "try joint")])
def test_frontiers_that_cannot_be_drawn(options, message):
    with pytest.raises(UserError, match=message):
        frontier(**question(tiny_program("gpt2-tiny")), **options)


@pytest.mark.slow
def test_the_command_line_writes_every_plan_of_a_frontier(tmp_path):
    folder, listed, page = tmp_path / "plans", tmp_path / "frontier.json", tmp_path / "frontier.html"
    command = ["plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "--mesh", "2", "--frontier"]
    found = CliRunner().invoke(app, [*command, "-o", str(folder), "--json", str(listed), "--html", str(page)])
    assert found.exit_code == 0, found.output
    rows = json.loads(listed.read_text())["points"]
    written = [Plan.from_json(folder / f"plan-{place}.json") for place in range(1, len(rows) + 1)]
    assert [plan.predicted.peak_bytes for plan in written] == [row["peak_bytes"] for row in rows]
    assert [Plan.parse(json.dumps(row["plan"])) for row in rows] == written
    assert rising(written)
    assert "Time against memory" in page.read_text()
    both = CliRunner().invoke(app, [*command, "--compare"])
    assert both.exit_code != 0
