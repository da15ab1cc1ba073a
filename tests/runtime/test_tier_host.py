"""Parameters, gradients and states that rest in the host's memory: against memory, bit for bit, and against their plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.grids import slow_but
from tests.pool import Pool
from tests.tier_cases import SMALL, away, gpt2, loss_fn, model_of, module_of, run, same, take_steps, weights_of
from trainwright.artifacts import Cluster, Plan, Refusal, Tier, UserError
from trainwright.hardware import resolve
from trainwright.profiler.kernels.allocator import measure
from trainwright.runtime import TierOptions
from trainwright.runtime.checkpoint.checkpoint import Checkpointer
from trainwright.tiers import MemoryStore, Policy, memory

WINDOW = 100_000


def with_host(num: int = 1, capacity: int | None = None, rate: float = 5e8) -> Cluster:
    """Return CPUs whose device is a budget within the host's memory."""
    cluster = resolve(f"cpu:{num}")
    host = Tier(write_bytes_per_s=rate, read_bytes_per_s=rate, capacity_bytes=capacity)
    return cluster.model_copy(update={"offload": {**cluster.offload, "host": host}})


def planned(memory: str | None, num: int = 1, offload: str = "auto", **policy: Any) -> Plan:
    loaded = gpt2()
    own = Policy(WINDOW, place="host", **policy)
    found = tw.plan(loaded.model, loaded.batch, hardware=with_host(num), memory=memory, tier=own, offload=offload)
    return Plan.parse(found.to_json())


@pytest.fixture(scope="module")
def tight() -> Plan:
    return planned("750KiB")


@pytest.fixture(scope="module")
def in_memory(tight: Plan) -> dict[str, torch.Tensor]:
    return run(tight.in_memory(), None, 3)[1]


def test_a_run_moves_holds_and_computes_what_its_plan_says(tight: Plan, in_memory: dict[str, torch.Tensor]) -> None:
    """Parameters, states and activations go to the host; the plan says it all, so nothing else has to be told."""
    assert tight.tier is not None
    assert away(tight, "param")
    assert away(tight, "state")
    assert tight.predicted.moved_bytes > 0
    _, _, module = run(tight, None, 1)
    tier = module.tier
    optimizer = tier.updates.optimizer
    take_steps(module, optimizer, range(1, 2))
    tier.told()
    take_steps(module, optimizer, range(2, 3))
    told = tier.told()
    assert told["tier_read_bytes"] == tight.tier.read_bytes == told["tier_planned_read_bytes"] > 0
    assert told["tier_write_bytes"] == tight.tier.written_bytes == told["tier_planned_write_bytes"]
    assert tier.store.num_bytes == tight.tier.host_bytes
    assert same(weights_of(module), in_memory)
    tier.close()


def test_the_allocator_never_has_more_than_the_plan_promises(tight: Plan) -> None:
    _, _, module = run(tight, None, 1)
    static = sum(each.num_bytes for each in module.tier.parked.values() if each.is_kept)
    static += sum(state.nbytes for held in module.tier.updates.kept.values() for state in held.values())
    static += sum(buffer.nbytes for buffer in module.buffers())
    steps = iter(range(1, 4))
    found = measure(lambda: take_steps(module, module.tier.updates.optimizer, range(step := next(steps), step + 1)), 2)
    peak = static + found.peak_delta_bytes
    assert 0.6 * tight.predicted.peak_bytes < peak <= tight.predicted.peak_bytes <= tight.budget_bytes
    module.tier.close()


@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"keep_bytes": 300_000, "num_workers": 3}],
        [{}, {"update": "after"}, {"window_bytes": 60_000}, {"keep_bytes": 300_000, "num_workers": 3}],
    ),
    ids=str,
)
def test_any_plan_may_rest_in_the_host(options: dict[str, Any]) -> None:
    loaded = gpt2()
    plan = tw.plan(loaded.model, loaded.batch, hardware="cpu:1")
    _, found, module = run(plan, TierOptions(host=True, store=SMALL, **options), 3)
    assert same(found, run(plan, None, 3)[1])
    told, planned_now = module.tier.told(), module.tier.planned()
    assert told["tier_planned_read_bytes"] == planned_now.read_bytes
    stays = [each.key for each in module.tier.parked.values() if each.is_kept]
    assert bool(stays) == ("keep_bytes" in options)
    assert not any(key in module.tier.store for key in stays)
    module.tier.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [{"keep_bytes": 1 << 40}, {"keep_bytes": 150_000}, {"keep_bytes": 1 << 40, "update": "after"}], ids=str
)
@pytest.mark.parametrize("budget", [None, "1.2MiB", "750KiB"])
def test_every_policy_moves_what_is_planned(budget: str | None, policy: dict[str, Any]) -> None:
    plan = planned(budget, **policy)
    _, _, module = run(plan, None, 1)
    take_steps(module, module.tier.updates.optimizer, range(1, 2))
    module.tier.told()
    take_steps(module, module.tier.updates.optimizer, range(2, 3))
    told = module.tier.told()
    assert plan.tier is not None
    exact = (
        plan.tier.update == "during"
    )  # after it, a bias that has not come yet when its gradient does is read once less
    assert told["tier_read_bytes"] == pytest.approx(plan.tier.read_bytes, rel=0.0 if exact else 0.01)
    assert told["tier_write_bytes"] == plan.tier.written_bytes
    assert same(weights_of(module), run(plan.in_memory(), None, 3)[1])
    module.tier.close()


