"""Training on disks against the same training in memory, bit for bit; what it moves against what is planned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainwright as tw
from tests.grids import slow_but
from tests.pool import Pool
from tests.tier_cases import LR, SMALL, batch_of, gpt2, like, module_of, run, same, take_steps, weights_of
from trainwright import optim
from trainwright.artifacts import Plan, UserError
from trainwright.rank.offload_states import check_updates_alone
from trainwright.runtime import TierOptions, train_loop
from trainwright.runtime.tiered.places import check_room_for_all
from trainwright.runtime.tiered.saving import TierSaving
from trainwright.tiers import Fault, Policy, StoreOptions, TierFault
from trainwright.training import made, optimizer_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    loaded = gpt2()
    return tw.plan(loaded.model, loaded.batch, hardware="cpu:1")


@pytest.fixture(scope="module")
def tight() -> Plan:
    """A plan that recomputes."""
    loaded = gpt2()
    made_plan = tw.plan(loaded.model, loaded.batch, hardware="cpu:1", memory="1.4MiB")
    assert made_plan.predicted.recompute_s > 0
    return made_plan


@pytest.fixture(scope="module")
def reference(plan: Plan) -> dict[str, torch.Tensor]:
    return run(plan, None, 4)[1]


@pytest.mark.parametrize(
    "options",
    slow_but(
        [
            {"window_bytes": 60_000, "update": "after", "keep_bytes": 100_000},
            {"keep_bytes": 300_000, "commit_every": 3},
        ],
        [
            {},
            {"update": "after"},
            {"window_bytes": 60_000},
            {"window_bytes": 60_000, "update": "after", "keep_bytes": 100_000},
            {"keep_bytes": 300_000, "num_workers": 3},
            {"keep_bytes": 300_000, "commit_every": 3},
            {"worker_cores": [0]},
        ],
    ),
    ids=str,
)
def test_steps_are_those_without_a_tier(
    tmp_path: Path, plan: Plan, reference: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    _, found, module = run(plan, TierOptions([tmp_path], store=SMALL, **options), 4)
    assert same(found, reference)
    tier = module.tier
    window = tier.options.window_bytes
    if (
        window < 100_000
    ):  # beside it the tied weight, which comes at the head and goes at the embedding, and one that is used
        assert tier.residence.peak_bytes <= window + 63_552 + 36_864
        assert tier.updates.peak_bytes <= max(window // 2, 4 * 63_552)
    tier.close()


@pytest.mark.slow
def test_recomputing_plans_take_the_same_steps(tmp_path: Path, tight: Plan) -> None:
    _, found, module = run(tight, TierOptions([tmp_path], window_bytes=100_000, store=SMALL), 3)
    assert same(found, run(tight, None, 3)[1])
    module.tier.close()


def plan_for(optimizer: str) -> Plan:
    loaded = gpt2()
    return tw.plan(loaded.model, loaded.batch, hardware="cpu:1", optimizer=optimizer)


@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lion", "adamw8bit"))]
)
def test_other_optimizers_take_the_same_steps(tmp_path: Path, optimizer: str) -> None:
    own = plan_for(optimizer)
    _, found, module = run(own, TierOptions([tmp_path], store=SMALL), 3)
    assert same(found, run(own, None, 3)[1])
    module.tier.close()


REFUSED = {
    "adadagradnorm", "adahessian", "clippedadafactor", "clippedadam", "clippedsgd", "frugal", "gradnormsmoothnewton", "mfac",
    "normalizedsgd", "signsgd", "sophiag", "sophiah", "sso",
}  # fmt: skip
"""Those whose update of one parameter reads others, or that need more than its gradient."""


def test_optimizers_that_look_at_several_parameters_are_refused() -> None:
    params = [nn.Parameter(torch.ones(4, 4))]
    refused = set()
    for name in optim.names():
        try:
            check_updates_alone(optim.choose(name).make(params, LR))
        except UserError as error:
            assert "updates each parameter by itself" in str(error)  # noqa: PT017
            refused.add(name)
    assert refused == REFUSED


@pytest.mark.slow
def test_adafactor_of_a_planned_module_is_refused(tmp_path: Path) -> None:
    """It reads rows and columns of whole parameters, which a rank may have a part of."""
    with pytest.raises(UserError, match="updates each parameter by itself"):
        module_of(plan_for("adafactor"), TierOptions([tmp_path], store=SMALL))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "after"},
        {"window_bytes": 60_000},
        {"keep_bytes": 200_000},
        {"window_bytes": 400_000, "keep_bytes": 90_000},
    ],
    ids=str,
)
def test_a_step_moves_what_is_planned(tmp_path: Path, plan: Plan, options: dict[str, Any]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for each in folders:
        each.mkdir()
    module, optimizer = module_of(plan, TierOptions(folders, store=SMALL, **options))
    take_steps(module, optimizer, range(1))
    tier = module.tier
    tier.told()
    for step in (1, 2):
        take_steps(module, optimizer, range(step, step + 1))
        told = tier.told()
        assert told["tier_read_bytes"] == told["tier_planned_read_bytes"]
        assert told["tier_write_bytes"] == told["tier_planned_write_bytes"]
    tier.close()


def test_kept_layers_are_written_with_the_steps_that_are_kept(tmp_path: Path, plan: Plan) -> None:
    module, optimizer = module_of(plan, TierOptions([tmp_path], keep_bytes=250_000, commit_every=2, store=SMALL))
    written = []
    for step in range(6):
        module.tier.told()
        take_steps(module, optimizer, range(step, step + 1))
        written.append(module.tier.told()["tier_write_bytes"])
    planned = module.tier.planned()
    assert written[2:] == [planned.written, planned.written + planned.kept_bytes] * 2
    module.tier.close()


@pytest.mark.parametrize("kind", slow_but(["EIO"], ["EIO", "full", "checksum"]))
def test_after_a_fault_the_run_goes_on_from_the_last_whole_step(
    tmp_path: Path, plan: Plan, reference: dict[str, torch.Tensor], kind: str
) -> None:
    """Planted at a transfer of the third step; what goes on ends where an undisturbed run does."""
    probe = tmp_path / "probe"
    probe.mkdir()
    module, optimizer = module_of(plan, TierOptions([probe], store=SMALL))
    take_steps(module, optimizer, range(2))
    at = module.tier.store._planted.counts[Fault(kind).direction] + 5
    module.tier.close()
    place = tmp_path / "place"
    place.mkdir()
    faulty = StoreOptions(chunk_bytes=16384, buffer_bytes=8 * 16384, faults=[Fault(kind, at)])
    module, optimizer = module_of(plan, TierOptions([place], store=faulty))
    with pytest.raises(TierFault, match=f"fault: {kind}"):
        take_steps(module, optimizer, range(4))
    module.tier.close()
    module, optimizer = module_of(plan, TierOptions([place], resume=True, store=SMALL))
    assert module.tier.step == 1
    take_steps(module, optimizer, range(2, 4))
    assert same(weights_of(module), reference)
    module.tier.close()


def test_a_step_that_is_not_finite_is_taken_back(tmp_path: Path, plan: Plan) -> None:
    def losses(tier: TierOptions | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        loaded = gpt2()
        module = tw.parallelize(loaded.model, plan, seed=3, tier=tier).train()
        chosen, _ = optimizer_of(plan, model=loaded.model)
        optimizer = made(chosen, module, LR)
        poison = module.get_parameter("transformer.h.1.ln_1.weight").register_hook
        seen = []

        def spoil(grad: Any) -> Any:
            seen.append(None)
            return grad * float("nan") if len(seen) == 2 else grad

        poison(spoil)
        saving = TierSaving(module, optimizer, 4) if tier is not None else None
        batches = [like(plan, batch_of(step)) for step in range(4)]
        found = train_loop(
            module,
            optimizer,
            batches,
            steps=4,
            on_nan="skip",
            after_step=saving.after_step if saving else lambda step: None,
        )
        return found, weights_of(module)

    expected = losses(None)
    for name, options in {"plain": {}, "kept": {"keep_bytes": 300_000}}.items():
        (tmp_path / name).mkdir()
        found = losses(TierOptions([tmp_path / name], store=SMALL, **options))
        assert found[0] == expected[0]
        assert same(found[1], expected[1])


def test_clipping_by_the_norm_of_the_step_before(tmp_path: Path, plan: Plan) -> None:
    module, optimizer = module_of(plan, None)
    norm = 0.0
    for step in range(4):
        optimizer.zero_grad()
        module(**plan.shard_batch(like(plan, batch_of(step)))).loss.backward()
        grads = [param.grad.to_local() for param in module.parameters()]
        own = sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in grads) ** 0.5
        factor = min(1.0, 0.5 / norm) if norm else 1.0
        for grad in grads:
            grad.mul_(factor)
        optimizer.step()
        norm = own
    _, found, tiered = run(plan, TierOptions([tmp_path], clip_previous_norm=0.5, store=SMALL), 4)
    assert tiered.tier.norm == pytest.approx(norm, rel=1e-12)
    assert all(
        torch.allclose(found[name], value, rtol=1e-6, atol=1e-7) for name, value in tw.full_state_dict(module).items()
    )
    with pytest.raises(UserError, match="clip_previous_norm"):
        tw.clip_grad_norm_(tiered, 1.0)
    tiered.tier.close()


def test_what_reads_a_gradient_learns_that_it_has_gone(
    tmp_path: Path, plan: Plan, reference: dict[str, torch.Tensor]
) -> None:
    """torch's own clipping would pass over gradients that are `None`, and clip nothing."""
    module, optimizer = module_of(plan, TierOptions([tmp_path], keep_bytes=100_000, store=SMALL))
    for step in range(4):
        module(**plan.shard_batch(like(plan, batch_of(step)))).loss.backward()
        grads = [param.grad for param in module.parameters()]
        assert all(grad.shape == param.shape for grad, param in zip(grads, module.parameters(), strict=True))
        with pytest.raises(UserError, match="clip_previous_norm"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        with pytest.raises(UserError, match="clip_previous_norm"):
            torch.nn.utils.clip_grad_value_(module.parameters(), 1.0)
        optimizer.step()
        assert all(param.grad is None for param in module.parameters())
    assert same(weights_of(module), reference)
    module.tier.close()


def test_room_for_all_is_asked_before_anything_is_written(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both places of parameters and AdamW's states, of 4 and 8 bytes a number, and of gradients that wait."""
    num_params = sum(param.numel() for param in gpt2().model.parameters())
    usage = shutil.disk_usage(tmp_path)
    for options, needed in (({}, 24 * num_params), ({"update": "after"}, 32 * num_params)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=needed - 1: usage._replace(free=free))
        with pytest.raises(UserError, match="are free"):
            tw.parallelize(gpt2().model, plan, tier=TierOptions([tmp_path], store=SMALL, **options))
        assert not any(tmp_path.iterdir())


def test_frozen_weights_come_and_go(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(8)))
        for layer in net[::2]:
            layer.requires_grad_(False)
        return net

    x = (torch.ones(3, 40),)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    own = tw.plan(build(), x, loss_fn=loss_fn, hardware="cpu:1")
    found = []
    for tier in (None, TierOptions([tmp_path], window_bytes=30_000, store=SMALL)):
        module = tw.parallelize(build(), own, loss_fn=loss_fn, tier=tier).train()
        optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=LR)
        if tier is not None:
            module.tier.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            module(*x).loss.backward()
            optimizer.step()
        found.append(weights_of(module))
    assert same(*found)
    assert module.tier.residence.peak_bytes < 8 * 6400
    module.tier.close()


