"""Captures kept from process to process: the same graph comes back, and never one of another model, code or batch."""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import own_backwards
from torch import nn

import trainwright as tw
from trainwright.artifacts.cache_directory import CacheDirectory, cache_directory, without_cache
from trainwright.capture import cached, surroundings
from trainwright.capture.cached import cached_capture
from trainwright.capture.description import digest_of
from trainwright.capture.export import capture
from trainwright.capture.stored import NotStorable, StoredForm, as_data
from trainwright.capture.surroundings import loaded_files, unchanged
from trainwright.cli import main
from trainwright.models import targets, zoo
from trainwright.program.micro_batches import capture_step

BATCH = (torch.ones(4, 3),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captures"


@pytest.fixture
def captures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was really captured, call by call."""
    made: list[Any] = []

    def counted(model: Any, *rest: Any, **named: Any) -> Any:
        made.append(model)
        return capture(model, *rest, **named)

    monkeypatch.setattr(cached, "capture", counted)
    return made


def mean(output: Any, batch: Any) -> Any:
    return output.mean()


class Scaled(nn.Module):
    """Multiplies by whatever a case changes."""

    factor = 2.0

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)
        self.register_buffer("mask", torch.ones(2))
        self.table = torch.ones(2)
        self.settings = {"power": 1, **settings}

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return self.drop(self.linear(x)) ** self.settings["power"] * self.mask * self.table * self.factor * times


def times(factor: float) -> Callable[[Any, Any], Any]:
    return lambda output, batch: output.mean() * factor


def _patched(model: nn.Module) -> nn.Module:
    model.linear.forward = lambda x: x[:, :2] + model.linear.bias
    return model


def _with(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = Scaled()
    change(model)
    return model


class Wider(Scaled):
    factor = 3.0


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "an attribute": lambda: {"model": Scaled(power=2)},
    "a buffer's value": lambda: {"model": _with(lambda model: model.mask.fill_(0.5))},
    "a plain tensor's value": lambda: {"model": _with(lambda model: model.table.fill_(0.5))},
    "a class's attribute": lambda: {"model": Wider()},
    "a frozen submodule": lambda: {"model": _with(lambda model: model.drop.eval())},
    "a frozen parameter": lambda: {"model": _with(lambda model: model.linear.bias.requires_grad_(False))},
    "a dtype": lambda: {"model": Scaled().double(), "batch": (BATCH[0].double(),)},
    "a patched forward": lambda: {"model": _patched(Scaled())},
    "a shape": lambda: {"batch": (torch.ones(5, 3),)},
    "a literal": lambda: {"batch": (*BATCH, 2)},
    "a name": lambda: {"batch": {"x": BATCH[0]}},
    "a closure's value": lambda: {"loss_fn": times(2.0)},
    "autocast": lambda: {"autocast": torch.bfloat16},
}


def _captured(model: Any = None, batch: Any = BATCH, loss_fn: Any = None, autocast: Any = None) -> Any:
    return cached_capture(model or Scaled(), batch, loss_fn or times(1.0), autocast=autocast)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_capture_hangs_on_makes_it_another(captures: list[Any], change: str) -> None:
    _captured()
    found = _captured()
    assert len(captures) == 1, "the same again is not captured again"
    assert isinstance(found.out_spec, StoredForm)
    _captured(**CHANGES[change]())
    assert len(captures) == 2
    _captured()
    assert len(captures) == 2, "and the first one is still there"


def test_a_value_set_while_the_program_runs_makes_another(captures: list[Any], monkeypatch: Any) -> None:
    _captured()
    monkeypatch.setattr(Scaled, "factor", 5.0)
    _captured()
    assert len(captures) == 2


FILE = """
import torch
import {helper}
def build():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)
        def forward(self, x):
            return {helper}.scaled(self.linear(x)) * {factor}
    return Model(), (torch.ones(4, 3),), lambda output, batch: output.mean()
