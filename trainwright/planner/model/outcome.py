"""The outcomes of a solve or a search; the value of each is what to do about it."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """The end of a relaxation, of a program with whole columns, or of a search."""

    OPTIMAL = "nothing: the answer is proven to be the best"
    FEASIBLE = "give --time-limit more: something better may be there"
    INFEASIBLE = "loosen the pins, or try joint: the restrictions contradict one another"
    SLOWER = "nothing: whatever there is, what is known is faster"
    STOPPED = "give --time-limit more: nothing was found in it, nor a proof that there is nothing"
    DOES_NOT_FIT = "raise the memory, or make the batch smaller: what holds least is above the budget"
