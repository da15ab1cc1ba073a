"""Offloading: what leaves comes back the same, what is on its way is bounded, and plans promise what runs hold."""

from __future__ import annotations

import json
import os
import resource

import pytest
import torch

from tests.builders import QUICK, SLOW, make_optimizer, question, task, with_disk
from tests.grids import slow_but
from tests.plans import plan_of, random_decisions
from tests.pool import Pool
from trainwright.artifacts import Cluster, Tier, UserError
from trainwright.capture.cached import cached_capture
from trainwright.hardware import resolve
from trainwright.hardware.disk import disk_rates
from trainwright.models import zoo
from trainwright.planner.costs.simulate import simulate
from trainwright.planner.plan import make_plan
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import build_program
from trainwright.rank.offload import OffloadRun
from trainwright.runtime.offload import DiskStore, HostStore


@pytest.fixture(scope="module")
def program():
    return build_program(cached_capture(*zoo.build("gpt2-tiny", device="meta")))


# What leaves comes back the same


@pytest.mark.parametrize("store", [DiskStore, lambda: HostStore(torch.device("cpu"))])
@pytest.mark.parametrize("in_flight_bytes", [0, 5000, 2**30])
def test_contents_come_back_in_any_dtype_and_order(store, in_flight_bytes: int) -> None:
    run = OffloadRun(store(), in_flight_bytes)
    made = [
        torch.randn(100 + 37 * k).to(dtype) for k, dtype in enumerate([torch.float32, torch.bfloat16, torch.bool] * 3)
    ]
    made.append(torch.randn(40, 50).t()[3:, 1:])
    items = [run.register(tensor) for tensor in made]
    for item, tensor in zip(items, made):
        run.save(item, tensor)
    expected = [tensor.clone() for tensor in made]
    run.end_forward()
    for tensor in made:
        tensor.zero_()
    for item, tensor, wanted in reversed(list(zip(items, made, expected))):
        again = item.fetch().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        assert torch.equal(again, wanted)


@pytest.mark.parametrize("store", [DiskStore, lambda: HostStore(torch.device("cpu"))])
def test_memory_leaves_as_it_lies_though_a_conjugate_is_saved_first(store) -> None:
    run, numbers = OffloadRun(store(), 0), torch.randn(100, dtype=torch.complex64)
    wanted, item = numbers.clone(), run.register(numbers)
    run.save(item, numbers.conj())
    run.end_forward()
    numbers.zero_()
    assert torch.equal(item.fetch(), wanted)


def test_the_space_of_what_came_back_is_used_again() -> None:
    store = DiskStore()
    for _ in range(3):
        run = OffloadRun(store, 0)
        items = [run.register(tensor) for tensor in (torch.ones(1000), torch.ones(2000))]
        for item in items:
            run.save(item, torch.ones(item.num_elements))
        run.end_forward()
        del run, items, item
    assert os.fstat(store._file.fd).st_size <= 4096 + 8000


class Watching:
    """A store that notes what is under way."""

    def __init__(self) -> None:
        self.out: set[int] = set()
        self.most_out = self.most_back = self.back = 0
        self.read_order: list[int] = []

    def write(self, data: torch.Tensor) -> list[int]:
        ticket = [len(self.read_order), data.numel() * data.element_size()]
        self.out.add(id(ticket))
        self.most_out = max(self.most_out, len(self.out))
        return ticket

    def written(self, ticket: list[int]) -> None:
        self.out.discard(id(ticket))

    def read(self, ticket: list[int], into: torch.Tensor) -> None:
        self.back += 1
        self.most_back = max(self.most_back, self.back)
        self.read_order.append(ticket[1])

    def arrived(self, ticket: list[int]) -> None:
        self.back -= 1


def test_no_more_is_in_flight_than_allowed_and_what_left_last_comes_first() -> None:
    store = Watching()
    run = OffloadRun(store, 3 * 4004)
    tensors = [torch.ones(1000 - k) for k in range(8)]
    items = [run.register(tensor) for tensor in tensors]
    for item, tensor in zip(items, tensors):
        run.save(item, tensor)
    assert store.most_out == 4  # the fourth is begun, then the first is waited for
    run.end_forward()
    assert not store.out
    for item in reversed(items):
        item.fetch()
    assert store.most_back == 3
    assert store.read_order == [4 * (1000 - k) for k in reversed(range(8))]


