"""What BSVRB and BO-REP are compared with, on the same oracle and with the same counts: one loop and two loops of plain steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainwright.solvers.bilevel.problem import Blocks, Local, Sample


@dataclass(frozen=True)
class Iterate:
    """x [n], y and v [m, d], the direction [n]."""

    x: Tensor
    y: Tensor
    v: Tensor
    direction: Tensor
    nit: int = 0


@dataclass(frozen=True)
class _Plain:
    """What the baselines have in common: plain steps of the drawn blocks."""

    step_x: float
    step_y: float
    num_sampled: int

    def start(self, problem: Blocks, x: Tensor, y: Tensor) -> Iterate:
        return Iterate(x, y, torch.zeros_like(y), torch.full_like(x, torch.nan))


@dataclass(frozen=True)
class SOBA(_Plain):
    """One plain step of y, v and x each, all from one batch; `share` < 1 averages x's direction (MA-SOBA).

    Dagréou, Ablin, Vaiter & Moreau, NeurIPS 2022 (arXiv 2201.13409); the average: Chen, Xiao & Balasubramanian,
    2023 (arXiv 2306.12067).
    """

    share: float = 1.0

    def step(self, problem: Blocks, state: Iterate, sample: Sample, generator: torch.Generator) -> Iterate:
        blocks, here = _drawn(problem, state, self.num_sampled, sample, generator)
        v = state.v[blocks]
        slope = here.hypergradient(v)
        direction = slope if state.nit == 0 else (1 - self.share) * state.direction + self.share * slope
        y = here.y.detach() - self.step_y * here.lower_y.detach()
        v = v - self.step_y * (here.hessian_times(v) - here.upper_xy[1])
        return Iterate(
            x=state.x - self.step_x * direction,
            y=state.y.index_copy(0, blocks, y),
            v=state.v.index_copy(0, blocks, v),
            direction=direction,
            nit=state.nit + 1,
        )


@dataclass(frozen=True)
class StocBiO(_Plain):
    """Two loops: `num_inner` plain steps of the drawn blocks' y, as many of v, then one of x; each on a batch of its own.

    Ji, Yang & Liang, ICML 2021 (arXiv 2010.07962); v by descent from where it was, in place of a truncated series.
    """

    num_inner: int = 5

    def step(self, problem: Blocks, state: Iterate, sample: Sample, generator: torch.Generator) -> Iterate:
        order = torch.randperm(problem.num_blocks, generator=generator)
        blocks = order[: self.num_sampled]
        y, v = state.y[blocks], state.v[blocks]
        for _ in range(self.num_inner):
            y = y - self.step_y * problem.at(state.x, y, blocks, sample(blocks, generator)).lower_y.detach()
        for _ in range(self.num_inner):
            here = problem.at(state.x, y, blocks, sample(blocks, generator))
            v = v - self.step_y * (here.hessian_times(v) - here.upper_xy[1])
        slope = problem.at(state.x, y, blocks, sample(blocks, generator)).hypergradient(v)
        return replace(
            state,
            x=state.x - self.step_x * slope,
            y=state.y.index_copy(0, blocks, y),
            v=state.v.index_copy(0, blocks, v),
            direction=slope,
            nit=state.nit + 1,
        )


def _drawn(
    problem: Blocks, state: Iterate, num_sampled: int, sample: Sample, generator: torch.Generator
) -> tuple[Tensor, Local]:
    blocks = torch.randperm(problem.num_blocks, generator=generator)[:num_sampled]
    return blocks, problem.at(state.x, state.y[blocks], blocks, sample(blocks, generator))
