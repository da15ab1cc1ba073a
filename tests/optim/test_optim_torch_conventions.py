"""What torch's own optimizer tests ask of an optimizer, asked of ours, and of two of torch's as a control.

The list is that of `torch/testing/_internal/common_optimizers.py` and `test/test_optim.py` of PyTorch 2.13, without what
`test_optim_battery.py` has (foreach against loop, complex, maximize, closures, resuming, copies, sparse and missing
gradients). Written out here, for torch's module is private and needs a package that no user has.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from tests.optim_cases import CASES, Case, Problem
from tests.optim_cases.case import by_gradient, train
from trainwright import optim

CONTROLS = {name: Case(name, lambda *_, **__: [], ()) for name in ("adamw", "sgd-momentum")}
ALL = {**CASES, **CONTROLS}
BY_GRADIENT = tuple(name for name, case in ALL.items() if case.drive is by_gradient)
SHAPES = ((5, 3), (7,))
ONE_GROUP = ("gradnormsmoothnewton", "sso")
"""Methods that take one group alone, and say so."""
every = pytest.mark.parametrize("name", tuple(ALL))
by_gradients = pytest.mark.parametrize("name", BY_GRADIENT)


def make(name: str, params: Any, **options: Any) -> Any:
    entry = optim.record(name)
    return entry.cls(params, **{**entry.defaults, **ALL[name].settings, **options})  # type: ignore[call-arg]


def ready(name: str, num_steps: int = 2, **options: Any) -> tuple[Problem, Any]:
    """A problem, and an optimizer that has made so many steps on it."""
    problem = Problem(SHAPES, seed=1)
    optimizer = make(name, problem.params, **options)
    train(ALL[name], problem, optimizer, num_steps)
    return problem, optimizer


def assert_same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def test_there_are_methods_to_ask() -> None:
    assert len(CASES) >= 15
    assert len(BY_GRADIENT) >= 12
    assert set(CONTROLS) < set(BY_GRADIENT)


# Construction


@every
def test_parameters_are_checked_as_torch_does(name: str) -> None:
    first, second = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        make(name, first)
    with pytest.raises(ValueError, match="empty parameter list"):
        make(name, [])
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        make(name, [first, first])
    twice = r"needs one group" if name in ONE_GROUP else r"some parameters appear in more than one parameter group"
    with pytest.raises(ValueError, match=twice):
        make(name, [{"params": first}, {"params": first}])
    with pytest.raises(ValueError, match="all optimizer params should be with/without names"):
        make(name, [("weight", first), second])
    named = r"needs one group" if name in ONE_GROUP else r"all optimizer param groups should be with/without names"
    with pytest.raises(ValueError, match=named):
        make(name, [{"params": [first], "lr": 1e-2}, {"params": [("weight", second)]}])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        make(name, [first * 2])


@every
def test_learning_rates_are_checked_as_torch_does(name: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"lr must be 1-element|lr of one element"):
        make(name, [weight], lr=torch.tensor([0.001, 0.001]))
    with pytest.raises(ValueError, match=r"Invalid learning rate|lr of at least 0"):
        make(name, [weight], lr=-0.1)
    assert float(make(name, [weight], lr=torch.tensor([0.25])).param_groups[0]["lr"]) == 0.25


@every
def test_printed_with_its_settings(name: str) -> None:
    optimizer = make(name, [nn.Parameter(torch.ones(2, 2))], lr=0.125)
    assert repr(optimizer).startswith(f"{type(optimizer).__name__} (\nParameter Group 0")
    assert re.search(r"\n    lr: 0\.125\n", repr(optimizer))
    assert {"lr", "maximize", "foreach"} <= set(optimizer.defaults)


@every
def test_groups_are_added_with_defaults_filled_in(name: str) -> None:
    _, optimizer = ready(name)
    later = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    if name in ONE_GROUP:
        with pytest.raises(ValueError, match="needs one group"):
            optimizer.add_param_group({"params": later})
        return
    optimizer.add_param_group({"params": later})
    assert optimizer.param_groups[1]["params"] == [later]
    assert set(optimizer.param_groups[1]) == set(optimizer.param_groups[0])
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([later])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": later})


# Steps


@by_gradients
def test_zero_gradients_move_nothing(name: str) -> None:
    problem = Problem(SHAPES)
    options = {"weight_decay": 0.0} if "weight_decay" in make(name, problem.params).defaults else {}
    optimizer, before = make(name, problem.params, **options), problem.values()
    for _ in range(3):
        for param in problem.params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert_same(problem.values(), before)


@by_gradients
@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_without_elements_are_no_trouble(name: str, foreach: bool) -> None:
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0))]
    optimizer = make(name, params, foreach=foreach)
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    assert [tuple(param.shape) for param in params] == [(4, 3), (0, 3), (0,)]
    assert params[0].isfinite().all()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


@by_gradients
@pytest.mark.parametrize("foreach", [False, True])
def test_slices_are_updated_in_place(name: str, foreach: bool) -> None:
    results = []
    for sliced in (False, True):
        problem = Problem(((10, 5), (10,)), seed=2)
        if sliced:
            wide = [torch.stack([param.detach(), param.detach()], -1)[..., 0] for param in problem.params]
            problem.params = [nn.Parameter(value) for value in wide]
            assert not problem.params[0].is_contiguous()
        storages = [param.data_ptr() for param in problem.params]
        results.append(train(ALL[name], problem, make(name, problem.params, foreach=foreach), 4))
        assert [param.data_ptr() for param in problem.params] == storages
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@by_gradients
def test_dtypes_may_stand_side_by_side(name: str) -> None:
    results = []
    for foreach in (False, True):
        problem = Problem(((5, 3), (7,), (2, 3)), torch.float64, seed=3)
        dtypes = (torch.float64, torch.float32, torch.bfloat16)
        problem.params = [nn.Parameter(param.detach().to(dtype)) for param, dtype in zip(problem.params, dtypes)]
        optimizer = make(name, problem.params, foreach=foreach)
        for _ in range(4):
            for param, slope in zip(problem.params, problem.slopes):
                param.grad = slope.to(param.dtype)
            optimizer.step()
            problem.advance()
        assert [param.dtype for param in problem.params] == list(dtypes)
        results.append([param.detach().double() for param in problem.params])
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-12, atol=1e-12)


@every
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, gamma=0.95)],
            milestones=[5],
        ),
        lr_scheduler.ReduceLROnPlateau,
    ],
    ids=["step", "cosine", "sequential", "plateau"],
)
def test_it_goes_the_right_way_under_schedules(name: str, schedule: Callable[[Any], Any]) -> None:
    problem = Problem(SHAPES, seed=4)
    problem.curvature = [torch.ones_like(curvature) for curvature in problem.curvature]
    options = {"weight_decay": 0.0} if "weight_decay" in make(name, problem.params).defaults else {}
    optimizer = make(name, problem.params, **options)
    schedulers, losses = schedule(optimizer), [problem.loss().item()]
    for _ in range(30):
        ALL[name].drive(optimizer, problem)  # the slopes stay: one function to descend
        losses.append(problem.loss().item())
        schedulers.step(*[losses[-1]] * isinstance(schedulers, lr_scheduler.ReduceLROnPlateau))
    assert losses[-1] < losses[0]


@by_gradients
def test_the_default_dtype_does_not_matter(name: str) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            problem = Problem(SHAPES, torch.float32, seed=5)
            results.append(train(ALL[name], problem, make(name, problem.params, lr=0.01), 4))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


@by_gradients
def test_gradients_are_set_to_none_or_zero(name: str) -> None:
    problem, optimizer = ready(name)
    problem.set_gradients()
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in problem.params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in problem.params)


@every
def test_a_step_has_a_name_in_traces(name: str) -> None:
    problem, optimizer = ready(name, 1)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        ALL[name].drive(optimizer, problem)
    assert f"Optimizer.step#{type(optimizer).__name__}.step" in {event.key for event in trace.key_averages()}


# Hooks


@every
def test_hooks_of_a_step_are_called_around_it(name: str) -> None:
    problem, optimizer = ready(name)
    called: list[str] = []
    before = [param.detach().clone() for param in problem.params]

    def noted(what: str, moved: bool) -> Callable[..., None]:
        def hook(owner: Any, args: Any, kwargs: Any) -> None:
            assert owner is optimizer
            assert torch.equal(problem.params[0].detach(), before[0]) is not moved
            called.append(what)

        return hook

    handles = [
        register_optimizer_step_pre_hook(noted("first of all", False)),
        optimizer.register_step_pre_hook(noted("before", False)),
        optimizer.register_step_post_hook(noted("after", True)),
        register_optimizer_step_post_hook(noted("last of all", True)),
    ]
    try:
        ALL[name].drive(optimizer, problem)
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["first of all", "before", "after", "last of all"]
    ALL[name].drive(optimizer, problem)
    assert len(called) == 4


@every
def test_hooks_of_the_state_are_called_in_order(name: str) -> None:
    _, optimizer = ready(name)
    called: list[str] = []

    def noted(what: str, result: Any = None) -> Callable[..., Any]:
        def hook(owner: Any, *given: Any) -> Any:
            called.append(what)
            return result(*given) if result else None

        return hook

    def marked(state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "mark": 1}

    def unmarked(state_dict: dict[str, Any]) -> dict[str, Any]:
        assert state_dict["mark"] == 1
        groups = [{**group, "lr": 0.375} for group in state_dict["param_groups"]]
        return {"state": state_dict["state"], "param_groups": groups}

    optimizer.register_state_dict_pre_hook(noted("before saving"))
    optimizer.register_state_dict_post_hook(noted("after saving", marked))
    optimizer.register_load_state_dict_pre_hook(noted("before loading", unmarked))
    optimizer.register_load_state_dict_pre_hook(noted("before all"), prepend=True)
    optimizer.register_load_state_dict_post_hook(noted("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", "after saving", "before all", "before loading", "after loading"]
    assert optimizer.param_groups[0]["lr"] == 0.375


# State


@every
def test_saving_twice_is_saving_the_same(name: str) -> None:
    _, optimizer = ready(name)
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert set(first) == {"state", "param_groups"}
    assert first["param_groups"] == second["param_groups"]
    assert len(first["state"]) >= 1
    assert list(first["state"]) == list(second["state"])
    for left, right in zip(first["state"].values(), second["state"].values()):
        assert_same(dict(left), dict(right))


@every
def test_a_copy_has_all_public_attributes(name: str) -> None:
    _, optimizer = ready(name)
    duplicate = copy.deepcopy(optimizer)
    assert {key for key in vars(duplicate) if key[0] != "_"} == {key for key in vars(optimizer) if key[0] != "_"}


def test_a_copy_averages_over_the_same_ranks() -> None:
    group = object()  # a real one cannot be copied: a copy of this would be another
    optimizer = optim.SophiaH([nn.Parameter(torch.ones(2))], process_group=group)  # type: ignore[arg-type]
    assert copy.deepcopy(optimizer).process_group is group


@every
def test_state_dicts_pass_between_named_and_unnamed_parameters(name: str) -> None:
    for named_first in (False, True):
        results = []
        for changes in (False, True):
            problem = Problem(SHAPES, seed=6)
            pairs = [(f"p{index}", param) for index, param in enumerate(problem.params)]
            given: list[Any] = [problem.params, pairs]
            optimizer = make(name, given[named_first])
            train(ALL[name], problem, optimizer, 2)
            if changes:
                state = copy.deepcopy(optimizer.state_dict())
                assert ("param_names" in state["param_groups"][0]) is named_first
                optimizer = make(name, given[not named_first])
                optimizer.load_state_dict(state)
                assert optimizer.param_groups[0]["param_names"] == ["p0", "p1"]  # known on either side
            results.append(train(ALL[name], problem, optimizer, 2))
        assert_same(results[1], results[0])


@every
def test_states_saved_before_there_were_forms_are_taken(name: str) -> None:
    results = []
    for older in (False, True):
        problem, optimizer = ready(name)
        state = copy.deepcopy(optimizer.state_dict())
        if older:
            for group in state["param_groups"]:
                for key in ("foreach", "maximize", "capturable", "fused", "differentiable"):
                    group.pop(key, None)
        second = make(name, problem.params)
        second.load_state_dict(state)
        results.append(train(ALL[name], problem, second, 2))
    assert_same(results[1], results[0])


@by_gradients
def test_a_step_saved_as_a_number_is_taken(name: str) -> None:
    results = []
    for as_number in (False, True):
        problem, optimizer = ready(name)
        state = copy.deepcopy(optimizer.state_dict())
        for own in state["state"].values() if as_number else ():
            if "step" in own:
                own["step"] = float(own["step"])
        optimizer.load_state_dict(state)
        results.append(train(ALL[name], problem, optimizer, 2))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", tuple(CASES))
def test_loading_copies_what_is_given(name: str) -> None:
    """More than torch does: of a state dict not copied before, its SGD goes on in the given tensors."""
    problem, optimizer = ready(name)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train(ALL[name], problem, optimizer, 2)
    for key, own in kept["state"].items():
        assert_same(dict(state["state"][key]), dict(own))
    assert state["param_groups"] == kept["param_groups"]


@every
def test_a_schedule_goes_on_after_loading(name: str) -> None:
    def rate(epoch: int) -> float:
        return 0.5**epoch

    def rates(resumed: bool) -> Iterator[float]:
        problem = Problem(SHAPES, seed=8)
        optimizer = make(name, problem.params, lr=0.25)
        schedule = lr_scheduler.LambdaLR(optimizer, rate)
        for step in range(4):
            if resumed and step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = make(name, problem.params, lr=7.0)
                optimizer.load_state_dict(state)
                schedule = lr_scheduler.LambdaLR(optimizer, rate, last_epoch=step - 1)
            ALL[name].drive(optimizer, problem)
            schedule.step()
            yield float(optimizer.param_groups[0]["lr"])

    assert list(rates(True)) == list(rates(False)) == [0.125, 0.0625, 0.03125, 0.015625]
