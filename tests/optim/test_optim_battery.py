"""One battery for every optimizer of ours: what a user of `torch.optim.Optimizer` expects, and what its record says."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import trainwright as tw
from tests.builders import peak_bytes
from tests.grids import slow_but
from tests.optim_cases import CASES, Case, Problem
from tests.optim_cases.case import by_gradient, slopes_of, train, vectors
from tests.pool import Pool
from trainwright import optim
from trainwright.artifacts import UserError
from trainwright.optim import compiled

OWN = tuple(name for name in optim.names() if optim.record(name).cls.__module__.startswith("trainwright"))
BYTE_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (257,), (33, 65), (4, 3, 3, 3), (5, 1), (67, 130))
every = pytest.mark.parametrize("name", tuple(CASES))
KINDS = ("adamw8bit", "adabelief", "lion", "normalizedsgd", "frugal", "sophiah", "mfac", "clippedadafactor", "sso")
"""One of each kind of state, and of what is read of the whole model."""
of_each_kind = pytest.mark.parametrize("name", slow_but(KINDS, tuple(CASES)))


def case_of(name: str, test: str = "") -> Case:
    case = CASES[name]
    if test in case.skips:
        pytest.skip(case.skips[test])
    return case


def make(case: Case, params: Any, **options: Any) -> Any:
    return optim.create(case.name, params, **{**case.settings, **options})


def saved(optimizer: Any) -> dict[str, Any]:
    """Its state through a file, read without unpickling code."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def flat_state(optimizer: Any) -> dict[str, Any]:
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return flat([optimizer.state.get(param, {}) for param in params])


def flat(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{index}.{name}": value.clone() if torch.is_tensor(value) else value
        for index, state in enumerate(states)
        for name, value in sorted(state.items())
    }


def assert_same(left: Any, right: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_every_exported_optimizer_has_a_record_and_a_case() -> None:
    exported = {getattr(optim, name) for name in optim.__all__ if inspect.isclass(getattr(optim, name))}
    classes = {cls for cls in exported if issubclass(cls, torch.optim.Optimizer)}
    assert {optim.record(name).cls for name in OWN} == classes
    assert set(OWN) == set(CASES)
    assert len(OWN) >= 3


@every
def test_a_record_says_what_the_class_is(name: str) -> None:
    entry = optim.record(name)
    assert entry.paper
    assert entry.summary
    assert inspect.getdoc(entry.cls)
    assert type(make(CASES[name], [nn.Parameter(torch.ones(2, 2))])) is entry.cls


# What it computes


@every
def test_steps_equal_the_equations(name: str) -> None:
    case = case_of(name)
    for variant, curved in itertools.product(case.variants, (False, True)):
        settings = {**case.settings, **variant}
        problem = Problem(seed=3, curved=curved)
        start, curvature = vectors(problem.params), vectors(problem.curvature)
        expected = case.oracle(start, slopes_of(8, seed=3, curved=curved), curvature, **settings)
        found = train(case, problem, make(case, problem.params, **variant), 8)
        for tensor, oracle in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor.flatten(), torch.from_numpy(oracle), rtol=1e-9, atol=1e-11)


@of_each_kind
@pytest.mark.parametrize("form", ["foreach", "capturable"])
def test_other_forms_equal_the_loop(name: str, form: str) -> None:
    case = case_of(name, form)
    for variant, dtype in itertools.product(case.all_variants, (torch.float32, torch.bfloat16)):
        results = []
        for options in ({}, {form: True}):
            problem = Problem(dtype=dtype, seed=1)
            results.append(train(case, problem, make(case, problem.params, **variant, **options), 8))
        assert_same(results[1], results[0], 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.slow  # compiling takes 20 s; the update that is compiled is the one that the fast tests call
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_form_equals_the_loop(name: str) -> None:
    case = case_of(name, "fused")
    torch.compiler.reset()  # or what an earlier test has compiled is not compiled again
    torch._dynamo.utils.counters.clear()
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for options in ({}, {"fused": True}):
            problem = Problem(((33, 65), (2, 3, 4), (), (1,), (257,)), dtype, seed=1)
            optimizer = make(case, problem.params, **options)
            schedule = LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
            results.append(train(case, problem, optimizer, 7, schedule.step))
        assert_same(results[1], results[0], 1e-5 if dtype == torch.float32 else 1e-2)
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] >= 1
    assert not counted["graph_break"]


