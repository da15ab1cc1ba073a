"""Random streams: each model draws from a generator of its own, as it would alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from ..artifacts import UserError


class Streams:
    """A generator a model. On the CPU, model b draws what a process draws that began with `torch.manual_seed(seeds[b])`.

    >>> torch.manual_seed(7).__class__.__name__, Streams([7, 8]).generators("cpu")[0].initial_seed()
    ('Generator', 7)
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = [int(seed) for seed in seeds]
        self._of_device: dict[str, list[torch.Generator]] = {}

    def generators(self, device: torch.device | str) -> list[torch.Generator]:
        """Return the generators on `device`, made when they are first asked for."""
        kind = torch.device(device).type
        if kind not in self._of_device:
            self._of_device[kind] = [torch.Generator(kind).manual_seed(seed) for seed in self.seeds]
        return self._of_device[kind]

    @contextlib.contextmanager
    def drawing(self, model: int) -> Iterator[None]:
        """Let whatever draws from torch's own generator on the CPU draw from a model's stream meanwhile."""
        own = self.generators("cpu")[model]
        outside = torch.get_rng_state()
        torch.set_rng_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)

    def kept(self, like: Tensor, share: float | Sequence[float]) -> Tensor:
        """Return zeros and ones of `like` [B, …]: model b's are one with probability `share`, or `share[b]`."""
        found = torch.empty_like(like)  # in the order of memory that a model alone would draw in
        shares = share if isinstance(share, Sequence) else [share] * len(found)
        if like.is_meta:
            return found
        for own, part, generator in zip(found, shares, self.generators(like.device)):
            if 0 < part < 1:
                own.bernoulli_(part, generator=generator)
            else:  # torch draws nothing then
                own.fill_(part)
        return found

    def only(self, models: Sequence[int]) -> Streams:
        """Return the streams of some of the models, each where it stands."""
        found = Streams([self.seeds[model] for model in models])
        found._of_device = {kind: [all_of[model] for model in models] for kind, all_of in self._of_device.items()}
        return found

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return where the generators stand."""
        return {kind: [each.get_state() for each in own] for kind, own in self._of_device.items()}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Go on from `state`."""
        for kind, states in state.items():
            for generator, own in zip(self.generators(kind), states, strict=True):
                generator.set_state(own)


_current: ContextVar[Streams | None] = ContextVar("_current", default=None)


def current() -> Streams:
    """Return the streams of the fused model that is running."""
    found = _current.get()
    if found is None:
        raise UserError(
            "a fused model that is running is needed to draw random numbers; none is; call it, or its loss()"
        )
    return found


def drawing(model: int) -> contextlib.AbstractContextManager[None]:
    """Let a model draw from its stream meanwhile; outside of a fused model, from torch's generator."""
    streams = _current.get()
    return contextlib.nullcontext() if streams is None else streams.drawing(model)


@contextlib.contextmanager
def streaming(streams: Streams) -> Iterator[None]:
    """Let the functions without arguments of their own find the streams meanwhile."""
    token = _current.set(streams)
    try:
        yield
    finally:
        _current.reset(token)
