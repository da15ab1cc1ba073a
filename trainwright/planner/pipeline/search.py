"""Searches for pipeline stages, over numbers of stages, meshes of a stage, micro-batches and layouts.

For each case that its bound does not rule out, the solver gives layouts on one stage's ranks: the fastest ones, and those that
rest in ever less (`layouts`). For each layout there are a table (`measure`), cuts to start from (`program`,
`recipes`) and the fastest stages that moves reach (`cuts`), with one piece a stage, with several, and with a split backward.
Actions of these stages are then run on fake tensors: if a peak differs from its estimate, the table learns the difference, and
the levels are chosen anew, until all stages are within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...artifacts import Cluster, Refusal, UserError
from ...program.decisions import Decisions
from ...program.stages import cut
from ...rank.stage_actions import Schedule
from ..budget import budget_for
from ..costs.price import Price
from ..costs.units import size_text
from ..incumbent import Found
from ..meshes import MAX_AXES, mesh_shapes
from ..problem.problem import Decision
from ..search.answer import Answer
from ..search.effort import GAP
from ..task import Place, Task
from .ask import begin_pins, check_task, numbers_of_stages, schedules
from .cuts import Cuts, Judge, Staged, depths_of, fastest, leanest, nothing_fits_bytes
from .floors import Floors, add_tied
from .layouts import layouts_for
from .measure import Measured, Outline, measure
from .price import PricedStages, hops_of, price_stages, simulate_stages
from .program import Least, bound_s, propose
from .recipes import PIPELINE_RECIPES, recipe_cuts
from .table import Spans, Table

MAX_CORRECTIONS = 6
"""The most times that one table learns from simulations."""
CLOSE = 0.01
"""The share of the budget that a stage with reruns may leave unused; if it leaves more, levels are chosen again."""
PIECES_A_STAGE = (2, 3, 4)
"""The numbers of pieces a stage that are tried with interleaved stages."""
_CAPTURED_OP_S, _RUN_OP_S, _CELL_S = 6e-4, 5e-4, 5e-6
"""The work of capturing an op, of running one on fake tensors, and of a stage that begins and ends with some units, in a bound."""
_FIT_S = 3e-4
"""The work of choosing the levels of a stage that may offload."""
_RUNS_OF_STAGE = 6
"""The forwards and backwards of the micro-batches of a stage on which its actions are measured."""
MICRO_BATCHES_A_STAGE = 8
"""The most micro-batches a stage that are tried if their number is to be chosen."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Stages that fit by what their actions add, with all that it takes to simulate them."""

    case: Case
    measured: Measured
    judge: Judge
    staged: Staged

    @property
    def step_s(self) -> float:
        return self.staged.step_s


@dataclass(frozen=True, eq=False)
class StagedAnswer:
    """An answer of the search: stages with all that a plan records of them."""

    cluster: Cluster
    """The whole hardware, not one stage's part of it."""
    begins: tuple[str, ...]
    schedule: Schedule
    decisions: Decisions
    priced: PricedStages

    @property
    def step_s(self) -> float:
        return self.priced.predicted.step_s


class NotAllSeen(Exception):
    """Raised if no faster stages were found and the time limit left some cases unseen."""

    def __init__(self, unseen: Sequence[str]) -> None:
        super().__init__(
            f"the time limit left no time for {len(unseen)} ways to cut into stages, {unseen[0]} among them"
        )
        self.unseen = tuple(unseen)


class NoStagesFit(Refusal):
    """Raised if no stages fit; `least_bytes` is an estimate of the smallest budget that suffices."""

    def __init__(self, text: str, least_bytes: float) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


