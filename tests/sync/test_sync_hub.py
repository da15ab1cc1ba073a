"""Who counts as gone where workers come and go, stepped by hand: no process is killed, and no clock is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.sync_cases import net, plain
from trainwright import sync
from trainwright.artifacts import UserError
from trainwright.sync import Absent, Gone, Letter, MembersChanged, RankAndSize, Receive, Replica, Send, Worker
from trainwright.sync.channels import Channel
from trainwright.sync.gradient_coding import GradientCoding
from trainwright.sync.hub import Hub
from trainwright.sync.pulse import Pulse

FOREVER_S = 1e6
"""A silence that no test lives to see: only what is told by hand counts."""


class Store:
    """A shared store in a dict."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.held[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


def test_silence_is_counted_in_looks_that_found_nothing_new() -> None:
    """A worker is silent at the eighth look in turn; however long a watcher is held up between two, it finds nobody silent."""
    store = Store()
    watcher, other = Pulse(store, 0, FOREVER_S), Pulse(store, 1, FOREVER_S)
    watcher.watch([0, 1])
    for _ in range(8):
        watcher._look()
    assert watcher.silent() == []  # the first of them saw it for the first time
    watcher._look()
    assert watcher.silent() == [1]
    other._tell()
    watcher._look()
    assert watcher.silent() == []


def test_a_look_that_is_under_way_tells_nothing_of_those_who_are_watched_next() -> None:
    watcher: Any = None

    class Changing(Store):
        def get(self, key: str) -> bytes:
            watcher.watch([])  # by the other thread, while this one asks
            return super().get(key)

    store = Changing()
    watcher, _ = Pulse(store, 0, FOREVER_S), Pulse(store, 1, FOREVER_S)
    watcher.watch([1])
    for _ in range(10):
        watcher._look()
    assert watcher.silent() == []


class Wire:
    """A channel that carries nothing."""

    def __init__(self, *given: Any) -> None:
        self.sent: list[Any] = []

    def send(self, tag: int, tensor: Any) -> None:
        self.sent.append(tensor)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hub]]:
    """A master and a worker, each of whom hears of silence what the test says; there is no group of the two."""

    def enter(self: Any, epoch: int, members: Any) -> None:
        self.place, self._members = RankAndSize(members.index(self.number), len(members)), members

    monkeypatch.setattr(Hub, "_enter", enter)
    monkeypatch.setattr("trainwright.sync.hub.Channel", Wire)
    store, address = sync.host_meeting()
    for number in (0, 1):
        store.set(f"name/{number}", f"worker {number}")
    yield [Hub(sync.Meeting(address, 2, FOREVER_S)) for _ in range(2)]
    del store


@pytest.mark.parametrize("mine", [0, 1])
def test_one_that_was_silent_when_a_message_was_sent_is_gone_for_good(two: list[Hub], mine: int) -> None:
    """The message is lost, and so an answer to it would be waited for in vain, though its receiver is heard again."""
    hub, heard = two[mine], [[1 - mine], *[[]] * 10_000]
    hub._pulse.silent = lambda: heard.pop(0)  # type: ignore[method-assign]
    hub.answer(Send(torch.ones(2), 1 - mine))
    letter = hub.answer(Receive(torch.zeros(2), 1 - mine if mine else None, within_s=30.0))
    assert isinstance(letter, Gone)
    assert letter.source == 1 - mine
    assert two[0]._store.check(["cut off/1"]) is (mine == 0)  # the master alone leaves others out
    assert not two[0]._store.check(["cut off/0"])


def test_a_channel_closes_when_all_is_sent_or_the_other_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is given up after: a loaded machine may take long to send the last message, which the other waits for."""
    monkeypatch.setattr(Channel, "_open", lambda self: None)
    closed = []
    for ends in ("sent", "gone"):
        channel, asked = Channel(torch.distributed.HashStore, "key", 0, lambda tag, tensor: None, lambda: None), 0

        def is_there(channel: Any = channel, ends: str = ends) -> bool:
            nonlocal asked
            asked += 1
            if asked == 4 and ends == "sent":
                channel._all_sent.set()
            return asked < 4 or ends == "sent"

        channel.close(is_there)
        closed.append(asked)
    assert closed == [4, 4]


def test_a_letter_of_one_that_is_gone_is_owed_by_nobody() -> None:
    """The end waits for what is owed: a letter that came before its sender went is no answer of another."""
    method = GradientCoding(Worker(0, 3, Replica(model := net(), plain(model.parameters()))))
    method._late.update({1: 1, 2: 1})
    steps = method._end_all()
    assert isinstance(next(steps), Absent)
    answer = torch.zeros(1 + method.up_length, dtype=torch.float64)
    assert isinstance(steps.send({1: "worker 1"}), Receive)
    assert isinstance(steps.send(Letter(1, answer)), Receive)  # worker 2 owes one yet
    assert isinstance(steps.send(Letter(2, answer)), Absent)


@pytest.mark.parametrize("name", ["gradient-coding", "1-bit-adam"])
def test_one_that_goes_before_all_have_begun_is_named_where_all_are_needed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, address = sync.host_meeting()

    def enter(self: Any, epoch: int, members: Any) -> None:
        raise MembersChanged(RankAndSize(0, 1), ["worker 1 (process 7 on here)"])

    monkeypatch.setattr(sync.Elastic, "_enter", enter)
    model = net()
    with pytest.raises(UserError, match=r"1 workers are needed to begin; worker 1 \(process 7 on here\) gone before"):
        sync.create(name, model, plain(model.parameters()), meeting=sync.Meeting(address, 1, FOREVER_S))
    del store


def test_those_who_are_left_begin_where_one_goes_during_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that bears changes asks again; one that does not ends with the name."""
    asked: list[str] = []
    real = sync.Elastic._round

    def once(self: Any, request: Any) -> Any:
        asked.append(type(request).__name__)
        if len(asked) == 1:
            raise MembersChanged(self.place, ["worker 1"])
        return real(self, request)

    monkeypatch.setattr(sync.Elastic, "_round", once)
    store, address = sync.host_meeting()
    model = net()
    joined = sync.create(
        "diloco", model, torch.optim.AdamW(model.parameters()), meeting=sync.Meeting(address, 1, FOREVER_S)
    )
    assert asked[:2] == ["AllGather", "AllGather"]
    joined.close()
    asked.clear()
    other, again = sync.host_meeting()
    with pytest.raises(UserError, match="2 workers are needed to begin; worker 1 gone before they had"):
        sync.create(
            "1-bit-adam", model, torch.optim.AdamW(model.parameters()), meeting=sync.Meeting(again, 1, FOREVER_S)
        )
    del store, other
