"""Plans of streamed blocks: the fewest that fit, a peak and traffic that a run keeps to, and what contradicts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.grids import slow_but
from trainwright.artifacts import Refusal, StreamPlan, UserError
from trainwright.cli import main
from trainwright.hardware import resolve
from trainwright.optim import MeZO
from trainwright.streaming import HostStore, Streamed, check_plan, cost_of_step, peak_of_step, plan_stream, planning
from trainwright.streaming.predict import StepCost

CLUSTER = resolve("cpu:1")


def model_of(depth: int = 10, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


X = torch.ones(4, 32)


@pytest.mark.parametrize(
    ("place", "storage"),
    slow_but(
        [("disk", torch.bfloat16)],
        [(place, storage) for place in ("host", "disk") for storage in (None, torch.bfloat16)],
    ),
)
def test_a_run_holds_and_moves_what_its_plan_says(place: str, storage: torch.dtype | None) -> None:
    whole = cost_of_step(model_of(), X, loss, CLUSTER.device, storage=storage).peak_bytes
    plan = plan_stream(model_of(), X, loss, CLUSTER, place=place, memory_bytes=whole + 9000, storage=storage)  # type: ignore[arg-type]
    assert 1 < len(plan.blocks) < 10
    model = model_of()
    streamed = Streamed(
        model, MeZO(model.parameters(), lr=1e-3), HostStore(), blocks=plan.blocks, storage=storage, in_turns=True
    )
    for _ in range(2):
        streamed.step(lambda: loss(model, X))
    before = streamed.resting.num_read, streamed.resting.num_written
    peak = peak_of_step(streamed, lambda: streamed.step(lambda: loss(model, X)), X)
    assert peak == plan.predicted.peak_bytes <= whole + 9000
    assert streamed.resting.num_read - before[0] == plan.predicted.read_bytes
    assert streamed.resting.num_written - before[1] == plan.predicted.written_bytes
    rate = CLUSTER.device.bandwidth_bytes_per_s / 2 if place == "host" else CLUSTER.offload["disk"].read_bytes_per_s
    assert plan.predicted.read_s == plan.predicted.read_bytes / rate
    least = max(plan.predicted.compute_s, plan.predicted.read_s, plan.predicted.written_s)
    assert least <= plan.predicted.step_s <= plan.predicted.compute_s + plan.predicted.read_s + plan.predicted.written_s


@pytest.mark.parametrize("every", slow_but([4], [4, 1]))
def test_it_is_the_fewest_of_all_numbers_of_blocks(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    names, known = [str(index) for index in range(10)], {}

    def simulated_once(*args: Any, blocks: list[str], **options: Any) -> StepCost:
        if tuple(blocks) not in known:
            known[tuple(blocks)] = cost_of_step(*args, blocks=blocks, **options)
        return known[tuple(blocks)]

    monkeypatch.setattr(planning, "cost_of_step", simulated_once)
    peaks = {
        num: simulated_once(
            model_of(), X, loss, CLUSTER.device, blocks=[names[index * 10 // num] for index in range(num)]
        ).peak_bytes
        for num in range(1, 11)
    }
    for budget in sorted(peaks.values())[::every]:
        plan = plan_stream(model_of(), X, loss, CLUSTER, memory_bytes=budget)
        assert len(plan.blocks) == min(num for num, peak in peaks.items() if peak <= budget)
    with pytest.raises(Refusal, match="where every block streams"):
        plan_stream(model_of(), X, loss, CLUSTER, memory_bytes=min(peaks.values()) - 1)


def test_two_forwards_take_twice_the_flops_of_one() -> None:
    """On a device that does nothing but products at a known rate, beside what drawing takes."""
    device = CLUSTER.device.model_copy(
        update={"flops_per_s": {"fp32": 1e3}, "bandwidth_bytes_per_s": 1e15, "launch_s": 0.0}
    )
    found = cost_of_step(model_of(), X, loss, device)
    assert found.compute_s == pytest.approx(2 * 10 * 2 * 4 * 32 * 32 / 1e3, rel=1e-3)


def test_a_plan_is_read_back_and_of_one_model_alone(tmp_path: Path) -> None:
    plan = plan_stream(model_of(), X, loss, CLUSTER)
    plan.to_json(tmp_path / "plan.json")
    assert StreamPlan.from_json(tmp_path / "plan.json") == plan
    check_plan(plan, model_of())
    with pytest.raises(UserError, match="the model that was planned is needed"):
        check_plan(plan, model_of(depth=9))


def test_the_commands_plan_and_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = str(tmp_path / "plan.json"), tmp_path / "blocks"
    folder.mkdir()
    model = ["zoo:gpt2-tiny", "--set", "num_hidden_layers=4"]
    asked = ["plan", *model, "--hardware", "cpu:1", "--optimizer", "mezo", "--stream", "disk", "--memory", "1.2MiB"]
    assert main([*asked, "-o", path]) == 0
    plan = StreamPlan.from_json(path)
    assert 1 < len(plan.blocks) < plan.num_blocks == 4
    assert f"{len(plan.blocks)} of 4 stream" in capsys.readouterr().out
    train = ["train", *model, "--optimizer", "mezo", "--plan", path]
    told = tmp_path / "run.json"
    assert main([*train, "--stream", str(folder), "--steps", "3", "--lr", "1e-6", "--json", str(told)]) == 0
    last = json.loads(told.read_text())["steps"][-1]
    assert (last["read_bytes"], last["written_bytes"]) == (plan.predicted.read_bytes, plan.predicted.written_bytes)
    for wrong in (["--stream", "host"], ["--stream", str(folder), "--stream-storage", "bf16"]):
        assert main([*train, *wrong]) == 2
    assert main([*asked, "--memory", "100KiB"]) == 1
    assert main(["plan", *model, "--hardware", "cpu:1", "--stream", "host"]) == 2
    assert main(["plan", *model, "--hardware", "cpu:1", "--optimizer", "mezo", "--stream", "tape"]) == 2
