"""Holds this rank's place among the pipeline stages of a plan, and moves tensors between stages.

ranks of stage 0      0 … k − 1            k: the ranks of a stage
ranks of stage 1      k … 2k − 1           stages are the outermost axis, over the slowest link
pipe                  c, k + c, 2k + c …   the ranks at one place of all stages, which send results to one another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..artifacts import PIPE, Plan, UserError
from ..program.program import Program
from ..program.stages import Stage, cut, stages_of, tied
from ..rank.pipeline import Piece, PipelineRunner
from ..rank.stage_actions import Action, Schedule, What, action_lists, check_order, forward_actions, stage_actions
from .communicator import MeshCommunicator
from .groups import made_once

_TAGS = 64
"""An upper bound on the tensors that cross a boundary; each one has its own tag."""


def check_stages(plan: Plan, replicas: int = 1) -> None:
    """Raise `UserError` for a plan with pipeline stages that uses what stages do not support."""
    if plan.pipeline is None:
        return
    needed = {
        "one replica of a plan with pipeline stages": replicas > 1,
        'overlap "none" in a plan with pipeline stages': plan.overlap != "none",
        "a plan with pipeline stages whose optimizer states stay on the device": plan.offloads_states,
    }
    for what, is_other in needed.items():
        if is_other:
            raise UserError(f"{what} is needed; this one has another; change it, or plan without stages")
    own = plan.pipeline
    check_order(action_lists(own.num_stages, plan.micro_batches, own.in_flight, own.virtual, own.split_backward))


def refuse_stages(plan: Plan, what: str) -> None:
    """Raise `UserError` if `plan` has pipeline stages; `what` names the feature that does not support them."""
    if plan.pipeline is not None:
        raise UserError(
            f"a plan without pipeline stages is needed for {what}; this one has {plan.num_stages}; plan without --pipeline"
        )


class Pipe:
    """This rank's pipeline stage and its process groups; `whole` is the mesh of stages and of each stage's ranks.

    Every rank constructs it at the same time, since making groups is a collective call.
    """

    def __init__(self, plan: Plan, program: Program, whole: DeviceMesh) -> None:
        assert plan.pipeline is not None
        self.pipeline, self.virtual = plan.pipeline, plan.pipeline.virtual
        self.index, self.size = whole.get_local_rank(PIPE), plan.num_stages
        self.group = whole.get_group(PIPE)
        self.ranks = dist.get_process_group_ranks(self.group)
        """The ranks at this rank's place in every stage, in the order of stages."""
        self._lines = whole.mesh.reshape(self.size, -1).T.tolist()
        self.readers = stages_of(tied(cut(program, plan.pipeline.begins)), self.size)
        """For each parameter that several stages read, those stages."""
        self._holders = {stages: self._group_over(stages, "holders") for stages in sorted(set(self.readers.values()))}
        self.shares_outputs = False
        """Whether every stage gets the outputs of an evaluation; otherwise only the stage that computes them has them."""
        self.pairs = self._pairs() if whole.device_type == "cuda" else {}

    def _group_over(self, stages: Sequence[int], use: str) -> Any:
        """Return the process group for one use of this rank's place in the given stages; a collective call of all ranks."""
        lines = [[line[s] for s in stages] for line in self._lines]
        key = use, tuple(map(tuple, lines))
        made = made_once(key, lambda: [dist.new_group(ranks) for ranks in lines])
        return made[self._lines.index(self.ranks)]

    def _pairs(self) -> dict[tuple[int, What], Any]:
        """Return a group of two ranks for each boundary and direction, since the transfers of one group run in order of issue."""
        ways: tuple[What, ...] = ("activation", "gradient")
        boundaries = range(self.size if self.virtual > 1 else self.size - 1)
        return {(s, what): self._group_over((s, (s + 1) % self.size), what) for s in boundaries for what in ways}

    def pieces_of(self, program: Program) -> list[Stage]:
        """Return the pieces of a whole program that this rank's stage runs: one, or several with interleaved stages."""
        return list(cut(program, self.pipeline.begins)[self.index :: self.size])

    def runner(self, pieces: Sequence[Piece], communicator: MeshCommunicator) -> PipelineRunner:
        """Return the runner of this rank's stage."""
        num = pieces[0].stage.program.num_runs
        actions = stage_actions(self.index, Schedule.of(self.pipeline, num))
        own = [name for name, stages in self.readers.items() if self.index in stages]
        return PipelineRunner(pieces, actions, PeerLink(self, communicator), own)

    def forwards(self, num: int) -> list[Action]:
        """Return the actions of this stage in the evaluation of `num` micro-batches."""
        return forward_actions(self.index, self.size, num, self.virtual)

    def holders(self, parameter: str) -> Any:
        """Return the process group, at this place, of the stages that hold a tied parameter."""
        return self._holders[self.readers[parameter]]

    def owns(self, parameter: str) -> bool:
        """Tell whether this stage is the first that holds `parameter`, which counts it for all of them."""
        return self.index == min(self.readers.get(parameter, (self.index,)))

    def gathered(self, value: Any) -> list[Any]:
        """Return the `value` of every stage's rank at this place; a collective call."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def added(self, own: float) -> float:
        """Return the sum of all stages' numbers; a collective call."""
        total: float = sum(self.gathered(own))
        return total

    def merged(self, own: Mapping[str, Tensor], device: torch.device, keep: bool = True) -> dict[str, Tensor]:
        """Return the tensors of all stages by name, each from the first stage that has it; a collective call.

        keep: whether this rank keeps them; if not, it holds one tensor at a time and returns none.
        """
        found: dict[str, Tensor] = {}
        shapes = self.gathered({name: (tuple(value.shape), value.dtype) for name, value in own.items()})
        for stage, held in enumerate(shapes):
            for name, (shape, dtype) in held.items():
                if any(name in before for before in shapes[:stage]):
                    continue
                mine = own[name].detach().to(device).contiguous() if stage == self.index else None
                value = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine
                if value.numel():
                    dist.broadcast(value, self.ranks[stage], group=self.group)
                if keep:
                    found[name] = value
        return found


