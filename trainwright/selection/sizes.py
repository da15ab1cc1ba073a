"""How many examples of each class a subset gets."""

from __future__ import annotations

import math

from ..artifacts import UserError


def class_sizes(sizes: list[int], fraction: float, budget: int | None, per_class: str) -> list[int]:
    """Return how many of each class are chosen, one at least and all at most: a `fraction` of each, rounded up, or a
    `budget` in all, shared in proportion or equally (then a `fraction` is of all).

    >>> class_sizes([70, 30, 1], 0.1, None, "proportional"), class_sizes([70, 30, 1], 0.1, 9, "equal")
    ([7, 3, 1], [3, 3, 1])
    >>> class_sizes([70, 30], 0.1, None, "equal")
    [5, 5]
    """
    if budget is not None and budget > sum(sizes):
        raise UserError(
            f"a budget of at most the {sum(sizes)} examples is needed; got {budget}; choose fewer, or train on all of them"
        )
    if budget is None and per_class == "equal":
        budget = math.ceil(fraction * sum(sizes) - 1e-9)
    if budget is None:
        wanted = [math.ceil(fraction * size - 1e-9) for size in sizes]
    elif per_class == "equal":
        wanted = [math.ceil(budget / len(sizes))] * len(sizes)
    else:
        wanted = _proportional(budget, sizes)
    return [max(1, min(size, most)) for size, most in zip(wanted, sizes)]


def _proportional(budget: int, sizes: list[int]) -> list[int]:
    """Largest remainders: shares that sum to the budget.

    >>> _proportional(5, [10, 10, 30])
    [1, 1, 3]
    """
    total = sum(sizes)
    shares = [budget * size / total for size in sizes]
    wanted = [int(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda place: wanted[place] - shares[place])
    for place in by_remainder[: budget - sum(wanted)]:
        wanted[place] += 1
    return wanted
