"""What the reports say: numbers as people read them, module trees, decisions, and figures that plotly accepts."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import report_samples as samples
from tests.report_samples import MIB
from trainwright.artifacts import BreakEven, MemoryPoint, ModuleCost, OpPlan, ParamPlan, UserError
from trainwright.reports.decisions import decision_rows
from trainwright.reports.explanation import explanation_text
from trainwright.reports.fold import folded_rows
from trainwright.reports.html import write_plan
from trainwright.reports.html_profile import write_profile
from trainwright.reports.memory_figures import breakdown_figure, memory_figure, thinned
from trainwright.reports.module_figures import modules_figure
from trainwright.reports.peak_figures import peak_figure, peak_parts
from trainwright.reports.question_figures import fit_figure, sweep_figure
from trainwright.reports.recipe_figures import measured_figure, peaks_figure, step_times_figure
from trainwright.reports.splits import legend, meaning_of
from trainwright.reports.terminal import (
    cluster_table,
    compare_table,
    plan_table,
    report_table,
    rows_table,
)
from trainwright.reports.terminal_profile import profile_table
from trainwright.reports.tree import module_rows
from trainwright.reports.units import format_bytes, format_flops, format_s


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**30, "1 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (5 * 2**40, "5 TiB"),
    ],
)
def test_bytes_are_written_with_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_formatted_numbers_are_within_half_a_digit_of_what_they_stand_for() -> None:
    draw = random.Random(0)
    scales = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
    for _ in range(500):
        num_bytes = int(10 ** draw.uniform(0, 16))
        number, unit = format_bytes(num_bytes).split()
        assert float(number) * scales[unit] == pytest.approx(num_bytes, rel=6e-3), num_bytes


def test_times_and_flops() -> None:
    assert [format_s(value) for value in (None, 0, 2e-9, 1.5e-3, 59.99, 3601)] == [
        "–",
        "0 s",
        "2 ns",
        "1.50 ms",
        "60.0 s",
        "60 min 1 s",
    ]
    assert format_flops(3.1e15) == "3.10 PFLOP"


def test_blocks_that_cost_the_same_are_one_row_and_those_that_differ_are_not() -> None:
    rows = {row.label: row for row in module_rows(samples.profile().modules)}
    assert list(rows) == ["", "h", "h.{0-1}", "h.{0-1}.fc", "h.2", "h.2.fc", "head"]
    assert rows["h.{0-1}"].count == 2
    assert rows["h.{0-1}"].cost.saved_bytes == 200 * MIB
    assert rows["h.{0-1}.fc"].cost.num_params == 16


def test_the_tree_keeps_what_the_modules_cost() -> None:
    modules = [module for module in samples.profile().modules if module.path]
    rows = [row for row in module_rows(modules) if row.label]
    for name in ("num_params", "saved_bytes", "num_ops"):
        expected = sum(getattr(module, name) for module in modules)
        assert sum(getattr(row.cost, name) for row in rows) == expected, name


def test_depth_counts_names_not_the_numbers_of_blocks() -> None:
    assert [row.label for row in module_rows(samples.profile().modules, depth=1)] == ["", "h", "h.{0-1}", "h.2", "head"]


def test_blocks_without_a_name_are_a_level() -> None:
    modules = [ModuleCost(path=path) for path in ("", "0", "1", "1.norm", "2", "2.norm")]
    levels = {row.label: row.level for row in module_rows([module for module in modules if module.path != "0"])}
    assert levels == {"": 0, "{1-2}": 1, "{1-2}.norm": 2}


def test_the_tree_is_built_in_time_that_grows_with_the_model() -> None:
    """3000 blocks: squared work would take minutes."""
    modules = [ModuleCost(path="", type="Net")]
    modules += [
        ModuleCost(path=f"h.{block}{inner}", num_ops=block % 7) for block in range(3000) for inner in ("", ".fc")
    ]
    assert len(module_rows(modules)) == 1 + 2 * 3000


def test_decisions_are_rows_with_their_parameters_and_fates() -> None:
    rows = {row.key: row for row in decision_rows(samples.plan())}
    linear = rows["h.{0-2}.fc:linear"]
    assert (linear.block, linear.label, linear.split) == ("h.{0-2}", "fc:linear", "b@node o@gpu")
    assert linear.params == ("weight S0@gpu",)
    assert linear.fate == "out recomputed in 0-1"
    assert rows["h.{0-2}.fc:gelu"].fate == "out recomputed; internal offloaded"
    assert rows["head:linear"].split == "whole"
    assert rows["head:linear"].fate == "kept"
    assert rows["wte"].params == ("weight S1.1/3.12.64@node S0@gpu",), "parameters without an op are listed too"


def test_blocks_stay_together_and_long_lists_are_cut() -> None:
    values = {"out": "all", **{f"h.0.fc:mul#{place}.out": "all" for place in range(2, 9)}}
    modules = {
        "h.{0-2}.fc:linear": OpPlan(split=("b", "-")),
        "head:linear": OpPlan(split=("b", "-")),
        "h.{0-2}.act:gelu": OpPlan(split=("b", "-"), recomputed=values),
    }
    params = {"h.{0-2}.ln.weight": ParamPlan(layout=("R", "R")), "head.weight": ParamPlan(layout=("R", "R"))}
    rows = decision_rows(samples.plan(modules=modules, params=params))
    assert [row.key for row in rows] == ["h.{0-2}.fc:linear", "h.{0-2}.act:gelu", "h.{0-2}.ln", "head:linear"]
    assert rows[1].fate == "out, mul#2.out, mul#3.out and 5 more recomputed"


def test_a_replicated_parameter_says_so() -> None:
    plan = samples.plan(params={"head.weight": ParamPlan(layout=("R", "R"))})
    assert {row.key: row.params for row in decision_rows(plan)}["head:linear"] == ("weight replicated",)


def test_the_tables_state_what_the_artifacts_hold() -> None:
    text = profile_table(samples.profile(), depth=2)
    for part in ("900 MiB", "backward: mm in head", "6", "2 TFLOP", "h.{0-1}", "×2", "350 MiB"):
        assert part in text, part
    text = plan_table(samples.plan())
    for part in ("200 ms", "900 MiB", "of 1000 MiB", "h.{0-2}", "b@node o@gpu", "joint", "0.08 %", "1.25 s"):
        assert part in text, part
    assert "NOT" not in text
    assert "does NOT fit" in plan_table(samples.plan(peak_bytes=1001 * MIB))


def test_the_comparison_marks_the_fastest_and_gives_reasons() -> None:
    text = compare_table(samples.comparison())
    by_name = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert by_name["joint"].endswith("fastest")
    assert by_name["fsdp"].endswith("+25.0 %")
    assert "ddp does not fit: 1200 MiB are needed" in text
    assert "901.00 MiB" in by_name["joint"]  # the smallest budget that holds it


def test_what_the_device_cannot_hold_is_never_the_fastest() -> None:
    """Without a budget, recipes are compared that no device has the memory for."""
    room = samples.plan().cluster.device.memory_bytes
    plans = {"ddp": samples.plan("ddp", step_s=0.1, peak_bytes=room + 1), "fsdp": samples.plan("fsdp", step_s=0.25)}
    ddp, fsdp = (next(line for line in compare_table(plans).splitlines() if name in line) for name in plans)
    assert "does NOT fit" in ddp
    assert fsdp.endswith("fastest")
    assert "fastest" not in compare_table({"ddp": plans["ddp"]})
    assert any(trace["name"].startswith("memory of a device") for trace in peaks_figure(plans, None)["data"])


def test_the_report_tells_whether_it_verified() -> None:
    good, bad = report_table(samples.report()), report_table(samples.report(passed=False))
    assert good.startswith("verified")
    assert bad.startswith("NOT")
    assert "h.1.fc.weight" in good
    assert "-1.1 %" in good, "890 MiB measured, 900 MiB predicted"
    over = samples.report().model_copy(update={"budget_bytes": 885 * MIB})
    assert report_table(over).count("EXCEEDED") == 1


def test_ranks_of_stages_are_held_against_their_own_peaks() -> None:
    report = samples.report().model_copy(update={"peak_bytes": (1000, 500)})
    assert report.predicted_peaks == (report.predicted_peak_bytes,) * 2
    staged = report.model_copy(update={"rank_peak_bytes": (1000, 400), "predicted_peak_bytes": 1000})
    first, second = (line for line in report_table(staged).splitlines() if "peak, rank" in line)
    assert "+0.0 %" in first
    assert "+25.0 %" in second


def test_rows_and_clusters() -> None:
    assert rows_table([]) == "none"
    text = rows_table([{"name": "a", "num_params": 124_000_000}, {"name": "b", "num_params": None}])
    assert "124 M" in text
    assert "–" in text
    assert "50 GFLOP/s" in cluster_table(samples.cluster())


def test_tables_have_no_colours_in_a_file() -> None:
    assert "\x1b" not in plan_table(samples.plan()) + profile_table(samples.profile())


def test_thinning_keeps_the_peak_and_the_order() -> None:
    draw = random.Random(1)
    timeline = [MemoryPoint(phase="forward", op="x", path="", live_bytes=draw.randrange(10**9)) for _ in range(20_011)]
    points = thinned(list(enumerate(timeline)), limit=1000)
    assert len(points) <= 1001
    assert max(point.live_bytes for _, point in points) == max(point.live_bytes for point in timeline)
    assert [place for place, _ in points] == sorted(place for place, _ in points)
    assert all(timeline[place] is point for place, point in points)


def test_the_areas_add_up_to_what_is_alive() -> None:
    figure = memory_figure(samples.timeline(), 900 * MIB, 1000 * MIB)
    areas = [trace for trace in figure["data"] if trace.get("stackgroup")]
    assert len(areas) == 5
    for place, point in enumerate(samples.timeline()):
        assert sum(trace["y"][place] for trace in areas) * MIB == pytest.approx(point.live_bytes)


def test_a_budget_far_above_the_peak_does_not_flatten_the_chart() -> None:
    near, far = (memory_figure(samples.timeline(), 900 * MIB, budget) for budget in (1000 * MIB, 2**40))
    assert any("budget" in trace["name"] for trace in near["data"])
    assert not any("budget" in trace["name"] for trace in far["data"])


def test_the_treemap_adds_up() -> None:
    figure = modules_figure(samples.profile().modules)
    areas, forms = figure["menus"]
    assert list(areas) == ["alive at the peak", "time", "FLOPs", "parameter bytes", "saved bytes", "ops"]
    assert sum(areas["saved bytes"]["values"][0]) == 350 * MIB
    assert sum(areas["alive at the peak"]["values"][0]) == 900 * MIB
    assert sum(areas["time"]["values"][0]) == pytest.approx(0.12)
    assert set(forms) == {"treemap", "icicle"}
    (trace,) = figure["data"]
    assert set(trace["parents"]) - {""} <= set(trace["ids"])
    assert len(set(trace["ids"])) == len(trace["ids"])


def test_small_modules_are_one_row_that_says_so() -> None:
    modules = [ModuleCost(path="", param_bytes=1000, num_params=4)]
    modules += [
        ModuleCost(path=f"m{place}", param_bytes=size, num_params=1) for place, size in enumerate([5, 900, 4, 91])
    ]
    modules += [ModuleCost(path="m0.inner", param_bytes=5)]
    rows = folded_rows(module_rows(modules))
    assert [row.name for row in rows] == ["", "m1", "m3", "(3 smaller)"]
    assert rows[-1].num_folded == 3
    assert rows[-1].cost.param_bytes == 9, "the one inside of another is not counted twice"
    assert [row.name for row in folded_rows(module_rows(modules[:3]))] == ["", "m0", "m1"], "one row is not folded"


def test_siblings_are_sorted_within_their_parent() -> None:
    costs = {"": 100, "a": 30, "a.x": 10, "a.y": 20, "b": 70}
    modules = [ModuleCost(path=path, forward_flops=cost, param_bytes=-cost) for path, cost in costs.items()]
    rows = folded_rows(module_rows(modules), "flops")
    assert [row.label for row in rows] == ["", "b", "a", "a.y", "a.x"]
    with pytest.raises(UserError, match="memory, time, flops, params; got 'size'"):
        folded_rows(module_rows(modules), "size")
    with pytest.raises(UserError, match="add --hardware"):
        folded_rows(module_rows(modules), "time")


@given(st.data())
def test_the_parts_of_the_peak_are_all_of_it(data: st.DataObject) -> None:
    """Random trees in which each module holds what those in it hold, and something of its own."""
    paths = [""]
    for _ in range(data.draw(st.integers(0, 12))):
        above = data.draw(st.sampled_from(paths))
        paths.append(f"{above}.m{len(paths)}".strip("."))
    own = {
        path: data.draw(st.dictionaries(st.sampled_from(["param", "saved", "x"]), st.integers(1, 99))) for path in paths
    }
    modules = []
    for path in paths:
        inside = [own[each] for each in paths if each == path or not path or each.startswith(f"{path}.")]
        alive = {key: sum(each.get(key, 0) for each in inside) for key in ("param", "saved", "x")}
        modules.append(ModuleCost(path=path, num_ops=len(modules), at_peak_bytes=alive))
    parts = peak_parts(modules, limit=data.draw(st.integers(1, 14)))
    for key in ("param", "saved", "x"):
        assert sum(part.alive[key] for part in parts) == modules[0].at_peak_bytes[key]
    assert [part.num_bytes for part in parts] == sorted((part.num_bytes for part in parts), reverse=True)
    assert len({part.label for part in parts}) == len(parts)


def test_the_table_answers_what_was_asked() -> None:
    text = profile_table(samples.asked_profile(), depth=2)
    for part in ("does NOT fit into 800 MiB: 100 MiB too much", "batch size 3", "-25.0 %", "not tried: gradient"):
        assert part in text, part
    assert "largest batch size that fits: 3" in text
    lines = [line.split() for line in text.splitlines() if line.strip()[:2] in ("3 ", "4 ")]
    assert [line[-1] for line in lines] == ["yes", "no"]
    fits = samples.fit().model_copy(update={"fits": True, "budget_bytes": 1000 * MIB, "remedies": ()})
    assert "fits into 1000 MiB: 100 MiB to spare" in profile_table(samples.profile(fit=fits))
    none = samples.fit().model_copy(update={"remedies": samples.fit().remedies[:1], "largest_that_fits": {}})
    text = profile_table(samples.profile(fit=none, sweep=samples.sweep()))
    assert "trainwright plan" in text
    assert "no size that was tried fits" in text


def test_the_table_says_what_it_leaves_out() -> None:
    text = profile_table(samples.profile(), depth=1)
    assert "blocks of equal cost" in text
    assert "--depth 2" in text
    assert "1 rows of" not in text, "nothing is folded here"


def test_a_narrow_terminal_gets_fewer_columns(monkeypatch) -> None:
    wide = profile_table(samples.profile())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "ModuleList" in wide
    assert "ModuleList" not in profile_table(samples.profile())


def test_plotly_accepts_every_figure() -> None:
    """plotly's own validator refuses unknown attributes and values."""
    figures = [
        memory_figure(samples.timeline(), 900 * MIB, 1000 * MIB),
        memory_figure([], 0, None),
        breakdown_figure({"param": 3, "elsewhere": 4}),
        modules_figure(samples.profile().modules),
        *_forms(modules_figure(samples.profile().modules)),
        peak_figure(samples.profile().modules),
        peak_figure([]),
        fit_figure(samples.profile(), samples.fit()),
        sweep_figure(samples.sweep(), 800 * MIB),
        sweep_figure(samples.sweep()[:1], None),
        step_times_figure(samples.comparison()),
        peaks_figure(samples.comparison(), 1000 * MIB),
        measured_figure(samples.report()),
    ]
    for figure in figures:
        go.Figure(data=figure["data"], layout=figure["layout"])
    with pytest.raises(ValueError, match="stackgrup"):
        go.Figure(data=[{**figures[0]["data"][0], "stackgrup": 1}])


