"""What an optimizer declares is what it allocates, and what `create` makes is torch's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import peak_bytes
from trainwright import optim
from trainwright.artifacts import UserError
from trainwright.cli.listings import listing

SHAPES: list[tuple[int, ...]] = [(), (0,), (7,), (1, 5), (5, 3), (0, 4), (3, 4, 5), (2, 3, 1, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SWITCHES = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "sgd-momentum": [{}, {"nesterov": True}],
    "rmsprop": [{}, {"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}],
    "adam": [{}, {"amsgrad": True}, {"decoupled_weight_decay": True}],
    "adamw": [{}, {"amsgrad": True}],
    "nadam": [{}, {"decoupled_weight_decay": True}],
    "radam": [{}, {"decoupled_weight_decay": True}],
}
BOUNDED = ("adafactor", "muon")
BY_GRADIENTS = tuple(name for name in optim.names() if not optim.record(name).needs_values)
"""The others need closures, or factor matrices: tests/optim/test_optim_battery.py steps them."""


def variants(name: str) -> list[dict[str, Any]]:
    """The option sets to try: the optimizer's own switches, with and without weight decay and maximisation."""
    rows: list[dict[str, Any]] = []
    accepted = optim.create(name, [torch.nn.Parameter(torch.ones(2, 2))]).defaults
    for own, decay, maximize in itertools.product(SWITCHES.get(name, [{}]), (0.0, 0.1), (False, True)):
        if (decay and "weight_decay" not in accepted) or (maximize and "maximize" not in accepted):
            continue
        rows.append({**own, **({"weight_decay": decay} if "weight_decay" in accepted else {})})
        rows[-1] |= {"maximize": True} if maximize else {}
    return rows


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    return weight


def test_there_are_optimizers() -> None:
    assert {"sgd", "sgd-momentum", "adam", "adamw", "adafactor"} <= set(optim.names())
    assert len(optim.table()) == len(optim.names())
    assert optim.table() == listing("optimizers"), "the records changed: run python -m trainwright.cli.listings"
    assert len(BY_GRADIENTS) >= 20


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_bytes_declared_are_bytes_allocated(name: str) -> None:
    checked = 0
    for shape, dtype, options in itertools.product(SHAPES, DTYPES, variants(name)):
        if (name == "muon" and len(shape) != 2) or (name == "adafactor" and 0 in shape):
            continue  # muon takes matrices only; torch's adafactor divides by the number of elements
        weight = parameter(shape, dtype)
        optimizer = optim.create(name, [weight], lr=1e-3, **options)
        for _ in range(2):
            optimizer.step()
        tensors = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
        allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert optim.record(name).state_bytes(shape, dtype, **options) == allocated, (shape, dtype, options)
        checked += 1
    assert checked >= 6


def test_numbers_follow_torchs_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        weight = parameter((3,), torch.float64)
        optimizer = optim.create("adamw", [weight])
        optimizer.step()
        kept = sum(tensor.untyped_storage().nbytes() for tensor in optimizer.state[weight].values())
        assert optim.record("adamw").state_bytes((3,), "fp64") == kept == 2 * 3 * 8 + 8
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", BY_GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_temporaries_declared_are_those_of_the_step(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for shape, options in itertools.product([(96, 512), (640, 64)], variants(name)):
        weight = parameter(shape, dtype)
        optimizer = optim.create(name, [weight], lr=1e-3, **options)
        for _ in range(7):  # rectified Adam changes its formula at the sixth step
            optimizer.step()
        measured = peak_bytes(optimizer.step, tmp_path)
        record = optim.record(name)
        declared = record.step_temporary_bytes(shape, dtype, **options) + record.held_bytes(shape, dtype)
        if name in BOUNDED:
            assert measured <= declared <= 2.5 * measured + (1 << 16), (shape, options)
        else:
            assert abs(measured - declared) <= 128, (shape, options, measured, declared)


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_what_a_step_leaves_of_one_parameter_while_it_updates_the_next_is_declared(name: str, tmp_path: Path) -> None:
    """Loops of torch's own keep the last parameter's temporaries in variables until they assign those again."""
    shape, entry = (96, 512), optim.record(name)
    for options in variants(name):
        measured = []
        for num_params in (1, 3):
            optimizer = optim.create(
                name, [parameter(shape, torch.float32) for _ in range(num_params)], lr=1e-3, **options
            )
            for _ in range(7):
                optimizer.step()
            measured.append(peak_bytes(optimizer.step, tmp_path))
        left = measured[1] - measured[0] - 2 * entry.held_bytes(shape)
        numbers = 1 << 12  # scalars of two more parameters
        assert abs(left - entry.left_bytes(shape, **options)) <= numbers, (options, left)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "adamw8bit", "sgd8bit", "frugal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_over_memory_allocates_what_its_record_says(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    entry = optim.record(name).with_options("fused")
    weight = parameter((96, 512), dtype)
    optimizer = optim.create(name, [weight], lr=1e-3, fused=True)
    optimizer.step()
    optimizer.step()
    measured = peak_bytes(optimizer.step, tmp_path)
    assert measured <= 4096, "the scalars of a step, and nothing of the parameter's size"
    assert measured <= entry.step_temporary_bytes((96, 512), dtype) + 512
    assert entry.step_temporary_bytes((96, 512), dtype) < weight.nbytes / 8


