"""Clients that train an `nn.Module`: any optimizer, batch norm, FedSpeed, many at once, splits, speeds, predicted times."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.federated_cases import planned_problem
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.federated import (
    Batches,
    FedAvg,
    FedFix,
    FedSpeed,
    FedSpeedAverage,
    LocalTraining,
    LossTaking,
    Server,
    SimulatedClient,
    Speeds,
    VectorisedTraining,
    digest,
    dirichlet_split,
    model_arrays,
    predicted_work_s,
    simulate,
)


def net(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, **options), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3, **options))


def examples(seed: int = 0, size: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, (inputs[:, :3] + seed).argmax(1)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


sgd = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("name", [name for name in tw.optim.names() if name != "sso"])
def test_every_optimizer_trains_a_client(name: str) -> None:
    """SSO's closure returns targets and their loss apart, which `LossTaking` says."""
    entry = tw.optim.record(name)
    model = net(bias=name != "muon")  # which takes matrices alone
    make = functools.partial(tw.optim.create, name, **({} if name in ("sso", "gradnormsmoothnewton") else {"lr": 1e-2}))
    model[2].p = 0.0
    work = LocalTraining(
        model, examples(), loss_fn, make, num_steps=3, batch_size=20, method=LossTaking() if entry.needs_loss else None
    )
    start = model_arrays(model)
    delta, state = work({}, start, {})
    again, _ = work({}, start, {})
    assert any(np.abs(value).max() > 0 for value in delta.values())
    assert digest(delta) == digest(again)
    assert np.isfinite(state["metric.loss"])


def test_the_same_work_gives_the_same_bits_whatever_ran_before() -> None:
    model = net()
    start = model_arrays(model)
    one = LocalTraining(model, examples(1), loss_fn, sgd, num_steps=7, batch_size=8, seed=1)
    other = LocalTraining(model, examples(2), loss_fn, sgd, num_steps=3, batch_size=8, seed=2)
    before = torch.get_rng_state()
    delta, state = one({}, start, {})
    assert torch.equal(torch.get_rng_state(), before)
    other({}, start, {})
    torch.manual_seed(77)
    again, _ = one({}, start, {})
    assert digest(again) == digest(delta)
    later, _ = one(state, start, {})
    assert digest(later) != digest(delta)  # other batches, another dropout


def test_steps_go_through_the_data_and_not_through_its_first_batch() -> None:
    batches = Batches(examples(size=20), batch_size=5, seed=3)
    assert sorted(batches.indices(0, 4).ravel()) == list(range(20))
    assert len(set(map(tuple, batches.indices(0, 8)))) == 8
    assert not np.array_equal(batches.indices(0, 4), batches.indices(1, 4))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*examples()), batch_size=6, shuffle=True)
    seen = [batch[0] for batch in Batches(loader).of(0, 8)]
    assert [len(each) for each in seen] == [6, 6, 6, 2] * 2
    assert len(torch.unique(torch.cat(seen[:4]), dim=0)) == 20


def test_by_hand_one_round_of_two_clients() -> None:
    model = nn.Linear(6, 3)
    start = model_arrays(model)
    works = {
        f"c{k}": LocalTraining(model, examples(k), loss_fn, sgd, num_steps=2, batch_size=20, seed=k) for k in range(2)
    }
    server = Server(start, FedAvg())
    clients = {name: SimulatedClient(work, importance=1.0 + 2 * k) for k, (name, work) in enumerate(works.items())}
    found = simulate(server, clients, max_aggregations=1).server.arrays
    expected = {name: np.zeros_like(value) for name, value in start.items()}
    for k, importance in enumerate((0.25, 0.75)):
        own = nn.Linear(6, 3)
        own.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
        inputs, labels = examples(k)
        for _ in range(2):
            own.zero_grad()
            nn.functional.cross_entropy(own(inputs), labels).backward()
            with torch.no_grad():
                for param in own.parameters():
                    param -= 0.1 * param.grad
        for name, value in own.named_parameters():
            expected[name] += importance * value.detach().numpy()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_batch_norm_statistics_stay_with_their_client_or_travel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    kept = LocalTraining(model, examples(0), loss_fn, sgd, num_steps=3, batch_size=10)
    other = LocalTraining(model, (examples(5)[0] + 9, examples(5)[1]), loss_fn, sgd, num_steps=3, batch_size=10)
    start = model_arrays(model)
    assert not any("running" in name for name in start)
    _, state = kept({}, start, {})
    other({}, start, {})
    _, resumed = kept(state, start, {})
    fresh = nn.BatchNorm1d(4)
    assert not np.allclose(resumed["buffer.1.running_mean"], fresh.running_mean.numpy())
    assert np.abs(resumed["buffer.1.running_mean"]).max() < 2  # none of the other client's
    travelling = model_arrays(model, buffers=True)
    sent = LocalTraining(model, examples(0), loss_fn, sgd, num_steps=3, batch_size=10, buffers=True)
    delta, state = sent({}, travelling, {})
    assert "1.running_var" in delta
    assert not any(name.startswith("buffer.") for name in state)


