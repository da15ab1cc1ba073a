"""What a wheel holds, and how it does where packages are missing that only a part of it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli import main

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("LICENSE", "README.md", "pyproject.toml")
DATA = {".css", ".js", ".cpp", ".json", ".sh", ".typed"}


def built(kind: str, source: Path, folder: Path) -> Path:
    """Build a `wheel` or an `sdist` of the tree `source`."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of a copy of this tree: what is in it went through both."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "trainwright", copy / "trainwright", symlinks=True, ignore=ignored)
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=ignored)
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    sdist = built("sdist", copy, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return built("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def test_everything_is_in_it(wheel: Path) -> None:
    tracked = [path for path in (ROOT / "trainwright").rglob("*") if path.suffix in DATA | {".py"} and path.is_file()]
    tracked += [ROOT / "trainwright" / path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.*")]
    wanted = {path.relative_to(ROOT).as_posix() for path in tracked if "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        info = next(name for name in held if name.endswith("METADATA")).removesuffix("METADATA")
        metadata = archive.read(info + "METADATA").decode()
        licence = archive.read(info + "licenses/LICENSE").decode()
    assert len(wanted) > 300
    assert wanted <= held, sorted(wanted - held)
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/", "docs/"))]
    assert "License-Expression: Apache-2.0" in metadata
    assert "END OF TERMS AND CONDITIONS" in licence


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, where `transformers` cannot be imported."""

    folder: Path

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [self.folder / "bin" / "trainwright", *arguments],
            cwd=cwd, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip: Sequence[str] = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    ]
    subprocess.run([sys.executable, *pip], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    blocker = "import sys; sys.modules['transformers'] = None"
    (site / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{blocker}\n")
    return Installed(folder)


@pytest.mark.slow  # that the package is asked for by name is tested in process
def test_the_zoo_is_listed_without_transformers(installed: Installed, tmp_path: Path) -> None:
    done = installed.run("zoo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gpt2-tiny" in done.stdout
    assert "124 M" in done.stdout
    assert "all of them need the package transformers, which is not installed; try pip install" in done.stderr


@pytest.mark.parametrize("arguments", [["demo"], pytest.param(["profile", "zoo:gpt2-tiny"], marks=pytest.mark.slow)])
def test_what_is_missing_is_said_at_once(installed: Installed, tmp_path: Path, arguments: list[str]) -> None:
    done = installed.run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs the package transformers; it is not installed; try pip install 'transformers>=5.0'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # that all examples are in it is tested above
def test_an_example_of_the_wheel_is_copied_and_runs(installed: Installed, tmp_path: Path) -> None:
    listed = installed.run("examples", cwd=tmp_path).stdout
    assert all(name in listed for name in ("own_model", "slurm", "solvers/minimax"))
    assert installed.run("examples", "own_model", "slurm", cwd=tmp_path).stdout.split() == [
        "examples/own_model.py",
        "examples/slurm.sh",
    ]
    copied = (tmp_path / "examples" / "own_model.py").read_bytes()
    assert copied == (ROOT / "examples" / "own_model.py").read_bytes()
    done = installed.run("profile", "examples/own_model.py:build", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_example_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "slurm", "-o", "mine"]) == 0
    for arguments, message in (
        (["own_model", "slurm", "-o", "mine"], "mine/slurm.sh exists; choose another folder with -o"),
        (["own_modle"], "the name of an example is needed; got 'own_modle'; did you mean own_model?"),
    ):
        assert main(["examples", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*.*")] == ["slurm.sh"]
