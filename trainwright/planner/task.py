"""One planning question, and the same on one mesh: what the solver is given, and what it asks back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from ..artifacts import DEFAULT_IMBALANCE, Cluster, MeshAxis, ModelRef, UserError
from ..hardware import machine, threads_each
from ..profiler.saved import Records, record
from ..program.decisions import Decisions, Overlap
from ..program.program import Program
from ..program.sampling import check_sampling
from ..rank.execute import Executor
from ..rank.local import build_local
from ..rank.reshard import SimulatedCommunicator
from .budget import divisor_for, usable_bytes
from .costs.costs import OptimizerCost, cost_model
from .costs.known_updates import KnownUpdates, MakeOptimizer
from .costs.price import Price, price
from .costs.resting import room_of
from .costs.simulate import Simulation, simulate
from .meshes import mesh_shapes
from .model.deadline import Deadline
from .problem.build import build_problem
from .problem.pins import apply_pins
from .problem.problem import Problem
from .problem.recipes import Restriction, restriction
from .search.placement import best_placed
from .search.progress import Best, ProgressLine
from .search.solve import Answer, Settings, Solver

if TYPE_CHECKING:
    from ..tiers import Policy
    from .pipeline.measure import Outline
    from .variants import ChunkedLoss, Variants

_SIMULATED_OP_S = 1.5e-3
"""The work of simulating one op: its forward, backward and update on fake tensors."""
OFFLOADS = ("auto", "host", "disk", "none")


@dataclass(eq=False)
class Task:
    """One planning question: what to train, on what, with how much memory."""

    program: Program
    model_ref: ModelRef
    cluster: Cluster
    budget_bytes: int | None
    optimizer: str
    optimizer_cost: OptimizerCost
    make_optimizer: MakeOptimizer
    mesh: tuple[int, ...] | None = None
    dtype: str = "fp32"
    autocast: str | None = None
    pins: tuple[str, ...] = ()
    literals: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: str | None = None
    offload: str = "auto"
    """Where tensors may be offloaded to: host, disk, none, or auto: to the host of a GPU, where memory binds and it is faster."""
    imbalance: float = DEFAULT_IMBALANCE
    """By how much a rank's experts may get more rows than their even share."""
    sampled: float = 0.0
    """The share of its rows that a linear map may keep for its weight's gradient, which is then an estimate; 0: none may."""
    time_limit_s: float = 30.0
    """What one search may take, and from its beginning, until `deadline`, all of them together."""
    deadline: Deadline = field(default_factory=Deadline)
    keep_graph: bool = False
    """Whether the loss is differentiated more than once, as an optimizer that takes it with its graph does anyway."""
    chunked: ChunkedLoss | None = None
    """The same step with its loss in chunks, where that is left to the search."""
    pipeline: int | str | None = None
    """Into how many stages the blocks are cut: a number, `auto`, or None for no stages."""
    pipeline_schedule: str = "auto"
    """In which order stages work: `1f1b` (GPipe and deeper warm-ups too), `interleaved`, `zero-bubble`, or the fastest of them."""
    num_stages: int = 1
    """So many times the devices of `cluster` take part: it is one stage's."""
    variants: Variants | None = None
    """The same batch in several micro-batches, where their number is to be chosen."""
    progress: Callable[[str], None] | None = None
    """Told, in words, how far the search is: which solver, seconds of how many, the best so far and what is proven."""
    tier: Policy | None = None
    """The use of the tier on which parameters, gradients and states rest, by which the plan predicts traffic; None: no tier."""
    best: Best = field(default_factory=Best)
    """The fastest step that was found to fit so far, of all meshes and micro-batches."""

    def __post_init__(self) -> None:
        if self.offload not in OFFLOADS:
            raise UserError(f"a place to offload to is one of {', '.join(OFFLOADS)}; got {self.offload!r}")
        asked = {self.offload, None if self.tier is None else self.tier.place}
        if "host" in asked and self.cluster.device.kind == "cpu" and "host" not in self.cluster.offload:
            raise UserError(
                "a place to offload to other than the device's own memory is needed; host is the memory of a CPU; try disk, or "
                "a hardware file with `offload` `host` (calibrate), where the device is to be a budget within that memory"
            )
        if self.offload in ("host", "disk"):
            self.cluster.tier(self.offload)
        if self.sampled:
            check_sampling(self.program, self.sampled)
        if self.tier is not None:
            self._check_tier(self.tier)
            self.cluster.tier(self.tier.place)  # whose rates price what moves

    def _check_tier(self, tier: Policy) -> None:
        """Raise `UserError` for a question whose plan cannot rest on this tier."""
        kind, has_parts = self.cluster.device.kind, self.program.num_runs > 1 or self.variants is not None
        others = {"host", "disk"} - {tier.place}
        wants = {
            f"CPUs, if it is of disks; the hardware is a {kind}, which has a host (--tier host)": tier.place == "disk"
            and kind != "cpu",
            f"activations on the same tier; they were to go to the {self.offload} (--offload {tier.place}, or none)": self.offload
            in others,
            "one batch a step; there are micro-batches, whose gradients add up in memory": has_parts,
            "no pipeline stages; some were asked for": self.pipeline is not None,
            f"an optimizer that updates each parameter by itself; {self.optimizer} does not": not self.optimizer_cost.updates_alone,
        }
        for text, is_wrong in wants.items():
            if is_wrong:
                raise UserError(f"a plan with a tier needs {text}; change that, or leave --tier out")

    @property
    def goes_again(self) -> bool:
        """Whether a backward goes through the graph more than once, so that everything has to stay in it."""
        return self.keep_graph or self.optimizer_cost.needs_loss

    @property
    def optimizer_fields(self) -> dict[str, Any]:
        """What the plan says of its optimizer."""
        fields = getattr(self.optimizer_cost, "fields", None)
        return {"optimizer": self.optimizer} if fields is None else fields()

    @property
    def tier_name(self) -> Literal["host", "disk"] | None:
        """The tier that may be offloaded to; what rests on one has activations beside it, unless they are to stay."""
        if self.tier is not None and self.offload == "auto":
            return "host" if self.tier.place == "host" else "disk"
        return self.offload if self.offload in ("host", "disk") else None  # type: ignore[return-value]

    @property
    def has_host(self) -> bool:
        """Whether the devices have memory beside their own, and the hardware says how fast it is."""
        return "host" in self.cluster.offload and self.cluster.device.kind == "gpu"

    @property
    def furthest_overlap(self) -> Overlap:
        """How far ahead parameters may travel, where it is known what that holds and worth it.

        On CPUs nothing is hidden, since the cores that compute are those that communicate, and what is under way is let go
        when the transport has it, not when the program says so. What buckets hold over several runs is not known. An optimizer that
        takes the loss with its graph goes through it more than once: what travels in buckets, is rederived or comes back from
        elsewhere does so once, so such a plan has none of it. Stages have several runs, whatever the program has.
        """
        if self.program.num_runs > 1 or self.goes_again or self.num_stages > 1:
            return "none"
        return "buckets" if self.cluster.device.kind == "cpu" else "ahead"

    @cached_property
    def records(self) -> Records:
        """What every op saves and costs."""
        return record(self.program, self.cluster.device.kind)

    @cached_property
    def outline(self) -> Outline:
        """Where the program may be cut into stages."""
        from .pipeline.measure import Outline

        return Outline(self.program)

    @cached_property
    def num_threads(self) -> int | None:
        """With how many threads a rank will run, where the ranks are processes of this machine."""
        if self.cluster.device.kind != "cpu" or self.cluster.fingerprint != machine.fingerprint():
            return None
        return threads_each(self.cluster.num_devices * self.num_stages)

    @property
    def divisor(self) -> int:
        """The share of a budget that this program leaves on this cluster."""
        return divisor_for((op.name for op in self.program.ops), self.cluster.device.kind)

    @property
    def usable_bytes(self) -> int | None:
        """The largest simulated peak that is taken to fit."""
        if self.budget_bytes is None:
            return None
        return usable_bytes(self.budget_bytes, self.divisor)

    def listener(self, solver: str, mesh: str) -> ProgressLine | None:
        """Return what tells of the search on one mesh; None where nobody listens."""
        if self.progress is None:
            return None
        return ProgressLine(self.progress, f"{solver} on mesh {mesh}", self.deadline, self.best)

    @cached_property
    def places(self) -> list[Place]:
        """The meshes to look at; pins name the axes of the cluster's own, or of the one that is asked for."""
        if self.mesh is not None:
            return [Place(self, self.cluster.mesh(self.mesh))]
        return self.places_on(mesh_shapes(self.cluster)[: 1 if self.pins else None])

    def places_on(self, shapes: Sequence[tuple[int, ...]]) -> list[Place]:
        """Return the places of `shapes`, with what has been found out about them already."""
        for shape in shapes:
            if shape not in self._places:
                self._places[shape] = Place(self, self.cluster.mesh(shape))
        return [self._places[shape] for shape in shapes]

    _places: dict[tuple[int, ...], Place] = field(default_factory=dict, init=False)


