"""Ask and tell: the loop is the caller's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...artifacts import UserError
from ..methods import need_method
from ..seeds import as_generator, need_count
from .box import Box
from .cbo import CBO
from .ensemble import Ensemble, Method, check_values


class Swarm:
    """A `CBO` or `ConsensusHopping` run whose evaluations are the caller's: `ask()` for points, `tell(values)`.

    Arguments as in `minimize`, which is this loop with limits, tolerances and a record. `consensus` (d,) is the method's
    answer so far, `best_x` and `best_fun` the best point told. Points are always tensors.

    >>> swarm = Swarm([(-3.0, 3.0)] * 2, num_particles=50, seed=0)
    >>> for _ in range(300):
    ...     points = swarm.ask()
    ...     swarm.tell(((points - 0.5) ** 2).sum(1))
    >>> bool((swarm.consensus - 0.5).abs().max() < 0.05)
    True
    """

    def __init__(
        self,
        bounds: Any = None,
        *,
        x0: Any = None,
        spread: float | None = None,
        method: Method | None = None,
        num_particles: int = 100,
        seed: int | torch.Generator = 0,
    ) -> None:
        self.method = method if method is not None else CBO()
        self.box, self.generator, self.pending = begin(bounds, x0, spread, self.method, num_particles, seed)
        self.ensemble: Ensemble | None = None

    def ask(self) -> Tensor:
        """Return the points (N, d) to evaluate; the same ones until they are told."""
        return self.pending.clone()

    def tell(self, values: Tensor) -> None:
        """Take the values (N,) of the points asked for; what is not finite counts as +∞."""
        values = check_values(torch.as_tensor(values), self.pending)
        self.ensemble = Ensemble.of(self.pending, values, self.method.alpha, self.ensemble)
        self.pending = self.box.inside(self.method.propose(self.ensemble, self.generator))

    @property
    def consensus(self) -> Tensor:
        """The consensus point of the last told ensemble (before: the mean of the first points)."""
        return self.pending.mean(0) if self.ensemble is None else self.ensemble.consensus

    @property
    def best_x(self) -> Tensor:
        """The best point told (before: the first point)."""
        return self.pending[0] if self.ensemble is None else self.ensemble.best_x

    @property
    def best_fun(self) -> float:
        """The value at `best_x`, +∞ before the first one."""
        return torch.inf if self.ensemble is None else self.ensemble.best_fun


def begin(
    bounds: Any,
    x0: Any,
    spread: float | None,
    method: Method,
    num_particles: int,
    seed: int | torch.Generator,
) -> tuple[Box, torch.Generator, Tensor]:
    """Return the box, the generator and the first particles."""
    need_method(method, Method, "such as CBO(…)", "leave it out for CBO()")
    if x0 is not None and not bool(torch.isfinite(torch.as_tensor(x0)).all()):
        raise UserError("a finite x0 is needed; got NaN or infinity in it; start elsewhere")
    num_particles = need_count("num_particles", num_particles, 1)
    if spread is not None and not spread > 0:
        raise UserError(f"spread > 0 is needed; got {spread}; start with 1.0")
    box = Box.of(bounds, x0)
    generator = as_generator(seed, box.low.device)
    return box, generator, box.inside(method.first(box, x0, spread, num_particles, generator))
