"""Measures the table of units between cuts for one choice of layouts: seconds by the cost model, kept bytes by fake runs.

A unit's levels rerun more and more of its groups, first those that free most bytes a second. Where there is a place to offload
to, each is also there with half of what it keeps off the device, the largest first, and with all of it.
One fake forward of a micro-batch measures several levels at once: the units of a kind take them in turn. Only as many units are run
as there are levels and surroundings to see; each with the unit before it, whose results it may let go, and to see what leaves with
the unit behind it, which may be the first to save what it reads.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from ...artifacts import Tier
from ...profiler.saved import run_state
from ...profiler.tracker import MemoryTracker, Target
from ...profiler.values import KnownValues
from ...program.blocks import Region, RegionClass
from ...program.decisions import Decisions
from ...program.layout import Layout
from ...program.program import Program, Tensor
from ...program.stages import boundary_regions, cut
from ...rank.execute import Executor
from ...rank.local import build_local
from ...rank.offload import CountingStore, OffloadedStorage, OffloadRun, OffloadStore
from ...rank.reshard import SimulatedCommunicator
from ...torch_internals.fakes import new_mode
from ..costs.price import RegionSeconds, begin_seconds, price_regions
from ..costs.simulate import Simulation, StageBytes, fake_sources, fuse_attention
from ..model.decode import Choice, decisions_from
from ..model.offload import IN_FLIGHT
from ..problem.problem import Decision, Problem, Use, Want
from .frontier import Level
from .table import Hop, Param, Table, Unit

SHARES = (0.45, 0.8, 1.0)
"""The least share that each level frees of the bytes that recompute can free; a level before these frees none."""
LEAVING = (0.5, 1.0)
"""The least share that leaves of what a level keeps, where it may be offloaded."""

Item = Decision | tuple[Use, Want]
"""A group that is rerun, or an operand that is converted again."""
AnItem = TypeVar("AnItem")


@dataclass(eq=False)
class Outline:
    """The units of a program and their regions, which do not depend on layouts."""

    program: Program

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the boundaries, at which all units but the first begin."""
        return tuple(boundary_regions(self.program))

    @cached_property
    def regions(self) -> list[list[Region]]:
        edges = [0, *(region.index for region in boundary_regions(self.program).values()), len(self.program.regions)]
        return [self.program.regions[first:stop] for first, stop in itertools.pairwise(edges)]

    @cached_property
    def kinds(self) -> list[int]:
        """Return the kind of each unit; units with the same classes of regions are of one kind."""
        known: dict[tuple[int, ...], int] = {}
        return [
            known.setdefault(tuple(region.region_class.index for region in own), len(known)) for own in self.regions
        ]

    @cached_property
    def surroundings(self) -> list[tuple[Any, ...]]:
        """Return, for each unit, its kind and which ops of what kinds of units it reads; equal ones take equally long."""
        unit_of = {region.index: unit for unit, own in enumerate(self.regions) for region in own}
        found: list[tuple[Any, ...]] = []
        for own in self.regions:
            read = [tensor.producer for region in own for tensor in region.externals if tensor.producer is not None]
            found.append(
                (
                    self.kinds[len(found)],
                    *((op.position, self.kinds[unit_of[op.region.index]]) for op in read if op.region is not None),
                )
            )
        return found

    @cached_property
    def crossing(self) -> list[list[Tensor]]:
        """Return the tensors that cross into each unit; boundaries between units of the same kinds are analysed once."""
        known: dict[tuple[int, int], list[Tensor]] = {}
        found: list[list[Tensor]] = [[]]
        for place, name in enumerate(self.names, start=1):
            around = self.kinds[place - 1], self.kinds[place]
            if around not in known:
                known[around] = cut(self.program, (name,))[1].given
            found.append(known[around])
        return found


@dataclass(frozen=True)
class Fate:
    """The fates of the values that a unit would keep, as their keys in the program: those rerun, and those that leave."""

    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    def distance(self, other: Fate) -> int:
        """Return the number of values that have another fate."""
        return len(self.recomputed ^ other.recomputed) + len(self.offloaded ^ other.offloaded)


