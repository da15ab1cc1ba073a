"""How a batch goes through a model and its loss: what `forward` does not take goes to the loss.

    forward(x),          batch (x, y),             nn.CrossEntropyLoss()     loss_fn(model(x), y)
    forward(x),          batch {"x", "labels"},    F.cross_entropy           loss_fn(model(x=x), labels)
    forward(x),          batch {"x", "a", "b"},    def loss(output, a, b)    loss_fn(model(x=x), a=a, b=b)
    forward(x, lengths), batch (x, lengths),       def loss(output, batch)   loss_fn(model(x, lengths), (x, lengths))
    forward(x),          batch (x, y),             def loss(output, batch)   loss_fn(model(x), (x, y))
    any,                 any,                      def loss(output)          loss_fn(model(…))
    any,                 any,                      None                      the loss in the model's output

Forward takes the entries that its signature has room for. A loss that cannot be given the whole batch (one of torch's
own, or whose second parameter is annotated as a tensor or named `target`, `labels` or `y`, or with three required
parameters) comes before parameters of forward that may be left out: `forward(x, mask=None)` with `(x, y)` and
`nn.MSELoss()` is `loss_fn(model(x), y)`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

from ..artifacts import Plan, UserError
from .export_errors import user_line

LossFn = Callable[..., Tensor]
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_WHOLE = "batch"
"""A loss whose second parameter has this name is given the whole batch."""
_TARGETS = ("target", "targets", "label", "labels", "y")
"""A loss whose second parameter has one of these names is never given the whole batch."""
Batch = dict[str, Any] | tuple[Any, ...]


def call_model(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> Any:
    """Return the output of the model for what it takes of `batch`: without a `loss_fn` that must be all of it.

    >>> import torch
    >>> x, y, loss_fn = torch.tensor([1.0]), torch.tensor([3.0]), nn.MSELoss()
    >>> output = call_model(nn.Identity(), (x, y), loss_fn)
    >>> output, loss_of(nn.Identity(), (x, y), loss_fn, output)
    (tensor([1.]), tensor(4.))
    """
    takes = _Signature.of(model.forward)
    own, rest = _shared_out(takes, batch, None if loss_fn is None else _Signature.of_loss(loss_fn))
    if rest and loss_fn is None:
        raise UserError(
            f"a loss_fn is needed for what the model does not take; {type(model).__name__}.forward takes {takes}, and the "
            f"batch has {_entries(batch)}; give loss_fn, such as torch.nn.CrossEntropyLoss(), which is called with the "
            f"output and {_left(batch, rest)}; or leave that out of the batch"
        )
    return model(**own) if isinstance(own, dict) else model(*own)


def loss_of(model: nn.Module, batch: Batch, loss_fn: LossFn | None, output: Any) -> Any:
    """Return the loss of the output that `call_model` gave for the same batch.

    Raises `UserError` where the loss does not take what the forward leaves of the batch, or where there is none.
    """
    if loss_fn is None:
        return find_loss(output)
    takes, loss = _Signature.of(model.forward), _Signature.of_loss(loss_fn)
    _, rest = _shared_out(takes, batch, loss)
    return _Loss(loss_fn, loss, model, takes).of(output, batch, rest)


def find_loss(output: Any) -> Tensor:
    """Return the loss in a model's output: itself when a tensor, its `.loss`, its `["loss"]`; else `UserError`."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    has = "whose loss is None" if hasattr(output, "loss") or isinstance(output, Mapping) else "without a loss"
    raise UserError(
        f"a scalar loss is needed; the model returned {type(output).__name__} {has}; put the labels in the batch, or give "
        "loss_fn: a function of (output, target), such as torch.nn.CrossEntropyLoss(), or of (output, batch)"
    )


def check_same_loss(plan: Plan, loss_fn: Any) -> None:
    """Raise `UserError` where a plan was made with a loss function and none is given, or the other way round."""
    if plan.loss_fn is None or bool(plan.loss_fn) == (loss_fn is not None):
        return
    if plan.loss_fn:
        raise UserError(
            f"the loss_fn that the plan was made with is needed; it was {plan.loss_fn}, none is given here; pass loss_fn=, "
            "or plan for the loss that the model returns"
        )
    raise UserError(
        f"the loss that the plan was made with is needed; it was the one that the model returns, here loss_fn is "
        f"{name_of_loss(loss_fn)}; leave loss_fn out, or plan with it"
    )


