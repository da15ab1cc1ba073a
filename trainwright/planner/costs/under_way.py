"""Holds, in a simulated step, what updates under way hold at each moment, where parameters or states rest on a tier.

    backward   a gradient is complete → its update begins: gradient, states that come, what the optimizer's step takes
    room       half of the window; where the next update finds none, the oldest ones end first

How far updates are at a moment depends on the tier's pace, but of two paces the slower one holds all that the faster one does:
updates begin and end in one order. So the most that a run holds is what it holds with a tier that ends an update only when
the next one needs its room, and that is what is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...program.program import Tensor
from .resting import Room, Update


@dataclass(eq=False)
class _Pending:
    """An update under way, with the memory that it holds."""

    num_bytes: int
    step_bytes: int
    held: list[torch.Tensor]


class UnderWay:
    """Takes each gradient of a simulated step, and holds what its update holds, for as long as it may."""

    def __init__(self, room: Room, sources: Mapping[Tensor, torch.Tensor]) -> None:
        self.room = room
        self._pending: deque[_Pending] = deque()
        self._waiting: list[tuple[torch.Tensor, Update]] = []
        """The parameters whose gradients wait on the tier for an update after the backward."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        for tensor, update in room.updates.items():
            sources[tensor].register_post_accumulate_grad_hook(lambda param, update=update: self._take(param, update))

    def finish(self) -> None:
        """Run the updates that come after the backward; then end all."""
        for param, update in self._waiting:
            self._begin(torch.empty_like(param), update)
        self._waiting.clear()
        self._pending.clear()
        self._hold_scratch()

    def _take(self, param: torch.Tensor, update: Update) -> None:
        grad, param.grad = param.grad, None
        assert grad is not None
        if self.room.is_after:
            torch.empty_like(grad)  # in some runs it stands twice for a moment, before it goes to the tier
            self._waiting.append((param, update))
        else:
            self._begin(grad, update)

    def _begin(self, grad: torch.Tensor, update: Update) -> None:
        size = grad.numel() * grad.element_size() + update.state_bytes
        while self._pending and sum(each.num_bytes for each in self._pending) + size > self.room.update_window_bytes:
            self._pending.popleft()
        held = [_alone(grad), torch.empty(update.state_bytes, dtype=torch.uint8)]
        self._pending.append(_Pending(size, update.step_bytes, held))
        self._hold_scratch()

    def _hold_scratch(self) -> None:
        """Hold what the step of one update takes: of that one, among those under way, which takes most."""
        most = max((each.step_bytes for each in self._pending), default=0)
        if most != self._scratch.numel():
            self._scratch = torch.empty(0, dtype=torch.uint8)
            self._scratch = torch.empty(most, dtype=torch.uint8)


def _alone(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in memory of its own, as a run does before its update: its buffer goes with the others' last reader."""
    is_alone = grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return grad if is_alone else torch.empty_like(grad)
