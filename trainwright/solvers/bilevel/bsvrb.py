"""BSVRB: variance-reduced bilevel descent over many blocks, of which a step touches a few.

trackers   t ← (1-α) t + α new + γ (new - old), all on one batch, for the chosen blocks only     `_tracked`
v1         tracks ∇²ᵧᵧgᵢ itself and inverts it;  v2 tracks the gradient of ½v'Hv - v'∇ᵧf and descends in v
v2         by default (1-α) (new - left) + γ (left - old): what y and v did since the block was left, then what x did
upper      z ← (1-β)(z - G_old) + G_new,  x ← x - η z                                             `BSVRB.step`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ...artifacts import UserError, check_range
from .problem import Blocks, Local, Sample

_FIRST_SHARE, _WINDOW, _LAST_ALPHA, _LAST_BETA = 0.1, 30, 0.02, 0.01
"""The default of α and β: 0.1 until step 300, then 30 / steps so far, down to the last ones."""


@dataclass(frozen=True)
class BlockState:
    """Where a run stands: x [n], y [m, d], the trackers of all blocks, and the iterate before."""

    x: Tensor
    y: Tensor
    old_x: Tensor
    old_y: Tensor
    slopes: Tensor
    """s [m, d], of ∇ᵧg."""
    inner: Tensor
    """v1: H [m, d, d]; v2: v [m, d]."""
    old_inner: Tensor
    inner_slopes: Tensor
    """v2: u [m, d], of the gradient in v."""
    left_y: Tensor
    """[m, d], y of each block when it was last touched, before that step."""
    left_inner: Tensor
    """v2: v [m, d] likewise."""
    seen: Tensor
    """[m], whether a block has been touched, hence its trackers made."""
    touched: Tensor
    """[m], the iteration in which a block was last touched."""
    direction: Tensor
    """z [n]."""
    nit: int


@dataclass(frozen=True)
class _Drawn:
    """The blocks of a step, and their derivatives on one batch."""

    blocks: Tensor
    first: Tensor
    """[I], whether a block is touched for the first time."""
    missed: Tensor
    """[I], the steps since a block was last touched, this one included."""
    gamma: float
    new: Local
    old: Local
    """At the iterate before."""
    left: Local | None
    """At this x, and at y where the block was last touched; `None` where one γ weights all differences."""


@dataclass(frozen=True)
class BSVRB:
    """BSVRB for min over x of (1/m) Σᵢ fᵢ(x, yᵢ(x)), yᵢ(x) the minimiser of a strongly convex gᵢ(x, ·); I blocks a step.

    `version` 1 inverts a tracked Hessian of each block (d × d, eigenvalues kept at `curvature_floor` at least) and moves y of
    all blocks; 2 descends in vᵢ ≈ [∇²gᵢ]⁻¹∇fᵢ with Hessian-vector products alone, and touches the chosen blocks only.

    `step_x` η, `step_y` τ, `step_v` (version 2; default τ): step sizes. `num_sampled` I: blocks a step. `alpha`, `beta`: shares of
    the new gradient in trackers and direction, in (0, 1]; by default 0.1 until step 300 and then 30 by the steps so far, down to
    0.02 and 0.01 (β of version 1 stays 0.1): averages as long as x takes to settle. `gamma`: weight in the trackers of the
    difference between the last two iterates; `step_y · smoothness · gamma` < 1 must hold, or they diverge.
    Version 1's default is STORM's 1 - α. Version 2 weights by default the differences in x alone, by the theory's
    (m - I)/(I (1 - α)) + (1 - α), which makes up for the steps that missed a block; what y and v of a block did since its last
    step is known and weighs 1 - α, so that no lower step has to shrink with I/m. `v_bound`: largest norm of vᵢ (version 2).
    `catch_up`: version 2 steps yᵢ and vᵢ by their step sizes times the iterations since the block was last touched,
    `max_catch_up` at most, as the authors' code does; it multiplies the noise of a step as well.

    Per step 2 I gradients of each level and, version 1, 2 I d, version 2, 4 I second-order products; version 2 without
    `gamma` 3 I gradients and 5 I products. With every block drawn the default's trackers are STORM's. It does not win where
    all blocks fit into a step and noise is small.
    The authors' code is no reference: its logistic second derivative has the wrong sign, its projection scales up.
    The first touch of a block sets its trackers to plain gradients. Departures: α, β that shrink from 0.1 where the authors' code
    has 0.9, with which the method loses to plain sampling on noisy problems; and version 2's default differences, where
    the paper has one γ for all (give it as `gamma`): its noise grows with γ, and it diverges where few blocks are drawn.

    Source: Hu, Qiu, Guo, Zhang & Yang, Blockwise Stochastic Variance-Reduced Methods with Parallel Speedup for Multi-Block
    Bilevel Optimization, ICML 2023 (arXiv 2305.18730). The theory's γ and the orders of its steps are recalled, not proven here.
    """

    step_x: float
    step_y: float
    num_sampled: int
    version: Literal[1, 2] = 2
    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None
    step_v: float | None = None
    curvature_floor: float = 1e-3
    v_bound: float = 10.0
    catch_up: bool = False
    max_catch_up: int = 10

    def __post_init__(self) -> None:
        above_0, at_least_1 = ("above 0", lambda value: value > 0), ("of at least 1", lambda value: value >= 1)
        share = ("in (0, 1]", lambda value: value is None or 0 < value <= 1)
        check_range(
            "BSVRB",
            step_x=(self.step_x, *above_0),
            step_y=(self.step_y, *above_0),
            step_v=(self.step_v, "above 0", lambda value: value is None or value > 0),
            num_sampled=(self.num_sampled, *at_least_1),
            version=(self.version, "1 or 2", lambda value: value in (1, 2)),
            alpha=(self.alpha, *share),
            beta=(self.beta, *share),
            gamma=(self.gamma, "of at least 0", lambda value: value is None or value >= 0),
            curvature_floor=(self.curvature_floor, *above_0),
            v_bound=(self.v_bound, *above_0),
            max_catch_up=(self.max_catch_up, *at_least_1),
        )

    def correction(self, num_blocks: int) -> float:
        """Return γ: the given one, or the version's default; by the theory's the trackers miss no step on average.

        >>> [round(BSVRB(0.1, 0.1, num_sampled=5, version=version).correction(20), 3) for version in (1, 2)]
        [0.9, 4.233]
        """
        if self.gamma is not None:
            return self.gamma
        if self.alpha is None:
            return self.averaging(0).correction(num_blocks)
        if self.alpha == 1 or self.version == 1:
            return 1 - self.alpha
        return (num_blocks - self.num_sampled) / (self.num_sampled * (1 - self.alpha)) + (1 - self.alpha)

    def start(self, problem: Blocks, x: Tensor, y: Tensor) -> BlockState:
        """Return the state before the first step."""
        num_blocks, num_dims = y.shape
        if self.num_sampled > num_blocks:
            raise UserError(
                f"BSVRB needs num_sampled of at most the {num_blocks} blocks; got {self.num_sampled}; draw fewer"
            )
        zeros = torch.zeros_like(y)
        inner = zeros
        if self.version == 1:
            inner = torch.eye(num_dims, dtype=y.dtype, device=y.device).expand(num_blocks, -1, -1).clone()
        seen = torch.zeros(num_blocks, dtype=torch.bool, device=y.device)
        touched = torch.zeros(num_blocks, dtype=torch.long, device=y.device)
        unknown = torch.full_like(x, torch.nan)
        return BlockState(x, y, x, y, zeros, inner, inner, zeros, y, inner, seen, touched, unknown, 0)

    def averaging(self, nit: int) -> BSVRB:
        """Return the method with the α and β of a step, counted from 0.

        >>> method = BSVRB(0.1, 0.1, num_sampled=5)
        >>> [(method.averaging(nit).alpha, method.averaging(nit).beta) for nit in (0, 299, 599, 9999)]
        [(0.1, 0.1), (0.1, 0.1), (0.05, 0.05), (0.02, 0.01)]
        """
        if self.alpha is not None and self.beta is not None:
            return self
        share = min(_FIRST_SHARE, _WINDOW / (nit + 1))
        alpha = max(share, _LAST_ALPHA) if self.alpha is None else self.alpha
        beta = self.beta or (_FIRST_SHARE if self.version == 1 else max(share, _LAST_BETA))
        return replace(self, alpha=alpha, beta=beta)

    def step(self, problem: Blocks, state: BlockState, sample: Sample, generator: torch.Generator) -> BlockState:
        """Return the next state: trackers of the chosen blocks, then the direction, then x, y and v."""
        return self.averaging(state.nit)._step(problem, state, sample, generator)

    def _step(self, problem: Blocks, state: BlockState, sample: Sample, generator: torch.Generator) -> BlockState:
        drawn = self._draw(problem, state, sample, generator)
        blocks = drawn.blocks
        left = None if drawn.left is None else drawn.left.lower_y
        slopes = self._tracked(state.slopes, drawn, drawn.new.lower_y, drawn.old.lower_y, left)
        lag = drawn.missed.clamp_max(self.max_catch_up if self.catch_up else 1)[:, None].to(state.y.dtype)
        moved = self._with_inner(state, drawn, lag)
        direction = self._direction(state, moved, drawn)
        return replace(
            moved,
            x=state.x - self.step_x * direction,
            y=self._moved_y(state, slopes, blocks, lag),
            old_x=state.x,
            old_y=state.y,
            slopes=slopes,
            left_y=state.left_y.index_copy(0, blocks, state.y[blocks]),
            seen=state.seen.index_fill(0, blocks, True),
            touched=state.touched.index_fill(0, blocks, state.nit + 1),
            direction=direction,
            nit=state.nit + 1,
        )

    def _draw(self, problem: Blocks, state: BlockState, sample: Sample, generator: torch.Generator) -> _Drawn:
        order = torch.randperm(problem.num_blocks, generator=generator, device=generator.device)
        blocks = order[: self.num_sampled].to(state.y.device)
        batch = sample(blocks, generator)
        known_moves = self.version == 2 and self.gamma is None
        return _Drawn(
            blocks,
            first=~state.seen[blocks],
            missed=state.nit + 1 - state.touched[blocks],
            gamma=self.correction(problem.num_blocks),
            new=problem.at(state.x, state.y[blocks], blocks, batch),
            old=problem.at(state.old_x, state.old_y[blocks], blocks, batch),
            left=problem.at(state.x, state.left_y[blocks], blocks, batch) if known_moves else None,
        )

    def _tracked(self, trackers: Tensor, drawn: _Drawn, new: Tensor, old: Tensor, left: Tensor | None) -> Tensor:
        """The trackers with those of the chosen blocks moved on; a block's first is the plain gradient."""
        assert self.alpha is not None  # of `averaging`
        new, old = new.detach(), old.detach()
        if left is None:
            change = drawn.gamma * (new - old)
        else:
            # Who was touched in the last step was left where the old iterate is; the others have stood still since.
            moved_by_x = torch.where(drawn.missed[:, None] == 1, left.detach(), new) - old
            change = (1 - self.alpha) * (new - left.detach()) + drawn.gamma * moved_by_x
        moved = (1 - self.alpha) * trackers[drawn.blocks] + self.alpha * new + change
        moved = torch.where(drawn.first.view(-1, *[1] * (new.dim() - 1)), new, moved)
        return trackers.index_copy(0, drawn.blocks, moved)

    def _with_inner(self, state: BlockState, drawn: _Drawn, lag: Tensor) -> BlockState:
        blocks = drawn.blocks
        if self.version == 1:
            tracked = self._tracked(state.inner, drawn, drawn.new.hessians(), drawn.old.hessians(), None)
            floored = self._floored(tracked, blocks)
            # A block's first H is of this time and, for want of another, of the time before.
            before = torch.where(drawn.first[:, None, None], floored[blocks], state.inner[blocks])
            return replace(state, inner=floored, old_inner=state.inner.index_copy(0, blocks, before))
        v = state.inner[blocks]
        now, before = (
            local.hessian_times(at) - local.upper_xy[1]
            for local, at in ((drawn.new, v), (drawn.old, state.old_inner[blocks]))
        )
        left = None
        if drawn.left is not None:
            left = drawn.left.hessian_times(state.left_inner[blocks]) - drawn.left.upper_xy[1]
        inner_slopes = self._tracked(state.inner_slopes, drawn, now, before, left)
        moved = v - (self.step_v or self.step_y) * lag * inner_slopes[blocks]
        norms = moved.norm(dim=1, keepdim=True)
        moved = moved * (self.v_bound / norms.clamp_min(1e-300)).clamp_max(1.0)
        return replace(
            state,
            inner=state.inner.index_copy(0, blocks, moved),
            old_inner=state.inner,
            inner_slopes=inner_slopes,
            left_inner=state.left_inner.index_copy(0, blocks, v),
        )

    def _floored(self, matrices: Tensor, blocks: Tensor) -> Tensor:
        """Symmetric, with eigenvalues of at least the floor: what a Hessian of a strongly convex function is."""
        own = matrices[blocks]
        values, vectors = torch.linalg.eigh((own + own.mT) / 2)
        clipped = (vectors * values.clamp_min(self.curvature_floor)[:, None, :]) @ vectors.mT
        return matrices.index_copy(0, blocks, clipped)

    def _direction(self, state: BlockState, moved: BlockState, drawn: _Drawn) -> Tensor:
        """STORM's z on both hypergradients, each with the inner solution of its own time."""
        blocks, new, old = drawn.blocks, drawn.new, drawn.old
        if self.version == 1:
            # The H of this time is known for blocks seen before; a block's first one is the plain Hessian just made.
            seen = state.seen[blocks][:, None, None]
            now_v, old_v = (
                torch.linalg.solve(torch.where(seen, known[blocks], moved.inner[blocks]), local.upper_xy[1])
                for known, local in ((state.inner, new), (state.old_inner, old))
            )
        else:
            now_v, old_v = state.inner[blocks], state.old_inner[blocks]
        now = new.hypergradient(now_v)
        if state.nit == 0:
            return now
        assert self.beta is not None  # of `averaging`
        return (1 - self.beta) * (state.direction - old.hypergradient(old_v)) + now

    def _moved_y(self, state: BlockState, slopes: Tensor, blocks: Tensor, lag: Tensor) -> Tensor:
        if self.version == 1:
            return state.y - self.step_y * slopes
        own = state.y[blocks] - self.step_y * lag * slopes[blocks]
        return state.y.index_copy(0, blocks, own)


def no_batch(blocks: Tensor, generator: torch.Generator) -> Any:
    """The batch of a problem without noise."""
    return None
