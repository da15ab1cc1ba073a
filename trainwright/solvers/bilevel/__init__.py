"""Bilevel problems: an upper level over the minimisers of a strongly convex lower one, one block or many."""

from .bo_rep import BOREP
from .bsvrb import BSVRB
from .problem import Blocks
from .solve import BilevelResult, bilevel

__all__ = ["BOREP", "BSVRB", "BilevelResult", "Blocks", "bilevel"]
