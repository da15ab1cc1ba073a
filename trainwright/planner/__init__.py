"""Program + cluster + budget → `Plan`: layouts and recomputation chosen together, then simulated."""

from .explain import Explanation, explain
from .frontier import frontier
from .micro_batches import Variants
from .plan import check, compare, make_plan
from .recipes import RECIPES
from .simulate import Simulation, simulate
from .task import Task

__all__ = [
    "RECIPES",
    "Explanation",
    "Simulation",
    "Task",
    "Variants",
    "check",
    "compare",
    "explain",
    "frontier",
    "make_plan",
    "simulate",
]
