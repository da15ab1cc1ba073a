"""How many labels a planned loss is the mean of: what makes accumulated batches weigh as one.

A planned step computes the mean over the labels that count in its batch, s_k / c_k. The loss of several accumulated batches
is that of one large batch, Σ s_k / Σ c_k, if each mean is multiplied by c_k / Σ c_k. Which labels count, the captured step
says itself: it is run on the places of the labels, in place of the labels, as far as the cross-entropy's targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..artifacts import Plan
from ..program.micro_batches import WEIGHTED
from ..program.program import Op, Program
from ..runtime.module import plan_batch
from ..torch_internals.fakes import faked, new_mode
from ..torch_internals.private import bound

_SAME_VALUE = frozenset(
    ["_to_copy", "to", "clone", "alias", "detach", "type_as", "contiguous", "reshape", "view", "squeeze"]
)
_BASE = 2**40
"""Added to the places, so that no label or padding of the step is taken for one."""


_CHUNKED = "linear_cross_entropy"
"""A head and its loss in chunks of rows."""


@dataclass(frozen=True)
class CountedLabels:
    """Which entries of the batch a loss is the mean of."""

    entry: str
    pattern: Tensor
    """Of one row of that entry: true where a label counts unless it is ignored."""
    ignored: int

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """Return how many labels of `batch` count.

        >>> labels = torch.tensor([[5, 6, 7], [5, 6, -100]])
        >>> int(CountedLabels("labels", torch.tensor([False, True, True]), -100).count({"labels": labels}))
        3
        """
        labels = batch[self.entry]
        pattern = self.pattern.to(labels.device)[tuple(slice(size) for size in labels.shape[1:])]
        return ((labels != self.ignored) & pattern).sum()


def counted_labels(program: Program) -> CountedLabels | None:
    """Return which labels the loss of `program` is the mean of; None where it is no mean over labels alone."""
    op = _maker_of_loss(program)
    if op is None or op.name not in ("cross_entropy_loss", _CHUNKED):
        return None
    given: dict[str, Any]
    if op.name == _CHUNKED:
        names = ("input", "target", "weight", "head", "bias", "reduction", "ignore_index")
        given = dict(zip(names, op.node.args))
    else:
        given = bound(op.node.target, op.node.args, op.node.kwargs)  # type: ignore[arg-type]
    # With micro-batches a mean is a sum that is divided by what counts in all of them.
    is_mean = given["reduction"] == 1 or program.corrections.get(op.key) == WEIGHTED
    if not is_mean or given["weight"] is not None or not isinstance(given["target"], fx.Node):
        return None
    return _places(program, given["target"], int(given["ignore_index"]))


def _maker_of_loss(program: Program) -> Op | None:
    op = program.loss.producer
    while op is not None and op.name in _SAME_VALUE and op.inputs:
        op = op.inputs[0].producer
    return op


def _places(program: Program, target: fx.Node, ignored: int) -> CountedLabels | None:
    entries = {node: held for node, held in program.by_node.items() if getattr(held, "role", "") == "input"}
    used: list[Any] = []
    values: dict[fx.Node, Any] = {}

    def value_of(node: fx.Node) -> Any:
        if node in entries:
            used.append(entries[node])
            size = torch.Size(entries[node].shape)  # type: ignore[union-attr]
            return _BASE + torch.arange(size.numel()).reshape(size)
        if node.op != "call_function":
            raise _NotAlone
        if node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[node]

    try:
        found = value_of(target)
    except (_NotAlone, RuntimeError, TypeError):
        return None
    if len(used) != 1 or not isinstance(found, Tensor) or found.is_floating_point():
        return None
    counts = torch.zeros(used[0].shape, dtype=torch.bool)
    counts.view(-1)[found[found >= _BASE] - _BASE] = True
    if not counts.dim() or not bool((counts == counts[:1]).all()):
        return None
    return CountedLabels(used[0].key, counts[0], ignored)


class _NotAlone(Exception):
    """The targets depend on more than the batch."""


def reads_num_items(like: nn.Module, plan: Plan) -> bool:
    """Return whether the loss of a model depends on the `num_items_in_batch` that the stock Trainer hands to it.

    like: the model, or its `skeleton`; it runs on stand-ins without memory.
    """
    mode = new_mode()
    with faked(like, mode) as model, mode:
        batch = {name: _on_cpu(value) for name, value in plan_batch(plan).items()}
        num_items = torch.ones((), requires_grad=True)
        output = model(**batch, num_items_in_batch=num_items)
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
        (slope,) = torch.autograd.grad(loss, num_items, allow_unused=True) if loss.requires_grad else (None,)
    return slope is not None


def _on_cpu(value: Any) -> Any:
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value
