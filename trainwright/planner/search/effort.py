"""How much a search does, by the size of its problem: every threshold and every share of the time, in one record.

Sizes are of three kinds. A program of few ops is simulated soon (`problem.is_quick`), one of many takes seconds and has weak
relaxations (`problem.is_long`). A problem on three axes, or with an encoder and a decoder on two, has relaxations that take
seconds (`sharding.is_large`). A model of few columns is solved whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.milp import Patience
from ..model.sharding import is_large
from ..problem.problem import Problem

GAP = 1e-3
"""A search ends where its answer is proven to be within this of the optimum, and looks for nothing that gains less."""
NEAR = 0.02
"""What is within this share of its bound, budget or price is not looked at again."""
CLOSE = 5e-3
"""The same after seconds of search, as is the typical error of the objective."""

_PATIENCE = Patience(2.0, CLOSE)
_PATIENCE_IN_BUCKETS = Patience(2.0, CLOSE, grows=True)
_PATIENCE_OF_LARGE = Patience(2.0, 2e-2)
_PATIENCE_FOR_LEAST = Patience(1.0, 2e-2)


@dataclass(frozen=True)
class Effort:
    """The thresholds of the searches of one problem; seconds are of counted work (`deadline`)."""

    # How long a solve goes on

    patience: Patience = _PATIENCE
    """A binding budget can take minutes to the last thousandth."""
    patience_in_buckets: Patience = _PATIENCE_IN_BUCKETS
    """That a latency is paid once or not at all makes the relaxation weak."""
    patience_within: Patience | None = None
    """The patience within a budget, where it differs from these."""
    patience_for_least: Patience = _PATIENCE_FOR_LEAST
    """The patience with what holds least: a little more does, since its rows are fitted afterwards."""
    gap_of_least: float = CLOSE
    """The gap of what holds least."""
    longest_least_s: float = 15.0
    """No search for what holds least takes longer."""

    # What is solved how

    few_columns: int = 3000
    """A model of so many columns is solved whole at once, and a sharding that the objective ranks slower is fitted too."""
    many_columns: int = 40_000
    """With so many, known shardings are tried before the relaxation: one may be close to the floor."""
    looks_among_mixed_after_s: float = 2.0
    """A branch and bound that takes longer looks once among the options that the root's relaxation mixes."""
    far_gap: float = NEAR
    """An incumbent within this gap of the bound makes that look unnecessary."""

    # Shares of a search's time

    mixed_share: float = 2 / 3
    """The share of the program of the options that the relaxation mixes."""
    solve_share: float = 2 / 3
    """The share of the time left that one solve within a budget may take: its answer may not fit."""
    relaxation_share: float = 1 / 3
    """The share of the relaxation, where known shardings can take its place."""
    known_share: float = 1 / 3
    """The share that a known sharding gets even if less is left, where there is no answer yet: none must be lost; and the share
    of the search one by one that proposes shardings."""
    leaf_share: float = 1 / 4
    """The share of one solve with the sharding held."""
    start_share: float = 1 / 6
    """The share of finding one sharding to begin from."""
    guard_share: float = 1 / 4
    """The share of fitting one known sharding against an answer."""
    beside_share: float = 1 / 2
    """The share of looking beside an answer, and of going on from what holds least."""
    later_way_share: float = 1 / 2
    """The share of a later way for parameters to travel."""
    after_refusal_s: float = 30.0
    """The seconds that a recipe has at least where the search of everything found nothing in its time: it has few choices."""
    axis_factor: float = 12.0
    """The factor by which one more axis lengthens a relaxation."""

    # What is looked at

    corrections: int = 8
    """The row budget of a search is corrected so often."""
    proposals: int = 8
    """So many more shardings are proposed under one row budget, without those that do not fit, while the gap is wide."""
    refits: int = 6
    """What is kept is chosen anew for one sharding so often."""
    refits_of_least: int = 3
    """The same for the sharding of what holds least, where that fits."""
    rest_shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    """The shares of the budget that a sharding which is chosen first may take at rest."""
    kept_bytes_weight: float = 0.01
    """Where the least memory is looked for, the seconds of the fastest step count as this share of what it holds if all is kept:
    without them most columns cost nothing, and the relaxation has many optimal vertices."""
    bisects_known: bool = False
    """True where refits of a known sharding go back up between two row budgets; those of a proposed one do in a small model."""
    tries_below: float = 1.1
    """That plan may fit if its peak by the rows is below this many times the budget; a recipe, if the least found is."""
    hopeless: float = 1.5
    """Where the rows are proven to let nothing into so many times the budget, what holds least is not tried."""
    often_off: float = CLOSE
    """The typical relative error of the objective: a known sharding that it ranks slower by no more may be the faster one."""
    most_off: float = 0.05
    """The largest: a recipe whose plans take longer than the answer by more is not searched for a faster one."""
    room: float = 1.02
    """The first row budget of a known sharding, as a multiple of the answer's."""
    wide_room: float = 1.25
    """The same as a multiple of the budget, where the rows were seen to be too careful, or where to see it takes little."""
    is_wide: bool = False
    """True where known shardings always begin with the wide one."""
    worth: float = 0.01
    """The share of a step that all shareable latencies must take for buckets to be worth a search, where nothing is hidden."""

    # How row budgets follow one another (`aim`)

    narrow: float = 0.2 * NEAR
    """Row budgets that differ by this share of the budget are nearly one."""
    spent: float = 0.02 * NEAR
    """Row budgets that differ by this share are as near one another as sizes of values are."""
    step_up: float = 0.97
    """The next row budget is larger by this share of the memory that an answer leaves."""
    step_down: float = 0.02
    """The next row budget is smaller by n + 1 times the memory that the n-th answer lacks, and by this share of it."""
    most_again: float = 0.001
    """The one that is added to n counts no more than this share of the budget."""

    # How branch and bound chooses (`branching`)

    param_weight: float = 0.25
    """The weight of a parameter among what a group exchanges, beside an activation's."""
    trials: int = 3
    """Groups whose children are looked at before one of them is branched on, where nothing is known of them yet."""
    gain_without: float = 0.3
    """The gain, as a share of the parent's objective, that a child without a solution counts as."""
    mean_weight: float = 0.1
    """The weight of the mean gain of a group's children, beside the least."""

    @classmethod
    def of(cls, problem: Problem) -> Effort:
        """Return the thresholds for the size of a problem."""
        fields: dict[str, object] = {}
        if problem.is_quick:
            fields |= dict.fromkeys(("bisects_known", "is_wide"), True)
        if is_large(problem):
            fields |= {"patience_within": _PATIENCE_OF_LARGE, "solve_share": 1 / 2}
        return cls(**fields)  # type: ignore[arg-type]
