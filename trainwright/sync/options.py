"""Parses a method's options from text, and checks them against its constructor."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from ..artifacts import UserError
from .record import SyncRecord

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}
_NEEDED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a name", "None": "None"}


def options_of(cls: type) -> dict[str, Any]:
    """Return the options of a method's class with their defaults."""
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    return {each.name: each.default for each in accepted}


def parse_options(texts: Iterable[str] | None) -> dict[str, Any]:
    """Return `KEY=VALUE` texts as a dict of values: true and false, numbers, tuples of numbers, else names.

    >>> parse_options(["period=4", "outer-lr=0.7", "graph=ring", "asynchronous=true", "rates=0.5,1"])
    {'period': 4, 'outer_lr': 0.7, 'graph': 'ring', 'asynchronous': True, 'rates': (0.5, 1)}
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise UserError(f"--sync-option needs KEY=VALUE; got {text!r}; write for example --sync-option period=8")
        if name in found:
            raise UserError(f"each option of a method may be given once; got {name} twice; take one of them out")
        found[name] = _value(value.strip())
    return found


def check_options(record: SyncRecord, options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an unknown option, and for a value of the wrong type."""
    known = inspect.signature(record.cls).parameters
    names = list(known)[1:]
    if unknown := [name for name in options if name not in names]:
        raise UserError(
            f"{record.name} has no option {', '.join(unknown)}; its options are {', '.join(names) or 'none'}; choose among those"
        )
    for name, value in options.items():
        kinds = [kind.strip() for kind in str(known[name].annotation).split("|")]
        if not any(_fits(kind, value) for kind in kinds):
            needed = " or ".join(dict.fromkeys(_NEEDED.get(kind, "a list") for kind in kinds))
            raise UserError(
                f"{record.name}'s {name} needs {needed}; got {value!r}; see help(tw.sync.{record.cls.__name__})"
            )


def described(record: SyncRecord, options: Mapping[str, Any]) -> str:
    """Return a text that identifies a method with its options; arrays are written in full, which `repr` abbreviates."""
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in options.items()}
    return repr((record.name, sorted(plain.items())))


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(",") if part.strip())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _fits(kind: str, value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind in ("int", "float", "bool", "str", "None"):
        fits = {
            "int": is_number and (isinstance(value, numbers.Integral) or float(value).is_integer()),
            "float": is_number,
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
            "None": value is None,
        }
        return fits[kind]
    return kind == "Any" or not (is_number or value is None or isinstance(value, bool | str))
