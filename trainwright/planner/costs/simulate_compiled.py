"""Simulates one device's step of a compiled plan, and measures what each of its spans holds and takes.

The local program that the runtime would compile runs on fake tensors, torch making the graphs and inductor's kernels standing in
as `profiler.compiled` has them. Memory and seconds are those of a profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...artifacts import Cluster, MemoryPoint
from ...profiler.compiled import CompiledStep
from ...profiler.run import ObservedStep, Question
from ...profiler.threads import threads
from ...profiler.values import KnownValues
from ...program.decisions import Decisions
from ...program.program import Program
from ...program.program import Tensor as ProgramTensor
from ...rank.compiled import Compiled, Span
from ...rank.execute import Executor
from ...rank.local import build_local
from ...rank.reshard import SimulatedCommunicator
from ...rank.run_state import RunState
from ...torch_internals.fakes import new_mode
from .known_updates import MakeOptimizer
from .simulate import Simulation, fake_sources, fuse_attention


@dataclass
class SpanCost:
    """The memory and seconds of one span in a step."""

    region: int
    saved_bytes: int = 0
    """The bytes that its forward leaves alive beyond those that it found."""
    forward_peak: int = 0
    backward_peak: int = 0
    """The most that is alive while its backward runs and until that of the span before it begins; 0 if it has none."""
    seconds: float = 0.0


@dataclass
class CompiledSimulation:
    """The result of simulating a compiled step."""

    peak_bytes: int
    peak_at: str
    breakdown: dict[str, int]
    step_s: float
    update_s: float
    num_graphs: int
    num_kernels: int
    num_calls: int
    spans: list[SpanCost] = field(repr=False)
    timeline: list[MemoryPoint] = field(repr=False)
    executor: Executor = field(repr=False)

    @property
    def plain(self) -> Simulation:
        """The same as the simulation of a plan that is not compiled has it."""
        return Simulation(
            self.peak_bytes, self.peak_at, self.breakdown, {}, {}, self.num_calls, [self.executor], self.timeline
        )


def simulate_compiled(
    program: Program,
    decisions: Decisions,
    make_optimizer: MakeOptimizer,
    cluster: Cluster,
    num_threads: int | None = None,
) -> CompiledSimulation:
    """Simulate the step of a plan for one device whose `decisions.compiled` is set."""
    with threads(num_threads):
        return _simulate(program, decisions, make_optimizer, cluster)


def _simulate(
    program: Program, decisions: Decisions, make_optimizer: MakeOptimizer, cluster: Cluster
) -> CompiledSimulation:
    executor = Executor(build_local(program, decisions, SimulatedCommunicator(decisions.mesh, None)))
    fuse_attention(executor, cluster.device.kind)
    mode = new_mode()
    step = CompiledStep(cluster.device, mode)
    with step.of_script():
        with mode:
            sources = fake_sources(executor.local)
        module = _Step(executor, sources)
        batch = {tensor.key: value for tensor, value in sources.items() if tensor.role == "input"}
        place = program.captured.loss_index
        asked = Question(module, batch, lambda outputs, _: outputs[place], device=cluster.device)
        with step.made_by(asked):
            run = step.run = ObservedStep(asked, KnownValues(mode))
            assert run.values is not None
            assert executor.compiled is not None
            marks = _Marks(run, executor.compiled)
            with run.values:
                run.go(lambda _: make_optimizer(list(module.named.items())))
    found = step.found()
    return CompiledSimulation(
        run.tracker.peak_bytes,
        run.tracker.peak_at,
        run.breakdown(),
        run.totals.step_s,
        sum(tally.time_s for (phase, *_), tally in run.totals.tallies.items() if phase == "update"),
        found.num_graphs,
        found.num_kernels,
        run.tracker.num_ops,
        marks.costs(),
        list(run.timed_timeline()),
        executor,
    )


class _Step(nn.Module):
    """The local program as a module that a profile can run."""

    def __init__(self, executor: Executor, sources: Mapping[ProgramTensor, Tensor]) -> None:
        super().__init__()
        self.executor = executor
        self.named: dict[str, nn.Parameter] = {}
        """The parameters by the user's names."""
        self.held = {tensor: value for tensor, value in sources.items() if tensor.role != "input"}
        for place, (tensor, value) in enumerate(self.held.items()):
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"p{place}", value)
                self.named[tensor.key] = value
            elif tensor.role == "buffer":
                self.register_buffer(f"b{place}", value)
        self.inputs = {tensor.key: tensor for tensor in sources if tensor.role == "input"}

    def forward(self, **batch: Any) -> list[Any]:
        return self.executor.run({**self.held, **{self.inputs[key]: value for key, value in batch.items()}}, RunState())


@dataclass
class _Mark:
    """Where the timeline and the clock stood, and what was alive."""

    point: int
    live_bytes: int
    seconds: float


class _Marks:
    """Notes where each span's forward begins and ends, and where its backward begins."""

    def __init__(self, run: ObservedStep, compiled: Compiled) -> None:
        self.run, self.compiled = run, compiled
        self.starts: dict[int, _Mark] = {}
        self.stops: dict[int, _Mark] = {}
        self.backs: dict[int, _Mark] = {}
        compiled.begins, compiled.ends = self._begin, self._end

    def _now(self) -> _Mark:
        tracker = self.run.tracker
        return _Mark(len(tracker.timeline), tracker.live_bytes, self.run.totals.step_s)

    def _begin(self, span: Span) -> None:
        self.starts[span.start] = self._now()
        self.backs.pop(span.start, None)

    def _end(self, span: Span, nodes: set[Any]) -> None:
        self.stops[span.start] = self._now()

        def back(_: Any) -> None:
            self.backs.setdefault(span.start, self._now())

        for node in nodes:
            node.register_prehook(back)

    def costs(self) -> list[SpanCost]:
        """Return what the last step that ran took, span by span."""
        timeline = self.run.tracker.timeline
        last = next((place for place, point in enumerate(timeline) if point.phase == "update"), len(timeline))
        update_s = sum(self.run.totals.op_s[last:])
        end = _Mark(last, 0, self.run.totals.step_s - update_s)
        found = []
        for span in self.compiled.spans:
            start, stop = self.starts[span.start], self.stops[span.start]
            cost = SpanCost(
                span.region, stop.live_bytes - start.live_bytes, seconds=stop.seconds - start.seconds,
                forward_peak=_most(timeline[start.point : stop.point], start, stop),
            )  # fmt: skip
            if (back := self.backs.get(span.start)) is not None:
                cost.backward_peak = _most(timeline[back.point : end.point], back)
                cost.seconds += end.seconds - back.seconds
                end = back
            found.append(cost)
        return found


def _most(points: list[MemoryPoint], *marks: _Mark) -> int:
    return max([point.live_bytes for point in points] + [mark.live_bytes for mark in marks])
