"""The MODEL argument of every verb: `zoo:NAME`, `FILE.py:function` or `package.module:function` → model and batch."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import ModelRef, UserError
from ..capture.export_errors import OUR_ROOT
from . import zoo

__all__ = ["Loaded", "built", "called", "function_of", "load", "parse_settings", "with_user_errors"]

ZOO = "zoo:"
FORMS = "zoo:NAME, FILE.py:function or package.module:function"
KEYS = ("model", "batch", "loss_fn", "data", "eval_batch", "dataset", "augment")


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a MODEL argument stands for."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Tensor] | None
    data: Iterable[Any] | None
    eval_batch: Any
    dataset: Any
    """Examples by index, of which `train` makes batches."""
    augment: Callable[[Any], Any] | None
    """A strong augmentation, from an example to an example, for `train --select augment`."""
    ref: ModelRef
    notes: tuple[str, ...] = ()


def load(
    spec: str,
    *,
    device: str = "meta",
    batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> Loaded:
    """Build the model that `spec` names, and its batch.

    device: `meta` (no memory; a function that cannot be run there is run on the CPU) or `cpu`.
    batch_size, seq_len, dtype, seed: handed to the function when given, and then it must take them, but for `dtype`
    (the model is converted) and `seed` (the generators are seeded before, 0 by default, so every rank builds the same).
    settings: further keyword arguments as text; what reads as JSON becomes that (`4`, `true`, `[1, 2]`).

    Raises `UserError` when there is no such file, module, function or zoo model, when the function fails, and when
    what it returns is no model and batch.

    >>> load("zoo:gpt2-tiny", batch_size=2).ref.name
    'gpt2-tiny'
    """
    given = {"batch_size": batch_size, "seq_len": seq_len, "dtype": dtype, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    extra = parse_settings(settings or {})
    if dtype is not None:
        zoo.parse_dtype(dtype)
    if spec.startswith(ZOO):
        return _load_zoo(spec, device, options, extra)
    return _Target(spec, device, options, extra).load()


def called(function: Callable[[], Any], device: str = "cpu") -> Loaded:
    """Return what a function of no arguments builds: `load` for one that is in hand rather than named.

    >>> called(lambda: (nn.Linear(2, 1), (torch.ones(3, 2),))).model
    Linear(in_features=2, out_features=1, bias=True)
    """
    name = getattr(function, "__name__", type(function).__name__)
    target = _Target(name, device, {}, {})
    return Loaded(**target._parts(target._call(function, {})), ref=ModelRef(name=name), notes=tuple(target.notes))


def built(spec: str, settings: Mapping[str, str] | None = None) -> Any:
    """Return what the function that `spec` names returns, whatever that is, called with the settings.

    spec: `FILE.py:function` or `package.module:function`. Raises `UserError` when there is no such file, module or function,
    when it has no parameter of a setting's name, and when it fails.

    >>> built("math:sqrt", {})
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: math:sqrt failed: TypeError: ...
    """
    target = _Target(spec, "cpu", {}, parse_settings(settings or {}))
    function = target._function()
    return target._call(function, target._keywords(function))


def function_of(spec: str) -> Callable[..., Any]:
    """Return the function that `spec` names, `FILE.py:function` or `package.module:function`; `UserError` where there is none.

    >>> function_of("math:sqrt").__name__
    'sqrt'
    """
    return _Target(spec, "cpu", {}, {})._function()


def parse_settings(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with values that read as JSON read so.

    >>> parse_settings({"layers": "4", "bias": "false", "act": "gelu"})
    {'layers': 4, 'bias': False, 'act': 'gelu'}
    """
    return {key: _literal(text) for key, text in settings.items()}


