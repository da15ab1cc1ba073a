"""`diff`: every total with its change, modules and decisions by name, and what cannot be compared."""

from __future__ import annotations

import pytest

import trainwright as tw
from tests import report_samples as samples
from tests.report_samples import MIB
from trainwright.artifacts import Difference, ModuleCost, OpPlan, ParamPlan, UserError
from trainwright.artifacts.difference import NumberChange


def by_name(numbers) -> dict[str, NumberChange]:
    return {number.name: number for number in numbers}


def test_every_total_of_two_profiles_with_its_change() -> None:
    one, other = samples.profile(), samples.profile(peak_bytes=600 * MIB, step_s=0.5, dtype="bf16")
    found = tw.diff(one, other)
    totals = by_name(found.totals)
    assert (totals["peak_bytes"].absolute, totals["peak_bytes"].relative) == (-300 * MIB, pytest.approx(-1 / 3))
    assert totals["param_bytes"].same()
    assert totals["step_s"].before is None
    assert totals["step_s"].absolute is None
    assert totals["buffer_bytes"].relative is None, "nothing to divide by"
    assert [(change.name, change.before, change.after) for change in found.settings] == [("dtype", "fp32", "bf16")]
    assert not found.is_empty
    assert tw.diff(one, one).is_empty


def test_modules_that_changed_came_and_went() -> None:
    modules = {module.path: module for module in samples.profile().modules}
    modules["h.2"] = modules["h.2"].model_copy(update={"saved_bytes": 9 * MIB, "forward_s": None})
    modules["h.0"] = modules["h.0"].model_copy(update={"at_peak_bytes": {"saved": MIB}})
    del modules["head"]
    modules["tail"] = ModuleCost(path="tail")
    found = tw.diff(samples.profile(), samples.profile(modules=tuple(modules.values())))
    assert (found.added, found.removed) == (("tail",), ("head",))
    assert [module.path for module in found.modules] == ["h.0", "h.2"], "the larger change of memory first"
    assert [change.name for change in found.modules[1].changes] == ["saved_bytes"], "an unknown time is no change"
    (change,) = found.modules[0].changes
    assert (change.name, change.absolute) == ("at_peak_bytes", (1 - 190) * MIB)


def test_the_order_only_turns_the_signs() -> None:
    one, other = samples.profile(), samples.asked_profile().model_copy(update={"saved_bytes": 1, "modules": ()})
    there, back = tw.diff(one, other), tw.diff(other, one)
    for name, number in by_name(there.totals).items():
        opposite = by_name(back.totals)[name].absolute
        assert number.absolute is None if opposite is None else number.absolute == -opposite
    assert (there.added, there.removed) == (back.removed, back.added)


def test_plans_differ_by_figures_layouts_and_fates() -> None:
    one = samples.plan()
    changed = {
        "params": {**one.params, "h.{0-2}.fc.weight": ParamPlan(layout=("S0", "R"))},
        "modules": {
            **{key: op for key, op in one.modules.items() if key != "emb:embedding"},
            "h.{0-2}.fc:linear": OpPlan(split=("b", "o")),
            "new:mul": OpPlan(split=("-", "-")),
        },
        "budget_bytes": 500 * MIB,
        "mesh": {"gpu": 4},
    }
    found = tw.diff(one, samples.plan(solver="fsdp", step_s=0.3, **changed))
    assert by_name(found.totals)["step_s"].relative == pytest.approx(0.5)
    assert {change.name for change in found.settings} == {"budget_bytes", "solver", "mesh"}
    assert {change.name: (change.before, change.after) for change in found.decisions} == {
        "h.{0-2}.fc.weight": ("at rest R S0", "at rest S0 R"),
        "h.{0-2}.fc:linear": ("split b o; recomputed out in 0-1", "split b o; kept"),
    }
    assert (found.added, found.removed) == (("new:mul",), ("emb:embedding",))


def test_the_table_names_what_matters() -> None:
    blocks = tuple(
        module.model_copy(update={"saved_bytes": 7 * MIB, "at_peak_bytes": {}})
        if module.path[:3] in ("h.0", "h.1")
        else module
        for module in samples.profile().modules
    )
    text = tw.diff(samples.profile(), samples.profile(modules=blocks, peak_bytes=450 * MIB)).table()
    assert "900 MiB" in text
    assert "-450 MiB" in text
    assert "-50.0 %" in text
    assert "h.* ×2" in text, "blocks that changed alike are one row"
    assert "100 MiB → 7 MiB" in text
    assert "no difference" in tw.diff(samples.profile(), samples.profile()).table()
    deeper = tuple(ModuleCost(path=path) for path in ("new", "new.a", "new.b"))
    text = tw.diff(samples.profile(), samples.profile(modules=(*samples.profile().modules, *deeper))).table()
    assert "added: new, with 2 inside" in text
    plans = tw.diff(samples.plan(), samples.plan(budget_bytes=None, peak_bytes=MIB)).table()
    assert "1000 MiB" in plans
    assert "1 MiB" in plans


def test_files_are_read_and_the_answer_is_an_artifact(tmp_path) -> None:
    samples.profile().to_json(tmp_path / "a.json")
    samples.asked_profile().to_json(tmp_path / "b.json")
    found = tw.diff(tmp_path / "a.json", str(tmp_path / "b.json"))
    assert found.before.endswith("a.json")
    assert Difference.parse(found.to_json()) == found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "holds neither"),
        ('{"num_ranks": 2}', "holds neither"),
        (b"\xff\xfe\x00", "not text"),
        ('{"peak_bytes": 1, "forward_flops": 1}', "is not one: model"),
        ('{"format_version": 99, "peak_bytes": 1, "forward_flops": 1}', "format version 1 or 2"),
        ('{"format_version": 99, "predicted": {}, "mesh": {}}', "format version"),
    ],
)
def test_what_is_no_profile_and_no_plan(content, said, tmp_path) -> None:
    samples.profile().to_json(tmp_path / "good.json")
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for pair in ((tmp_path / "good.json", path), (path, tmp_path / "good.json")):
        with pytest.raises(UserError, match=said):
            tw.diff(*pair)


def test_a_folder_and_two_kinds_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        tw.diff(samples.plan(), tmp_path)
    with pytest.raises(UserError, match="is a profile and net is a plan"):
        tw.diff(samples.profile(), samples.plan())
