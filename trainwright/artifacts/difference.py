"""`diff`: what is different between two profiles, or between two plans."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .plan import Plan
from .profile import ModuleCost, Profile
from .record import Artifact, Record, UserError

__all__ = ["Change", "Difference", "NumberChange", "diff", "load"]

Source = str | os.PathLike[str]
_PROFILE_SETTINGS = ("model", "dtype", "optimizer", "target")
_PROFILE_TOTALS = (
    "peak_bytes", "saved_bytes", "param_bytes", "buffer_bytes", "grad_bytes", "optimizer_bytes", "num_params",
    "forward_flops", "backward_flops", "other_flops", "num_ops", "step_s",
)  # fmt: skip
_MODULE_COSTS = ("saved_bytes", "param_bytes", "forward_flops", "backward_flops", "num_ops", "forward_s", "backward_s")
_PLAN_SETTINGS = (
    "dtype",
    "autocast",
    "optimizer",
    "mesh",
    "pipeline",
    "micro_batches",
    "corrections",
    "loss_chunks",
    "batch",
    "fingerprint",
    "torch_version",
)
_PLAN_TOTALS = (
    "step_s", "compute_s", "comm_s", "exposed_comm_s", "recompute_s", "transfer_s", "bubble_s", "moved_bytes", "moved_state_bytes",
    "peak_bytes",
)  # fmt: skip


class Change(Record):
    """Something that is not a number: a setting, a layout, what becomes of a tensor. None: not there."""

    name: str
    before: str | None
    after: str | None


class NumberChange(Record):
    """A number of both sides, the same or not; None where one side does not know it."""

    name: str
    before: float | None
    after: float | None

    @property
    def absolute(self) -> float | None:
        """after − before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def relative(self) -> float | None:
        """after / before − 1; None where that has no value."""
        change = self.absolute
        return None if change is None or not self.before else change / self.before

    def same(self) -> bool:
        """Whether both sides state the same."""
        return self.before == self.after


class ModuleChange(Record):
    """A module that both profiles have and whose cost differs; the numbers are those that changed."""

    path: str
    type: str = ""
    changes: tuple[NumberChange, ...]


class Difference(Artifact):
    """The answer of `diff`, from the first artifact (before) to the second (after)."""

    kind: str
    """profile or plan."""
    before: str
    after: str
    settings: tuple[Change, ...] = ()
    """What differs in how the two were made."""
    totals: tuple[NumberChange, ...] = ()
    """Every total, the unchanged ones too."""
    breakdown: tuple[NumberChange, ...] = ()
    """Bytes alive at the peak, by category."""
    modules: tuple[ModuleChange, ...] = ()
    """Of profiles: modules that differ, the largest change of memory first."""
    stages: tuple[NumberChange, ...] = ()
    """Of plans with stages: what each takes and holds."""
    decisions: tuple[Change, ...] = ()
    """Of plans: layouts, splits and fates that differ, by key."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Modules, parameters and ops of one side alone."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing that was compared differs."""
        changed = any(not total.same() for total in (*self.totals, *self.breakdown, *self.stages))
        return not (changed or self.settings or self.modules or self.decisions or self.added or self.removed)

    def table(self) -> str:
        """Return the difference for the terminal."""
        from ..reports.terminal_diff import diff_table

        return diff_table(self)


def diff(before: Profile | Plan | Source, after: Profile | Plan | Source) -> Difference:
    """Return what differs between two profiles, or between two plans; files are read first.

    Totals are compared all; modules and decisions by their paths, so a model of more blocks has added modules. Times
    that depend on the machine that made the profile (`profile_s`) are left out. Raises `UserError` for files that hold
    neither, and for a profile beside a plan.

    >>> costs = dict(model="x", num_params=1, param_bytes=4, grad_bytes=4, optimizer_bytes=8, saved_bytes=0,
    ...              forward_flops=0, backward_flops=0, other_flops=0, num_ops=1, capture_s=None, profile_s=0.1)
    >>> found = diff(Profile(peak_bytes=100, **costs), Profile(peak_bytes=150, **costs))
    >>> [(change.name, change.absolute, change.relative) for change in found.totals if not change.same()]
    [('peak_bytes', 50.0, 0.5)]
    """
    one, other = (item if isinstance(item, (Profile, Plan)) else load(item) for item in (before, after))
    names = [_name(item) for item in (before, after)]
    if isinstance(one, Profile) and isinstance(other, Profile):
        return _profiles(one, other, *names)
    if isinstance(one, Plan) and isinstance(other, Plan):
        return _plans(one, other, *names)
    kinds = " and ".join(f"{name} is a {type(item).__name__.lower()}" for name, item in zip(names, (one, other)))
    raise UserError(f"two profiles or two plans are needed; {kinds}; give two of a kind")


