"""A plan that was edited by hand: every edit is carried out, refused by name, or named as having no effect."""

from __future__ import annotations

import copy
import functools
import json
import random
import re

import pytest

from tests.builders import make_optimizer, question, tiny_program
from tests.grids import slow_but
from trainwright import optim
from trainwright.artifacts import Plan, Refusal, UserError
from trainwright.planner import check, make_plan, simulate
from trainwright.planner.costs.effects import NO_EFFECT
from trainwright.program.plan_entries import parse_ranges
from trainwright.program.plan_text import decisions_of, plan_sections

C_FC = "transformer.h.{0-1}.mlp.c_fc:linear"
WTE = "transformer.wte.weight"


@functools.cache
def found() -> Plan:
    """A plan that recomputes something."""
    return make_plan(**question(tiny_program("gpt2-tiny"), budget_bytes=1_700_000, time_limit_s=5.0))


def edited(**changes) -> Plan:
    """Return the plan as somebody's editor leaves it: `section__key__field=value`, read from JSON again."""
    data = json.loads(found().to_json())
    for path, value in changes.items():
        place = data
        *parents, last = path.split("__")
        for part in parents:
            place = place[_KEYS.get(part, part)]
        place[_KEYS.get(last, last)] = value
    return Plan.parse(json.dumps(data))


_KEYS = {"C_FC": C_FC, "WTE": WTE}


def checked(plan: Plan, budget_bytes: int | None = None) -> Plan:
    return check(plan, tiny_program("gpt2-tiny"), budget_bytes, optim.record("adamw"), make_optimizer)


def put(section: str, key: str, entry: object) -> Plan:
    data = json.loads(found().to_json())
    data[section][key] = entry
    return Plan.parse(json.dumps(data))


def test_a_plan_as_it_was_made_is_not_edited() -> None:
    plan = Plan.parse(found().to_json())
    assert not plan.is_edited
    assert checked(plan, plan.budget_bytes).verdict == plan.verdict
    other = checked(plan, 2 * plan.budget_bytes)
    assert not other.is_edited
    assert other.verdict == "best found; nothing is proven"


def test_an_edited_plan_says_so_and_goes_on_saying_so() -> None:
    plan = edited(modules__C_FC__split="b0" if found().modules[C_FC].split != ("b0",) else "-")
    assert plan.is_edited
    for each in (plan, checked(plan), Plan.parse(checked(plan).to_json()), checked(checked(plan))):
        assert each.verdict.startswith("edited by hand")
    assert checked(plan).predicted != found().predicted


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            lambda: put("modules", "transformer.h.{0-0}.mlp.c_fc:linear", {"split": "b0"}),
            r"stand under .*\{0-1\}.*c_fc",
        ),
        (lambda: put("modules", "transformer.h.{0-1}.mlp.c_cf:linear", {"split": "b0"}), r"write one of .*c_fc"),
        (
            lambda: put("params", "transformer.wte.wieght", {"layout": "R"}),
            r"params; .* write one of transformer.wte.weight",
        ),
        (lambda: put("batch", "labls", {"shape": [4], "dtype": "int64", "layout": "R"}), r"batch; 'labls' is none"),
        (lambda: edited(modules__C_FC__recomputed={"out": "0-99"}), r"blocks are needed as in 0-1.*'0-99'"),
        (lambda: edited(modules__C_FC__recomputed={"out": "1-0"}), r"the smaller first.*'1-0'"),
        (lambda: edited(modules__C_FC__recomputed={"out": "0-1,1"}), r"names 1 twice"),
        (lambda: edited(modules__C_FC__recomputed={"out7": "all"}), r"no value 'out7'; it has out"),
        (lambda: edited(modules__C_FC__split="zz"), r"no loop 'zz' that can be split; it has b0"),
        (lambda: edited(modules__C_FC__split="b0 b0"), r"one entry for each of the mesh's 1 axes"),
        (lambda: edited(params__WTE__layout="P"), r"cannot rest as 'P'; it can as R"),
        (lambda: edited(params__WTE__layout="S7"), r"no layout 'S7'"),
        (lambda: edited(batch__input_ids__layout="P"), r"cannot rest as 'P'"),
        (lambda: edited(batch__input_ids__shape=[5, 32]), r"the batch that was planned for"),
        (lambda: edited(batch__input_ids__dtype="int32"), r"the batch that was planned for"),
        (lambda: edited(mesh={"cpu": 3}), r"a mesh of 2 devices is needed"),
        (lambda: edited(corrections={":cross_entropy": 0.5}), r"corrections are for several micro-batches"),
    ],
)
def test_what_nobody_would_carry_out_is_refused_by_name(plan, words: str) -> None:
    with pytest.raises(UserError, match=words):
        checked(plan())


