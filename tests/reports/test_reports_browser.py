"""The HTML reports in a real browser: they draw, complain of nothing, answer to hovering and clicking."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests import report_samples as samples
from tests.grids import slow_but
from trainwright.reports.html import write_plan
from trainwright.reports.html_profile import write_profile

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    write_profile(samples.profile(), folder / "profile.html")
    write_profile(samples.asked_profile(), folder / "asked.html")
    write_plan(
        samples.plan(),
        folder / "plan.html",
        simulation=samples.simulation(),
        comparison=samples.comparison(),
        profile=samples.profile(),
        report=samples.report(),
        explanation=samples.explanation(),
        frontier=samples.frontier(),
        files=[f"plans/plan-{place}.json" for place in (1, 2, 3)],
    )
    write_plan(samples.plan(), folder / "alone.html", report=samples.report(), explanation=samples.explanation())
    return {name: folder / f"{name}.html" for name in ("profile", "asked", "plan", "alone")}


_CLIPPED = """
[...document.querySelectorAll(".chart")].flatMap((chart) => {
  const frame = chart.getBoundingClientRect();
  const outside = (box) => box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1);
  const texts = [...chart.querySelectorAll(".xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .bartext, .annotation text")];
  const plot = chart.querySelector(".nsewdrag")?.getBoundingClientRect();
  const before = [...chart.querySelectorAll(".bartext")].filter((text) => text.getBoundingClientRect().left < plot.left);
  return [...before, ...texts.filter((text) => outside(text.getBoundingClientRect()))].map((text) => text.textContent);
})
"""


class Opened:
    """A page with what went wrong in it."""

    def __init__(self, browser, path: Path, width: int = 1200, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._note_request(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('.chart .main-svg').length > 0")

    def _note_request(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.problems.append(f"fetched {url}")

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()


@pytest.fixture(scope="module")
def opened_once(browser, pages) -> Iterator[Callable[[str], Opened]]:
    """Pages that stay open from test to test, for drawing one takes seconds: a test changes only what it alone looks at."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(Opened(browser, pages[name])))


@pytest.mark.parametrize(
    ("name", "num_charts", "scheme", "width"),
    slow_but(
        [
            ("profile", 4, "dark", 400),
            ("asked", 6, "light", 1400),
            ("plan", 7, "dark", 400),
        ],
        [
            (*page, scheme, width)
            for page in (("profile", 4), ("asked", 6), ("plan", 7), ("alone", 2))
            for scheme in ("light", "dark")
            for width in (400, 1400)
        ],
    ),
)
def test_every_chart_is_drawn_and_nothing_complains(browser, pages, name, num_charts, scheme, width) -> None:
    with Opened(browser, pages[name], width, scheme) as opened:
        drawn = opened.page.eval_on_selector_all(
            ".chart", "places => places.map(place => place.querySelectorAll('.main-svg .trace, .slice').length)"
        )
        assert len(drawn) == num_charts
        assert all(drawn), drawn
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
        assert opened.page.evaluate(_CLIPPED) == [], "what a chart writes is inside of it"
        assert opened.page.evaluate("window.hacked") is None
        assert opened.problems == []


def test_hovering_names_the_op_and_its_module(opened_once) -> None:
    opened = opened_once("profile")
    place = opened.page.locator(".chart").first
    place.scroll_into_view_if_needed()
    box = place.locator(".nsewdrag").first.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = opened.page.locator(".hoverlayer").first
    label.get_by_text("after mm").wait_for()
    text = label.text_content()
    assert "h." in text
    assert "saved for the backward" in text
    assert opened.problems == []


@pytest.mark.slow  # the legend is plotly's own
def test_a_click_in_the_legend_hides_a_category(browser, pages) -> None:
    with Opened(browser, pages["profile"]) as opened:
        place = opened.page.locator(".chart").first
        areas = place.locator(".scatterlayer .trace.scatter")
        before = areas.count()
        place.locator(".legendtoggle").nth(3).click()
        opened.page.wait_for_function(
            "document.querySelector('.chart').data.filter(trace => trace.visible === 'legendonly').length === 1"
        )
        assert areas.count() == before - 1
        assert opened.problems == []


def test_the_buttons_change_what_the_treemap_shows(opened_once) -> None:
    opened = opened_once("profile")
    opened.page.get_by_role("button", name="parameter bytes").click()
    opened.page.get_by_text("100 MiB").first.wait_for()
    assert opened.page.get_by_role("button", name="parameter bytes").get_attribute("aria-pressed") == "true"
    assert opened.page.get_by_role("button", name="saved bytes").get_attribute("aria-pressed") == "false"
    assert opened.problems == []


@pytest.mark.slow  # one of the charts that every page draws
def test_treemap_and_icicle_are_two_forms_of_one_chart(opened_once) -> None:
    opened = opened_once("asked")
    opened.page.get_by_role("button", name="time", exact=True).click()
    opened.page.get_by_role("button", name="icicle").click()
    opened.page.locator(".iciclelayer .slice").first.wait_for()
    assert opened.page.locator(".treemaplayer .slice").count() == 0
    opened.page.locator(".iciclelayer").get_by_text("120 ms").wait_for()
    pressed = opened.page.locator("button[aria-pressed=true]").all_text_contents()
    assert pressed == ["time", "icicle"], "each group of buttons has one that is pressed"
    assert opened.problems == []


def test_hovering_a_module_at_the_peak_names_category_and_size(opened_once) -> None:
    opened = opened_once("profile")
    place = opened.page.locator(".chart").nth(2)
    place.scroll_into_view_if_needed()
    bar = place.locator(".bars .point path").first.bounding_box()
    opened.page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
    opened.page.locator(".hoverlayer").get_by_text(" MiB of ").first.wait_for()
    assert opened.problems == []


