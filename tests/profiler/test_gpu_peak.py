"""The measured peak of steps on a GPU counts what the caller holds and what the steps make, and nothing beside."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainwright.artifacts import Plan, Report
from trainwright.cli import main
from trainwright.profiler.kernels import allocator
from trainwright.profiler.kernels.allocator import peak_on_gpu


class Counters:
    """CUDA's counters in a process that has a batch and a library's workspace beside the tensors of its steps."""

    batch_bytes, workspace_bytes, made_bytes = 3 << 10, 64 << 20, 7 << 10

    def __init__(self, held_bytes: int) -> None:
        self.live_bytes = self.most_bytes = self.batch_bytes + held_bytes
        self.num_resets = 0

    def step(self) -> None:
        if self.live_bytes < self.workspace_bytes:
            self.live_bytes += self.workspace_bytes
        self.most_bytes = max(self.most_bytes, self.live_bytes + self.made_bytes)

    def reset(self) -> None:
        self.most_bytes, self.num_resets = self.live_bytes, self.num_resets + 1


class OnGpu:
    """A tensor as if it were on a GPU, of one block or less of the caching allocator."""

    is_cuda = True

    def __init__(self, num_bytes: int, grad: OnGpu | None = None) -> None:
        self.storage, self.grad = torch.UntypedStorage(num_bytes), grad

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.storage


def test_a_gpus_peak_leaves_out_the_batch_and_workspaces_and_counts_whole_blocks(monkeypatch):
    param, host = OnGpu(400, grad=OnGpu(512)), OnGpu(1 << 20)
    host.is_cuda = False
    module = SimpleNamespace(parameters=lambda: [param, param], buffers=lambda: [OnGpu(8)])
    optimizer = SimpleNamespace(state={param: {"step": 3, "momentum": OnGpu(400), "variance": host}})
    monkeypatch.setattr(allocator, "Tensor", OnGpu)
    held_bytes = 4 * 512
    counters = Counters(held_bytes)
    for name, value in {
        "memory_allocated": lambda: counters.live_bytes,
        "max_memory_allocated": lambda: counters.most_bytes,
        "reset_peak_memory_stats": counters.reset,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for num in (1, 2):
        assert peak_on_gpu(counters.step, module, optimizer) == held_bytes + counters.made_bytes
        assert counters.num_resets == num
        counters.most_bytes = 1 << 40  # of something in between


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_verify_measures_a_gpus_plan_on_the_gpu(tmp_path: Path) -> None:
    plan, report = str(tmp_path / "plan.json"), tmp_path / "report.json"
    model = ["zoo:gpt2", "--set", "n_layer=2", "--batch-size", "2", "--seq-len", "256"]
    assert main(["plan", *model, "--hardware", "h100", "--memory", "1GiB", "-o", plan]) == 0
    assert main(["verify", *model, "--plan", plan, "--json", str(report)]) == 0
    found = Report.parse(report.read_text(encoding="utf8"))
    assert found.peak_bytes[0] == pytest.approx(found.predicted_peak_bytes, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_reports_the_peak_of_a_gpus_plan(tmp_path: Path) -> None:
    plan, metrics = tmp_path / "plan.json", tmp_path / "steps.jsonl"
    model = ["zoo:gpt2", "--set", "n_layer=2", "--batch-size", "2", "--seq-len", "256"]
    assert main(["plan", *model, "--hardware", "h100", "--memory", "1GiB", "-o", str(plan)]) == 0
    assert main(["train", *model[:3], "--plan", str(plan), "--steps", "3", "--metrics", str(metrics)]) == 0
    predicted = Plan.parse(plan.read_text(encoding="utf8")).predicted.peak_bytes
    last = json.loads(metrics.read_text(encoding="utf8").splitlines()[-1])
    assert last["peak_bytes"] == pytest.approx(predicted, rel=0.02)
