"""Pads a last batch that is too short with an example that has no weight in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...artifacts import Plan, UserError

IGNORED = -100
"""The label that cross-entropy ignores by default, in torch and in Hugging Face models."""


class PaddedDataset(Dataset[Any]):
    """Wraps a dataset and appends one example whose labels cross-entropy ignores.

    The mean over the labels that are not ignored is then unchanged. Each example has to be a dict with integer `labels`; the
    plan's loss has to be a cross-entropy that ignores −100, torch's default; and its model must not mix the examples of a batch
    in other ways (batch norm is refused; a router's balancing loss would count the padding).

    Raises `UserError` if padding would change the loss.
    """

    def __init__(self, plan: Plan, dataset: Any) -> None:
        self._dataset = dataset
        example = dataset[0]
        labels = example.get("labels") if isinstance(example, dict) else None
        integer = labels is not None and not torch.as_tensor(labels).is_floating_point()
        remedy = "drop the last batch (last='drop'), or choose a batch size that divides the dataset"
        if not integer or not any("cross_entropy" in key.rpartition(":")[2] for key in plan.modules):
            raise UserError(
                "integer `labels` and a cross-entropy that leaves some out are needed to pad without changing the loss; "
                f"this {'batch' if not integer else 'model'} has none; {remedy}"
            )
        if any(":batch_norm" in key for key in plan.modules):
            raise UserError(
                "a model that treats each example by itself is needed to pad without changing the loss; this one has batch "
                f"norm; {remedy}"
            )

    def __len__(self) -> int:
        """Return the number of real examples."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index != len(self._dataset):
            return self._dataset[index]
        example = dict(self._dataset[0])
        labels = example["labels"]
        example["labels"] = torch.full_like(labels, IGNORED) if isinstance(labels, Tensor) else _ignored(labels)
        return example


def _ignored(labels: Any) -> Any:
    return [_ignored(each) for each in labels] if isinstance(labels, list | tuple) else IGNORED


def check_padding(last: str, dataset: Any) -> None:
    """Raise `UserError` if `last` is `pad` and `dataset` is no `PaddedDataset`."""
    if last == "pad" and not isinstance(dataset, PaddedDataset):
        raise UserError(
            "a dataset with padding is needed for last='pad', or the loss would count examples twice; got "
            f"{type(dataset).__name__}; wrap it as plan.padded(dataset), or take last='drop'"
        )
