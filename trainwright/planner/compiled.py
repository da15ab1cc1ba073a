"""Plans for one device whose blocks torch compiles: recomputation beyond what the compiler does by itself.

Torch's partitioner keeps less than a step without a compiler, at no cost in time. Where that does not fit, blocks keep a share of
it (`program.compiled_shares`), by the partitioner's own knapsack, and their backward computes the rest anew inside its own fused
kernels. How much each block keeps is chosen for all together. With x[r, a] ∈ {0, 1}, region r keeps share a:

    minimise    Σ t[r, a] · x[r, a]
    subject to  Σ_a x[r, a] = 1                                                            for each region r
                Σ_{q ≤ r, a} s[q, a] · x[q, a] + Σ_a w[r, a] · x[r, a]  ≤  M               for each r, its backward
                Σ_{q < r, a} s[q, a] · x[q, a] + Σ_a v[r, a] · x[r, a]  ≤  M               for each r, its forward
                Σ_{b ≤ a} x[r, b]  ≥  Σ_{b ≤ a} x[r', b]        where r' is the next of r's class, shares in rising order

t, s, and the peaks from which w and v follow (what is alive then, less what earlier regions keep) are measured on a simulated
step in which all regions keep share a. The last rows leave one of all orders of equal blocks: earlier ones keep less, since what
the last ones keep is let go first. The simulation of the mixture has the last word: where it holds more than M, M falls by that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..artifacts import Plan, Predicted, Refusal, SolverInfo, UserError
from ..program.compiled_shares import compiled_section
from ..program.decisions import Decisions
from ..program.plan_text import decisions_of
from .budget import budget_for
from .costs.simulate_compiled import CompiledSimulation, simulate_compiled
from .costs.units import size_text
from .task import Task

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_ATTEMPTS = 8
_GAP = 1e-3
_MOST_NODES = 5_000


def make_compiled_plan(make_plan: Callable[..., Plan], *, solver: str = "joint", **question: Any) -> Plan:
    """Return the fastest compiled plan that fits on one device; `question` is what a `Task` holds, and `make_plan` plans it.

    Raises `Refusal` where even blocks that keep nothing do not fit, with the budget that would do; `UserError` for what a compiled
    plan cannot have.
    """
    began = time.perf_counter()
    task = Task(**question)
    _check(task, solver)
    base = make_plan(solver="joint", **{**question, "budget_bytes": None, "offload": "none", "chunked": None})
    search = _Search(task, decisions_of(task.program, base))
    shares, simulation = search.fastest()
    kept_all = search.uniform(1.0)
    return base.model_copy(
        update={
            "compile": compiled_section(task.program, shares),
            "budget_bytes": task.budget_bytes,
            "predicted": predicted(simulation, kept_all.step_s),
            "solver": SolverInfo(
                name="joint", status="feasible", solve_s=round(search.solve_s, 3), plan_s=round(time.perf_counter() - began, 3)
            ),
            "notes": (*task.program.captured.notes, _note(simulation, len(task.program.regions))),
        }
    ).signed()  # fmt: skip


def check_compiled(plan: Plan, task: Task) -> tuple[Predicted, CompiledSimulation]:
    """Return what a compiled plan takes as it stands; seconds of recomputation are those beyond the compiler's own choice."""
    decisions = decisions_of(task.program, plan)
    simulation = simulated(task, decisions)
    if all(share == 1 for share in (decisions.compiled or {}).values()):
        return predicted(simulation, simulation.step_s), simulation
    alone = replace(decisions, compiled=dict.fromkeys(decisions.compiled or {}, 1.0))
    return predicted(simulation, simulated(task, alone).step_s), simulation


def simulated(task: Task, decisions: Decisions) -> CompiledSimulation:
    """Return the simulation of a compiled step of a task on one device."""
    return simulate_compiled(task.program, decisions, task.make_optimizer, task.cluster, task.num_threads)


