"""Measures the table of units between cuts for one choice of layouts: seconds by the cost model, kept bytes by fake runs.

A unit's levels rerun more and more of its groups, first those that free most bytes a second. One fake forward of a
micro-batch measures several levels at once: the units of a kind take them in turn. Only as many units are run as there are
levels and surroundings to see; each with the unit before it, whose results it may let go.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

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
from ...rank.reshard import SimulatedCommunicator
from ...torch_internals.fakes import new_mode
from ..costs.price import RegionSeconds, begin_seconds, price_regions
from ..costs.simulate import Simulation, StageBytes, fake_sources, fuse_attention
from ..model.decode import Choice, decisions_from
from ..problem.problem import Decision, Problem, Use, Want
from .table import Hop, Level, Param, Table, Unit

SHARES = (0.45, 0.8, 1.0)
"""The least share that each level frees of the bytes that recompute can free; a level before these frees none."""

Item = Decision | tuple[Use, Want]
"""A group that is rerun, or an operand that is converted again."""


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


@dataclass(eq=False)
class Measured:
    """A table, with the tensors of the program that each of its levels reruns."""

    table: Table
    outline: Outline
    decisions: Decisions
    """The decisions on layouts, with nothing rerun."""
    keys: list[list[set[str]]]
    """The values that are rerun, by unit and level."""
    simulations: dict[Any, Simulation] = field(default_factory=dict)
    """The simulations of stages under these layouts, by a key that like stages share."""
    added: dict[Any, StageBytes] = field(default_factory=dict)
    """The bytes that the actions of stages add under these layouts; stages that differ in depth alone share a key."""

    def staged(self, levels: Sequence[int]) -> Decisions:
        """Return the decisions with the given level for each unit."""
        return replace(self.decisions, recomputed=set().union(*(own[k] for own, k in zip(self.keys, levels))))

    def levels_of(self, decisions: Decisions) -> list[int]:
        """Return, for each unit, the level whose reruns differ least from those of `decisions`."""
        found = []
        for levels in self.keys:
            own = set().union(*levels) & decisions.recomputed
            apart = [len(level ^ own) for level in levels]
            found.append(apart.index(min(apart)))
        return found

    def begins(self, cuts: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the boundaries at the given cuts."""
        return tuple(self.outline.names[unit - 1] for unit in cuts)