def load(path: Source) -> Profile | Plan:
    """Read a profile or a plan, whichever the file holds; `UserError` for anything else."""
    try:
        text = Path(path).read_text(encoding="utf8")
        data = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(
            f"a file of a profile or a plan is needed; {path} cannot be read ({reason}); check the path"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"a profile or a plan in JSON is needed; {path} is not JSON (line {error.lineno}: {error.msg}); make it with "
            "`profile --json` or `plan -o`"
        ) from None
    keys = data.keys() if isinstance(data, dict) else set()
    if {"predicted", "mesh"} <= keys:
        return Plan.parse(text, where=str(path))
    if {"peak_bytes", "forward_flops"} <= keys:
        return Profile.parse(text, where=str(path))
    raise UserError(
        f"a profile or a plan in JSON is needed; {path} holds neither; make one with `profile --json` or `plan -o`"
    )


# Profiles


def _profiles(one: Profile, other: Profile, before: str, after: str) -> Difference:
    modules = [{module.path: module for module in profile.modules} for profile in (one, other)]
    return Difference(
        kind="profile",
        before=before,
        after=after,
        settings=_settings(one, other, _PROFILE_SETTINGS),
        totals=_numbers(_PROFILE_TOTALS, _read_from(one), _read_from(other)),
        breakdown=_numbers(_union(one.breakdown, other.breakdown), one.breakdown.get, other.breakdown.get, missing=0),
        modules=_changed_modules(*modules),
        added=tuple(path for path in modules[1] if path not in modules[0]),
        removed=tuple(path for path in modules[0] if path not in modules[1]),
    )


def _changed_modules(one: Mapping[str, ModuleCost], other: Mapping[str, ModuleCost]) -> tuple[ModuleChange, ...]:
    found = []
    for path in one.keys() & other.keys():
        numbers = (
            _at_peak(one[path], other[path]),
            *_numbers(_MODULE_COSTS, _read_from(one[path]), _read_from(other[path])),
        )
        changed = tuple(number for number in numbers if number.absolute)
        if changed:
            found.append(ModuleChange(path=path, type=other[path].type, changes=changed))
    return tuple(sorted(found, key=lambda module: (-_weight(module), module.path)))


def _at_peak(one: ModuleCost, other: ModuleCost) -> NumberChange:
    sizes = [sum(cost.at_peak_bytes.values()) for cost in (one, other)]
    return NumberChange(name="at_peak_bytes", before=sizes[0], after=sizes[1])


def _weight(module: ModuleChange) -> float:
    """How much the memory of a module changed; of those equal in that, the work."""
    changes = {change.name: abs(change.absolute or 0.0) for change in module.changes}
    memory = max((changes.get(name, 0.0) for name in ("at_peak_bytes", "saved_bytes", "param_bytes")), default=0.0)
    return memory or changes.get("forward_flops", 0.0) * 1e-18


# Plans


