"""A convolutional network that maps a residual to a search direction, with weights shared over its levels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...artifacts import UserError
from ..seeds import as_generator

COARSEST = 4
"""Pooling ends where a side would fall below half of this."""
CONVOLUTIONS: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
POOLS: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class DirectionNet(nn.Module):
    """Residual r (batch, 1, *grid) → direction of the same shape: a U-shaped network for grids of any size.

    blocks: for each distinct level (the finest first) how many residual pairs of 3-wide convolutions come before and
    after the coarser level; the last entry serves all coarser levels too. With the default, one entry, all levels share
    their weights, so that a network trained on 32 × 32 goes as deep on 1024 × 1024 as that needs.
    max_levels: how many times to pool (default: until a side is below `COARSEST`). bias: without, the network is
    positively homogeneous, and the size of its input does not matter. seed: of the first weights.

    The paper's network for N = 64: `DirectionNet(3, blocks=((2, 2), (3, 0)), max_levels=1, bias=True)`; its one pooling
    level and fixed depth are why its iterations grow with the grid.

    >>> net = DirectionNet(2, channels=4)
    >>> net(torch.zeros(2, 1, 9, 12)).shape
    torch.Size([2, 1, 9, 12])
    """

    def __init__(
        self, num_dims: int, channels: int = 16, blocks: Sequence[tuple[int, int]] = ((1, 1),),
        max_levels: int | None = None, bias: bool = False, seed: int | torch.Generator = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_dims not in CONVOLUTIONS or channels < 1 or not blocks:
            raise UserError(
                f"num_dims 1 to 3, channels ≥ 1 and a pair in blocks are needed; got {num_dims}, {channels}, {blocks}; "
                "try DirectionNet(2)"
            )
        self.num_dims, self.max_levels = num_dims, max_levels
        convolution = partial(_blank, CONVOLUTIONS[num_dims])
        self.enter = convolution(1, channels, 3, padding=1, bias=bias)
        self.leave: Any = convolution(channels, 1, 1, bias=bias)
        self.before = nn.ModuleList(_pairs(convolution, channels, before, bias) for before, _ in blocks)
        self.after = nn.ModuleList(_pairs(convolution, channels, after, bias) for _, after in blocks)
        self.coarse_scale = nn.Parameter(torch.ones(len(blocks)))
        self._draw(as_generator(seed))

    def forward(self, residual: Tensor) -> Tensor:
        return self.leave(self._level(self.enter(residual), 0))

    @torch.no_grad()
    def direction(self, residual: Tensor) -> Tensor:
        """Return the direction for one residual of shape (*grid), in the residual's dtype: what `solve_dcdm` calls."""
        if residual.dim() != self.num_dims:
            raise UserError(
                f"a residual of {self.num_dims} dimensions is needed; got shape {tuple(residual.shape)}; "
                "give b in the grid's shape"
            )
        return self(residual[None, None].to(self.leave.weight.dtype))[0, 0].to(residual.dtype)

    def _level(self, hidden: Tensor, level: int) -> Tensor:
        place = min(level, len(self.before) - 1)
        hidden = self.before[place](hidden)
        if self._goes_on(hidden, level):
            coarse = POOLS[self.num_dims](hidden, 2, ceil_mode=True)
            fine = F.interpolate(self._level(coarse, level + 1), scale_factor=2.0, mode="nearest")
            for dim, size in enumerate(hidden.shape[2:], start=2):
                fine = fine.narrow(dim, 0, size)
            hidden = hidden + self.coarse_scale[place] * fine
        return self.after[place](hidden)

    def _goes_on(self, hidden: Tensor, level: int) -> bool:
        return min(hidden.shape[2:]) >= COARSEST and (self.max_levels is None or level < self.max_levels)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        """Draw the weights anew, uniformly as torch does, but from `generator`."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                bound = parameter[0].numel() ** -0.5
                drawn = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_((2 * drawn - 1) * bound)
            elif parameter is not self.coarse_scale:
                parameter.zero_()


def _blank(convolution: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """A convolution without weights yet, so that torch's own initialisation draws nothing from the global state."""
    made: nn.Module = convolution(*args, **kwargs, device="meta")
    return made.to_empty(device="cpu")


class _Pair(nn.Module):
    def __init__(self, convolution: Any, channels: int, bias: bool) -> None:
        super().__init__()
        self.first = convolution(channels, channels, 3, padding=1, bias=bias)
        self.second = convolution(channels, channels, 3, padding=1, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(F.relu(self.first(hidden)))


def _pairs(convolution: Any, channels: int, num: int, bias: bool) -> nn.Module:
    return nn.Sequential(*(_Pair(convolution, channels, bias) for _ in range(num)))
