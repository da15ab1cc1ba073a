"""Program + cluster + budget → `Plan`: layouts and recomputation chosen together, then simulated."""

from .costs.simulate import Simulation, simulate
from .explain import explain
from .frontier import frontier
from .pipeline.price import schedule_of
from .pipeline.recipes import PIPELINE_RECIPES
from .plan import check, compare, make_plan, simulate_plan
from .problem.recipes import RECIPES
from .shapes import Shaped, check_alike, check_shapes, largest, make_plan_for
from .task import Task
from .variants import ChunkedLoss, Variants

__all__ = [
    "PIPELINE_RECIPES",
    "RECIPES",
    "ChunkedLoss",
    "Shaped",
    "Simulation",
    "Task",
    "Variants",
    "check",
    "check_alike",
    "check_shapes",
    "compare",
    "explain",
    "frontier",
    "largest",
    "make_plan",
    "make_plan_for",
    "schedule_of",
    "simulate",
    "simulate_plan",
]
