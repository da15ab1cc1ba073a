"""Refuses the entries of a hand-edited plan that nothing would read, with an error that names them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from ..artifacts import BatchEntry, Plan, UserError
from .micro_batches import WEIGHTED, WHOLE_MEAN, WHOLE_SUM

_BLOCKS = re.compile(r"\{[^}]*\}|\d+")
_CORRECTIONS = (WEIGHTED, WHOLE_SUM, WHOLE_MEAN)


def refuse_unknown_keys(section: Mapping[str, object], known: Collection[str], name: str) -> None:
    """Raise `UserError` for an entry of `section` that is none of the program's, and suggest similar ones."""
    for key in section:
        if key not in known:
            raise UserError(f"entries of this model are needed under {name}; {key!r} is none; {_instead(key, known)}")


def _instead(key: str, known: Collection[str]) -> str:
    """Return the advice for an unknown key: the entry with the same blocks, or similar entries."""
    same = [own for own in known if _BLOCKS.sub("*", own) == _BLOCKS.sub("*", key)]
    if same:
        return (
            f"its blocks stand under {', '.join(same)}, which share one split or layout; edit that entry: what it recomputes "
            "or offloads may name some of the blocks, such as 0-1"
        )
    near = near_misses(key, known)
    return f"take it out, or write one of {', '.join(near)}" if near else "take it out"


def near_misses(key: str, known: Collection[str], num: int = 3) -> list[str]:
    """Return the entries that contain `key`, are similar to it, or have a path with a similar end.

    >>> near_misses("mlp.c_cf", ["transformer.h.{0-1}.mlp.c_fc:linear", "lm_head:linear"])
    ['transformer.h.{0-1}.mlp.c_fc:linear']
    """
    holding = [own for own in known if key in own]
    tails = {own: own.partition(":")[0].split(".") for own in known}
    depth = key.partition(":")[0].count(".") + 1
    ends = {own: ".".join(parts[-depth:]) for own, parts in tails.items()}
    alike = difflib.get_close_matches(key.partition(":")[0], set(ends.values()), n=num, cutoff=0.6)
    found = [*holding, *difflib.get_close_matches(key, known, n=num, cutoff=0.6)]
    found += [own for end in alike for own in known if ends[own] == end]
    return list(dict.fromkeys(found))[:num]


def parse_ranges(text: str, count: int, where: str) -> set[int]:
    """Read `all` or runs of numbers below `count`, each block once; `UserError` naming `where` otherwise.

    >>> sorted(parse_ranges("0-2,5", 6, "c_fc out"))
    [0, 1, 2, 5]
    """
    if text == "all":
        return set(range(count))
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < count:
            known = "0" if count == 1 else f"0-{count - 1}"
            raise UserError(
                f"blocks are needed as in {known}, the smaller first, or all; {where} has {text!r}; write {known} or a part of it"
            )
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        twice = next(block for block in found if found.count(block) > 1)
        raise UserError(f"each block may be named once; {where} has {text!r}, which names {twice} twice; name it once")
    return set(found)


def refuse_other_batch(given: BatchEntry, own: BatchEntry, key: str) -> None:
    """Raise `UserError` where a plan's batch entry has another shape or dtype than the program's."""
    if (given.shape, given.dtype) != (own.shape, own.dtype):
        raise UserError(
            f"the batch that was planned for is needed; {key} is {own.dtype} of shape {list(own.shape)}, and the plan says "
            f"{given.dtype} of shape {list(given.shape)}; plan anew for another batch"
        )


def refuse_unknown_corrections(plan: Plan, known: Sequence[str]) -> None:
    """Raise `UserError` for a correction that no op of a micro-batch would apply."""
    if plan.corrections and plan.micro_batches == 1:
        raise UserError(
            "corrections are for several micro-batches; this plan has one; take `corrections` out, or plan with --micro-batches"
        )
    refuse_unknown_keys(plan.corrections, known, "corrections")
    for key, value in plan.corrections.items():
        if isinstance(value, str) and value not in _CORRECTIONS:
            raise UserError(
                f"a correction is a factor or one of {', '.join(_CORRECTIONS)}; {key} has {value!r}; write one of these"
            )
