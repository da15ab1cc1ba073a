"""The zoo: real sizes, without memory, without the network."""

from __future__ import annotations

import importlib.util
import socket
import time
from typing import Any

import pytest
import torch

from trainwright.artifacts import UserError
from trainwright.cli.listings import listing
from trainwright.models import zoo

PUBLISHED_PARAMS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "olmo-2-7b": 7_298_617_344,
    "gemma-3-4b": 3_880_263_168,
    "mamba-2-2.7b": 2_702_599_680,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-base": 222_903_552,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "resnet-50": 25_557_032,
}
"""As the model cards and papers count them (tied parameters once; of Gemma 3 the language model alone)."""


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model of the zoo is built by some test here."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the zoo opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_published_sizes_cover_the_zoo() -> None:
    assert {name for name in zoo.names() if not name.endswith("tiny")} == set(PUBLISHED_PARAMS)


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_models_have_their_published_size(name: str) -> None:
    model, batch = zoo.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMS[name]
    assert all(tensor.device.type == "meta" for tensor in [*model.parameters(), *model.buffers(), *batch.values()])
    assert model.training


def test_seventy_billion_parameters_take_seconds() -> None:
    zoo.build("llama-tiny")  # the import of transformers is not the zoo's
    started = time.process_time()
    zoo.build("llama-3-70b")
    assert time.process_time() - started < 10


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("tiny")])
def test_tiny_models_run_seeded(name: str) -> None:
    (first, batch), (second, again) = zoo.build(name, device="cpu"), zoo.build(name, device="cpu")
    other, _ = zoo.build(name, device="cpu", seed=1)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)
    loss = first(**batch).loss
    assert loss.shape == ()
    assert bool(loss.isfinite())
    assert batch[next(iter(batch))].shape[0] == 4


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp64", torch.float64), ("fp16", torch.float16)]
)
def test_dtype(name: str, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    model, batch = zoo.build("vit-tiny", dtype=name)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert batch["pixel_values"].dtype == dtype
    assert torch.get_default_dtype() == before


def test_options_and_overrides_reach_the_model() -> None:
    model, batch = zoo.build("gpt2-tiny", batch_size=3, seq_len=100, n_layer=1, resid_pdrop=0.0)
    assert batch["input_ids"].shape == (3, 100)
    assert len(model.transformer.h) == 1
    assert model.transformer.wpe.weight.shape[0] >= 100
    assert model.config.resid_pdrop == 0.0


def test_table_has_a_row_a_model() -> None:
    table = zoo.table()
    rows = {row["name"]: row for row in table}
    assert tuple(rows) == zoo.names()
    assert table == listing("zoo"), "the records changed: run python -m trainwright.cli.listings"
    assert rows["gpt2"]["num_params"] == PUBLISHED_PARAMS["gpt2"]


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("gpt-2", {}, "gpt2"),
        ("zzz", {}, "resnet-50"),
        ("gpt2", {"n_layers": 3}, "n_layer"),
        ("gpt2", {"n_head": 7}, "divisible"),
        ("gpt2", {"dtype": "int4"}, "bf16"),
        ("vit-tiny", {"seq_len": 3}, "images"),
        ("gpt2", {"batch_size": 0}, "batch"),
        ("gpt2", {"seq_len": -1}, "seq"),
    ],
)
def test_mistakes_name_a_remedy(name: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        zoo.build(name, **options)


def test_without_transformers_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    with pytest.raises(UserError, match=r"the zoo needs the package transformers.*pip install 'transformers>="):
        zoo.build("gpt2-tiny")
