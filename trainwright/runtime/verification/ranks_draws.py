"""Lets one process draw the random numbers that the ranks of a plan draw, so that the two can be compared.

A rank draws for its own part of a tensor: along the mesh axes that split an op, other numbers than its peers
(`rank.randomness`). Here one process makes those calls in turn, each on a part of the whole operands, and puts the results
together. Dropout is left out, since comparisons are made without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...program.decisions import Decisions
from ...program.drawing import draws_without_dropout
from ...program.layout import num_elements
from ...program.program import Program
from ...rank.execute import Executor
from ...rank.instructions import Compute, Value
from ...rank.local import build_local
from ...rank.reshard import SimulatedCommunicator
from ...rank.run_state import BoundCall, RunState
from ...torch_internals.dtypes import default_dtype, in_precision
from ..sharding import own_part


@dataclass(frozen=True)
class _Part:
    """One rank's call of an op, with the values that it reads and makes."""

    call: BoundCall
    coords: tuple[int, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class RanksDraws:
    """What the ranks of a plan draw in the ops of a program, on their kind of device, as calls of one process on the CPU."""

    def __init__(self, program: Program, decisions: Decisions, seed: int, device: torch.device) -> None:
        self.program, self.mesh, self.seed, self.device = program, decisions.mesh, seed, device
        self.default = program.lifted or torch.get_default_dtype()
        self.keys = frozenset(op.key for op in program.ops if draws_without_dropout(op))
        """The ops that draw."""
        self.parts: dict[str, dict[tuple[int, ...], _Part]] = defaultdict(dict)
        """The calls of the ranks that draw different numbers, by op and by the coordinates that tell them apart."""
        decisions = replace(decisions, compiled=None)
        for coords in product(*map(range, self.mesh)) if self.keys else ():
            local = build_local(program, decisions, SimulatedCommunicator(self.mesh, coords, device))
            calls = Executor(local).calls
            for each in local.instructions:
                if isinstance(each, Compute) and each.key in self.keys:
                    inputs, outputs = (
                        tuple(local.values[index] for index in indices) for indices in (each.inputs, each.outputs)
                    )
                    place = tuple(coords[axis] for axis in each.axes)
                    self.parts[each.key].setdefault(place, _Part(calls[each.index], coords, inputs, outputs))

    def follow(self, executor: Executor) -> None:
        """Let an executor of the model's program, unsplit and in any precision, draw what the ranks draw."""
        for instruction in executor.local.instructions:
            if isinstance(instruction, Compute) and instruction.key in self.parts:
                dtypes = [_dtype(executor.local.program, executor.local.values[index]) for index in instruction.outputs]
                executor.calls[instruction.index] = self._joined(instruction, dtypes)

    def _joined(self, whole: Compute, dtypes: Sequence[torch.dtype]) -> BoundCall:
        parts = self.parts[whole.key].values()

        def call(env: dict[int, Any], state: RunState) -> None:
            found: dict[int, Tensor] = {}
            for part in parts:
                own = {
                    value.index: self._own(env[index].to(self.device, _dtype(self.program, value)), value, part.coords)
                    for index, value in zip(whole.inputs, part.inputs)
                }
                with default_dtype(self.default):
                    part.call(own, state)
                for index, value in zip(whole.outputs, part.outputs):
                    found[index] = self._with_part(found.get(index), own[value.index], value, part.coords)
            env.update({index: found[index].to("cpu", dtype) for index, dtype in zip(whole.outputs, dtypes)})

        return call

    def _own(self, whole: Tensor, value: Value, coords: tuple[int, ...]) -> Tensor:
        return own_part(whole, value.tensor.slots, value.layout, self.mesh, coords)

    def _with_part(self, whole: Tensor | None, part: Tensor, value: Value, coords: tuple[int, ...]) -> Tensor:
        """Return a result with one rank's part written into it."""
        shape = value.tensor.shape
        if whole is None:
            whole = part.new_zeros(shape)
        places = torch.arange(num_elements(shape), device=part.device).view(shape)
        own = self._own(places, value, coords).flatten()
        return whole.flatten().index_put((own,), part.flatten()).view(shape)


def _dtype(program: Program, value: Value) -> torch.dtype:
    own = value.tensor.dtype
    return own if program.lifted is None else in_precision(own, program.lifted)