def _forms(figure):
    """The figure in each form that its buttons give it."""
    (trace,) = figure["data"]
    return [{**figure, "data": [{**trace, "type": form}]} for form in figure["menus"][1]]


def test_the_infeasible_are_hatched_with_the_reason() -> None:
    bars = {trace["name"]: trace for trace in step_times_figure(samples.comparison())["data"]}
    hatched = bars["does not fit"]
    assert hatched["y"] == ["ddp"]
    assert hatched["marker"]["pattern"]["shape"] == "/"
    assert "200 MiB more" in hatched["customdata"][0].replace("<br>", " ")
    joint = bars["compute"]["y"].index("joint")
    assert bars["compute"]["x"][joint] == pytest.approx(120), "in ms"


class _Tags(HTMLParser):
    """Collects elements and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]


def test_a_page_stands_alone_and_nothing_breaks_out_of_it(tmp_path) -> None:
    for path in _pages(tmp_path):
        tags = _Tags(path.read_text(encoding="utf8"))
        assert tags.links == [], "nothing is fetched"
        assert "img" not in tags.names, "names are text"
        assert tags.names.count("script") == 3


def test_the_data_of_a_page_is_json(tmp_path) -> None:
    for path in _pages(tmp_path):
        found = re.search(r'id="figures">(.*?)</script>', path.read_text(encoding="utf8"), re.DOTALL)
        assert found
        assert len(json.loads(gzip.decompress(base64.b64decode(found[1])))) >= 2
        assert path.stat().st_size < 2 * MIB


def _pages(tmp_path):
    write_profile(samples.asked_profile(), tmp_path / "profile.html")
    write_plan(
        samples.plan(),
        tmp_path / "plan.html",
        samples.simulation(),
        samples.comparison(),
        samples.profile(),
        samples.report(),
        samples.explanation(),
    )
    return [tmp_path / "profile.html", tmp_path / "plan.html"]


def test_each_decision_has_its_reason(tmp_path) -> None:
    text = _pages(tmp_path)[1].read_text(encoding="utf8")
    costs = "100 ms of compute, 20 ms of changes of layout, 18 MiB for the backward if kept"
    other = "b@node i@gpu (the batch; the input features, over which the product sums)"
    assert f"{costs}; next best {other}: 4 ms longer by the sum of its parts" in text
    assert "next best whole on every rank: 2 ms shorter by the sum of its parts" in text


def test_a_plan_alone_makes_a_page_and_a_bad_path_is_the_users_error(tmp_path) -> None:
    samples.plan().to_html(tmp_path / "alone.html")
    assert "b@node" in (tmp_path / "alone.html").read_text(encoding="utf8")
    with pytest.raises(UserError, match="cannot be written"):
        samples.plan().to_html(tmp_path / "missing" / "alone.html")


@pytest.mark.parametrize("make", [samples.plan, samples.profile, samples.cluster, samples.report])
def test_printing_an_artifact_is_short(make) -> None:
    artifact = make()
    text, line, cells = str(artifact), repr(artifact), artifact._repr_html_()
    assert 3 <= len(text.splitlines()) <= 10
    assert "\n" not in line
    assert line.startswith(f"<{type(artifact).__name__} ")
    assert "img" not in _Tags(cells).names
    assert text in f"{artifact}", "formatting prints the same"


def test_the_short_form_of_a_plan_says_what_matters() -> None:
    text = str(samples.plan())
    for part in (
        "net on cpu:4",
        "200 ms",
        "900 MiB a device, of 1000 MiB",
        "node 2 × gpu 2",
        "joint: optimal",
        "plan.table()",
    ):
        assert part in text, part
    assert "does NOT fit" in str(samples.plan(budget_bytes=800 * MIB))


def test_the_names_of_splits_are_those_of_the_plan() -> None:
    rows = dict(legend(samples.plan()))
    assert list(rows)[:2] == ["@node", "@gpu"]
    assert {"b", "o", "S0", "S1.1/3.12.64"} <= set(rows)
    assert "h" not in rows, "nothing splits heads here"
    assert "the batch" in plan_table(samples.plan())
    assert meaning_of("gelu.d1~2") == meaning_of("d1")
    assert meaning_of("n", "conv2d") == "the batch"


@pytest.mark.parametrize(
    ("imbalance", "said"),
    [
        (0.9, "f@node is faster than t.0@node e@gpu however even the routing is"),
        (1.5, "t.0@node e@gpu is faster than f@node while no rank has more than 1.5 × its even share"),
        (2.0, "t.0@node e@gpu is faster than f@node however skewed the routing is"),
    ],
)
def test_an_imbalance_of_experts_that_cannot_be_is_said_so(imbalance: float, said: str) -> None:
    """Two ranks share the experts, so none has more than twice its even share."""
    found = samples.explanation()
    row = replace(found.rows[0], even_at=BreakEven(imbalance, ("t.0", "e"), ("f",)))
    assert f"  imbalance  {said}" in explanation_text(replace(found, rows=(row,)))