def _plans(one: Plan, other: Plan, before: str, after: str) -> Difference:
    keyed = [_decisions(plan) for plan in (one, other)]
    settings = _settings(one, other, _PLAN_SETTINGS)
    made = [(p.model.name, p.cluster.name, str(p.budget_bytes), p.solver.name) for p in (one, other)]
    named = zip(("model", "hardware", "budget_bytes", "solver"), *made)
    return Difference(
        kind="plan",
        before=before,
        after=after,
        settings=(*(Change(name=name, before=a, after=b) for name, a, b in named if a != b), *settings),
        totals=(
            *_numbers(_PLAN_TOTALS, _read_from(one.predicted), _read_from(other.predicted)),
            *_communication(one, other),
        ),
        breakdown=_numbers(
            _union(one.predicted.breakdown, other.predicted.breakdown),
            one.predicted.breakdown.get,
            other.predicted.breakdown.get,
            missing=0,
        ),
        stages=_stages(one, other),
        decisions=tuple(
            Change(name=key, before=keyed[0][key], after=keyed[1][key])
            for key in keyed[0]
            if key in keyed[1] and keyed[0][key] != keyed[1][key]
        ),
        added=tuple(key for key in keyed[1] if key not in keyed[0]),
        removed=tuple(key for key in keyed[0] if key not in keyed[1]),
    )


_STAGE_NUMBERS = (
    "peak_bytes",
    "forward_s",
    "backward_s",
    "recompute_s",
    "transfer_s",
    "moved_bytes",
    "update_s",
    "in_flight",
)


def _stages(one: Plan, other: Plan) -> tuple[NumberChange, ...]:
    """What each stage takes and holds, of plans of which one has stages at least."""
    found = [_of_stages(plan) for plan in (one, other)]
    return _numbers(_union(*found), found[0].get, found[1].get)


def _of_stages(plan: Plan) -> dict[str, float]:
    if plan.pipeline is None:
        return {}
    rows = zip(plan.pipeline.in_flight, plan.predicted.stages)
    return {
        f"stage {number} {name}": depth if name == "in_flight" else getattr(stage, name)
        for number, (depth, stage) in enumerate(rows)
        for name in _STAGE_NUMBERS
    }


def _communication(one: Plan, other: Plan) -> tuple[NumberChange, ...]:
    sent = [{f"{name} bytes": size for name, size in plan.predicted.comm_bytes.items()} for plan in (one, other)]
    return _numbers(_union(*sent), sent[0].get, sent[1].get, missing=0)


def _decisions(plan: Plan) -> dict[str, str]:
    """Each parameter's layout and each op's split and fates, as text by key."""
    found = {}
    for name, param in plan.params.items():
        away = [f"offloaded {what} in {blocks}" for what, blocks in param.offloaded.items()]
        shared = [f"one copy in {layout} for all readers" for layout in param.shared]
        found[name] = "; ".join([f"at rest {' '.join(param.layout)}", *shared, *away])
    for key, op in plan.modules.items():
        fates = {"recomputed": op.recomputed, "offloaded": op.offloaded}
        said = [f"{fate} {name} in {blocks}" for fate, values in fates.items() for name, blocks in values.items()]
        form = [f"{op.sampled:.3g} of its rows kept"] if op.sampled else []
        found[key] = "; ".join([f"split {' '.join(op.split)}", *form, *(said or ["kept"])])
    return found


# Both


def _settings(one: Record, other: Record, names: Iterable[str]) -> tuple[Change, ...]:
    texts = [(name, _as_text(getattr(one, name)), _as_text(getattr(other, name))) for name in names]
    return tuple(Change(name=name, before=before, after=after) for name, before, after in texts if before != after)


def _as_text(value: Any) -> str | None:
    if isinstance(value, dict):
        return ", ".join(f"{key} {getattr(item, 'shape', item)}" for key, item in value.items())
    return None if value is None else str(value)


def _numbers(
    names: Iterable[str], read: Callable[[str], Any], read_other: Callable[[str], Any], missing: float | None = None
) -> tuple[NumberChange, ...]:
    def value(found: Any) -> float | None:
        return missing if found is None else found

    return tuple(NumberChange(name=name, before=value(read(name)), after=value(read_other(name))) for name in names)


def _read_from(record: Record) -> Callable[[str], Any]:
    return lambda name: getattr(record, name)


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys((*one, *other)))


def _name(item: Profile | Plan | Source) -> str:
    if isinstance(item, Profile):
        return item.model
    return item.model.name if isinstance(item, Plan) else str(item)