def test_methods_are_compiled_apart() -> None:
    """What torch compiled for one, and the limit on how often, goes by code: no two may share it."""
    general = [compiled.taking_any(optim.record(name).cls._update) for name in ("adan", "lion")]  # type: ignore[attr-defined]
    assert general[0].__code__ is general[1].__code__  # type: ignore[attr-defined]
    one, other = map(compiled._with_own_code, general)
    assert one.__code__ is not other.__code__


@every
def test_maximising_is_minimising_the_negative(name: str) -> None:
    case = case_of(name, "maximize")
    results = []
    for options, sign in (({}, -1.0), ({"maximize": True}, 1.0), ({"maximize": True, "foreach": True}, 1.0)):
        problem = Problem(seed=2)
        problem.curvature = [sign * curvature for curvature in problem.curvature]
        optimizer = make(case, problem.params, **options)
        for _ in range(4):
            problem.slopes = [sign * slope for slope in problem.slopes]
            case.drive(optimizer, problem)
            problem.advance()
        results.append(problem.values())
    assert_same(results[1], results[0])
    assert_same(results[2], results[0], 1e-12)


@every
def test_complex_parameters_are_pairs_of_reals(name: str) -> None:
    case = case_of(name, "complex")
    twisted = Problem(((5, 3), (7,)), torch.complex128, seed=5)
    pairs = Problem(((5, 3, 2), (7, 2)), seed=5)
    optimizers = [make(case, problem.params) for problem in (twisted, pairs)]
    with torch.no_grad():
        for param, own in zip(pairs.params, twisted.params):
            param.copy_(torch.view_as_real(own))
    pairs.curvature = [curvature.real[..., None].expand(*curvature.shape, 2) for curvature in twisted.curvature]
    for _ in range(4):
        pairs.slopes = [torch.view_as_real(slope) for slope in twisted.slopes]
        for problem, optimizer in zip((twisted, pairs), optimizers):
            case.drive(optimizer, problem)
        twisted.advance()
    assert_same([torch.view_as_real(value) for value in twisted.values()], pairs.values(), 1e-12)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_updated_in_fp32(name: str, dtype: torch.dtype) -> None:
    case = case_of(name, "narrow")
    narrow, wide = Problem(dtype=dtype, seed=4), Problem(dtype=torch.float32, seed=4)
    wide.curvature = [curvature.float() for curvature in narrow.curvature]
    optimizers = [make(case, problem.params) for problem in (narrow, wide)]
    for _ in range(4):
        with torch.no_grad():
            for param, own in zip(wide.params, narrow.params):
                param.copy_(own)
        if case.drive is by_gradient:
            narrow.set_gradients()
            for param, own in zip(wide.params, narrow.params):
                assert own.grad is not None
                param.grad = own.grad.float()
            for optimizer in optimizers:
                optimizer.step()
        else:
            wide.slopes = [slope.float() for slope in narrow.slopes]
            for problem, optimizer in zip((narrow, wide), optimizers):
                case.drive(optimizer, problem)
        tolerance = 0.0 if case.drive is by_gradient else 0.02
        assert_same(narrow.values(), [value.to(dtype) for value in wide.values()], tolerance)
        narrow.advance()
    states = [flat_state(optimizer) for optimizer in optimizers]
    for key, value in states[0].items():
        assert value.dtype not in (torch.bfloat16, torch.float16), key
        if case.drive is by_gradient:
            assert_same(value, states[1][key])


# What it may not touch


@of_each_kind
def test_gradients_are_never_written_to(name: str) -> None:
    case = case_of(name)
    for variant, options in itertools.product(case.all_variants, ({}, {"foreach": True}, {"maximize": True})):
        for dtype in (torch.float32, torch.bfloat16):
            problem = Problem(dtype=dtype)
            optimizer = make(case, problem.params, **variant, **options)
            for _ in range(3):
                case.drive(optimizer, problem)
                problem.set_gradients()
                grads = [param.grad for param in problem.params]
                before = [(grad, grad.clone(), grad._version) for grad in grads if grad is not None]
                optimizer.step() if case.drive is by_gradient else case.drive(optimizer, problem)
                for param, (grad, copied, version) in zip(problem.params, before, strict=True):
                    assert param.grad is grad
                    assert grad._version == version
                    assert_same(grad, copied)


