"""Prices of sync methods: the records' seconds against the simulator's clock, and what `plan --sync` says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.sync_cases import CASES, program
from tests.training_cases import Squares
from trainwright import sync
from trainwright.arguments import as_optimizer_name
from trainwright.artifacts import UserError
from trainwright.cli import main
from trainwright.hardware import resolve
from trainwright.pricing import ReplicaLink, prices, shard_sizes, split
from trainwright.sync import Network, simulate

LINK = Network(latency_s=1e-3, bytes_per_s=1e5)
COMPUTE_S = 0.01


TCP = Network(1e-3, 1e5, wire=1.06)


@pytest.mark.parametrize("link", [pytest.param(LINK, id="plain", marks=pytest.mark.slow), pytest.param(TCP, id="tcp")])
@pytest.mark.parametrize("name", tuple(CASES))
def test_a_predicted_step_takes_what_the_simulator_counts(name: str, link: Network, one_thread: None) -> None:
    """To a percent, but for dadao, whose events are random: a chain of waits in another run of them."""
    steps = 40 if name == "dadao" else 24
    run = simulate([program(name, num_steps=steps) for _ in range(4)], link, COMPUTE_S)
    joined = run.results[0][0]
    # A program computes where it says so: sa-srrw's does not, and a batch of gradient-coding's is all workers' data.
    apart = {"sa-srrw": 0.0, "gradient-coding": 1.0, "sr-sgc": 2 / 3, "m-sgc": 4 / 9}
    gradients = apart.get(name, joined.record.gradients(joined.size))
    agreement_s = link.collective_s([("all_gather", 512)], (0, 1, 2, 3))
    counted = (run.seconds - agreement_s) / joined.method.num_steps
    compute_s = gradients * COMPUTE_S
    predicted = compute_s + joined.record.exchange_s(joined.size, link, compute_s, joined.method.num_steps)
    assert predicted == pytest.approx(counted, rel=0.1 if name == "dadao" else 0.011)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node=100Mbit", ReplicaLink("node", 12.5e6)),
        ("node=1gbit, 2ms", ReplicaLink("node", 125e6, 2e-3)),
        ("a0=3MiB/s,50us", ReplicaLink("a0", 3 * 2**20, 50e-6)),
    ],
)
def test_links_are_read(text: str, found: ReplicaLink) -> None:
    read = ReplicaLink.parse(text)
    assert (read.axis, read.bytes_per_s) == (found.axis, found.bytes_per_s)
    assert read.latency_s == pytest.approx(found.latency_s)


@pytest.mark.parametrize("text", ["node", "node=", "=1Gbit", "node=fast", "node=1Gbit,late", "node=0Mbit"])
def test_links_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="a link is AXIS=RATE"):
        ReplicaLink.parse(text)


def test_the_outermost_axis_is_that_of_the_replicas() -> None:
    cluster = resolve("2x8xa100")
    own, link, number = split(cluster, ReplicaLink.parse("node=100Mbit"), None)
    assert (own.num_devices, link.bytes_per_s, number) == (8, 12.5e6, 2)
    assert split(cluster, None, None)[1].bytes_per_s == cluster.links[0].bandwidth_bytes_per_s
    with pytest.raises(UserError, match=r"outermost axis of .*, node, is the one of replicas; got a link of gpu"):
        split(cluster, ReplicaLink.parse("gpu=100Mbit"), None)
    with pytest.raises(UserError, match="--replicas N"):
        split(resolve("cpu:1"), None, None)
    with pytest.raises(UserError, match="add --link node=100Mbit"):
        split(cluster, None, 3)


def planned(num_ranks: int, optimizer: str = "sgd") -> tuple[tw.Plan, nn.Module]:
    parts = Squares.build()
    plan = tw.plan(
        parts["model"], parts["batch"], loss_fn=parts["loss_fn"], hardware=f"cpu:{num_ranks}", optimizer=optimizer,
        solver="fsdp" if num_ranks > 1 else "joint",
    )  # fmt: skip
    return plan, parts["model"]


def test_ranks_that_shard_a_replica_share_its_link() -> None:
    link = ReplicaLink("node", 1e6)
    (whole, model), (halves, _) = planned(1), planned(2)
    assert shard_sizes(whole, model) == (48, 8, 32, 4)
    assert shard_sizes(halves, model) == (24, 4, 16, 2)
    one = prices(whole, model, ["data-parallel"], link, 2, {}).prices[0]
    half = prices(halves, model, ["data-parallel"], link, 2, {}).prices[0]
    # Half the parameters a rank, each at half the rate: but for the count of examples beside the gradient, the same.
    assert one.exchange_s == pytest.approx(half.exchange_s, rel=0.05)
    assert half.sent_bytes == pytest.approx(one.sent_bytes / 2, rel=0.05)


def test_all_methods_are_priced_or_refused_with_the_reason() -> None:
    (plan, model), link = planned(2), ReplicaLink("node", 1e6)
    found = prices(plan, model, ["auto"], link, 4, {"period": 5})
    assert {each.name for each in found.prices} | {*found.refused} == {*sync.names()}
    assert found.refused["just-one-byte"] == "a slope is along a direction of the whole model"
    assert [each.step_s for each in found.prices] == sorted(each.step_s for each in found.prices)
    local = next(each for each in found.prices if each.name == "local-sgd")
    assert local.period == 5
    for less, over in ((0, False), (1, True)):
        period = {"period": local.period_for(0.1) - less}
        longer = prices(plan, model, ["local-sgd"], link, 4, period).prices[0]
        assert (longer.exchange_s > 0.1 * longer.step_s) == over
    with pytest.raises(UserError, match="none of local-sgd has an option graph"):
        prices(plan, model, ["local-sgd"], link, 4, {"graph": "ring"})


def test_plan_says_what_methods_would_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("squares.py").write_text("from tests.training_cases import Squares\nbuild = Squares.build\n")
    asked = ["plan", "squares.py:build", "--hardware", "cpu:4", "--sync", "auto", "--link", "cpu=100Mbit"]
    assert main([*asked, "--json", "prices.json", "-o", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert "4 replicas along cpu, each on 1 rank and a batch of its own:\n11.9 MiB/s each; a step computes for" in said
    assert re.search(r"data-parallel +[\d.]+ .s +[\d.]+ .s +1.*B +step +0 B +one worker with all data", said)
    found: dict[str, Any] = json.loads(Path("prices.json").read_text())
    assert found["plan"]["mesh"] == {"a0": 1}
    assert found["sync"]["replicas"] == 4
    assert tw.Plan.from_json("plan.json").num_ranks == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_method_declares_the_optimizers_that_it_takes(optimizer: Any) -> None:
    name = as_optimizer_name(optimizer)
    declared = {each: sync.record(each).cls.optimizers for each in sync.names()}
    assert any(declared.values())
    for method in (each for each, names in declared.items() if names):
        model = nn.Linear(2, 1)
        if name in declared[method]:
            sync.create(method, model, optimizer(model.parameters(), lr=0.1))
        else:
            with pytest.raises(UserError, match=f"needs? torch.optim.*got {optimizer.__name__}"):
                sync.create(method, model, optimizer(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "cpu=1Gbit"], "--link needs the method that it is for; got none; add --sync NAME"),
        (["--sync", "dilocco"], "did you mean diloco"),
        (["--sync", "diloco", "--compare"], "one of --compare and --sync is needed; got both"),
        (["--sync", "diloco", "--replicas", "1", "--link", "x=1Gbit"], "at least 2 replicas are needed"),
    ],
)
def test_questions_that_cannot_be_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "unused.py:build", "--hardware", "cpu:2", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
