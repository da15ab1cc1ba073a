"""An optimizer's options as text or values, checked against its constructor; nothing in a text is ever run."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..artifacts import UserError
from .base import Method, how_keywords
from .record import OptimizerRecord

FORMS = ("fused", "foreach", "loop")
_ELSEWHERE = {"lr": "--lr", "foreach": "--optimizer-form foreach", "fused": "--optimizer-form fused"}
_NOT_OFFERED = ("params", "process_group", "differentiable", "capturable", *_ELSEWHERE)
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NEEDED = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", tuple: "numbers"}


def parse_options(texts: Iterable[str] | None) -> dict[str, str]:
    """Return `KEY=VALUE` texts as a dict.

    >>> parse_options(["betas=0.9,0.95", "block-size=128"])
    {'betas': '0.9,0.95', 'block_size': '128'}
    """
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise UserError(
                f"--optimizer-option needs KEY=VALUE; got {text!r}; write for example --optimizer-option weight_decay=0.1"
            )
        if name in found:
            raise UserError(f"each option of an optimizer may be given once; got {name} twice; take one of them out")
        found[name] = value.strip()
    return found


def checked_options(entry: OptimizerRecord, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options `given`, as text or as values, in the types that the optimizer's constructor takes.

    Raises `UserError` for an option that the optimizer does not have, with those that it has, for a value of another type, and
    for one that the optimizer itself refuses.

    >>> from trainwright.optim import record
    >>> checked_options(record("adamw"), {"betas": "0.9,0.95", "amsgrad": "true"})
    {'betas': (0.9, 0.95), 'amsgrad': True}
    """
    own = option_defaults(entry)
    found = {name: _value(entry, name, value, own) for name, value in (given or {}).items()}
    if found:
        _try(entry, found)
    return found


def without_groups(entry: OptimizerRecord, given: Mapping[str, Any] | None) -> tuple[bool, dict[str, Any]]:
    """Return whether the method's own parameter groups are wanted, as they are unless `groups` is false, and the other options.

    >>> from trainwright.optim import record
    >>> without_groups(record("adamw8bit"), {"groups": "false", "eps": "1e-6"})
    (False, {'eps': '1e-6'})
    """
    rest = dict(given or {})
    if "groups" not in rest:
        return True, rest
    value = rest.pop("groups")
    wanted = _as_kind(bool, value, True)
    if entry.groups is None:
        raise UserError(f"{entry.name} treats all parameters alike; got groups={value}; leave it out")
    if wanted is None:
        raise UserError(f"{entry.name}'s groups needs true or false; got {value}; write for example groups=false")
    return wanted, rest


def option_defaults(entry: OptimizerRecord) -> dict[str, tuple[Any, str]]:
    """Return what may be set of an optimizer: by name its default and its annotation."""
    signature = inspect.signature(entry.cls).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = {
        name: (entry.defaults.get(name, each.default), str(each.annotation))
        for name, each in signature.items()
        if each.kind in named
    }
    if issubclass(entry.cls, Method):
        found |= dict.fromkeys(how_keywords(), (False, "bool"))
    return {name: value for name, value in found.items() if name not in _NOT_OFFERED}


def as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON holds them: tuples as lists, numbers that are not finite as text.

    >>> as_json({"betas": (0.9, 0.95), "min_8bit_size": float("inf")})
    {'betas': [0.9, 0.95], 'min_8bit_size': 'inf'}
    """
    return {name: _as_json(value) for name, value in options.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _value(entry: OptimizerRecord, name: str, value: Any, own: Mapping[str, tuple[Any, str]]) -> Any:
    if name in _ELSEWHERE:
        raise UserError(f"{name} is no option of --optimizer-option; got {name}={value}; give {_ELSEWHERE[name]}")
    if name not in own:
        near = difflib.get_close_matches(name, own, n=1)
        advice = f"did you mean {near[0]}?" if near else "choose among those"
        known = [*own, *(["groups"] if entry.groups is not None else [])]
        raise UserError(f"{entry.name} has no option {name}; its options are {', '.join(known)}; {advice}")
    default, annotation = own[name]
    kinds = _kinds(default, annotation)
    is_none = value is None or (isinstance(value, str) and value.lower() == "none" and str not in kinds)
    if is_none and (default is None or "None" in annotation):
        return None
    for kind in kinds:
        if (found := _as_kind(kind, value, default)) is not None:
            return found
    needed = " or ".join(_needed(kind, default) for kind in kinds)
    shown = value if isinstance(value, str) else repr(value)
    raise UserError(
        f"{entry.name}'s {name} needs {needed}; got {shown}; write for example {name}={_example(kinds[0], default)}"
    )


def _kinds(default: Any, annotation: str) -> tuple[type, ...]:
    """The types that a value may have, the one to try first in front."""
    if isinstance(default, torch.Tensor):
        return (float,)
    if default is not None and default is not inspect.Parameter.empty:
        first = type(default)
        return (float,) if first is int and "float" in annotation else (first,)
    named = tuple(kind for kind in (bool, int, float, str) if re.search(rf"\b{kind.__name__}\b", annotation))
    named += (str,) if "Literal" in annotation else ()
    if float in named:
        named = tuple(kind for kind in named if kind is not int)
    return ((tuple,) if "uple" in annotation else ()) + named or (bool, int, float, str)


def _as_kind(kind: type, value: Any, default: Any) -> Any:
    """`value` as `kind`; None where it is none."""
    if kind is tuple:
        return _as_numbers(value, default)
    if kind is bool:
        return (
            _WORDS.get(value.strip().lower()) if isinstance(value, str) else value if isinstance(value, bool) else None
        )
    if kind is str:
        return value if isinstance(value, str) and value else None
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if math.isnan(number):
        return None
    if kind is int:
        return int(number) if number.is_integer() else None
    return number


def _as_numbers(value: Any, default: Any) -> tuple[float, ...] | None:
    items = value.strip().strip("()[]").split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return None
    numbers = [_as_kind(float, item, None) for item in items]
    wanted = len(default) if isinstance(default, tuple | list) else max(1, len(numbers))
    return None if None in numbers or len(numbers) != wanted else tuple(numbers)


def _needed(kind: type, default: Any) -> str:
    return f"{len(default)} numbers" if kind is tuple and isinstance(default, tuple) else _NEEDED[kind]


_EXAMPLES = {bool: "true", int: "16", float: "0.1", str: "NAME", tuple: "0.9,0.99"}


def _example(kind: type, default: Any) -> str:
    if default is None or default is inspect.Parameter.empty:
        return _EXAMPLES[kind]
    return ",".join(map(str, default)) if kind is tuple else str(default).lower() if kind is bool else str(default)


def _try(entry: OptimizerRecord, options: Mapping[str, Any]) -> None:
    """Make the optimizer over a small parameter, which checks the ranges of its settings."""
    try:
        entry.cls([torch.nn.Parameter(torch.zeros(2, 2))], **{**entry.defaults, **options})  # type: ignore[call-arg]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{entry.name} does not accept these settings: {error}; change them") from error