def fastest_stages(task: Task, solver: str = "joint", cutoff_s: float = math.inf) -> Found | None:
    """Return the fastest plan with stages; None if none takes less than `cutoff_s`; raise `Refusal` if none fits.

    solver: `joint`, or a recipe for the cuts: `even`, `balanced`, `pipeline-dp`.
    """
    if solver not in PIPELINE_RECIPES:
        raise UserError(
            f"a solver that cuts stages is needed, one of {', '.join(PIPELINE_RECIPES)}; got {solver!r}; leave --pipeline out "
            "for the others"
        )
    check_task(task)
    search = _Search(task, solver, cutoff_s)
    for num_stages, shape, num in search.in_order():
        if search.is_late(num_stages, shape, num) or search.is_hopeless(num_stages, shape, num):
            continue
        if (whole := search.variant(num)) is not None:
            search.look_at(Case(whole, task.cluster, num_stages, shape, begin_pins(task, num_stages)))
    search.look_at_offloading()
    return search.found()


def come_first(alone: Task) -> bool:
    """Return true if stages are looked at before plans without any, which `alone` asks for: where memory binds those.

    The fastest plan without stages is soon found where it fits as it is, and rules most stages out. Where it does not, it gives
    time for memory, and to find how much takes long without something to beat.
    """
    usable, place = alone.usable_bytes, alone.places[0]
    if usable is None:
        return False
    # the way in which parameters travel that is searched first, whose rows are then there already
    solver = place.solver.travelling(place.solver.travel) if place.solver.hides else place.solver
    return solver.kept_bytes(place.settings("joint")) > usable


def is_thorough(task: Task) -> bool:
    """Return true if there is time for further layouts, and for tables that seem slower: where the number of stages is asked for.

    With `auto` the time is better spent on other numbers, and on plans without stages.
    """
    return task.pipeline != "auto"


def _numbers(task: Task, num_stages: int) -> list[int]:
    """Return the numbers of micro-batches to look at, those first that are nearest to four a stage."""
    variants = task.variants
    if variants is None:
        return [task.program.num_runs]
    numbers = [num for num in variants.numbers if 2 <= num <= MICRO_BATCHES_A_STAGE * num_stages]
    return sorted(numbers, key=lambda num: (abs(math.log(num / (4 * num_stages))), num))


def _shapes(task: Task, num_stages: int) -> list[tuple[int, ...]]:
    """Return the meshes of one stage to try; with the stages they have as many axes as meshes without them."""
    inner = task.cluster.of_stage(num_stages)
    if task.mesh is not None:
        inner.mesh(task.mesh)
        return [task.mesh]
    own, *others = mesh_shapes(inner)
    return [own, *([] if task.pins else [shape for shape in others if len(shape) < MAX_AXES])]


