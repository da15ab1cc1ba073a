"""The measured peak of steps on a GPU counts what the caller holds and what the steps make, and nothing beside."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainwright.artifacts import Report
from trainwright.cli import main
from trainwright.profiler.kernels.allocator import peak_on_gpu


class Counters:
    """CUDA's counters as a process finds them that has a batch and a library's workspace beside the tensors of a step."""

    batch_bytes, workspace_bytes, kept_bytes, made_bytes = 3 << 10, 64 << 20, 1024, 7 << 10

    def __init__(self) -> None:
        self.live_bytes = self.most_bytes = self.batch_bytes
        self.steps = 0

    def step(self) -> None:
        if self.steps == 0:
            self.live_bytes += self.workspace_bytes + self.kept_bytes
        self.most_bytes = max(self.most_bytes, self.live_bytes + self.made_bytes)
        self.steps += 1

    def reset(self) -> None:
        self.most_bytes = self.live_bytes


@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_gpus_peak_leaves_out_the_batch_and_workspaces_and_counts_whole_blocks(monkeypatch, num_steps):
    counters = Counters()
    for name, value in {
        "synchronize": lambda: None,
        "memory_allocated": lambda: counters.live_bytes,
        "max_memory_allocated": lambda: counters.most_bytes,
        "reset_peak_memory_stats": counters.reset,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    gradients = []

    def held() -> list[SimpleNamespace]:
        storages = [torch.UntypedStorage(400), torch.UntypedStorage(512)]  # one block each
        gradients.extend(weakref.ref(storage) for storage in storages)
        found = [
            SimpleNamespace(is_cuda=True, untyped_storage=lambda each=each: each) for each in (*storages, storages[0])
        ]
        return [*found, SimpleNamespace(is_cuda=False, untyped_storage=lambda: torch.UntypedStorage(1 << 20))]

    def step() -> None:
        assert all(gradient() is None for gradient in gradients), "the step could not release its gradients"
        counters.step()

    assert peak_on_gpu(step, held, num_steps) == counters.kept_bytes + counters.made_bytes
    assert counters.steps == num_steps
    assert gradients


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_verify_measures_a_gpus_plan_on_the_gpu(tmp_path: Path) -> None:
    plan, report = str(tmp_path / "plan.json"), tmp_path / "report.json"
    model = ["zoo:gpt2", "--set", "n_layer=2", "--batch-size", "2", "--seq-len", "256"]
    assert main(["plan", *model, "--hardware", "h100", "--memory", "1GiB", "-o", plan]) == 0
    assert main(["verify", *model, "--plan", plan, "--json", str(report)]) == 0
    found = Report.parse(report.read_text(encoding="utf8"))
    assert found.peak_bytes[0] == pytest.approx(found.predicted_peak_bytes, rel=0.02)