def _literal(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _load_zoo(spec: str, device: str, options: dict[str, Any], extra: dict[str, Any]) -> Loaded:
    name = spec.removeprefix(ZOO)
    twice = sorted(options.keys() & extra.keys())
    if twice:
        raise UserError(f"each option can be given once; --set {twice[0]} repeats one; drop either")
    model, batch = zoo.build(name, device=device, **options, **extra)
    ref = ModelRef(name=name, spec=spec, options={**options, **extra})
    parts: dict[str, Any] = {**dict.fromkeys(KEYS), "model": model, "batch": batch}
    return Loaded(**parts, ref=ref)


@dataclass(eq=False)
class _Target:
    """A user's function, found, called and its result checked; `spec` is `PLACE:function`."""

    spec: str
    device: str
    options: dict[str, Any]
    extra: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def load(self) -> Loaded:
        function = self._function()
        keywords = self._keywords(function)
        parts = self._parts(self._call(function, keywords))
        model = self._converted(parts["model"], keywords)
        ref = ModelRef(name=_title(model, self.spec), spec=self.spec, options={**self.options, **self.extra})
        return Loaded(**{**parts, "model": model}, ref=ref, notes=tuple(self.notes))

    def _function(self) -> Callable[..., Any]:
        place, separator, name = self.spec.rpartition(":")
        if not separator or not place or not name:
            raise UserError(f"a model is needed as {FORMS}; got {self.spec!r}; {_suggest(self.spec)}")
        module = _file_module(place) if place.endswith(".py") else _named_module(place)
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"a function {name!r} is needed in {place}; there is none; {_functions(module, name)}")
        return function

    def _keywords(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The options that the function takes, and every setting."""
        keywords = dict(self.extra)
        accepted = _accepted(function)
        for key in self.extra:
            if accepted is not None and key not in accepted:
                takes = ", ".join(sorted(accepted)) or "nothing"
                raise UserError(f"{self.spec} has no parameter {key!r}; it accepts {takes}; change --set")
        for key, value in self.options.items():
            if accepted is None or key in accepted:
                keywords[key] = value
            elif key in ("batch_size", "seq_len"):
                option = "--" + key.replace("_", "-")
                raise UserError(f"{option} needs a function with a parameter {key}; {self.spec} has none; add it")
        return keywords

    def _call(self, function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        """Call the function on the device; where meta does not do (it reads values), on the CPU."""
        if self.device == "meta":
            try:
                torch.manual_seed(self.options.get("seed", 0))
                with torch.device("meta"):
                    return function(**keywords)
            except (Exception, SystemExit) as error:
                first = str(error).splitlines() or [type(error).__name__]
                note = f"{self.spec} cannot be built on the meta device ({first[0][:120]}); it was built on the CPU"
        torch.manual_seed(self.options.get("seed", 0))
        with _as_user_error(f"{self.spec} failed"), torch.device("cpu"):
            result = function(**keywords)
        if self.device == "meta":
            self.notes.append(note)
        return result

    def _parts(self, result: Any) -> dict[str, Any]:
        parts: dict[str, Any] = dict.fromkeys(KEYS)
        if isinstance(result, Mapping):
            unknown = [key for key in result if key not in KEYS]
            if unknown:
                raise UserError(
                    f"the keys {', '.join(KEYS)} are needed; {self.spec} returned {unknown[0]!r}; rename it"
                )
            parts.update(result)
        elif isinstance(result, tuple) and len(result) in (2, 3):
            parts.update(zip(KEYS, result))
        else:
            found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise UserError(
                f"(model, batch), (model, batch, loss_fn) or a dict is needed; {self.spec} returned {found}; "
                "return one of those"
            )
        return self._checked(parts)

    def _checked(self, parts: dict[str, Any]) -> dict[str, Any]:
        model, batch, loss_fn = parts["model"], parts["batch"], parts["loss_fn"]
        if not isinstance(model, nn.Module):
            raise UserError(f"a torch.nn.Module is needed as the model; {self.spec} returned {type(model).__name__}")
        if not isinstance(batch, Mapping | tuple | list | Tensor):
            raise UserError(
                f"a batch is needed as a dict or a tuple of tensors; {self.spec} returned {type(batch).__name__}; "
                "wrap it in a tuple"
            )
        if loss_fn is not None and not callable(loss_fn):
            raise UserError(f"loss_fn(output, batch) is needed; {self.spec} returned {type(loss_fn).__name__}")
        augment = parts["augment"]
        if augment is not None and not callable(augment):
            raise UserError(
                f"augment(example) is needed; {self.spec} returned {type(augment).__name__}; give a function"
            )
        return parts

    def _converted(self, model: nn.Module, keywords: dict[str, Any]) -> nn.Module:
        """Convert the parameters, where the function did not take the dtype itself."""
        wanted = self.options.get("dtype")
        if wanted is None or "dtype" in keywords:
            return model
        return model.to(zoo.parse_dtype(wanted))


def _title(model: nn.Module, spec: str) -> str:
    """What a model of the user's is called in reports: `MyNet (train.py:build)`."""
    place, _, function = spec.rpartition(":")
    where = Path(place).name if place.endswith(".py") else place
    return f"{type(model).__name__} ({where}:{function})"


def _accepted(function: Callable[..., Any]) -> set[str] | None:
    """The keywords a function takes; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}


def _file_module(place: str) -> ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [each.name for each in _python_files(path.parent)], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "check the path"
        raise UserError(f"a Python file is needed; {place} is not one; {hint}")
    # the name tells files of one name apart, and a file of the same text is the same module in one process: what it
    # registers (ops above all, whose earlier registration torch would tear down under models made with it) is so once
    text = path.read_bytes() if os.access(path, os.R_OK) else b""
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + text).hexdigest()[:12]
    name = f"_trainwright_target_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        with _on_path(path.resolve().parent), _as_user_error(f"{place} cannot be run"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _python_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py")) if folder.is_dir() else []


def _named_module(place: str) -> ModuleType:
    with _on_path(Path.cwd()):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
                raise UserError(f"a module is needed; there is no {place!r}; {_suggest(place)}") from None
            raise UserError(
                f"the module {place} needs {error.name}; it is not installed; install it, or check the path"
            ) from None
        except UserError:
            raise
        except Exception as error:
            raise _user_error(error, f"{place} cannot be imported") from None


def _suggest(text: str) -> str:
    if text in zoo.names():
        return f"did you mean zoo:{text}?"
    if os.path.isfile(text):
        return f"name the function: {text}:build"
    near = difflib.get_close_matches(text, zoo.names(), n=1)
    return f"did you mean zoo:{near[0]}?" if near else "a file needs its .py, a module must be importable from here"


def _functions(module: ModuleType, name: str) -> str:
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in own if getattr(getattr(module, key), "__module__", None) == module.__name__]
    near = difflib.get_close_matches(name, own, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"it has {', '.join(own[:8])}" if own else "it has no function"


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Let the user's file import its neighbours, as Python does for a script; also later, inside its functions."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    yield


def with_user_errors(what: str) -> contextlib.AbstractContextManager[None]:
    """Turn what the user's code raises in this block into a `UserError` that begins with `what` and names the line."""
    return _as_user_error(what)


@contextlib.contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _user_error(error, what) from None


def _user_error(error: BaseException, what: str) -> UserError:
    message = next(iter(str(error).splitlines()), "") or "no message"
    return UserError(f"{what}: {type(error).__name__}: {message}, at {_where(error)}; fix it there")


def _where(error: BaseException) -> str:
    """The innermost line that is the user's own: neither ours nor of an installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _foreign(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "the call itself"


def _foreign(filename: str) -> bool:
    inside = filename.startswith((OUR_ROOT, "<")) or "site-packages" in filename
    return inside or filename.startswith(str(Path(os.__file__).parent))