@pytest.mark.parametrize("hardware", slow_but([with_host()], [with_host(), with_host(2), "4xa100"]))
def test_nothing_is_moved_without_need(hardware: Any) -> None:
    """Where all may stay, what is allowed to stay needs no tier, and one that is kept takes no time: no transfer hides or shows."""
    loaded, question = gpt2(), {"hardware": hardware, "offload": "none"}
    assert tw.plan(loaded.model, loaded.batch, tier=Policy(WINDOW, place="host"), **question).tier is None
    plan = tw.plan(loaded.model, loaded.batch, tier=Policy(WINDOW, 1 << 40, place="host"), **question)
    assert plan.tier is not None
    assert (plan.tier.read_bytes, plan.tier.written_bytes, plan.tier.host_bytes) == (0, 0, 0)
    assert plan.predicted.transfer_s == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1.5MiB", "1.6MiB"])
def test_where_a_plan_without_the_tier_is_faster_it_is_taken(budget: str) -> None:
    loaded, question = gpt2(), {"hardware": with_host(), "memory": budget}
    alone = tw.plan(loaded.model, loaded.batch, **question)
    with_tier = tw.plan(loaded.model, loaded.batch, tier=Policy(WINDOW, place="host"), **question)
    assert with_tier.predicted.step_s <= alone.predicted.step_s * (1 + 1e-3)


def test_the_hosts_capacity_binds() -> None:
    model, batch = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), (torch.ones(4, 64),)

    def plan_of(capacity: int | None) -> Plan:
        asked: dict[str, Any] = {"loss_fn": lambda output: output.square().mean(), "hardware": with_host(1, capacity)}
        return tw.plan(model, batch, memory="200KiB", tier=Policy(40_000, place="host"), **asked)

    needed = plan_of(None)
    assert needed.tier is not None
    room = needed.tier.host_bytes + needed.predicted.moved_bytes
    plan = plan_of(room)
    assert plan.tier is not None
    assert plan.tier.host_bytes + plan.predicted.moved_bytes <= room
    with pytest.raises(Refusal, match=r"the host holds 50.00 KiB a device.*try a budget of"):
        plan_of(50 * 1024)
    edited = needed.model_copy(update={"cluster": with_host(1, room - 1)})
    with pytest.raises(Refusal, match=r"a host of .* a device is needed"):
        tw.check(edited, model, batch, loss_fn=lambda output: output.square().mean())


def test_a_host_without_room_is_named_before_anything_runs(tight: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100_000)
    with pytest.raises(UserError, match=r"needed in the host's memory.*100000 are free"):
        module_of(tight, None)


def test_what_contradicts_a_plan_is_refused(tmp_path: Path, tight: Plan) -> None:
    loaded = gpt2()
    with pytest.raises(UserError, match="host; got disk"):
        tw.parallelize(loaded.model, tight, tier=TierOptions([tmp_path]))
    for options, match in (
        ({"folders": [tmp_path], "host": True}, "no folders"),
        ({"host": True, "resume": True}, "no resume.*checkpoint"),
    ):
        with pytest.raises(UserError, match=match):
            TierOptions(**options)
    with pytest.raises(UserError, match="committed to disks only"):
        planned(None, commit_every=2)
    with pytest.raises(UserError, match="host is the memory of a CPU"):
        tw.plan(loaded.model, loaded.batch, hardware="cpu:1", tier=Policy(WINDOW, place="host"))
    with pytest.raises(UserError, match="activations on the same tier"):
        tw.plan(loaded.model, loaded.batch, hardware=with_host(), tier=Policy(WINDOW, place="host"), offload="disk")
    with pytest.raises(UserError, match="one of disk and host"):
        Policy(WINDOW, place="tape")


