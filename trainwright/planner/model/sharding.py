"""The sharding half of the joint problem: one option a decision, and which layout serves which want.

    x[d, k] ∈ {0, 1}         decision d takes option k                        Σ_k x[d, k] = 1
    f[u, n, w] ∈ [0, 1]      use u serves the want w from the native layout n
        demand   Σ_n f[u, n, w] ≥ Σ {x[d, k] : k wants w}     for every reader d     (=, where there is one reader)
        supply   f[u, n, w] ≤ Σ {x[s, k] : k leaves n}                               (Σ_w f = …, where there is one)

    seconds  Σ count · (compute + update + inner communication)[d, k] · x  +  Σ count · (there + back)[u, n, w] · f

Parameters that travel together share latencies, which are taken out of their seconds and counted by themselves (`joined`).

A want is a pair (forward, gradient) and is paid once a use, as one converted copy serves all that want the same. Of a
parameter that several regions read (`tied`) one copy may serve the readers of all of them, paid once:

    f0[n, w] ∈ {0, 1}        all uses are served from n       f[u, n, w] + f0[n, w] in place of f[u, n, w] in both rows
        no more  Σ_n f[u, n, w] ≤ Σ {x[d, k] : k wants w}                           where d is u's one reader
        several  f0[n, w] ≤ Σ {x[d, k] : k wants w, d of another use}     for every use of one region

On more than two axes only plain changes of layout are offered (`is_plain`), since the columns grow with the fourth
power of an axis's options; what mixes gathers, cuts and exchanges in one change of layout is then out of reach.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from ...program.decisions import Overlap
from ...program.layout import PARTIAL, REPLICATE, Layout
from ...program.transition import gradient_layout
from ..problem.problem import Decision, Demand, Problem, Source, Use, Want
from .joined import Joined
from .milp import MIB, Model, Terms
from .tied import Tied, find_tied

if TYPE_CHECKING:
    from .hidden import Hidden

FEW_AXES = 2
MANY_USES = 80
"""So many tensors between groups and parameters (an encoder with a decoder) are too many for every change of layout on two
axes."""
ONE_OPTION = "one option for every group and parameter"
DEMAND = "every want is served"
SUPPLY = "only the layout that is there serves"
SEVERAL = "one copy for several regions is wanted by several"


@dataclass(eq=False)
class Sharding:
    """The columns of the sharding half."""

    joined: Joined
    """The reshards of parameters by collective, and the latencies that they share."""
    choice: dict[Decision, list[int]] = field(default_factory=dict)
    flow: dict[tuple[Use, Layout, Want], int] = field(default_factory=dict)
    tied: list[Tied] = field(default_factory=list)
    """Parameters that several regions read."""
    shared: dict[tuple[Source, Layout, Want], int] = field(default_factory=dict)
    """The column, by tied parameter, native layout and want, that is 1 if one copy serves all readers."""
    hidden: Hidden | None = None
    """The communication that computation hides, where it has a price (`hidden`)."""

    def yields(self, source: Source) -> dict[Layout, list[int]]:
        """Return, by native layout, the columns of the options that leave `source` in it."""
        found: dict[Layout, list[int]] = defaultdict(list)
        for column, native in zip(self.choice[source.decision], source.natives):
            found[native].append(column)
        return found

    def chosen_mib(self, decision: Decision, num_bytes: Sequence[int]) -> Terms:
        """Return the MiB that the chosen option of a decision has, of `num_bytes` by option."""
        return [(column, size / MIB) for column, size in zip(self.choice[decision], num_bytes) if size]

    def wanting(self, demand: Demand, want: Want) -> list[int]:
        """Return the columns of the reader's options that want `want`."""
        return [column for column, wants in zip(self.choice[demand.decision], demand.wants) if want in wants]


def add_sharding(model: Model, problem: Problem, travel: Overlap = "none") -> Sharding:
    """Add the columns and rows of the sharding half to `model`; parameters `travel` so, and then share latencies."""
    sharding = Sharding(Joined(problem, travel))
    if fixed_s := problem.costs.fixed_s(problem.program):
        model.one(fixed_s)
    for decision in problem.decisions:
        columns = [model.column(1.0, decision.option_s(k), integer=True) for k in range(len(decision.options))]
        sharding.choice[decision] = columns
        model.row(ONE_OPTION, ones(columns), 1.0, 1.0)
    sharding.tied = find_tied(problem)
    for tied in sharding.tied:
        _add_shared(model, problem, sharding, tied)
    for use in problem.uses:
        _add_flow(model, problem, sharding, use)
    sharding.joined.write(model)
    return sharding


def is_large(problem: Problem) -> bool:
    """Tell whether only plain changes of layout are offered, and a wider gap is taken soon: all would be too many."""
    num_axes = len(problem.mesh)
    return num_axes > FEW_AXES or (num_axes == FEW_AXES and len(problem.uses) > MANY_USES)


def wants_of(use: Use) -> list[Want]:
    """Return the distinct wants of all readers of a use, in a fixed order."""
    return sorted({want for demand in use.demands for wants in demand.wants for want in wants})


