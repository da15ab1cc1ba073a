"""MODEL arguments: what is loaded, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.artifacts import UserError
from trainwright.capture.export import capture
from trainwright.models.targets import load

GOOD = """
from dataclasses import dataclass

import torch
from torch import nn

import helper_beside

@dataclass
class Sizes:
    width: int = 4

def pair(width: int = 4, batch_size: int = 2):
    return nn.Linear(width, 3), (torch.randn(batch_size, width),)

def triple():
    model, batch = pair()
    return model, batch, lambda output, batch: output.mean()

def full(kind="x", seed=None, dtype=None):
    model, batch = pair()
    return {"model": model, "batch": batch, "loss_fn": lambda o, b: o.sum(), "data": [batch], "eval_batch": batch}

def reads_values():
    if torch.ones(3).sum().item() < 0:
        raise AssertionError
    return pair()

def anything(**settings):
    return nn.Linear(settings["width"], settings.get("batch_size", 1)), (torch.zeros(1, settings["width"]),)

def fails():
    raise RuntimeError("the cat sat on the keyboard")

def wrong(): return 3
def wrong_model(): return "model", {}
def wrong_batch(): return nn.Linear(2, 2), 7
def wrong_key(): return {"model": nn.Linear(2, 2), "batches": ()}
def wrong_loss(): return nn.Linear(2, 2), (torch.ones(1, 2),), 0.5
def leaves(): raise SystemExit(3)
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "helper_beside.py").write_text("VALUE = 1\n")
    path = tmp_path / "my_model.py"
    path.write_text(GOOD)
    return str(path)


def test_zoo_models_load_by_name() -> None:
    loaded = load("zoo:gpt2-tiny", batch_size=3, seq_len=8, dtype="bf16", settings={"n_layer": "1"})
    assert loaded.batch["input_ids"].shape == (3, 8)
    assert len(loaded.model.transformer.h) == 1
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.ref.name == "gpt2-tiny"
    assert loaded.ref.spec == "zoo:gpt2-tiny"
    again = load(loaded.ref.spec, settings=loaded.ref.options)
    assert again.batch["input_ids"].shape == (3, 8)


def test_functions_of_a_file_load(file: str) -> None:
    loaded = load(f"{file}:pair", batch_size=5, settings={"width": "6"})
    assert loaded.model.weight.shape == (3, 6)
    assert loaded.model.weight.device.type == "meta"
    assert loaded.batch[0].shape == (5, 6)
    assert loaded.notes == ()
    assert loaded.ref.options == {"batch_size": 5, "width": 6}
    assert loaded.ref.name == "Linear (my_model.py:pair)", "as reports call it"


def test_all_forms_of_result(file: str) -> None:
    triple = load(f"{file}:triple")
    assert capture(triple.model, triple.batch, triple.loss_fn).loss_index == 0
    full = load(f"{file}:full", settings={"kind": "y"})
    assert full.data == [full.batch]
    assert full.eval_batch is full.batch
    assert load(f"{file}:pair").loss_fn is None


def test_what_meta_cannot_do_is_done_on_the_cpu(file: str) -> None:
    loaded = load(f"{file}:reads_values")
    assert loaded.model.weight.device.type == "cpu"
    assert "CPU" in loaded.notes[0]


def test_dtype_converts_where_the_function_does_not(file: str) -> None:
    assert load(f"{file}:pair", dtype="fp64").model.weight.dtype == torch.float64
    assert load(f"{file}:pair", dtype="fp64", device="cpu").model.weight.dtype == torch.float64


def test_every_rank_builds_the_same(file: str) -> None:
    first, second = (load(f"{file}:pair", device="cpu") for _ in range(2))
    assert torch.equal(first.model.weight, second.model.weight)
    assert torch.equal(first.batch[0], second.batch[0])
    assert not torch.equal(load(f"{file}:pair", device="cpu", seed=1).model.weight, first.model.weight)


def test_keywords_reach_a_function_that_takes_any(file: str) -> None:
    loaded = load(f"{file}:anything", batch_size=7, settings={"width": "3"})
    assert isinstance(loaded.model, nn.Linear)
    assert loaded.model.weight.shape == (7, 3)


def test_modules_load_by_name(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(file).parent)
    assert load("my_model:pair").model.weight.shape == (3, 4)


@pytest.mark.parametrize(
    ("spec", "options", "parts"),
    [
        ("gpt2-tiny", {}, ("zoo:gpt2-tiny",)),
        ("zoo:gpt3-tiny", {}, ("gpt2-tiny",)),
        ("{dir}/my_modle.py:pair", {}, ("my_model.py",)),
        ("{file}", {}, ("FILE.py:function",)),
        ("{file}:pear", {}, ("pair",)),
        ("{file}:number", {}, ("number",)),
        ("{file}:fails", {}, ("the cat sat", "my_model.py:33", "RuntimeError")),
        ("{file}:leaves", {}, ("SystemExit",)),
        ("{file}:wrong", {}, ("int",)),
        ("{file}:wrong_model", {}, ("str",)),
        ("{file}:wrong_batch", {}, ("int", "tuple")),
        ("{file}:wrong_key", {}, ("batches",)),
        ("{file}:wrong_loss", {}, ("float",)),
        ("{file}:triple", {"batch_size": 3}, ("--batch-size", "batch_size")),
        ("{file}:pair", {"seq_len": 3}, ("--seq-len",)),
        ("{file}:pair", {"dtype": "int3"}, ("bf16",)),
        ("{file}:pair", {"settings": {"widht": "3"}}, ("widht", "width")),
        ("no.such.module:f", {}, ("no.such.module",)),
        ("{dir}/syntax.py:f", {}, ("syntax.py:2", "SyntaxError")),
        ("{dir}/imports.py:f", {}, ("not_installed_anywhere",)),
        (":f", {}, ("FILE.py:function",)),
    ],
)
def test_mistakes_are_told(file: str, spec: str, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    folder = Path(file).parent
    (folder / "syntax.py").write_text("x = 1\ndef f(:\n")
    (folder / "imports.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(UserError) as caught:
        load(spec.format(file=file, dir=folder), **options)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_run_once_until_its_text_changes(tmp_path: Path) -> None:
    """What it registers is registered once; torch tears an op down under earlier models when it is made again."""
    file = tmp_path / "counted.py"
    text = "import torch\nruns = []\ndef pair():\n    runs.append(1)\n    return torch.nn.Linear(len(runs), 1), ()\n"
    file.write_text(text)
    assert [load(f"{file}:pair").model.in_features for _ in range(2)] == [1, 2]
    file.write_text(text + "raise ValueError('half-written')\n")
    with pytest.raises(UserError, match="half-written"):
        load(f"{file}:pair")
    with pytest.raises(UserError, match="half-written"):  # nothing of a run that failed is kept
        load(f"{file}:pair")
    file.write_text(text + "# again\n")
    assert load(f"{file}:pair").model.in_features == 1