@every
def test_parameters_without_gradient_stay(name: str) -> None:
    case = case_of(name, "without gradient")
    problem = Problem()
    optimizer = make(case, problem.params)
    before = problem.values()
    problem.set_gradients()
    problem.params[1].grad = None
    optimizer.step()
    after = problem.values()
    assert_same(after[1], before[1])
    assert problem.params[1] not in optimizer.state
    assert not torch.equal(after[0], before[0])


@every
def test_sparse_gradients_are_refused(name: str) -> None:
    case = case_of(name, "sparse")
    problem = Problem(((5, 3), (7,)))
    optimizer = make(case, problem.params)
    case.drive(optimizer, problem)
    problem.set_gradients()
    assert problem.params[1].grad is not None
    problem.params[1].grad = problem.params[1].grad.to_sparse()
    before, state = problem.values(), flat_state(optimizer)
    with pytest.raises(UserError, match=r"needs dense gradients; got layout torch.sparse_coo; use sparse=False"):
        optimizer.step()
    assert_same(problem.values(), before)
    assert_same(flat_state(optimizer), state)


@every
def test_a_nan_gradient_stays_where_the_method_reads(name: str) -> None:
    case, entry = case_of(name, "nan"), optim.record(name)
    results = []
    for poisoned in (False, True):
        problem = Problem()
        optimizer = make(case, problem.params)
        case.drive(optimizer, problem)
        problem.set_gradients()
        if poisoned:
            assert problem.params[0].grad is not None
            problem.params[0].grad[1, 2] = torch.nan
        optimizer.step()
        results.append(problem.values())
    clean, found = results
    assert found[0][1, 2].isnan()
    if entry.reads == "element":
        found[0][1, 2] = clean[0][1, 2]
        assert_same(found, clean)
    elif entry.reads != "model":
        assert_same(found[1:], clean[1:])


KINDS = ("bf16", "fp16", "complex", "mixed", "missing", "first missing", "none", "frozen", "zero", "large", "empty")


