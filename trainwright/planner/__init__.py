"""Program + cluster + budget → `Plan`: layouts and recomputation chosen together, then simulated."""

from .explain import Explanation, explain
from .plan import Task, check, compare, make_plan
from .recipes import RECIPES
from .simulate import Simulation, simulate

__all__ = ["RECIPES", "Explanation", "Simulation", "Task", "check", "compare", "explain", "make_plan", "simulate"]
