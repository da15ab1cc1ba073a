"""`trainwright examples`: scripts to start from, which the package brings along."""

from __future__ import annotations

import ast
import difflib
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import UserError
from ..artifacts.record import write_atomically
from .output import JsonOption, answer, rows_as_table

FOLDER = Path(__file__).parent.parent / "examples"
"""In a checkout this is a link to the folder of that name; a wheel holds the files themselves."""


def examples(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Copy these; without, list all.")] = None,
    folder: Annotated[str, typer.Option("-o", "--output", metavar="DIR", help="Copy them there.")] = "examples",
    json_path: JsonOption = None,
) -> None:
    """List the example scripts, or copy some: ordinary loops, Trainer, Accelerate, Fabric, LoRA, SLURM, solvers, Flower."""
    if not names:
        rows = [{"name": name, "shows": about(path)} for name, path in there_are().items()]
        answer(rows_as_table(rows), lambda: rows, json_path)
        return
    for source, target in _copies(names, Path(folder)):
        for part in _files(source):
            copy = target / part.relative_to(source) if source.is_dir() else target
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, part.read_text(encoding="utf8"))
        print(target)


def there_are() -> dict[str, Path]:
    """Return the examples by name: scripts, and folders with a pyproject.toml, which are apps.

    >>> there_are()["plain_loop"].name
    'plain_loop.py'
    """
    apps = [path.parent for path in FOLDER.glob("**/pyproject.toml")]
    files = [path for path in FOLDER.glob("**/*") if path.suffix in (".py", ".sh") and not {*apps} & {*path.parents}]
    files += apps
    named = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in files}
    return dict(sorted(named.items(), key=lambda item: (item[0].count("/"), item[0])))


def _files(path: Path) -> list[Path]:
    """Return what is copied of an example."""
    if not path.is_dir():
        return [path]
    return sorted(part for part in path.glob("**/*") if part.suffix in (".py", ".toml"))


def about(path: Path) -> str:
    """Return the first sentence that a script, or an app's pyproject.toml, says of itself.

    >>> about(there_are()["slurm"])
    'One torchrun a node; SLURM starts the job again when a node fails (--requeue), and it goes on from the last checkpoint'
    """
    if path.is_dir():
        return str(tomllib.loads((path / "pyproject.toml").read_text(encoding="utf8"))["project"]["description"])
    text = path.read_text(encoding="utf8")
    if path.suffix == ".py":
        line = (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0]
    else:
        line = next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")
    return line.rstrip(".")


def _copies(names: list[str], folder: Path) -> list[tuple[Path, Path]]:
    """From where to where; checked before anything is written."""
    known = there_are()
    copies = []
    for name in names:
        short = name.removeprefix("examples/").removesuffix(".py").removesuffix(".sh")
        if short not in known:
            near = difflib.get_close_matches(short, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"the name of an example is needed; got {name!r}; {hint}")
        target = folder / known[short].relative_to(FOLDER)
        if target.exists():
            raise UserError(f"a new file is needed for the example; {target} exists; choose another folder with -o")
        copies.append((known[short], target))
    return copies