def test_an_entry_that_stands_twice_is_refused() -> None:
    text = found().to_json().replace('"overlap":', '"overlap": "none",\n "overlap":', 1)
    with pytest.raises(UserError, match="'overlap' twice"):
        Plan.parse(text)


def test_what_has_no_effect_is_named() -> None:
    plan = edited(modules__C_FC__recomputed={"in0": "all"}, params__WTE__shared=["S0"])
    notes = " ".join(checked(plan).notes)
    assert NO_EFFECT in notes
    assert f"{C_FC} recomputed in0" in notes  # it is read as it comes
    assert f"{WTE} shared" in notes


def test_ranges_hold_each_block_once() -> None:
    draw = random.Random(0)
    for _ in range(200):
        parts = [(draw.randrange(6), draw.randrange(6)) for _ in range(draw.randint(1, 3))]
        named = [block for low, high in parts for block in range(low, high + 1)]
        good = all(low <= high for low, high in parts) and len(set(named)) == len(named)
        text = ",".join(f"{low}-{high}" for low, high in parts)
        if good:
            assert parse_ranges(text, 6, "x") == set(named)
        else:
            with pytest.raises(UserError):
                parse_ranges(text, 6, "x")


def _draw_edit(draw: random.Random, data: dict) -> str:
    """Change one decision of a plan at random, well-formed or not; return what was changed."""
    section = draw.choice(["modules", "modules", "params", "batch"])
    key = draw.choice(list(data[section]))
    entry = data[section][key]
    blocks = draw.choice(["all", "0", "1", "0-1", "2"])
    if section == "modules" and draw.random() < 0.7:
        name = draw.choice(["out", "internal", "in0", "in1", "nothing"])
        entry.setdefault("recomputed", {})[name] = blocks
    elif section == "modules":
        entry["split"] = draw.choice(["-", "b0", "o", "h", "i", "m"])
    elif section == "params":
        field = draw.choice(["layout", "shared", "offloaded"])
        entry[field] = {"layout": draw.choice(["R", "S0", "S1", "P"]), "shared": [draw.choice(["R", "S0"])],
                        "offloaded": {"state": blocks}}[field]  # fmt: skip
    else:
        entry["layout"] = draw.choice(["R", "S0", "S1", "P"])
    return f"{section} {key}: {entry}"


def test_the_same_plan_runs_the_same() -> None:
    """The property below would hold for nothing otherwise."""
    assert _traced(found()) == _traced(Plan.parse(found().to_json()))


@pytest.mark.parametrize("seed", slow_but(range(10), range(150)))
def test_any_edit_is_carried_out_or_refused_or_named(seed: int) -> None:
    draw = random.Random(seed)
    data = json.loads(found().to_json())
    before = copy.deepcopy(data)
    what = _draw_edit(draw, data)
    try:
        plan = checked(Plan.parse(json.dumps(data)))
    except (UserError, Refusal):
        return
    if _decided(plan) == _decided(found()):
        return  # the same in other words: `all` of two blocks is `0-1`
    was, now = _traced(found()), _traced(plan)
    named = any(NO_EFFECT in note and _names(note, data, before) for note in plan.notes)
    assert was != now or named, what


def _decided(plan: Plan) -> tuple:
    """What a plan decides, in the planner's own words."""
    program = tiny_program("gpt2-tiny")
    return plan_sections(program, decisions_of(program, plan))


def _names(note: str, data: dict, before: dict) -> bool:
    sections = ("modules", "params", "batch")
    changed = [key for section in sections for key in data[section] if data[section][key] != before[section][key]]
    return any(key in note or "more" in note for key in changed)


def _traced(plan: Plan) -> tuple:
    """What is run and what it holds."""
    program = tiny_program("gpt2-tiny")
    found = simulate(program, decisions_of(program, plan), make_optimizer, timeline=True)
    ran = [re.sub(r" at 0x\w+", "", repr(instruction)) for instruction in found.executor.local.instructions]
    kept = [(value.key, value.layout) for value in found.executor.local.values]
    return (
        found.peak_bytes,
        found.num_calls,
        ran,
        kept,
        found.timeline,
    )
