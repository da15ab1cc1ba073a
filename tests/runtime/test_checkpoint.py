"""Checkpoints on two and four ranks: bit for bit under one plan, right under another, whole whatever happens."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import trainwright as tw
from tests.checkpoint_cases import DROPOUT_OFF
from tests.grids import slow_but
from tests.pool import Pool
from trainwright.artifacts import Plan
from trainwright.launch import WorkerError, run_processes
from trainwright.models import zoo

CASES = "tests.checkpoint_cases:"


@cache
def planned(name: str, solver: str, mesh: tuple[int, ...] = (2,), dropout: bool = True) -> str:
    model, batch = zoo.build(name, dtype="fp64", **({} if dropout else DROPOUT_OFF[name]))
    num_ranks = 1
    for size in mesh:
        num_ranks *= size
    return tw.plan(model, batch, hardware=f"cpu:{num_ranks}", solver=solver, mesh=mesh).to_json()


@pytest.mark.parametrize(
    ("name", "solver", "optimizer", "asynchronous"),
    [
        ("gpt2-tiny", "joint", "adamw", True),
        pytest.param("gpt2-tiny", "fsdp", "adamw8bit", False, marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", "fsdp", "adamw8bit", True, marks=pytest.mark.slow),
        pytest.param("resnet-tiny", "ddp", "adan", False, marks=pytest.mark.slow),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(
    pool2: Pool, tmp_path: Path, name: str, solver: str, optimizer: str, asynchronous: bool
) -> None:
    found = pool2.run(
        CASES + "resumed_beside_uninterrupted",
        plan=planned(name, solver),
        name=name,
        folder=str(tmp_path),
        optimizer=optimizer,
        asynchronous=asynchronous,
    )
    assert found == [{"step": 1, "losses": 0.0, "state": 0.0, "lr": True}] * 2


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        pytest.param("gpt2-tiny", ("fsdp", (2,)), ("megatron", (4,)), marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", ("megatron", (4,)), ("ddp", (2,)), marks=pytest.mark.slow),
        pytest.param("llama-tiny", ("joint", (2, 2)), ("fsdp", (2,)), marks=pytest.mark.slow),
        ("resnet-tiny", ("ddp", (2,)), ("fsdp", (4,))),
    ],
)
def test_another_plan_on_other_ranks_goes_on(
    pool2: Pool, pool4: Pool, tmp_path: Path, name: str, one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]
) -> None:  # fmt: skip
    pools = {2: pool2, 4: pool4}
    for case, (solver, mesh) in (("saves", one), ("resumes_what_others_saved", other)):
        pool = pools[mesh[0] * (mesh[1] if len(mesh) > 1 else 1)]
        plan = planned(name, solver, mesh, dropout=False)
        found = pool.run(CASES + case, plan=plan, name=name, folder=str(tmp_path))
    for at_once, later in found:
        assert at_once == 0.0, "weights and moments are the same entries, cut elsewhere"
        assert later < 1e-6


@pytest.mark.slow  # two runs of gpt2-tiny
def test_a_state_that_cannot_be_cut_anew_is_refused(pool2: Pool, tmp_path: Path) -> None:
    question = {"name": "gpt2-tiny", "folder": str(tmp_path), "optimizer": "adamw8bit"}
    pool2.run(CASES + "saves", plan=planned("gpt2-tiny", "fsdp", dropout=False), **question)
    with pytest.raises(tw.UserError, match="fits only the layout that wrote it"):
        pool2.run(CASES + "resumes_what_others_saved", plan=planned("gpt2-tiny", "ddp", dropout=False), **question)


@pytest.mark.parametrize("keep", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_newest_stay(pool2: Pool, tmp_path: Path, keep: int) -> None:
    plan = planned("gpt2-tiny", "fsdp")
    left = pool2.run(CASES + "saves_every_step", plan=plan, name="gpt2-tiny", folder=str(tmp_path), keep=keep)[0]
    assert left == [f"step-{step:08d}" for step in range(5 - keep, 5)]


@pytest.mark.parametrize(
    "moment", ["tensors", *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("texts", "rename"))]
)
def test_a_rank_killed_while_writing_leaves_the_checkpoint_before(pool2: Pool, tmp_path: Path, moment: str) -> None:
    question = {"plan": planned("gpt2-tiny", "fsdp"), "name": "gpt2-tiny", "folder": str(tmp_path)}
    with pytest.raises(WorkerError, match="SIGKILL"):
        run_processes(CASES + "dies_while_writing", {**question, "moment": moment}, 2, timeout_s=120)
    assert ".step-00000001.tmp" in [path.name for path in tmp_path.iterdir()], "it was killed in the midst"
    found = pool2.run(CASES + "loads", **question)[0]
    assert found["step"] == 0
    assert found["left"] == ["step-00000000"], "what was half written is gone"


@pytest.mark.slow  # the test above kills one too
def test_a_rank_killed_while_an_old_checkpoint_is_removed_leaves_nothing_of_it(pool2: Pool, tmp_path: Path) -> None:
    question = {"plan": planned("gpt2-tiny", "fsdp"), "name": "gpt2-tiny", "folder": str(tmp_path)}
    with pytest.raises(WorkerError, match="SIGKILL"):
        run_processes(CASES + "dies_while_removing", question, 2, timeout_s=120)
    assert len(list(tmp_path.iterdir())) == 2, "it was killed in the midst"
    found = pool2.run(CASES + "loads", **question)[0]
    assert found["step"] == 1
    assert found["left"] == ["step-00000001"]


def test_a_full_disk_is_said_and_the_checkpoint_before_stays(pool2: Pool, tmp_path: Path) -> None:
    question = {"plan": planned("gpt2-tiny", "fsdp"), "name": "gpt2-tiny", "folder": str(tmp_path)}
    for found in pool2.run(CASES + "saves_to_a_full_disk", **question):
        assert "checkpoints need a directory" in found["said"]
        assert "could not be written to its end" in found["said"]
        assert "rank 1" in found["said"]
        assert found["left"] == ["step-00000000"]


COPIES = [("little", True, 1), ("ample", True, 0), ("little", False, 0), ("none", True, 0)]


@pytest.mark.parametrize(("room", "asynchronous", "expected"), slow_but(COPIES[:2], COPIES))
def test_a_copy_beyond_the_budget_is_said_once(
    pool2: Pool, tmp_path: Path, room: str, asynchronous: bool, expected: int
) -> None:
    plan = planned("gpt2-tiny", "fsdp")
    peak = Plan.parse(plan).predicted.peak_bytes
    budget = {"little": peak + 1000, "ample": 10 * peak, "none": None}[room]
    question = {"plan": plan, "name": "gpt2-tiny", "budget": budget, "asynchronous": asynchronous}
    for found in pool2.run(CASES + "says_what_is_over", folder=str(tmp_path), **question):
        assert len(found["said"]) == expected
        if expected:
            sizes = [float(text) for text in re.findall(r"([\d.]+) MiB", found["said"][0])]
            assert sizes[0] == pytest.approx(found["bytes"] / 2**20, abs=0.1)
            assert sizes[1] == pytest.approx((found["bytes"] - 1000) / 2**20, abs=0.1)


def test_a_directory_that_cannot_be_written_is_refused(pool2: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tw.UserError, match=r"need a directory .* Not a directory"):
        pool2.run(
            CASES + "saves_under",
            plan=planned("llama-tiny", "ddp"),
            name="llama-tiny",
            folder=str(tmp_path / "file" / "x"),
        )


def test_what_does_not_fit_the_checkpoint_is_refused(pool2: Pool, tmp_path: Path) -> None:
    llama, gpt2 = planned("llama-tiny", "ddp"), planned("gpt2-tiny", "ddp")
    with pytest.raises(tw.UserError, match="the optimizer that wrote the checkpoint"):
        pool2.run(CASES + "state_of_another_kind", plan=llama, folder=str(tmp_path / "a"))
    with pytest.raises(tw.UserError, match="groups of parameters"):
        pool2.run(CASES + "another_models", plan=llama, other=gpt2, folder=str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2-tiny", "safetensors"),
        pytest.param("llama-tiny", "checkpoint", marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", "checkpoint", marks=pytest.mark.slow),
        pytest.param("llama-tiny", "safetensors", marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_its_own_part_of_the_weights(pool2: Pool, tmp_path: Path, name: str, kind: str) -> None:
    question = {"plan": planned(name, "fsdp"), "name": name, "folder": str(tmp_path), "kind": kind}
    found = pool2.run(CASES + "weights_from_files", **question)
    assert [each["worst"] for each in found] == [0.0, 0.0]
    assert all(each["share"] < 0.7 for each in found), "no rank reads the whole model"
    assert sum(each["share"] for each in found) >= 1.0
