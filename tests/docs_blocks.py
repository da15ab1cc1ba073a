"""The fenced blocks of the documentation, and a shell that is just large enough for the commands in them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import typer

from trainwright.cli import main
from trainwright.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
SHELLS, LANGUAGES = ("sh", "console"), ("sh", "console", "python", "json", "diff", "text")
LOOSE = "<!-- figures may differ -->"
"""Above a block: its numbers are those of one machine; words and how many numbers there are still count."""
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
ANYTHING = "…"
"""In an output: whatever stands there, on this line or on several."""


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` says why it is not run, None where it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    loose: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """The commands of a shell block, with the output that a console block claims for each."""
        lines = self.text.replace("\\\n", " ").split("\n")
        current: Command | None = None
        for text in lines:
            if self.language == "console" and not text.startswith("$ "):
                if current is not None:
                    current.output.append(text)
                continue
            if current is not None:
                yield current
            words = shlex.split(text.removeprefix("$ "), comments=True)
            current = Command(self, words, claims=self.language == "console") if words else None
        if current is not None:
            yield current


@dataclass
class Command:
    """A line of a shell block."""

    block: Block
    words: list[str]
    claims: bool
    output: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.block.place}: {shlex.join(self.words)}"

    @property
    def settings(self) -> dict[str, str]:
        """Variables that are set for this command alone."""
        found = {}
        for word in self.words:
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                break
            found[name] = value
        return found

    @property
    def arguments(self) -> list[str]:
        return self.words[len(self.settings) :]


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text(encoding="utf8")))


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page; a comment right above one says why it is not run."""
    found: list[Block] = []
    language, begun, held, above = None, 0, [], ""
    for number, line in enumerate(text.split("\n"), 1):
        fence = line.strip().startswith("```")
        if language is not None and not fence:
            held.append(line)
        elif language is not None:
            match = NOT_RUN.search(above)
            found.append(
                Block(
                    page, begun, language, "\n".join(held), match["reason"] if match else None, above.strip() == LOOSE
                )
            )
            language, above = None, ""
        elif fence:
            language, begun, held = line.strip().removeprefix("```"), number, []
        elif line.strip():
            above = line
    assert language is None, f"{page}:{begun}: this block has no end"
    return found


def parsed(arguments: list[str]) -> typer.Context:
    """Read a command line of `trainwright` as the command does, without running it; raises what typer raises."""
    group = typer.main.get_command(app)
    root = group.make_context("trainwright", [])
    if not arguments or arguments[0].startswith("-"):
        return group.make_context("trainwright", list(arguments))
    name, verb, rest = group.resolve_command(root, list(arguments))  # type: ignore[attr-defined]
    found: typer.Context = verb.make_context(name, rest, parent=root)
    return found


@dataclass
class Shell:
    """Runs commands in a directory, those of trainwright in this process."""

    folder: Path
    status: int = 0

    def run(self, command: Command) -> None:
        """Run it; an `AssertionError` names page, line and what was written where status or output are not as claimed."""
        words = command.arguments
        if words == ["echo", "$?"]:
            out, err = f"{self.status}\n", ""
        elif words[0] == "trainwright":
            out, err = self._own(words[1:], command.settings)
        elif words[0] == "mkdir":
            for name in words[1:]:
                (self.folder / name).mkdir()
            out, err = "", ""
        elif words[0] in ("python", "torchrun"):
            out, err = self._other(words, command.settings)
        else:
            raise AssertionError(f"{command}\nis no command that this test can run; mark the block <!-- not run: … -->")
        refused = any(line.startswith("error: ") for line in command.output)
        if words[0] != "echo":
            wrong = self.status != 0 if not refused else self.status not in (1, 2)
            assert not wrong, f"{command}\nended with status {self.status}\n{out[-3000:]}\n{err[-3000:]}"
        if command.claims:
            difference = first_difference(command.output, out + err, command.block.loose)
            assert difference is None, f"{command}\n{difference}\n--- it wrote\n{out}{err}"

    def _own(self, arguments: list[str], settings: dict[str, str]) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.ExitStack() as around:
            around.enter_context(_environment(settings))
            around.enter_context(contextlib.chdir(self.folder))
            around.enter_context(contextlib.redirect_stdout(out))
            around.enter_context(contextlib.redirect_stderr(err))
            self.status = main(arguments)
        return out.getvalue(), err.getvalue()

    def _other(self, words: list[str], settings: dict[str, str]) -> tuple[str, str]:
        program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "torch.distributed.run"]
        done = subprocess.run(
            [*program, *words[1:]], cwd=self.folder, capture_output=True, text=True, timeout=600,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | settings,
        )  # fmt: skip
        self.status = done.returncode
        return done.stdout, done.stderr


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({"COLUMNS": "140", **settings})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def first_difference(claimed: list[str], written: str, loose: bool = False) -> str | None:
    """Return where the words of a claimed output first differ from what was written; rules and line breaks do not count.

    loose: one number is as good as another, and so are units of time.

    >>> first_difference(["peak  15 MiB  …", "step … s"], "peak 15 MiB in backward\\nand step 3.1 s\\n") is None
    True
    >>> first_difference(["peak 15 MiB"], "peak 14 MiB")
    "claimed '15', found '14' after 'peak'"
    >>> first_difference(["peak 15 MiB, 3.1 s"], "peak 14 MiB, 99 ms", loose=True) is None
    True
    """
    words = _words("\n".join(claimed), loose)
    pieces: list[list[str]] = [[]]
    for word in words:
        if word == ANYTHING:
            pieces.append([])
        else:
            pieces[-1].append(word)
    found = _words(written, loose)
    if pieces[0] != found[: len(pieces[0])]:
        return _mismatch(pieces[0], found)
    place = len(pieces[0])
    for number, piece in enumerate(pieces[1:], 1):
        last = number == len(pieces) - 1
        starts = [len(found) - len(piece)] if last else range(place, len(found) - len(piece) + 1)
        start = next((at for at in starts if at >= place and found[at : at + len(piece)] == piece), None)
        if start is None:
            return f"claimed {' '.join(piece)!r}, which does not follow"
        place = start + len(piece)
    if len(pieces) == 1 and len(found) > place:
        return f"claimed no more, found {found[place]!r}"
    return None


def _words(text: str, loose: bool = False) -> list[str]:
    if loose:
        text = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?( [mµn]?s\b)?", "#", text)
    return [word for word in text.split() if not re.fullmatch("[─-]+", word)]


def _mismatch(claimed: list[str], found: list[str]) -> str:
    at = next((k for k, (a, b) in enumerate(zip(claimed, found)) if a != b), min(len(claimed), len(found)))
    after = f" after {claimed[at - 1]!r}" if at else ""
    one, other = (repr(words[at]) if at < len(words) else "nothing" for words in (claimed, found))
    return f"claimed {one}, found {other}{after}"