def test_what_cannot_be_is_refused(tmp_path: Path, plan: Plan) -> None:
    loaded = gpt2()
    parts = tw.plan(loaded.model, loaded.batch, hardware="cpu:1", micro_batches=2)
    with pytest.raises(UserError, match="micro-batches"):
        tw.parallelize(gpt2().model, parts, tier=TierOptions([tmp_path]))
    with pytest.raises(UserError, match="is not there"):
        tw.parallelize(gpt2().model, plan, tier=TierOptions([tmp_path / "absent"]))
    for options, match in (
        ({"update": "before"}, "during or after"), ({"window_bytes": 0}, "window_bytes"), ({"commit_every": 0}, "commit_every"),
        ({"clip_previous_norm": 0.0}, "norm above 0"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=match):
            TierOptions([tmp_path], **options)
    assert not any(tmp_path.iterdir())
    module = tw.parallelize(gpt2().model, plan, tier=TierOptions([tmp_path], store=SMALL)).train()
    batch = plan.shard_batch(like(plan, batch_of(0)))
    loss = module(**batch).loss
    with pytest.raises(UserError, match="none is attached"):
        loss.backward()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    with pytest.raises(UserError, match="updates each parameter by itself"):
        module.tier.attach(torch.optim.LBFGS(module.parameters()))
    module.tier.attach(optimizer)
    with pytest.raises(UserError, match="second"):
        module.tier.attach(optimizer)
    module.tier.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro_batches": 2}, "micro-batches"),
        ({"hardware": "h100"}, "CPUs"),
        ({"pipeline": 2, "hardware": "cpu:2"}, "no pipeline stages|micro-batches"),
        ({"optimizer": "sophiag"}, "sophiag does not"),
    ],
    ids=str,
)
def test_a_question_whose_plan_cannot_rest_on_disks_is_refused(options: dict[str, Any], match: str) -> None:
    loaded = gpt2()
    with pytest.raises(UserError, match=match):
        tw.plan(loaded.model, loaded.batch, tier=Policy(2**20), **{"hardware": "cpu:1", **options})


