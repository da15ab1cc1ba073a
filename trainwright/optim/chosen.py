"""`Chosen`: an optimizer as a plan prices it and a run makes it: its options, its groups, and the form of its step.

choose               name, options, form, model → `Chosen`; the planner asks it for bytes and passes
Chosen.make          parameters by name → the optimizer itself, on this rank's parts
Chosen.on_fakes      the same for tensors without values: what it holds, where it cannot compute
of_plan              what a plan says → `Chosen`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..artifacts import OptimizerGroup, Plan, UserError
from .declared import DeclaredStep
from .eight_bit import EightBit
from .frugal import FRUGAL
from .on_parts import OnParts, on_parts
from .on_wholes import OnWholes, Together
from .options import FORMS, as_json, checked_options, without_groups
from .record import OptimizerRecord


@dataclass(frozen=True, eq=False)
class Chosen:
    """An optimizer with its settings. It answers what the planner asks of an optimizer, for each parameter by its name.

    options: those that were given; the record has them, too. groups: the parameters that are set apart, by name.
    """

    record: OptimizerRecord
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[OptimizerGroup, ...] = ()
    owned: tuple[str, ...] = ()
    """The parameters that one rank steps on for all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "record":
            raise AttributeError(name)
        return getattr(self.record, name)

    def of(self, key: str) -> Any:
        """Return the record for the parameter `key`, with its group's options."""
        return self._of_groups.get(key, self.record)

    def make(self, params: Iterable[Any], lr: float | None = None) -> torch.optim.Optimizer:
        """Return the optimizer over `params`: tensors, or pairs of name and tensor, by which they find their groups."""
        pairs = _named(params)
        made = [build(entry, groups, lr) for entry, groups in self._members(pairs)]
        for each in made:
            if isinstance(each, OnWholes):
                each.own({param for name, param in pairs if name in self.owned and _is_in(param, each)})
        return made[0] if len(made) == 1 else Together(made)

    def on_fakes(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return what holds and allocates as the optimizer does, over parameters without values."""
        made = [on_fakes(entry, groups) for entry, groups in self._members(_named(params))]
        return made[0] if len(made) == 1 else Together(made)

    @cached_property
    def _of_groups(self) -> dict[str, OptimizerRecord]:
        """The records of the parameters that are set apart."""
        return {name: entry for group, entry in zip(self.groups, self._entries) for name in group.params}

    @cached_property
    def _entries(self) -> list[OptimizerRecord]:
        """The record of each group."""
        return [
            choose(group.optimizer, group.options, group.form).record
            if group.optimizer is not None
            else self.record.with_options(**checked_options(self.record, group.options))
            for group in self.groups
        ]

    def _members(self, pairs: list[tuple[str, Tensor]]) -> list[tuple[OptimizerRecord, list[dict[str, Any]]]]:
        """The optimizers, each with its groups: one, unless some parameters are another's."""
        apart = {name: number for number, group in enumerate(self.groups) for name in group.params}
        members: dict[str, tuple[OptimizerRecord, list[dict[str, Any]]]] = {}
        for number in (None, *range(len(self.groups))):
            params = [param for name, param in pairs if apart.get(name) == number]
            group = None if number is None else self.groups[number]
            entry = self.record if number is None or group is None else self._entries[number]
            if params:
                is_other = group is not None and group.optimizer is not None
                own = {} if group is None or is_other else checked_options(self.record, group.options)
                member = members.setdefault(entry.name, (entry if is_other else self.record, []))
                member[1].append({"params": params, **own})
        return list(members.values())

    def fields(self) -> dict[str, Any]:
        """Return what a plan keeps of this."""
        return {
            "optimizer": self.record.name,
            "optimizer_options": as_json(self.options),
            "optimizer_form": self.record.form,
            "optimizer_groups": self.groups,
        }


def _named(params: Iterable[Any]) -> list[tuple[str, Tensor]]:
    return [each if isinstance(each, tuple) else ("", each) for each in params]


def _is_in(param: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    return any(param is each for group in optimizer.param_groups for each in group["params"])


def choose(
    name: str,
    options: Mapping[str, Any] | None = None,
    form: str | None = None,
    model: nn.Module | None = None,
    device: str = "cpu",
) -> Chosen:
    """Return the optimizer `name` under `options`, in the groups that it wants of `model`, for a device of a kind.

    form: `fused`, `foreach` or `loop`; None: the fastest that holds no temporaries of the whole model's size, which is
    `fused` where the method has it. options: of its constructor, and `groups`, false to treat all parameters alike. Raises
    `UserError` for names, options, values and forms that there are not.

    >>> choose("adamw", {"weight_decay": "0.1"}).fields()["optimizer_form"]
    'fused'
    """
    from . import record

    entry = record(name)
    grouped, given = without_groups(entry, options)
    checked = checked_options(entry, given)
    if form is not None and form not in FORMS:
        raise UserError(f"a form of the optimizer's step is needed, one of {', '.join(FORMS)}; got {form!r}; try fused")
    groups = groups_of(entry, model, device) if grouped and model is not None else ()
    complex_param = _complex_param(model, groups) if model is not None else None
    if complex_param is not None:
        _check_takes_complex(entry, form, complex_param)
    chosen = entry.with_options(form or default_form(entry, device, complex_param is not None), **checked)
    return Chosen(chosen, checked, groups)


def default_form(entry: OptimizerRecord, device: str = "cpu", has_complex: bool = False) -> str:
    """Return the form in which a plan runs an optimizer unless told: `foreach`, which holds the most, is not that.

    8-bit methods and FRUGAL have their single pass on CPUs alone; on a GPU they take the next form. torch's fused kernels take no
    complex parameters.

    >>> from trainwright.optim import record
    >>> default_form(record("adamw")), default_form(record("adamax")), default_form(record("frugal"), "gpu")
    ('fused', 'loop', 'loop')
    """
    if device == "gpu" and issubclass(entry.cls, EightBit | FRUGAL):
        return entry.forms[-1]
    left_out = ("foreach", "fused") if has_complex and _is_of_torch(entry) else ("foreach",)
    return next(form for form in entry.forms if form not in left_out)


def _is_of_torch(entry: OptimizerRecord) -> bool:
    return entry.cls.__module__.startswith("torch.")


def _complex_param(model: nn.Module, groups: Iterable[OptimizerGroup]) -> str | None:
    """The name of the first complex parameter that is trained, but for those of other optimizers; None where there is none."""
    others = {name for group in groups if group.optimizer is not None for name in group.params}
    trained = (name for name, param in model.named_parameters() if param.requires_grad and param.is_complex())
    return next((name for name in trained if name not in others), None)


def _check_takes_complex(entry: OptimizerRecord, form: str | None, param: str) -> None:
    """Raise `UserError` where the step, in the form that was asked for, refuses complex parameters as `param`."""
    if entry.real_only:
        raise UserError(
            f"real parameters are needed for {entry.name}; {param} is complex; take another optimizer, for example adamw"
        )
    if form == "fused" and _is_of_torch(entry):
        raise UserError(
            f"real parameters are needed for the fused form of torch's {entry.name}; {param} is complex; take the form loop"
        )


def groups_of(entry: OptimizerRecord, model: nn.Module, device: str = "cpu") -> tuple[OptimizerGroup, ...]:
    """Return the groups with settings of their own that the method's documentation asks for, by the parameters' names.

    Another optimizer's group has the form in which a plan runs that one on a device of this kind.
    """
    if entry.groups is None:
        return ()
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for group in entry.groups(model):
        settings = {key: value for key, value in group.items() if key not in ("params", "optimizer")}
        if settings or "optimizer" in group:
            own = tuple(names[id(param)] for param in group["params"])
            found.append(OptimizerGroup(params=own, options=as_json(settings), **_of_another(group, device)))
    return tuple(found)


def _of_another(group: Mapping[str, Any], device: str) -> dict[str, str]:
    """Whose group it is, and the form of that optimizer's step; nothing where it is the method's own."""
    if "optimizer" not in group:
        return {}
    from . import record

    has_complex = any(param.is_complex() for param in group["params"])
    return {"optimizer": group["optimizer"], "form": default_form(record(group["optimizer"]), device, has_complex)}


def of_plan(plan: Plan) -> Chosen:
    """Return the optimizer that a plan priced.

    Raises `UserError` where the plan's own words about it do not hold.
    """
    found = choose(plan.optimizer, plan.optimizer_options, plan.optimizer_form)
    return replace(found, groups=plan.optimizer_groups, owned=plan.optimizer_owned)


def check_runs(chosen: Chosen, plan: Plan) -> None:
    """Raise `UserError` where the optimizer cannot run under `plan`, with the reason and what to do.

    One that takes the loss with its graph goes through that more than once, which what a plan recomputes, offloads, sends in
    buckets or runs in micro-batches allows once. A plan that was made for such an optimizer has none of it.
    """
    from . import check_plannable

    check_plannable(chosen.name, plan.offloads_states)
    if chosen.not_on_shards and plan.num_ranks > 1:
        raise UserError(
            f"an optimizer that steps on shards is needed on {plan.num_ranks} ranks; {chosen.name} {chosen.not_on_shards}; "
            "take adafactor or clippedadam, or plan for one device"
        )
    if not chosen.needs_loss:
        return
    away = what_goes_once(plan)
    if away is not None:
        raise UserError(
            f"a plan that keeps everything is needed for {chosen.name}, which goes through the graph of the loss more than "
            f"once; this one {away}; plan with --optimizer {chosen.name}, whose plans keep everything, or take adamw"
        )
    if chosen.name == "sso" and not plan.loss_fn:
        raise UserError(
            "a loss_fn beside the model is needed for sso, which asks for the loss of targets of its own; this plan's loss "
            "is the model's; return (model, batch, loss_fn), or take sophiah"
        )


def what_goes_once(plan: Plan) -> str | None:
    """Return what of a plan makes its graph one that a backward goes through once; None where nothing does."""
    away = next((f"recomputes {key}" for key, op in plan.modules.items() if op.recomputed), None)
    away = away or next((f"offloads {key}" for key, op in plan.modules.items() if op.offloaded), None)
    away = away or ("sends gradients in buckets" if plan.overlap != "none" and plan.num_ranks > 1 else None)
    away = away or (f"runs {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else None)
    return away or ("takes its loss in chunks" if plan.loss_chunks else None)


WANTS = {"sophiag": "logits", "sso": "targets"}
"""What the closures of methods return that want more than the loss."""


def build(entry: OptimizerRecord, groups: list[dict[str, Any]], lr: float | None = None) -> torch.optim.Optimizer:
    """Return the optimizer of a record over groups of parameters, on this rank's parts where those are `DTensor`s."""
    cls = class_for(entry, [param for group in groups for param in group["params"]])
    given = {} if lr is None else {"lr": lr}
    try:
        return cls(groups, **{**entry.defaults, **given})  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise UserError(f"{entry.name} does not accept these settings: {error}; change them") from error


def class_for(entry: OptimizerRecord, params: Iterable[Any]) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer over these parameters: torch's own step on this rank's parts of `DTensor`s."""
    if entry.cls.__module__.startswith("torch.") and any(isinstance(param, DTensor) for param in params):
        return on_parts(entry.cls, OnWholes if entry.reads == "tensor" else OnParts)  # type: ignore[arg-type]  # a class
    return entry.cls


def on_fakes(entry: OptimizerRecord, groups: Iterable[Any]) -> torch.optim.Optimizer:
    """Return a record's optimizer over parameters without values, or what stands in for it where its step reads values."""
    is_ours = not entry.cls.__module__.startswith("torch.")
    if entry.needs_values or (is_ours and entry.form == "fused"):
        return DeclaredStep(groups, entry)
    return build(entry, list(groups) if not _is_params(groups) else [{"params": list(groups)}])


def _is_params(groups: Iterable[Any]) -> bool:
    return any(isinstance(each, Tensor) for each in groups)
