"""Exchanges messages between several workers at once, in an order in which no link waits for another.

every receive is posted before the first send         a transport that sends once the receiver is ready (gloo) announces that on
                                                      the connection of the data in the other direction, behind the data
round k: send to rank + k, receive from rank − k      each link has one message each way; if all were sent at once, several would
                                                      queue at one receiver while other links are idle
small messages are sent ahead, up to `AHEAD_BYTES`    rounds of small messages would only add latencies
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

AHEAD_BYTES = 64 * 1024
"""The most bytes that a worker sends ahead of the round whose message it waits for."""

Begin = Callable[[Tensor, int], Any]
"""A function that issues the send of a tensor to a rank, or its receive from one, and returns the work to wait for."""


def num_ahead(num_bytes: int) -> int:
    """Return the number of messages of `num_bytes` that one worker may have in flight.

    >>> num_ahead(1000), num_ahead(10**6)
    (65, 1)
    """
    return max(1, AHEAD_BYTES // max(1, num_bytes))


def num_rounds(num_messages: int, num_bytes: int) -> int:
    """Return the number of consecutive waits in which `num_messages` are exchanged.

    >>> num_rounds(7, 8), num_rounds(7, 40_000), num_rounds(7, 10**6)
    (1, 7, 7)
    """
    return -(-num_messages // num_ahead(num_bytes))


def trade(
    parts: Mapping[int, Tensor], rooms: Mapping[int, Tensor], rank: int, size: int, send: Begin, receive: Begin
) -> None:
    """Send each of `parts` to its rank, receive into each of `rooms` from its rank, and wait for all.

    All workers call it together; each part has a room on its receiver. Parts and rooms have equal sizes.
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
    """Return the number of messages from round `shift` up to the one at `place`."""
    return sum(shift <= each for each in going[:place])
