"""Reads and writes, for checkpoints, what rests in the host's memory: without the device, where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...tiers import MemoryStore
from .residence import Parked
from .tier import Tier
from .updates import like, local_of, rests, state_key


def values_of(tier: Tier | None, name: str) -> Tensor | None:
    """Return the values of a parameter in the host's memory, where they are read and written; None for one that stays."""
    parked = None if tier is None else tier.parked.get(name)
    if tier is None or parked is None or parked.is_kept or not isinstance(tier.store, MemoryStore):
        return None
    tier.residence.let_go(parked)
    return tier.store.value(parked.key, parked.local.dtype, parked.local.shape)


class StatesInHost:
    """The optimizer states of a run whose tier is the host's memory, by the methods of `rank.offload_states.StateOffload`."""

    def __init__(self, tier: Tier) -> None:
        assert isinstance(tier.store, MemoryStore)
        self.tier, self.store = tier, tier.store
        self._by_param: dict[Tensor, Parked] = {parked.param: parked for parked in tier.parked.values()}

    def whole(self, optimizer: Optimizer, param: Tensor, read: bool = True) -> dict[str, Any]:
        """Return the states of `param` in their order, on its device; of a GPU, copies that are there for their readers alone."""
        held, updates = dict(optimizer.state.get(param, {})), self.tier.updates
        parked = self._by_param.get(param)
        if parked is None or updates is None:
            return held
        kept, forms = updates.kept.get(parked.name, {}), updates.forms.get(parked.name, {})
        for key in held:
            if key in kept:
                held[key] = like(parked, kept[key])
            elif key in forms:
                form, device = forms[key], parked.local.device
                local = self.store.value(state_key(parked, key), form.dtype, form.shape)
                held[key] = like(parked, local.to(device) if read else torch.empty_like(local, device=device))
        return held

    def forget(self, optimizer: Optimizer) -> None:
        """Drop all states: others come in their place."""
        if self.tier.updates is not None:
            self.tier.updates.forms.clear()
            self.tier.updates.kept = {name: {} for name in self.tier.updates.kept}

    def send_off(self, optimizer: Optimizer, param: Tensor) -> None:
        """Put the states that `optimizer` has been given for `param` where they rest, and wait for it."""
        updates, parked = self.tier.updates, self._by_param.get(param)
        if updates is None or parked is None or not parked.is_trained:
            return
        held = optimizer.state.get(param, {})
        leaving = {name: local_of(value) for name, value in held.items() if rests(value)}
        for name in leaving:
            held[name] = None
        if parked.keeps_states:
            updates.kept[parked.name] = leaving
            return
        for write in updates.write_states(parked, leaving):
            write.finish()
