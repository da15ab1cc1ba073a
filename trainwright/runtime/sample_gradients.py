"""Computes the gradient of each example of a batch under a plan, by running the planned step on one example at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from ..artifacts.plan import names_of_batch
from ..capture.call import find_loss
from ..capture.export import as_batch
from ..program.micro_batches import capture_step
from ..torch_internals.private import flatten_batch
from .module import ParallelModule
from .pipe import refuse_stages
from .steps import batch_like


def sample_gradients(module: ParallelModule, batch: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the gradient of the loss of each example of a global batch: g_i = ∇ℓ(θ; x_i), i in the order of the batch.

    Every rank calls this with the same batch and consumes every item: a dict from parameter names to gradients, each a
    `DTensor` in its parameter's layout; `gradient.full_tensor()` gathers it. All ranks run one step for each example, so a
    batch takes as long as that many batches of one; the first one is captured once. The module's step count and gradients do
    not change, and so dropout draws the same random numbers for every example: those of the next step.

    module: what `parallelize` returned, in training or evaluation mode. batch: at most the planned number of examples.

    Raises `UserError` where the examples of a batch act on one another (batch norm, contrastive losses), with the op: then
    the gradient of an example is not defined.

    >>> import trainwright as tw
    >>> model, loss_fn = torch.nn.Linear(2, 1, bias=False), lambda output, batch: output.mean()
    >>> batch = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),)
    >>> module = tw.parallelize(model, tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1"), loss_fn=loss_fn)
    >>> [found["weight"].full_tensor().tolist() for found in sample_gradients(module, batch)]
    [[[1.0, 2.0]], [[3.0, 4.0]]]
    """
    refuse_stages(module.plan, "gradients of each example")
    named, rebuild = flatten_batch(as_batch(batch))
    shapes = {name: tuple(leaf.shape) for name, leaf in named if isinstance(leaf, Tensor)}
    own = names_of_batch(shapes)
    size = next(shapes[name][0] for name in shapes if name in own)
    _check_apart(module)
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    num_steps = module.num_steps
    for index in range(size):
        one = rebuild([leaf[index : index + 1] if name in own else leaf for name, leaf in named])
        part = module.plan.shard_batch(one, rows="all")
        loss = find_loss(module(**part) if isinstance(part, dict) else module(*part))
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        module.num_steps = num_steps
        yield {name: grad for name, grad in zip(params, found, strict=True) if grad is not None}


def _check_apart(module: ParallelModule) -> None:
    """Raise `UserError` unless the loss of a batch is the mean of its examples' losses."""
    capturing, plan = module.steps.capturing, module.plan
    shapes = {name: entry.shape for name, entry in plan.batch.items()}
    sizes = {shapes[name][0] for name in names_of_batch(shapes)}
    size = next(iter(sizes), 1)
    if capturing is None or size == 1:
        return
    num = next(num for num in range(2, size + 1) if size % num == 0)  # as two or more examples, some layers refuse one
    try:
        capture_step(capturing.model, batch_like(plan, shapes), capturing.loss_fn, capturing.autocast, num)
    except UserError as error:
        raise UserError(f"examples that do not act on one another are needed for their gradients; {error}") from None