@dataclass(eq=False)
class Case:
    """One case of the search: a number of stages, a number of micro-batches, and a mesh of one stage."""

    whole: Task
    cluster: Cluster
    num_stages: int
    shape: tuple[int, ...]
    fixed: Mapping[int, str] = field(default_factory=dict)
    """The blocks at which stages are pinned to begin, by stage."""

    @property
    def offload(self) -> str:
        """Return where stages may offload to: the host of a GPU unless anything else was asked for; a CPU's is its own memory."""
        left_open = "host" if self.whole.has_host else "none"
        return left_open if self.whole.offload == "auto" else self.whole.offload

    @cached_property
    def task(self) -> Task:
        """Return the task on one stage's ranks."""
        pins = tuple(pin for pin in self.whole.pins if "=begin(" not in pin)
        inner = self.cluster.of_stage(self.num_stages)
        found = replace(
            self.whole, cluster=inner, mesh=self.shape, variants=None, offload=self.offload, pins=pins,
            pipeline=None, num_stages=self.num_stages,
        )  # fmt: skip
        found.records = self.whole.records  # the same program on the same kind of device
        return found

    @cached_property
    def place(self) -> Place:
        (place,) = self.task.places
        add_tied(place.problem, self.outline, hops_of(self.cluster, self.num_stages))
        return place

    @cached_property
    def outline(self) -> Outline:
        return self.whole.outline

    @property
    def num_micro_batches(self) -> int:
        return self.task.program.num_runs

    @property
    def budget_bytes(self) -> float:
        usable = self.task.usable_bytes
        return math.inf if usable is None else usable

    @cached_property
    def floors(self) -> Floors:
        return Floors(self.place.problem, self.outline, self.place.solver)

    def bound_s(self, num: int, to_beat_s: float = math.inf) -> float:
        """Return a lower bound in seconds of every step in `num` micro-batches on this mesh, in any order that may be chosen.

        num: as many as the program's, or more, which compute as much together and launch each call once more. to_beat_s: a bound
        that is no less will do.
        """
        whole_s = self.floors.whole_s(num)
        quick_s = self._bound_s(self.floors.least(num), whole_s, num)
        if quick_s >= to_beat_s:
            return quick_s
        return max(quick_s, self._bound_s(self.floors.nearer(num), whole_s, num))

    def _bound_s(self, least: Sequence[Least], whole_s: float, num: int) -> float:
        names = [name for name in schedules(self.whole) if name != "interleaved" or self._numbers_of_pieces(num)]
        return min(bound_s(least, whole_s, self.num_stages, num, name) for name in names or schedules(self.whole))

    def layouts(self) -> list[Mapping[Decision, int]]:
        """Return the layouts to try: the fastest, and some that take less memory at rest."""
        room = self.num_stages * self.budget_bytes
        return layouts_for(self.place.solver, self.place.settings("joint"), room, is_thorough(self.whole))

    def measured(self, options: Mapping[Decision, int]) -> Measured:
        hops = hops_of(self.cluster, self.num_stages)
        return measure(self.place.problem, self.outline, options, hops, self.task.cluster.device.kind)

    def judge(self, measured: Measured) -> Judge:
        """Return a judge of cuts that keeps the pinned ones."""
        names = measured.outline.names
        fixed = {stage: names.index(name) + 1 for stage, name in self.fixed.items()}
        return Judge(measured.table, self.budget_bytes, fixed)

    def judges(self, measured: Measured) -> list[Judge]:
        """Return a judge for each allowed schedule."""
        plain, found = self.judge(measured), []
        for name in schedules(self.whole):
            if name == "1f1b":
                found.append(plain)
            elif name == "zero-bubble":
                found.append(replace(plain, table=plain.table.scheduled(splits_backward=True)))
            else:
                numbers = self._numbers_of_pieces(self.num_micro_batches)
                found += [replace(plain, table=plain.table.scheduled(num)) for num in numbers]
        return found

    def _numbers_of_pieces(self, num_micro_batches: int) -> list[int]:
        """Return how many pieces interleaved stages may have: groups of as many micro-batches as stages are whole."""
        if num_micro_batches % self.num_stages or self.fixed:
            return []
        return [num for num in PIECES_A_STAGE if num * self.num_stages <= len(self.outline.regions)]