def test_a_second_backward_before_the_step_is_refused(tmp_path: Path, plan: Plan) -> None:
    module, _ = module_of(plan, TierOptions([tmp_path], store=SMALL))
    batch = plan.shard_batch(like(plan, batch_of(0)))
    module(**batch).loss.backward()
    with pytest.raises(UserError, match="between two steps of the optimizer"):
        module(**batch).loss.backward()
    module.tier.updates.finish()
    module.tier.close()


def test_evaluation_between_steps_changes_nothing(
    tmp_path: Path, plan: Plan, reference: dict[str, torch.Tensor]
) -> None:
    module, optimizer = module_of(plan, TierOptions([tmp_path], window_bytes=80_000, store=SMALL))
    for step in range(4):
        module.eval()
        with torch.no_grad():
            module(**plan.shard_batch(like(plan, batch_of(9))))
        module.train()
        take_steps(module, optimizer, range(step, step + 1))
    assert same(weights_of(module), reference)
    module.tier.close()


def test_two_ranks_have_disks_of_their_own(pool2: Pool, tmp_path: Path) -> None:
    loaded = gpt2()
    own = tw.plan(loaded.model, loaded.batch, hardware="cpu:2", solver="fsdp")
    found = pool2.run("tests.runtime.test_tiered:on_two_ranks", plan=own.to_json(), folder=str(tmp_path))
    assert found == [[True, True, 1, True]] * 2


