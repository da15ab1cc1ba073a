"""Ranks of one machine exchange through memory: the same results as sent, in any order, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool import Pool
from trainwright.launch import shared_memory
from trainwright.launch.shared_memory import LEAST_BYTES, SharedMemory

CASES = "tests.shared_memory_cases:"


def _may_open_anothers() -> bool:
    """Whether the system lets a process open another's memory at all, asked without the code under test."""
    if sys.platform != "linux":
        return False
    made = "import os, sys; print(os.getpid(), os.memfd_create('a'), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", made], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        pid, descriptor = other.stdout.readline().split()
        try:
            os.close(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR))
        except OSError:
            return False
        finally:
            other.kill()
    return True


pytestmark = pytest.mark.skipif(
    not _may_open_anothers(), reason="this system lets no process open another's memory; there all is sent"
)


@contextmanager
def offered() -> Iterator[shared_memory._Offer]:
    made = shared_memory._offered()
    assert made is not None
    descriptor, offer = made
    try:
        yield offer
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "complex64"])
def test_results_are_those_of_one_process(pool2: Pool, pool4: Pool, dtype: str) -> None:
    for pool in (pool2, pool4):
        for found in pool.run(CASES + "exact", dtype=dtype):
            for kind, num_bytes, through_memory, right in found:
                assert right, (kind, num_bytes)
                assert through_memory == (num_bytes >= LEAST_BYTES), (kind, num_bytes)


def test_a_sum_is_the_same_on_every_rank_to_the_bit(pool2: Pool, pool4: Pool) -> None:
    assert all(pool2.run(CASES + "same_on_all") + pool4.run(CASES + "same_on_all"))


def test_ranks_need_not_hold_their_parts_alike(pool2: Pool, pool4: Pool) -> None:
    for pool in (pool2, pool4):
        assert pool.run(CASES + "transposed") == [[True] * 3] * pool.num_ranks


@pytest.mark.parametrize(
    ("model", "mesh", "seed"),
    [
        ("gpt2-tiny", [2], 0),
        pytest.param("resnet-tiny", [2, 2], 7, marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", [4], 3, marks=pytest.mark.slow),
        *(pytest.param(model, [2, 2], 7, marks=pytest.mark.slow) for model in ("llama-tiny", "bert-tiny", "t5-tiny")),
    ],
)
def test_a_plan_whose_collectives_are_all_shared_computes_the_same(
    pool2: Pool, pool4: Pool, model: str, mesh: list[int], seed: int
) -> None:
    pool = pool2 if mesh == [2] else pool4
    report = pool.run(CASES + "random_plan", timeout_s=280, model=model, mesh=mesh, seed=seed)[0]
    assert report["passed"], report
    assert report["kinds"] == ["all_gather", "all_reduce", "reduce_scatter"]


def test_they_may_be_waited_for_in_any_order_by_ranks_of_any_pace(pool2: Pool, pool4: Pool) -> None:
    for pool in (pool2, pool4):
        assert pool.run(CASES + "in_any_order", num_rounds=40) == [[0, 0]] * pool.num_ranks


def test_what_is_beyond_the_limit_is_sent(pool2: Pool) -> None:
    for right, num_shared in pool2.run(CASES + "without_room", limit_bytes=300_000, room_bytes=2**20):
        assert all(right)
        assert 0 < num_shared < 9


def test_where_one_rank_has_no_room_all_send(pool2: Pool, pool4: Pool) -> None:
    for pool in (pool2, pool4):
        for right, num_shared in pool.run(CASES + "without_room", limit_bytes=2**25, room_bytes=200_000):
            assert all(right)
            assert num_shared == 9, "it is known by the one rank alone, so that all begin them"


@pytest.mark.parametrize("how", ["switched off", "not to be opened"])
def test_where_one_rank_shares_nothing_none_does(pool2: Pool, how: str) -> None:
    assert pool2.run(CASES + "apart", how=how) == [[False, True]] * 2


def test_ranks_that_are_out_of_step_are_told(pool2: Pool) -> None:
    for message in pool2.run(CASES + "out_of_step"):
        assert "same collectives in the same order" in message
        assert "80000" in message
        assert "84000" in message


def test_nothing_is_left_behind(pool2: Pool) -> None:
    assert pool2.run(CASES + "left_behind") == [[0, []]] * 2


@pytest.mark.parametrize("place", ["machine", "processes", "user"])
def test_memory_of_another_place_is_not_opened(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Process numbers say nothing there: a path may lead to anything."""
    with offered() as offer:
        assert shared_memory._opened([offer, offer]) is not None
        at = ("machine", "processes", "user").index(place)
        other = tuple("another" if number == at else value for number, value in enumerate(offer.place))
        monkeypatch.setattr(shared_memory, "_Block", None)
        assert shared_memory._opened([offer, replace(offer, place=other)]) is None


def test_memory_is_known_by_its_token() -> None:
    with offered() as offer:
        assert shared_memory._opened([replace(offer, token=b"0" * 16)]) is None
        assert shared_memory._opened([replace(offer, path="/proc/self/nothing")]) is None
        assert shared_memory._opened([offer, None]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2**24), st.integers(0, 3), st.booleans()), max_size=40))
def test_what_is_unread_is_never_written_over(steps: list[tuple[int, int, bool]]) -> None:
    """Room is given out again once every rank has read what lies there, and not before."""
    with offered() as first, offered() as second:
        blocks = shared_memory._opened([first, second])
    assert blocks is not None
    for block in blocks:
        block.marks.zero_()
    shared = SharedMemory(None, 0, blocks)
    unread: dict[int, tuple[range, set[int]]] = {}
    for num_bytes, reader, is_quick in steps:
        shared._number += 1
        start = shared._allocate(num_bytes)
        if start != shared_memory._NOWHERE:
            room = range(start, start + num_bytes)
            assert room.stop <= shared_memory._ROOM_BYTES
            assert start % shared_memory._ALIGNED == 0
            assert all(room.stop <= held.start or held.stop <= room.start for held, _ in unread.values())
            unread[shared._number] = (room, {0, 1})
        elif not unread:
            raise AssertionError("there is room for anything where nothing is held")
        readers = (0, 1) if is_quick else (reader % 2,)
        for number in list(unread)[: reader + 1]:
            for rank in readers:
                blocks[rank].marks[number % shared_memory._MARKS] = number
                unread[number][1].discard(rank)
            if not unread[number][1]:
                del unread[number]


def test_small_and_foreign_tensors_are_sent() -> None:
    large = torch.zeros(LEAST_BYTES // 4, 2)
    assert shared_memory.is_shared("all_reduce", large)
    assert not shared_memory.is_shared("all_to_all", large)
    assert shared_memory.is_shared("all_reduce", large.t()), "how it lies may differ from rank to rank"
    assert not shared_memory.is_shared("all_reduce", large[: LEAST_BYTES // 16])
    assert not shared_memory.is_shared("all_reduce", large.to("meta"))
