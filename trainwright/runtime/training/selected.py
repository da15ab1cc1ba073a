"""Trains on a weighted subset of the examples that is selected anew as the model changes.

logits      of all examples, computed by the planned module in evaluation mode, in batches of the plan's size    `all_logits`
selection   by the caller's selector, from each example's gradient at the logits; rank 0's is sent to all        `_choose`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...artifacts import Refusal, UserError, check_range
from ..module import LossOutput, ParallelModule
from .examples import ExampleBatches

Gradients = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, C], labels [n]) → the features [n, p] by which the selector compares examples."""
Compose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(number of examples, selected indices, their weights) → indices, weights and strong marks of the examples to train on."""


class SelectedBatches:
    """Iterator over batches from a subset of the examples, selected before the first step and every `every` epochs of it.

    batches: all examples, as `ExampleBatches`, which defines how the weights reach the loss. selector: `CRAIG`, or anything with
    its `fit(gradients, labels)`, `indices_` and `weights_`; or a function from the step to one, for selectors that draw random
    numbers. gradients: `logit_gradients` of `trainwright.selection`. The model must then be a classifier: its output, or that
    output's `.logits`, is [batch, C], and the labels are the batch's `labels` or, in a tuple, its second entry. With None the
    selector gets the examples' indices only (`RandomSubset`), which needs no pass over them and works for any model. compose:
    `with_strong_copies` to train on strongly augmented copies of the selected examples (made by the batches' `strong`); by
    default the selected ones are trained on. Every rank iterates; no rank ever holds the whole model.

    `seconds_of(step)` is the time of the selection before that step, the pass over all examples included; `selection_s` and
    `num_selections` are totals.

    Raises `UserError` for settings out of range, and if the model has no logits or the batch no labels; `Refusal` if logits
    are not finite. It does not pay off if a forward over all examples takes longer than `every` epochs of the subset save.

    >>> import trainwright as tw
    >>> from trainwright.selection import CRAIG, logit_gradients
    >>> x, y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    >>> class Classifier(torch.nn.Linear):
    ...     def forward(self, x, y):
    ...         return super().forward(x)
    >>> model, loss_fn = Classifier(2, 2), lambda logits, batch: torch.nn.functional.cross_entropy(logits, batch[1])
    >>> plan = tw.plan(model, (x[:4], y[:4]), loss_fn=loss_fn, hardware="cpu:1")
    >>> batches = ExampleBatches(plan, torch.utils.data.TensorDataset(x, y))
    >>> selected = SelectedBatches(tw.parallelize(model, plan, loss_fn=loss_fn), batches, CRAIG(0.2), logit_gradients)
    >>> inputs, labels = next(selected)
    >>> inputs.shape, selected.num_chosen, selected.num_selections
    (torch.Size([4, 2]), 8, 1)

    Source: Mirzasoleiman, Bilmes & Leskovec 2020, Coresets for Data-efficient Training of Machine Learning Models, ICML
    (arXiv:1906.01827): its training loop for deep networks.
    """

    def __init__(
        self, module: ParallelModule, batches: ExampleBatches, selector: Any, gradients: Gradients | None, *,
        every: int = 1, compose: Compose | None = None,
    ) -> None:  # fmt: skip
        check_range("SelectedBatches", every=(every, "of at least 1", lambda value: value >= 1))
        self.module, self.batches, self.selector, self.gradients = module, batches, selector, gradients
        self.every, self.compose, self.num_chosen, self.num_selections = every, compose, 0, 0
        self._seconds: dict[int, float] = {}

    @property
    def selection_s(self) -> float:
        """Return the seconds of all selections so far."""
        return sum(self._seconds.values())

    def seconds_of(self, step: int) -> float:
        """Return the seconds of the selection before `step`, 0 if there was none."""
        return self._seconds.get(step, 0.0)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.is_due:
            self.select()
        return next(self.batches)

    @property
    def is_due(self) -> bool:
        """Tell whether the next step needs a new selection."""
        return self.num_selections == 0 or self.batches.epoch >= self.every

    def select(self) -> None:
        """Select a new subset; a collective call."""
        started = time.perf_counter()
        indices, weights = self._choose()
        self.num_chosen = len(indices)
        composed = (
            (indices, weights) if self.compose is None else self.compose(self.batches.num_examples, indices, weights)
        )
        self.batches.use(*composed)
        self.num_selections += 1
        step = self.batches.step
        self._seconds[step] = self.seconds_of(step) + time.perf_counter() - started

    def start_at(self, step: int) -> None:
        """Continue with the batch of `step`."""
        self.batches.start_at(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues with the same subset."""
        batches = self.batches
        return {
            "since": batches.since, "indices": batches.indices, "weights": batches.weights, "strong": batches.is_strong,
            "num_chosen": self.num_chosen,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the subset of `state_dict()`; raise `UserError` if the dataset has become smaller."""
        largest = int(state["indices"].max())
        if largest >= self.batches.num_examples:
            raise UserError(
                f"the dataset that the checkpoint's subset was chosen from is needed, with example {largest}; got "
                f"{self.batches.num_examples} examples; give the same dataset"
            )
        self.batches.use(state["indices"], state["weights"], state["strong"], since=int(state["since"]))
        self.num_chosen = int(state["num_chosen"])
        self.num_selections += 1

    def _choose(self) -> tuple[Tensor, Tensor]:
        rows: Tensor = torch.arange(self.batches.num_examples)
        labels: Tensor | None = None
        if self.gradients is not None:
            # what can be wrong with them is found on every rank, or the others would wait for rank 0 for ever
            logits, labels = all_logits(self.module, self.batches)
            rows = self.gradients(logits, labels)
            if not bool(rows.isfinite().all()):
                raise Refusal(
                    "logits that are finite are needed to select by; got NaN or infinity; lower the learning rate"
                )
        if dist.get_rank() == 0:
            chosen = self._selector_now().fit(rows, labels)
            indices, weights = (torch.as_tensor(value) for value in (chosen.indices_, chosen.weights_))
        else:
            indices = weights = torch.empty(0)
        return _from_first(indices.long()), _from_first(weights.double())

    def _selector_now(self) -> Any:
        return self.selector(self.batches.step) if callable(self.selector) else self.selector


def all_logits(module: ParallelModule, batches: ExampleBatches) -> tuple[Tensor, Tensor]:
    """Return the logits [n, C] (fp32 or wider) and labels [n] of all examples, in the dataset's order; a collective call.

    The module runs in evaluation mode, without gradients, and returns to its mode; the last batch is filled with copies of its
    last example, whose logits are dropped.
    """
    rows, labels, size = [], [], batches.batch_size
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for start in range(0, batches.num_examples, size):
                num_own = min(size, batches.num_examples - start)
                indices = [start + min(place, num_own - 1) for place in range(size)]
                batch = batches.batch(indices)
                part = module.plan.shard_batch(batch)
                with module.communicator.activity.doing(f"the logits of examples {start} to {start + num_own - 1}"):
                    output = module(**part) if isinstance(part, dict) else module(*part)
                labels.append(_labels(batch)[:num_own])
                rows.append(_logits(output, size)[:num_own].cpu())
    finally:
        module.train(was_training)
    found = torch.cat(rows)
    return found if found.dtype == torch.float64 else found.float(), torch.cat(labels)


def _labels(batch: Any) -> Tensor:
    found = batch.get("labels") if isinstance(batch, dict) else batch[1] if len(batch) > 1 else None
    if not isinstance(found, Tensor) or found.dim() != 1:
        names = ", ".join(batch) if isinstance(batch, dict) else f"{len(batch)} entries"
        raise UserError(
            f"class numbers as the batch's `labels`, or as the second of a tuple, are needed to select; got {names}; "
            "name them so"
        )
    return found


def _logits(output: Any, batch_size: int) -> Tensor:
    whole = output.output if isinstance(output, LossOutput) else output
    found = whole.get("logits") if isinstance(whole, Mapping) else getattr(whole, "logits", whole)
    if isinstance(found, DTensor):
        found = found.full_tensor()
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != batch_size:
        shape = list(found.shape) if isinstance(found, Tensor) else type(whole).__name__
        raise UserError(
            f"logits [{batch_size}, classes] are needed to select; the model returned {shape}; return an output with "
            "`.logits`, or the logits themselves beside a loss_fn"
        )
    return found


def _from_first(values: Tensor) -> Tensor:
    """Return rank 0's vector, broadcast to every rank."""
    if dist.get_world_size() == 1:
        return values
    size = torch.tensor([len(values)])
    dist.broadcast(size, 0)
    held = values if dist.get_rank() == 0 else torch.empty(int(size), dtype=values.dtype)
    dist.broadcast(held, 0)
    return held
