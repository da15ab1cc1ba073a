"""Reads and writes parts of tensors with `torch.distributed.checkpoint` (DCP), in the user's names and shapes.

    write   pieces → files of each rank and one index; a collective call     `write_pieces`
    read    index + an extent → this rank's part, from whichever files        `StoredTensors`

The parts of every plan are boxes of the same tensors (`extents.py`), so another plan, or any other tool that reads this
format, can read what one plan wrote.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..artifacts import UserError
from .extents import Box, Extent

INDEX_FILE = ".metadata"


@dataclass(frozen=True)
class Piece:
    """A rank's part of one tensor: the extent of its entries, and their values, of shape `extent.local_shape`."""

    extent: Extent
    part: Tensor

    @property
    def num_bytes(self) -> int:
        return self.part.numel() * self.part.element_size()


def write_pieces(pieces: Mapping[str, Piece], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the pieces of all ranks of `group` to `folder`; a box that several ranks hold is written once.

    Raises `CheckpointException` on every rank when one of them cannot write.
    """
    # One thread and a plain file a rank: DCP's own default; synchronised to the disk before the index is written.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    dcp.save(dict(pieces), storage_writer=writer, planner=_SavePieces(), process_group=group)


class _SavePieces(dcp.DefaultSavePlanner):
    """Save planner that lists for DCP the boxes of tensors that this rank has."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.flatten_state_dict = False
        self.is_coordinator = is_coordinator
        self._blocks: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for name, piece in state_dict.items():
            for box in piece.extent.boxes:
                item = _write_item(name, piece, box)
                self._items.append(item)
                self._blocks[item.index] = box.of_part(piece.part)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._blocks[index]


def _write_item(name: str, piece: Piece, box: Box) -> WriteItem:
    offset = torch.Size(box.offset)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(box.size)),
        properties=TensorProperties(dtype=piece.part.dtype),
        size=torch.Size(piece.extent.shape),
    )
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


class StoredTensors:
    """Reads parts of the tensors in a folder that `torch.distributed.checkpoint` wrote.

    Raises `UserError` when the folder has no readable index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._reader = dcp.FileSystemReader(self.folder)
        try:
            metadata: Metadata = self._reader.read_metadata()
        except Exception as error:
            raise UserError(
                f"a distributed checkpoint is needed; {folder} has no readable {INDEX_FILE} "
                f"({type(error).__name__}: {error}); check the path"
            ) from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        entries = metadata.state_dict_metadata.items()
        self._entries = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name].size)

    def num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self._entries[name].properties.dtype.itemsize

    def read(self, name: str, extent: Extent) -> Tensor:
        """Return the part of the tensor `name` that `extent` describes, on the CPU, in the dtype it was saved in."""
        entry = self._entries[name]
        if tuple(entry.size) != extent.shape:
            raise UserError(
                f"{name} of shape {list(extent.shape)} is needed; {self.folder} has {list(entry.size)}; "
                "it belongs to another model"
            )
        part = torch.empty(extent.local_shape, dtype=entry.properties.dtype)
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in extent.boxes]
        items = create_read_items_for_chunk_list(name, entry, chunks)
        blocks = {torch.Size(box.offset): box.of_part(part) for box in extent.boxes}
        try:
            self._reader.read_data(LoadPlan(items), _FillBlocks(blocks)).wait()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{name} cannot be read from {self.folder} ({error}); the checkpoint is damaged") from None
        return part


class _FillBlocks(dcp.DefaultLoadPlanner):
    """Load planner that gives DCP the memory into which each box is read."""

    def __init__(self, blocks: Mapping[torch.Size, Tensor]) -> None:
        super().__init__()
        self._blocks = blocks

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None, "every read item of ours has one"
        return self.transform_tensor(read_item, self._blocks[offset])
