r"""Activation patterns of a hidden ReLU unit: which examples it passes, 1[X h ≥ 0] for some weight vector h."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...artifacts import UserError
from ..seeds import as_generator, need_count
from .inputs import as_tensor


def sample_patterns(X: Any, num_samples: int, seed: int | torch.Generator = 0) -> Tensor:
    """Return patterns 1[X h ≥ 0] (n, P), h ~ N(0, I), of `num_samples` draws: each once, and none that passes nothing.

    P is at most `num_samples`, and for few features often far fewer. X is (n, d); `seed` a number, or a generator on its device.

    >>> patterns = sample_patterns(torch.tensor([[1.0], [2.0]]), 8)
    >>> patterns.T
    tensor([[True, True]])
    """
    X = as_tensor(X)
    if num_samples < 1:
        raise UserError(f"at least 1 pattern is needed; got num_patterns {num_samples}; give such a number")
    generator = as_generator(seed, X.device)
    directions = torch.randn(X.shape[1], num_samples, generator=generator, dtype=X.dtype, device=X.device)
    return distinct(X @ directions >= 0)


def sufficient_patterns(num_examples: int, violation: float = 0.05, failure: float = 0.05) -> int:
    """Return how many drawn patterns suffice that, with probability 1 - `failure`, one more improves the programme with
    probability at most `violation`: the least whole P ≥ min((n + 1)/(violation · failure) - 1, (2/violation)(n + 1 - log failure)).

    Both in (0, 1). It says nothing about the distance from the best network over *all* patterns, and is cautious: the programmes
    here have usually stopped improving with far fewer.

    >>> sufficient_patterns(30), sufficient_patterns(30, violation=0.5, failure=0.5)
    (1360, 123)

    Source: the sampling theorem of Bai, Gautam & Sojoudi 2022 (arXiv:2201.01965), which is that of sampled convex programmes
    (Calafiore & Campi 2006; Campi & Garatti 2008) with n + 1 variables in its dual; recalled, not checked against the paper.
    """
    need_count("num_examples", num_examples, 1)
    if not (0 < violation < 1 and 0 < failure < 1):
        raise UserError(f"violation and failure in (0, 1) are needed; got {violation} and {failure}; try 0.05 for both")
    by_mean = (num_examples + 1) / (violation * failure) - 1
    by_tail = 2 / violation * (num_examples + 1 - math.log(failure))
    return math.ceil(min(by_mean, by_tail) - 1e-9)


def enumerate_patterns(X: Any) -> Tensor:
    """Return every pattern (n, P) of examples with two features, P ≤ 2 n: the programme over them has no sampling gap.

    X is (n, 2); a constant second feature stands for the bias. Patterns of single directions, on which an example is
    exactly zero, are left out: their weights belong to a neighbour's too. Raises `UserError` for other shapes.

    >>> enumerate_patterns(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).sum(0).tolist()
    [1, 1, 2]
    """
    X = as_tensor(X)
    if X.dim() != 2 or X.shape[1] != 2:
        raise UserError(f"X of shape [n, 2] is needed; got {list(X.shape)}; sample the patterns of more features")
    angles = torch.atan2(X[:, 1], X[:, 0])
    turns = torch.cat([angles + math.pi / 2, angles - math.pi / 2]).remainder(2 * math.pi).sort().values
    between = (turns + torch.cat([turns[1:], turns[:1] + 2 * math.pi])) / 2
    return distinct(X @ torch.stack([between.cos(), between.sin()]) >= 0)


def distinct(patterns: Tensor) -> Tensor:
    """Each column once, without those that pass no example; one column of ones where nothing else is left."""
    found = patterns[:, patterns.any(0)].unique(dim=1)
    return found if found.shape[1] else torch.ones_like(patterns[:, :1])
