"""What the public verbs accept, beside the form that the rest of the package works with.

hardware    a Cluster, `8xh100`, a file's path, or a number of this machine's CPU processes      as_cluster
mesh        sizes of its axes, one size, or `2x4`                                               as_mesh
autocast    `bf16`, or torch.bfloat16                                                           as_dtype_name
optimizer   a name, a class of torch's or ours, an optimizer, a functools.partial of a class    as_optimizer_name, as_chosen
plan        a Plan, or the path of its file                                                     as_plan
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifacts import Cluster, Plan, UserError
from .hardware import GRAMMAR, resolve

if TYPE_CHECKING:
    from .optim.chosen import Chosen

_SHAPE = (16, 16)
"""Of the parameter by which records of one class are told apart."""


def as_cluster(value: Any) -> Cluster:
    """Return the cluster that `value` names.

    >>> as_cluster("8xh200").num_devices, as_cluster(2).name
    (8, 'cpu:2')
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return resolve(f"cpu:{value}")
    if isinstance(value, str):
        return resolve(value)
    if isinstance(value, os.PathLike):
        return Cluster.from_json(os.fspath(value))
    raise UserError(
        f"hardware is needed as {GRAMMAR}, a number of CPU processes or a Cluster; got {_named(value)}; try "
        "hardware='cpu:2'"
    )


def as_mesh(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a mesh's axes, outermost first; None leaves them to the search.

    >>> as_mesh("2x4"), as_mesh(8), as_mesh([2, 4])
    ((2, 4), (8,), (2, 4))
    """
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", value.strip().lower()):
        return tuple(int(size) for size in value.strip().lower().split("x"))
    sizes = [value] if isinstance(value, int) else list(value) if isinstance(value, Sequence) else []
    if sizes and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return tuple(sizes)
    raise UserError(
        f"a mesh is needed as sizes joined by x; got {value!r}; write for example 2x4 (in Python also (2, 4))"
    )


def as_dtype_name(value: Any) -> str | None:
    """Return the short name of a type for autocast.

    >>> import torch
    >>> as_dtype_name(torch.bfloat16), as_dtype_name("float16"), as_dtype_name(None)
    ('bf16', 'fp16', None)
    """
    from .profiler.step import DTYPES

    if value is None or value in DTYPES:
        return value
    full = str(value).removeprefix("torch.")
    found = next((name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{full}"), None)
    if found is None:
        raise UserError(
            f"a dtype for autocast is needed, one of {', '.join(DTYPES)}; got {_named(value)}; try autocast='bf16'"
        )
    return found


def as_plan(value: Any) -> Plan:
    """Return a plan, read from its file where `value` is a path."""
    if isinstance(value, Plan):
        return value
    if isinstance(value, str | os.PathLike):
        return Plan.from_json(os.fspath(value))
    raise UserError(f"a Plan, or the path of one in JSON, is needed; got {_named(value)}; make one with tw.plan")


def as_pins(value: Any) -> tuple[str, ...]:
    """Return pins as a tuple; one may be given by itself."""
    pins = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for pin in pins:
        if not isinstance(pin, str):
            raise UserError(f"pins as text are needed, such as 'PATTERN=SPLIT@AXIS'; got {_named(pin)}; quote it")
    return pins


def as_imbalance(value: Any) -> float:
    """Return by how much a rank's experts may get more rows than their even share, infinite for `worst`; else `UserError`.

    >>> as_imbalance("1.5"), as_imbalance("worst")
    (1.5, inf)
    """
    text = str(value).strip()
    if text == "worst":
        return math.inf
    if text.startswith(_MEASURED):
        return _measured_imbalance(text.removeprefix(_MEASURED))
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 1.0 <= found < math.inf:
        raise UserError(
            f"an imbalance of experts is a number of at least 1, worst, or {_MEASURED}FILE, the --metrics of a run; got {value!r}; "
            "try 1.25"
        )
    return found


def as_share(value: Any) -> float:
    """Return the share of its rows that a linear map may keep; 0 for None: none may. `UserError` outside (0, 1].

    >>> as_share(None), as_share("0.3"), as_share(1)
    (0.0, 0.3, 1.0)
    """
    if value is None:
        return 0.0
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0.0 < found <= 1.0:
        raise UserError(
            f"the share of rows that linear maps keep for the gradients of their weights is above 0 and at most 1; got {value!r}; "
            "try 0.3, or leave sampled out for exact gradients"
        )
    return found


_MEASURED = "measured:"


def _measured_imbalance(path: str) -> float:
    """The largest factor that the metrics file of a run has."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf8").splitlines() if line.strip()]
        found = [float(line["expert_imbalance"]) for line in lines if "expert_imbalance" in line]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"the metrics file of a run is needed after {_MEASURED}; {path} cannot be read as one ({error}); pass what train "
            "--metrics wrote"
        ) from None
    if not found:
        raise UserError(
            f"a run that counted its experts' rows is needed after {_MEASURED}; {path} has no expert_imbalance; a plan that "
            "splits no experts over ranks counts none: give a number"
        )
    return max(1.0, *found)


def check_model(model: Any) -> None:
    """Raise `UserError` unless `model` is a module."""
    from torch import nn

    if isinstance(model, nn.Module):
        return
    advice = "build it: Model()" if isinstance(model, type) else "tw.load_model(…).model builds what a name stands for"
    raise UserError(f"a torch.nn.Module is needed as the model; got {_named(model)}; {advice}")


