"""Gradients by calling the nodes of autograd's graph one after the other, for a process in which its engine does not run.

Where torch was built for GPUs, the engine's first backward starts threads, and the engine refuses to run in every fork that is made
after that. The nodes themselves can be called from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from ..torch_internals import private

Gradients = list[Tensor | None]


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor]) -> Gradients:
    """Return what `torch.autograd.grad(outputs, inputs, given, allow_unused=True)` does, of leaves; the graph is kept.

    >>> x = torch.ones(3, requires_grad=True)
    >>> gradients([(2 * x * x).sum()], [x], [torch.tensor(1.0)])
    [tensor([4., 4., 4.])]
    """
    ends = [get_gradient_edge(value).node for value in inputs]  # held, so that each node keeps its identity
    roots = [get_gradient_edge(value) for value in outputs]
    readers = _num_readers([root.node for root in roots])
    pending: dict[Any, Gradients] = {node: [None] * len(private.results_of(node)) for node in readers}
    for root, known in zip(roots, given):
        _add(pending[root.node], root.output_nr, known)
    ready = [node for node, num in readers.items() if num == 0]
    while ready:
        node = ready.pop()
        arrived = [_fitted(gradient, *like) for gradient, like in zip(pending[node], private.results_of(node))]
        pending[node] = arrived
        follow = _called(node, arrived) if node.next_functions else []
        for (source, place), gradient in zip(node.next_functions, follow):
            if source is not None:
                _add(pending[source], place, gradient)
                readers[source] -= 1
                if readers[source] == 0:
                    ready.append(source)
    return [pending[node][0] if node in pending else None for node in ends]


def _num_readers(roots: Sequence[Any]) -> dict[Any, int]:
    """Return the nodes below `roots`, each with the number of edges that lead to it."""
    found = dict.fromkeys(roots, 0)
    waiting = list(found)
    while waiting:
        for source, _ in waiting.pop().next_functions:
            if source is not None:
                if source not in found:
                    found[source] = 0
                    waiting.append(source)
                found[source] += 1
    return found


def _add(pending: Gradients, place: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        so_far = pending[place]
        pending[place] = gradient if so_far is None else so_far + gradient


def _fitted(gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient as the engine hands it on: summed over dims that were expanded, in the type of the result."""
    if gradient is None:
        return None
    return (gradient if gradient.shape == shape else gradient.sum_to_size(shape)).to(dtype)


def _called(node: Any, arrived: Gradients) -> Gradients:
    """Return what a node makes of the gradients of its results: a gradient for each of `next_functions`."""
    if all(gradient is None for gradient in arrived):
        return [None] * len(node.next_functions)
    with torch.no_grad():
        if not isinstance(node, BackwardCFunction):
            return _listed(node(*arrived))
        whole = [
            torch.zeros(shape, dtype=dtype) if gradient is None else gradient
            for gradient, (shape, dtype) in zip(arrived, private.results_of(node))
        ]
        found = iter(each for each, wanted in zip(_listed(node.apply(*whole)), node.needs_input_grad) if wanted)
        # arguments that are no tensors have no edge, and tensors that need no gradient have one that leads nowhere
        return [None if source is None else next(found) for source, _ in node.next_functions]


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]
