"""What the tests of collectives through shared memory run on every rank."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import parallel_cases
from trainwright.launch import shared_memory
from trainwright.launch.shared_memory import SharedMemory
from trainwright.runtime.communicator import MeshCommunicator, make_mesh

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def communicator() -> MeshCommunicator:
    return MeshCommunicator(make_mesh({"a0": dist.get_world_size()}, "cpu"))


def given(kind: str, num: int, dtype: torch.dtype, salt: int = 0, rank: int | None = None) -> Tensor:
    """What a rank gives: small whole numbers, whose sums are exact in any order."""
    rank, size = dist.get_rank() if rank is None else rank, dist.get_world_size()
    made = (torch.arange(num) * (rank + 3) + 7 * rank + salt) % 13
    made = made.to(dtype)
    return made.expand(size, num).contiguous() + torch.arange(size).to(dtype)[:, None] if "scatter" in kind else made


def wanted(kind: str, num: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What comes of it, worked out alone."""
    every = torch.stack([given(kind, num, dtype, salt, rank) for rank in range(dist.get_world_size())])
    if kind == "all_gather":
        return every
    return every.sum(0, dtype=dtype) if kind == "all_reduce" else every[:, dist.get_rank()].sum(0, dtype=dtype)


def exact(dtype: str) -> list[tuple[str, int, bool, bool]]:
    """Every kind and size: whether it went through memory, and whether it is what it has to be."""
    ways, kind_of = communicator(), getattr(torch, dtype)
    found = []
    for kind in KINDS:
        for num in (1, 1000, 9001, 65_537, 300_001):
            tensor = given(kind, num, kind_of)
            before = ways._shared[0]._number if ways._shared.get(0) else 0
            result = ways.issue(kind, 0, tensor).wait()
            after = ways._shared[0]._number if ways._shared.get(0) else 0
            found.append((kind, tensor.nbytes, after > before, torch.equal(result, wanted(kind, num, kind_of))))
    return found


def same_on_all() -> bool:
    """Whether a sum whose order matters is the same to the bit on every rank."""
    torch.manual_seed(dist.get_rank())
    result = communicator().all_reduce(0, torch.randn(100_003))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, result)
    return all(torch.equal(result, other) for other in every)


def transposed() -> list[bool]:
    """Whether results are right where what the last rank gives does not lie in rows, and the others' does."""
    ways, is_last = communicator(), dist.get_rank() == dist.get_world_size() - 1
    found = []
    for kind in KINDS:
        tensor = given(kind, 20_000, torch.float32)
        tensor = tensor.view(*tensor.shape[:-1], 100, 200)
        if is_last:
            tensor = tensor.mT.contiguous().mT
        result = ways.issue(kind, 0, tensor).wait()
        found.append(torch.equal(result.flatten(), wanted(kind, 20_000, torch.float32).flatten()))
    return found


def in_any_order(num_rounds: int) -> tuple[int, int]:
    """Many under way at once, waited for in a drawn order by ranks that are now quick, now slow: how many were wrong."""
    ways, draw, own = communicator(), random.Random(0), random.Random(dist.get_rank())
    num_wrong = number = 0
    for _ in range(num_rounds):
        pending = []
        for _ in range(draw.randint(1, 6)):
            kind, num, number = draw.choice(KINDS), draw.randint(20_000, 90_000), number + 1
            pending.append((kind, num, number, ways.issue(kind, 0, given(kind, num, torch.float32, number))))
        draw.shuffle(pending)
        for kind, num, salt, collective in pending:
            if own.random() < 0.2:
                time.sleep(2e-3)
            num_wrong += not torch.equal(collective.wait(), wanted(kind, num, torch.float32, salt))
    return num_wrong, ways._shared[0].num_bytes if ways._shared[0] else -1


def without_room(limit_bytes: int, room_bytes: int) -> tuple[list[bool], int]:
    """More under way than may be, or (on rank 0 alone) than there is room for: is everything right, and how many were shared."""
    ways, before = communicator(), (shared_memory.LIMIT_BYTES, shared_memory._ROOM_BYTES)
    try:
        ways.all_reduce(0, given("all_reduce", 20_000, torch.float32))
        shared_memory.LIMIT_BYTES = limit_bytes
        shared_memory._ROOM_BYTES = room_bytes if dist.get_rank() == 0 else before[1]
        pending = [(kind, ways.issue(kind, 0, given(kind, 20_000, torch.float32, 5))) for kind in 3 * KINDS]
        right = [torch.equal(found.wait(), wanted(kind, 20_000, torch.float32, 5)) for kind, found in pending]
    finally:
        shared_memory.LIMIT_BYTES, shared_memory._ROOM_BYTES = before
    shared = ways._shared[0]
    assert shared is not None
    return right, shared._number - 1


def apart(how: str) -> tuple[bool, bool]:
    """One rank that shares nothing: whether any does, and whether the sum is right."""
    was, opened = os.environ.get(shared_memory.SWITCH), shared_memory._opened
    if dist.get_rank() == 1 and how == "switched off":
        os.environ[shared_memory.SWITCH] = "0"
    if dist.get_rank() == 1 and how == "not to be opened":
        shared_memory._opened = lambda offers: None
    try:
        ways = communicator()
        result = ways.all_reduce(0, given("all_reduce", 50_000, torch.float32))
    finally:
        os.environ.pop(shared_memory.SWITCH, None)
        if was is not None:
            os.environ[shared_memory.SWITCH] = was
        shared_memory._opened = opened
    return ways._shared[0] is not None, torch.equal(result, wanted("all_reduce", 50_000, torch.float32))


def out_of_step() -> str:
    """What a rank is told that begins another collective than the others."""
    ways = communicator()
    try:
        ways.all_reduce(0, torch.ones(20_000 + 1000 * dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return ""


def left_behind() -> tuple[int, list[str]]:
    """How many descriptors a communicator that has shared leaves open, and the files that stand for memory."""
    num_before, files = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    for _ in range(3):
        ways = communicator()
        ways.all_reduce(0, torch.ones(20_000))
        assert ways._shared[0] is not None
        dist.barrier()
        num_mapped = mappings().count("memfd:trainwright")
        assert num_mapped >= dist.get_world_size()
        del ways
    return len(os.listdir("/proc/self/fd")) - num_before, sorted(set(os.listdir("/dev/shm")) - files)


def mappings() -> str:
    with open("/proc/self/maps") as stream:
        return stream.read()


def random_plan(model: str, mesh: list[int], seed: int) -> dict[str, Any]:
    """A drawn plan, every collective of it through memory."""
    least, begin, begun = shared_memory.LEAST_BYTES, SharedMemory.begin, []

    def counted(*given: Any) -> Any:
        begun.append(given[1])
        return begin(*given)

    shared_memory.LEAST_BYTES, SharedMemory.begin = 1, counted  # type: ignore[method-assign]
    try:
        report = parallel_cases.random_plan(model, mesh, seed)
    finally:
        shared_memory.LEAST_BYTES, SharedMemory.begin = least, begin  # type: ignore[method-assign]
    return {**report, "kinds": sorted(set(begun))}
