"""The entropic transport problem: what every method of this family reads, in passes over blocks of the cost's rows.

    minimise ⟨P, C⟩ + reg · Σ P (log P − 1)   subject to P 1 = a, Pᵀ 1 = b
    plan P(f, g) = exp((f_i + g_j − C_ij) / reg)                        `Problem.plan`
    dual (to maximise) ⟨a, f⟩ + ⟨b, g⟩ − reg · Σ P(f, g)                 `Problem.evaluate`

The cost is the only array of n × m numbers: a pass holds one block of `BLOCK` numbers in float64 beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...artifacts import UserError

BLOCK = 1 << 17
"""Numbers of the cost (of 8 bytes) that a pass works on at a time: small enough for a processor's cache."""
MASS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Kept:
    """The largest entries of a plan: row and column indices and values, each of shape (num_kept,)."""

    rows: Tensor
    cols: Tensor
    values: Tensor


@dataclass(frozen=True)
class Evaluation:
    """One pass at (f, g): marginals of the plan (n,) and (m,), the dual value, and the entries kept."""

    rows: Tensor
    cols: Tensor
    dual: float
    kept: Kept


@dataclass(frozen=True)
class Support:
    """The points of positive weight among all: their places `rows` and `cols` in a plan of `shape`."""

    rows: Tensor
    cols: Tensor
    shape: tuple[int, int]

    def spread(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return potentials of all points: −∞ where there is no weight, so that the plan is zero there."""
        whole_f, whole_g = (part.new_full((size,), -math.inf) for part, size in zip((f, g), self.shape))
        whole_f[self.rows], whole_g[self.cols] = f, g
        return whole_f, whole_g


@dataclass(frozen=True)
class Problem:
    """Marginals a (n,) and b (m,) > 0 in float64 with sum one, cost (n, m) of any floating dtype, reg > 0 (cost units).

    Points without weight are left out of a, b and the cost; `support` says which there were, `None` where all have weight.
    """

    a: Tensor
    b: Tensor
    cost: Tensor
    reg: float
    support: Support | None = None

    def blocks(self) -> Iterator[slice]:
        num_rows, num_cols = self.cost.shape
        height = max(1, BLOCK // num_cols)
        for start in range(0, num_rows, height):
            yield slice(start, min(start + height, num_rows))

    def row_lse(self, g: Tensor) -> Tensor:
        """Return log Σ_j exp((g_j − C_ij) / reg) for each row, shape (n,)."""
        return torch.cat([torch.logsumexp((g - self.cost[block]) / self.reg, 1) for block in self.blocks()])

    def col_lse(self, f: Tensor) -> Tensor:
        """Return log Σ_i exp((f_i − C_ij) / reg) for each column, shape (m,)."""
        parts = [torch.logsumexp((f[block, None] - self.cost[block]) / self.reg, 0) for block in self.blocks()]
        return torch.logsumexp(torch.stack(parts), 0)

    def plan_block(self, f: Tensor, g: Tensor, block: slice) -> Tensor:
        return ((f[block, None] + g - self.cost[block]) / self.reg).exp_()

    def plan(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the whole plan (n, m) in float64: as large as the cost."""
        return torch.cat([self.plan_block(f, g, block) for block in self.blocks()])

    def whole_plan(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the plan of all points, those without weight too, at potentials of all points."""
        if self.support is None:
            return self.plan(f, g)
        rows, cols = self.support.rows, self.support.cols
        found = f.new_zeros(self.support.shape)
        found[rows[:, None], cols] = self.plan(f[rows], g[cols])
        return found

    def evaluate(self, f: Tensor, g: Tensor, num_kept: int) -> Evaluation:
        """Return marginals, dual value and the `num_kept` largest entries of the plan, in one pass."""
        pool = _Largest(num_kept)
        rows, cols = [], torch.zeros_like(self.b)
        for block in self.blocks():
            plan = self.plan_block(f, g, block)
            rows.append(plan.sum(1))
            cols += plan.sum(0)
            pool.offer(plan, block.start)
        row_sums = torch.cat(rows)
        dual = float(self.a @ f + self.b @ g - self.reg * row_sums.sum())
        return Evaluation(row_sums, cols, dual, pool.kept(self.cost.shape[1]))

    def objective(self, f: Tensor, g: Tensor) -> tuple[float, float]:
        """Return ⟨P, C⟩ and Σ P log P of the plan at (f, g)."""
        transport = entropy = 0.0
        for block in self.blocks():
            exponent = (f[block, None] + g - self.cost[block]) / self.reg
            plan = exponent.exp()
            transport += float((plan * self.cost[block]).sum())
            entropy += float((plan * exponent).nan_to_num(nan=0.0).sum())
        return transport, entropy


class _Largest:
    """The k largest numbers of a stream of blocks, in memory of order k: a threshold sorts out the rest."""

    def __init__(self, num_kept: int) -> None:
        self.num_kept = num_kept
        self.values = torch.empty(0, dtype=torch.float64)
        self.places = torch.empty(0, dtype=torch.int64)
        self.threshold = -math.inf

    def offer(self, block: Tensor, first_row: int) -> None:
        flat = block.reshape(-1)
        if math.isinf(self.threshold):
            values, places = flat.topk(min(self.num_kept, flat.numel()), sorted=False)
        else:
            places = (flat > self.threshold).nonzero().squeeze(1)
            values = flat[places]
        self.values = torch.cat([self.values.to(flat.device), values])
        self.places = torch.cat([self.places.to(flat.device), places + first_row * block.shape[1]])
        if self.values.numel() > self.num_kept:
            self.values, order = self.values.topk(self.num_kept, sorted=False)
            self.places = self.places[order]
        if self.values.numel() == self.num_kept:
            self.threshold = float(self.values.min())

    def kept(self, num_cols: int) -> Kept:
        return Kept(self.places // num_cols, self.places % num_cols, self.values)


def make_problem(a: Any, b: Any, cost: Any, reg: float) -> Problem:
    """Check the input and return a `Problem`; empty marginals stand for uniform ones, as in POT.

    Marginals whose sums are one within 1e-6 (or twice their dtype's rounding) are divided by them; nothing else is changed.
    """
    matrix = _tensor(cost, "the cost M")
    if matrix.dim() != 2 or 0 in matrix.shape:
        raise UserError(f"a cost matrix of shape (n, m) is needed; got {tuple(matrix.shape)}; give M[i, j] as a matrix")
    reg = _number(reg)
    if not (math.isfinite(reg) and reg > 0):
        raise UserError(f"a finite reg > 0 is needed; got {reg}; give reg in the cost's units, such as 0.01 * M.max()")
    low, high = (float(value) for value in matrix.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(
            "a finite cost is needed; got NaN or infinity in M; use a large finite cost for forbidden pairs"
        )
    if low < 0:
        raise UserError(f"costs ≥ 0 are needed; got a smallest cost of {low:g}; subtract it: the plan stays the same")
    return _supported(_marginal(a, "a", matrix, 0), _marginal(b, "b", matrix, 1), matrix, float(reg))


def _supported(a: Tensor, b: Tensor, cost: Tensor, reg: float) -> Problem:
    """Leave out the points without weight, whose rows of the plan are zero: logarithms of weights are taken."""
    if bool((a > 0).all()) and bool((b > 0).all()):
        return Problem(a, b, cost, reg)
    rows, cols = (part.nonzero().flatten() for part in (a, b))
    shape = (len(a), len(b))
    return Problem(a[rows], b[cols], cost[rows[:, None], cols], reg, Support(rows, cols, shape))


def _marginal(values: Any, name: str, cost: Tensor, dim: int) -> Tensor:
    size = cost.shape[dim]
    if values is None or (len(np.shape(values)) == 1 and len(values) == 0):
        return torch.full((size,), 1.0 / size, dtype=torch.float64, device=cost.device)
    given = _tensor(values, f"the marginal {name}")
    marginal = given.to(cost.device, torch.float64)
    tolerance = max(MASS_TOLERANCE, 2 * torch.finfo(given.dtype).eps)
    if marginal.shape != (size,):
        raise UserError(
            f"{name} of shape ({size},) is needed for a cost of shape {tuple(cost.shape)}; "
            f"got {tuple(marginal.shape)}; give one weight for each {('row', 'column')[dim]}"
        )
    if not bool((marginal >= 0).all()):
        raise UserError(f"weights ≥ 0 are needed in {name}; got {float(marginal.min()):g}; check how they are made")
    total = float(marginal.sum())
    if not abs(total - 1) <= tolerance:
        raise UserError(f"{name} must sum to 1 (within {tolerance:g}); got {total:.9g}; divide it by its sum")
    return marginal / total


def _number(reg: Any) -> float:
    """Return a number, also one that is a tensor or an array of one element."""
    is_number = isinstance(reg, int | float | np.number) or (
        isinstance(reg, Tensor | np.ndarray) and reg.shape in ((), (1,))
    )
    if not is_number:
        raise UserError(f"a finite reg > 0 is needed; got {reg}; give reg in the cost's units, such as 0.01 * M.max()")
    return float(reg)


def _tensor(values: Any, what: str) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except TypeError:
        raise UserError(f"numbers are needed in {what}; got {type(values).__name__}; give an array or tensor") from None
    if tensor.is_floating_point():
        return tensor.detach()
    if tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise UserError(f"real numbers are needed in {what}; got {tensor.dtype}; convert it to float64")
    return tensor.to(torch.float64)
