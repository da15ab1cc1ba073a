"""LSGD, SA-SRRW, DADAO and Just One Byte against their sheets' formulas and measured values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from torch import Tensor, nn

from tests.sync_problems import LeastSquares, Vector, ends, normal, run, sgd
from trainwright import sync
from trainwright.numerics.normals import normals
from trainwright.sync import Compute, Network, SelfRepellentWalk, optimal_rates, simulate
from trainwright.sync.dadao import chi, uniform_rates
from trainwright.sync.graphs import Graph, named
from trainwright.sync.just_one_byte import decode, encode

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- LSGD


def well(name: str, seed: int, **options: Any) -> float:
    """f(mean of the workers) after 400 noisy steps on Σ (x² − 1)² / 4, four workers that begin apart."""
    generator = torch.Generator().manual_seed(seed)
    starts = [torch.randn(10, generator=generator, dtype=torch.float64) for _ in range(4)]

    def loss(x: Tensor, rank: int, step: int) -> float:
        return float((x.square() - 1).square().sum() / 4)

    def gradient(x: Tensor, rank: int, step: int) -> Tensor:
        return x * (x.square() - 1) + 0.3 * torch.randn(10, generator=generator, dtype=torch.float64)

    done = run(name, 4, torch.zeros(10).double(), gradient, 400, sgd(0.05), loss=loss, starts=starts, **options)
    return loss(ends(done).mean(0), 0, 0)


def leader_score(pull: float, seeds: range) -> float:
    options = {"group_period": 1, "global_period": 1, "global_pull": 0.0, "global_move": 0.05 * pull}
    return float(np.mean([well("lsgd", seed, **options) for seed in seeds]))


def elastic_score(pull: float, seeds: range) -> float:
    return float(np.mean([well("easgd", seed, period=1, pull=0.05 * pull, centre_pull=1.0) for seed in seeds]))


@pytest.mark.slow
def test_workers_in_several_basins_follow_the_best_one() -> None:
    assert leader_score(0.5, range(3)) < 0.05
    assert elastic_score(0.5, range(3)) > 0.3


@pytest.mark.slow
def test_the_double_well_over_forty_seeds() -> None:
    seeds = range(40)
    assert leader_score(0.5, seeds) == pytest.approx(0.003, abs=0.003)
    assert elastic_score(0.5, seeds) == pytest.approx(0.503, abs=0.15)
    assert leader_score(0.1, seeds) == pytest.approx(1.58, abs=0.3)
    assert elastic_score(1.0, seeds) < 0.01


@pytest.mark.parametrize("pull", [0.0, 1.0, 5.0])
def test_leaders_leave_the_minimum_where_it_is(pull: float) -> None:
    """LGD on diag(1, 10, 100): a pull to the leader does no harm, and brings the worst worker nearer."""
    curvature, rate = torch.tensor([1.0, 10, 100]).double(), 0.01
    starts = list(normal(4, 3, seed=4))

    def loss(x: Tensor, rank: int, step: int) -> float:
        return float((curvature * x.square()).sum() / 2)

    def worst(pull: float) -> float:
        options = {"group_period": 1, "global_period": 1, "global_pull": 0.0, "global_move": rate * pull}
        done = run(
            "lsgd",
            4,
            starts[0],
            lambda x, rank, step: curvature * x,
            200,
            sgd(rate),
            loss=loss,
            starts=starts,
            **options,
        )
        return float(ends(done).norm(dim=1).max())

    assert worst(pull) < 0.5
    assert pull == 0 or worst(pull) < worst(0.0)


def test_one_worker_of_lsgd_is_sgd_to_the_bit() -> None:
    problem = LeastSquares(1, 5, 9)
    done = run("lsgd", 1, normal(5, seed=1), problem.gradient, 40, sgd(0.05, 0.9), group_period=2, global_period=4)
    model = Vector(normal(5, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(40):
        model.set_gradient(problem.gradient(model.x, 0, 0))
        optimizer.step()
    assert torch.equal(ends(done)[0], model.x)


def test_two_groups_move_by_c1_and_then_by_c2_to_the_last_worker() -> None:
    """Losses make rank 3 the leader of its group and of all; gradients are zero, so that only the pulls move anything."""
    starts = list(normal(4, 3, seed=2))
    losses = [3.0, 2.0, 4.0, 1.0]
    done = run(
        "lsgd", 4, torch.zeros(3).double(), lambda x, rank, step: torch.zeros_like(x), 1, sgd(0.1),
        loss=lambda x, rank, step: losses[rank], starts=starts, num_groups=2, group_period=1, global_period=2,
        group_move=0.3, global_move=0.2,
    )  # fmt: skip
    expected = [
        starts[0] - 0.3 * (starts[0] - starts[1]),
        starts[1],
        starts[2] - 0.3 * (starts[2] - starts[3]),
        starts[3],
    ]
    torch.testing.assert_close(ends(done), torch.stack(expected), rtol=0, atol=1e-15)
    both = run(
        "lsgd", 4, torch.zeros(3).double(), lambda x, rank, step: torch.zeros_like(x), 1, sgd(0.1),
        loss=lambda x, rank, step: losses[rank], starts=starts, num_groups=2, group_period=1, global_period=1,
        group_move=0.3, global_move=0.2,
    )  # fmt: skip  # periods alike: the leader of all alone
    expected = [start - 0.2 * (start - starts[3]) for start in starts]
    torch.testing.assert_close(ends(both), torch.stack(expected), rtol=0, atol=1e-15)


def test_a_nan_loss_never_leads() -> None:
    starts = list(normal(2, 3, seed=2))
    done = run(
        "lsgd", 2, torch.zeros(3).double(), lambda x, rank, step: torch.zeros_like(x), 1, sgd(0.1), starts=starts,
        loss=lambda x, rank, step: math.nan if rank == 0 else 1e9, group_period=1, global_period=1, global_move=1.0,
    )  # fmt: skip
    assert torch.equal(ends(done), starts[1].expand(2, -1))


def test_a_straggler_takes_fewer_steps_and_holds_up_nobody() -> None:
    def program(rank: int, asynchronous: bool) -> Any:
        model = Vector(torch.ones(3).double())
        options = {"group_period": 4, "global_period": 4, "asynchronous": asynchronous}
        joined = yield from sync.join("lsgd", model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        while joined.method.num_rounds < 5:
            model.set_gradient(model.x)
            yield Compute()
            yield from joined.steps(float(model.x.sum()))
        return joined.method.num_steps

    slow = [1.0, 1.0, 1.0, 10.0]
    waiting = simulate([program(rank, False) for rank in range(4)], Network(), slow)
    going_on = simulate([program(rank, True) for rank in range(4)], Network(), slow)
    assert waiting.results == [20] * 4
    assert waiting.seconds == 200
    assert going_on.results[3] < 10 < 20 < going_on.results[0]
    assert going_on.seconds < waiting.seconds / 2


# ---- SA-SRRW


def watts_strogatz(num_nodes: int = 20, degree: int = 4, rewired: float = 0.1, seed: int = 39) -> Graph:
    """The seed's graph has λ₂ = 0.888, that of the graph that the expected values were measured on."""
    rng = np.random.default_rng(seed)
    edges = {(node, (node + hop) % num_nodes) for node in range(num_nodes) for hop in range(1, degree // 2 + 1)}
    for a, b in sorted(edges):
        if rng.random() < rewired:
            edges.remove((a, b))
            edges.add((a, int(rng.choice([c for c in range(num_nodes) if c not in (a, b)]))))
    return Graph.of(edges, num_nodes)


def mean_squared_error(alpha: float, visits: float, steps: float, num_steps: int, num_runs: int = 300) -> float:
    """Return the squared error of θ ← θ − β_n (θ − y_X), n = 1 … num_steps, from all walks' mean of y."""
    graph, rng = watts_strogatz(), np.random.default_rng(0)
    y = np.random.default_rng(5).normal(size=graph.num_nodes)
    walk = SelfRepellentWalk(graph, alpha, visits, num_walks=num_runs)
    theta = np.full(num_runs, y.mean())
    for n in range(1, num_steps + 1):
        at = walk.move(rng.random(num_runs))
        theta -= (n + graph.num_nodes) ** -steps * (theta - y[at])
    return float(np.mean((theta - y.mean()) ** 2))


def ratio(alpha: float, visits: float, steps: float, num_steps: int = 6000) -> float:
    return mean_squared_error(alpha, visits, steps, num_steps) / mean_squared_error(0.0, visits, steps, num_steps)


@pytest.mark.slow
def test_variance_falls_with_repulsion_where_visits_settle_first() -> None:
    errors = [ratio(alpha, 0.8, 0.9) for alpha in (1, 5)]
    assert errors[1] < 0.12
    assert errors[1] < errors[0] < 0.5


@pytest.mark.slow
def test_the_three_regimes_of_step_sizes() -> None:
    first = [ratio(alpha, 0.8, 0.9) for alpha in (1, 5, 10, 20)]
    assert first == sorted(first, reverse=True)
    assert first[0] == pytest.approx(0.254, rel=0.4)
    assert first[1] < 0.12
    assert ratio(5, 0.8, 0.8) < 0.2
    assert ratio(5, 0.8, 0.6) > 0.4


def test_the_walk_by_its_kernel() -> None:
    """Frequencies of the next node from x fixed, against P_ij x_j^(−α), loops included."""
    graph = Graph.of([(0, 1), (1, 2), (2, 3), (1, 3), (3, 4)])
    walk = SelfRepellentWalk(graph, 2.0, num_walks=20_000)
    x = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    walk.x[:], walk.at[:] = x, 0
    found = np.bincount(walk.move(np.random.default_rng(0).random(20_000)), minlength=5) / 20_000
    p = np.array([1 - 1 / 3, 1 / 3, 0, 0, 0])  # degrees 1 and 3
    expected = p * x**-2.0 / (p * x**-2.0).sum()
    np.testing.assert_allclose(found, expected, atol=0.015)
    assert np.isfinite(walk.x).all()
    np.testing.assert_allclose(walk.x.sum(1), 1)


def test_a_token_with_huge_repulsion_does_not_overflow() -> None:
    walk = SelfRepellentWalk(named("ring", 50)[0], 1000.0)
    nodes = {int(walk.move(np.array([u]))[0]) for u in np.random.default_rng(0).random(200)}
    assert nodes == set(range(50))


def test_the_token_carries_one_trajectory() -> None:
    """The same steps by hand, at the nodes where the walk is; after `finish` all nodes hold the end."""
    problem = LeastSquares(4, 3, 6)

    def program(rank: int) -> Any:
        model = Vector(torch.zeros(3).double())
        joined = yield from sync.join(
            "sa-srrw", model, torch.optim.SGD(model.parameters(), lr=0.5), graph="ring", alpha=3.0
        )
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            x = torch.cat(list(model.parts))
            return x @ problem.hessians[rank] @ x / 2 - problem.targets[rank] @ x

        holders = []
        for _ in range(25):
            holders.append(int(joined.method.state["holder"]))
            yield from joined.steps(closure)
        yield from joined.finishing()
        return model.x, holders, calls

    done = simulate([program(rank) for rank in range(4)])
    holders = done.results[0][1]
    x = torch.zeros(3).double()
    for step, node in enumerate(holders, start=1):
        x = x - 0.5 * (step + 4) ** -0.9 * problem.gradient(x, node, 0)
    for rank, (found, seen, calls) in enumerate(done.results):
        torch.testing.assert_close(found, x, rtol=0, atol=1e-12)
        assert seen == holders
        assert calls == holders.count(rank)
    assert len(set(holders)) == 4


# ---- DADAO


def dadao_error(num_steps: int, rates: Any = None) -> list[float]:
    """Squared distance from the minimum, a unit of time at a time: ring of 8, least squares of κ ≈ 5, d = 5."""
    problem = LeastSquares(8, 5, 40)
    spectrum = torch.linalg.eigvalsh(problem.hessians)
    errors = []

    def program(rank: int) -> Any:
        model = Vector(torch.zeros(5).double())
        options = {"smoothness": float(spectrum.max()), "convexity": float(spectrum.min()), "rates": rates}
        joined = yield from sync.join("dadao", model, None, graph="ring", **options)

        def closure() -> Tensor:
            x = torch.cat(list(model.parts))
            return x @ problem.hessians[rank] @ x / 2 - problem.targets[rank] @ x

        for _ in range(num_steps):
            yield from joined.steps(closure)
            if rank == 0:
                errors.append(float((model.x - problem.minimum).square().sum()))

    simulate([program(rank) for rank in range(8)])
    return errors


def test_dadao_converges_in_a_straight_line() -> None:
    errors = dadao_error(100)
    assert (math.log(errors[-1]) - math.log(errors[19])) / 80 <= -0.06


def test_rates_that_are_too_low_diverge_and_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    low = [rate / 8 for rate in uniform_rates(named("ring", 8)[0])]
    with monkeypatch.context() as patched:
        patched.setattr("trainwright.sync.dadao._MOST_CHI", math.inf)
        assert dadao_error(30, low)[-1] > 1e6
    with pytest.raises(sync.face.UserError, match="1/2, else it diverges; got 32"):
        dadao_error(1, low)


def test_rates_of_a_ring_of_eight() -> None:
    rates = uniform_rates(named("ring", 8)[0])
    assert sum(rates) == pytest.approx(9.78, abs=0.01)
    first, second = chi(named("ring", 8)[0], rates)
    assert first * second == pytest.approx(0.5)
    assert sum(uniform_rates(named("barbell", 8)[0])) == pytest.approx(21.8, abs=0.05)


def test_a_bottleneck_gets_a_larger_share_of_fewer_messages() -> None:
    """Measured on two fours with a bridge: 13.3 of 21.8, and 0.196 of the mass on the bridge, 0.077 if uniform."""
    graph = named("barbell", 8)[0]
    rates = optimal_rates(graph)
    first, second = chi(graph, rates)
    assert first * second <= 0.5 * (1 + 1e-6)
    assert sum(rates) == pytest.approx(13.3, abs=0.2)
    assert sum(rates) < 0.7 * sum(uniform_rates(graph))
    assert rates[graph.edges.index((3, 4))] / sum(rates) == pytest.approx(0.196, abs=0.02)


def test_the_flow_and_the_jumps_of_dadao_by_hand() -> None:
    """All events of two units of time on two nodes, in one list, with the constants written out."""
    problem, big, small = LeastSquares(2, 3, 6), 9.0, 0.5
    methods: list[Any] = []

    def program(rank: int) -> Any:
        model = Vector(torch.ones(3).double())
        joined = yield from sync.join("dadao", model, None, graph="path", smoothness=big, convexity=small, seed=3)
        methods.append(joined.method)

        def closure() -> Tensor:
            x = torch.cat(list(model.parts))
            return x @ problem.hessians[rank] @ x / 2 - problem.targets[rank] @ x

        for _ in range(3):
            yield from joined.steps(closure)
        return model.x

    done = simulate([program(rank) for rank in range(2)])
    nu = small / 2
    r = math.sqrt(nu / big)
    rate = uniform_rates(named("path", 2)[0])[0]
    flow = np.zeros((6, 6))
    flow[0, :2] = -r / 8, r / 8
    flow[1, :2] = r / 8, -r / 8
    flow[2, 2:4] = -r / 4, r / 4
    flow[3] = [0, -nu / (2 * r), -1 / (2 * r), 0, -1 / (2 * r), 0]
    flow[4, 4:] = -r / 4, r / 4
    flow[5, 4:] = r / 8, -r / 8
    s = np.zeros((2, 6, 3))
    s[:, 0] = 1.0
    now = 0.0
    for at, nodes in [*(event for unit in (1, 2, 3) for event in methods[0].schedule.events(unit)), (3.0, ())]:
        s = np.einsum("ab,nbd->nad", expm(flow * (at - now)), s)
        now = at
        if len(nodes) == 1:
            node = nodes[0]
            x = torch.from_numpy(s[node, 0].copy())
            h = problem.gradient(x, node, 0).numpy() - nu * s[node, 0] - s[node, 3]
            s[node, 0] -= h / (4 * big)
            s[node, 1] -= h / (4 * math.sqrt(nu * big))
            s[node, 3] += (r / 4 + 1) * h
        elif nodes:
            m = (s[0, 2] + s[0, 4]) - (s[1, 2] + s[1, 4])
            for node, sign in ((0, 1), (1, -1)):
                s[node, 4] -= sign * m / 2
                s[node, 5] -= sign * m * 2 * (1 / (2 * rate)) / r
    for rank in range(2):
        np.testing.assert_allclose(done.results[rank].numpy(), s[rank, 0], rtol=0, atol=1e-10)


# ---- Just One Byte


def test_a_byte_holds_a_slope_within_seven_percent() -> None:
    slopes = torch.logspace(math.log10(4e-4), math.log10(2.5e3), 2001, dtype=torch.float64)
    for signed in (slopes, -slopes):
        error = (decode(encode(signed)) - signed).abs() / slopes
        assert 0.06 < float(error.max()) < 0.065
    assert encode(torch.tensor([0.0, 1e-9, math.inf, -math.inf])).tolist() == [0, 1, 127, -127]
    assert decode(torch.tensor([0, 1, 127], dtype=torch.int8)).tolist() == pytest.approx([0, 3.8e-4, 2.63e3], rel=0.01)


def test_directions_are_normal_and_the_same_everywhere() -> None:
    z = normals(200_000, (1, 2, 3, 4)).double()
    assert float(z.mean()) == pytest.approx(0, abs=0.01)
    assert float(z.std()) == pytest.approx(1, abs=0.01)
    assert float((z**4).mean()) == pytest.approx(3, abs=0.06)
    assert abs(float((z * normals(200_000, (1, 2, 3, 5)).double()).mean())) < 0.01
    assert torch.equal(z * 2**16, (z * 2**16).round())
    assert (z[:4] * 2**16).long().tolist() == FIRST


FIRST = [-139362, 15541, 27835, 23954]


def byte_run(num_steps: int = 60, seed: int = 0) -> Any:
    """An MLP 10-16-2 on four machines with 128 samples each."""

    def program(rank: int) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        joined = yield from sync.join("just-one-byte", net, optimizer, num_samples=4, seed=seed)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(128, 10, generator=generator)
        y = (x[:, 0] + x[:, 1] > 0).long()

        def closure(sample: int) -> Tensor:
            return nn.functional.cross_entropy(net(x), y)

        losses = []
        for _ in range(num_steps):
            losses.append(closure(0).item())
            yield from joined.steps(closure)
        return losses, joined

    return simulate([program(rank) for rank in range(4)])


def test_machines_stay_equal_to_the_bit_and_learn() -> None:
    done = byte_run()
    assert len({joined.method.replica.digest() for _, joined in done.results}) == 1
    losses = done.results[0][0]
    assert losses[-1] < 0.75 * losses[0]
    sent = [traffic.bytes_by_kind["all_gather"] for traffic in done.traffic]
    assert sent == [3 * (512 + 60 * 4)] * 4


def test_a_byte_loses_little_beside_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    by_byte = byte_run().results[0][0][-1]
    monkeypatch.setattr("trainwright.sync.just_one_byte.encode", lambda slopes: slopes)
    monkeypatch.setattr("trainwright.sync.just_one_byte.decode", lambda codes: codes)
    assert by_byte == pytest.approx(byte_run().results[0][0][-1], abs=0.02)


def test_who_missed_a_step_catches_up_by_the_bytes_alone() -> None:
    problem = LeastSquares(2, 5, 9)
    before: list[Tensor] = []
    rows: list[Tensor] = []

    def program(rank: int) -> Any:
        model = Vector(torch.zeros(5).double())
        joined = yield from sync.join(
            "just-one-byte", model, torch.optim.SGD(model.parameters(), lr=0.1), num_samples=3
        )

        def closure(sample: int) -> Tensor:
            x = model.x
            return x @ problem.hessians[rank] @ x / 2 - problem.targets[rank] @ x

        for _ in range(2):
            before.append(model.x)
            program_of_step = joined.steps(closure)
            answer = None
            while True:
                try:
                    request = program_of_step.send(answer)
                except StopIteration:
                    break
                answer = yield request
                if isinstance(request, sync.AllGather) and rank == 0:
                    rows.append(answer)
        return joined.method, model.x

    method, after = simulate([program(rank) for rank in range(2)]).results[0]
    missed = before[0]
    for step, given in enumerate(rows, start=1):
        missed = method.caught_up(missed, step, given)
    assert torch.equal(missed, after)