def test_low_precision_travels_as_fp32() -> None:
    model = nn.Linear(6, 3).bfloat16()
    inputs, labels = examples()
    work = LocalTraining(model, (inputs.bfloat16(), labels), loss_fn, sgd, num_steps=2, batch_size=20)
    delta, _ = work({}, model_arrays(model), {})
    assert {value.dtype for value in delta.values()} == {np.dtype(np.float32)}


def test_a_proximal_term_holds_clients_back() -> None:
    model = net()
    work = LocalTraining(model, examples(), loss_fn, sgd, num_steps=30, batch_size=20)
    start = model_arrays(model)
    sizes = [tw.federated.norm(work({}, start, {"proximal-mu": mu} if mu else {})[0]) for mu in (0.0, 1.0, 5.0)]
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2]


def test_many_clients_at_once_are_as_one_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    make = functools.partial(tw.optim.create, "adan", lr=0.01)
    works = {
        f"c{k}": LocalTraining(model, examples(k, 12 + k), loss_fn, make, num_steps=4, batch_size=8, seed=k)
        for k in range(7)
    }
    clients = {
        name: SimulatedClient(work, 0.3 + 0.1 * k, predicted_s=0.3 + 0.1 * k)
        for k, (name, work) in enumerate(works.items())
    }
    start = model_arrays(model)
    one = simulate(Server(start, FedFix(0.5)), clients, max_aggregations=10)
    other = simulate(
        Server(start, FedFix(0.5)), clients, max_aggregations=10, together=VectorisedTraining(works, chunk=3)
    )
    for name, value in one.server.arrays.items():
        np.testing.assert_allclose(other.server.arrays[name], value, rtol=2e-4, atol=2e-5)
    assert {name: state["works"] for name, state in one.states.items()} == {
        name: other.server.clients.known[name].num_accepted for name in works
    }
    whole = {"a": LocalTraining(model, examples(), loss_fn, functools.partial(tw.optim.create, "adafactor", lr=0.01))}
    with pytest.raises(UserError, match="an elementwise optimizer is needed"):
        VectorisedTraining(whole)
    with pytest.raises(UserError, match="clients that are alike are needed"):
        VectorisedTraining({"a": works["c0"], "b": LocalTraining(net(), examples(), loss_fn, make)})


# FedSpeed


