"""Ops of a user's own: registered with their loops they are split, planned, priced and run; without, tried."""

from __future__ import annotations

import sys

import pytest
import torch

import trainwright as tw
from tests import user_ops_cases
from tests.pool import Pool
from trainwright.capture.cached import cached_capture
from trainwright.ops import RULES
from trainwright.program.program import build_program

CASES = "tests.user_ops_cases:"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_plans_drawn_at_random_are_exact(pool2: Pool, seed: int) -> None:
    report = pool2.run(CASES + "random_plan", mesh=[2], seed=seed)[0]
    assert report["passed"], report


@pytest.mark.slow  # plans drawn at random on two ranks stand for it
def test_on_two_axes(pool4: Pool) -> None:
    report = pool4.run(CASES + "random_plan", mesh=[2, 2], seed=5)[0]
    assert report["passed"], report


@pytest.mark.parametrize("solver", [pytest.param("fsdp", marks=pytest.mark.slow), "joint"])
def test_a_plan_is_run_with_the_users_backwards(pool2: Pool, solver: str) -> None:
    plan = tw.plan(*user_ops_cases.build(), hardware="cpu:2", solver=solver)
    assert not any("gathered" in note for note in plan.notes), plan.notes
    report = pool2.run(CASES + "run", plan=plan.to_json())[0]
    assert report["passed"], report
    assert report["worst"] < 1e-12
    assert max(report["peak_bytes"]) == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


def test_all_loops_are_offered() -> None:
    program = user_ops_cases.program()
    groups = {group.head.name: group for region in program.classes for group in region.groups}
    by_name = {op.name: op for op in program.ops}
    assert {loop.name for loop in groups["trainwright_tests::project"].loops} >= {"b0", "b1", "i", "o"}
    assert by_name["trainwright_tests::project"].signature.reduced == {"i"}
    assert by_name["trainwright_tests::linear"].signature.whole == {"c"}
    assert by_name["trainwright_tests::rounded"].kind == "elementwise"
    assert all(op.signature.known for op in program.ops)


def test_an_op_is_not_taken_for_torchs_of_the_same_name() -> None:
    model, batch = user_ops_cases.build()
    rule = RULES.pop("trainwright_tests::linear")
    try:
        program = build_program(cached_capture(model, batch))
        without_rule = {op.name for op in program.ops if op.signature.discovered or not op.signature.known}
        plan = tw.plan(model, batch, hardware="cpu:2", solver="ddp")
    finally:
        RULES[rule.name] = rule
    assert without_rule == {"trainwright_tests::linear"}
    assert any("trainwright_tests::linear" in note for note in plan.notes)


def registered_and_captured(loops: str, options: dict[str, str]) -> None:
    tw.register_op(user_ops_cases.project, loops, **options)
    user_ops_cases.program()


@pytest.mark.parametrize(
    ("loops", "options", "said"),
    [
        ("b* i, o i", {}, "without an arrow"),
        ("b* i, o i -> b* o", {"reduced": "k"}, "k does not"),
        (
            "b* i, i i -> b* i",
            {},
            r"argument 0 of trainwright_tests::project has shape \[4, 6, 16\], its loops \[4, 6, 32\]",
        ),
        ("b* i -> b* i", {}, "a pattern for 2 tensors is needed"),
        ("b* i, o i -> b* o", {"reduced": "o"}, "o stays in one"),
        ("b* i, x o i -> b* o", {}, "does not fit shape"),
    ],
)
def test_rules_that_cannot_be_are_refused(loops: str, options: dict[str, str], said: str) -> None:
    rule = RULES["trainwright_tests::project"]
    try:
        with pytest.raises(tw.UserError, match=said):
            registered_and_captured(loops, options)
    finally:
        RULES[rule.name] = rule


def test_the_ops_of_these_tests_are_registered_once() -> None:
    """Loaded under a second name, the file would register them anew; torch frees the first, and a call of those crashes."""
    found = [name for name, module in sys.modules.items() if getattr(module, "__file__", "") == user_ops_cases.__file__]
    assert found == ["tests.user_ops_cases"]


def test_torchs_own_ops_keep_their_rules() -> None:
    for op in (torch.ops.aten.mm.default, torch.ops.aten.mm, "mm"):
        with pytest.raises(tw.UserError, match="an op of your own is needed"):
            tw.register_op(op, "i k, k j -> i j")
