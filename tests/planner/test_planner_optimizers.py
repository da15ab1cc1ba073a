"""What a plan makes of an optimizer: its passes in the time, its pieces in bytes and time, and a refusal to run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright import optim
from trainwright.optim.declared import DeclaredStep
from trainwright.planner.costs.costs import whole_pieces


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The records by name, to which a test may add."""
    records = dict(optim._RECORDS)
    monkeypatch.setattr(optim, "_RECORDS", records)
    return records


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64, bias=False))


def planned(optimizer: str, **question: Any) -> tw.Plan:
    return tw.plan(
        model(), (torch.ones(32, 64),), hardware="cpu:2", optimizer=optimizer,
        loss_fn=lambda out, batch: out.square().mean(), **question,
    )  # fmt: skip


def test_passes_are_counted_as_gradients() -> None:
    entry = optim.record("adamw")
    twice = dataclasses.replace(
        entry, extra_passes=(optim.ExtraPass("hessian_vector", every=10), optim.ExtraPass("gradient"))
    )
    assert twice.num_passes == pytest.approx(1 + 2 / 10 + 1)
    assert twice.needs_loss
    assert not entry.needs_loss


def test_passes_are_told_in_words() -> None:
    assert str(optim.ExtraPass("gradient", count=2, every=5)) == "2 more gradient passes every 5 steps"


def test_extra_passes_multiply_all_of_a_step_but_the_update(known: dict[str, Any]) -> None:
    for name, count in (("one", 1), ("three", 3)):
        known[name] = dataclasses.replace(
            known["adamw"], name=name, extra_passes=(optim.ExtraPass("gradient", count=count),)
        )
    plain, one, three = (planned(name, solver="ddp", keep_graph=True) for name in ("adamw", "one", "three"))
    assert one.params == plain.params
    pass_s = one.predicted.step_s - plain.predicted.step_s
    assert pass_s > 0
    assert three.predicted.step_s - plain.predicted.step_s == pytest.approx(3 * pass_s, rel=1e-9)
    assert one.predicted.comm_s == pytest.approx(2 * plain.predicted.comm_s, rel=1e-9)
    update_s = plain.predicted.step_s - pass_s
    assert 0 < update_s < plain.predicted.step_s
    assert any("one takes 2 forward and backward passes" in note for note in one.notes)
    assert not any("passes a step" in note for note in plain.notes)
    assert one.predicted.peak_bytes == pytest.approx(plain.predicted.peak_bytes, rel=0.01)


def test_the_time_of_a_profile_counts_the_passes_too(known: dict[str, Any]) -> None:
    for name, count in (("one", 1), ("three", 3)):
        known[name] = dataclasses.replace(
            known["adamw"], name=name, extra_passes=(optim.ExtraPass("gradient", count=count),)
        )
    plain, one, three = (
        tw.profile(
            model(),
            (torch.ones(32, 64),),
            loss_fn=lambda out, batch: out.square().mean(),
            optimizer=name,
            hardware="h200",
        )
        for name in ("adamw", "one", "three")
    )
    assert one.step_s is not None
    assert three.step_s is not None
    whole = one.modules[0]
    assert whole.forward_s is not None
    assert whole.backward_s is not None
    assert three.step_s - one.step_s == pytest.approx(2 * (whole.forward_s + whole.backward_s), rel=1e-9)
    assert one.step_s > 2 * (whole.forward_s + whole.backward_s)
    assert one.optimizer_bytes == plain.optimizer_bytes
    assert any("one takes 2 forward and backward passes" in note for note in one.notes)


def test_a_stand_in_holds_what_is_declared() -> None:
    weight = nn.Parameter(torch.ones(6, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    entry = optim.record("adan")
    optimizer = DeclaredStep([weight, nn.Parameter(torch.ones(3))], entry)
    assert optimizer.step(lambda: 2.0) == 2.0
    optimizer.step()
    assert sum(tensor.nbytes for tensor in optimizer.state[weight].values()) == entry.state_bytes((6, 4), "bf16")
    assert len(optimizer.state) == 1
    assert torch.equal(weight, torch.ones_like(weight))


def test_pieces_that_are_read_whole_are_gathered(known: dict[str, Any]) -> None:
    class Slot:
        def __init__(self, dim: int) -> None:
            self.dim = dim

    class Cube:
        shape, slots = (4, 6, 8), [Slot(0), Slot(1), Slot(2)]

    for reads, expected in [
        ("element", (0, 1, 2)),
        ("block", (0, 1, 2)),
        ("row", (0, -1, -1)),
        ("matrix", (0, -1, -1)),
        ("tensor", (-1, -1, -1)),
        ("model", (-1, -1, -1)),
    ]:
        assert whole_pieces(Cube(), (0, 1, 2), reads) == expected  # type: ignore[arg-type]


def test_a_method_that_reads_rows_pays_for_columns_cut(known: dict[str, Any]) -> None:
    pins = ("2=shard(i)@cpu", "0=shard(o)@cpu")
    for name, whole_state in (("gathered", False), ("whole", True)):
        known[name] = dataclasses.replace(known["adamw"], name=name, reads="row", whole_state=whole_state)
    plain, gathered, whole = (planned(name, pins=pins) for name in ("adamw", "gathered", "whole"))
    assert plain.params == gathered.params == whole.params
    assert plain.params["2.weight"].layout == ("S1",)
    optimizer_bytes = [plan.predicted.breakdown["optimizer"] for plan in (plain, gathered, whole)]
    assert optimizer_bytes == [optimizer_bytes[0], optimizer_bytes[0], optimizer_bytes[0] + 2 * 4 * 64 * 128]
    assert plain.predicted.step_s < gathered.predicted.step_s == whole.predicted.step_s
    assert whole.predicted.peak_bytes - plain.predicted.peak_bytes >= 2 * 4 * 64 * 128