"""
HELPER = "SCALE = {scale}\ndef scaled(x):\n    return x * SCALE\n"


@pytest.fixture
def of_files(tmp_path: Path) -> Iterator[Callable[[float, float], None]]:
    """Capture the model of a file that imports its neighbour, with a constant in each."""
    name = f"cached_helper_{tmp_path.name.replace('-', '_')}"
    path = list(sys.path)

    def build(factor: float, scale: float) -> None:
        (tmp_path / "train.py").write_text(FILE.format(helper=name, factor=factor))
        (tmp_path / f"{name}.py").write_text(HELPER.format(scale=scale))
        for module in [key for key in sys.modules if key == name or key.startswith("_trainwright_target_train")]:
            del sys.modules[module]
        importlib.invalidate_caches()
        loaded = targets.load(f"{tmp_path}/train.py:build")
        cached_capture(loaded.model, loaded.batch, loaded.loss_fn)

    build.helper = name  # type: ignore[attr-defined]
    yield build
    sys.path[:] = path
    sys.modules.pop(name, None)


@pytest.mark.parametrize("changed", [(7.0, 1.0), (1.0, 7.0)])
def test_an_edited_file_makes_another(captures: list[Any], of_files: Any, changed: tuple[float, float]) -> None:
    of_files(1.0, 1.0)
    of_files(1.0, 1.0)
    assert len(captures) == 1
    of_files(*changed)
    assert len(captures) == 2


def test_a_constant_of_an_imported_module_set_while_it_runs_makes_another(captures: list[Any], of_files: Any) -> None:
    of_files(1.0, 1.0)
    model = captures[0]
    batch, loss_fn = (torch.ones(4, 3),), mean
    cached_capture(model, batch, loss_fn)
    setattr(sys.modules[of_files.helper], "SCALE", 9.0)  # noqa: B010
    cached_capture(model, batch, loss_fn)
    assert len(captures) == 3


def test_a_package_that_changed_makes_another(tmp_path: Path) -> None:
    files = loaded_files()
    assert unchanged(files)
    assert torch.__file__ in files
    assert unchanged({**files, torch.__file__: [1, 2]}) is False
    assert unchanged({**files, str(tmp_path / "gone.py"): [1, 2]}) is False


def test_of_the_users_files_every_change_is_seen_and_what_has_not_changed_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "_SETTLED_NS", -1)  # the files of a test are young
    path = tmp_path / "mine.py"
    path.write_text("SCALE = 2\n")
    first, seen = surroundings._digest(str(path)), path.stat()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read again"))
        assert surroundings._digest(str(path)) == first
    time.sleep(0.05)  # a tick of the file system's clock
    path.write_text("SCALE = 3\n")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (seen.st_size, seen.st_mtime_ns)
    assert surroundings._digest(str(path)) != first


def test_a_young_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("SCALE = 2\n")
    surroundings._digest(str(path))
    assert str(path) not in surroundings._digests


def test_a_file_of_the_users_in_place_of_a_packages_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of packages are not looked at again, as long as they are the same."""
    path = tmp_path / "scales.py"
    path.write_text("SCALE = 2\n")
    for file, is_own in ((torch.__file__, False), (str(path), True), (torch.__file__, False)):
        module = types.ModuleType("scales")
        module.__file__ = file
        monkeypatch.setitem(sys.modules, "scales", module)
        for _ in range(2):
            assert (str(path) in surroundings._own_files()) == is_own