def has_one_want(use: Use) -> bool:
    """Tell whether whatever is chosen asks for one copy of a use."""
    return len(use.demands) == 1 and all(len(wants) == 1 for wants in use.demands[0].wants)


def is_plain(source: Layout, target: Layout) -> bool:
    """Tell whether a change of layout does the same along all its axes, and exchanges along one at most.

    >>> is_plain((0, 0, REPLICATE), (REPLICATE, REPLICATE, REPLICATE)), is_plain((0, 0, 1), (0, 1, REPLICATE))
    (True, False)
    """
    kinds = [_kind(before, after) for before, after in zip(source, target) if before != after]
    return len(kinds) <= 1 or (len(set(kinds)) == 1 and kinds[0] != "exchange")


def _kind(before: int, after: int) -> str:
    if before == PARTIAL:
        return "sum"
    if before == REPLICATE:
        return "cut"
    return "gather" if after == REPLICATE else "exchange"


def ones(columns: Iterable[int], factor: float = 1.0) -> list[tuple[int, float]]:
    """Return the terms `factor · Σ columns`."""
    return [(column, factor) for column in columns]


def _add_shared(model: Model, problem: Problem, sharding: Sharding, tied: Tied) -> None:
    """Add the columns of one copy for all readers. One that is read as it rests is no choice, see `tied`."""
    use = tied.uses[0]
    for want in tied.wants:
        for native in sharding.yields(tied.source):
            times = _edge_s(problem, use, native, want)
            if times is not None:
                way = sharding.joined.of(use, native, want, times)
                column = model.column(1.0, way.seconds, integer=native != want[0])
                # of two regions that read one copy, the first gathers it; of several, any but the last may
                sharding.joined.add(way, (tied.source, want), column, use=use if len(tied.uses) == 2 else None)
                sharding.shared[tied.source, native, want] = column
                for others in _other_readers(tied, sharding, want):
                    model.row(SEVERAL, [(column, 1.0), *ones(others, -1.0)], upper=0.0)


def _other_readers(tied: Tied, sharding: Sharding, want: Want) -> Iterator[list[int]]:
    """For each use of one region, the columns of the options by which other regions want the same."""
    for use in tied.uses:
        if use.count == 1:
            others = [demand for other in tied.uses if other is not use for demand in other.demands]
            yield [column for demand in others for column in sharding.wanting(demand, want)]


def _edge_s(problem: Problem, use: Use, native: Layout, want: Want) -> tuple[float, float] | None:
    """Return the seconds, forward and backward, of one change of layout; None where it is not offered."""
    there, back = aligned(use, native, want)
    if is_large(problem) and not (is_plain(native, there) and is_plain(back, gradient_layout(native))):
        return None
    return problem.costs.edge_s(use.source.tensor, native, there, back)


def _add_flow(model: Model, problem: Problem, sharding: Sharding, use: Use) -> None:
    supply = sharding.yields(use.source)
    served: dict[Want, list[int]] = defaultdict(list)
    given: dict[Layout, list[list[int]]] = defaultdict(list)
    for want in wants_of(use):
        for native in supply:
            times = _edge_s(problem, use, native, want)
            if times is None:
                continue
            shared = sharding.shared.get((use.source, native, want))
            way = sharding.joined.of(use, native, want, times)
            sharding.flow[use, native, want] = model.column(1.0, use.count * way.seconds)
            sharding.joined.add(way, (use, want), sharding.flow[use, native, want], use.count, use)
            columns = [sharding.flow[use, native, want], *([] if shared is None else [shared])]
            served[want] += columns
            given[native].append(columns)
    is_one = has_one_want(use)
    exact = is_one and not any(len(columns) > 1 for found in given.values() for columns in found)
    for want in wants_of(use):
        if is_one and not exact:
            # a copy that nobody reads may cost nothing, and a gradient that it does not bring is no memory that is free
            own = [sharding.flow[key] for native in supply if (key := (use, native, want)) in sharding.flow]
            model.row(DEMAND, ones(own) + ones(sharding.wanting(use.demands[0], want), -1.0), upper=0.0)
        for demand in use.demands:
            wanting = sharding.wanting(demand, want)
            if wanting:
                model.row(DEMAND, ones(served[want]) + ones(wanting, -1.0), 0.0, 0.0 if exact else float("inf"))
    for native, columns in supply.items():
        if exact:
            model.row(SUPPLY, ones(chain.from_iterable(given[native])) + ones(columns, -1.0), 0.0, 0.0)
        else:
            for together in given[native]:
                model.row(SUPPLY, ones(together) + ones(columns, -1.0), upper=0.0)


def flow_s(problem: Problem, use: Use, native: Layout, want: Want) -> tuple[float, float]:
    """Return the seconds, there and back, of one change of layout that is offered."""
    times = problem.costs.edge_s(use.source.tensor, native, *aligned(use, native, want))
    assert times is not None, "a flow has seconds"
    return times


def aligned(use: Use, native: Layout, want: Want) -> Want:
    """Return a want as it is served; a tensor without gradient has none to bring back."""
    return want if use.tensor.requires_grad else (want[0], native)