class Squares(nn.Module):
    """Least squares of one client: its own matrix, one shared vector x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(10, dtype=torch.float64))


def squares(num_clients: int = 8) -> tuple[list[Any], np.ndarray]:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(num_clients):
        matrix = rng.normal(size=(20, 10))
        data.append((matrix, matrix @ (rng.normal(size=10) * 2) + 0.1 * rng.normal(size=20)))
    whole, right = np.concatenate([a for a, _ in data]), np.concatenate([b for _, b in data])
    return [tuple(torch.tensor(each) for each in pair) for pair in data], np.linalg.lstsq(whole, right, rcond=None)[0]


def fedspeed(rounds: int, fraction: float = 1.0, num_steps: int = 40, **options: Any) -> float:
    data, best = squares()
    model = Squares()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return 0.5 * (batch[0] @ model.x - batch[1]).square().mean()

    plain = options.pop("plain", False)
    method = None if plain else FedSpeed(radius=options.pop("radius", 0.0), max_grad_norm=None, **options)
    works = {
        f"c{k}": LocalTraining(
            model,
            each,
            loss,
            functools.partial(torch.optim.SGD, lr=0.02),
            num_steps=num_steps,
            batch_size=20,
            method=method,
        )
        for k, each in enumerate(data)
    }
    rule = FedAvg(fraction) if plain else FedSpeedAverage(fraction)
    server = Server(model_arrays(model), rule)
    simulate(server, {name: SimulatedClient(work) for name, work in works.items()}, max_aggregations=rounds)
    return float(((server.arrays["x"] - best) ** 2).sum())


def test_fedspeed_reaches_the_minimum_where_fedavg_drifts() -> None:
    assert by_hand(60, penalty=3.0)[1] < 1e-4
    assert fedspeed(8, plain=True) > 1e-2


def by_hand(
    rounds: int, fraction: float = 1.0, num_steps: int = 40, penalty: float = 10.0, papers_rule: bool = False
) -> tuple[np.ndarray, float]:
    """FedSpeed in NumPy from the sheet's letters, with ĝ_i and x̂_i: the server's rule of the simulator, or the paper's."""
    data, best = squares()
    x, duals = np.zeros(10), np.zeros((len(data), 10))
    for version in range(rounds):
        asked = [int(name) for name in FedAvg(fraction).chosen([str(k) for k in range(len(data))], version)]
        reached = {}
        for k in asked:
            matrix, right = (each.numpy() for each in data[k])
            curve, slope, local = matrix.T @ matrix / 20, matrix.T @ right / 20, x.copy()
            for _ in range(num_steps):
                local = local - 0.02 * (curve @ local - slope - duals[k] + (local - x) / penalty)
            reached[k] = local
        for k in asked:
            duals[k] -= (reached[k] - x) / penalty
        own = [reached[k] - penalty * duals[k] for k in asked]
        everyone = np.mean([reached[k] for k in asked], axis=0) + np.mean(-penalty * duals, axis=0)
        x = np.mean(own, axis=0) if papers_rule else everyone
    return x, float(((x - best) ** 2).sum())


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_fedspeed_is_the_sheets(fraction: float) -> None:
    expected = by_hand(6, fraction, num_steps=10, penalty=3.0)[1]
    assert fedspeed(6, fraction, num_steps=10, penalty=3.0) == pytest.approx(expected, rel=1e-9)


def test_fedspeed_holds_under_partial_participation_where_the_papers_average_diverges() -> None:
    """The sheet's measured values: full 1.6e-5, half 4.5e-5, the paper's rule 3.6e3."""
    assert by_hand(300)[1] < 1e-4
    assert by_hand(600, 0.5)[1] < 1e-3
    assert by_hand(600, 0.5, papers_rule=True)[1] > 1e2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "bar"),
    [
        ({"rounds": 300, "penalty": 10.0}, 1e-4),
        ({"rounds": 600, "penalty": 10.0, "fraction": 0.5}, 1e-3),
        ({"rounds": 300, "penalty": 3.0, "num_steps": 200}, 1e-4),
    ],
)
def test_fedspeed_at_the_sheets_size(options: Any, bar: float) -> None:
    assert fedspeed(**options) < bar


def test_a_perturbed_gradient_is_taken_on_the_same_batch_and_leaves_the_weights() -> None:
    """One step by hand, from the formulas of the module's description."""
    data, _ = squares(1)
    model, (matrix, right) = Squares(), data[0]
    start = torch.linspace(-1, 1, 10, dtype=torch.float64)
    dual = torch.linspace(0, 0.5, 10, dtype=torch.float64)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return matrix.T @ (matrix @ x - right) / 20

    first = gradient(start)
    mixed = 0.25 * first + 0.75 * gradient(start + 0.3 * first / (first.norm() + 1e-7))
    clip = 0.5 / mixed.norm()
    expected = -0.02 * (mixed * clip + dual / 4.0)
    work = LocalTraining(
        model, data[0], lambda model, batch: 0.5 * (batch[0] @ model.x - batch[1]).square().mean(),
        functools.partial(torch.optim.SGD, lr=0.02), num_steps=1, batch_size=20,
        method=FedSpeed(penalty=4.0, radius=0.3, mixing=0.75, max_grad_norm=0.5),
    )  # fmt: skip
    delta, state = work({"dual.x": dual.numpy()}, {"x": start.numpy()}, {"version": 3, "accepted": -1})
    np.testing.assert_allclose(delta["x"], expected.numpy(), rtol=1e-12)
    taken, _ = work(state, {"x": start.numpy()}, {"version": 4, "accepted": 3})
    lost, _ = work(state, {"x": start.numpy()}, {"version": 4, "accepted": -1})
    np.testing.assert_allclose(lost["x"], expected.numpy(), rtol=1e-12)
    np.testing.assert_allclose(taken["x"], (expected - 0.02 * expected / 4.0).numpy(), rtol=1e-12)


