"""What a run does beside its steps: schedules, held-out losses, growing batches, per-sample gradients; on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.grids import slow_but
from tests.learning_cases import build, held_out_alone
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.runtime import sample_gradients
from trainwright.schedules.factors import NAMED, NamedSchedule, factors_of
from trainwright.scheduling import ScheduleOptions, norms_of

GROWING = {"schedule": "wsd", "grow_batch": 3, "grow_every": 2}


def planned(num_ranks: int, solver: str = "fsdp", whole: bool = True, **question: Any) -> tw.Plan:
    parts = build()
    model = parts["model"] if whole else parts["model"][0]
    question = {"optimizer": "sgd-momentum", "solver": solver, **question}
    return tw.plan(model, parts["batch"], loss_fn=parts["loss_fn"], hardware=f"cpu:{num_ranks}", **question)


@pytest.mark.parametrize(
    "learning",
    slow_but([GROWING], [{"schedule": "cosine", "warmup_steps": 2}, GROWING]),
)
def test_a_resumed_run_equals_the_uninterrupted_one(pool2: Pool, tmp_path: Path, learning: dict[str, Any]) -> None:
    (found, _) = pool2.run(
        "tests.learning_cases:resumes_as_uninterrupted", plan=planned(2).to_json(), folder=str(tmp_path), **learning
    )
    assert found["first_step"] == 3
    assert found["same_weights"]
    assert found["same_losses"]
    assert found["later_rates"] == found["rates"][3:]
    factors = factors_of(learning["schedule"], 6, learning.get("warmup_steps", 0))
    assert found["rates"] == pytest.approx([0.05 * factor for factor in factors], rel=1e-12)
    assert [value is not None for value in found["held_out"]] == [False, True] * 3
    assert found["later_held_out"] == found["held_out"][3:]
    if "grow_batch" in learning:
        assert found["num_batches"][0] == 1 < found["num_batches"][-1] <= 3


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "megatron"])
def test_gradients_of_samples_are_those_of_torch_func(pool2: Pool, solver: str) -> None:
    (found, _) = pool2.run("tests.learning_cases:gradients_of_samples", plan=planned(2, solver, whole=False).to_json())
    assert found["num"] == 8
    assert found["size"] > 1e-2
    assert found["worst"] < 1e-14
    assert found["num_steps"] == 0


def test_the_noise_is_that_of_one_process(pool2: Pool) -> None:
    (found, _) = pool2.run("tests.learning_cases:noise", plan=planned(2, whole=False).to_json())
    assert found["num"] == 8
    assert found["square"] == pytest.approx(1, rel=1e-10)
    assert found["spread"] == pytest.approx(1, rel=1e-10)


def test_samples_that_act_on_one_another_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    batch, loss_fn = (torch.randn(6, 4), torch.arange(6) % 3), nn.CrossEntropyLoss()
    module = tw.parallelize(model, tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1"), loss_fn=loss_fn)
    with pytest.raises(UserError, match=r"do not act on one another.*batch_norm"):
        next(sample_gradients(module, batch))


def test_a_held_out_loss_is_of_other_data_in_evaluation() -> None:
    events: list[dict[str, Any]] = []
    run = tw.train(build, planned(1), steps=2, lr=0.0, eval_every=2, on_step=events.append)
    assert [event.get("eval_loss") for event in events] == [None, pytest.approx(held_out_alone(2), rel=1e-12)]
    assert run.model.training


def test_norms_of_a_run_make_the_next_ones_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    tw.train(build, planned(1), steps=5, lr=0.05, schedule="linear", metrics=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["grad_norm_1"] > line["grad_norm"] > 0 for line in lines)
    assert norms_of(str(path), 2) == [line["grad_norm"] for line in lines]
    model = build()["model"]
    x, y = build()["data"][0]
    module = tw.parallelize(model, planned(1), loss_fn=nn.CrossEntropyLoss(), seed=0).train()
    module(x, y).loss.backward()
    wanted = torch.cat([param.grad.to_local().flatten() for param in module.parameters()]).norm()  # type: ignore[union-attr]
    assert lines[0]["grad_norm"] == pytest.approx(float(wanted), rel=1e-12)
    rates: list[float] = []
    tw.train(
        build,
        planned(1),
        steps=5,
        lr=1.0,
        schedule="refined",
        norms=path,
        on_step=lambda event: rates.append(event["lr"]),
    )
    assert rates == pytest.approx(ScheduleOptions("refined", norms=str(path)).factors(5, "sgd-momentum"))
    assert max(rates) == 1.0


def test_a_curvature_schedule_sets_the_rate_of_a_plan_that_keeps_its_graph() -> None:
    rates: list[float] = []
    plan = planned(1, "joint", keep_graph=True, optimizer="sgd")
    run = tw.train(build, plan, steps=6, schedule="lanczos", on_step=lambda event: rates.append(event["lr"]))
    assert len(set(rates)) > 1
    assert all(0 < rate <= 1 for rate in rates)
    assert run.losses[-1] < run.losses[0] * 1.5
    with pytest.raises(UserError, match=r"lanczos, which differentiates the loss twice; this one .*--keep-graph"):
        tw.train(build, planned(2).model_copy(update={"overlap": "buckets"}), steps=6, schedule="lanczos")


@pytest.mark.parametrize("name", NAMED)
def test_factors_rise_to_one_and_never_beyond(name: str) -> None:
    factors = factors_of(name, 20, 5)
    assert len(factors) == 20
    assert factors[:5] == [(k + 1) / 6 for k in range(5)]
    assert max(factors) == factors[5] == 1.0
    assert min(factors) > 0
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert (factors[-1] == 1.0) == (name == "constant")


def test_a_longer_run_follows_the_longer_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    short, long = NamedSchedule(optimizer, [1.0, 0.5]), NamedSchedule(optimizer, [1.0, 0.75, 0.5, 0.25])
    optimizer.step()
    short.step()
    long.load_state_dict(short.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.75


WRONG = [
    ({"schedule": "lineer"}, r"one of constant, linear.*'lineer'"),
    ({"schedule": "linear", "warmup_steps": 3}, r"fewer warm-up steps than the 3 of the run.*got 3"),
    ({"schedule": "linear", "warmup_steps": -1}, r"0 or more; got -1"),
    ({"schedule": "linear", "decay_steps": 1}, r"decay steps are wsd's"),
    ({"schedule": "wsd", "decay_steps": 4}, r"no more than the 3"),
    ({"schedule": "refined"}, r"metrics of an earlier run"),
    ({"schedule": "refined", "norms": "nowhere.jsonl"}, r"nowhere.jsonl is none"),
    ({"schedule": "linear", "norms": "x"}, r"norms are for the schedule refined"),
    ({"schedule": "lanczos", "optimizer": "adamw"}, r"whose steps are the gradient.*got adamw"),
    ({"eval_every": 0}, r"1 or more; got 0"),
    ({"eval_data": [(torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, dtype=torch.long))]}, r"eval_every=N"),
    ({"eval_every": 1, "eval_data": (torch.zeros(9, 5, dtype=torch.long), torch.zeros(9, dtype=torch.long))}, r"\[9, 5\]"),
    ({"eval_every": 1, "eval_data": (torch.zeros(8, 5, dtype=torch.long),)}, r"entries of the plan's, 0, 1"),
    ({"grow_batch": 0}, r"--grow-batch"),
    ({"grow_batch": 2, "grow_eta": 0.0}, r"--grow-eta"),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> tw.Plan:
    return planned(1)


@pytest.mark.parametrize(("learning", "message"), WRONG)
def test_what_cannot_be_is_refused_before_anything_runs(alone: tw.Plan, learning: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tw.train(build, alone, steps=3, **learning)