def test_a_full_disk_is_said_so() -> None:
    store = DiskStore()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        run = OffloadRun(store, 0)
        item = run.register(torch.ones(100_000))
        with pytest.raises(UserError, match=r"room for what the plan offloads is needed in .*TMPDIR.*--offload none"):
            run.save(item, torch.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(UserError, match="room for what the plan offloads"):
        DiskStore("/nonexistent/folder")


# Plans drawn at random


@pytest.mark.parametrize(
    ("model", "seed"),
    slow_but(
        [("gpt2-tiny", 1)],
        [("gpt2-tiny", 1), ("t5-tiny", 2), ("resnet-tiny", 3), ("mixtral-tiny", 4)],
    ),
)
def test_offloading_beside_recomputation_and_sharding_computes_the_same(pool2: Pool, model: str, seed: int) -> None:
    report = pool2.run(
        "tests.parallel_cases:random_plan", timeout_s=280, model=model, mesh=[2], seed=seed, recompute=0.4, offload=0.7
    )[0]
    assert report["passed"], report


def test_indices_that_come_back_are_unknown_to_the_simulation() -> None:
    """The experts that tokens go to are offloaded, what they index is rederived: no value of theirs is ever read."""
    program = build_program(cached_capture(*zoo.build("mixtral-tiny", device="meta")))
    decisions = random_decisions(program, (2,), 1, recompute=0.6, offload=1.0)
    assert any(tensor.dtype is torch.int64 for tensor in offloaded_outputs(program, decisions))
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody wrote holds the largest integers
    try:
        assert simulate(program, decisions, make_optimizer).moved_bytes > 0
    finally:
        torch.use_deterministic_algorithms(False)


def offloaded_outputs(program, decisions):
    return [tensor for op in program.ops for tensor in op.outputs if f"{op.key}.out" in decisions.offloaded]


def test_what_is_drawn_does_leave(program) -> None:
    decisions = random_decisions(program, (1,), 1, offload=0.7)
    assert simulate(program, decisions, make_optimizer).moved_bytes > 900_000
    decisions.offloaded.clear()
    assert simulate(program, decisions, make_optimizer).moved_bytes == 0


# Plans


def smallest_bytes(program, tier: str) -> int:
    (place,) = task(program, "cpu:1", cluster=with_disk(QUICK), offload=tier, time_limit_s=5.0).places
    answer = place.solver.smallest(place.settings("joint"))
    assert answer is not None
    return answer.simulation.peak_bytes


def test_offloading_holds_less_than_recomputation_alone(program) -> None:
    assert smallest_bytes(program, "disk") < 0.95 * smallest_bytes(program, "none")


def test_a_plan_that_offloads_is_run_as_promised(pool2: Pool) -> None:
    """On two ranks, under a budget that binds: the same gradients, and the measured peak."""
    report = pool2.run("tests.parallel_cases:offloading_plan", timeout_s=280, budget_bytes=800_000)[0]
    assert report["passed"], report
    assert report["moved_bytes"] > 0
    assert max(report["peak_bytes"]) <= report["budget_bytes"]
    assert max(report["peak_bytes"]) == pytest.approx(report["predicted_peak_bytes"], rel=0.01)


@pytest.mark.parametrize(("tier", "moves"), [(QUICK, True), (SLOW, False)])
def test_a_quick_link_is_used_and_a_slow_one_is_not(program, tier: Tier, moves: bool) -> None:
    budget = 2_300_000  # binds, and recomputation alone can meet it
    plan = make_plan(
        **question(program, "cpu:1", cluster=with_disk(tier), budget_bytes=budget, offload="disk", time_limit_s=5.0)
    )
    assert (plan.predicted.moved_bytes > 0) == moves
    assert (plan.offload is not None) == moves
    assert plan.predicted.peak_bytes <= budget
    parts = plan.predicted
    assert parts.step_s == pytest.approx(parts.compute_s + parts.exposed_comm_s + parts.recompute_s + parts.transfer_s)
    if moves:
        assert parts.recompute_s == 0
        decisions = decisions_of(program, plan.parse(plan.to_json()))
        assert decisions.offloaded
        assert "offloaded" in plan.table()


def test_a_pin_offloads_and_prices_what_the_run_moves(program) -> None:
    tier = Tier(write_bytes_per_s=1e8, read_bytes_per_s=2e8, latency_s=1e-5, overlap=0.0)
    plan = make_plan(
        **question(program, "cpu:1", cluster=with_disk(tier), offload="disk", pins=("h.*.mlp.act=offload",))
    )
    found = plan.predicted
    assert plan.modules["transformer.h.{0-1}.mlp.act:gelu"].offloaded
    num = round((found.transfer_s - found.moved_bytes * (1 / 1e8 + 1 / 2e8)) / 2e-5)
    assert num > 0
    assert found.transfer_s == pytest.approx(found.moved_bytes * (1 / 1e8 + 1 / 2e8) + num * 2e-5)


def test_what_cannot_be_asked_is_said(program) -> None:
    with pytest.raises(UserError, match="add --offload host or --offload disk"):
        make_plan(**question(program, "cpu:1", pins=("h.*.mlp.act=offload",)))
    with pytest.raises(UserError, match=r"one of auto, host, disk, none; got 'cloud'"):
        make_plan(**question(program, "cpu:1", offload="cloud"))
    with pytest.raises(UserError, match="host is the memory of a CPU; try disk"):
        make_plan(**question(program, "cpu:1", offload="host"))
    with pytest.raises(UserError, match="hardware with a disk tier is needed"):
        make_plan(**question(program, "h100", offload="disk"))


def test_a_plan_names_one_fate_for_a_value(program) -> None:
    decisions = random_decisions(program, (1,), 0, recompute=0.0, offload=0.5)
    plan = plan_of(program, decisions)
    key, entry = next((key, op) for key, op in plan.modules.items() if "out" in op.offloaded)
    both = entry.model_copy(update={"recomputed": {"out": entry.offloaded["out"]}})
    with pytest.raises(UserError, match="both recomputed and offloaded"):
        decisions_of(program, plan.model_copy(update={"modules": {**plan.modules, key: both}}))
    with pytest.raises(UserError, match="the plan's `offload`"):
        decisions_of(program, plan.model_copy(update={"offload": None}))


def test_hardware_files_of_before_there_were_tiers_are_read() -> None:
    data = json.loads(resolve("8xh100").to_json())
    del data["offload"]
    found = Cluster.parse(json.dumps({**data, "host_bandwidth_bytes_per_s": 3e10}))
    assert found.tier("host").read_bytes_per_s == 3e10
    with pytest.raises(UserError, match="hardware with a disk tier is needed"):
        found.tier("disk")


def test_the_disk_is_measured(tmp_path) -> None:
    found = disk_rates(quick=True, folder=str(tmp_path))
    assert found["written"] > 1e5
    assert found["read"] > 1e5
    assert 0 <= found["overlap"] <= 1
    assert disk_rates(quick=True, folder="/nonexistent") == {}