@dataclass(eq=False)
class Place:
    """A task on one mesh."""

    task: Task
    axes: tuple[MeshAxis, ...]
    _overlapped: tuple[Answer, Answer, Price] | None = field(default=None, init=False)
    """The last answer that was overlapped, and what came of it."""
    _updates: KnownUpdates = field(default_factory=KnownUpdates, init=False)

    @property
    def shape(self) -> str:
        return "x".join(str(axis.size) for axis in self.axes)

    @cached_property
    def problem(self) -> Problem:
        """The options and their costs."""
        task = self.task
        num_passes = task.optimizer_cost.num_passes
        costs = cost_model(
            task.program, task.cluster.device, self.axes, task.records, num_passes, task.imbalance, task.sampled
        )
        if task.tier is not None:
            costs.tier, costs.resting = task.cluster.tier(task.tier.place), task.tier
        elif task.tier_name is not None:
            costs.tier = task.cluster.tier(task.tier_name)
        return build_problem(task.program, costs, task.optimizer_cost)

    @cached_property
    def solver(self) -> Solver:
        """The solver, with what it has already built."""
        return Solver(self.problem, self.simulate, self.task.furthest_overlap)

    def simulate(self, decisions: Decisions, timeline: bool = False) -> Simulation:
        """Run the fullest rank's step on fake tensors."""
        task = self.task
        task.deadline.count(_SIMULATED_OP_S * len(task.program.ops))
        target, costs = task.cluster.device.kind, self.problem.costs
        rests: dict[str, Any] = {}
        if costs.resting is not None:
            room = partial(room_of, costs=costs, optimizer=task.optimizer_cost)
            rests = {"room_of": room, "moved": costs.resting.moved}
        return simulate(
            task.program, decisions, task.make_optimizer, target=target, timeline=timeline, num_threads=task.num_threads,
            optimizer_cost=task.optimizer_cost, known=self._updates, **rests,
        )  # fmt: skip

    def price(self, simulation: Simulation) -> Price:
        """Price what was simulated."""
        return price(simulation.executor, self.problem.costs, self.task.optimizer_cost)

    def price_of(self, decisions: Decisions) -> Price:
        """Price a plan that keeps everything on the device without simulating what it holds."""
        local = build_local(self.task.program, decisions, SimulatedCommunicator(decisions.mesh))
        return price(Executor(local), self.problem.costs, self.task.optimizer_cost)

    def restriction(self, solver: str) -> Restriction:
        """Return what the recipe and the user's pins leave to choose."""
        found = restriction(self.problem, solver)
        if self.task.goes_again:
            found.recompute = found.offload = False
        found.leave = self.task.tier_name is not None
        apply_pins(self.problem, self.task.pins, found)
        return found

    def settings(self, recipe: str, cutoff_s: float = math.inf) -> Settings:
        """Return what a search by `recipe` is told; an answer that takes `cutoff_s` or more is not wanted."""
        task = self.task
        return Settings(
            task.usable_bytes, task.time_limit_s, self.restriction(recipe), task.listener(recipe, self.shape), cutoff_s,
            task.deadline, self.solver.effort,
        )  # fmt: skip

    def overlapped(self, answer: Answer) -> tuple[Answer, Price]:
        """Return an answer with its parameters travelling as far ahead as the budget allows, and its price."""
        if self._overlapped is None or all(answer is not known for known in self._overlapped[:2]):
            task = self.task
            found = answer.overlapped(self.simulate, task.usable_bytes, task.furthest_overlap)
            price = self.price(found.simulation)
            if self.problem.costs.resting is not None and not task.pins:
                costs = self.problem.costs
                placed = best_placed(found, price, costs, task.optimizer_cost, task.usable_bytes, self.simulate)
                if placed is not None:
                    found, price = placed[0], self.price(placed[1])
            self._overlapped = answer, found, price
        return self._overlapped[1:]
