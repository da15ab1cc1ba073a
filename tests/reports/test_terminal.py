"""What fits the terminal: no table breaks a number from its unit or a word, and the bar of a run keeps what matters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import report_samples as samples
from trainwright import optim
from trainwright.artifacts import OpPlan, ParamPlan, Plan, diff
from trainwright.cli.optimizers import _LEAST_TELLING
from trainwright.cli.progress import StepProgress, bar_line
from trainwright.reports.frontier_figure import frontier_table
from trainwright.reports.terminal import cluster_table, compare_table, plan_table, report_table, rows_table
from trainwright.reports.terminal_profile import profile_table
from trainwright.reports.text import plain_table, rendered
from trainwright.reports.wrapping import least_width, wrapped

WIDTHS = (60, 80, 100, 200)
COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
UNITS = r"(?:[KMGTP]iB|B|[nµm]?s|%|[kMGTPE]?FLOP|min)"
ROOT = Path(__file__).parents[2]


def long_plan() -> Plan:
    """A plan with the long names that large models have."""
    layer = "model.decoder.layers.{0-31}"
    return samples.plan(
        modules={
            f"{layer}.self_attn.q_proj:linear": OpPlan(split=("b0", "o"), recomputed={"out": "0-15", "in0": "all"}),
            f"{layer}.encoder_attn_layer_norm:layer_norm": OpPlan(split=("d0", "-"), offloaded={"internal": "all"}),
        },
        params={
            f"{layer}.self_attn.q_proj.weight": ParamPlan(layout=("S1.1/3.12.64", "S0"), offloaded={"state": "0-5"})
        },
    )


def some_diff() -> str:
    halved = [part.model_copy(update={"saved_bytes": part.saved_bytes // 2, "forward_s": 0.5, "num_params": 1})
              for part in samples.profile().modules]  # fmt: skip
    return diff(samples.profile(), samples.profile(modules=tuple(halved), peak_bytes=2**33, saved_bytes=7)).table()


TABLES: dict[str, Callable[[], str]] = {
    "profile": lambda: profile_table(samples.asked_profile(), depth=3),
    "plan": lambda: plan_table(long_plan()),
    "compare": lambda: compare_table(samples.comparison()),
    "frontier": lambda: frontier_table(samples.frontier()),
    "report": lambda: report_table(samples.report()),
    "cluster": lambda: cluster_table(samples.cluster()),
    "diff": some_diff,
    "optimizers": lambda: rows_table(optim.table(), drop=_LEAST_TELLING),
}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make standard output a terminal of so many columns."""

    def of_width(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    return of_width


def faults(text: str, width: int, whole: str) -> list[str]:
    """What is wrong with a table on a terminal: lines too long, words cut off, numbers without their units."""
    lines = COLOURS.sub("", text).splitlines()
    found = [f"too long: {line}" for line in lines if len(line.rstrip()) > width]
    found += [f"cut: {line}" for line in lines if "…" in line and "…" not in whole]
    cells = [cell for line in lines for cell in re.split(r"\s{2,}", line.strip())]
    words = set(re.findall(r"[^\s]+", whole))
    numbers = {number for number, _ in re.findall(rf"(\d[\d.]*) ({UNITS})(?![\w])", whole)}
    found += [f"no unit: {cell}" for cell in cells if cell in numbers - words_alone(whole)]
    found += [f"unit alone: {cell}" for cell in cells if re.fullmatch(rf"{UNITS}(/s)?", cell)]
    found += [f"torn: {word}" for cell in cells for word in cell.split() if not part_of_a_word(word, words)]
    return found


def words_alone(whole: str) -> set[str]:
    """The numbers that stand somewhere without a unit."""
    return set(re.findall(rf"(?<![\w.])(\d[\d.]*)(?! ?(?:{UNITS}))(?![\w.])", whole))


def part_of_a_word(word: str, words: set[str]) -> bool:
    """Whether a word is whole, or the parts of a longer name."""
    if word in words or set(word) == {"─"}:
        return True
    return any(word in longer and re.search(r"[./:_@,=-]", longer) for longer in words)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_no_table_tears_words_or_units(name: str, width: int, terminal) -> None:
    whole = TABLES[name]()
    terminal(width)
    shown = re.sub(r"not shown in \d+ columns: .*(\n(?!\n).+)?", "", COLOURS.sub("", TABLES[name]()))
    assert not faults(shown, width, whole)


def test_the_check_of_tables_finds_planted_faults() -> None:
    whole = "peak 12.5 MiB of transformer wte"
    assert faults("a line that is too long", 10, whole)
    assert faults("peak   12.5\n   MiB", 80, whole)
    assert faults("trans\nformer", 80, whole)
    assert not faults("peak   12.5 MiB\ntransformer", 80, whole)


def test_columns_go_in_the_order_that_was_given_and_are_named(terminal) -> None:
    table = plain_table("op", "first to go", "second to go", "kept", drop=("first to go", "second to go"))
    table.add_row("a", "1.25 MiB", "1.50 MiB", "1.75 MiB")
    for width, gone in ((60, ()), (40, ("first to go",)), (20, ("first to go", "second to go"))):
        terminal(width)
        shown = rendered(table)
        assert "1.75 MiB" in shown
        head = shown.splitlines()[0]
        assert [name for name in ("first to go", "second to go") if name not in head] == list(gone)
        assert ("not shown" in shown) == bool(gone)


def test_a_file_gets_whole_lines_and_no_colours() -> None:
    text = plan_table(long_plan())
    assert "\x1b" not in text
    assert "model.decoder.layers.{0-31}" in text
    assert "self_attn.q_proj:linear" in text
    note = "a long remark " * 40
    assert note.strip() in plan_table(samples.plan(notes=(note,)))


def test_wrapping_keeps_every_word() -> None:
    text = "a plan within 900 KiB a device needs 1 min 15 s, or 3.5 % more than model.layers.{0-31}.mlp.c_proj:linear"
    for width in range(least_width(text), 120):
        lines = wrapped(text, width).splitlines()
        assert max(map(len, lines)) <= width
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert "900 KiB" in wrapped(text, width)
        assert "1 min 15 s," in wrapped(text, width)


@pytest.mark.parametrize("width", [22, *range(23, 140, 9)])
def test_the_bar_keeps_steps_and_time_left(width: int) -> None:
    parts = ["loss 3.1023", "40.6 ms", "peak 900 MiB of 1000 MiB", "1.2 k samples/s"]
    line = bar_line(width, "training", 30, 100, 75.0, parts)
    assert len(line) <= width
    assert " 30/100  0:01:15 left" in line
    shown = [part in line for part in parts]
    assert shown == sorted(shown, reverse=True), "what matters less goes first"


@pytest.mark.parametrize("first", [0, 2])
def test_steps_that_are_repeated_after_a_restart_count_once(first: int) -> None:
    progress = StepProgress(4, samples.plan())
    step = {"loss": 3.25, "step_s": 0.1, "samples_per_s": 412.0, "peak_bytes": 900, "comm_s": 0.0, "update_s": 0.0}
    for begun in (0, first):
        progress.on_event({"kind": "begun", "step": begun})
        for number in range(begun, 4):
            progress.on_event({"kind": "step", "step": number, "comm_bytes": {}, **step})
    assert [event["step"] for event in progress.steps] == [0, 1, 2, 3]


_RUN = """
import sys
from tests import report_samples as samples
from trainwright.cli.progress import StepProgress
with StepProgress(6, samples.plan()) as progress:
    for step in range(6):
        progress.on_event({"kind": "step", "step": step, "loss": 3.25, "step_s": 0.1, "samples_per_s": 412.0,
                           "peak_bytes": 900 << 20, "comm_s": 0.0, "update_s": 0.0, "comm_bytes": {}})
        progress._bar._live.refresh()
"""


@pytest.mark.parametrize("width", [60, 100])
def test_the_bar_on_a_terminal(width: int) -> None:
    shown = COLOURS.sub("", on_terminal([sys.executable, "-c", _RUN], width))
    lines = [line for line in re.split(r"[\r\n]+", shown) if "/6" in line]
    assert lines
    assert all(len(line.rstrip()) <= width for line in lines)
    assert all("left" in line for line in lines if "6/6" not in line)
    assert any("900 MiB of 1000 MiB" in line for line in lines if "6/6" not in line) == (width == 100)


def on_terminal(command: list[str], columns: int) -> str:
    """Return what a command writes to a terminal of so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=ROOT, env=environment) as running:
        os.close(its)
        said = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 4096):
                said += chunk
    os.close(ours)
    assert running.returncode == 0, said.decode()
    return said.decode()
