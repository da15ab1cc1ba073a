"""Ways to select by name, for `trainwright train --select`: each a frozen record of what is chosen and what is trained on."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..artifacts import UserError
from .augmentation import with_strong_copies
from .craig import CRAIG
from .largest_loss import LargestLoss
from .random_subset import RandomSubset
from .reselection import Selector

Compose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(number of examples, indices, weights chosen) → indices, weights and strong marks of what is trained on."""


@dataclass(frozen=True)
class Selection:
    """One way to select."""

    name: str
    summary: str
    make: Callable[[float, int], Selector]
    """(fraction, seed) → what chooses."""
    paper: str
    reads_gradients: bool = True
    """Whether a choice costs a forward pass over all examples."""
    compose: Compose | None = None
    """Where strongly augmented copies are trained on; else the chosen examples are, with their weights."""


def _craig(fraction: float, seed: int) -> CRAIG:
    return CRAIG(fraction, normalise=True, seed=seed)


def _equal_craig(fraction: float, seed: int) -> CRAIG:
    return CRAIG(fraction, per_class="equal", seed=seed)


def _random(fraction: float, seed: int) -> RandomSubset:
    return RandomSubset(fraction, normalise=True, seed=seed)


def _largest_loss(fraction: float, seed: int) -> LargestLoss:
    return LargestLoss(fraction)


def _all(fraction: float, seed: int) -> RandomSubset:
    return RandomSubset(1.0, normalise=True, seed=seed)


_COPIES = "Liu & Mirzasoleiman 2022 (arXiv:2210.08363)"
_SELECTIONS = (
    Selection("craig", "a weighted subset whose gradient is near that of all", _craig,
              "Mirzasoleiman, Bilmes & Leskovec 2020 (arXiv:1906.01827)"),
    Selection("augment", "all examples, and strongly augmented copies of a coreset of them", _equal_craig, _COPIES,
              compose=with_strong_copies),
    Selection("augment-coreset", "a coreset, weighted, and strongly augmented copies of it", _equal_craig, _COPIES,
              compose=partial(with_strong_copies, base="coreset")),
    Selection("augment-loss", "all examples, and strongly augmented copies of those of the largest loss: a baseline of augment",
              _largest_loss, "", compose=with_strong_copies),
    Selection("augment-all", "all examples, and a strongly augmented copy of each, whatever the fraction: what augment is to reach",
              _all, "", reads_gradients=False, compose=with_strong_copies),
    Selection("augment-random", "all examples, and strongly augmented copies of random ones: the baseline of augment",
              _random, "", reads_gradients=False, compose=with_strong_copies),
    Selection("largest-loss", "the examples of the largest loss: a baseline of craig", _largest_loss, ""),
    Selection("random", "random examples: the baseline of craig", _random, "", reads_gradients=False),
)  # fmt: skip


def selections() -> tuple[Selection, ...]:
    """Return all ways to select, by name."""
    return _SELECTIONS


def selection(name: str) -> Selection:
    """Return the way to select of this name; `UserError` with the names that there are for any other.

    >>> selection("craig").reads_gradients, selection("random").reads_gradients
    (True, False)
    """
    known = {each.name: each for each in _SELECTIONS}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "choose one"
        raise UserError(f"a way to select is needed, one of {', '.join(known)}; got {name!r}; {hint}")
    return known[name]
