"""Gradient codes: each worker sums the gradients of s + 1 of n chunks, and any n − s of the sums determine the whole sum.

    a code      B, [n, n]: worker i returns Σ_j B_ij g_j
    decoding    a with aᵀ B_S = 1ᵀ for the workers S that have answered, in float64

Fractional repetition (s + 1 divides n) has groups of s + 1 workers with the same chunks, and coefficients of 1. Otherwise the
code is cyclic: worker i holds chunks i … i + s, with coefficients of up to 1e5 for n = 256, s = 15, for which fp32 is not
precise enough.

Source: Tandon, Lei, Dimakis & Karampatziakis 2017, Gradient Coding (ICML).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..artifacts import UserError, check_range


@dataclass(frozen=True)
class GradientCode:
    """A gradient code for n workers of which s may fail to answer; `cyclic` forces the cyclic code.

    >>> code = GradientCode(4, 1)
    >>> code.chunks(2), code.load, code.decoding({0, 3}).tolist()
    ((2, 3), 0.5, [1.0, 0.0, 0.0, 1.0])
    """

    num_workers: int
    stragglers: int
    cyclic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(
            "a gradient code",
            stragglers=(
                self.stragglers,
                f"from 0 to {self.num_workers - 1}, below its {self.num_workers} workers",
                lambda value: 0 <= value < self.num_workers,
            ),
        )

    @property
    def load(self) -> float:
        """Return the share of all chunks that a worker computes: (s + 1) / n."""
        return (self.stragglers + 1) / self.num_workers

    @property
    def repeats(self) -> bool:
        """Tell whether the code is fractional repetition."""
        return not self.cyclic and self.num_workers % (self.stragglers + 1) == 0

    @cached_property
    def matrix(self) -> np.ndarray:
        """Return B, with one row for each worker."""
        return self._repeated() if self.repeats else self._cyclic()

    def chunks(self, worker: int) -> tuple[int, ...]:
        """Return the chunks that a worker holds, in the order in which it sums them."""
        width = self.stragglers + 1
        first = worker // width * width if self.repeats else worker
        return tuple((first + k) % self.num_workers for k in range(width))

    def decodes(self, answered: Iterable[int]) -> bool:
        """Tell whether the sums of these workers determine the whole sum."""
        there = set(answered)
        if self.repeats:
            return len({worker // (self.stragglers + 1) for worker in there}) == self.num_workers // (
                self.stragglers + 1
            )
        return len(there) >= self.num_workers - self.stragglers

    def decoding(self, answered: Iterable[int]) -> np.ndarray:
        """Return the decoding vector a [n], 0 for workers without an answer; raise `UserError` if there are too few answers."""
        there = sorted(set(answered))
        if not self.decodes(there):
            raise UserError(
                f"answers of {self.num_workers - self.stragglers} of {self.num_workers} workers are needed, or of one in each "
                f"group; got {len(there)}; wait for more"
            )
        found = np.zeros(self.num_workers)
        if self.repeats:
            width = self.stragglers + 1
            for group in range(0, self.num_workers, width):
                found[next(worker for worker in there if worker // width * width == group)] = 1.0
        else:
            found[there] = np.linalg.lstsq(self.matrix[there].T, np.ones(self.num_workers), rcond=None)[0]
        return found

    def _repeated(self) -> np.ndarray:
        matrix = np.zeros((self.num_workers, self.num_workers))
        for worker in range(self.num_workers):
            matrix[worker, list(self.chunks(worker))] = 1.0
        return matrix

    def _cyclic(self) -> np.ndarray:
        """Return B with rows in the null space of a random H [s, n] whose rows sum to 0.

        The vector of ones lies in that null space, and any n − s rows of B span it.
        """
        n, s = self.num_workers, self.stragglers
        h = np.random.default_rng(self.seed).normal(size=(s, n))
        h[:, -1] = -h[:, :-1].sum(1)
        matrix = np.zeros((n, n))
        for worker in range(n):
            first, *rest = self.chunks(worker)
            matrix[worker, first] = 1.0
            if s:
                matrix[worker, rest] = -np.linalg.solve(h[:, rest], h[:, first])
        return matrix
