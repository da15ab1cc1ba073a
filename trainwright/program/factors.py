"""Factors: the atomic dims that views split and merge, found by walking the signatures of a whole program.

Every dim of every tensor is a list of factors, major first. Ops identify loops of their operands; where two lists meet
(768 against 12·64) the coarser factor is split. A layout is then unchanged by any view, transpose or reshape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Factor:
    """An atomic part of a dim. Once identified with another factor it forwards to that one; once split, to its parts."""

    __slots__ = ("blocked", "forward", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocked = False
        self.forward: tuple[Factor, ...] | None = None

    def __repr__(self) -> str:
        return f"Factor({self.size})"


def leaves(factors: Iterable[Factor]) -> list[Factor]:
    """Return the atomic factors that `factors` have come to stand for."""
    found: list[Factor] = []
    for factor in factors:
        last = _last_identified(factor)
        if last.forward is None:
            found.append(last)
        else:
            found += leaves(last.forward)
    return found


def _last_identified(factor: Factor) -> Factor:
    """Return the factor at the end of the chain of identifications, and shorten the chain, which deep models make long."""
    passed = []
    while factor.forward is not None and len(factor.forward) == 1:
        passed.append(factor)
        factor = factor.forward[0]
    for earlier in passed:
        earlier.forward = (factor,)
    return factor


def unify(first: Sequence[Factor], second: Sequence[Factor]) -> None:
    """Identify two lists of equal product, splitting factors where needed.

    Lists without a common refinement (3·4 against 4·3) are marked as blocked: they are never split over devices.
    """
    left, right = leaves(first), leaves(second)
    while left and right:
        a, b = left.pop(), right.pop()  # minor first: a row-major view agrees there
        if a is b:
            continue
        if a.forward is not None or b.forward is not None:  # changed by an earlier step of this very walk
            left += leaves([a])
            right += leaves([b])
            continue
        if a.size == b.size:
            _merge(a, b)
        elif a.size > b.size and a.size % b.size == 0:
            left.append(_split(a, a.size // b.size, b))
        elif b.size > a.size and b.size % a.size == 0:
            right.append(_split(b, b.size // a.size, a))
        else:
            for factor in (a, b, *left, *right):
                factor.blocked = True
            return


def _merge(a: Factor, b: Factor) -> None:
    b.blocked |= a.blocked
    a.forward = (b,)


def _split(factor: Factor, major: int, minor: Factor) -> Factor:
    """Split `factor` into a new major part and the existing `minor`; return the major one."""
    part = Factor(major)
    part.blocked = factor.blocked
    minor.blocked |= factor.blocked
    factor.forward = (part, minor)
    return part


def whole(size: int) -> list[Factor]:
    """Return the factors of a fresh dim of `size`: none for size 1."""
    return [] if size == 1 else [Factor(size)]
