"""Profiles of one model with something changed: its batch, its dtype, its optimizer, what it recomputes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..artifacts import Profile, UserError
from .model import ModelOptions

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.targets import Loaded


@dataclass(frozen=True)
class Change:
    """What differs from the command line; None and False leave it."""

    batch_size: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    autocast: str | None = None
    optimizer: str | None = None
    checkpointing: bool = False

    def __or__(self, other: Change) -> Change:
        """Both changes; where both say something, the other's.

        >>> Change(dtype="bf16") | Change(batch_size=2)
        Change(batch_size=2, seq_len=None, dtype='bf16', autocast=None, optimizer=None, checkpointing=False)
        """
        said = {field.name: value for field in fields(other) if (value := getattr(other, field.name))}
        return replace(self, **said)


class Variants:
    """Profiles of a model as the command line states it (`base`) and changed, each built anew and profiled once.

    `how` are the keywords of `trainwright.profile` that made `base`, but for those that are about the model.
    `tell(text)` hears what is being tried. `notes` says what a reader of the results has to know.
    """

    def __init__(
        self,
        model: ModelOptions,
        loaded: Loaded,
        base: Profile,
        how: Mapping[str, Any],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model, self.base, self.how = model, base, how
        self.batch_size = model.batch_size or shared_size(loaded.batch)
        """None where the batch's tensors do not share their first dim, and no size was asked for."""
        self.seq_len = model.seq_len or _num_tokens(loaded.batch)
        self.notes: list[str] = []
        self._tell = tell
        self._profiles = {Change(): base}
        self._rebuilds_batch: bool | None = None

    def profile(self, change: Change) -> Profile:
        """Return the profile with `change`, its totals alone; `UserError` where it cannot be made."""
        if change.batch_size == self.batch_size:
            change = replace(change, batch_size=None)
        if change.seq_len == self.seq_len:
            change = replace(change, seq_len=None)
        if change not in self._profiles:
            self._tell(described(change))
            self._profiles[change] = self._made(change)
        return self._profiles[change]

    def _made(self, change: Change) -> Profile:
        import trainwright as tw

        loaded = self._load(change)
        if change.dtype:
            loaded = replace(loaded, batch=self._converted(loaded.batch, change.dtype))
        if change.checkpointing:
            _enable_checkpointing(loaded.model)
        said = {"optimizer": change.optimizer, "autocast": change.autocast}
        how = {**self.how, **{key: value for key, value in said.items() if value}}
        found = tw.profile(
            loaded.model, loaded.batch, loss_fn=loaded.loss_fn, name=self.base.model, capture=False, **how
        )
        return found.model_copy(update={"timeline": (), "modules": (), "ops": ()})

    def _load(self, change: Change) -> Loaded:
        """Build the model anew: some changes are made to the module itself."""
        options = replace(
            self.model, dtype=change.dtype or self.model.dtype, seq_len=change.seq_len or self.model.seq_len
        )
        device = "cpu" if self.how.get("run") else "meta"
        if change.batch_size is None:
            return options.load(device)
        if self._can_rebuild_batch(change.batch_size):
            return replace(options, batch_size=change.batch_size).load(device)
        loaded = options.load(device)
        if shared_size(loaded.batch) is None:
            raise UserError(
                "a batch whose tensors share their first dim is needed to cut it; they do not; "
                f"give the function of {self.model.spec} a parameter batch_size"
            )
        return replace(loaded, batch=resized(loaded.batch, change.batch_size))

    def _converted(self, batch: Any, dtype: str) -> Any:
        """The batch with its floating tensors in the dtype that the parameters have now; products need one dtype."""
        from ..models.zoo import parse_dtype

        if all(tensor.dtype == parse_dtype(dtype) for tensor in _tensors(batch) if tensor.is_floating_point()):
            return batch
        self.notes.append(f"{dtype} parameters were tried with the batch's floating tensors in {dtype} too")
        return _mapped(batch, lambda each: each.to(parse_dtype(dtype)) if each.is_floating_point() else each)

    def _can_rebuild_batch(self, num_examples: int) -> bool:
        """Whether the model's function takes a batch size; the batch is else cut along its first dim."""
        if self._rebuilds_batch is None:
            self._rebuilds_batch = self.model.spec.startswith("zoo:") or self._takes_batch_size(num_examples)
            if not self._rebuilds_batch:
                self.notes.append(
                    f"{self.model.spec} takes no batch_size: other batches are the given one, cut or repeated along "
                    "its first dim"
                )
        return self._rebuilds_batch

    def _takes_batch_size(self, num_examples: int) -> bool:
        try:
            replace(self.model, batch_size=num_examples).load()
        except UserError:
            return False
        return True


def described(change: Change) -> str:
    """Return a change in words.

    >>> described(Change(batch_size=2, checkpointing=True))
    'gradient checkpointing, batch size 2'
    """
    parts = {
        "gradient checkpointing": change.checkpointing,
        f"autocast to {change.autocast}": change.autocast,
        f"{change.dtype} parameters": change.dtype,
        f"{change.optimizer}": change.optimizer,
        f"batch size {change.batch_size}": change.batch_size,
        f"sequence length {change.seq_len}": change.seq_len,
    }
    return ", ".join(text for text, is_said in parts.items() if is_said)


def shared_size(batch: Any) -> int | None:
    """Return the size of the first dim that all tensors of a batch share; None where they do not.

    A tensor without dims is left alone.

    >>> import torch
    >>> shared_size({"x": torch.ones(4, 2), "y": torch.ones(4)}), shared_size((torch.ones(4), torch.ones(3)))
    (4, None)
    """
    sizes = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def resized(batch: Any, num_examples: int) -> Any:
    """Return a batch of other tensors with `num_examples` in their first dim: the first ones, or all, repeated.

    >>> import torch
    >>> resized({"x": torch.tensor([1, 2, 3])}, 2)["x"], resized((torch.tensor([1, 2]),), 5)[0]
    (tensor([1, 2]), tensor([1, 2, 1, 2, 1]))
    """
    import torch

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        times = -(-num_examples // max(1, tensor.shape[0]))
        return torch.cat([tensor] * times)[:num_examples] if times > 1 else tensor[:num_examples].clone()

    return _mapped(batch, cut)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with `function` of its tensors in their places."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(item, function) for item in value])
    return value


def _num_tokens(batch: Any) -> int | None:
    """The second dim of the first tensor of token numbers."""
    tokens = (tensor for tensor in _tensors(batch) if tensor.ndim == 2 and not tensor.is_floating_point())
    return next((int(tensor.shape[1]) for tensor in tokens), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _enable_checkpointing(model: Any) -> None:
    """Turn on the model's own recomputation; `UserError` where it has none."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UserError("this needs a model with gradient_checkpointing_enable(); this model does not have it; add it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers has a second name for it
            _call_with_or_without(enable, gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"this model cannot recompute its blocks: {error}") from None


def _call_with_or_without(function: Callable[..., Any], **keywords: Any) -> None:
    """Call a function of someone else's model, which may not know the keywords."""
    accepted = inspect.signature(function).parameters
    knows = all(name in accepted for name in keywords) or any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    function(**(keywords if knows else {}))
