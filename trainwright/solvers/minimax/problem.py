"""The finite-sum oracle of min over x, max over y of f(x, y) = (1/n) Σᵢ fᵢ(x, y), with its calls counted.

One component gradient, x and y part together, is one `nsfo`; a batch whose x part comes from one index set and whose
y part from another of the same size counts that size once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...artifacts import UserError
from ..driver import Counts
from ..seeds import need_count
from ..values import Packing

Fun = Callable[[Any, Any, Tensor], Tensor]
"""(x, y, indices) → the mean of the chosen components, a scalar."""
Jac = Callable[[Any, Any, Tensor], tuple[Any, Any]]
"""(x, y, indices) → the mean gradients of the chosen components in x and in y."""
Pair = tuple[Tensor, Tensor]


@runtime_checkable
class Method(Protocol):
    """Any method for a saddle of a finite sum: a state whose vectors x and y `minimax` measures, and its steps."""

    def check_every(self, num_components: int) -> int:
        """Return the steps between two full gradients that the method takes anyway."""

    def start(self, oracle: Gradients, x: Tensor, y: Tensor, generator: torch.Generator) -> Any:
        """Return the state before the first step."""

    def step(self, oracle: Gradients, state: Any, generator: torch.Generator) -> Any:
        """Return the next state; what the old one holds is not written to."""

    def output(self, state: Any) -> Any:
        """Return the point, with x and y, that the method hands out where it ends at `state`."""


class Gradients(Protocol):
    """What a method sees of the problem; x, y and both gradients are vectors."""

    @property
    def num_components(self) -> int:
        """The n of the problem."""

    def full(self, x: Tensor, y: Tensor) -> Pair:
        """Return the gradients of f."""

    def batch(self, x: Tensor, y: Tensor, indices_x: Tensor, indices_y: Tensor) -> Pair:
        """Return the x-gradient of the mean over `indices_x` and the y-gradient of the mean over `indices_y`."""


class Oracle:
    """The user's problem; see the module's description. The last full gradient is kept: asked twice, computed once."""

    def __init__(
        self,
        fun: Fun | None,
        jac: Jac | None,
        num_components: int,
        packings: tuple[Packing, Packing],
        *,
        max_batch: int | None,
        device: torch.device,
    ) -> None:
        _check(fun, jac, num_components, packings, max_batch)
        self.fun, self.jac, self.num_components, self.packings = fun, jac, int(num_components), packings
        self.counts = Counts(nfev=0, nsfo=0)
        self.everything = torch.arange(self.num_components, device=device).split(int(max_batch or num_components))
        self.kept: tuple[Tensor, Tensor, float, Tensor, Tensor] | None = None

    def full(self, x: Tensor, y: Tensor) -> Pair:
        return self.look(x, y)[1:]

    def batch(self, x: Tensor, y: Tensor, indices_x: Tensor, indices_y: Tensor) -> Pair:
        self._count(len(indices_x))
        if indices_x is indices_y:
            return self._gradients(x, y, indices_x)[1:]
        return self._gradients(x, y, indices_x, "x")[1], self._gradients(x, y, indices_y, "y")[2]

    def look(self, x: Tensor, y: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return f and both full gradients; those of the point looked at last are kept, and cost nothing again."""
        if self.kept is None or self.kept[0] is not x or self.kept[1] is not y:
            self._count(self.num_components)
            value, grad_x, grad_y = 0.0, torch.zeros_like(x), torch.zeros_like(y)
            for indices in self.everything:
                share = len(indices) / self.num_components
                part, part_x, part_y = self._gradients(x, y, indices)
                value, grad_x, grad_y = value + share * part, grad_x + share * part_x, grad_y + share * part_y
            self.kept = (x, y, value, grad_x, grad_y)
        return self.kept[2:]

    def _gradients(self, x: Tensor, y: Tensor, indices: Tensor, wanted: str = "xy") -> tuple[float, Tensor, Tensor]:
        """Return the value (NaN where only `jac` is given) and the gradients; what is not wanted may be missing."""
        packing_x, packing_y = self.packings
        if self.jac is None:
            return self._differentiate(x, y, indices, wanted)
        with torch.no_grad():
            grads = self.jac(packing_x.unpack(x), packing_y.unpack(y), indices)
            value = (
                torch.nan if self.fun is None else float(self.fun(packing_x.unpack(x), packing_y.unpack(y), indices))
            )
        if not isinstance(grads, tuple | list) or len(grads) != 2:
            raise UserError(
                f"jac that returns (gradient in x, gradient in y) is needed; got {type(grads).__name__}; return both"
            )
        return value, packing_x.pack(grads[0], x, "the gradient in x"), packing_y.pack(grads[1], y, "the gradient in y")

    def _differentiate(self, x: Tensor, y: Tensor, indices: Tensor, wanted: str) -> tuple[float, Tensor, Tensor]:
        assert self.fun is not None
        packing_x, packing_y = self.packings
        x, y = x.detach().requires_grad_("x" in wanted), y.detach().requires_grad_("y" in wanted)
        with torch.enable_grad():
            value = self.fun(packing_x.unpack(x), packing_y.unpack(y), indices)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"fun that returns a differentiable scalar is needed; got {found}; return the mean over the indices"
            )
        leaves = [leaf for leaf in (x, y) if leaf.requires_grad]
        grads = torch.autograd.grad(value.reshape(()), leaves, materialize_grads=True)
        return float(value.detach()), grads[0], grads[-1]

    def _count(self, num_gradients: int) -> None:
        self.counts.add(nfev=num_gradients, nsfo=num_gradients)


@dataclass(frozen=True)
class Pulled:
    """F(x, y) = f(x, y) + (β/2) ‖x − centre‖²; the extra term is known and costs no oracle call."""

    inner: Gradients
    weight: float
    centre: Tensor

    @property
    def num_components(self) -> int:
        return self.inner.num_components

    def full(self, x: Tensor, y: Tensor) -> Pair:
        return self._pull(x, self.inner.full(x, y))

    def batch(self, x: Tensor, y: Tensor, indices_x: Tensor, indices_y: Tensor) -> Pair:
        return self._pull(x, self.inner.batch(x, y, indices_x, indices_y))

    def _pull(self, x: Tensor, grads: Pair) -> Pair:
        return grads[0] + self.weight * (x - self.centre), grads[1]


def _check(
    fun: Fun | None, jac: Jac | None, num_components: int, packings: tuple[Packing, Packing], max_batch: int | None
) -> None:
    if fun is None and jac is None:
        raise UserError("fun or jac is needed; got neither; give the components' mean, or its gradients")
    if jac is None and any(packing.is_numpy for packing in packings):
        raise UserError("jac is needed where x0 or y0 is a NumPy array; got fun alone; give jac, or start from tensors")
    need_count("num_components", num_components, 1)
    if max_batch is not None:
        need_count("max_batch", max_batch, 1)