def test_a_checkpoint_has_what_rests_in_the_host(
    tmp_path: Path, tight: Plan, in_memory: dict[str, torch.Tensor]
) -> None:
    """Both ways: what one run has saved, another goes on with, in the host's memory or without."""
    _, _, module = run(tight, None, 2)
    optimizer = module.tier.updates.optimizer
    with Checkpointer(tmp_path, module, optimizer) as checkpointer:
        checkpointer.save(1)
    module.tier.close()
    for plan in (tight, tight.in_memory()):
        module, optimizer = module_of(plan, None)
        if module.tier is not None:
            take_steps(module, optimizer, range(5, 6))  # which has left states of its own
        assert Checkpointer(tmp_path, module, optimizer).load_latest() == 1
        take_steps(module, optimizer, range(2, 3))
        assert same(weights_of(module), in_memory)
        if module.tier is not None:
            module.tier.close()
    module, optimizer = module_of(tight.in_memory(), None)
    take_steps(module, optimizer, range(2))
    with Checkpointer(tmp_path / "in-memory", module, optimizer) as checkpointer:
        checkpointer.save(1)
    module, optimizer = module_of(tight, None)
    assert Checkpointer(tmp_path / "in-memory", module, optimizer).load_latest() == 1
    take_steps(module, optimizer, range(2, 3))
    assert same(weights_of(module), in_memory)
    module.tier.close()


@pytest.mark.parametrize("update", slow_but(["during"], ["during", "after"]))
def test_a_step_that_is_not_finite(tight: Plan, update: str, tmp_path: Path) -> None:
    """With the update after the backward it is taken back; else the weights have seen it, which is said, and not saved."""
    loaded, plan = gpt2(), tight if update == "during" else planned("750KiB", update=update)
    with torch.no_grad():
        loaded.model.transformer.ln_f.bias.fill_(math.inf)

    def train(**options: Any) -> Any:
        return tw.train(loaded.model, plan, loaded.batch, steps=2, checkpoint=tmp_path / update, **options)

    if update == "during":
        with pytest.raises(UserError, match="on_nan='skip' beside updates during the backward"):
            train(on_nan="skip")
        with pytest.raises(Refusal, match="have been updated by it; go on from a checkpoint"):
            train()
        assert not list((tmp_path / update).glob("step-*"))
    else:
        assert len(train(on_nan="skip").losses) == 2


def test_training_leaves_the_weights_where_they_can_be_read(tight: Plan) -> None:
    loaded = gpt2()
    found = tw.train(loaded.model, tight, loaded.batch, steps=2)
    with found.model.tier.whole():
        assert all(bool(value.isfinite().all()) for value in tw.full_state_dict(found.model).values())
    found.model.tier.close()


@pytest.mark.slow  # on each change: those of test_tier_plans.py, and one rank here
def test_ranks_follow_one_plan(pool2: Pool) -> None:
    (model, batch), seed = model_of(1), 1
    asked: dict[str, Any] = {"loss_fn": loss_fn, "hardware": with_host(2), "tier": Policy(50_000, place="host")}
    plan = tw.plan(model, batch, memory="125KiB", offload="none", **asked)
    assert away(plan, "param") | away(plan, "state")
    assert pool2.run("tests.tier_cases:follows_its_plan", plan=plan.to_json(), seed=seed) == [[True, True]] * 2


@pytest.mark.slow
def test_ranks_follow_one_plan_of_gpt2(pool2: Pool) -> None:
    plan = planned("700KiB", num=2, offload="none")  # activations of the fullest rank are planned for all
    assert away(plan, "param") | away(plan, "state")
    assert pool2.run("tests.tier_cases:follows_its_plan", plan=plan.to_json()) == [[True, True]] * 2


def for_gpu() -> Plan:
    loaded = gpt2()
    plan = tw.plan(loaded.model, loaded.batch, hardware="h100", memory="1MiB", tier=Policy(WINDOW, place="host"))
    assert away(plan, "state")
    return plan


def test_plans_for_gpus_take_the_hosts_memory() -> None:
    """The same program on the CPU: what comes and goes, and what is computed, does not depend on the device."""
    plan = for_gpu()
    _, found, module = run(plan, None, 2)
    assert isinstance(module.tier.store, MemoryStore)
    assert same(found, run(plan.in_memory(), None, 2)[1])
    module.tier.close()
    loaded = gpt2()
    with pytest.raises(UserError, match="which has a host"):
        tw.plan(loaded.model, loaded.batch, hardware="h100", tier=Policy(WINDOW))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_rests_in_page_locked_memory() -> None:
    plan = for_gpu()
    _, found, module = run(plan, None, 3)
    parked = next(each for each in module.tier.parked.values() if not each.is_kept)
    assert parked.local.device.type == "cuda"
    assert module.tier.store.items[parked.key].buffer.is_pinned()
    expected = run(plan.in_memory(), None, 3)[1]
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6) for name in found)
    told, told_of_plan = module.tier.told(), module.tier.planned()
    assert told["tier_planned_read_bytes"] == told_of_plan.read_bytes > 0
    module.tier.close()