def test_the_budget_and_the_largest_that_fits_are_told(opened_once) -> None:
    opened = opened_once("asked")
    opened.page.get_by_text("does not fit into 800 MiB").wait_for()
    opened.page.get_by_text("The largest that fits: 3.").wait_for()
    opened.page.get_by_text("budget 800 MiB").first.wait_for()
    assert opened.page.get_by_text("--batch-size 3").is_visible()
    assert opened.problems == []


def test_a_line_of_the_sweep_can_be_hidden(opened_once) -> None:
    opened = opened_once("asked")
    place = opened.page.locator(".chart").nth(1)
    assert place.locator(".scatterlayer .trace").count() == 3
    place.locator(".legendtoggle").nth(1).click()
    opened.page.wait_for_function("document.querySelectorAll('.chart')[1].data[1].visible === 'legendonly'")
    assert place.locator(".scatterlayer .trace").count() == 2
    assert opened.problems == []


def test_a_corner_of_the_frontier_names_its_plan(opened_once) -> None:
    opened = opened_once("plan")
    place = opened.page.locator(".chart").nth(6)
    place.scroll_into_view_if_needed()
    assert place.locator(".scatterlayer .trace").count() == 2, "the stair, and this plan on it"
    point = place.locator(".scatterlayer .trace").first.locator(".points path").first.bounding_box()
    opened.page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    label = opened.page.locator(".hoverlayer").get_by_text("300 ms with 500 MiB").first
    label.wait_for()
    opened.page.locator(".hoverlayer").get_by_text("recomputation 30").first.wait_for()
    opened.page.locator(".hoverlayer").get_by_text("plans/plan-1.json").first.wait_for()
    assert place.locator(".textpoint").all_text_contents() == ["plan-1", "plan-2", "plan-3"]
    assert opened.problems == []


def test_the_hottest_ops_sort_by_any_column(opened_once) -> None:
    opened = opened_once("asked")
    table = opened.page.locator("table.sortable").last

    def first_ops() -> list[str]:
        return [text.split("<")[0].strip() for text in table.locator("tbody tr td:first-child").all_text_contents()]

    assert first_ops() == ["mm", "mul"]
    table.get_by_text("calls").click()
    assert first_ops() == ["mul", "mm"], "the most calls first"
    table.get_by_text("calls").click()
    assert first_ops() == ["mm", "mul"], "the fewest first"
    assert table.locator("th[aria-sort=ascending]").text_content() == "calls"
    table.get_by_text("bytes moved").press("Enter")
    assert first_ops() == ["mul", "mm"], "by keyboard"
    assert opened.problems == []


def test_the_fastest_recipe_is_marked_and_all_have_numbers(opened_once) -> None:
    opened = opened_once("plan")
    section = opened.page.locator("section", has=opened.page.get_by_text("The recipes side by side"))
    rows = {
        cells[0]: cells for cells in (row.split("\t") for row in section.locator("table").inner_text().splitlines())
    }
    assert rows["joint"][1:3] == ["200\u00a0ms", "120\u00a0ms"]
    assert rows["joint"][-1] == "fastest"
    assert [name for name, cells in rows.items() if cells[-1] == "fastest"] == ["joint"]
    assert rows["ddp"][-1] == "does not fit"


def test_the_memory_is_drawn_over_time_where_it_is_known(opened_once) -> None:
    for name, title, last in (("asked", "predicted time, ms", 118), ("profile", "ops of the step, in order", 59)):
        page = opened_once(name).page
        chart = page.locator(".chart", has=page.locator(".xtitle", has_text=title))
        assert chart.evaluate("chart => chart.data[0].x.at(-1)") == pytest.approx(last)


def test_every_short_name_of_the_plan_is_explained(opened_once) -> None:
    opened = opened_once("plan")
    used = set(opened.page.locator("details:not(:first-of-type) .chip").all_text_contents())
    explained = opened.page.locator("details:first-of-type .chip").all_text_contents()
    assert used
    assert {part for chip in used for part in (chip.split("@")[0], f"@{chip.split('@')[1]}")} <= set(explained)


def test_an_old_browser_is_told_and_keeps_its_tables(browser, pages) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(pages["plan"].as_uri())
    page.get_by_text("This browser cannot unpack the charts").first.wait_for()
    assert page.get_by_text("fastest").first.is_visible()
    page.close()


def test_the_theme_follows_the_system_and_the_button(browser, pages) -> None:
    with Opened(browser, pages["plan"], scheme="dark") as opened:
        background = "getComputedStyle(document.body).backgroundColor"
        dark = opened.page.evaluate(background)
        opened.page.get_by_role("button", name="light or dark").click()
        light = opened.page.evaluate(background)
        assert sum(map(int, dark[4:-1].split(","))) < 150 < 600 < sum(map(int, light[4:-1].split(",")))
        assert opened.problems == []


def test_the_checks_see_what_is_wrong(browser, tmp_path: Path) -> None:
    """A page with a fault, so that the tests above can fail."""
    path = tmp_path / "bad.html"
    broken = "<div class=chart><svg class=main-svg></svg></div><img src='http://127.0.0.1:9/x.png'>"
    path.write_text(f"<body>{broken}<script>throw new Error('planted')</script>")
    with Opened(browser, path) as opened:
        opened.page.wait_for_timeout(200)
        assert any("planted" in problem for problem in opened.problems)
        assert any("fetched" in problem for problem in opened.problems)
