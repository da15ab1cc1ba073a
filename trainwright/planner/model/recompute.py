"""The memory half of the joint problem: what is kept for the backward, converted again, or rederived.

Counts are over the instances of a class. Reruns take the first instances, whose backward comes last, when kept tensors
are gone; what is kept follows behind them.

    K[t, n] ∈ 0..M     instances that keep the output t in its native layout n          K ≤ M · Σ {x : leaves n}
    KI[d, k] ∈ 0..M    instances that keep what the group d saves inside                KI ≤ M · x[d, k]
    KC[u, w] ∈ 0..M    instances that keep the converted copy                           KC ≤ M · Σ {x : leaves n ≠ w}
    C[u, n, w] ≥ 0     instances that convert again from n
    r[d, k] ≥ 0        instances that rerun the group's forward                         r ≤ M · x[d, k]

    need      K[t, w] + r[made w] + KC[u, w] + Σ_n C[u, n, w]  ≥  M · Σ {x : wants and saves w}
    inner     KI[d] + r[d] ≥ M   where the group saves anything inside
    rerun     Σ {r[d, k] : k wants w} ≤ the left side of `need`, for every operand
    source    C[u, n, w] ≤ K[t, n] + r[made n]     (a copy is never its own source; for parameters ≤ M · Σ {x : leaves n})

A tensor that another region reads is kept or not, never rederived; what the caller holds is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...program.blocks import RegionClass
from ...program.layout import Layout
from ..problem.problem import Decision, Demand, Problem, Stored, Use, Want
from .milp import MIB, Model, Terms
from .sharding import Sharding, has_one_want, ones, wants_of

NEED = "what the backward needs is kept or rederived"
RERUN = "a rerun finds its operands"
SOURCE = "a conversion finds its source"
EXISTS = "only what the chosen layouts make can be kept or rederived"
PADDING = "the padding of kept copies"
RERUN_EPSILON_S = 1e-9
"""So that nothing is rerun for no reason."""


@dataclass(eq=False)
class Recompute:
    """The columns of the memory half."""

    keep: dict[tuple[Stored, Layout], int] = field(default_factory=dict)
    keep_inner: dict[tuple[Decision, int], int] = field(default_factory=dict)
    keep_copy: dict[tuple[Use, Want], int] = field(default_factory=dict)
    copy_mib: dict[tuple[Use, Want], float] = field(default_factory=dict)
    """The MiB of one such copy, made from the layout that leaves least padding."""
    padding: dict[tuple[Use, Want], int] = field(default_factory=dict)
    """The column of the MiB that padding adds to all kept ones, where layouts differ in that."""
    convert: dict[tuple[Use, Layout, Want], int] = field(default_factory=dict)
    rerun: dict[tuple[Decision, int], int] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    """The column of the offloaded instances, by the column of the kept ones; see `offload`."""
    resident: dict[int, int] = field(default_factory=dict)
    """The column of the instances that stay on the device, by the column of the kept ones."""
    states: dict[tuple[Decision, int], int] = field(default_factory=dict)
    """The column of the instances with offloaded optimizer states, by parameter and option; see `offload_states`."""
    states_stay: dict[tuple[Decision, int], int] = field(default_factory=dict)
    state_window: int = -1
    """MiB of offloaded optimizer states that stand on the device at the optimizer's step; −1: none may leave."""
    params: dict[tuple[Decision, int], int] = field(default_factory=dict)
    """The column of the instances of a parameter that rest on disks, by parameter and option; see `resting`."""
    params_stay: dict[tuple[Decision, int], int] = field(default_factory=dict)
    values_held: Terms = field(default_factory=list)
    """MiB of parameters that were read from disks, in every row."""
    in_flight: dict[RegionClass, int] = field(default_factory=dict)
    """MiB on their way out or back while a class runs."""

    def kept_copies(self, use: Use, want: Want) -> Terms:
        """Return the MiB of the converted copies that are kept on the device, as terms of a row."""
        terms = [(self.stays(self.keep_copy[use, want]), self.copy_mib[use, want])]
        return [*terms, (self.padding[use, want], 1.0)] if (use, want) in self.padding else terms

    def stays(self, kept: int) -> int:
        """Return the column of the instances that are kept on the device."""
        return self.resident.get(kept, kept)

    def on_the_way(self, region_class: RegionClass) -> Terms:
        """Return the MiB in flight while a class runs, as terms of a row."""
        return [(self.in_flight[region_class], 1.0)] if region_class in self.in_flight else []


