"""Which entries a rank holds: against a split written out factor by factor, and all ranks together hold each entry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.artifacts import UserError
from trainwright.launch import process_group
from trainwright.program.layout import Layout, Slot, local_shape, slot_range
from trainwright.runtime.extents import extent_of, whole_extent
from trainwright.runtime.storage import Piece, StoredTensors, write_pieces


def split_by_hand(
    full: torch.Tensor, slots: Sequence[Slot], layout: Layout, mesh: Sequence[int], coords: Sequence[int]
) -> torch.Tensor:
    part = full.reshape([slot.size for slot in slots])
    for index, slot in enumerate(slots):
        start, stop = slot_range(
            slot.size, [(mesh[axis], coords[axis]) for axis, at in enumerate(layout) if at == index]
        )
        part = part.narrow(index, start, stop - start)
    return part.reshape(local_shape(full.shape, slots, layout, mesh, coords))


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Slot], Layout, tuple[int, ...]]:
    dims = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3))
    slots = [Slot(dim, size) for dim, sizes in enumerate(dims) for size in sizes]
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    layout = tuple(draw(st.integers(-1, len(slots) - 1)) for _ in mesh)
    return tuple(math.prod(sizes) for sizes in dims), slots, layout, mesh


def ranks(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh)))


@given(splits())
def test_a_part_is_what_a_split_by_factors_gives(
    split: tuple[tuple[int, ...], list[Slot], Layout, tuple[int, ...]],
) -> None:
    shape, slots, layout, mesh = split
    full = torch.arange(math.prod(shape)).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coords in ranks(mesh):
        extent = extent_of(shape, slots, layout, mesh, coords)
        part = extent.cut(full)
        assert torch.equal(part, split_by_hand(full, slots, layout, mesh, coords))
        for box in extent.boxes:
            box.of_whole(seen).add_(1)
    copies = math.prod(size for size, at in zip(mesh, layout) if at < 0)
    assert (seen == copies).all(), "every entry is held, once a group of replicas"


def test_an_empty_part_has_no_boxes() -> None:
    extent = extent_of((3,), [Slot(0, 3)], (0,), (4,), (3,))
    assert extent.boxes == ()
    assert extent.cut(torch.ones(3)).shape == (0,)


def test_what_is_written_in_parts_is_read_in_other_parts(tmp_path: Path) -> None:
    """A rank reads its heads of a fused weight from a file that holds it whole."""
    weight = torch.arange(5 * 12, dtype=torch.float64).reshape(5, 12)
    slots = [Slot(0, 5), Slot(1, 3), Slot(1, 4)]
    heads = extent_of(weight.shape, slots, (2,), (2,), (1,))
    with process_group():
        pieces = {"weight": Piece(whole_extent(weight.shape), weight), "step": Piece(whole_extent(()), torch.tensor(3))}
        write_pieces(pieces, tmp_path)
    stored = StoredTensors(tmp_path)
    assert sorted(stored.names) == ["step", "weight"]
    assert torch.equal(stored.read("weight", heads), heads.cut(weight))
    assert stored.read("step", whole_extent(())).item() == 3
    assert stored.read("weight", heads).dtype == torch.float64
    with pytest.raises(UserError, match=r"weight of shape \[12, 5\] is needed; .* has \[5, 12\]"):
        stored.read("weight", whole_extent((12, 5)))


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable \.metadata"):
        StoredTensors(tmp_path)


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    with process_group():
        write_pieces({"weight": Piece(whole_extent((4,)), torch.ones(4))}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="damaged"):
        StoredTensors(tmp_path).read("weight", whole_extent((4,)))