def test_room_is_asked_for_all_ranks_of_a_disk(pool2: Pool, tmp_path: Path) -> None:
    """Each has room for itself; both together have not: both are told, and nothing is left behind."""
    found = pool2.run("tests.runtime.test_tiered:without_room", folder=str(tmp_path))
    assert found == [["2000 bytes are needed", "2000 bytes are needed", ""]] * 2


def without_room(folder: str) -> list[str]:
    from unittest import mock

    usage = shutil.disk_usage(folder)._replace(free=1999)
    said = []
    for own in (500, 0 if dist.get_rank() else 1000, 499):  # two versions of each
        try:
            with mock.patch("shutil.disk_usage", return_value=usage):
                check_room_for_all([Path(folder)], own, 2)
            said.append("")
        except UserError as error:
            said.append(str(error).split(" on ")[0])
    return said


def on_two_ranks(plan: str, folder: str) -> list[Any]:
    """Train with and without a tier; then let one rank's last step be lost, and go on from the one before."""
    parsed = Plan.parse(plan, where="the plan")
    expected = run(parsed, None, 4)[1]
    _, found, module = run(parsed, TierOptions([folder], window_bytes=60_000, store=SMALL), 2)
    tier = module.tier
    sharded = any(parked.num_bytes < parked.param.numel() * 4 for parked in tier.parked.values())
    tier.close()
    once = same(found, run(parsed, None, 2)[1])
    tier_again = TierOptions([folder], resume=True, store=SMALL)
    module, optimizer = module_of(parsed, tier_again)
    take_steps(module, optimizer, range(2, 3))
    module.tier.close()
    own = Path(folder) / f"rank-{dist.get_rank()}-of-2"
    if dist.get_rank() == 0:  # as if it had ended between the other's commit and its own
        (own / "tier.previous.json").replace(own / "tier.json")
    dist.barrier()
    module, optimizer = module_of(parsed, tier_again)
    step = module.tier.step
    take_steps(module, optimizer, range(2, 4))
    twice = same(weights_of(module), expected)
    module.tier.close()
    return [once, sharded, step, twice]