def measure(
    problem: Problem, outline: Outline, options: Mapping[Decision, int], hops: Sequence[Hop], target: Target
) -> Measured:
    """Return the table of one choice of layouts."""
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

    def measured(self) -> Measured:
        keys = self._keys()
        kept: dict[tuple[int, int], float] = {}
        rerun: dict[tuple[int, int], float] = {}
        seconds: dict[tuple[Any, ...], RegionSeconds] = {}
        begin_s = 0.0
        for levels, units in self._turns(keys):
            decisions = replace(self.plain, recomputed=set().union(*(own[k] for own, k in zip(keys, levels))))
            for first, program in self._windows(units):
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
        order = _levels_in_order(kept, rerun)
        table = self._table([seconds[around] for around in self.outline.surroundings], begin_s)
        table.levels = tuple(tuple(level for level, _ in order[kind]) for kind in range(len(set(self.outline.kinds))))
        mapped = [[keys[u][at] for _, at in order[kind]] for u, kind in enumerate(self.outline.kinds)]
        return Measured(table, self.outline, self.plain, mapped)

    def _turns(self, keys: list[list[set[str]]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each run's level of every unit, and the units that show a level or surroundings which no other one has shown."""
        most = max(math.ceil(len(own) / self._num_alike(unit)) for unit, own in enumerate(keys))
        seen: set[tuple[Any, ...]] = set()
        for turn in range(most):
            levels, units = self._turn(keys, turn), []
            for unit, (kind, level) in enumerate(zip(self.outline.kinds, levels)):
                shown = {("level", kind, level), ("around", *self.outline.surroundings[unit])}
                if not shown <= seen:
                    seen |= shown
                    units.append(unit)
            yield levels, units

    def _windows(self, units: Sequence[int]) -> list[tuple[int, Program]]:
        """Return the programs of consecutive units that have `units`, each behind the one before it, with their first units."""
        wanted = sorted({at for unit in units for at in (unit - 1, unit) if at >= 0})
        edges = sorted({edge for at in wanted for edge in (at, at + 1)})
        inner = [edge for edge in edges if 0 < edge < len(self.outline.regions)]
        inner = [edge for edge in inner if not (edge - 1 in wanted and edge in wanted)]
        stages = cut(self.problem.program, [self.outline.names[edge - 1] for edge in inner])
        return [(first, stage.program) for first, stage in zip([0, *inner], stages) if first in wanted]

    # Levels

    def _keys(self) -> list[list[set[str]]]:
        """Return the values rerun at each level of each unit; a unit that is alone in its kind has two levels."""
        alone = {kind for kind, num in Counter(self.outline.kinds).items() if num == 1}
        by_share = [self._rerun_at(share) for share in SHARES]
        found: list[list[set[str]]] = []
        for unit, kind in enumerate(self.outline.kinds):
            levels = [set[str](), *(keys.get(unit, set()) for keys in by_share[2 if kind in alone else 0 :])]
            found.append([keys for place, keys in enumerate(levels) if keys not in levels[:place]])
        return found

    def _rerun_at(self, share: float) -> dict[int, set[str]]:
        """Return, by unit, the values rerun if every class of regions frees `share` of the bytes that it can."""
        items = [item for own in self._items().values() for item in _first(own, share)]
        reruns = {item: item.count for item in items if isinstance(item, Decision)}
        converts = {item: item[0].count for item in items if not isinstance(item, Decision)}
        decisions = decisions_from(self.problem, Choice(self.options, reruns=reruns, converts=converts))
        found: dict[int, set[str]] = defaultdict(set)
        for key in decisions.recomputed:
            found[self._unit_of[key.rpartition(".")[0]]].add(key)
        return found

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

    def _turn(self, keys: list[list[set[str]]], turn: int) -> list[int]:
        """Return the level of each unit in one run: the units of a kind take the levels in turn."""
        seen: Counter[int] = Counter()
        found = []
        for unit, kind in enumerate(self.outline.kinds):
            found.append((seen[kind] + turn * self._num_alike(unit)) % len(keys[unit]))
            seen[kind] += 1
        return found

    # Measuring

    def _kept(self, executor: Executor) -> dict[int, float]:
        """Return the bytes that each unit of a program keeps for the backward of one micro-batch."""
        fuse_attention(executor, self.target)
        program, mode = executor.local.program, new_mode()
        with mode:
            sources = fake_sources(executor.local)
        for tensor in program.given:
            sources[tensor].requires_grad_(tensor.requires_grad)
        tracker = MemoryTracker(self.target)
        live: dict[int, int] = {}
        with KnownValues(mode, fills_memory=False), tracker, torch.enable_grad():
            tracker.watch(list(sources.values()), "input")
            before = tracker.live_bytes
            run = executor.begin(sources, run_state(None, self.target))
            for region, start, stop in executor.segments:
                executor.step(run, region, start, stop)
                live[region] = tracker.live_bytes
            outputs = executor.end(run)
            del run, outputs
        found = {}
        for unit, own in enumerate(self.outline.regions):
            if own[-1] in program.regions:
                after = max((live[region.index] for region in own if region.index in live), default=before)
                found[unit] = float(after - before)
                before = after
        return found

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
        if not tensor.requires_grad:
            return Param(own, 0.0)
        return Param(
            2 * own + costs.state_bytes(tensor, layout, optimizer), costs.optimizer_s(tensor, layout, optimizer), own
        )

    def _work_bytes(self, regions: Sequence[Region]) -> float:
        classes = {region.region_class for region in regions}
        own = [decision for decision in self.problem.groups if decision.region_class in classes]
        held = [max(d.transient_bytes[self.options[d]], d.workspace_bytes[self.options[d]]) for d in own]
        return float(max(held, default=0))


def _levels_in_order(
    kept: Mapping[tuple[int, int], float], rerun: Mapping[tuple[int, int], float]
) -> dict[int, list[tuple[Level, int]]]:
    """Return each kind's levels that no other level beats in both seconds and bytes, with their numbers.

    kept, rerun: bytes and seconds by kind and level.
    """
    found: dict[int, list[tuple[Level, int]]] = defaultdict(list)
    for kind, level in sorted(kept, key=lambda key: (key[0], rerun[key], kept[key])):
        whole = kept[kind, 0]
        size = max(0.0, kept[kind, level])
        if not found[kind] or size < found[kind][-1][0].kept_bytes:
            found[kind].append((Level(size, rerun[kind, level], max(0.0, whole - size)), level))
    return found


def _first(items: list[tuple[float, float, Item]], share: float) -> list[Item]:
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
