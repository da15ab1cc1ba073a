"""The short names in a plan, in words: the loops that are split, the axes that split them, the layouts at rest."""

from __future__ import annotations

import re
from collections import defaultdict

from ..artifacts import Plan

_COMMON = {
    "b0": "the batch",
    "b": "the batch",
    "o": "the output features",
    "i": "the input features, over which the product sums",
    "h": "the attention heads",
    "q": "the positions that ask, in attention",
    "g": "the groups of heads",
    "v": "the vocabulary, or the classes",
    "t": "the rows of the loss, such as tokens",
    "c": "the channels",
    "m": "the rows of a product",
    "n": "the columns of a product",
}
"""By loop, where the op does not say more."""
_OF_OP = {
    ("embedding", "m"): "the features of an embedding",
    ("conv", "o"): "the output channels",
    ("conv", "i"): "the input channels, over which the convolution sums",
    ("conv", "n"): "the batch",
    ("pool", "n"): "the batch",
    ("batch_norm", "n"): "the batch",
    ("experts", "t"): "the tokens",
    ("experts", "e"): "the experts, each rank running its own on all tokens",
    ("experts", "f"): "the inner features of every expert, over which the result sums",
}
"""By the op, or a part of its name, and the loop."""
_NUMBERED = {"b": "dim {} of the inputs", "d": "dim {} of an elementwise op, a norm or a view", "s": "position {} in space",
             "n": "dim {} of the index", "e": "a subscript of the einsum"}  # fmt: skip
_PAIR = "+e"
_ORDINALS = ("outermost", "second", "third", "fourth", "fifth")


def legend(plan: Plan) -> list[tuple[str, str]]:
    """Return every short name that occurs in the plan's decisions, and what it stands for.

    Axes first, then loops (`b0`), then layouts of parameters (`S1.1/3.12.64`).
    """
    rows = [(f"@{axis}", _axis_text(plan, place)) for place, axis in enumerate(plan.inner_mesh)]
    meanings: dict[str, list[str]] = defaultdict(list)
    for key, op in plan.modules.items():
        for loop in op.split:
            meaning = meaning_of(loop, key.rpartition(":")[2].split("#")[0])
            if loop != "-" and meaning not in meanings[loop]:
                meanings[loop].append(meaning)
    rows += [(loop, "; or ".join(found)) for loop, found in sorted(meanings.items()) if found]
    layouts = {place: None for param in plan.params.values() for place in param.layout if place != "R"}
    return rows + [(place, layout_meaning(place)) for place in sorted(layouts)]


def meaning_of(loop: str, op: str = "") -> str:
    """Return what it means to split `loop` of an op.

    >>> meaning_of("t+e", "experts")
    "the tokens, and the experts: rows go to their expert's rank and come back"

    >>> meaning_of("h", "sdpa"), meaning_of("d1", "gelu"), meaning_of("m", "embedding")
    ('the attention heads', 'dim 1 of an elementwise op, a norm or a view', 'the features of an embedding')
    >>> meaning_of("t.0", "cross_entropy")
    'the rows of the loss, such as tokens (the outermost of the dims that were merged into it)'
    """
    if loop.endswith(_PAIR):
        return (
            f"{meaning_of(loop.removesuffix(_PAIR), op)}, and the experts: rows go to their expert's rank and come back"
        )
    within, stem, factor = _parts(loop)
    op = within or op
    own = next((text for (part, name), text in _OF_OP.items() if part in op and name == stem), None)
    letter, number = stem[:1], stem[1:]
    numbered = _NUMBERED[letter].format(number) if letter in _NUMBERED else f"the loop {stem}"
    meaning = own or _COMMON.get(stem) or numbered
    if not factor:
        return meaning
    which = _ORDINALS[int(factor)] if int(factor) < len(_ORDINALS) else f"{int(factor) + 1}th"
    return f"{meaning} (the {which} of the dims that were merged into it)"


def _parts(loop: str) -> tuple[str, str, str]:
    """The op that a loop's name begins with, if any, the name itself, and the number of the factor: `gelu.d0.1`."""
    names = loop.partition("~")[0].split(".")
    factor = names.pop() if names[-1].isdigit() else ""
    return ".".join(names[:-1]), names[-1], factor


def layout_meaning(place: str) -> str:
    """Return what a layout of a parameter at rest means.

    >>> layout_meaning("S0")
    'each rank stores its part of dim 0'
    >>> layout_meaning("S1.1/3.12.64")
    'each rank stores its part of dim 1, seen as 3 × 12 × 64 and cut along the 12'
    """
    found = re.fullmatch(r"S(\d+)(?:\.(\d+)/([\d.]+))?", place)
    if found is None:
        return place
    dim, factor, sizes = found.groups()
    text = f"each rank stores its part of dim {dim}"
    if factor is None:
        return text
    factors = sizes.split(".")
    return f"{text}, seen as {' × '.join(factors)} and cut along the {factors[int(factor)]}"


def _axis_text(plan: Plan, place: int) -> str:
    size = list(plan.inner_mesh.values())[place]
    if len(plan.inner_mesh) == 1:
        return f"the only axis of the mesh, {size} ranks"
    which = "outermost" if place == 0 else "innermost" if place == len(plan.inner_mesh) - 1 else "middle"
    return f"the {which} axis of the mesh, {size} ranks"