def hard(kind: str) -> Problem:
    """A problem of a kind on which a step may fail, under whatever settings are a method's own."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "complex": torch.complex64}
    shapes = ((5, 3), (0,), (2, 3, 2, 3), (0, 4)) if kind == "empty" else ((5, 3), (7,), (2, 3, 2, 3), (33,))
    problem = Problem(shapes, dtypes.get(kind, torch.float32), seed=8)
    if kind == "mixed":
        problem.params[1] = nn.Parameter(problem.params[1].detach().to(torch.bfloat16))
        problem.curvature[1] = problem.curvature[1].to(torch.bfloat16)
    if kind == "frozen":
        problem.params[1].requires_grad_(False)
    return problem


def hard_step(case: Case, problem: Problem, optimizer: Any, kind: str) -> None:
    """Draw gradients alike but for a little, as late in a run, and step."""
    problem.advance()
    scale = {"zero": 0.0, "large": 300.0, "fp16": 0.1}.get(kind, 1.0)
    noise = {"zero": 0.0}.get(kind, 1e-3)
    problem.slopes = [scale * (torch.ones_like(slope) + noise * slope) for slope in problem.slopes]
    if kind == "zero":
        problem.curvature = [torch.zeros_like(curve) for curve in problem.curvature]
    left_out = {"missing": (1, 3), "first missing": (0,), "none": (0, 1, 2, 3), "frozen": (1,)}.get(kind, ())
    if case.drive is not by_gradient:
        whole = problem.params
        used = [index for index in range(len(whole)) if index not in left_out]
        part = copy.copy(problem)
        part.params, part.slopes, part.curvature = (
            [tensors[index] for index in used] for tensors in (whole, problem.slopes, problem.curvature)
        )
        if used:
            case.drive(optimizer, part)
        return
    problem.set_gradients()
    for index in left_out:
        problem.params[index].grad = None
    optimizer.step()


@every
def test_any_gradients_are_taken_or_refused_before_anything_changes(name: str) -> None:
    case, entry = CASES[name], optim.record(name)
    own = {"num_gradients": 3} if name == "mfac" else {}
    for kind, form in itertools.product(KINDS, set(entry.forms) & {"loop", "foreach"}):
        problem = hard(kind)
        optimizer = optim.create(name, problem.params, **own, **({form: True} if form == "foreach" else {}))
        start = problem.values()
        for _ in range(5):
            before, state = problem.values(), flat_state(optimizer)
            try:
                hard_step(case, problem, optimizer, kind)
            except UserError:
                assert_same(problem.values(), before)
                assert_same(flat_state(optimizer), state)
        for index, (now, then) in enumerate(zip(problem.values(), start, strict=True)):
            assert torch.isfinite(torch.view_as_real(now) if now.is_complex() else now).all(), (kind, form, index)
            stays = kind == "none" or (kind in ("missing", "frozen") and index == 1) or now.numel() == 0
            assert not stays or torch.equal(now, then), (kind, form, index)
            moves = not stays and kind in ("complex", "large", "empty", "frozen")
            assert not moves or not torch.equal(now, then), (kind, form, index)


# What it keeps


@every
def test_resuming_is_going_on(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    for variant, dtype in itertools.product(case.all_variants, (torch.float32, torch.bfloat16)):
        alone, broken = Problem(dtype=dtype, seed=6), Problem(dtype=dtype, seed=6)
        train(case, alone, expected := make(case, alone.params, **variant), 7)
        train(case, broken, first := make(case, broken.params, **variant), 3)
        second = make(case, broken.params, lr=123.0)
        second.load_state_dict(saved(first))
        del first
        train(case, broken, second, 4)
        assert_same(broken.values(), alone.values())
        assert_same(flat_state(second), flat_state(expected))


@every
def test_resuming_by_names_is_going_on(name: str) -> None:
    case = case_of(name)

    def model_of(problem: Problem) -> nn.Module:
        return nn.ParameterDict({f"p{index}": param for index, param in enumerate(problem.params)})

    alone, broken = Problem(dtype=torch.bfloat16, seed=6), Problem(dtype=torch.bfloat16, seed=6)
    train(case, alone, make(case, alone.params), 6)
    first = make(case, broken.params)
    train(case, broken, first, 3)
    kept = copy.deepcopy(get_optimizer_state_dict(model_of(broken), first))
    second = make(case, broken.params)
    values = broken.values()
    set_optimizer_state_dict(model_of(broken), second, kept)
    assert_same(broken.values(), values)
    train(case, broken, second, 3)
    assert_same(broken.values(), alone.values())


@every
def test_copies_and_pickles_go_on_alike(name: str) -> None:
    case = case_of(name, "pickle")
    results = []
    for duplicate in (lambda both: both, copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        problem = Problem(((5, 3), (7,)))
        optimizer = make(case, problem.params)
        train(case, problem, optimizer, 2)
        params, optimizer = duplicate((problem.params, optimizer))
        problem.params = params
        results.append(train(case, problem, optimizer, 2))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@every
def test_another_methods_state_is_refused(name: str) -> None:
    case = case_of(name)
    problem = Problem()
    optimizer = make(case, problem.params)
    case.drive(optimizer, problem)
    before = copy.deepcopy(optimizer.state_dict())
    problem.set_gradients()
    for other in (
        torch.optim.Adagrad(problem.params),
        torch.optim.AdamW(problem.params),
        torch.optim.SGD(problem.params),
    ):
        other.step()
        with pytest.raises(UserError, match=r"needs (its own state|groups with its own settings)"):
            optimizer.load_state_dict(other.state_dict())
    with pytest.raises(UserError, match=r"needs a state dict with `state` and `param_groups`; got \['weights'\]"):
        optimizer.load_state_dict({"weights": 1})
    broken = copy.deepcopy(before)
    last = broken["state"][max(broken["state"])]
    del last[next(iter(last))]
    with pytest.raises(UserError, match=r"is missing"):
        optimizer.load_state_dict(broken)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(make(case, [problem.params[0]]).state_dict())
    assert_same(flat_state(optimizer), flat(state for _, state in sorted(before["state"].items())))


@of_each_kind
def test_bytes_declared_are_bytes_allocated(name: str) -> None:
    case, entry = case_of(name), optim.record(name)
    for shape, dtype, variant in itertools.product(
        BYTE_SHAPES, (torch.float32, torch.bfloat16, torch.float64), case.all_variants
    ):
        problem = Problem((shape,), dtype)
        optimizer = make(case, problem.params, **variant)
        train(case, problem, optimizer, 2)
        kept = [value for value in optimizer.state[problem.params[0]].values() if torch.is_tensor(value)]
        allocated = sum(value.untyped_storage().nbytes() for value in kept)
        chosen = {**case.settings, **variant}
        assert entry.state_bytes(shape, dtype, **chosen) + entry.once_bytes(**chosen) == allocated, (
            shape,
            dtype,
            variant,
        )


@of_each_kind
def test_temporaries_declared_are_those_of_the_step(name: str, tmp_path: Path) -> None:
    case, entry = case_of(name, "temporaries"), optim.record(name)
    # one sign for every dtype and variant, the other for the first dtype: what it takes hangs on neither of the two
    forms = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
    for (dtype, maximize), variant in itertools.product(forms, case.all_variants):
        shape = (96, 512)
        problem = Problem((shape,), dtype)
        options = {**variant, **({"maximize": True} if maximize else {})}
        optimizer = make(case, problem.params, **options)
        train(case, problem, optimizer, 6)
        problem.set_gradients()
        measured = peak_bytes(optimizer.step, tmp_path)
        declared = entry.step_temporary_bytes(shape, dtype, **{**case.settings, **options})
        declared += entry.held_bytes(shape, dtype)
        assert abs(measured - declared) <= 256, (dtype, options, measured, declared)


# How it is used


@every
def test_a_closure_is_called_once_with_gradients_on(name: str) -> None:
    case = case_of(name)
    problem = Problem()
    optimizer = make(case, problem.params)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = problem.loss()
        if case.drive is by_gradient:
            optimizer.zero_grad()
            loss.backward()
        return loss

    expected = problem.loss().item()
    if case.drive is by_gradient:
        found = optimizer.step(closure)
        assert calls == [True]
    else:
        found = case.drive(optimizer, problem)
    assert found is None or float(found) == expected


@every
def test_schedules_and_tensor_learning_rates(name: str) -> None:
    case = case_of(name)
    results = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        problem = Problem(seed=7)
        optimizer = make(case, problem.params, lr=lr)
        schedule = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        results.append(train(case, problem, optimizer, 4, schedule.step))
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 / 16)
    assert_same(results[1], results[0], 1e-12)
    problem = Problem(seed=7)
    optimizer = make(case, problem.params)
    cyclic = any(key in optimizer.defaults for key in ("betas", "momentum"))
    train(case, problem, optimizer, 4, OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=cyclic).step)


@every
def test_a_learning_rate_of_zero_moves_nothing(name: str) -> None:
    case = case_of(name, "zero")
    problem = Problem()
    before = problem.values()
    assert_same(train(case, problem, make(case, problem.params, lr=0.0), 3), before)


@every
def test_a_scaler_skips_steps_with_infinite_gradients(name: str) -> None:
    case = case_of(name, "scaler")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled, plain = Problem(), Problem()
    optimizers = [make(case, problem.params) for problem in (scaled, plain)]
    for step in range(4):
        scaled.slopes = [slope.clone() for slope in plain.slopes]
        if step == 2:
            scaled.slopes[0][0, 0] = torch.inf
        optimizers[0].zero_grad()
        scaler.scale(scaled.loss()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if step != 2:
            case.drive(optimizers[1], plain)
        plain.advance()
    assert_same(scaled.values(), plain.values(), 1e-12)


@every
def test_groups_have_settings_of_their_own(name: str) -> None:
    case = case_of(name, "groups")
    together, apart = Problem(), Problem()
    optimizer = make(case, [{"params": together.params[:2], "lr": 0.3}])
    optimizer.add_param_group({"params": together.params[2:]})
    train(case, together, optimizer, 3)
    halves = [make(case, apart.params[:2], lr=0.3), make(case, apart.params[2:])]
    for _ in range(3):
        apart.set_gradients()
        for half in halves:
            half.step()
        apart.advance()
    assert_same(together.values(), apart.values(), 1e-12)


@every
def test_named_parameters_are_taken(name: str) -> None:
    case = case_of(name)
    problem, named = Problem(), Problem()
    optimizer = make(case, [(f"p{index}", param) for index, param in enumerate(named.params)])
    assert_same(train(case, named, optimizer, 3), train(case, problem, make(case, problem.params), 3))
    assert optimizer.param_groups[0]["param_names"][0] == "p0"
    other = make(case, [(f"p{index}", param) for index, param in enumerate(named.params)])
    other.load_state_dict(saved(optimizer))
    assert_same(flat_state(other), flat_state(optimizer))


@every
def test_a_late_parameter_counts_its_own_steps(name: str) -> None:
    case = case_of(name, "late")
    for options in ({}, {"foreach": True}, {"capturable": True}):
        late, alone = Problem(((7,), (5, 3))), Problem(((7,), (5, 3)))
        optimizer = make(case, late.params, **options)
        for _ in range(2):
            late.set_gradients()
            late.params[1].grad = None
            optimizer.step()
        second = make(case, [alone.params[1]], **options)
        for _ in range(3):
            late.set_gradients()
            alone.slopes = late.slopes
            alone.set_gradients()
            optimizer.step()
            second.step()
            late.advance()
        assert_same(late.params[1].detach(), alone.params[1].detach(), 1e-12)


@every
def test_strides_do_not_matter(name: str) -> None:
    case = case_of(name)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        problem = Problem(((4, 3, 2, 5),))
        problem.params = [nn.Parameter(problem.params[0].detach().to(memory_format=layout))]
        results.append(train(case, problem, make(case, problem.params), 3))
    assert_same(results[1], results[0], 1e-12)


@every
def test_settings_out_of_range_are_refused(name: str) -> None:
    case = case_of(name)
    weight = nn.Parameter(torch.ones(2, 2))
    assert case.refused
    for options, message in case.refused:
        with pytest.raises(UserError, match=message):
            optim.create(name, [weight], **options)
    optimizer = make(case, [weight])
    with pytest.raises(UserError, match="lr of at least 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UserError, match="one form of the step is needed; got foreach=True and fused=True"):
        optim.create(name, [weight], foreach=True, fused=True)
    with pytest.raises(UserError, match=r"has no option differentiable"):
        optim.create(name, [weight], differentiable=True)
    with pytest.raises(TypeError, match="unexpected option sparse"):
        optim.record(name).cls([weight], sparse=True)  # type: ignore[call-arg]


# What it is priced at


@of_each_kind
def test_a_profile_holds_the_declared_bytes(name: str) -> None:
    case_of(name, "profile")
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 257, bias=False))  # 8-bit above 4096
    found = tw.profile(model, (torch.ones(3, 33),), loss_fn=lambda out, batch: out.square().mean(), optimizer=name)
    entry = optim.record(name)
    per_parameter = sum(entry.state_bytes(tuple(param.shape)) for param in model.parameters())
    assert found.optimizer_bytes == per_parameter + entry.once_bytes()


@of_each_kind
def test_a_plan_is_priced_with_it(name: str) -> None:
    case_of(name, "plan")
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 96, bias=False))
    plan = tw.plan(model, (torch.ones(4, 32),), hardware="cpu:2", optimizer=name,
                   loss_fn=lambda out, batch: out.square().mean())  # fmt: skip
    assert plan.optimizer == name
    assert plan.predicted.peak_bytes > 0


@of_each_kind
def test_two_ranks_equal_one(name: str, pool2: Pool) -> None:
    case = case_of(name, "ranks")
    for result in pool2.run("tests.optim_cases.ranks:steps_on_shards", name=name):
        assert result, case.name
        assert max(result.values()) < 1e-12, result
