"""The MODEL argument and its options, which every verb that takes a model shares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..artifacts import ModelRef, Plan, UserError
from ..artifacts.cache_directory import without_cache

if TYPE_CHECKING:
    from ..models.targets import Loaded

PANEL = "Model"
NO_CACHE = "no_cache"
_MODEL_HELP = "zoo:NAME, FILE.py:function or package.module:function"


@dataclass(frozen=True)
class ModelOptions:
    """What the user said about the model."""

    spec: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
    batch_size: Annotated[
        int | None, typer.Option(help="Examples in the global batch.", metavar="N", min=1, rich_help_panel=PANEL)
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", metavar="N", min=1, rich_help_panel=PANEL)
    ] = None
    dtype: Annotated[
        str | None,
        # named, since typer 0.27 takes a metavar that is the parameter's name in capitals for the option's name
        typer.Option(
            "--dtype", help="Of the parameters: fp32, bf16, fp16, fp64.", metavar="DTYPE", rich_help_panel=PANEL
        ),
    ] = None
    autocast: Annotated[
        str | None,
        typer.Option(help="Compute in this dtype, parameters unchanged.", metavar="DTYPE", rich_help_panel=PANEL),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of weights and batch.", metavar="N", rich_help_panel=PANEL)] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Keyword argument for the model; repeatable.", metavar="KEY=VALUE"),
    ] = None

    def load(self, device: str = "meta") -> Loaded:
        """Build the model and its batch; `meta` takes no memory."""
        import trainwright as tw

        return tw.load_model(
            self.spec,
            device=device,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            dtype=self.dtype,
            seed=self.seed,
            settings=parse_settings(self.settings),
        )

    def payload(self) -> dict[str, Any]:
        """Return the model as data, for the ranks to build."""
        given = {key: getattr(self, key) for key in ("batch_size", "seq_len", "dtype", "seed")}
        options = {key: value for key, value in given.items() if value is not None}
        return {"spec": self.spec, "options": {**options, "settings": parse_settings(self.settings)}}


def takes_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command(model: ModelOptions, …)` the MODEL argument and the model options on its command line.

    An option of the same name that the command has itself stands instead of the model's.
    """
    return _takes(command, lambda values: ModelOptions(**values), model_as_option=False)


def may_take_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `takes_model`, with the model as the option `--model`: `command(model: ModelOptions | None, …)`."""

    def gather(values: dict[str, Any]) -> ModelOptions | None:
        given = [key for key, value in values.items() if value]
        if not given:
            return None
        if values["spec"] is None:
            option = "--set" if "settings" in given else "--" + given[0].replace("_", "-")
            raise UserError(f"{option} is about a model; there is no --model; add one, or leave {option} out")
        return ModelOptions(**values)

    return _takes(command, gather, model_as_option=True)


def model_of_plan(plan: Plan, given: ModelOptions | None) -> ModelOptions:
    """Return the model of `plan`: the one that was given, else the zoo's that the plan names.

    A plan never makes code run, so a model of the user's own has to be given.
    """
    if given is not None:
        return as_planned(plan, given)
    spec = plan.model.spec or ""
    if not spec.startswith("zoo:"):
        raise UserError(
            f"the model of the plan is needed; {spec or plan.model.name} is not of the zoo, and a plan never makes "
            f"code run; give it with --model {spec or 'MODEL'}"
        )
    return as_planned(plan, ModelOptions(spec))


def as_planned(plan: Plan, given: ModelOptions) -> ModelOptions:
    """Return `given` with what it leaves open taken from the plan, where that was made for the same MODEL."""
    ref = plan.model
    if ref.spec is None or not _same_target(ref.spec, given.spec):
        return given
    named = {entry.name for entry in fields(ModelOptions)} - {"spec", "settings", "autocast"}
    open_ones = {key: ref.options[key] for key in named & ref.options.keys() if getattr(given, key) is None}
    said = parse_settings(given.settings)
    planned = {key: value for key, value in _settings_of(ref, named).items() if key not in said}
    autocast = given.autocast if given.autocast is not None else plan.autocast
    settings = [*(given.settings or []), *(f"{key}={_as_text(value)}" for key, value in planned.items())]
    return replace(given, **open_ones, autocast=autocast, settings=settings)


def parse_settings(settings: list[str] | None) -> dict[str, str]:
    """Return `KEY=VALUE` texts as a dict.

    >>> parse_settings(["n_layer=2", "act=a=b"])
    {'n_layer': '2', 'act': 'a=b'}
    """
    pairs = {}
    for text in settings or []:
        key, separator, value = text.partition("=")
        if not separator or not key.strip().isidentifier():
            raise UserError(f"--set needs KEY=VALUE; got {text!r}; write for example --set n_layer=2")
        pairs[key.strip()] = value
    return pairs


def _settings_of(ref: ModelRef, named: set[str]) -> Mapping[str, Any]:
    return {key: value for key, value in ref.options.items() if key not in named}


def _as_text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _same_target(one: str, other: str) -> bool:
    """Whether two specs name the same function, the file's path written one way or another."""
    return _resolved(one) == _resolved(other)


def _resolved(spec: str) -> str:
    place, _, name = spec.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else spec


def _takes(command: Callable[..., Any], gather: Callable[[dict[str, Any]], Any], model_as_option: bool) -> Any:
    """Return `command` with the signature that typer is to read: its own parameters and those of the model."""
    own = _own_parameters(command)
    taken = {parameter.name for parameter in own}
    of_model = [each for each in _model_parameters(model_as_option) if each.name not in taken]

    def wrapper(**values: Any) -> Any:
        model = gather({parameter.name: values.pop(parameter.name) for parameter in of_model})
        if not values.pop(NO_CACHE):
            return command(model=model, **values)
        with without_cache():
            return command(model=model, **values)

    signature = inspect.Signature([of_model[0], *own, *of_model[1:], _no_cache()])
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return wrapper


def _model_parameters(model_as_option: bool) -> list[inspect.Parameter]:
    hints = get_type_hints(ModelOptions, include_extras=True)
    defaults = {entry.name: None for entry in fields(ModelOptions)} | {"spec": inspect.Parameter.empty}
    if model_as_option:
        option = typer.Option("--model", help=_MODEL_HELP, metavar="MODEL", rich_help_panel=PANEL)
        hints["spec"], defaults["spec"] = Annotated[str | None, option], None
    return [_keyword(name, hints[name], default) for name, default in defaults.items()]


def _no_cache() -> inspect.Parameter:
    option = typer.Option("--no-cache", help="Capture the model anew; store nothing.", rich_help_panel=PANEL)
    return _keyword(NO_CACHE, Annotated[bool, option], False)


def _own_parameters(command: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters.values()
    return [_keyword(each.name, hints[each.name], each.default) for each in parameters if each.name != "model"]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
