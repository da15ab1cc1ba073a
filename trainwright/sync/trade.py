"""Messages that several workers send each other at once, in an order in which no link waits for another.

every receive is asked for before the first send      a transport that sends once the receiver is ready (gloo) says so on the
                                                      connection that the data take the other way, and behind them
round k: send to rank + k, receive from rank − k      one message on each link each way; all at once, those that meet before
                                                      one receiver leave other links idle
small messages go ahead, `AHEAD_BYTES` of them        rounds of those would be nothing but latency
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

AHEAD_BYTES = 64 * 1024
"""The bytes that a worker may have sent beyond the round whose message it waits for."""

Begin = Callable[[Tensor, int], Any]
"""A function that begins to send a tensor to, or to receive it from, a rank, and returns what can be waited for."""


def num_ahead(num_bytes: int) -> int:
    """Return how many messages of so many bytes may be under way from one worker.

    >>> num_ahead(1000), num_ahead(10**6)
    (65, 1)
    """
    return max(1, AHEAD_BYTES // max(1, num_bytes))


def num_rounds(num_messages: int, num_bytes: int) -> int:
    """Return after how many waits, one behind the other, so many messages are through.

    >>> num_rounds(7, 8), num_rounds(7, 40_000), num_rounds(7, 10**6)
    (1, 7, 7)
    """
    return -(-num_messages // num_ahead(num_bytes))


def trade(
    parts: Mapping[int, Tensor], rooms: Mapping[int, Tensor], rank: int, size: int, send: Begin, receive: Begin
) -> None:
    """Send each of `parts` to the rank that it is for, and fill `rooms`, by the rank that each comes from; waits for all.

    All workers call it together: who has a part for another is in that one's rooms. Parts and rooms are alike in size.
    """
    coming = {(rank - source) % size: receive(room, source) for source, room in rooms.items()}
    going = sorted((to - rank) % size for to in parts)
    ahead = num_ahead(max((part.numel() * part.element_size() for part in parts.values()), default=0))
    under_way: list[Any] = []
    sent_up_to = 0
    for shift in sorted({*coming, *going}):
        while sent_up_to < len(going) and (going[sent_up_to] <= shift or _between(going, sent_up_to, shift) < ahead):
            to = (rank + going[sent_up_to]) % size
            under_way.append(send(parts[to], to))
            sent_up_to += 1
        if shift in coming:
            coming[shift].wait()
    for each in under_way:
        each.wait()


def _between(going: list[int], place: int, shift: int) -> int:
    """The messages from round `shift` up to the one at `place`."""
    return sum(shift <= each for each in going[:place])