def add_recompute(model: Model, problem: Problem, sharding: Sharding) -> Recompute:
    """Add the columns and rows of the memory half to `model`."""
    return _FateBuilder(model, problem, sharding).build()


class _FateBuilder:
    def __init__(self, model: Model, problem: Problem, sharding: Sharding) -> None:
        self.model, self.problem, self.sharding = model, problem, sharding
        self.columns = Recompute()
        self.by_decision: dict[Decision, list[Use]] = {}
        for use in problem.uses:
            for demand in use.demands:
                self.by_decision.setdefault(demand.decision, []).append(use)

    def build(self) -> Recompute:
        for decision in self.problem.groups:
            if self._can_rerun(decision):
                self._add_rerun(decision)
        for stored in self.problem.stored:
            self._add_keep(stored)
        for use in self.problem.uses:
            self._add_copies(use)
        for decision in self.problem.groups:
            self._add_inner(decision)
        for use in self.problem.uses:
            for want in wants_of(use):
                self._add_need(use, want)
        self.sharding.joined.write(self.model)
        return self.columns

    def _can_rerun(self, decision: Decision) -> bool:
        return decision.group is not None and decision.group.may_rerun

    def _add_rerun(self, decision: Decision) -> None:
        for option, chosen in enumerate(self.sharding.choice[decision]):
            cost = decision.rerun_s[option] + RERUN_EPSILON_S
            rerun = self.model.column(float(decision.count), cost)
            self.columns.rerun[decision, option] = rerun
            self.model.row(EXISTS, [(rerun, 1.0), (chosen, -float(decision.count))], upper=0.0)

    def _add_keep(self, stored: Stored) -> None:
        count = float(stored.source.decision.count)
        for native, chosen in self.sharding.yields(stored.source).items():
            column = self.model.column(count, integer=not stored.boundary)
            self.columns.keep[stored, native] = column
            self.model.row(EXISTS, [(column, 1.0), *ones(chosen, -count)], upper=0.0)
        keeps = [self.columns.keep[stored, native] for native in self.sharding.yields(stored.source)]
        if stored.held:
            sums = [
                column
                for native, chosen in self.sharding.yields(stored.source).items()
                for column in chosen
                if not stored.is_result(native)
            ]
            self.model.row(NEED, ones(keeps) + ones(sums, count), lower=count)
        if stored.own_saved:
            self.model.row(NEED, ones(keeps) + self._reruns(stored.source.decision, stored), lower=count)

    def _reruns(self, decision: Decision, stored: Stored) -> Terms:
        """All rerun columns of a group, where its output may be rederived."""
        if stored.boundary or stored.held:
            return []
        return [(column, 1.0) for (owner, _), column in self._rerun_items(decision)]

    def _rerun_items(self, decision: Decision):
        keys = [(decision, option) for option in range(len(decision.options))]
        return [(key, self.columns.rerun[key]) for key in keys if key in self.columns.rerun]

    def _add_inner(self, decision: Decision) -> None:
        if not any(decision.inner_bytes):
            return
        terms: Terms = [(column, 1.0) for _, column in self._rerun_items(decision)]
        for option, chosen in enumerate(self.sharding.choice[decision]):
            column = self.model.column(float(decision.count), integer=True)
            self.columns.keep_inner[decision, option] = column
            self.model.row(EXISTS, [(column, 1.0), (chosen, -float(decision.count))], upper=0.0)
            terms.append((column, 1.0))
        self.model.row(NEED, terms, lower=float(decision.count))

    def _add_copies(self, use: Use) -> None:
        """Add the columns of converted copies: how many instances keep each, and how many convert it again, from which layout."""
        if not self._may_matter(use):
            return
        count = float(use.count)
        supply = self.sharding.yields(use.source)
        for want in wants_of(use):
            others = [native for native in supply if native != want[0] and (use, native, want) in self.sharding.flow]
            if not others:
                continue
            keep = self.model.column(count, integer=True)
            self.columns.keep_copy[use, want] = keep
            self._add_padding(use, want, others, keep)
            columns = [column for native in others for column in supply[native]]
            self.model.row(EXISTS, [(keep, 1.0), *ones(columns, -count)], upper=0.0)
            for native in others:
                self._add_convert(use, native, want)
        self._add_sources(use)

    def _add_padding(self, use: Use, want: Want, natives: list[Layout], keep: int) -> None:
        """Add what the padding that a gather leaves behind adds to kept copies, by the layout that they are made from."""
        sizes = {native: self.problem.costs.copy_bytes(use.source.tensor, native, want[0]) / MIB for native in natives}
        least = self.columns.copy_mib[use, want] = min(sizes.values())
        more = {native: size - least for native, size in sizes.items() if size > least}
        if not more:
            return
        padding = self.columns.padding[use, want] = self.model.column(use.count * max(more.values()))
        for native, size in more.items():
            flow = self.sharding.flow[use, native, want]
            terms = [(keep, size), (flow, use.count * size), (padding, -1.0)]
            self.model.row(PADDING, terms, upper=use.count * size)

    def _may_matter(self, use: Use) -> bool:
        return any(any(demand.saves) or self._can_rerun(demand.decision) for demand in use.demands)

    def _add_convert(self, use: Use, native: Layout, want: Want) -> None:
        seconds = self.problem.costs.move_s(use.source.tensor, native, want[0])
        leg = self.sharding.joined.again(use, native, want, seconds)
        column = self.model.column(float(use.count), leg.seconds + RERUN_EPSILON_S)
        self.sharding.joined.add_leg(leg, (use, want), column)
        self.columns.convert[use, native, want] = column

    def _add_sources(self, use: Use) -> None:
        """Add the rows by which a conversion starts from what is there: one a source, where one reader asks for one copy."""
        single = has_one_want(use)
        for native, chosen in self.sharding.yields(use.source).items():
            found = [self.columns.convert.get((use, native, want)) for want in wants_of(use)]
            columns = [column for column in found if column is not None]
            if not columns:
                continue
            most = float(use.count * (1 if single else min(len(columns), len(use.demands))))
            self.model.row(EXISTS, [*ones(columns), *ones(chosen, -most)], upper=0.0)
            if not use.source.is_param:
                there = _negated(self._native(use, native))
                for together in [columns] if single else [[column] for column in columns]:
                    self.model.row(SOURCE, [*ones(together), *there], upper=0.0)

    def _native(self, use: Use, native: Layout) -> Terms:
        """In how many instances the native tensor is there when the region's backward begins, in units of the use."""
        stored = self.problem.stored_of[use]
        root = self._root_layout(use, stored, native)
        scale = use.count / stored.source.decision.count
        terms: Terms = [(self.columns.keep[stored, layout], scale) for layout in root]
        if use.inside and not stored.boundary and not stored.held:
            made = [k for k, found in enumerate(use.source.natives) if found == native]
            items = [self.columns.rerun.get((use.source.decision, k)) for k in made]
            terms += [(column, 1.0) for column in items if column is not None]
        return terms

    def _root_layout(self, use: Use, stored: Stored, native: Layout) -> set[Layout]:
        """Return the layouts of the memory behind a view that is in layout `native`."""
        return {root for root, own in zip(stored.source.natives, use.source.natives) if own == native}

    def _available(self, use: Use, want: Want) -> Terms:
        """In how many instances what is wanted is there: natively, kept as a copy, or converted again."""
        terms: Terms = []
        if (use, want) in self.columns.keep_copy:
            terms.append((self.columns.keep_copy[use, want], 1.0))
        supply = self.sharding.yields(use.source)
        terms += [
            (self.columns.convert[use, native, want], 1.0)
            for native in supply
            if (use, native, want) in self.columns.convert
        ]
        if want[0] in supply:
            if use.source.is_param:
                terms += ones(supply[want[0]], float(use.count))
            else:
                terms += self._native(use, want[0])
        return terms

    def _add_need(self, use: Use, want: Want) -> None:
        available = self._available(use, want)
        for demand in use.demands:
            saving = self._saving(demand, want)
            if saving:
                self.model.row(NEED, available + ones(saving, -float(use.count)), lower=0.0)
            self._add_rerun_need(use, demand, want, available)

    def _saving(self, demand: Demand, want: Want) -> list[int]:
        return [column for column, saves in zip(self.sharding.choice[demand.decision], demand.saves) if want in saves]

    def _add_rerun_need(self, use: Use, demand: Demand, want: Want, available: Terms) -> None:
        share = use.count / demand.decision.count
        reruns = [
            (self.columns.rerun[demand.decision, option], share)
            for option, wants in enumerate(demand.wants)
            if want in wants and (demand.decision, option) in self.columns.rerun
        ]
        if reruns:
            self.model.row(RERUN, reruns + _negated(available), upper=0.0)


def _negated(terms: Terms) -> Terms:
    return [(column, -coefficient) for column, coefficient in terms]
