"""What a region's backward releases: behind a backward nothing stays that only reruns needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.builders import make_optimizer, tiny_program
from tests.plans import random_decisions
from trainwright.artifacts import UserError
from trainwright.planner.costs.simulate import simulate
from trainwright.profiler.tracker import MemoryTracker
from trainwright.rank.region_memory import RegionMemory

RANDOM_STATES = 64
"""The bytes of the generators' states that reruns of dropout begin from, kept with the loss."""


def left_behind(name: str, seed: int, recompute: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that are there behind the backward, but for parameters, gradients, buffers and optimizer states."""
    seen: list[int] = []
    phase = MemoryTracker.phase

    @contextmanager
    def noting(tracker: MemoryTracker, name: str) -> Iterator[None]:
        with phase(tracker, name):
            yield
            if name == "backward":
                seen.append(tracker._by_category["saved"] + tracker._by_category["other"])

    program = tiny_program(name)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryTracker, "phase", noting)
        simulate(program, random_decisions(program, (2,), seed, recompute), make_optimizer)
    return seen[-1]


@pytest.mark.parametrize(("name", "seed"), [("gpt2-tiny", 0), ("gpt2-tiny", 1), ("llama-tiny", 2), ("t5-tiny", 3)])
def test_what_a_rerun_starts_from_goes_with_it(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = left_behind(name, seed, 0.0, monkeypatch)
    assert 0 < left_behind(name, seed, 0.8, monkeypatch) <= outputs + RANDOM_STATES


def test_a_second_backward_of_one_forward_is_refused() -> None:
    memory = RegionMemory(None, None, None)  # type: ignore[arg-type]
    memory.is_rederived = True
    with pytest.raises(UserError, match="run the forward again, or plan with more memory"):
        memory._rederive()
