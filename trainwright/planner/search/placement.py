"""Which parameters and states stay in memory: among as many bytes as there is room for, those with which the schedule ends first.

The one problem says how much stays of each class, by what each phase moves; all instances are alike there, and what no phase waits
for is open. In the run they are not alike. What is updated first lets the writes begin, where these are what takes longest; what
is updated last is read and written with nothing beside it. So a few orders are tried by the run's own schedule (`costs.resting`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...program.decisions import Decisions
from ...program.program import Tensor
from ...tiers import Layer
from ..costs.costs import CostModel, OptimizerCost
from ..costs.price import Price
from ..costs.resting import has_room, kept_bytes, layers_of, params_in_order, step_s
from ..costs.simulate import Simulation
from .answer import Answer


@dataclass(frozen=True)
class _Item:
    """The values or the states of one parameter."""

    tensor: Tensor
    num_bytes: int
    is_state: bool
    stays: bool


def best_placed(
    answer: Answer, price: Price, costs: CostModel, optimizer: OptimizerCost, usable_bytes: int | None,
    simulate: Callable[[Decisions], Simulation],
) -> tuple[Answer, Simulation] | None:  # fmt: skip
    """Return the answer with another choice of what stays, if its step is shorter or reads less; None if there is none."""
    executor = answer.simulation.executor
    local, policy = executor.local, costs.resting
    assert policy is not None
    assert price.seconds is not None
    layers = layers_of(local.program, answer.decisions, costs, optimizer)
    room = kept_bytes(layers)
    room = sum(each.held_bytes for each in layers) if usable_bytes is None else room + _left(answer, usable_bytes)
    if policy.keep_bytes is not None:
        room = min(room, policy.keep_bytes)
    found = []
    items = list(_items(params_in_order(local.program), layers))
    for order in _orders(items):
        decisions = _with_kept(answer.decisions, items, order, room)
        seconds = step_s(local, decisions, price.seconds, answer.simulation.moved_bytes, costs, optimizer)
        placed = layers_of(local.program, decisions, costs, optimizer)
        if has_room(placed, costs, answer.simulation.moved_bytes):
            found.append((seconds, -kept_bytes(placed), decisions))
    own = (price.step_s * (1 - 1e-9), -kept_bytes(layers))
    for seconds, kept, decisions in sorted(found, key=lambda each: each[:2]):
        if (seconds, kept) >= own:
            return None
        simulation = simulate(decisions)
        if usable_bytes is None or simulation.peak_bytes <= usable_bytes:
            return replace(answer, decisions=decisions, simulation=simulation), simulation
    return None


def _left(answer: Answer, usable_bytes: int) -> int:
    return max(0, usable_bytes - answer.simulation.peak_bytes)


def _items(params: Sequence[Tensor], layers: Sequence[Layer]) -> Iterator[_Item]:
    for tensor, layer in zip(params, layers, strict=True):
        yield _Item(tensor, layer.param_bytes, False, layer.param_stays)
        if layer.is_trained and layer.state_bytes:
            yield _Item(tensor, layer.state_bytes, True, layer.states_stay)


def _orders(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yield the orders in which room is given away: by parameter, values or states first; from either end; as it was first."""
    for ends, by in itertools.product((items, items[::-1]), (None, False, True)):
        order = list(ends) if by is None else sorted(ends, key=lambda item: item.is_state != by)
        yield order
        yield sorted(order, key=lambda item: not item.stays)


def _with_kept(decisions: Decisions, items: Iterable[_Item], order: Sequence[_Item], room: int) -> Decisions:
    kept, left = set(), room
    for item in order:
        if item.num_bytes <= left:
            kept.add((item.tensor, item.is_state))
            left -= item.num_bytes
    away = [item for item in items if (item.tensor, item.is_state) not in kept]
    return replace(
        decisions,
        offloaded_params={item.tensor for item in away if not item.is_state},
        offloaded_states={item.tensor for item in away if item.is_state},
    )