def name_of_loss(loss_fn: Any) -> str:
    """Return what to call a loss: a function's name, a module's class; empty for the loss in the model's own output.

    >>> name_of_loss(nn.CrossEntropyLoss()), name_of_loss(functools.partial(nn.functional.mse_loss, reduction="sum"))
    ('CrossEntropyLoss', 'mse_loss')
    """
    if loss_fn is None:
        return ""
    inner = _unwrapped(loss_fn)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


@dataclass
class _Signature:
    """What a function takes."""

    parameters: list[Parameter]
    any_positional: bool
    any_named: bool
    is_torchs: bool = False

    @classmethod
    def of(cls, function: Any) -> _Signature:
        try:
            found = _parameters(function)
        except (TypeError, ValueError):  # a builtin that does not say
            return cls([], any_positional=True, any_named=True)
        kinds = {parameter.kind for parameter in found}
        named = [each for each in found if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        return cls(named, Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds)

    @classmethod
    def of_loss(cls, loss_fn: LossFn) -> _Signature:
        if isinstance(loss_fn, type) or not callable(loss_fn):
            given = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else repr(loss_fn)
            raise UserError(
                f"a function of (output, target) or (output, batch) is needed as loss_fn; got {given}; give "
                f"{f'{loss_fn.__name__}()' if isinstance(loss_fn, type) else 'torch.nn.CrossEntropyLoss(), for example'}"
            )
        taken = cls.of(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
        taken.is_torchs = _is_torchs(loss_fn)
        return taken

    @property
    def positional(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.kind in _POSITIONAL]

    @property
    def required(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.default is Parameter.empty]

    @property
    def names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters if parameter.kind is not Parameter.POSITIONAL_ONLY]

    # Of a loss, whose first parameter is the model's output

    @property
    def takes_output_alone(self) -> bool:
        return len(self.parameters) == 1 and not self.any_positional and not self.any_named

    @property
    def takes_whole_batch(self) -> bool:
        """Whether the loss says that it wants the whole batch."""
        return len(self.parameters) > 1 and self.parameters[1].name == _WHOLE

    @property
    def takes_entries(self) -> bool:
        """Whether the loss cannot mean the whole batch by its second parameter."""
        if self.takes_whole_batch or self.takes_output_alone:
            return False
        second = self.parameters[1] if len(self.parameters) > 1 else None
        return self.is_torchs or len(self.required) > 2 or (second is not None and _is_target(second))

    @property
    def num_entries(self) -> range:
        """How many entries the loss takes beside the output."""
        least = max(0, len([each for each in self.positional if each.default is Parameter.empty]) - 1)
        most = len(self.positional) - 1
        if self.is_torchs:  # what follows its targets are settings (`weight`), not entries of a batch
            most = max(least, 1)
        return range(least, 10**6 if self.any_positional else most + 1)

    def __str__(self) -> str:
        stars = ["*"] * self.any_positional + ["**"] * self.any_named
        return ", ".join([each.name for each in self.parameters] + stars) or "nothing"


def _parameters(function: Any) -> list[Parameter]:
    """Return a function's parameters; a class's methods are read once, for models are called every step."""
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return list(_parameters_of_method(function.__func__))
    return list(inspect.signature(function).parameters.values())


@functools.lru_cache(maxsize=256)
def _parameters_of_method(function: types.FunctionType) -> tuple[Parameter, ...]:
    return tuple(inspect.signature(types.MethodType(function, object())).parameters.values())


def _is_target(parameter: Parameter) -> bool:
    annotation = parameter.annotation
    is_tensor = annotation is Tensor or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Tensor")
    return is_tensor or parameter.name in _TARGETS


def _is_torchs(loss_fn: Any) -> bool:
    inner = _unwrapped(loss_fn)
    kind = type(inner) if isinstance(inner, nn.Module) else inner
    return str(getattr(kind, "__module__", "") or "").partition(".")[0] == "torch"


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _shared_out(takes: _Signature, batch: Batch, loss: _Signature | None) -> tuple[Any, Any]:
    """Return what goes to the forward, and what it leaves."""
    if isinstance(batch, dict):
        kept = _reserved(takes, batch, loss)
        own = {
            key: value for key, value in batch.items() if (takes.any_named or key in takes.names) and key not in kept
        }
        return own, {key: value for key, value in batch.items() if key not in own}
    num = len(batch) if takes.any_positional else min(len(batch), len(takes.positional))
    if loss is not None and loss.takes_entries:
        least = len([each for each in takes.positional if each.default is Parameter.empty])
        num = min(num, max(least, len(batch) - loss.num_entries.start))
    return batch[:num], batch[num:]


def _reserved(takes: _Signature, batch: Mapping[str, Any], loss: _Signature | None) -> set[str]:
    """The entries of a dict that the loss asks for by name and the forward can do without."""
    if loss is None or not loss.takes_entries:
        return set()
    wanted = {parameter.name for parameter in loss.required[1:]}
    return (wanted & batch.keys()) - {parameter.name for parameter in takes.required}


def _entries(batch: Any) -> str:
    return ", ".join(batch) if isinstance(batch, dict) else f"{len(batch)} entries"


def _left(batch: Any, rest: Any) -> str:
    """Name what the forward left: `labels`, or `entry 1`."""
    if isinstance(rest, dict):
        return ", ".join(rest)
    places = range(len(batch) - len(rest), len(batch))
    return ("entry " if len(rest) == 1 else "entries ") + ", ".join(map(str, places))


@dataclass
class _Loss:
    """The loss of the model's output."""

    loss_fn: LossFn
    signature: _Signature
    model: nn.Module
    takes: _Signature

    def of(self, output: Any, batch: Any, rest: Any) -> Any:
        """Return the loss; `UserError` where the loss does not take what the forward leaves of the batch."""
        if self.signature.takes_whole_batch:
            return self.loss_fn(output, batch)
        if self.signature.takes_output_alone:
            if rest:
                self._refuse(f"which leaves {_left(batch, rest)}", "give the loss a parameter for it, or leave it out")
            return self.loss_fn(output)
        if not rest:
            if self.signature.takes_entries:
                self._refuse("which is the whole batch and leaves nothing", "add the target to the batch")
            return self._of_whole_batch(output, batch)
        if isinstance(rest, dict):
            return self._by_name(output, batch, rest)
        if len(rest) not in self.signature.num_entries:
            self._refuse(f"which leaves {_left(batch, rest)}")
        return self.loss_fn(output, *rest)

    def _by_name(self, output: Any, batch: Any, rest: dict[str, Any]) -> Any:
        known = self.signature.names[1:]
        missing = [each.name for each in self.signature.required[1:] if each.name not in rest]
        if not missing and (self.signature.any_named or all(key in known for key in rest)):
            return self.loss_fn(output, **rest)
        if len(rest) != 1 or 1 not in self.signature.num_entries:
            self._refuse(f"which leaves {_left(batch, rest)}", "give the loss's parameters the names of these entries")
        return self.loss_fn(output, *rest.values())

    def _of_whole_batch(self, output: Any, batch: Any) -> Any:
        """Call a loss that may mean the whole batch; where it meant an entry that the forward took, say so."""
        optional = [each.name for each in self.takes.positional if each.default is not Parameter.empty]
        num_sure = len(self.takes.positional) - len(optional)
        if isinstance(batch, dict) or len(batch) <= num_sure or self.takes.any_positional:
            return self.loss_fn(output, batch)
        try:
            return self.loss_fn(output, batch)
        except (TypeError, AttributeError) as error:
            self._refuse(
                f"of which {', '.join(optional)} may be left out, so the forward was given all {len(batch)} entries and the "
                f"loss the whole batch ({type(error).__name__}: {str(error).splitlines()[0][:120]}, at "
                f"{user_line(error) or 'the loss'})",
                "name the loss's second parameter `target`, or give the batch as a dict",
            )

    def _refuse(self, found: str, advice: str = "leave out of the batch what nobody takes") -> None:
        raise UserError(
            f"a batch whose entries the forward and the loss share out is needed; {type(self.model).__name__}.forward takes "
            f"{self.takes}, {found}, and the loss {name_of_loss(self.loss_fn)} takes {self.signature}; {advice}; a loss whose "
            f"second parameter is named `{_WHOLE}` is given the whole batch"
        ) from None