class _Search:
    """Looks at one case after the other, and holds the fastest stages and the bound."""

    def __init__(self, task: Task, solver: str, cutoff_s: float) -> None:
        self.task, self.solver, self.cutoff_s = task, solver, cutoff_s
        self.candidates: list[_Candidate] = []
        """Each is faster than those before it."""
        self.bound_s = math.inf
        self.kept: list[tuple[float, Case, list[Measured]]] = []
        """The cases that were looked at without offloading, which is possible there, with their bounds and tables."""
        self.unseen: list[str] = []
        self.least: list[tuple[float, int, Case]] = []
        self.was_slower = False
        self._excess: dict[tuple[Case, tuple[int, bool]], dict[tuple[bool, bool], float]] = {}
        """The least excess that a table of a case learned, by the order in which stages work and by a stage's ends."""
        self._wholes: dict[tuple[int, tuple[int, ...]], Case] = {}
        self._captured: set[int] = set()

    def in_order(self) -> list[tuple[int, tuple[int, ...], int]]:
        """Return all numbers of stages, meshes of one and numbers of micro-batches, those first that even stages are fastest for.

        Of what the whole batch takes at least, even stages of m micro-batches take (m + P - 1) / (m P).
        """
        task = self.task
        found = [
            (num_stages, shape, num)
            for num_stages in numbers_of_stages(task)
            for num in _numbers(task, num_stages)
            for shape in _shapes(task, num_stages)
        ]
        return found if task.variants is None else sorted(found, key=self._even_s)

    def _even_s(self, way: tuple[int, tuple[int, ...], int]) -> float:
        num_stages, _, num = way
        return self._share_s(*way) * (num + num_stages - 1) / num

    def is_late(self, num_stages: int, shape: tuple[int, ...], num: int) -> bool:
        """True if there is a plan, and no time for more."""
        late = math.isfinite(self._to_beat) and self.task.deadline.has_passed
        if late:
            self.unseen.append(_name(num_stages, shape, num))
        return late

    def is_hopeless(self, num_stages: int, shape: tuple[int, ...], num: int) -> bool:
        """True if no stages of `num` micro-batches can beat the incumbent, by the program of the whole batch alone."""
        least_s, hopeless = self._to_beat * (1 - GAP), False
        if self.task.variants is not None and math.isfinite(least_s):
            whole = self._whole(num_stages, shape)
            hopeless = self._share_s(num_stages, shape, num) >= least_s
            self._count(_CELL_S * num_stages * len(whole.outline.regions) ** 2)
            if not hopeless and len(whole.outline.regions) >= num_stages:
                hopeless = whole.bound_s(num, least_s) >= least_s
        self.was_slower |= hopeless
        return hopeless

    def variant(self, num: int) -> Task | None:
        """Return the task of so many micro-batches, if that can be."""
        task = self.task
        if task.variants is None:
            return task
        found = task.variants.task_of(task, num)
        if found is not None and num not in self._captured:
            self._captured.add(num)
            self._count(_CAPTURED_OP_S * len(found.program.ops))
        return found

    def _share_s(self, num_stages: int, shape: tuple[int, ...], num: int) -> float:
        """Return what the busiest of the stages takes at least, by the whole batch."""
        return self._whole(num_stages, shape).floors.whole_s(num) / num_stages

    def _whole(self, num_stages: int, shape: tuple[int, ...]) -> Case:
        """Return the batch in one piece on a mesh of one stage."""
        if (num_stages, shape) not in self._wholes:
            self._wholes[num_stages, shape] = Case(self.task, self.task.cluster, num_stages, shape)
        return self._wholes[num_stages, shape]

    def look_at(self, case: Case) -> None:
        """Find the fastest stages of a case, unless its bound or the time limit rules it out."""
        num_pieces = len(case.outline.regions)
        self._count(_CELL_S * case.num_stages * num_pieces**2)
        if num_pieces < case.num_stages:
            if self.task.pipeline != "auto":
                numbers = ", ".join(str(n) for n in self.task.cluster.stage_numbers if n <= num_pieces)
                remedy = f"try one of {numbers}, or none" if numbers else "leave --pipeline out"
                raise UserError(
                    f"a number of stages up to {num_pieces} is needed, the pieces that this model can be cut into; got "
                    f"{case.num_stages}; {remedy}"
                )
            return
        least_s = self._to_beat * (1 - GAP)
        own_bound_s = case.bound_s(case.num_micro_batches, least_s)
        if own_bound_s >= least_s:
            self.was_slower = True
            return
        self.bound_s = min(self.bound_s, own_bound_s)
        measured = [case.measured(options) for options in case.layouts()]
        self._count(_RUN_OP_S * _ops_a_unit(case) * sum(_num_levels(each) for each in measured))
        self._take_fastest(case, measured)
        if case.place.problem.costs.tier is not None and self.solver == "joint":
            self.kept.append((own_bound_s, case, measured))

    def look_at_offloading(self) -> None:
        """Look at the cases once more, those of the least bound first, with stages that may offload, where memory binds them.

        That takes longer than to look at stages without, so these come first, in all cases.
        """
        for own_bound_s, case, measured in sorted(self.kept, key=lambda row: row[0]):
            if own_bound_s >= self._to_beat * (1 - GAP) or self._is_late_to_offload(case):
                continue
            tier, num_pieces = case.place.problem.costs.tier, len(case.outline.regions)
            assert tier is not None
            leaving = [each.offloading(tier) for each in measured if self._is_bound(case, each)]
            self._count(_RUN_OP_S * _ops_a_unit(case) * sum(_num_levels(each) for each in leaving))
            self._count(_FIT_S * len(leaving) * case.num_stages * num_pieces**2)
            self._take_fastest(case, leaving)

    def _is_late_to_offload(self, case: Case) -> bool:
        """True if there is a plan, and no time to look at the same stages with offloading."""
        late = math.isfinite(self._to_beat) and self.task.deadline.has_passed
        if late and math.isfinite(case.budget_bytes):
            self.unseen.append(_name(case.num_stages, case.shape, case.num_micro_batches) + " that offload")
        return late

    def _take_fastest(self, case: Case, measured: Sequence[Measured]) -> None:
        """Take the fastest stages under any of the tables, if they are faster than those that are known, and fit."""
        found = [row for each in measured for row in self._proposals(case, each)]
        for each, judge, staged in sorted(found, key=lambda row: row[2].step_s):
            if staged.step_s < self._to_beat or self._may_hold_less(case, judge):
                self._realise(case, each, judge, staged)
            else:
                self.was_slower = True

    def _may_hold_less(self, case: Case, judge: Judge) -> bool:
        """Return true if stages may be slower than the incumbent only for the memory that their table estimates.

        It has learned nothing yet. Others of the same case and order have: by their least excess, or where there are none
        without a budget, these stages would be faster.
        """
        if not is_thorough(self.task):
            return False
        known = self._excess.get((case, judge.table.order))
        if known is None:
            judge = replace(judge, budget_bytes=math.inf)
        else:
            own = judge.table.excess_bytes
            least = {ends: min(excess, own.get(ends, 0.0)) for ends, excess in known.items()}
            judge = replace(judge, table=judge.table.exceeding({**own, **least}))
        found = self._chosen(judge)
        return found is not None and found.step_s < self._to_beat

    def _is_bound(self, case: Case, measured: Measured) -> bool:
        """True unless the fastest stages under some layouts, whatever they hold, take no less than those that fit."""
        if math.isinf(case.budget_bytes):
            return False
        for judge in case.judges(measured):
            kept = self._chosen(replace(judge, budget_bytes=math.inf))
            if kept is not None and kept.step_s < self._to_beat * (1 - GAP):
                return True
        return False

    @property
    def _to_beat(self) -> float:
        return min(self.cutoff_s, self.candidates[-1].step_s) if self.candidates else self.cutoff_s

    def _proposals(self, case: Case, measured: Measured) -> list[tuple[Measured, Judge, Staged]]:
        """Return a table with the stages that are fastest by it, for each order in which they may work.

        Where none fit by the table, it learns what those that hold least by it do hold.
        """
        if found := self._by_table(case, measured):
            return found
        judge = case.judge(measured)
        starts = self._starts(replace(judge, budget_bytes=math.inf))
        lean = leanest(judge, starts)
        if lean is None:
            return []
        if all(measured.table.held_bytes(spans) <= case.budget_bytes for spans in measured.table.stages(lean.cuts)):
            learn(measured.table, lean, self._peaks(case, measured, measured.table, lean))
            found = self._by_table(case, measured)
        if not found:
            self.least.append((*nothing_fits_bytes(judge, starts), case))
        return found

    def _by_table(self, case: Case, measured: Measured) -> list[tuple[Measured, Judge, Staged]]:
        found, known = [], list[Cuts]()
        for judge in case.judges(measured):
            if (staged := self._chosen(judge, known)) is not None:
                found.append((measured, judge, staged))
                known += [staged.cuts] if judge.table.virtual == 1 else []
        return found

    def _chosen(self, judge: Judge, known: Sequence[Cuts] = ()) -> Staged | None:
        """Return the stages that the requested solver chooses; `known` are further cuts to start from."""
        if self.solver != "joint":
            cuts = recipe_cuts(self.solver, judge)
            return None if cuts is None else judge.judge(cuts, depths_of(judge.table)[0])
        found = fastest(judge, [*self._starts(judge), *(known if judge.table.virtual == 1 else [])])
        self._count(judge.work_s)
        return found

    def _count(self, seconds: float) -> None:
        """Count work, by which the search ends."""
        self.task.deadline.count(seconds)

    def _starts(self, judge: Judge) -> list[Cuts]:
        table = judge.table
        cuts = [recipe_cuts(name, judge) for name in PIPELINE_RECIPES if name != "joint"]
        for depth in depths_of(table)[: 2 if table.is_plain else 0]:
            proposal = propose(table, depth, judge.budget_bytes, judge.fixed)
            cuts.append(None if proposal is None else proposal.cuts)
        return [found for found in dict.fromkeys(cuts) if found is not None and judge.allows(found)]

    def _realise(self, case: Case, measured: Measured, judge: Judge, staged: Staged | None) -> None:
        """Add up what the stages hold, make the table learn it, and choose again, until they fit and use up the budget."""
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for turn in range(MAX_CORRECTIONS):
            if staged is None or (turn and staged.step_s >= self._to_beat):
                return
            key = (staged.cuts, staged.in_flight, *(fit.levels for fit in staged.fits))
            if key in seen:
                return
            seen.add(key)
            peaks = self._peaks(case, measured, judge.table, staged)
            fits = max(peaks) <= case.budget_bytes
            if fits and staged.step_s < self._to_beat:
                self.candidates.append(_Candidate(case, measured, judge, staged))
                self.task.best.seconds = min(self.task.best.seconds, staged.step_s)
            elif not fits:
                self.least.append((max(peaks), peaks.index(max(peaks)), case))
            if fits and not any(
                fit.extra_s and peak < case.budget_bytes * (1 - CLOSE) for fit, peak in zip(staged.fits, peaks)
            ):
                return
            judge, staged = self._again(judge, staged, peaks)
            known = self._excess.setdefault((case, judge.table.order), {})
            for ends, excess in judge.table.excess_bytes.items():
                known[ends] = min(excess, known.get(ends, excess))

    def _again(self, judge: Judge, staged: Staged, peaks: Sequence[int]) -> tuple[Judge, Staged | None]:
        """Make the table learn peaks, and choose anew."""
        learn(judge.table, staged, peaks)
        judge = Judge(judge.table, judge.budget_bytes, judge.fixed)
        return judge, self._chosen(judge, [staged.cuts])

    def _simulated(self) -> tuple[Case, StagedAnswer] | None:
        """Return the fastest candidate, priced; where what actions add is not exact and it does not fit, it is chosen anew."""
        best: tuple[Case, StagedAnswer] | None = None
        for found in reversed(self.candidates):
            judge: Judge = found.judge
            staged: Staged | None = found.staged
            for _ in range(MAX_CORRECTIONS):
                if staged is None or staged.step_s >= (self.cutoff_s if best is None else best[1].step_s):
                    break
                answer = self._answer(found.case, found.measured, judge.table, staged)
                peaks = [simulation.peak_bytes for simulation in answer.priced.simulations]
                if max(peaks) <= found.case.budget_bytes:
                    best = (found.case, answer) if best is None or answer.step_s < best[1].step_s else best
                    break
                self.least.append((max(peaks), peaks.index(max(peaks)), found.case))
                judge, staged = self._again(judge, staged, peaks)
        return best

    def _peaks(self, case: Case, measured: Measured, table: Table, staged: Staged) -> list[int]:
        decisions, begins = self._decided(measured, table, staged)
        schedule, pieces = table.schedule(staged.in_flight), cut(case.task.program, begins)
        num_known = len(measured.runs)
        stages = [pieces[stage :: case.num_stages] for stage in range(case.num_stages)]
        found = simulate_stages(case.place, stages, decisions, schedule, measured.runs, in_full=False)
        num_ops = _ops_a_unit(case) * len(case.outline.regions) / case.num_stages
        self._count(_RUN_OP_S * _RUNS_OF_STAGE * num_ops * (len(measured.runs) - num_known))
        return [simulation.peak_bytes for simulation in found]

    def _decided(self, measured: Measured, table: Table, staged: Staged) -> tuple[Decisions, tuple[str, ...]]:
        levels = [level for own in table.by_piece(staged.cuts, staged.fits) for level in own]
        return measured.staged(levels), measured.begins(staged.cuts)

    def _answer(self, case: Case, measured: Measured, table: Table, staged: Staged) -> StagedAnswer:
        decisions, begins = self._decided(measured, table, staged)
        stages = cut(case.task.program, begins)
        hops = hops_of(case.cluster, case.num_stages)
        schedule = table.schedule(staged.in_flight)
        priced = price_stages(case.place, stages, decisions, schedule, hops, measured.runs)
        return StagedAnswer(case.cluster, begins, schedule, decisions, priced)

    def found(self) -> Found | None:
        """Return the fastest stages with their proven gap; None if all are slower; raise `Refusal` if none fits."""
        best = self._simulated()
        if best is None:
            if self.unseen:
                raise NotAllSeen(self.unseen)
            if self.was_slower:
                return None
            raise self._refusal()
        case, staged = best
        simulation = staged.priced.simulations[staged.priced.fullest]
        gap = max(0.0, 1 - self.bound_s / staged.step_s)
        answer = Answer(None, staged.decisions, simulation, gap, staged.step_s, 0.0)  # type: ignore[arg-type]
        note = (
            (f"the time limit left no time for {', '.join(self.unseen[:4])}{' …' if len(self.unseen) > 4 else ''}",)
            if self.unseen
            else ()
        )
        return Found(case.place, answer, Price(), note, tuple(self.unseen), staged)

    def _refusal(self) -> Refusal:
        name, budget = self.task.cluster.name, self.task.budget_bytes
        known = [row for row in self.least if math.isfinite(row[0])]
        if not known or budget is None:
            refused = {} if self.task.variants is None else self.task.variants.refused
            why = (
                f": {next(iter(refused.values()))}"
                if refused
                else "; try more stages, smaller micro-batches, or fewer pins"
            )
            return NoStagesFit(f"stages that fit are needed; {self.solver} found none on {name}{why}", math.inf)
        least, stage, case = min(known, key=lambda row: row[0])
        enough = size_text(budget_for(math.ceil(least), self.task.divisor), up=True)
        return NoStagesFit(
            f"stages within {size_text(budget)} a device are needed; {self.solver} found none on {name} (mesh of a stage "
            f"{case.place.shape}, {case.num_micro_batches} micro-batches); stage {stage} of {case.num_stages} holds most; about "
            f"{enough} would do (an estimate), or try more stages or smaller micro-batches",
            least,
        )


def _num_levels(measured: Measured) -> int:
    return sum(map(len, measured.table.levels))


def _ops_a_unit(case: Case) -> float:
    return len(case.task.program.ops) / len(case.outline.regions)


def learn(table: Table, staged: Staged, peaks: Sequence[int]) -> None:
    """Make the table learn by how much peaks exceed their estimates: for stages with the same ends, the largest excess."""
    more = dict[tuple[bool, bool], tuple[float, Spans]]()
    for spans, fit, peak in zip(table.stages(staged.cuts), staged.fits, peaks):
        row = (peak - fit.peak_bytes, spans)
        more[table.ends(spans)] = max(more.get(table.ends(spans), row), row)
    for excess, spans in more.values():
        table.learn(spans, excess)


def _name(num_stages: int, shape: tuple[int, ...], num: int) -> str:
    return f"{num_stages} stages of mesh {'x'.join(map(str, shape))} with {num} micro-batches"
