"""`Learner`: predict, then update; what every method of the family shares."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ...artifacts import UserError
from .sets import ConvexSet

BOUND_ROUNDING = 1e-6
"""By how much of itself a stated bound may be exceeded: float32's rounding of a norm."""


class Learner(ABC):
    """A player of online convex optimisation: `predict()` gives the play xₜ of this round, `update(gradient)` ends the round.

    `batch_shape`: that many independent players at once; plays and gradients are then (*batch_shape, d). State is kept
    in the set's dtype (sums of squares in float64), on its device. The best play is not knowable on line: regret is.
    """

    gradient_bound: float | None = None
    """G, where the method rests on one; a gradient above it is refused."""

    def __init__(self, feasible: ConvexSet, batch_shape: tuple[int, ...] = ()) -> None:
        if not all(hasattr(feasible, name) for name in ("centre", "diameter", "project")):
            raise UserError(
                f"a set such as Ball(…), Box(…) or Simplex(…) is needed; got {type(feasible).__name__}; make one"
            )
        self.feasible = feasible
        self.start = feasible.centre.expand(*batch_shape, len(feasible.centre)).clone()
        self.num_rounds = 0
        self.hint = torch.zeros_like(self.start)
        self.play: Tensor | None = None

    def predict(self, hint: Tensor | None = None) -> Tensor:
        """Return the play of this round (the same until `update`); `hint` is a guess of its gradient.

        Without one, optimistic methods take the last gradient, and 0 in the first round; others do not read it.
        """
        if hint is not None:
            self.hint, self.play = self._checked(hint, "hint"), None
        if self.play is None:
            self.play = self._play()
        return self.play

    def update(self, gradient: Tensor) -> None:
        """Take the gradient of this round's loss at the play; nothing changes where it is refused."""
        if self.play is None:
            raise UserError("predict() is needed before update(); got update() alone; play the round first")
        gradient = self._checked(gradient, "gradient")
        self._check_bound(gradient)
        self._learn(gradient)
        self.num_rounds += 1
        self.hint, self.play = gradient, None

    @abstractmethod
    def _play(self) -> Tensor:
        """Return the play of round `num_rounds + 1`, with `hint` in place."""

    @abstractmethod
    def _learn(self, gradient: Tensor) -> None:
        """Take the gradient at `play`; `hint` is what was expected."""

    def _check_bound(self, gradient: Tensor) -> None:
        """The steps, and every regret bound, rest on the bound that was stated: a longer gradient is refused."""
        bound = self.gradient_bound
        longest = 0.0 if bound is None else float(gradient.double().norm(dim=-1).max())
        if bound is not None and longest > bound * (1 + BOUND_ROUNDING):
            raise UserError(
                f"gradients of at most gradient_bound = {bound:g} in norm are needed; got one of {longest:g}; state a bound "
                "that holds, or use AdaGradNorm, which needs none"
            )

    def _checked(self, value: Tensor, name: str) -> Tensor:
        value = torch.as_tensor(value)
        if value.shape != self.start.shape or not torch.isfinite(value).all():
            found = "NaN or infinity" if value.shape == self.start.shape else f"shape {tuple(value.shape)}"
            raise UserError(
                f"a finite {name} of shape {tuple(self.start.shape)} is needed; got {found}; leave the round out, or mend it"
            )
        return value.to(self.start)

    def _zeros(self) -> Tensor:
        """Return a float64 zero per player, (…, 1)."""
        return torch.zeros_like(self.start[..., :1], dtype=torch.float64)


def squared(vector: Tensor) -> Tensor:
    """Return the squared norm per player in float64, (…, d) → (…, 1): sums of millions of rounds do not saturate."""
    return vector.double().square().sum(-1, keepdim=True)


def need_positive(**values: float) -> None:
    """Refuse what is not positive and finite."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or not 0 < value < float("inf"):
            raise UserError(f"a positive {name} is needed; got {value!r}; give a bound that holds for your losses")


def one_of(gradient_bound: float | None, strong_convexity: float | None) -> None:
    """Refuse both and neither."""
    if (gradient_bound is None) == (strong_convexity is None):
        raise UserError(
            "gradient_bound (convex losses) or strong_convexity is needed, one of them; "
            f"got {gradient_bound} and {strong_convexity}; give the one that your losses have"
        )
    if gradient_bound is not None:
        need_positive(gradient_bound=gradient_bound)
    if strong_convexity is not None:
        need_positive(strong_convexity=strong_convexity)
