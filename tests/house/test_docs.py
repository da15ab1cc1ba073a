"""Every command and every block of code in README and docs, run; failures name page, line and what was written.

A block that cannot run here says why in a comment right above it: `<!-- not run: reason -->`. A page is one session: its
commands run in one directory, which begins with `tests/docs_files`, and its Python blocks share one namespace, in a directory of
their own with a plan for one rank.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.docs_blocks import (
    LANGUAGES,
    PAGES,
    ROOT,
    SHELLS,
    Block,
    Command,
    Shell,
    blocks,
    blocks_of,
    first_difference,
    parsed,
)
from trainwright.artifacts import parse_bytes
from trainwright.cli import main
from trainwright.models import zoo

FILES = ROOT / "tests" / "docs_files"
MOST_NOT_RUN = 12
SLOW_PAGES = {
    "README.md",
    "docs/estimated-gradients.md",
    "docs/long-context.md",
    "docs/profiling.md",
    "docs/training.md",
    "docs/hardware.md",
    "docs/integrations.md",
    "docs/pipeline.md",
    "docs/solvers/selection.md",
    "docs/planning.md",
    "docs/streaming.md",
    "docs/sync.md",
    "docs/tiers.md",
    "docs/your-own-model.md",
}
"""Pages whose commands together take minutes. All others, new ones too, are run on each change."""
PAST = {"docs/log.md"}
"""Tells what was tried, options that never came included."""
ALONE = {"docs/adding-an-op.md"}
"""Pages whose Python registers ops and rules, which would stay in this process."""
OTHERS = {
    "--nnodes",
    "--nproc-per-node",
    "--standalone",
    "--rdzv-id",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--max-restarts",
    "--export",
}
"""Options of torchrun and SLURM."""
PIN = re.compile(r"'([^'\s]+=(?:keep|recompute|offload|state-keep|state-offload|replicate@\w+|shard\(\w+\)@\w+))'")


def commands(page: str) -> list[Command]:
    return [
        command for block in blocks() if block.page == page and block.language in SHELLS for command in block.commands()
    ]


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if any(block.page == page and block.language in languages for block in blocks())]


def marked(pages: list[str], slow: set[str]) -> list[Any]:
    return [pytest.param(page, marks=pytest.mark.slow) if page in slow else page for page in pages]


@pytest.fixture(scope="module")
def plan_for_one() -> str:
    with in_folder(FILES):
        loaded = tw.load_model("train.py:build")
    return tw.plan(loaded.model, loaded.batch, hardware="cpu:1").to_json()


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Work there and import from there, as a script would; what was imported is forgotten afterwards."""
    path, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