def as_maker(optimizer: Any, device: str = "cpu") -> tuple[Callable[[Any], Any], str]:
    """Return a function from parameters to an optimizer, and its name, for all that an optimizer may be given as.

    Beside what `as_optimizer_name` takes that is any function from parameters to an optimizer. device: the kind of device that
    it is followed for: on a GPU an 8-bit method of a name is one kernel a parameter.
    """
    import torch

    if isinstance(optimizer, str):
        return _by_name(optimizer, device)
    if isinstance(optimizer, torch.optim.Optimizer):
        accepted = inspect.signature(type(optimizer)).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        optimizer = functools.partial(type(optimizer), **options)
    if not callable(optimizer):
        raise UserError(
            "an optimizer is needed: a name, a class, or a function from parameters to one; got "
            f"{_named(optimizer)}; try optimizer='adamw'"
        )
    found = _record_of(*_class_and_options(optimizer))
    return optimizer, found.name if found is not None else getattr(optimizer, "__name__", "custom")


def _by_name(name: str, device: str) -> tuple[Callable[[Any], Any], str]:
    from . import optim
    from .optim.declared import DeclaredStep, OnePassStep

    entry = optim.record(name)
    if device == "gpu" and entry.one_kernel_on_gpu:
        return (lambda params: OnePassStep(params, entry.with_options("fused"))), entry.name
    if entry.needs_values:
        return (lambda params: DeclaredStep(params, entry)), entry.name
    return (lambda params: optim.create(entry.name, params)), entry.name


def as_optimizer_name(optimizer: Any) -> str:
    """Return the name of the optimizer, by whose record plans are priced: of a class, an instance, a `functools.partial`.

    Settings that change what it keeps choose among the records of a class; a learning rate and the like do not matter.

    >>> import torch
    >>> as_optimizer_name(torch.optim.AdamW), as_optimizer_name(functools.partial(torch.optim.SGD, momentum=0.9))
    ('adamw', 'sgd-momentum')
    """
    from . import optim

    if isinstance(optimizer, str):
        return optim.record(optimizer).name
    cls, options = _class_and_options(optimizer)
    found = _record_of(cls, options)
    if found is not None:
        return str(found.name)
    if cls is None:
        raise UserError(
            f"the name or the class of an optimizer is needed, by which a plan is priced; got {_named(optimizer)}; "
            "`trainwright optimizers` lists them"
        )
    settings = ", ".join(f"{key}={value}" for key, value in options.items() if value) if _has_record(cls) else ""
    raise UserError(
        f"an optimizer with a declared cost is needed; got {cls.__name__}{f' with {settings}' if settings else ''}; "
        "`trainwright optimizers` lists those that there are"
    )


def as_chosen(
    optimizer: Any, options: Mapping[str, Any] | None, form: str | None, model: Any = None, device: str = "cpu"
) -> Chosen:
    """Return the optimizer that a plan is priced by: a name, or what `as_optimizer_name` takes with the settings in it.

    Of a class or an instance the form is its own, `loop` unless it says `fused` or `foreach`: so the script makes it. Of a name
    it is the fastest.

    >>> import torch
    >>> as_chosen(functools.partial(torch.optim.AdamW, amsgrad=True), {"eps": 1e-6}, None).options
    {'amsgrad': True, 'eps': 1e-06}
    """
    from . import optim
    from .optim.options import option_defaults

    name = _name_by_class(optimizer) or as_optimizer_name(optimizer)
    own: dict[str, Any] = {}
    if not isinstance(optimizer, str):
        entry, (_, given) = optim.record(name), _class_and_options(optimizer)
        defaults = option_defaults(entry)
        own = {key: value for key, value in given.items() if key in defaults and value != defaults[key][0]}
        form = form or next((each for each in ("fused", "foreach") if given.get(each)), "loop")
    return optim.choose(name, {**own, **(options or {})}, form, model, device)


def _class_and_options(optimizer: Any) -> tuple[type | None, Mapping[str, Any]]:
    import torch

    options: dict[str, Any] = {}
    while isinstance(optimizer, functools.partial):
        options = {**optimizer.keywords, **options}
        optimizer = optimizer.func
    if isinstance(optimizer, torch.optim.Optimizer):
        cls = type(optimizer)
        return getattr(cls, "of_torch", cls), {
            **optimizer.defaults,
            **options,
        }  # a class over the parts of a plan is torch's
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    return (optimizer if is_class else None), options


def _name_by_class(optimizer: Any) -> str | None:
    """The record of a class whatever its settings, which the plan keeps; None where `optimizer` is none, or has several."""
    from . import optim

    cls, options = _class_and_options(optimizer)
    if cls is None or _record_of(cls, options) is not None:
        return None
    return next((name for name in optim.names() if optim.record(name).cls is cls), None)


def _has_record(cls: type) -> bool:
    from . import optim

    return any(optim.record(name).cls is cls for name in optim.names())


def _record_of(cls: type | None, options: Mapping[str, Any]) -> Any:
    """The record of a class that keeps as much as the class with these options; None where there is none."""
    from . import optim

    for entry in map(optim.record, optim.names()):
        if entry.cls is cls:
            bare = {**dict.fromkeys(entry.defaults), **options}
            if entry.state_bytes(_SHAPE, **bare) == entry.state_bytes(_SHAPE):
                return entry
    return None


def _named(value: Any) -> str:
    """Name a value that was not expected: its text, or what it is."""
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__} ({str(value)[:60]})"
