"""The lowest and the highest release of flwr that pyproject.toml allows, each in an environment of its own over this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/federated/test_federated_flower.py",
    "tests/federated/test_federated_fzoos.py::test_on_flower_it_is_the_same_run",
    "tests/federated/test_federated_processes.py::test_the_local_simulation_gives_the_bits_of_its_order_of_arrivals[fedfix]",
    "tests/federated/test_federated_processes.py::test_three_processes_give_the_bits_of_their_order_of_arrivals[fedbuff]",
)


def allowed() -> dict[str, str]:
    """Return the lowest and the highest release that pyproject.toml allows, as pip takes them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.fullmatch(r"flwr\[simulation\]>=1\.(\d+),<1\.(\d+)", extras["federated"][0])
    assert found is not None, extras["federated"]
    return {"lowest": f"1.{found[1]}.*", "highest": f"1.{int(found[2]) - 1}.*"}


def environment(folder: Path, release: str) -> Path:
    """Return the Python of a new environment with this release of Flower, everything else taken from this one."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    (path,) = folder.glob("lib/python*/site-packages")
    (path / "beneath.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*install, f"flwr[simulation]=={release}"], capture_output=True, text=True)
    if done.returncode != 0 and "No matching distribution found for certifi" in done.stderr:
        # A release asks for certifi of its own day, which an index that lags behind does not have yet.
        done = subprocess.run([*install, "--no-deps", f"flwr=={release}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["lowest", "highest"])
def test_this_release_of_flower_gives_the_same_bits(which: str, tmp_path: Path) -> None:
    release = allowed()[which]
    # Where it is installed, pip would find it beneath a new environment, which then has none of its commands.
    is_here = version("flwr").startswith(release[:-1])
    python = Path(sys.executable) if is_here else environment(tmp_path / "venv", release)
    script = "import flwr; from importlib.metadata import version; print(flwr.__file__, version('flwr'))"
    run = [str(python), "-c", script]
    file, found = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert found.startswith(release[:-1])
    assert file.startswith(str(tmp_path)) != is_here
    done = subprocess.run(
        [str(python), "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(f"flwr {found}: {done.stdout.strip().splitlines()[-1]}")


def test_the_bounds_are_read() -> None:
    assert set(allowed()) == {"lowest", "highest"}
    assert all(re.fullmatch(r"1\.\d+\.\*", release) for release in allowed().values())
