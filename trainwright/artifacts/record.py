"""What every artifact shares: frozen, validated, and JSON that another version can refuse by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class UserError(ValueError):
    """A mistake that the user can mend: *what is needed, what was found, what to try*. Exit status 2."""


class Refusal(RuntimeError):
    """A valid question answered *no* (infeasible, does not fit, does not verify). Exit status 1."""


def check_range(owner: str, **values: tuple[Any, str, Callable[[Any], bool]]) -> None:
    """Raise `UserError` for the first value outside its range: name=(value, "the range in words", test).

    >>> check_range("SGD", lr=(-1.0, "at least 0", lambda value: value >= 0))
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: SGD needs lr at least 0; got -1.0; choose a value in that range
    """
    for name, (value, words, test) in values.items():
        try:
            holds = test(value)
        except (TypeError, ValueError, OverflowError):  # not even of a kind that can be compared
            holds = False
        if not holds:
            raise UserError(f"{owner} needs {name} {words}; got {value!r}; choose a value in that range")


class Record(BaseModel):
    """A frozen value inside an artifact; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Artifact(Record):
    """A `Record` that is a file of its own: `to_json`, `from_json`."""

    has_summary: ClassVar[bool] = False
    """Whether `print` shows a few lines of it in place of all its fields."""

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the artifact as JSON; with `path`, write it there as well, atomically."""
        text = self._render()
        if path is not None:
            write_atomically(Path(path), text)
        return text

    def __str__(self) -> str:
        return self._summary("as_text") or super().__str__()

    def __repr__(self) -> str:
        return self._summary("as_line") or super().__repr__()

    def _repr_html_(self) -> str | None:
        """What a notebook shows."""
        return self._summary("as_html")

    def _summary(self, form: str) -> str | None:
        """The few lines of the artifacts that have some; `table()` is the long form."""
        if not self.has_summary:
            return None
        from ..reports import summary

        return str(getattr(summary, form)(self))

    def _render(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """Read the artifact from the file `source`.

        Raises `UserError` when the file is missing, is not JSON, or is not this kind of artifact.
        """
        kind = cls.__name__.lower()
        try:
            text = Path(source).read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"a {kind} file is needed; {source} cannot be read ({error}); check the path") from None
        return cls.parse(text, where=str(source))

    @classmethod
    def parse(cls, text: str, where: str = "the text") -> Self:
        """Build the artifact from JSON `text`; `where` names the source in error messages."""
        kind = cls.__name__.lower()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UserError(f"a {kind} in JSON is needed; {where} is not one: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problems = error.errors()
    place = ".".join(str(part) for part in problems[0]["loc"]) or "the document"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place}: {problems[0]['msg']}{more}"


def stated_version(text: str) -> object:
    """Return the format version that JSON `text` states; None where it is not such a document."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return None
    return data.get("format_version") if isinstance(data, dict) else None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader never sees half of it; `UserError` when that cannot be done."""
    if path.is_dir():
        raise UserError(f"a writable path is needed; {path} cannot be written (it is a directory); name a file in it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"a writable path is needed; {path} cannot be written ({error.strerror}); choose another"
        ) from None


def as_text(value: Any) -> str:
    """Return `value` as compact JSON, for one line of a larger document."""
    return json.dumps(value, ensure_ascii=False)
