"""The solvers by name, for `trainwright solve`: each a frozen record of where its function is and what it is for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from ..artifacts import UserError
from .outcome import Result


@dataclass(frozen=True)
class Solver:
    """One function that returns a `Result`."""

    name: str
    """`family.function`; the first of a family goes by the family's name too."""
    summary: str

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def function(self) -> Callable[..., Result]:
        family, _, function = self.name.partition(".")
        found: Callable[..., Result] = getattr(importlib.import_module(f".{family}", __package__), function)
        return found


_SOLVERS = (
    Solver("minimax.minimax", "min over x, max over y of a finite sum"),
    Solver("bilevel.bilevel", "min over x of f(x, y(x)), y(x) the minimiser of another problem"),
    Solver("online.play", "decisions round by round"),
    Solver("policy.learn", "a policy from few trajectories"),
    Solver("transport.solve_sns", "entropic transport by sparse Newton steps"),
    Solver("transport.solve_sinkhorn", "entropic transport by Sinkhorn's iterations"),
    Solver("linear.solve_ssor_pcg", "a symmetric positive definite system by preconditioned conjugate gradients"),
    Solver("linear.solve_sor", "a linear system by over-relaxation"),
    Solver("linear.solve_dcdm", "a symmetric positive definite system along directions of a model"),
    Solver("constrained.solve_ai_sqp", "a smooth objective under equality constraints"),
    Solver("consensus.minimize", "a global minimum from function values"),
    Solver("convex_nets.solve_relu_programme", "a two-layer ReLU network by its convex programme"),
)


def solvers() -> tuple[Solver, ...]:
    """Return all solvers, those of a family together, its default first."""
    return _SOLVERS


def solver(name: str) -> Solver:
    """Return the solver of this name, or the first of the family of this name; `UserError` with the names for any other.

    >>> solver("transport").name, solver("linear.solve_sor").family
    ('transport.solve_sns', 'linear')
    """
    known: dict[str, Solver] = {}
    for each in _SOLVERS:
        known.setdefault(each.family, each)
        known[each.name] = each
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "choose one"
        raise UserError(f"a solver is needed, one of {', '.join(each.name for each in _SOLVERS)}; got {name!r}; {hint}")
    return known[name]