def test_a_dual_counts_what_the_server_took_and_a_lost_one_is_said() -> None:
    data, _ = squares(1)
    work = LocalTraining(Squares(), data[0], lambda model, batch: (batch[0] @ model.x - batch[1]).square().mean(), sgd,
                         num_steps=1, batch_size=20, method=FedSpeed())  # fmt: skip
    with pytest.raises(UserError, match="this client's dual is needed"):
        work({}, {"x": np.zeros(10)}, {"version": 5, "accepted": 4})
    with pytest.raises(UserError, match="without batch norm"):
        LocalTraining(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), examples(), loss_fn, sgd, method=FedSpeed())
    with pytest.raises(UserError, match="has no server_lr"):
        Server({"x": np.zeros(1)}, FedSpeedAverage(), server_lr=0.5)


# What federations are like


def test_splits_share_everything_out_once_and_alpha_says_how_unevenly() -> None:
    labels = np.repeat(np.arange(10), 60)
    spreads = []
    for alpha in (0.05, 1.0, 1000.0):
        parts = dirichlet_split(labels, 12, alpha, seed=1, min_size=2)
        assert sorted(np.concatenate(parts)) == list(range(600))
        counts = np.array([np.bincount(labels[part], minlength=10) / len(part) for part in parts])
        spreads.append(counts.std())
    assert spreads[0] > 1.5 * spreads[1] > 5 * spreads[2]
    with pytest.raises(UserError, match="min_size"):
        dirichlet_split(labels, 12, 1.0, min_size=100)


def test_speeds_have_the_means_they_say() -> None:
    speeds = Speeds.of_federation(200, spread=0.3, stragglers=0.1, slower=10.0, sigma=0.5, seed=4)
    means = np.sort([speed.mean_s for speed in speeds])
    assert (means > 3.5).sum() == 20
    drawn = np.mean([speeds[0](number) for number in range(4000)])
    assert drawn == pytest.approx(speeds[0].mean_s, rel=0.05)
    assert speeds[0](7) == speeds[0](7)


def test_a_plan_says_how_long_its_client_takes() -> None:
    model = net()
    inputs, labels = examples(size=16)
    plan = tw.plan(model, (inputs, labels), loss_fn=nn.CrossEntropyLoss(), hardware="cpu:1", optimizer="sgd")
    alone = predicted_work_s(plan, 10)
    sent = predicted_work_s(plan, 10, num_bytes=1000, bandwidth_bytes_per_s=100.0)
    assert sent == pytest.approx(alone + 20.0)
    server = Server(model_arrays(model), FedFix(alone * 3))
    server.enroll("planned", predicted_s=alone)
    assert server.clients.weight("planned", gap=1) == 1.0


