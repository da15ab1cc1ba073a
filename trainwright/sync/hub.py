"""Runs programs whose workers have fixed places and send messages, where workers come and go: `Elastic` with channels.

a place      the rank of a worker. It is vacant when its worker has ended, has been cut off, or has been silent for too long
`Send`       to a vacant place is lost;  `Receive` is answered by a `Gone` once for each place that becomes vacant
newcomers    write that they want to join; the worker in place 0 gives them places that it knows to be vacant, when it asks
             who is `Absent`
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections import deque
from datetime import timedelta
from threading import Condition
from typing import Any

from torch import Tensor

from ..artifacts import UserError
from .channels import Channel
from .elastic import Elastic, Meeting
from .requests import Absent, Gone, Letter, RankAndSize, Receive, Request, Send

_LOOK_S, _WAIT_S, _MASTER = 20e-3, 600.0, 0


class Hub(Elastic):
    """Runs programs on this worker, whose rank never changes; collectives are allowed only at the start, with all present."""

    keeps_places = True

    def __init__(self, meeting: Meeting, may_join: bool = True) -> None:
        self._holders: dict[int, int] = {}
        self._channels: dict[int, Channel] = {}
        self._letters: deque[tuple[int, int, Tensor]] = deque()
        """The messages received: (number of the sending worker, tag, tensor)."""
        self._ended: set[int] = set()
        self._told: set[int] = set()
        self._news = Condition()
        super().__init__(meeting, may_join)
        if not self.is_new:
            self._holders = {place: place for place in range(meeting.num_workers)}
        self._watch()

    def answer(self, request: Request) -> Any:
        match request:
            case Absent():
                return self._absent()
            case Send(tensor, to, tag):
                if self._is_there(to):
                    self.traffic.count("send", tensor)
                    self._channel(to).send(tag, tensor)
                return None
            case Receive():
                return self._next_letter(request)
        return super().answer(request)

    def close(self) -> None:
        """Wait until all messages are sent, and leave the run."""
        for place, number in self._holders.items():
            if number in self._channels:
                self._channels[number].close(functools.partial(self._is_there, place))
        super().close()

    def _absent(self) -> dict[int, str]:
        """Return the workers that are gone; on the master, give vacant places to newcomers first."""
        if self.place.rank == _MASTER:
            self._give_places()
        gone = {place: number for place, number in self._holders.items() if not self._is_there(place)}
        for number in gone.values():
            self._cut_off(number)
        return {place: self._name(number) for place, number in gone.items()}

    def _is_there(self, place: int) -> bool:
        """Tell whether a place has a live worker; one that was silent once is gone, even if it is heard again.

        Messages sent to it while it was silent are lost, so waiting for its answers might never end.
        """
        self._ended.update(self._pulse.silent())
        number = self._holders.get(place)
        return number == self.number or (number is not None and number not in self._ended)

    def _next_letter(self, request: Receive) -> Letter | Gone | None:
        if request.source is not None:
            self._channel(request.source)
        deadline_s = time.monotonic() + (math.inf if request.within_s is None else request.within_s)
        while True:
            found: Letter | Gone | None
            with self._news:
                found = self._found(request)
                left_s = deadline_s - time.monotonic()
                if found is None and left_s > 0:
                    self._news.wait(min(left_s, _LOOK_S))
                    found = self._found(request)
            if found is None:
                self._see_to_it_that_others_count_on_this_one()
                found = self._vacant(request.source)
            if found is not None or time.monotonic() >= deadline_s:
                return found

    def _found(self, request: Receive) -> Letter | None:
        places = {number: place for place, number in self._holders.items()}
        for letter in self._letters:
            number, tag, tensor = letter
            place = places.get(number)
            if tag == request.tag and place is not None and request.source in (None, place):
                self._letters.remove(letter)
                return Letter(place, tensor.view(request.like.shape))
        return None

    def _vacant(self, source: int | None) -> Gone | None:
        """Return a `Gone` for a place that has become vacant: once, and again if the receiver waits for that place alone."""
        for place, number in self._holders.items():
            if not self._is_there(place) and (source == place or (source is None and number not in self._told)):
                self._cut_off(number)
                return Gone(place, self._name(number))
        return None

    def _cut_off(self, number: int) -> None:
        """Mark a worker as gone; the master writes it to the store, so that a worker that is heard again learns of it."""
        if number not in self._told:
            self._told.add(number)
            if self.place.rank == _MASTER:
                self._store.set(f"cut off/{number}", b"1")

    def _see_to_it_that_others_count_on_this_one(self) -> None:
        if self._store.check([f"cut off/{self.number}"]):
            raise UserError(
                f"signs of life within {self._meeting.silence_s:g} s are needed of each worker; this one, "
                f"{self._name(self.number)}, was silent for longer, and the others went on without it; join anew, or give "
                "Meeting a longer silence_s"
            )

    def _give_places(self) -> None:
        vacant = [place for place, number in self._holders.items() if place and number in self._told]
        for number in super()._asking():
            if not vacant:
                return
            self._store.add("let in", 1)
            place = vacant.pop(0)
            self._holders[place] = number
            self._watch()
            self._channel(place)
            self._store.set(f"welcome/{number}", json.dumps([place, self.number]))

    def _asking(self) -> list[int]:
        """Return no newcomers, since collectives admit nobody here."""
        return []

    def _watch(self) -> None:
        """Watch the workers that this one communicates with: the master watches all, others watch the master."""
        mine = self.place.rank
        self._pulse.watch([number for place, number in self._holders.items() if mine == _MASTER or place == _MASTER])

    def _channel(self, place: int) -> Channel:
        number = self._holders[place]
        if number not in self._channels:
            low, high = sorted((number, self.number))
            self._channels[number] = Channel(
                self._store.clone, f"channel/{low}-{high}", int(self.number == high),
                lambda tag, tensor: self._deliver(number, tag, tensor), lambda: self._break(number),
            )  # fmt: skip
        return self._channels[number]

    def _deliver(self, number: int, tag: int, tensor: Tensor) -> None:
        with self._news:
            self._letters.append((number, tag, tensor))
            self._news.notify_all()

    def _break(self, number: int) -> None:
        with self._news:
            self._ended.add(number)
            self._news.notify_all()

    def _ask_to_join(self) -> None:
        """Ask for a vacant place, and wait until the master gives one."""
        self._store.append("asks", f"{self.number},")
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"welcome/{self.number}"], timedelta(seconds=_WAIT_S))
        if not self._store.check([f"welcome/{self.number}"]):
            raise UserError(
                f"a vacant place in a run that goes on is needed to join it; the one at {self._meeting.address} had none for "
                f"{_WAIT_S:g} s; see whether it has ended"
            )
        place, master = json.loads(self._store.get(f"welcome/{self.number}"))
        self.place = RankAndSize(place, self._meeting.num_workers)
        self._holders = {_MASTER: master, place: self.number}

    def check_alike(self, chosen: str) -> None:
        """Raise `UserError` on a joining worker whose method or options differ from the run's."""
        if self.place.rank == _MASTER:
            self._store.set("chosen", chosen)
        elif self.is_new and self._store.get("chosen") != chosen.encode():
            raise UserError(
                "the method and options of the run are needed to join it; those given are others; give the same"
            )
