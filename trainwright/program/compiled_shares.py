"""What each block of a compiled plan keeps for the backward: a share of what torch's partitioner would keep by itself.

1 is the partitioner's own choice: it keeps what cannot be computed anew for next to nothing. 0 is the block's inputs alone. A
plan writes the blocks whose share is below 1, `{"transformer.h.{0-11}": {"0": "0-5", "0.5": "6"}}`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ..artifacts import Plan, UserError
from .blocks import Region, RegionClass
from .plan_entries import parse_ranges, refuse_unknown_keys
from .program import Program
from .span_text import ranges, span

CompiledSection = dict[str, dict[str, str]]


def region_name(region: Region) -> str:
    """Return the path of a block; of what stands between blocks, the key of its first op."""
    return region.path if region.path is not None else region.ops[0].key


def compiled_section(program: Program, shares: Mapping[int, float]) -> CompiledSection:
    """Write the shares of regions, by index, as a plan's `compile`; regions that are left out have 1."""
    section: CompiledSection = {}
    for region_class in program.classes:
        by_share: dict[float, list[int]] = defaultdict(list)
        for place, region in enumerate(region_class.members):
            if (share := shares.get(region.index, 1.0)) < 1:
                by_share[share].append(place)
        if by_share:
            num = region_class.multiplicity
            blocks = {share: "all" if len(own) == num else ranges(own) for share, own in sorted(by_share.items())}
            section[_key(region_class)] = {f"{share:g}": text for share, text in blocks.items()}
    return section


def shares_of(program: Program, plan: Plan) -> dict[int, float] | None:
    """Return the shares that a plan says, by region; None for a plan that is not compiled.

    Raises `UserError` for a block that the program has not, and for a share that is none.
    """
    if plan.compile is None:
        return None
    classes = {_key(region_class): region_class for region_class in program.classes}
    refuse_unknown_keys(plan.compile, classes, "compile")
    found = dict.fromkeys((region.index for region in program.regions), 1.0)
    for key, entry in plan.compile.items():
        named: set[int] = set()
        for text, blocks in entry.items():
            share = _share(text, key)
            places = parse_ranges(blocks, classes[key].multiplicity, f"{key} compile")
            if twice := sorted(places & named):
                raise UserError(
                    f"each block keeps one share; {key} has two for block {twice[0]}; take it out of one of them"
                )
            named |= places
            found.update({classes[key].members[place].index: share for place in places})
    return found


def _key(region_class: RegionClass) -> str:
    return span([region_name(region) for region in region_class.members])


def _share(text: str, key: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(
            f"a share from 0 (a block's inputs alone) to 1 (what the compiler keeps) is needed; {key} has {text!r}; write "
            "one, such as 0.5"
        )
    return share
