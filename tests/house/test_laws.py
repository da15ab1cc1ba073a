"""Laws of the house: imports point one way, public names are documented, private torch names stay in one place."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright as tw

ROOT = Path(__file__).resolve().parents[2] / "trainwright"
MAY_IMPORT = {
    "artifacts": {"artifacts"},
    "launch": {"launch", "artifacts"},
    "ops": {"ops"},
    "torch_internals": {"torch_internals", "artifacts", "ops"},
    "capture": {"capture", "torch_internals", "artifacts", "ops"},
    "program": {"program", "capture", "torch_internals", "artifacts", "ops"},
    "rank": {"rank", "program", "torch_internals", "artifacts", "ops"},
    "models": {"models", "capture", "torch_internals", "artifacts"},
    "profiler": {"profiler", "rank", "program", "capture", "torch_internals", "ops", "artifacts", "hardware"},
    "hardware": {"hardware", "tiers", "artifacts", "launch", "ops", "torch_internals"},
    "planner": {
        "planner",
        "rank",
        "program",
        "capture",
        "torch_internals",
        "artifacts",
        "ops",
        "profiler",
        "hardware",
        "tiers",
    },
    "runtime": {
        "runtime",
        "rank",
        "program",
        "capture",
        "torch_internals",
        "artifacts",
        "ops",
        "launch",
        "profiler",
        "tiers",
    },
    "integrations": {"integrations", "artifacts", "torch_internals", "capture", "program", "launch", "runtime", "sync"},
    "reports": {"reports", "artifacts"},
    "numerics": {"numerics"},
    "nn": {"nn", "artifacts", "ops"},
    "optim": {"optim", "artifacts", "numerics"},
    "schedules": {"schedules", "artifacts", "numerics"},
    "selection": {"selection", "artifacts", "numerics"},
    "solvers": {"solvers", "artifacts", "numerics"},
    "federated": {"federated", "artifacts", "numerics", "runtime"},
    "sync": {"sync", "artifacts", "launch", "numerics"},
    "tiers": {"tiers", "artifacts", "launch", "numerics"},
    "fusion": {"fusion", "artifacts", "capture", "models", "optim", "torch_internals"},
    "streaming": {"streaming", "artifacts", "numerics", "optim", "profiler", "sync", "tiers", "torch_internals"},
}
THIN = {("artifacts", "reports"), ("artifacts", "runtime")}
"""Imports inside a method of an artifact that only passes the call on."""
DOCUMENTED = r"foreach_\w+"
"""Underscored, but in torch's public documentation: the operations on lists of tensors."""
PRIVATE_TORCH = re.compile(
    rf"\btorch(\.\w+)*\._(?!_|{DOCUMENTED})\w+|from torch(\.\w+)*\._\w+ import|from torch\S* import .*\b_\w+"
)


def sources() -> list[Path]:
    found = sorted(ROOT.rglob("*.py"))
    assert len(found) > 50
    return found


def imported_folders(path: Path, text: str) -> list[tuple[str, int]]:
    """The folders of ours that a module imports, with the column of the import (0: at the top level)."""
    package = path.relative_to(ROOT).parts
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = list(package[: len(package) - node.level])
            parts = base + (node.module.split(".") if node.module else [])
            names = [parts[0]] if parts else [alias.name for alias in node.names]
            found += [(name, node.col_offset) for name in names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainwright."):
            found.append((str(node.module).split(".")[1], node.col_offset))
    return found


def layering_faults(path: Path, text: str) -> list[str]:
    folder = path.relative_to(ROOT).parts[0]
    if folder not in MAY_IMPORT:
        return []
    faults = []
    for name, column in imported_folders(path, text):
        thin = column > 0 and (folder, name) in THIN
        if name in MAY_IMPORT | {"cli": set()} and name not in MAY_IMPORT[folder] and not thin:
            faults.append(f"{path.relative_to(ROOT)} imports {name}")
    return faults


def test_imports_point_one_way() -> None:
    faults = [fault for path in sources() for fault in layering_faults(path, path.read_text(encoding="utf8"))]
    assert not faults, "\n".join(faults)


def test_the_layering_check_finds_a_planted_fault() -> None:
    assert layering_faults(ROOT / "ops" / "planted.py", "from ..planner import solve") == [
        f"{Path('ops/planted.py')} imports planner"
    ]
    assert layering_faults(ROOT / "artifacts" / "planted.py", "from ..runtime import module")


def private_torch_names(text: str) -> list[str]:
    code = "\n".join(line.split("#")[0] for line in text.splitlines())
    code = code.replace("torch.ops.aten._", "torch.ops.aten.")  # an op's name in the dispatcher, not Python's privacy
    return [match.group() for match in PRIVATE_TORCH.finditer(code)]


def test_private_torch_names_stay_in_one_module() -> None:
    allowed = {ROOT / "torch_internals" / "private.py"}
    faults = {
        str(path.relative_to(ROOT)): names
        for path in sources()
        if path not in allowed and (names := private_torch_names(path.read_text(encoding="utf8")))
    }
    assert not faults


def test_the_private_name_check_finds_a_planted_fault() -> None:
    assert private_torch_names("from torch._subclasses import FakeTensorMode")
    assert private_torch_names("import torch\ntorch._C._foo()")
    assert not private_torch_names("torch.nn.Module")


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_public_names_are_documented(folder: str) -> None:
    module = importlib.import_module(f"trainwright.{folder}")
    assert module.__doc__, folder
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"trainwright.{folder}.{name} has no docstring"


def folders(path: Path) -> set[str]:
    return {each.parent.name for each in path.glob("*/__init__.py")}


def test_folders_are_attributes_and_wait_until_they_are_asked_for() -> None:
    """In an interpreter of its own: this one has imported them."""
    verbs = {"hardware"}
    assert set(tw.FOLDERS) == folders(ROOT) - verbs - {"cli"}
    assert set(tw.solvers.__all__) == folders(ROOT / "solvers")
    assert set(tw.numerics.__all__) == {path.stem for path in (ROOT / "numerics").glob("*.py")} - {"__init__"}
    script = """
import sys, trainwright as tw
assert "torch" not in sys.modules
names = [*tw.FOLDERS, "zoo"]
assert {*names, *tw.__all__} <= set(dir(tw)), dir(tw)
assert callable(tw.train) and callable(tw.hardware)
places = [(tw, names), (tw.solvers, tw.solvers.__all__), (tw.numerics, tw.numerics.__all__)]
found = [getattr(place, name).__name__ for place, names in places for name in names]
assert all(name.startswith("trainwright.") for name in found), found
assert not hasattr(tw, "poem") and not hasattr(tw.solvers, "poem")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_does_not_name_its_workplace() -> None:
    for path in sources():
        assert not re.search(r"/(work|farm)/", path.read_text(encoding="utf8")), path
