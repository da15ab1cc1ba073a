"""The face of sync: errors before the first step, alike on all ranks; resuming; the simulator's clock; the listing."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.pool import Pool
from tests.sync_cases import CASES, net, one_step, program, sgd
from tests.sync_problems import Vector
from trainwright import sync
from trainwright.artifacts import UserError
from trainwright.cli.listings import listing
from trainwright.launch import init
from trainwright.sync import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Count,
    Exchange,
    Form,
    Graph,
    Identify,
    Network,
    Now,
    Ranks,
    Receive,
    Send,
    simulate,
)

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown method": ("locl-sgd", {}, "did you mean local-sgd"),
    "unknown option": ("local-sgd", {"perid": 3}, "no option perid; its options are period, shared_steps"),
    "period 0": ("local-sgd", {"period": 0}, "period of at least 1 step; got 0"),
    "outer rate": ("diloco", {"outer_lr": -1.0}, "outer_lr above 0"),
    "fragments": ("streaming-diloco", {"period": 5, "fragments": 2}, "that its fragments divide"),
    "delay": ("streaming-diloco", {"period": 4, "fragments": 2, "delay": 2}, "delay shorter than period / fragments"),
    "not connected": ("gossip", {"graph": [(0, 1)]}, "needs a (connected )?graph over 4"),
    "apart": ("decentlam", {"graph": Graph.of([(0, 1), (2, 3)])}, "connected graph over 4 workers"),
    "not doubly stochastic": ("gossip", {"weights": np.full((4, 4), 0.3)}, "rows or columns sum to 1.2"),
    "rows as edges": ("gossip", {"graph": [[0.5, 0.5, 0.0]]}, r"edges are pairs of workers.*got \[0.5, 0.5, 0.0\]"),
    "no such worker": ("gossip", {"graph": [(0, -1)]}, "edges are pairs of workers"),
    "ragged": ("decentlam", {"weights": [[1.0], [0.0, 1.0]]}, "weights of 4 by 4 workers as rows of numbers"),
    "off the edges": ("gossip", {"weights": np.full((4, 4), 0.25)}, "where there is no edge"),
    "graph": ("gossip", {"graph": "cube"}, "one of ring, complete"),
    "groups": ("lsgd", {"num_groups": 3}, "got 4 workers in 3 groups"),
    "periods": ("lsgd", {"group_period": 3, "global_period": 4}, "periods 4 and 3"),
    "growth": ("cr-psgd", {"growth": 1.0}, "growth above 1"),
    "freeze": ("1-bit-adam", {}, "torch.optim.Adam or AdamW"),
    "alpha": ("sa-srrw", {"alpha": -1.0}, "alpha of at least 0"),
    "rates": ("dadao", {"rates": [0.1] * 4}, "χ1 χ2 of at most 1/2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_all_workers_alike_before_anything_is_sent(case: str) -> None:
    name, options, said = BAD[case]

    def one() -> Any:
        model = net()
        try:
            yield from sync.join(name, model, sgd(model.parameters()), **options)
        except UserError as error:
            return str(error)

    found = simulate([one() for _ in range(4)])
    assert len(set(found.results)) == 1
    assert re.search(said, found.results[0])
    assert found.sent_bytes in (0, 4 * 3 * 512)


@pytest.mark.parametrize(
    ("difference", "said"),
    [("options", "the same method and options"), ("parameters", "equal parameters at the start"), ("bad", "worker 2")],
)
def test_workers_that_differ_are_all_told_which(difference: str, said: str) -> None:
    def one(rank: int) -> Any:
        model = net(seed=1 if (rank, difference) == (2, "parameters") else 0)
        period = {"options": 3, "bad": 0}.get(difference, 2) if rank == 2 else 2
        try:
            yield from sync.join("local-sgd", model, sgd(model.parameters()), period=period)
        except UserError as error:
            return str(error)

    results = simulate([one(rank) for rank in range(4)]).results
    assert len(set(results)) == 1
    assert said in results[0]
    assert "worker 2" in results[0]


def test_workers_that_differ_on_real_ranks(pool2: Pool) -> None:
    found = pool2.run("tests.sync.test_sync_face:differing")
    assert found[0] == found[1]
    assert "worker 1" in found[0]


def differing() -> str:
    from trainwright.launch import rank

    model = net(seed=rank())
    try:
        sync.create("local-sgd", model, sgd(model.parameters()))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["frozen", "mixed", "no gradient", "no closure", "not created"])
def test_models_and_steps_that_cannot_be(what: str) -> None:
    init("cpu")
    model = net()
    if what == "frozen":
        model.requires_grad_(False)
    if what == "mixed":
        model[0].float()
    if what in ("frozen", "mixed"):
        with pytest.raises(UserError, match="all are frozen" if what == "frozen" else "float32 and float64"):
            sync.create("local-sgd", model, sgd(net().parameters()))
        return
    if what == "no gradient":
        with pytest.raises(UserError, match=r"call loss.backward\(\) before"):
            sync.create("data-parallel", model, sgd(model.parameters())).step()
    if what == "no closure":
        with pytest.raises(UserError, match="a function that computes a loss; got float"):
            sync.create("just-one-byte", model, sgd(model.parameters())).step(1.0)
    if what == "not created":
        joined = Ranks().run(sync.join("local-sgd", model, sgd(model.parameters())))
        with pytest.raises(UserError, match=r"yield from sync\.steps"):
            joined.step()


def test_another_number_of_workers_takes_over_what_it_can() -> None:
    _, held = simulate([program("1-bit-adam") for _ in range(4)]).results[0]

    def one() -> Any:
        model = net()
        joined = yield from sync.join(
            "1-bit-adam", model, CASES["1-bit-adam"].optimizer(model.parameters()), freeze_step=4
        )
        return joined.load_state_dict(copy.deepcopy(held["sync"])), joined

    left, joined = simulate([one() for _ in range(2)]).results[0]
    assert left == ("error", "server_error")
    assert torch.equal(joined.method.state["v"], held["sync"]["state"]["v"])
    assert not joined.method.state["error"].any()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if {2, 4} <= {*case.sizes}])
def test_every_method_goes_on_with_half_of_the_workers(name: str) -> None:
    """They train on; what means nothing to them is named."""
    held = [held for _, held in simulate([program(name) for _ in range(4)]).results]

    def one(rank: int) -> Any:
        model = net()
        joined = yield from sync.join(name, model, CASES[name].optimizer(model.parameters()), **CASES[name].options)
        model.load_state_dict(held[0]["model"])
        left = joined.load_state_dict(copy.deepcopy(held[0]["sync"]))
        yield from one_step(joined, model, joined.method.replica.optimizer, joined.method.num_steps)
        return left, joined.method.of_size

    for left, of_size in simulate([one(rank) for rank in range(2)]).results:
        assert left == tuple(each for each in of_size if each in held[0]["sync"]["state"])


def test_a_state_of_another_method_or_model_is_refused() -> None:
    _, held = simulate([program("easgd") for _ in range(2)]).results[0]

    def one(name: str, model: nn.Module) -> Any:
        joined = yield from sync.join(name, model, sgd(model.parameters()))
        with pytest.raises(UserError, match="a state of lsgd" if name == "lsgd" else "has 27 elements, here it has 3"):
            joined.load_state_dict(held["sync"])

    simulate([one("lsgd", net())])
    simulate([one("easgd", Vector(torch.zeros(3).double()))])


# ---- engines


def everything(rank: int) -> Any:
    """Each request once, with answers that all engines have to give."""
    place = yield Identify()
    assert place.rank == rank
    n = place.size
    pairs = tuple((k, k + 1) for k in range(0, n, 2))
    yield Form(pairs)
    own = next(pair for pair in pairs if rank in pair)
    x = torch.arange(5, dtype=torch.float64) / 3 + rank
    found = [
        (yield AllReduce(x)),
        (yield AllReduce(x, own)),
        (yield AllGather(x.view(1, 5), own)),
        (yield AllToAll(torch.arange(2 * n).view(n, 2) + 100 * rank)),
        (yield Broadcast(x, n - 1)),
        (yield Broadcast(x, own[0], own)),
    ]
    around = tuple(sorted({(rank + 1) % n, (rank - 1) % n}))
    found += [value for _, value in sorted((yield Exchange(x, around)).items())]
    found += [value for _, value in sorted((yield Exchange(2 * x, around)).items())]
    if rank:
        yield Send(x, 0, tag=rank)
        yield Send(x + 1, 0, tag=99)
    else:
        for source in range(n - 1, 0, -1):
            letter = yield Receive(x, source, tag=source)
            assert letter.source == source
            found.append(letter.tensor)
        letters = []
        for _ in range(n - 1):
            letters.append((yield Receive(x, tag=99)))
        found += [each.tensor for each in sorted(letters, key=lambda each: each.source)]
        found.append(torch.tensor((yield Receive(x, tag=7, within_s=0.05)) is None))
    yield Compute()
    assert (yield Now()) >= 0
    yield Count("here")
    yield AllReduce(x)  # all have counted
    found.append(torch.tensor((yield Count("here", 0))))
    return [each.tolist() for each in found]


def on_ranks(num_ranks: int) -> Any:
    from trainwright.launch import rank

    engine = Ranks()
    found = engine.run(everything(rank()))
    engine.close()
    return [found, engine.traffic.sent_bytes]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_real_ranks_answer_as_the_simulator_does(num_ranks: int, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(f"pool{num_ranks}")
    done = simulate([everything(rank) for rank in range(num_ranks)])
    found = pool.run("tests.sync.test_sync_face:on_ranks", num_ranks=num_ranks)
    assert found == [[result, traffic.sent_bytes] for result, traffic in zip(done.results, done.traffic)]


def test_what_the_clock_says() -> None:
    def one(rank: int) -> Any:
        x = torch.zeros(100, dtype=torch.float64)
        yield Compute()
        yield AllGather(x)
        after = yield Now()
        if rank == 0:
            yield Send(x, 1)
            yield Send(x, 1)
        elif rank == 1:
            yield Receive(x, 0)
            yield Receive(x, 0)
        return after, (yield Now())

    network = Network(latency_s=0.5, bytes_per_s=800, links={(2, 0): (1.5, 400)})
    done = simulate([one(rank) for rank in range(3)], network, compute_s=[1.0, 2.0, lambda number: 10.0 + number])
    # the last is there at 10; two small messages of 800 bytes over the slowest link, 2 s each, and 1.5 s on the way
    assert done.results[0] == (15.5, 15.5)
    assert done.results[1] == (15.5, 18.0)  # two messages leave one after the other: 1 s each, and 0.5 s on the way
    assert done.seconds == 18.0


def test_workers_that_wait_for_ever_are_named() -> None:
    def one(rank: int) -> Any:
        if rank:
            yield Receive(torch.zeros(1), 0)

    with pytest.raises(RuntimeError, match="2 of 3 workers wait for ever; worker 1 for Receive"):
        simulate([one(rank) for rank in range(3)])


def test_workers_that_ask_for_different_things_are_told() -> None:
    def one(rank: int) -> Any:
        yield AllReduce(torch.zeros(2 + rank))

    with pytest.raises(RuntimeError, match=r"AllReduce of \(2,\); AllReduce of \(3,\)"):
        simulate([one(rank) for rank in range(2)])


def test_a_thousand_workers_on_one_clock() -> None:
    def one(rank: int) -> Any:
        model = Vector(torch.ones(10))
        joined = yield from sync.join("local-sgd", model, torch.optim.SGD(model.parameters(), lr=0.1), period=2)
        for _ in range(2):
            model.set_gradient(model.x * rank / 1000)
            yield Compute()
            yield from joined.steps()
        return model.x

    done = simulate([one(rank) for rank in range(1000)], Network(1e-4, 1e9), compute_s=1e-2)
    assert done.seconds > 0.02
    assert torch.equal(done.results[0], done.results[999])
    expected = np.mean((1 - 0.1 * np.arange(1000) / 1000) ** 2)
    assert float(done.results[0][0]) == pytest.approx(expected, rel=1e-5)


def test_bf16_parameters_are_averaged_in_fp32() -> None:
    def one(rank: int) -> Any:
        model = Vector(torch.tensor([1.0 + rank / 128], dtype=torch.bfloat16))
        start = Vector(torch.ones(1, dtype=torch.bfloat16))
        joined = yield from sync.join("local-sgd", start, torch.optim.SGD(start.parameters(), lr=0.0), period=1)
        joined.method.replica.write(model.x)
        yield from joined.steps()
        return start.x, joined.size.itemsize

    (x, itemsize), *_ = simulate([one(rank) for rank in range(3)]).results
    assert x.dtype == torch.bfloat16
    assert x.item() == 1 + 1 / 128
    assert itemsize == 4


def test_the_listing_is_what_the_records_say() -> None:
    assert tw.sync.table() == listing("sync"), "the records changed: run python -m trainwright.cli.listings"


@pytest.mark.parametrize("method", ["local-sgd", "diloco"])
def test_the_example_runs_alone(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sync_local_sgd.py"))
    init("cpu")
    assert script["main"](method) < 0.5
    assert f"{method} on 1: loss" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["gradient-coding", "sr-sgc"])
def test_the_example_of_codes_waits_less_than_without(method: str, one_thread: None) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sync_gradient_coding.py"))
    seconds = script["main"](method)
    assert seconds[method] < 0.8 * seconds["uncoded"]


def test_the_example_of_powersgd_sends_a_fifth(pool2: Pool) -> None:
    assert all(share < 0.25 for share in pool2.run("tests.sync.test_sync_face:powersgd_example"))


def powersgd_example() -> float:
    return float(runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sync_powersgd.py"))["main"]())


def test_the_example_runs_on_two_ranks(pool2: Pool) -> None:
    losses = pool2.run("tests.sync.test_sync_face:example")
    assert losses[0] == losses[1] < 0.5


def example() -> float:
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sync_local_sgd.py"))
    return float(script["main"]("local-sgd"))


def test_the_table_names_every_method_and_its_paper() -> None:
    rows = tw.sync.table()
    assert [row["name"] for row in rows] == list(sync.names())
    assert all(row["paper"] and row["promises"] and row["assumes"] for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["local-sgd"]["sent a step"].startswith("2P/H")
    assert by_name["dadao"]["state B/param"] == "24"