def test_plans_of_unlike_hardware_set_the_interval_and_the_weights() -> None:
    """From plans alone, before anything has arrived: Δt = the time in which half finish, d_i = p_i ⌈τ_i / Δt⌉."""
    loss = nn.CrossEntropyLoss()
    inputs, labels = examples(size=64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 3))
    start, planned = model_arrays(model), {}
    for hardware in ("cpu:1", "1xh100"):
        plan = tw.plan(model, (inputs[:16], labels[:16]), loss_fn=loss, hardware=hardware, optimizer="sgd")
        planned[hardware] = plan, tw.parallelize(model, plan, loss_fn=loss)
    clients, times_s = {}, {}
    for k, (hardware, num_steps) in enumerate([("cpu:1", 24), ("1xh100", 8), ("1xh100", 5)]):
        plan, module = planned[hardware]
        times_s[f"c{k}"] = predicted_work_s(plan, num_steps)
        work = LocalTraining(module, (inputs[20 * k : 20 * k + 24], labels[20 * k : 20 * k + 24]),
                             lambda module, batch, plan=plan: module(*plan.shard_batch(batch)).loss, sgd,
                             num_steps=num_steps, batch_size=16, seed=k)  # fmt: skip
        clients[f"c{k}"] = SimulatedClient(work, times_s[f"c{k}"], 1.0 + k, predicted_s=times_s[f"c{k}"])
    assert times_s["c0"] > 1.5 * times_s["c1"] > 1.5 * times_s["c2"]
    server = Server(start, FedFix())
    simulate(server, clients, max_aggregations=6)
    assert server.rule.interval_s == times_s["c1"]
    waits = math.ceil(times_s["c0"] / times_s["c1"] - 1e-9)
    for name, share, ticks in (("c0", 1 / 6, waits), ("c1", 2 / 6, 1), ("c2", 3 / 6, 1)):
        assert server.clients.weight(name, gap=1) == pytest.approx(share * ticks)
    received = {name: server.clients.known[name].num_accepted for name in clients}
    assert received == {"c0": 6 // waits, "c1": 6, "c2": 6}
    assert digest(server.arrays) != digest(start)


def test_a_client_may_be_a_planned_model_on_several_ranks(pool2: Pool) -> None:
    """Its change is that of one process, and its parameters are split while it works."""
    model, data = planned_problem()
    plan = tw.plan(
        model,
        tuple(each[:8] for each in data),
        loss_fn=nn.CrossEntropyLoss(),
        hardware="cpu:2",
        solver="fsdp",
        optimizer="adan",
    )
    for found in pool2.run("tests.federated_cases:planned_work", plan=plan.to_json()):
        assert found["largest"] < 1e-12
        assert found["works"] == 2
        assert found["moved"] > 1e-4
        assert found["split"] > 0


WRONG: dict[str, Any] = {
    "Batches needs batch_size whole": lambda: Batches(examples(), 2.5),  # type: ignore[arg-type]
    "Batches needs data as a tuple of tensors or a loader": lambda: Batches(None),
    "tensors of one length": lambda: Batches((torch.tensor(1.0),)),
    "LocalTraining needs model an nn.Module": lambda: LocalTraining(3, examples(), loss_fn, sgd),  # type: ignore[arg-type]
    "needs optimizer a function": lambda: LocalTraining(net(), examples(), loss_fn, None),  # type: ignore[arg-type]
    "needs method a LocalMethod": lambda: LocalTraining(net(), examples(), loss_fn, sgd, method="sam"),  # type: ignore[arg-type]
    "returns a scalar": lambda: LocalTraining(net(), examples(), lambda model, batch: model(batch[0]), sgd)(
        {}, model_arrays(net()), {}
    ),
    "its 0.bias is": lambda: tw.federated.load_arrays(net(), {"0.bias": np.zeros(99)}),
    "with parameters to train": lambda: model_arrays(nn.ReLU()),
    "VectorisedTraining needs clients of one": lambda: VectorisedTraining({}),
    "by name are needed; got Linear": lambda: Server(nn.Linear(1, 1), FedAvg()),
    "finite arrays are needed": lambda: Server({"w": np.array([np.nan])}, FedAvg()),
    "Server needs rule a Rule": lambda: Server({"w": np.zeros(1)}, "fedavg"),  # type: ignore[arg-type]
    "FedAvg needs seed whole": lambda: FedAvg(seed=-1),
    "FedBuff needs size whole": lambda: tw.federated.FedBuff("x"),  # type: ignore[arg-type]
    "a time above 0 for each client": lambda: tw.federated.fedfix_interval_s({}),
    "update a function": lambda: SimulatedClient(None),  # type: ignore[arg-type]
    "away pairs": lambda: SimulatedClient(sgd, away=((3.0, 1.0),)),
    "needs to return": lambda: simulate(
        Server({"w": np.zeros(1)}, FedAvg()), {"a": SimulatedClient(lambda *given: None)}, max_s=2.0  # type: ignore[arg-type]
    ),
    "simulate needs max_s": lambda: simulate(Server({"w": np.zeros(1)}, FedAvg()), {"a": SimulatedClient(sgd)}, max_s=math.nan),
    "Speeds needs mean_s": lambda: Speeds(0.0),
    "of_federation needs stragglers": lambda: Speeds.of_federation(3, stragglers=2.0),
    "dirichlet_split needs labels": lambda: dirichlet_split([], 2, 1.0),
    "predicted_work_s needs plan": lambda: predicted_work_s(None, 3),  # type: ignore[arg-type]
    "GaussianProcess needs values": lambda: tw.federated.GaussianProcess(np.ones((3, 2)), np.ones(4), 1.0),
    "a larger noise is needed": lambda: tw.federated.GaussianProcess(np.ones((3, 2)), np.ones(3), 1.0, 0.0),
    "RandomFeatures needs length_scale": lambda: tw.federated.RandomFeatures(2, 3, 0.0),
    "FZooSClient needs fun": lambda: tw.federated.FZooSClient(3),  # type: ignore[arg-type]
    "FZooSRun.begin needs x0": lambda: tw.federated.FZooSRun.begin(np.ones((2, 2))),
    "FZooSSettings needs num_steps whole": lambda: tw.federated.FZooSSettings(num_steps=1.5),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_is_said_in_words(words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        WRONG[words]()