def prepared(folder: Path) -> Path:
    shutil.copytree(FILES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scratch").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def test_there_are_blocks_of_each_kind() -> None:
    assert len(PAGES) > 15
    assert {block.language for block in blocks()} <= set(LANGUAGES), [
        f"{block.place}: a language is needed after the fence, one of {', '.join(LANGUAGES)}"
        for block in blocks()
        if block.language not in LANGUAGES
    ]
    assert len([block for block in blocks() if block.language == "python"]) > 10
    assert sum(len(commands(page)) for page in PAGES) > 25


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    unmarked = [block.place for block in blocks() if block.language == "text" and block.reason is None]
    assert not unmarked, f"{unmarked}: text that a command wrote belongs to that command, in a console block"
    left_out = [f"{block.place}: {block.reason}" for block in blocks() if block.reason is not None]
    assert len(left_out) <= MOST_NOT_RUN, left_out


@pytest.mark.parametrize("page", pages_with(*SHELLS))
def test_command_lines_can_be_read(page: str) -> None:
    """Options, their values, models, hardware, optimizers: of all blocks, those that are not run included."""
    for command in commands(page):
        words = command.arguments
        if "trainwright" in words:
            try:
                check(parsed(words[words.index("trainwright") + 1 :]).params)
            except Exception as error:
                pytest.fail(f"{command}\n{getattr(error, 'message', error)}")


def check(given: dict[str, Any]) -> None:
    """Raise the user's error for a model, hardware, a size or a name that there is not."""
    if str(given.get("spec")).startswith("zoo:"):
        zoo._find(given["spec"].removeprefix("zoo:"))
    for name in (given.get("hardware") or "").split(","):
        if name and not name.endswith(".json"):
            tw.hardware(name)
    for name in ("memory", "fits"):
        if given.get(name) and given[name] != "auto":
            parse_bytes(given[name])
    streamed = bool(given.get("stream"))  # by MeZO, which no plan knows
    for name in () if streamed else (given.get("optimizer") or "").split(","):
        if name:
            tw.optim.record(name)
    if given.get("select"):
        tw.selection.selection(given["select"])


@pytest.mark.parametrize("page", [page for page in PAGES if page not in PAST])
def test_options_that_a_page_names_exist(page: str) -> None:
    known = OTHERS | {option for verb in verbs() for option in options(verb)}
    text = (ROOT / page).read_text(encoding="utf8")
    prose = re.sub(r"^\s*(```.*?^\s*```|.*python -m (benchmarks|pip).*?$)", "", text, flags=re.S | re.M)
    named = {
        option
        for span in re.findall(r"`([^`\n]*(?:\n[^`\n]+)?)`", prose)
        if not span.startswith(("python", "pip"))
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    }
    assert named <= known, f"{page}: no command has {', '.join(sorted(named - known))}"


def verbs() -> list[Any]:
    import typer

    from trainwright.cli.app import app

    return list(typer.main.get_command(app).commands.values())  # type: ignore[attr-defined]


def options(verb: Any) -> list[str]:
    return [option for parameter in verb.params for option in parameter.opts]


@pytest.mark.parametrize("page", marked(pages_with("python", "diff"), {"docs/profiling.md", "docs/solvers/policy.md"}))
def test_python_runs(page: str, tmp_path: Path, plan_for_one: str) -> None:
    folder = prepared(tmp_path)
    (folder / "plan.json").write_text(plan_for_one)
    if page in ALONE:
        run_alone(page, folder)
        return
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with in_folder(folder):
        for block in code(page):
            for text in versions(block):
                try:
                    exec(compile("\n" * block.line + text, str(ROOT / page), "exec"), namespace)
                except Exception as error:
                    raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error


def code(page: str) -> list[Block]:
    return [
        block for block in blocks() if block.page == page and block.language in ("python", "diff") and not block.reason
    ]


def versions(block: Block) -> list[str]:
    """The code of a block; of a diff, what was there before and what is there now."""
    if block.language != "diff":
        return [block.text]
    lines = block.text.split("\n")
    return ["\n".join(line[1:] for line in lines if not line.startswith(other)) for other in "+-"]


def run_alone(page: str, folder: Path) -> None:
    script = folder / "page.py"
    script.write_text("\n".join(block.text for block in code(page)))
    Shell(folder).run(Command(code(page)[0], ["python", "page.py"], claims=False))


@pytest.mark.parametrize("page", pages_with("json"))
def test_json_can_be_read(page: str) -> None:
    for block in blocks():
        if block.page == page and block.language == "json":
            text = block.text if block.text.lstrip().startswith(("{", "[")) else "{" + block.text + "}"
            assert json.loads(text), block.place


@pytest.mark.parametrize("page", marked(pages_with(*SHELLS), SLOW_PAGES))
def test_commands_run(page: str, tmp_path: Path) -> None:
    shell = Shell(prepared(tmp_path))
    with in_folder(shell.folder):
        for command in commands(page):
            if command.block.reason is None:
                shell.run(command)


def test_pins_in_help_and_docs_can_be_obeyed() -> None:
    """Those of the help are carried out for a GPT-2 on two processes; the others at least name an axis that hardware has."""
    (help_text,) = [parameter.help for verb in verbs() for parameter in verb.params if parameter.name == "pin"]
    shown = PIN.findall(help_text)
    assert len(shown) == 2, help_text
    model, batch = zoo.build("gpt2-tiny", n_layer=1)
    recompute, shard = (tw.plan(model, batch, hardware="cpu:2", pins=[pin]).modules for pin in shown)
    key = "transformer.h.0.mlp.c_fc:linear"
    assert recompute[key].recomputed == {"out": "all"}
    assert shard[key].split == ("o",)
    texts = [(ROOT / page).read_text(encoding="utf8") for page in PAGES]
    texts += [path.read_text(encoding="utf8") for path in (ROOT / "trainwright").rglob("*.py")]
    pins = {pin for text in texts for pin in PIN.findall(text)}
    assert len(pins) > 3
    assert {pin.partition("@")[2] for pin in pins} <= {"", "cpu", "gpu", "node"}


# What this file is made of.


def test_blocks_are_found_with_their_reasons() -> None:
    text = "a\n<!-- not run: no GPU -->\n```sh\nx=1 trainwright \\\n  zoo\n```\n"
    text += "b\n```console\n$ trainwright\nout\n$ echo $?\n1\n```\n"
    first, second = blocks_of("page.md", text)
    assert (first.line, first.language, first.reason, second.reason) == (3, "sh", "no GPU", None)
    (command,) = first.commands()
    assert (command.settings, command.arguments, str(command)) == (
        {"x": "1"},
        ["trainwright", "zoo"],
        "page.md:3: x=1 trainwright zoo",
    )
    assert [(each.words, each.output) for each in second.commands()] == [
        (["trainwright"], ["out"]),
        (["echo", "$?"], ["1"]),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("$ trainwright zoo --no-such", "ended with status 2"),
        ("$ trainwright --version\ntrainwright 7", "claimed '7', found"),
        ("$ trainwright --version\n… is\nnot there", "which does not follow"),
        ("$ trainwright zoo --no-such\nerror: poem", "claimed 'poem', found 'no'"),
        ("$ trainwright --version\nerror: refused", "ended with status 0"),
        ("$ rm page", "is no command that this test can run"),
    ],
)
def test_a_planted_fault_is_named_by_its_place(tmp_path: Path, text: str, message: str) -> None:
    (command,) = blocks_of("page.md", f"\n```console\n{text}\n```")[0].commands()
    with pytest.raises(AssertionError, match=r"page\.md:2: ") as found:
        Shell(tmp_path).run(command)
    assert message in str(found.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "zoo:gpt2", "--no-such", "1"],
        ["plan", "zoo:gpt3", "--hardware", "cpu:2"],
        ["plan", "zoo:gpt2", "--hardware", "x2"],
    ],
)
def test_a_command_line_that_cannot_be_read_is_found(arguments: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such option|name of a zoo model|hardware"):
        check(parsed(arguments).params)


def test_outputs_are_compared_by_words() -> None:
    assert first_difference(["a   b", "───", "… d"], "a b\n ──────── \n c c d\n") is None
    assert first_difference(["a b"], "a b c") == "claimed no more, found 'c'"
    assert first_difference(["a c"], "a b c") == "claimed 'c', found 'b' after 'a'"
    assert main(["--version"]) == 0
