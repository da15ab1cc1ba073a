"""A MODEL's batch in other sizes: asked of its function where that takes one, else the given batch cut or repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..artifacts import UserError
from .model import ModelOptions

if TYPE_CHECKING:
    from ..models.targets import Loaded


class Batches:
    """Builds a model with batches of other sizes; `notes` says what a reader of the results has to know."""

    def __init__(self, model: ModelOptions) -> None:
        self.model = model
        self.notes: list[str] = []
        self._rebuilds: bool | None = None

    def load(self, num_examples: int | None, options: ModelOptions | None = None, device: str = "meta") -> Loaded:
        """Return the model of `options` with a batch of that many examples; `None`: as it comes."""
        options = options or self.model
        if num_examples is None:
            return options.load(device)
        if self._can_rebuild(num_examples):
            return replace(options, batch_size=num_examples).load(device)
        return self._cut(options.load(device), num_examples)

    def _cut(self, loaded: Loaded, num_examples: int) -> Loaded:
        from ..models.batches import resized, shared_size

        if shared_size(loaded.batch) is None:
            raise UserError(
                "a batch whose tensors share their first dim is needed to cut it; they do not; "
                f"give the function of {self.model.spec} a parameter batch_size"
            )
        return replace(loaded, batch=resized(loaded.batch, num_examples))

    def _can_rebuild(self, num_examples: int) -> bool:
        """Return whether the model's function takes a batch size; the batch is else cut along its first dim."""
        if self._rebuilds is None:
            self._rebuilds = self.model.spec.startswith("zoo:") or self._takes_batch_size(num_examples)
            if not self._rebuilds:
                self.notes.append(
                    f"{self.model.spec} takes no batch_size: other batches are the given one, cut or repeated along "
                    "its first dim"
                )
        return self._rebuilds

    def _takes_batch_size(self, num_examples: int) -> bool:
        try:
            replace(self.model, batch_size=num_examples).load()
        except UserError:
            return False
        return True
