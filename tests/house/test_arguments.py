"""What people write first: a number of processes, a class, a dtype, a path. What is clear is accepted, the rest explained."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.arguments import as_mesh, as_optimizer_name, as_pins
from trainwright.artifacts import Plan, UserError
from trainwright.optim.on_parts import on_parts
from trainwright.request import PlanOptions, PlanRequest

BATCH = (torch.ones(8, 4), torch.arange(8) % 3)
LOSS = nn.CrossEntropyLoss()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def planned(**options: Any) -> Plan:
    return tw.plan(model(), BATCH, **{"hardware": "cpu:2", "loss_fn": LOSS, **options})


@pytest.fixture(scope="module")
def plain() -> Plan:
    return planned(mesh=(2,), memory=10**8, autocast="bf16", solver="ddp")


def of_own_making(params: Any) -> Any:
    return torch.optim.SGD(params)


@pytest.mark.parametrize(
    "options",
    [
        {"hardware": 2},
        {"mesh": 2},
        {"mesh": "2"},
        {"mesh": [2]},
        {"memory": 1e8},
        {"memory": "100MB"},
        {"autocast": torch.bfloat16},
        {"autocast": "bfloat16"},
        {"optimizer": torch.optim.AdamW, "optimizer_form": "fused"},
        {"optimizer": functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)},
        {"optimizer": torch.optim.AdamW(model().parameters(), lr=1e-4, fused=True)},
        {"pins": "*=auto"},
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),  # alike in every process
)
def test_what_is_clear_is_accepted(plain: Plan, options: dict[str, Any]) -> None:
    if "pins" in options:
        assert as_pins(options["pins"]) == ("*=auto",)
        return
    found = planned(**{"mesh": (2,), "memory": 10**8, "autocast": "bf16", "solver": "ddp", **options})
    for name in ("cluster", "mesh", "budget_bytes", "autocast", "optimizer", "params", "predicted"):
        assert getattr(found, name) == getattr(plain, name), name


@pytest.mark.parametrize(
    ("cls", "name"), [(torch.optim.SGD, "sgd"), (torch.optim.AdamW, "adamw"), (torch.optim.Rprop, "rprop")]
)
def test_an_optimizer_over_the_parts_of_a_plan_has_its_own_name(cls: Any, name: str) -> None:
    assert as_optimizer_name(on_parts(cls)([torch.nn.Parameter(torch.zeros(3))], lr=0.1)) == name


@pytest.mark.parametrize("make", [torch.optim.AdamW, functools.partial(torch.optim.AdamW, lr=1e-4)])
def test_of_a_class_the_form_is_priced_that_it_runs(make: Any) -> None:
    assert planned(optimizer=make).optimizer_form == "loop"
    assert planned(optimizer=make).predicted == planned(optimizer="adamw", optimizer_form="loop").predicted
    assert planned(optimizer="adamw").optimizer_form == "fused"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"hardware": torch.device("cpu")}, ("hardware is needed", "a device (cpu)", "hardware='cpu:2'")),
        ({"hardware": 2.5}, ("hardware is needed", "2.5")),
        ({"mesh": 0}, ("a mesh is needed", "0")),
        ({"mesh": "two"}, ("a mesh is needed", "'two'")),
        ({"mesh": (2.0,)}, ("a mesh is needed", "(2.0,)")),
        ({"memory": 0.9}, ("at least one byte", "0.9")),
        ({"autocast": "bfloat"}, ("a dtype for autocast", "'bfloat'", "autocast='bf16'")),
        ({"autocast": True}, ("a dtype for autocast", "True")),
        ({"optimizer": of_own_making}, ("the name or the class", "trainwright optimizers")),
        ({"optimizer": torch.optim.LBFGS}, ("declared cost", "LBFGS")),
        ({"pins": [3]}, ("pins as text", "3")),
        ({"model": "gpt2"}, ("a torch.nn.Module is needed", "'gpt2'", "tw.load_model")),
        ({"model": nn.ReLU}, ("a torch.nn.Module is needed", "the class ReLU", "build it")),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),  # alike in every process
)
def test_what_is_not_is_explained(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    asked = {"model": model(), "batch": BATCH, "loss_fn": LOSS, "hardware": "cpu:2", **options}
    with pytest.raises(UserError) as caught:
        tw.plan(**asked)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_settings_that_change_what_an_optimizer_keeps_choose_its_record() -> None:
    assert as_optimizer_name(torch.optim.SGD) == "sgd"
    assert as_optimizer_name(functools.partial(torch.optim.SGD, momentum=0.5, lr=1.0)) == "sgd-momentum"
    assert as_optimizer_name(torch.optim.SGD(model().parameters(), lr=1.0, momentum=0.9)) == "sgd-momentum"
    assert as_optimizer_name(tw.optim.Adan) == "adan"
    assert as_mesh(None) is None


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd-momentum",
        functools.partial(torch.optim.SGD, momentum=0.9, foreach=False),
        torch.optim.SGD(model().parameters(), lr=1.0, momentum=0.9, foreach=False),
    ],
    ids=["name", "partial", "instance"],
)
def test_a_profile_takes_an_optimizer_in_every_form(optimizer: Any) -> None:
    found = tw.profile(model(), BATCH, loss_fn=LOSS, optimizer=optimizer, capture=False)
    assert found.optimizer == "sgd-momentum"
    assert found.optimizer_bytes == found.param_bytes


def test_a_plan_may_be_named_by_its_file(plain: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plain.to_json(path)
    for given in (path, str(path)):
        assert tw.check(given, model(), BATCH, loss_fn=LOSS).fingerprint == plain.fingerprint
        assert tw.explain(given, model(), BATCH, loss_fn=LOSS).rows
        assert tw.simulate_plan(given, model(), BATCH, loss_fn=LOSS).peak_bytes == plain.predicted.peak_bytes
    alone = planned(hardware="cpu:1")
    alone.to_json(path)
    assert tw.parallelize(model(), path, loss_fn=LOSS).plan == alone
    assert tw.verify(lambda: (model(), BATCH, LOSS), str(path)).passed
    with pytest.raises(UserError, match="a Plan, or the path of one in JSON, is needed; got 3"):
        tw.parallelize(model(), 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a function that builds"):
        tw.verify(model(), alone)  # type: ignore[arg-type]


def test_the_options_that_are_typed_are_those_of_a_request() -> None:
    model, batch, *options = dataclasses.fields(PlanRequest)
    assert (model.name, batch.name) == ("model", "batch")
    typed = {name: kind.__forward_arg__ for name, kind in PlanOptions.__annotations__.items()}
    typed["hardware"] = typed["hardware"].removeprefix("Required[").removesuffix("]")
    assert typed == {option.name: option.type for option in options}


@pytest.mark.parametrize("verb", ["plan", "compare", "frontier"])
def test_an_option_that_there_is_not_names_its_neighbour(verb: str) -> None:
    with pytest.raises(TypeError, match=rf"{verb}\(\) got an unexpected keyword argument 'memry'; did you mean memory"):
        getattr(tw, verb)(torch.nn.Linear(2, 2), (torch.ones(2, 2),), hardware=1, memry="1GiB")
