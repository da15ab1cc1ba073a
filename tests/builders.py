"""Builders that tests of several rooms share: programs, questions, clusters with a disk."""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import trainwright as tw
from tests.pool import Pool
from trainwright import optim
from trainwright.artifacts import Cluster, ModelRef, Tier
from trainwright.capture.cached import cached_capture
from trainwright.hardware import resolve
from trainwright.models import zoo
from trainwright.planner.best_first import solve_on
from trainwright.planner.costs.price import price
from trainwright.planner.plan import Task
from trainwright.program.decisions import Decisions, Overlap
from trainwright.program.layout import local_shape
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import Program, build_program
from trainwright.rank.execute import Executor
from trainwright.rank.local import LocalProgram, build_local
from trainwright.rank.reshard import Pending, SimulatedCommunicator
from trainwright.rank.run_state import RunState

QUICK = Tier(write_bytes_per_s=1e12, read_bytes_per_s=1e12)


SLOW = Tier(write_bytes_per_s=1e3, read_bytes_per_s=1e3)


def with_disk(tier: Tier, hardware: str = "cpu:1") -> Cluster:
    return resolve(hardware).model_copy(update={"offload": {"disk": tier}})


def peak_bytes(run: Callable[[], object], folder: Path) -> int:
    """The most that `run` held of what it allocated, by the allocator's own records."""
    gc.disable()  # what an earlier test left behind would be counted as freed by `run`
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate((event["args"]["Bytes"] for event in events), initial=0))


@cache
def program() -> Program:
    return build_program(cached_capture(*tw.zoo.build("llama-tiny")))


@cache
def decisions(solver: str, memory: int | None = None) -> Decisions:
    plan = tw.plan(*tw.zoo.build("llama-tiny"), hardware="cpu:2", mesh=(2,), solver=solver, memory=memory)
    return decisions_of(program(), plan)


class Log(TorchDispatchMode, SimulatedCommunicator):
    """Collectives that are not made, and what happens between issuing them and waiting for them."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        SimulatedCommunicator.__init__(self, (2,))
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::bmm"):
            self.events.append("product")
        return func(*args, **(kwargs or {}))

    def issue(self, kind: str, axis: int, tensor: torch.Tensor) -> Pending:
        number = sum(event.startswith("issue") for event in self.events)
        self.events.append(f"issue {number}")
        return _Logged(self, number, super().issue(kind, axis, tensor))


class _Logged:
    def __init__(self, log: Log, number: int, pending: Pending) -> None:
        self.log, self.number, self.pending = log, number, pending

    def wait(self) -> torch.Tensor:
        self.log.events.append(f"wait {self.number}")
        return self.pending.wait()


def logged(chosen: Decisions, overlap: Overlap) -> tuple[Log, LocalProgram]:
    """Run a step whose collectives are only noted down."""
    log = Log()
    local = build_local(program(), replace(chosen, overlap=overlap), log)
    sources = {}
    for tensor, index in local.sources.items():
        shape = local_shape(tensor.shape, tensor.slots, local.values[index].layout, log.mesh, log.coords)
        value = torch.zeros(shape, dtype=tensor.dtype) if tensor.role != "const" else tensor.value
        sources[tensor] = value.requires_grad_(tensor.role == "param")
    with log:
        outputs = Executor(local).run(sources, RunState())
        log.events.append("forward ends")
        outputs[program().captured.loss_index].backward()
    return log, local


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Small enough to try every plan; two alike blocks, so that ties matter."""

    def __init__(self, num_blocks: int = 2, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make_optimizer(params):
    return optim.create("adamw", params)


@functools.cache
def blocks_program(num_blocks: int, batch: int = 8):
    return build_program(cached_capture(Blocks(num_blocks), (torch.ones(batch, 6),), lambda out, _: out))


@functools.cache
def tiny_program(name: str):
    model, batch = zoo.build(name)
    return build_program(cached_capture(model, batch))


def task(program, hardware: str = "cpu:2", **options) -> Task:
    defaults = {
        "model_ref": ModelRef(name="test"),
        "cluster": resolve(hardware),
        "budget_bytes": None,
        "optimizer": "adamw",
        "optimizer_cost": optim.record("adamw"),
        "make_optimizer": make_optimizer,
        "mesh": tuple(axis.size for axis in resolve(hardware).mesh()),
    }
    return Task(program, **{**defaults, **options})


def question(program, hardware: str = "cpu:2", **options) -> dict:
    found = task(program, hardware, **options)
    names = [
        "program",
        "model_ref",
        "cluster",
        "budget_bytes",
        "optimizer",
        "optimizer_cost",
        "make_optimizer",
        "mesh",
        "pins",
        "offload",
        "time_limit_s",
    ]
    return {name: getattr(found, name) for name in names}


def price_of(place, decisions, overlap=None) -> float:
    """The seconds that the solver minimises, nothing hidden; `overlap` replaces how parameters travel."""
    return whole_price_of(place, decisions, overlap).serial_s


def whole_price_of(place, decisions, overlap=None):
    decisions = replace(decisions, overlap=overlap or decisions.overlap)
    executor = Executor(build_local(place.problem.program, decisions, SimulatedCommunicator(decisions.mesh)))
    return price(executor, place.problem.costs, place.task.optimizer_cost)


NUM_LAYERS = 6


@functools.cache
def deep_program(num_layers: int = NUM_LAYERS):
    model, batch = zoo.build("gpt2-tiny", n_layer=num_layers)
    return build_program(cached_capture(model, batch))


@functools.cache
def peaks(num_layers: int = NUM_LAYERS):
    """The smallest and the fastest plan's peak on one axis."""
    (place,) = task(deep_program(num_layers), "2xh100").places
    smallest = place.solver.smallest(place.settings("joint"))
    return smallest.simulation.peak_bytes, solve_on(place, "joint").simulation.peak_bytes


PLAIN = f"{Path(__file__).parent}/docs_files/train.py:build"
"""A model for the command line that needs no package which takes seconds to import."""
PEAK_BAR = 0.02


def spec_of(model: str) -> str:
    """MODEL as the command line takes it; a bare name is the zoo's."""
    return model if ":" in model else f"zoo:{model}"


def check_on_ranks(pool: Pool, model: str, plan: tw.Plan, dtype: str = "float64") -> None:
    report = run_on_ranks(pool, model, plan, dtype)
    assert max(report.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=PEAK_BAR)


def run_on_ranks(pool: Pool, model: str, plan: tw.Plan, dtype: str = "float64") -> tw.Report:
    """Verify the plan: the maths, the budget, and that bytes moved."""
    payload = {"spec": spec_of(model), "options": {}}
    results = pool.run("trainwright.cli.workers:verify", timeout_s=280, model=payload, plan=plan.to_json(), dtype=dtype)
    report = tw.Report.model_validate(results[0])
    assert report.passed, report
    assert len(report.peak_bytes) == plan.num_ranks
    assert plan.budget_bytes is None or max(report.peak_bytes) <= plan.budget_bytes
    assert sum(plan.predicted.comm_bytes.values()) > 0
    return report


def simulated(peak_bytes: int, objective_s: float = 1.0) -> SimpleNamespace:
    """Return what stands for an answer whose simulation holds so many bytes."""
    return SimpleNamespace(simulation=SimpleNamespace(peak_bytes=peak_bytes), objective_s=objective_s, gap=0.0)
