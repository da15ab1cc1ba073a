"""Where a profile says that memory and time go: by module, by op, at the peak and over the step."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.artifacts import Profile, UserError
from trainwright.profiler import op_seconds
from trainwright.profiler.tracker import MemoryTracker


class Net(nn.Module):
    """Two blocks alike and a tied head, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.fixture(scope="module")
def found() -> Profile:
    torch.manual_seed(0)
    return tw.profile(Net(), (torch.randint(11, (4, 5)),), hardware="cpu:1", name="net")


def test_what_is_alive_at_the_peak_adds_up(found: Profile) -> None:
    costs = {module.path: module for module in found.modules}
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert costs[""].at_peak_bytes == found.breakdown
    for path, cost in costs.items():
        inside = [each for other, each in costs.items() if other.rpartition(".")[0] == path and other]
        sums = sum((Counter(each.at_peak_bytes) for each in inside), Counter())
        assert all(cost.at_peak_bytes[key] >= size for key, size in sums.items()), path


def test_parameters_and_their_states_lie_in_their_modules(found: Profile) -> None:
    costs = {module.path: module for module in found.modules}
    linear = 4 * (6 * 10 + 10)
    assert costs["blocks.0.0"].at_peak_bytes["param"] == linear
    assert costs["blocks.0.0"].at_peak_bytes["optimizer"] == 2 * linear + 2 * 4, "two moments, and a step each"
    assert costs["table"].at_peak_bytes["param"] == 4 * 66, "a tied weight lies where it is first"
    assert "param" not in costs["head"].at_peak_bytes


def test_seconds_add_up_over_modules_and_ops(found: Profile) -> None:
    root = found.modules[0]
    assert sum(point.time_s for point in found.timeline) == pytest.approx(found.step_s)
    for phase, time_s in (("forward", root.forward_s), ("backward", root.backward_s)):
        assert sum(point.time_s for point in found.timeline if point.phase == phase) == pytest.approx(time_s)
    assert sum(op.time_s for op in found.ops) == pytest.approx(found.step_s), "the list is complete for so few ops"
    assert [op.time_s for op in found.ops] == sorted((op.time_s for op in found.ops), reverse=True)
    assert len(found.timeline) == found.num_ops


def test_like_ops_of_repeated_blocks_are_one_entry(found: Profile) -> None:
    ops = {(op.op, op.path, op.phase): op for op in found.ops}
    gelu = ops["aten.gelu", "blocks.*.1", "forward"]
    assert (gelu.calls, gelu.moved_bytes) == (2, 2 * 2 * 4 * 20 * 10)
    products = [op for op in found.ops if op.op == "aten.addmm"]
    assert [(op.path, op.calls) for op in products] == [("blocks.*.0", 2), ("blocks.*.2", 2)]
    assert sum(op.flops for op in products) == 2 * 2 * 20 * 60 * 2


def test_without_hardware_nothing_has_a_time() -> None:
    found = tw.profile(Net(), (torch.zeros(4, 5, dtype=torch.long),))
    assert found.modules[0].forward_s is None
    assert {op.time_s for op in found.ops} == {None}
    assert {point.time_s for point in found.timeline} == {0.0}
    assert found.ops[0].flops == max(op.flops for op in found.ops)


def test_what_the_forward_saves_counts_as_saved_from_its_birth() -> None:
    """At a peak in the forward too; each step of it by hand."""
    weight = torch.ones(100, requires_grad=True)
    tracker = MemoryTracker(timeline=True)
    with tracker:
        tracker.watch([weight], "param")
        tracker.reset_peak()
        tracker.path = "m"
        with tracker.phase("forward"):
            kept = weight.exp()
            big = torch.ones(1000) * 2
            del big
            out = kept.sum()
            tracker.mark_forward_end()
    points = {point.op: point for point in tracker.timeline}
    assert points["aten.exp"].saved_bytes == 400
    assert points["aten.mul"].saved_bytes == 400
    assert points["aten.mul"].other_bytes == 8000, "ones and their double, which are not kept"
    assert points["aten.sum"].saved_bytes == 404
    assert tracker.peak_bytes == 400 + 400 + 8000
    assert tracker.peak_by_place() == {("", "param"): 400, ("m", "saved"): 400, ("m", "other"): 8000}
    assert {key: size for key, size in tracker.peak_breakdown.items() if size} == {
        "param": 400,
        "saved": 400,
        "other": 8000,
    }
    assert out is not None


def test_the_time_of_a_call_is_the_models_of_one_call(found: Profile) -> None:
    device = tw.hardware("cpu:1").device
    a, b, out = torch.empty(20, 6), torch.empty(6, 11), torch.empty(20, 11)
    alone = op_seconds(device, torch.ops.aten.mm.default, (a, b), {}, out)
    (call,) = [
        point for point in found.timeline if (point.op, point.path) == ("aten.mm", "head") and point.phase == "forward"
    ]
    assert call.time_s == pytest.approx(alone)


def test_the_json_is_read_back_and_small(found: Profile, tmp_path) -> None:
    text = found.to_json(tmp_path / "p.json")
    assert Profile.from_json(tmp_path / "p.json") == found
    data = json.loads(text)
    assert data["modules"][1]["path"] == "table"
    assert len(text) < 200 * found.num_ops + 600 * len(found.modules) + 300 * len(found.ops)


def test_files_of_the_version_before_are_read_and_of_a_later_one_refused_by_name(found: Profile) -> None:
    data = json.loads(found.to_json()) | {"format_version": 1}
    new = ("breakdown", "ops", "fit", "sweep")
    old = {key: value for key, value in data.items() if key not in new}
    old["modules"] = [
        {key: value for key, value in module.items() if key not in ("at_peak_bytes", "forward_s", "backward_s")}
        for module in old["modules"]
    ]
    old["timeline"] = [{key: value for key, value in point.items() if key != "time_s"} for point in old["timeline"]]
    read = Profile.parse(json.dumps(old))
    assert (read.peak_bytes, read.breakdown, read.modules[0].at_peak_bytes) == (found.peak_bytes, {}, {})
    assert "alive at the peak" in read.table()
    with pytest.raises(UserError, match=r"format version 1 or 2 is needed; a\.json has 3"):
        Profile.parse(json.dumps(data | {"format_version": 3}), where="a.json")
    with pytest.raises(UserError, match="a profile in JSON is needed"):
        Profile.parse("[]")


class Attention(nn.Module):
    """One layer of attention with dropout, which a GPU keeps in one kernel, and which may be recomputed."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.qkv = recompute, nn.Linear(32, 96)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)
        return self.attend(x)


@pytest.mark.parametrize("hardware", ["cpu:1", "h200"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_adds_up_for_a_gpu_and_with_recomputation(hardware: str, recompute: bool) -> None:
    found = tw.profile(
        Attention(recompute), (torch.ones(3, 50, 32),), loss_fn=lambda out, _: out.sum(), hardware=hardware
    )
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert found.modules[0].at_peak_bytes == found.breakdown
    assert (found.saved_bytes < 1.5 * 3 * 50 * 32 * 4) == recompute, "no more than the output"
