"""Messages in rounds: every order in which ranks may come, every graph, nothing lost, nobody waits for ever."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainwright.sync.trade import AHEAD_BYTES, num_rounds, trade


class Wire:
    """Rendezvous as gloo does it: a send is done when its receive was asked for, and data arrive in the order of a pair."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], Future[Tensor]] = {}
        self.asked: dict[tuple[int, int], threading.Event] = {}
        self.lock = threading.Lock()
        self.told: list[tuple[str, int, int]] = []

    def place(self, source: int, to: int) -> tuple[Future[Tensor], threading.Event]:
        with self.lock:
            return self.boxes.setdefault((source, to), Future()), self.asked.setdefault((source, to), threading.Event())


class Sent:
    def __init__(self, asked: threading.Event) -> None:
        self.asked = asked

    def wait(self) -> None:
        assert self.asked.wait(10), "a receive that nobody asked for"


class Came:
    def __init__(self, room: Tensor, box: Future[Tensor]) -> None:
        self.room, self.box = room, box

    def wait(self) -> None:
        self.room.copy_(self.box.result(10))


def traded(num: int, edges: set[tuple[int, int]], length: int) -> tuple[dict[int, dict[int, Tensor]], Wire]:
    """Run `trade` on a thread a rank; edges: (from, to)."""
    wire, rooms = Wire(), {rank: {} for rank in range(num)}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def send(part: Tensor, to: int) -> Sent:
            box, asked = wire.place(rank, to)
            wire.told.append(("send", rank, to))
            box.set_result(part.clone())
            return Sent(asked)

        def receive(room: Tensor, source: int) -> Came:
            box, asked = wire.place(source, rank)
            wire.told.append(("receive", rank, source))
            asked.set()
            return Came(room, box)

        parts = {to: torch.full((length,), float(100 * rank + to)) for source, to in edges if source == rank}
        rooms[rank] = {source: torch.zeros(length) for source, to in edges if to == rank}
        try:
            trade(parts, rooms[rank], rank, num, send, receive)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
    random.Random(num).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors, errors
    return rooms, wire


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num=st.integers(2, 7), length=st.sampled_from([1, AHEAD_BYTES // 8, AHEAD_BYTES]))
def test_all_that_is_sent_comes_where_it_belongs(data: st.DataObject, num: int, length: int) -> None:
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    edges = set(data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    rooms, wire = traded(num, edges, length)
    for source, to in edges:
        assert torch.equal(rooms[to][source], torch.full((length,), float(100 * source + to)))
    for rank in range(num):
        kinds = [kind for kind, who, _ in wire.told if who == rank]
        assert kinds == sorted(kinds), "every receive is asked for before the first send"


@pytest.mark.parametrize("length", [1, AHEAD_BYTES])
def test_large_messages_go_one_at_a_time_to_one_after_the_other(length: int) -> None:
    _, wire = traded(4, {(a, b) for a in range(4) for b in range(4) if a != b}, length)
    for rank in range(4):
        order = [to for kind, who, to in wire.told if kind == "send" and who == rank]
        assert order == [(rank + k) % 4 for k in (1, 2, 3)]


def test_rounds_are_counted_as_they_are_waited_for() -> None:
    assert [num_rounds(7, size) for size in (8, AHEAD_BYTES // 2, AHEAD_BYTES // 2 + 1, AHEAD_BYTES)] == [1, 4, 7, 7]
    assert num_rounds(0, 8) == 0
