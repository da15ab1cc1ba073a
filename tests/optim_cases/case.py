"""`Case`: how the battery drives one optimizer and what it must equal; `Problem`: what it minimises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Vector = np.ndarray[Any, np.dtype[np.float64]]
Oracle = Callable[..., list[Vector]]
SHAPES: tuple[tuple[int, ...], ...] = ((5, 3), (7,), (), (2, 3, 2, 3), (33,))


class Problem:
    """loss(θ) = Σ slope·θ + ½ Σ curvature·θ², over several tensors: not square, off the origin, ill-conditioned.

    The slopes are drawn anew by `advance`, as a batch is; gradient and Hessian are known by hand.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64, seed: int = 0,
        curved: bool = True,
    ) -> None:  # fmt: skip
        self.draw = torch.Generator().manual_seed(seed)
        self.params = [nn.Parameter(self._noise(shape, dtype) + 0.7) for shape in shapes]
        self.curvature = [self._scales(shape, dtype) * float(curved) for shape in shapes]
        self.slopes = [torch.zeros_like(param) for param in self.params]
        self.advance()

    def _noise(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(tuple(shape), generator=self.draw, dtype=wide).to(dtype)

    def _scales(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        powers = torch.rand(tuple(shape), generator=self.draw, dtype=torch.float64) * 3 - 2
        return (10**powers).to(dtype)

    def advance(self) -> None:
        """Draw the next slopes, of unlike sizes."""
        self.slopes = [
            placed(self._noise(param.shape, param.dtype) * self._scales(param.shape, param.dtype) + 0.2, param)
            for param in self.params
        ]

    def gradients(self) -> list[Tensor]:
        return [
            (slope + curvature * param).detach()
            for slope, curvature, param in zip(self.slopes, self.curvature, self.params)
        ]

    def set_gradients(self) -> None:
        for param, grad in zip(self.params, self.gradients()):
            param.grad = grad

    def loss(self) -> Tensor:
        """The loss, with its graph."""
        total: Any = 0.0
        for slope, curvature, param in zip(self.slopes, self.curvature, self.params):
            products = slope.conj() * param + 0.5 * curvature * param.conj() * param
            total = total + (products.real if products.is_complex() else products).sum()
        return total

    def values(self) -> list[Tensor]:
        """Copies of the parameters, whole."""
        with torch.no_grad():
            return [whole(param).clone() for param in self.params]


Drive = Callable[[Any, Problem], Any]


def by_gradient(optimizer: Any, problem: Problem) -> Any:
    """An ordinary step."""
    problem.set_gradients()
    return optimizer.step()


def by_closure(optimizer: Any, problem: Problem) -> Any:
    """A step of a method that wants the loss with its graph."""
    return optimizer.step(problem.loss)


@dataclass(frozen=True)
class Case:
    """One optimizer of ours under test."""

    name: str
    """Its record's."""
    oracle: Oracle
    """(θ, slopes of each step, curvature, **settings) → θ afterwards: the equations by hand on float64 vectors."""
    refused: tuple[tuple[dict[str, Any], str], ...]
    """Settings out of range, each with what the message says."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Under which every part of the method works; the contract is tested under these."""
    variants: tuple[dict[str, Any], ...] = ({},)
    """Settings beside `settings` under which bytes and steps are compared with what is declared and with the oracle."""
    unlike: tuple[dict[str, Any], ...] = ()
    """More such settings, for all but the oracle: moments rounded to 8 bits are not the equations'."""
    drive: Drive = by_gradient
    sharded_shapes: tuple[tuple[int, ...], ...] = ((5, 3), (7,), (6, 4))
    """Of parameters to be cut over ranks."""
    unordered: tuple[str, ...] = ()
    """States whose order follows the cut over ranks."""
    skips: dict[str, str] = field(default_factory=dict)
    """Tests of the contract that do not apply, each with the reason."""

    @property
    def all_variants(self) -> tuple[dict[str, Any], ...]:
        return (*self.variants, *self.unlike)


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    case: Case, problem: Problem, optimizer: Any, num_steps: int, after: Callable[[], Any] = lambda: None
) -> list[Tensor]:
    """Step, draw new slopes and call `after`, `num_steps` times; returns the parameters then."""
    for _ in range(num_steps):
        case.drive(optimizer, problem)
        problem.advance()
        after()
    return problem.values()


def vectors(tensors: Sequence[Tensor]) -> list[Vector]:
    return [tensor.detach().double().numpy().ravel().copy() for tensor in tensors]


def slopes_of(num_steps: int, **made: Any) -> list[list[Vector]]:
    """The slopes that a `Problem(**made)` has in its first steps."""
    problem, found = Problem(**made), []
    for _ in range(num_steps):
        found.append(vectors(problem.slopes))
        problem.advance()
    return found