def predicted(simulation: CompiledSimulation, kept_all_s: float) -> Predicted:
    """Return a plan's prediction, given the seconds of the step in which all blocks keep what the compiler would."""
    return Predicted(
        step_s=simulation.step_s,
        compute_s=simulation.step_s,
        comm_s=0.0,
        exposed_comm_s=0.0,
        recompute_s=max(0.0, simulation.step_s - kept_all_s),
        update_s=simulation.update_s,
        peak_bytes=simulation.peak_bytes,
        breakdown=simulation.breakdown,
    )


def _note(simulation: CompiledSimulation, num_regions: int) -> str:
    return (
        f"torch compiles {num_regions} parts of the model by themselves: {simulation.num_graphs} different graphs of "
        f"{simulation.num_kernels} kernels, forward and backward; the first step takes as long as that"
    )


def _check(task: Task, solver: str) -> None:
    """Raise `UserError` for what is not planned together with a compiler."""
    cost, program = task.optimizer_cost, task.program
    wants = {
        f"one device; {task.cluster.name} has {task.cluster.num_devices}, whose exchanges cut the graphs": task.cluster.num_devices
        != 1,
        "one batch a step; micro-batches were asked for": program.num_runs > 1 or task.variants is not None,
        "no pipeline stages; some were asked for": task.pipeline is not None,
        "exact gradients; --sampled was given": task.sampled > 0,
        "whole logits; --loss-chunks was given": program.captured.loss_chunks > 0,
        "nothing offloaded; a place to offload to was given": task.offload in ("host", "disk"),
        "no tier; --tier was given": task.tier is not None,
        "no pins, for blocks are compiled as they are; some were given": bool(task.pins),
        f"the solver joint; {solver} was given": solver != "joint",
        "one backward a step; the loss is differentiated twice": task.goes_again or cost.differentiates_twice,
    }
    for text, is_wrong in wants.items():
        if is_wrong:
            raise UserError(f"a compiled plan (--compile) needs {text}; change that, or leave --compile out")


class _Search:
    """The search for the shares: simulated steps, of uniform shares and of mixtures."""

    def __init__(self, task: Task, decisions: Decisions) -> None:
        self.task, self.decisions = task, decisions
        self.regions = task.program.regions
        self.solve_s = 0.0
        self._uniform: dict[float, CompiledSimulation] = {}

    def fastest(self) -> tuple[dict[int, float], CompiledSimulation]:
        """Return the shares by region, and the simulation of the step with them."""
        usable, kept_all = self.task.usable_bytes, self.uniform(1.0)
        if usable is None or kept_all.peak_bytes <= usable:
            return {}, kept_all
        if self.uniform(0.0).peak_bytes > usable and (least := self._least()).peak_bytes > usable:
            raise self._refusal(usable, least)
        return self._mixed(usable)

    def uniform(self, share: float) -> CompiledSimulation:
        """Return the simulation in which all regions keep `share`."""
        if share not in self._uniform:
            self._tell(f"what a step takes whose blocks keep {share:g} of what the compiler would")
            self._uniform[share] = self._simulated(dict.fromkeys((region.index for region in self.regions), share))
        return self._uniform[share]

    def _least(self) -> CompiledSimulation:
        """Return the simulation of the mixture that holds least: nothing kept is not always that, where a rerun holds more."""
        found = self._solved(None)
        mixed = self._simulated(found)
        return min(mixed, *self._uniform.values(), key=lambda each: each.peak_bytes)

    def _mixed(self, usable: int) -> tuple[dict[int, float], CompiledSimulation]:
        rows = usable
        fitting: list[tuple[dict[int, float], CompiledSimulation]] = [
            (dict.fromkeys(self.by_region, share), found)
            for share, found in self._uniform.items()
            if found.peak_bytes <= usable
        ]
        for _ in range(_ATTEMPTS):
            shares = self._solved(rows)
            if shares is None:
                break
            found = self._simulated(shares)
            if found.peak_bytes <= usable:
                fitting.append((shares, found))
                break
            rows -= found.peak_bytes - usable
        if not fitting:
            raise self._refusal(usable, self._least())
        return min(fitting, key=lambda item: item[1].step_s)

    @property
    def by_region(self) -> Sequence[int]:
        return [region.index for region in self.regions]

    def _simulated(self, shares: Mapping[int, float] | None) -> CompiledSimulation:
        return simulated(self.task, replace(self.decisions, compiled=dict(shares or {})))

    def _solved(self, budget: int | None) -> dict[int, float] | None:
        """Return the shares that the rows allow within `budget` (None: those of least peak), or None if there are none."""
        began = time.perf_counter()
        simulations = [self.uniform(share) for share in SHARES]
        found = choose([each.spans for each in simulations], self._next_alike(), budget)
        self.solve_s += time.perf_counter() - began
        if found is None:
            return None
        spans = simulations[0].spans
        return {span.region: SHARES[at] for span, at in zip(spans, found)}

    def _next_alike(self) -> list[tuple[int, int]]:
        """Return the pairs of spans, by place, of which the second is the next member of the first one's class."""
        places = {span.region: place for place, span in enumerate(self.uniform(1.0).spans)}
        found = []
        for region_class in self.task.program.classes:
            own = [places[region.index] for region in region_class.members if region.index in places]
            found += list(itertools.pairwise(own))
        return found

    def _refusal(self, usable: int, least: CompiledSimulation) -> Refusal:
        more = budget_for(least.peak_bytes, self.task.divisor)
        return Refusal(
            f"a peak of at most {size_text(usable)} is needed; compiled blocks that keep next to nothing take "
            f"{size_text(least.peak_bytes)}, at {least.peak_at}; a budget of {size_text(more, up=True)} would do, or a smaller "
            "batch, or plan without --compile, which also takes micro-batches"
        )

    def _tell(self, text: str) -> None:
        if self.task.progress is not None:
            self.task.progress(text)