@pytest.mark.parametrize("name", BY_GRADIENTS)
def test_create_is_torchs_own_class_one_parameter_at_a_time(name: str) -> None:
    torch.manual_seed(3)
    mine = parameter((4, 6), torch.float32)
    theirs = torch.nn.Parameter(mine.detach().clone())
    theirs.grad = mine.grad.clone() if mine.grad is not None else None
    entry = optim.record(name)
    made, reference = optim.create(name, [mine], lr=0.01), entry.cls([theirs], lr=0.01, **entry.defaults)  # type: ignore[call-arg]
    for _ in range(8):
        made.step()
        reference.step()
    assert type(made) is entry.cls
    assert not made.defaults.get("foreach")
    assert not made.defaults.get("fused")
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", optim.names())
def test_every_form_that_a_record_names_is_made_and_no_other(name: str) -> None:
    entry = optim.record(name)
    assert entry.forms[-1] == "loop"
    assert entry.form == "loop"
    for form in ("fused", "foreach", "loop"):
        if form not in entry.forms:
            with pytest.raises(UserError, match=f"has the forms {', '.join(entry.forms)}; got '{form}'"):
                entry.with_options(form)
            continue
        chosen = entry.with_options(form)
        assert chosen.form == form
        how = {key: value for key, value in chosen.defaults.items() if key in ("foreach", "fused")}
        made = optim.create(name, [torch.nn.Parameter(torch.ones(2, 2))], **how)
        assert [key for key in ("fused", "foreach") if made.defaults.get(key)] == ([] if form == "loop" else [form])
    if "fused" not in entry.forms:
        with pytest.raises(UserError, match="fused"):
            optim.create(name, [torch.nn.Parameter(torch.ones(2, 2))], fused=True)


def test_options_are_part_of_what_a_record_prices() -> None:
    entry = optim.record("mfac").with_options(num_gradients=3)
    assert entry.state_bytes((5,)) < optim.record("mfac").state_bytes((5,))
    assert optim.record("sgd").with_options(momentum=0.9).state_bytes((5,)) == 20


def test_recommended_groups_are_reached_from_the_record() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(90, 64), torch.nn.Linear(64, 80))
    with_groups = {name for name in optim.names() if optim.record(name).groups is not None}
    assert with_groups == {"adam8bit", "adamw8bit", "sgd8bit", "lamb8bit", "frugal", "muon"}
    for name in with_groups - {"muon"}:  # whose groups say which parameters AdamW takes
        groups = optim.record(name).groups
        assert groups is not None
        optimizer = optim.create(name, groups(model))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        moment = "momentum_buffer" if name == "sgd8bit" else "exp_avg"
        embedding, linear = (optimizer.state[module.weight][moment] for module in model)
        assert embedding.dtype == torch.float32
        assert embedding.shape == (90, 64)
        assert linear.dtype == torch.uint8 or linear.shape == (80, 16)


def test_names_forgive_case_and_hyphens() -> None:
    assert optim.record("Adam-W") is optim.record("adamw") is optim.record("ADAM_W")
    assert optim.create("SGDMomentum", [torch.nn.Parameter(torch.ones(1))]).defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda params: optim.create("adamm", params), r"no optimizer 'adamm'; did you mean .*\badam\b"),
        (lambda params: optim.create("zzz", params), r"no optimizer 'zzz'; choose one of .*adamw"),
        (
            lambda params: optim.create("adamw", params, momentum=0.9),
            r"adamw has no option momentum; its options are .*betas",
        ),
        (lambda params: optim.create("adamw", params, lr=-1.0), r"Invalid learning rate: -1.0"),
        (lambda params: optim.create("muon", params), r"2D"),
    ],
)
def test_mistakes_are_the_users(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call([torch.nn.Parameter(torch.ones(3))])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'fp7'"):
        optim.record("adamw").state_bytes((2,), "fp7")


def test_torchs_fused_kernels_are_not_chosen_for_complex_parameters() -> None:
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(2, dtype=torch.cfloat))})
    assert optim.choose("adamw", model=model).record.form == "loop"
    assert optim.choose("adamw", model=torch.nn.Linear(1, 1)).record.form == "fused"
    with pytest.raises(UserError, match="weight is complex; take the form loop"):
        optim.choose("adamw", form="fused", model=model)


def test_complex_parameters_go_to_an_optimizer_that_takes_them() -> None:
    model = torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)))
            for name, dtype in (("matrix", torch.float32), ("twisted", torch.cfloat))
        }
    )
    muon = optim.choose("muon", model=model)
    assert [(group.params, group.optimizer, group.form) for group in muon.groups] == [(("twisted",), "adamw", "loop")]
    before = {name: param.detach().clone() for name, param in model.items()}
    step = muon.make(model.named_parameters())
    sum(param.abs().square().sum() for param in model.values()).backward()
    step.step()
    assert all((param != before[name]).all() for name, param in model.items())
    for name, options in (("adafactor", {}), ("muon", {"groups": "false"})):
        with pytest.raises(UserError, match="twisted is complex; take another optimizer"):
            optim.choose(name, options, model=model)
    model["twisted"].requires_grad_(False)
    assert optim.choose("adafactor", model=model).groups == ()
