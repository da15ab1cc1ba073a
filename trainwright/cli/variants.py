"""Profiles of one model with something changed: its batch, its dtype, its optimizer, what it recomputes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from ..artifacts import Profile, UserError
from .batches import Batches
from .model import ModelOptions

if TYPE_CHECKING:
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
    adapters: Literal["lora", "qlora"] | None = None
    """Train these beside a frozen model."""

    def __or__(self, other: Change) -> Change:
        """Both changes; where both say something, the other's.

        >>> Change(dtype="bf16") | Change(batch_size=2)
        Change(batch_size=2, seq_len=None, dtype='bf16', autocast=None, optimizer=None, checkpointing=False, adapters=None)
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
        from ..models.batches import num_tokens, shared_size

        self.model, self.base, self.how = model, base, how
        self._batches = Batches(model)
        self.batch_size = model.batch_size or shared_size(loaded.batch)
        """None where the batch's tensors do not share their first dim, and no size was asked for."""
        self.seq_len = model.seq_len or num_tokens(loaded.batch)
        self.notes: list[str] = self._batches.notes
        self._tell = tell
        self._profiles = {Change(): base}

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

        from ..models.lora import with_adapters

        loaded = self._load(change)
        if change.dtype:
            loaded = replace(loaded, batch=self._converted(loaded.batch, change.dtype))
        if change.adapters:
            with_adapters(loaded.model, change.adapters)
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
        return self._batches.load(change.batch_size, options, "cpu" if self.how.get("run") else "meta")

    def _converted(self, batch: Any, dtype: str) -> Any:
        """The batch with its floating tensors in the dtype that the parameters have now; products need one dtype."""
        from ..models.batches import mapped
        from ..models.zoo import parse_dtype
        from ..torch_internals.trees import tensors_in

        if all(tensor.dtype == parse_dtype(dtype) for tensor in tensors_in(batch) if tensor.is_floating_point()):
            return batch
        self.notes.append(f"{dtype} parameters were tried with the batch's floating tensors in {dtype} too")
        return mapped(batch, lambda each: each.to(parse_dtype(dtype)) if each.is_floating_point() else each)


def described(change: Change) -> str:
    """Return a change in words.

    >>> described(Change(batch_size=2, checkpointing=True))
    'gradient checkpointing, batch size 2'
    """
    parts = {
        {"lora": "LoRA", "qlora": "QLoRA"}.get(change.adapters or "", ""): change.adapters,
        "gradient checkpointing": change.checkpointing,
        f"autocast to {change.autocast}": change.autocast,
        f"{change.dtype} parameters": change.dtype,
        f"{change.optimizer}": change.optimizer,
        f"batch size {change.batch_size}": change.batch_size,
        f"sequence length {change.seq_len}": change.seq_len,
    }
    return ", ".join(text for text, is_said in parts.items() if is_said)


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