def choose(costs: Sequence[Sequence[Any]], alike: Sequence[tuple[int, int]], budget: int | None) -> list[int] | None:
    """Return the option that each region takes, by its index in `costs`; None where no choice is within `budget`.

    costs: for each option, in rising order of what it keeps, the `SpanCost` of every region, in the order of the forward.
    alike: pairs of regions of which the second may keep no less than the first. budget: bytes; None: the least peak is looked for.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # every plan would take its time to import

    num_options, num_regions = len(costs), len(costs[0])
    num = num_options * num_regions  # x[r, a] stands at r * num_options + a; the last column is the peak
    saved, seconds, back, forth = (
        np.array([[float(getattr(span, name)) for span in option] for option in costs]).T
        for name in ("saved_bytes", "seconds", "backward_peak", "forward_peak")
    )  # regions × options
    until = np.cumsum(saved, axis=0)
    scale = max(float(back.max()), float(forth.max()), 1.0)
    rows, low, high = [], [], []

    def add(row: np.ndarray, least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for region in range(num_regions):
        one = np.zeros(num + 1)
        one[region * num_options : (region + 1) * num_options] = 1.0
        add(one, 1.0, 1.0)
        for peaks, is_kept in ((back, True), (forth, False)):
            if not peaks[region].any():
                continue
            last = region + 1 if is_kept else region
            before = until[last - 1] if last else np.zeros(num_options)
            row = np.zeros(num + 1)
            row[: last * num_options] = saved[:last].ravel()
            row[region * num_options : (region + 1) * num_options] += peaks[region] - before
            row[-1] = -scale
            add(row / scale, -np.inf, 0.0)
    for first, second in alike:
        for option in range(num_options - 1):
            row = np.zeros(num + 1)
            row[first * num_options : first * num_options + option + 1] = 1.0
            row[second * num_options : second * num_options + option + 1] = -1.0
            add(row, 0.0, np.inf)
    objective = np.zeros(num + 1)
    if budget is None:
        objective[-1] = 1.0
    else:
        objective[:num] = seconds.ravel() / max(float(seconds.sum()), 1e-30)
    most = np.inf if budget is None else budget / scale
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(np.zeros(num + 1), np.append(np.ones(num), most)),
        integrality=np.append(np.ones(num), 0),
        options={"mip_rel_gap": _GAP, "node_limit": _MOST_NODES},
    )
    if found.x is None:
        return None
    return [int(at) for at in found.x[:num].reshape(num_regions, num_options).argmax(axis=1)]