class PeerLink:
    """Transfers tensors between this rank and the ranks at its place in the neighbouring stages."""

    def __init__(self, pipe: Pipe, communicator: MeshCommunicator) -> None:
        self.pipe, self.communicator = pipe, communicator

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Say so to the watchdog, and to the trace of a step."""
        return self.communicator.activity.doing(str(action))

    def post(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Issue the receives into `tensors`, and return their works."""
        return self._each(dist.irecv, action, tensors)

    def send(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Issue the sends of `tensors`, which must stay unchanged until `wait` has returned, and return their works."""
        self.communicator.activity.sends("send", _num_bytes(tensors))
        return self._each(dist.isend, action, tensors)

    def _each(self, transfer: Any, action: Action, tensors: Sequence[Tensor]) -> list[Any]:
        group = self.pipe.pairs.get((action.lower, action.what), self.pipe.group)
        first = _TAGS * (2 * (self.pipe.virtual * action.micro + action.chunk) + (action.what == "gradient"))
        try:
            return [
                transfer(tensor, self.pipe.ranks[action.peer], group=group, tag=first + place)
                for place, tensor in enumerate(tensors)
                if tensor.numel()
            ]
        except RuntimeError as error:
            raise self._lost(action, tensors, error) from None

    def wait(self, action: Action, tensors: Sequence[Tensor], works: Any) -> None:
        """Wait until a transfer is complete; raise `ConnectionError` if it fails."""
        if not works:
            return
        peer = self.pipe.ranks[action.peer]
        with self.communicator.activity.awaiting(self._what(action, tensors), peer):
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._lost(action, tensors, error) from None
        self.communicator._settle()

    def _what(self, action: Action, tensors: Sequence[Tensor]) -> str:
        way = "from" if action.kind in ("take", "post") else "to"
        return f"{action} {way} rank {self.pipe.ranks[action.peer]} ({_num_bytes(tensors):,} bytes)"

    def _lost(self, action: Action, tensors: Sequence[Tensor], error: Exception) -> ConnectionError:
        own, peer = self.pipe.ranks[action.stage], self.pipe.ranks[action.peer]
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConnectionError(
            f"rank {own} (stage {action.stage}) needs an answer in {self._what(action, tensors)}; the transfer failed "
            f"({reason}); see what became of rank {peer}, or allow more time"
        )

    def add_up(self, parameter: str, gradient: Tensor) -> None:
        """All-reduce the gradient of a tied parameter, in place, over the stages that read it."""
        activity, group = self.communicator.activity, self.pipe.holders(parameter)
        if not gradient.numel():
            return
        activity.sends("all_reduce", gradient.numel() * gradient.element_size())
        with activity.awaiting(f"all_reduce of the tied {parameter} over stages"):
            dist.all_reduce(gradient, group=group)
        self.communicator._settle()

    def share(self, value: Tensor) -> Tensor:
        """Return the last stage's `value`, broadcast to all stages."""
        with self.communicator.activity.awaiting("the loss of the last stage", self.pipe.ranks[-1]):
            dist.broadcast(value, self.pipe.ranks[-1], group=self.pipe.group)
        self.communicator._settle()
        return value


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