def test_a_package_that_is_replaced_while_it_runs_is_kept_as_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured now runs the code of before, so an entry must not be taken for one of the code that came later."""
    path = tmp_path / "site-packages" / "scales.py"
    path.parent.mkdir()
    path.write_text("SCALE = 2\n")
    is_installed = surroundings._is_ours_or_installed
    monkeypatch.setattr(surroundings, "_is_ours_or_installed", lambda each: each == str(path) or is_installed(each))
    monkeypatch.setattr(surroundings, "_loaded", {})
    module = types.ModuleType("scales")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "scales", module)
    before = loaded_files()
    path.write_text("SCALE = 16\n")
    assert loaded_files()[str(path)] == before[str(path)]
    surroundings._loaded.clear()  # another process
    assert not unchanged({str(path): before[str(path)]})


@pytest.mark.parametrize(
    "model",
    [
        lambda: _with(lambda model: model.register_forward_hook(lambda *_: None)),
        lambda: _with(lambda model: setattr(model, "pattern", re.compile("x"))),
        lambda: _with(lambda model: setattr(model, "lock", threading.Lock())),
        lambda: _with(lambda model: setattr(model, "stream", iter([1]))),
    ],
)
def test_what_cannot_be_looked_into_is_captured_each_time(captures: list[Any], model: Any) -> None:
    for expected in (1, 2):
        _captured(model())
        assert len(captures) == expected


def test_ops_of_the_users_own_are_not_stored() -> None:
    model, batch, *loss_fn = own_backwards.net()
    with pytest.raises(NotStorable, match="autograd_functions"):
        as_data(capture(model, batch, *loss_fn))


@pytest.mark.parametrize("name", ["gpt2-tiny", pytest.param("resnet-tiny", marks=pytest.mark.slow)])
def test_a_plan_of_a_stored_capture_is_the_same(folder: Path, name: str) -> None:
    model, batch = zoo.build(name)
    first, second = (capture_step(model, batch, None, None) for _ in range(2))
    assert isinstance(second.captured.out_spec, StoredForm)
    assert second.fingerprint == first.fingerprint
    plan = tw.plan(model, batch, hardware="cpu:2", solver="ddp")
    found = [tw.simulate_plan(plan, program, None) for program in (first, second)]
    assert found[0].peak_bytes == found[1].peak_bytes == plan.predicted.peak_bytes
    assert (found[0].breakdown, found[0].comm_bytes) == (found[1].breakdown, found[1].comm_bytes)


def test_a_plan_of_the_zoo_is_checked_without_its_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "plan.json")
    options = ["--hardware", "cpu:2", "--solver", "ddp", "--set", "n_layer=1", "--micro-batches", "2"]
    assert main(["plan", "zoo:gpt2-tiny", *options, "-o", path]) == 0
    built: list[str] = []
    real = zoo.build
    monkeypatch.setattr(zoo, "build", lambda name, **how: built.append(name) or real(name, **how))
    capsys.readouterr()
    assert main(["check", path]) == 0
    stored = capsys.readouterr().out
    assert main(["explain", path, "transformer.wte.weight"]) == 0
    assert not built
    assert main(["check", path, "--no-cache"]) == 0
    assert built == ["gpt2-tiny"]
    assert stored in capsys.readouterr().out
    for entry in folder.iterdir():
        entry.write_bytes(entry.read_bytes()[:-100])
    assert main(["check", path]) == 0
    assert built == ["gpt2-tiny"] * 2, "what is damaged is as if it were not there"


def test_two_settings_of_the_zoo_are_two_names(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "--solver", "ddp", "-o", str(path)]) == 0
    wrong = json.loads(path.read_text())
    wrong["model"]["options"] = {"n_layer": 1}
    path.write_text(json.dumps(wrong))
    assert main(["check", str(path)]) == 2  # the plan is of another model, as without a cache


def test_a_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    code = (
        "import sys, torch; from torch import nn; from trainwright.capture.description import digest_of; "
        "print(digest_of(nn.TransformerEncoderLayer(8, 2, 16), {'b', 'a', 'c'}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert other.stdout.strip() == digest_of(model, {"a", "b", "c"})


# ---- the folder ----


def test_the_folder_is_private_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINWRIGHT_CACHE", raising=False)
    found = cache_directory()
    assert found is not None
    assert found.path == tmp_path / "trainwright" / "captures"
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o700
    small = CacheDirectory(found.path, limit_bytes=100)
    for name in "abcd":
        small.write(name, bytes(25))
    os.utime(found.path / "b", (1, 1))
    small.write("e", bytes(25))
    assert {path.name for path in found.path.iterdir()} == {"a", "c", "d", "e"}
    small.write("large", bytes(26))
    assert small.read("large") is None
    small.clear()
    assert not list(found.path.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.warns(UserWarning, match="others may write"):
        assert cache_directory() is None


def test_another_users_folder_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="another user"):
        assert cache_directory() is None


def test_no_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with without_cache():
        assert cache_directory() is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "file"))
    assert cache_directory() is None


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    directory = CacheDirectory(tmp_path)
    contents = {bytes([value]) * 200_000 for value in range(4)}
    done = threading.Event()
    seen: list[bytes | None] = []

    def read() -> None:
        while not done.is_set():
            seen.append(directory.read("entry"))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=lambda c=c: [directory.write("entry", c) for _ in range(10)]) for c in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert {content for content in seen if content is not None} <= contents
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_the_command_shows_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _captured()
    assert main(["cache"]) == 0
    assert "1 file," in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert not list(folder.iterdir())