@dataclass(eq=False)
class Measured:
    """A table, with the tensors of the program that each of its levels reruns or offloads."""

    table: Table
    outline: Outline
    decisions: Decisions
    """The decisions on layouts, with everything kept."""
    fates: list[list[Fate]]
    """The values that are rerun and those that leave, by unit and level."""
    measuring: _Measuring
    """The measurements behind the table, which can be taken further."""
    runs: dict[Any, Simulation | StageBytes] = field(default_factory=dict)
    """The runs of stages under these layouts, in full or by action, by a key that like stages share."""

    def offloading(self, tier: Tier) -> Measured:
        """Return the same with further levels, at which values leave to `tier` and come back."""
        return self.measuring.offloading(self, tier)

    def staged(self, levels: Sequence[int]) -> Decisions:
        """Return the decisions with the given level for each unit."""
        chosen = [self.table.levels[unit.kind][level] for unit, level in zip(self.table.units, levels)]
        in_flight = IN_FLIGHT * max(level.largest_bytes for level in chosen)
        return replace(_with_fates(self.decisions, self.fates, levels), in_flight_bytes=int(in_flight))

    def levels_of(self, decisions: Decisions) -> list[int]:
        """Return, for each unit, the level that differs least from `decisions` in what is rerun and what leaves."""
        found = []
        for levels in self.fates:
            known = frozenset[str]().union(*(fate.recomputed | fate.offloaded for fate in levels))
            own = Fate(known & decisions.recomputed, known & decisions.offloaded)
            apart = [level.distance(own) for level in levels]
            found.append(apart.index(min(apart)))
        return found

    def begins(self, cuts: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the boundaries at the given cuts."""
        return tuple(self.outline.names[unit - 1] for unit in cuts)


def measure(
    problem: Problem, outline: Outline, options: Mapping[Decision, int], hops: Sequence[Hop], target: Target
) -> Measured:
    """Return the table of one choice of layouts, whose levels keep or rerun."""
    return _Measuring(problem, outline, dict(options), tuple(hops), target).measured()


def measure_as_decided(
    problem: Problem, outline: Outline, decisions: Decisions, hops: Sequence[Hop], target: Target
) -> Measured:
    """Return the table of a plan's layouts; a layout that is no option of `problem` is replaced by the first one."""
    options = {}
    for decision in problem.decisions:
        own = decisions.splits[decision.group] if decision.group is not None else decisions.params[decision.tied[0]]
        options[decision] = decision.options.index(own) if own in decision.options else 0
    return measure(problem, outline, options, hops, target)


class _Measuring:
    def __init__(
        self, problem: Problem, outline: Outline, options: dict[Decision, int], hops: tuple[Hop, ...], target: Target
    ) -> None:
        self.problem, self.outline, self.options, self.hops, self.target = problem, outline, options, hops, target
        self.plain = decisions_from(problem, Choice(options))
        self._staying_levels: dict[tuple[int, int], Level] = {}
        """The levels at which nothing leaves, by kind and number."""

    def measured(self) -> Measured:
        """Return the table with what each level reruns."""
        fates = self._fates((0.0,))
        kept: dict[tuple[int, int], float] = {}
        rerun: dict[tuple[int, int], float] = {}
        seconds: dict[tuple[Any, ...], RegionSeconds] = {}
        begin_s = 0.0
        for levels, units in self._turns([list(range(len(own))) for own in fates]):
            decisions = _with_fates(self.plain, fates, levels)
            for first, program in self._windows(units, (-1, 0)):
                executor = Executor(build_local(program, decisions, SimulatedCommunicator(decisions.mesh)))
                sizes, taken = self._kept(executor), price_regions(executor, self.problem.costs)
                begin_s = max(begin_s, begin_seconds(executor, self.problem.costs))
                for unit in units:
                    if first <= unit and self.outline.regions[unit][-1] in program.regions:
                        own = self._of_unit(taken, unit)
                        seconds.setdefault(self.outline.surroundings[unit], own)
                        key = self.outline.kinds[unit], levels[unit]
                        kept[key] = max(kept.get(key, 0.0), sizes[unit])
                        rerun[key] = max(rerun.get(key, 0.0), own.rerun_s)
        self._staying_levels = {
            key: Level(max(0.0, kept[key]), rerun[key], max(0.0, kept[key[0], 0] - kept[key])) for key in kept
        }
        table = self._table([seconds[around] for around in self.outline.surroundings], begin_s)
        return self._in_order(table, self._staying_levels, fates)

    def offloading(self, known: Measured, tier: Tier) -> Measured:
        """Return a table that has learned nothing yet, with levels at which a share of what is kept leaves too."""
        fates = self._fates((0.0, *LEAVING))
        leaving = [[at for at, fate in enumerate(own) if fate.offloaded] for own in fates]
        levels = dict(self._staying_levels)
        for turn, units in self._turns(leaving, {("around", *around) for around in self.outline.surroundings}):
            decisions = _with_fates(self.plain, fates, turn)
            for _, program in self._windows(units, (0, 1)):
                for unit, sizes in self._moved(program, decisions).items():
                    if unit in units and turn[unit] in leaving[unit]:
                        kind, stays = self.outline.kinds[unit], Fate(fates[unit][turn[unit]].recomputed)
                        own = _offloading(self._staying_levels[kind, fates[unit].index(stays)], sizes, tier)
                        found = levels.get((kind, turn[unit]), own)
                        levels[kind, turn[unit]] = max(found, own, key=lambda level: level.kept_bytes)
        table = replace(known.table, tier=tier, excess_bytes={}, _fits={}, _frontiers={})
        return replace(self._in_order(table, levels, fates), runs=known.runs)

    def _in_order(self, table: Table, levels: Mapping[tuple[int, int], Level], fates: list[list[Fate]]) -> Measured:
        """Give a table its levels, of which none beats another; `fates` are those of the levels by unit and number."""
        order = _levels_in_order(levels)
        table.levels = tuple(tuple(level for level, _ in order[kind]) for kind in range(len(set(self.outline.kinds))))
        mapped = [[fates[u][at] for _, at in order[kind]] for u, kind in enumerate(self.outline.kinds)]
        return Measured(table, self.outline, self.plain, mapped, self)

    def _turns(
        self, choices: list[list[int]], seen: set[tuple[Any, ...]] | None = None
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each run's level of every unit, and the units that show a level or surroundings which no other one has shown.

        choices: the levels of each unit to show. seen: what needs not be shown.
        """
        most = max(math.ceil(len(own) / self._num_alike(unit)) for unit, own in enumerate(choices))
        seen = set() if seen is None else seen
        for turn in range(most):
            levels, units = self._turn(choices, turn), []
            for unit, (kind, level) in enumerate(zip(self.outline.kinds, levels)):
                shown = {("level", kind, level), ("around", *self.outline.surroundings[unit])}
                if not shown <= seen:
                    seen |= shown
                    units.append(unit)
            yield levels, units

    def _windows(self, units: Sequence[int], around: Sequence[int]) -> list[tuple[int, Program]]:
        """Return the programs of consecutive units that have `units` and those `around` each, with their first units."""
        num = len(self.outline.regions)
        wanted = sorted({unit + by for unit in units for by in around if 0 <= unit + by < num})
        edges = sorted({edge for at in wanted for edge in (at, at + 1)})
        inner = [edge for edge in edges if 0 < edge < len(self.outline.regions)]
        inner = [edge for edge in inner if not (edge - 1 in wanted and edge in wanted)]
        stages = cut(self.problem.program, [self.outline.names[edge - 1] for edge in inner])
        return [(first, stage.program) for first, stage in zip([0, *inner], stages) if first in wanted]

    # Levels

    def _fates(self, leaving: Sequence[float]) -> list[list[Fate]]:
        """Return the fates of each unit at each of its levels, of which the first keeps everything.

        leaving: the shares that leave of what is kept. A unit that is alone in its kind reruns all or nothing, and offloads all
        or nothing.
        """
        alone = {kind for kind, num in Counter(self.outline.kinds).items() if num == 1}
        ways = [(share, away) for away in leaving for share in (0.0, *SHARES)]
        by_way = {way: self._fates_at(*way) for way in ways}
        found: list[list[Fate]] = []
        for unit, kind in enumerate(self.outline.kinds):
            own = [way for way in ways if kind not in alone or set(way) <= {0.0, 1.0}]
            found.append(list(dict.fromkeys(by_way[way].get(unit, Fate()) for way in own)))
        return found

    def _fates_at(self, share: float, away: float) -> dict[int, Fate]:
        """Return the fates by unit if each class of regions frees `share` of what it can, and `away` of what it keeps leaves."""
        items = [item for own in self._items().values() for item in _first(own, share)]
        reruns = {item: item.count for item in items if isinstance(item, Decision)}
        converts = {item: item[0].count for item in items if not isinstance(item, Decision)}
        leaves = dict(
            item for own in self._staying({*reruns, *converts}).values() for item in _first(own, away) if away
        )
        decisions = decisions_from(self.problem, Choice(self.options, reruns, converts, leaves))
        found: dict[int, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
        for place, keys in enumerate((decisions.recomputed, decisions.offloaded)):
            for key in keys:
                found[self._unit_of[key.rpartition(".")[0]]][place].add(key)
        return {unit: Fate(frozenset(again), frozenset(gone)) for unit, (again, gone) in found.items()}

    def _staying(self, again: Set[Item]) -> dict[RegionClass, list[tuple[float, float, tuple[Any, int]]]]:
        """Return, by class, what is kept beside `again` and may leave, as (bytes, 0, (what, instances)), the largest first."""
        costs, found = self.problem.costs, defaultdict(list)

        def add(region_class: RegionClass | None, size: float, what: Any, count: int) -> None:
            if region_class is not None and size >= costs.min_offload_bytes:
                found[region_class].append((size, 0.0, (what, count)))

        for stored in self.problem.stored:
            decision = stored.source.decision
            if not stored.held and (stored.boundary or decision not in again):
                native = stored.source.natives[self.options[decision]]
                add(decision.region_class, costs.local_bytes(stored.source.tensor, native), stored, decision.count)
        for decision in self.problem.groups:
            if decision not in again:
                add(decision.region_class, decision.inner_bytes[self.options[decision]], decision, decision.count)
        for use, want, _ in self._converted():
            if (use, want) not in again:
                add(use.region_class, costs.local_bytes(use.tensor, want[0]), (use, want), use.count)
        return {own: sorted(items, key=lambda item: -item[0]) for own, items in found.items()}

    @cached_property
    def _unit_of(self) -> dict[str, int]:
        return {op.key: unit for unit, own in enumerate(self.outline.regions) for region in own for op in region.ops}

    def _items(self) -> dict[RegionClass, list[tuple[float, float, Item]]]:
        """Return, by class, what may be rerun as (bytes, seconds, item), those first that free most bytes a second."""
        found: dict[RegionClass, list[tuple[float, float, Item]]] = defaultdict(list)
        saved: dict[Decision, float] = defaultdict(float)
        costs = self.problem.costs
        for stored in self.problem.stored:
            if not (stored.boundary or stored.held):
                decision = stored.source.decision
                native = stored.source.natives[self.options[decision]]
                saved[decision] += costs.local_bytes(stored.source.tensor, native)
        for decision in self.problem.groups:
            if decision.group is not None and decision.group.may_rerun and decision.region_class is not None:
                option = self.options[decision]
                size = saved[decision] + decision.inner_bytes[option]
                if size > 0:
                    found[decision.region_class].append((size, decision.rerun_s[option], decision))
        for use, want, native in self._converted():
            found[use.region_class].append(
                (costs.local_bytes(use.tensor, want[0]), costs.move_s(use.tensor, native, want[0]), (use, want))
            )
        return {own: sorted(items, key=lambda item: item[1] / item[0]) for own, items in found.items()}

    def _converted(self) -> Iterator[tuple[Use, Want, Layout]]:
        for use in self.problem.uses:
            native = use.source.natives[self.options[use.source.decision]]
            asked = {want for demand in use.demands for want in demand.wants[self.options[demand.decision]]}
            for want in sorted(want for want in asked if want[0] != native):
                yield use, want, native

    def _num_alike(self, unit: int) -> int:
        return self.outline.kinds.count(self.outline.kinds[unit])

    def _turn(self, choices: list[list[int]], turn: int) -> list[int]:
        """Return the level of each unit in one run: the units of a kind take the levels in turn."""
        seen: Counter[int] = Counter()
        found = []
        for unit, kind in enumerate(self.outline.kinds):
            own = choices[unit] or [0]
            found.append(own[(seen[kind] + turn * self._num_alike(unit)) % len(own)])
            seen[kind] += 1
        return found

    # Measuring

    def _kept(self, executor: Executor) -> dict[int, float]:
        """Return the bytes that each unit of a program keeps for the backward of one micro-batch."""
        tracker = MemoryTracker(self.target)
        live: dict[int, int] = {}
        before = 0
        for region in self._forward(executor, tracker):
            if region is None:
                before = tracker.live_bytes
            else:
                live[region] = tracker.live_bytes
        program, found = executor.local.program, {}
        for unit, own in enumerate(self.outline.regions):
            if own[-1] in program.regions:
                after = max((live[region.index] for region in own if region.index in live), default=before)
                found[unit] = float(after - before)
                before = after
        return found

    def _moved(self, program: Program, decisions: Decisions) -> dict[int, list[int]]:
        """Return the bytes of each tensor that leaves in the forward of one micro-batch, by the unit that makes it."""
        local = build_local(program, decisions, SimulatedCommunicator(decisions.mesh))
        executor, made = _Watching(local, CountingStore()), dict[int, list[OffloadedStorage]]()
        found = {unit: list[int]() for unit, own in enumerate(self.outline.regions) if own[-1] in program.regions}
        for region in self._forward(executor, MemoryTracker(self.target)):
            if region is not None and executor.noted is not None:
                made[region] = made.get(region, []) + executor.noted.taken()
        for unit in found:
            own = [item for region in self.outline.regions[unit] for item in made.get(region.index, [])]
            found[unit] = [item.num_bytes for item in own if item.has_left]
        return found

    def _forward(self, executor: Executor, tracker: MemoryTracker) -> Iterator[int | None]:
        """Run the forward of one micro-batch on fake tensors; yield None before it, and then each region that has run."""
        fuse_attention(executor, self.target)
        program, mode = executor.local.program, new_mode()
        with mode:
            sources = fake_sources(executor.local)
        for tensor in program.given:
            sources[tensor].requires_grad_(tensor.requires_grad)
        with KnownValues(mode, fills_memory=False), tracker, torch.enable_grad():
            tracker.watch(list(sources.values()), "input")
            yield None
            run = executor.begin(sources, run_state(None, self.target))
            for region, start, stop in executor.segments:
                executor.step(run, region, start, stop)
                yield region
            outputs = executor.end(run)
            del run, outputs

    def _of_unit(self, seconds: Mapping[int, RegionSeconds], unit: int) -> RegionSeconds:
        parts = [seconds[region.index] for region in self.outline.regions[unit] if region.index in seconds]
        names = RegionSeconds.__dataclass_fields__
        return RegionSeconds(*(sum(getattr(part, name) for part in parts) for name in names))

    def _table(self, seconds: Sequence[RegionSeconds], begin_s: float) -> Table:
        units = tuple(
            Unit(
                begins="" if place == 0 else self.outline.names[place - 1],
                kind=self.outline.kinds[place],
                forward_s=seconds[place].forward_s,
                backward_s=seconds[place].backward_s,
                params=tuple(dict.fromkeys(tensor.key for tensor in params_of(own))),
                begin_s=begin_s if place == len(self.outline.regions) - 1 else 0.0,
                reduce_s=seconds[place].reduce_s,
                weight_s=seconds[place].weight_s,
                work_bytes=self._work_bytes(own),
                given_bytes=sum(local_bytes(self.problem, self.plain, t) for t in self.outline.crossing[place]),
                returned_bytes=sum(
                    local_bytes(self.problem, self.plain, t) for t in self.outline.crossing[place] if t.requires_grad
                ),
            )
            for place, own in enumerate(self.outline.regions)
        )
        params = {tensor.key: self._param(tensor) for own in self.outline.regions for tensor in params_of(own)}
        overlaps = self.problem.costs.device.kind == "gpu"
        return Table(units, (), params, self.hops, self.problem.program.num_runs, overlaps)

    def _param(self, tensor: Tensor) -> Param:
        costs, layout, optimizer = self.problem.costs, self.plain.params[tensor], self.problem.optimizer
        own = costs.local_bytes(tensor, layout)
        if not tensor.is_trained:
            return Param(own, 0.0)
        return Param(
            2 * own + costs.state_bytes(tensor, layout, optimizer), costs.optimizer_s(tensor, layout, optimizer), own
        )

    def _work_bytes(self, regions: Sequence[Region]) -> float:
        classes = {region.region_class for region in regions}
        own = [decision for decision in self.problem.groups if decision.region_class in classes]
        held = [max(d.transient_bytes(self.options[d]), d.workspace_bytes[self.options[d]]) for d in own]
        return float(max(held, default=0))


class _Watching(Executor):
    """An executor whose forward notes what may leave the device, and lets it go at once."""

    noted: _Noted | None = None

    def new_offload(self) -> OffloadRun | None:
        self.noted = _Noted(self.store, 0)
        return self.noted


class _Noted(OffloadRun):
    """Keeps the storages that were registered since they were last asked for."""

    def __init__(self, store: OffloadStore | None, in_flight_bytes: int) -> None:
        super().__init__(store, in_flight_bytes)
        self.registered: list[OffloadedStorage] = []

    def register(self, tensor: torch.Tensor) -> OffloadedStorage:
        item = super().register(tensor)
        self.registered.append(item)
        return item

    def taken(self) -> list[OffloadedStorage]:
        """Return these storages."""
        found, self.registered = self.registered, []
        return found


def _with_fates(plain: Decisions, fates: Sequence[Sequence[Fate]], levels: Sequence[int]) -> Decisions:
    """Return decisions with the given level for each unit."""
    chosen = [own[level] for own, level in zip(fates, levels)]
    return replace(
        plain,
        recomputed=set().union(*(fate.recomputed for fate in chosen)),
        offloaded=set().union(*(fate.offloaded for fate in chosen)),
    )


def _offloading(level: Level, sizes: Sequence[int], tier: Tier) -> Level:
    """Return a level with tensors of `sizes` off the device, which come back one by one, the next ones ahead of their use."""
    moved, largest = sum(sizes), max(sizes, default=0)
    out_s, back_s = tier.transfers_s(moved, len(sizes))
    back = min(moved, (1 + IN_FLIGHT) * largest)
    return Level(
        max(0.0, level.kept_bytes - moved), level.rerun_s, level.rederived_bytes + back, out_s, back_s, largest, moved
    )


def _levels_in_order(levels: Mapping[tuple[int, int], Level]) -> dict[int, list[tuple[Level, int]]]:
    """Return each kind's levels that no other level beats in reruns, transfers and bytes, with their numbers.

    levels: by kind and number.
    """
    found: dict[int, list[tuple[Level, int]]] = defaultdict(list)

    def order(key: tuple[int, int]) -> tuple[float, ...]:
        level = levels[key]
        return key[0], level.rerun_s, level.moved_s, level.kept_bytes

    for kind, number in sorted(levels, key=order):
        own = levels[kind, number]
        if all(own.moved_s < other.moved_s or own.kept_bytes < other.kept_bytes for other, _ in found[kind]):
            found[kind].append((own, number))
    return found


def _first(items: list[tuple[float, float, AnItem]], share: float) -> list[AnItem]:
    """Return the first items that together free `share` of all bytes."""
    total, given, found = sum(size for size, _, _ in items), 0.0, []
    for size, _, item in items:
        if given >= share * total:
            break
        found.append(item)
        given += size
    return found


def params_of(regions: Sequence[Region]) -> list[Tensor]:
    """Return the parameters that regions read."""
    return [tensor for region in regions for tensor in region.externals if tensor.role == "param"]


def local_bytes(problem: Problem, decisions: Decisions, tensor: Tensor) -> int:
    """Return the bytes of the fullest rank's part of an op's output, in the layout in which the op leaves it."""
    op = tensor.producer
    assert op is not None
    assert op.region is not None
    region_class = op.region.region_class
    group, twin = region_class.group_at[op.position], region_class.representative.ops[op.position]
    layout = group.output_layout(twin, op.outputs.index(tensor), decisions.splits[group])
    return problem.costs.local_bytes(tensor, layout)
