"""Training under sync methods: on workers of one device each, and on replicas of a plan that shards."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.pool import Pool
from tests.training_cases import Squares
from trainwright import sync
from trainwright.cli import main

CASES = "tests.sync_training_cases:"
WORKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "data-parallel": ("adamw", {}),
    "local-sgd": ("adamw", {"period": 2, "shared_steps": 1}),
    "powersgd": ("adamw", {"start_step": 2, "min_compression_rate": 0.1}),
    "post-local-sgd": ("adamw", {"period": 2, "shared_steps": 1}),
    "diloco": ("adamw", {"period": 3}),
    "streaming-diloco": ("adamw", {"period": 4, "fragments": 2, "delay": 1}),
    "easgd": ("sgd-momentum", {"period": 2}),
    "lsgd": ("sgd-momentum", {"group_period": 2, "global_period": 2}),
    "gossip": ("adamw", {"graph": "complete"}),
    "atc-dsgd": ("sgd", {}),
    "dmsgd": ("sgd-momentum", {}),
    "decentlam": ("sgd-momentum", {}),
    "1-bit-adam": ("adamw", {"freeze_step": 3}),
    "1-bit-lamb": ("adamw", {"freeze_step": 3}),
    "sa-srrw": ("sgd", {"graph": "complete"}),
    "gradient-coding": ("sgd-momentum", {"stragglers": 0}),
    "dadao": ("sgd", {"smoothness": 20.0, "convexity": 1.0, "graph": "complete"}),
    "just-one-byte": ("sgd", {"num_samples": 2}),
}
SHARDED = ("decentlam", "lsgd", "diloco", "1-bit-adam")


@cache
def planned(num_ranks: int = 1, solver: str = "joint") -> tw.Plan:
    """Plan the squares; of several ranks each has rows of every weight, not columns, which would do as well."""
    parts = Squares.build()
    plan = tw.plan(
        parts["model"], parts["batch"], loss_fn=parts["loss_fn"], hardware=f"cpu:{num_ranks}", optimizer="sgd",
        solver=solver,
    )  # fmt: skip
    if num_ranks == 1:
        return plan
    rows = {name: param.model_copy(update={"layout": ("S0",)}) for name, param in plan.params.items()}
    return plan.model_copy(update={"params": rows})


def written(plan: tw.Plan, folder: Path) -> str:
    plan.to_json(folder / "plan.json")
    return str(folder / "plan.json")


def methods(names: Any, cut: tuple[int, ...] = ()) -> list[list[Any]]:
    return [[name, *WORKERS[name], list(cut) if name.startswith("1-bit") else []] for name in names]


FEW = ("data-parallel", "diloco", "lsgd", "sa-srrw", "gradient-coding", "dadao", "just-one-byte")
"""A method of each kind: of gradients, of parameters, by the loss, by a closure."""
ALL = pytest.param(tuple(WORKERS), marks=pytest.mark.slow, id="all")


@pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), ALL])
def test_workers_equal_a_loop_by_hand_and_go_on_to_the_bit(pool2: Pool, tmp_path: Path, names: tuple[str, ...]) -> None:
    assert {*sync.names()} - {*WORKERS} == {"cr-psgd", "cr-psgd-catalyst", "sr-sgc", "m-sgc"}
    found = pool2.run(
        CASES + "equals_whole_models", plan=planned().to_json(), methods=methods(names), replicas=2,
        folder=str(tmp_path), timeout_s=300,
    )  # fmt: skip
    for name in names:
        for rank in found:
            assert rank[name]["difference"] < 1e-12, name
            assert rank[name]["resumed"], name
            assert rank[name]["events"], name
    assert [found[0][name]["rounds"] for name in ("data-parallel", "diloco", "lsgd")] == [6, 2, 3]
    assert found[0]["diloco"]["sent"] == [0, 0, 92 * 8, 0, 0, 92 * 8]


@pytest.mark.slow  # two workers are tested on each change
def test_two_shards_by_two_replicas_equal_whole_models(pool4: Pool, tmp_path: Path) -> None:
    """The gradients of a shard are sums in another order, hence a tolerance; of 1-bit Adam each shard has its scale."""
    shards = (24, 24, 4, 4, 16, 16, 2, 2)
    found = pool4.run(
        CASES + "equals_whole_models", plan=planned(2, "fsdp").to_json(), methods=methods(SHARDED, shards), replicas=2,
        folder=str(tmp_path), timeout_s=300,
    )  # fmt: skip
    for name in SHARDED:
        for rank in found:
            assert rank[name]["difference"] < 1e-12, name
            assert rank[name]["resumed"], name
            assert rank[name]["events"], name


def test_another_number_of_workers_goes_on_with_what_can_be_carried_over(
    pool2: Pool, pool4: Pool, tmp_path: Path
) -> None:
    case = {"plan": planned().to_json(), "folder": str(tmp_path), "name": "1-bit-adam", "optimizer": "adamw"}
    options = {"freeze_step": 2}
    pool2.run(CASES + "goes_on", replicas=2, steps=3, options=options, **case)
    wider = pool4.run(CASES + "goes_on", replicas=4, steps=5, options=options, **case)
    assert all(rank["alike"] and rank["first"] == 3 for rank in wider)
    said = " ".join(wider[0]["told"])
    assert "replicas 2 to 3 are new" in said
    assert "error, server_error could not be carried over" in said
    narrower = pool2.run(CASES + "goes_on", replicas=2, steps=6, options=options, **case)
    assert all(rank["alike"] and rank["first"] == 5 for rank in narrower)
    assert "replicas 2 to 3 do not go on" in " ".join(narrower[0]["told"])
    assert narrower[0]["weights"] != wider[0]["weights"]


def test_a_loss_that_is_not_finite_never_leads_and_stops_nobody(pool2: Pool, tmp_path: Path) -> None:
    metrics = str(tmp_path / "run.jsonl")
    found = pool2.run(CASES + "skips_nan", plan=planned().to_json(), metrics=metrics)
    assert [rank["skipped"] for rank in found] == [[False] * 4, [False, True, False, False]]
    assert all(rank["finite"] for rank in found)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["lines"] == 4


BAD: dict[str, tuple[list[str], str]] = {
    "no replicas": (["--sync", "diloco"], "number of replicas is needed for --sync.*add --replicas N"),
    "nothing that keeps together": (["--replicas", "2"], "method that keeps 2 replicas together.*add --sync NAME"),
    "unknown": (["--sync", "dilocco", "--replicas", "2"], "did you mean diloco"),
    "option": (
        ["--sync", "diloco", "--replicas", "2", "--sync-option", "perod=3"],
        "no option perod; its options are per",
    ),
    "type": (
        ["--sync", "diloco", "--replicas", "2", "--sync-option", "period=x"],
        "period needs a whole number; got 'x'",
    ),
    "half": (["--sync", "diloco", "--replicas", "2", "--sync-option", "period=2.5"], "period needs a whole number"),
    "value": (["--sync", "diloco", "--replicas", "2", "--sync-option", "period"], "--sync-option needs KEY=VALUE"),
    "no method": (["--sync-option", "period=3"], "--sync-option needs the method.*add --sync NAME"),
    "growing": (["--sync", "cr-psgd", "--replicas", "2"], "batches of one size are what a plan runs"),
    "jobs": (["--sync", "m-sgc", "--replicas", "3"], "a loop of its own is needed for m-sgc: its jobs end steps after"),
    "optimizer": (["--sync", "decentlam", "--replicas", "2"], "sgd or sgd-momentum is needed for decentlam; got adamw"),
    "rounds": (["--sync", "lsgd", "--replicas", "2", "--sync-option", "asynchronous=true"], "ends by rounds"),
    "ranks": (
        ["--sync", "diloco", "--replicas", "2", "--nproc", "3"],
        "2 ranks are needed for 2 replicas.*there are 3",
    ),
    "grow": (["--sync", "diloco", "--replicas", "2", "--grow-batch", "4"], "got both; leave one of them out"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_command_line_refuses_before_anything_starts(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, said = BAD[case]
    plan = planned().model_copy(update={"optimizer": "adamw"} if case != "grow" else {"optimizer": "adadagrad"})
    assert main(["train", "unused.py:build", "--plan", written(plan, tmp_path), *options]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_what_needs_whole_parameters_is_refused_under_a_plan_that_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = [name for name in sync.names() if sync.record(name).cls.needs_whole]
    assert refused == [
        "powersgd",
        "1-bit-lamb",
        "sa-srrw",
        "gradient-coding",
        "sr-sgc",
        "m-sgc",
        "dadao",
        "just-one-byte",
    ]
    plan = written(planned(2, "fsdp"), tmp_path)
    for name in refused:
        assert main(["train", "unused.py:build", "--plan", plan, "--sync", name, "--replicas", "2"]) == 2
        assert f"{name} needs a whole model on each worker" in " ".join(capsys.readouterr().err.split())


def test_replicas_of_a_module_are_what_a_method_runs_on(pool2: Pool) -> None:
    for said in pool2.run(CASES + "refusals", plan=planned(2, "fsdp").to_json(), alone=planned().to_json()):
        assert (
            "replicas of the plan are needed for a sync method; this module is the only one on its 2 ranks" in said[0]
        )
        assert "4 ranks are needed by 2 replicas of this plan" in said[1]


def test_the_command_line_trains_goes_on_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("squares.py").write_text("from tests.training_cases import Squares\nbuild = Squares.build\n")
    plan = written(planned(), tmp_path)
    run = [
        "train",
        "squares.py:build",
        "--plan",
        plan,
        "--sync",
        "diloco",
        "--sync-option",
        "period=2",
        "--replicas",
        "2",
    ]
    run += ["--checkpoint", "run", "--metrics", "run.jsonl"]
    assert main([*run, "--steps", "3"]) == 0
    assert "sync   diloco between 2 replicas: 1 round in 3 steps" in capsys.readouterr().out
    assert main([*run, "--steps", "5", "--resume"]) == 0
    lines = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert [line["sync_rounds"] for line in lines] == [0, 1, 1, 2, 2]
    assert [line["sync_bytes"] > 0 for line in lines] == [False, True, False, True, False]
    assert main(["export", "run", "-o", "weights"]) == 0
    assert main([*run, "--steps", "6"]) == 2
    assert "has those of another run; add --resume" in " ".join(capsys.readouterr().err.split())
