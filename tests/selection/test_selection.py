"""Weighted subsets: greedy against brute force, gradient sums against random subsets, and every wrong input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainwright.artifacts import UserError
from trainwright.selection import (
    CRAIG,
    Distances,
    RandomSubset,
    WeightedSubset,
    gradient_error,
    greedi,
    lazy_greedy,
    stochastic_greedy,
)
from trainwright.selection.sizes import class_sizes


def points(num_points: int, seed: int, num_dims: int = 4) -> Tensor:
    """Clusters of unequal size and spread, away from the origin."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(5, num_dims, generator=generator, dtype=torch.float64) + 7
    which = torch.randint(5, (num_points,), generator=generator).clamp_max(3)
    spread = torch.tensor([0.1, 1.0, 0.3, 2.0], dtype=torch.float64)[which][:, None]
    return centres[which] + spread * torch.randn(num_points, num_dims, generator=generator, dtype=torch.float64)


def naive_greedy(distances: Tensor, num_chosen: int) -> list[int]:
    """Plain greedy on a whole matrix of distances [n, n]."""
    chosen: list[int] = []
    nearest = torch.full((len(distances),), 1e6, dtype=distances.dtype)
    for _ in range(num_chosen):
        gains = (nearest[:, None] - distances).clamp_min(0.0).sum(0)
        gains[chosen] = -1.0
        chosen.append(int(gains.argmax()))
        nearest = torch.minimum(nearest, distances[:, chosen[-1]])
    return chosen


def by_hand(rows: Tensor) -> Tensor:
    return (rows[:, None] - rows[None]).square().sum(-1).sqrt()


@pytest.mark.parametrize(("num_points", "seed"), [(40, 0), (117, 1), (200, 2)])
def test_lazy_greedy_is_plain_greedy_in_the_same_order(num_points: int, seed: int) -> None:
    rows = points(num_points, seed)
    matrix = by_hand(rows)
    found = lazy_greedy(Distances(rows), num_points // 4)
    assert found.indices.tolist() == naive_greedy(matrix, num_points // 4)
    assert found.num_evaluations < num_points * num_points // 4
    nearest = matrix[:, found.indices].min(1)
    assert found.total_distance == pytest.approx(float(nearest.values.sum()), rel=1e-6)
    assert found.gains[1:].diff().max() <= 1e-9  # gains fall


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 9), st.integers(1, 3), st.integers(0, 10**6))
def test_greedy_keeps_its_share_of_the_best(num_points: int, num_chosen: int, seed: int) -> None:
    """F(greedy) ≥ (1 - 1/e) F(best) with F(S) = L(farthest) - L(S), against all subsets."""
    rows = points(num_points, seed)
    matrix = by_hand(rows)
    ceiling = float(matrix.max()) * num_points
    best = min(
        float(matrix[:, list(subset)].min(1).values.sum())
        for subset in itertools.combinations(range(num_points), num_chosen)
    )
    found = lazy_greedy(Distances(rows), num_chosen)
    assert ceiling - found.total_distance >= (1 - 1 / math.e) * (ceiling - best) - 1e-9


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = points(150, 3)
    whole = lazy_greedy(Distances(rows), 20)
    monkeypatch.setattr("trainwright.selection.facility_location._BLOCK_BYTES", 150 * 8 * 7)
    assert Distances(rows).block == 7
    assert lazy_greedy(Distances(rows), 20).indices.tolist() == whole.indices.tolist()


def test_stochastic_and_partitioned_greedy_come_near() -> None:
    rows = points(600, 4)
    matrix, generator = by_hand(rows), torch.Generator().manual_seed(0)
    ceiling = float(matrix.max()) * len(rows)
    best = ceiling - lazy_greedy(Distances(rows), 30).total_distance
    stochastic = stochastic_greedy(Distances(rows), 30, generator, delta=0.1)
    assert ceiling - stochastic.total_distance >= 0.98 * best
    assert stochastic.num_evaluations == 30 * math.ceil(20 * math.log(10))
    assert len(set(stochastic.indices.tolist())) == 30
    parted = greedi(Distances(rows), 30, generator, num_parts=4)
    assert ceiling - parted.total_distance >= 0.98 * best


def test_partitioned_greedy_hands_out_the_best_of_its_candidates() -> None:
    """The merged choice and the choice of each part, all over all points: never worse than any, on ten drawings."""
    rows = points(24, 5)
    distances = Distances(rows)
    for seed in range(10):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
        local = [part[lazy_greedy(distances.part(part), 3).indices] for part in order.chunk(2)]
        totals = [float(by_hand(rows)[:, chosen].min(1).values.sum()) for chosen in local]
        found = greedi(distances, 3, seed, num_parts=2)
        own = float(by_hand(rows)[:, found.indices].min(1).values.sum())
        assert own == pytest.approx(found.total_distance)
        assert own <= min(totals) + 1e-9


@pytest.mark.parametrize("choose", [lazy_greedy, stochastic_greedy, greedi])
def test_more_points_than_there_are_is_refused(choose: Callable[..., object]) -> None:
    for wrong in (0, 21):
        with pytest.raises(UserError, match=f"num_chosen from 1 to the 20 points is needed; got {wrong}"):
            choose(Distances(points(20, 1)), wrong)


def test_the_cover_form_stops_at_the_radius() -> None:
    rows = points(120, 5)
    radius = 40.0
    chosen = CRAIG(radius=radius).fit(rows)
    assert chosen.objective_ <= radius
    one_less = lazy_greedy(Distances(rows), len(chosen.indices_) - 1)
    assert one_less.total_distance > radius


def logistic() -> tuple[Tensor, Tensor]:
    """Two classes, twelve imbalanced clusters, 20 features."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.tensor([600, 400, 250, 200, 150, 120, 90, 70, 50, 35, 20, 15])
    which = torch.repeat_interleave(torch.arange(12), sizes)
    centres = 2 * torch.randn(12, 20, generator=generator, dtype=torch.float64)
    rows = centres[which] + 0.3 * torch.randn(len(which), 20, generator=generator, dtype=torch.float64)
    return rows, which % 2


def gradients(rows: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return (torch.sigmoid(rows @ weight) - labels)[:, None] * rows


@pytest.mark.parametrize(("fraction", "bar"), [(0.02, 0.4), (0.05, 0.4), (0.1, 0.4)])
def test_the_subset_stands_for_the_gradient_far_better_than_a_random_one(fraction: float, bar: float) -> None:
    rows, labels = logistic()
    chosen = CRAIG(fraction).fit(rows, labels)
    generator = torch.Generator().manual_seed(8)
    ours, random, unweighted = [], [], []
    for _ in range(20):
        weight = 0.5 * torch.randn(20, generator=generator, dtype=torch.float64)
        g = gradients(rows, labels, weight)
        ours.append(gradient_error(g, chosen.indices_, chosen.weights_))
        drawn = torch.randperm(len(rows), generator=generator)[: len(chosen.indices_)]
        share = torch.full((len(drawn),), len(rows) / len(drawn))
        random.append(gradient_error(g, drawn, share))
        unweighted.append(gradient_error(g, chosen.indices_, share))
    assert np.mean(ours) < bar * np.mean(random)
    assert np.mean(ours) < 0.5 * np.mean(unweighted)


def fitted(rows: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the logistic losses and a ridge, by Newton's method."""
    weight, eye = torch.zeros(rows.shape[1], dtype=rows.dtype), torch.eye(rows.shape[1], dtype=rows.dtype)
    share = weights.double() / weights.sum()
    for _ in range(25):
        p = torch.sigmoid(rows @ weight)
        hessian = rows.T @ ((share * p * (1 - p))[:, None] * rows) + 1e-3 * eye
        weight = weight - torch.linalg.solve(hessian, rows.T @ (share * (p - labels)) + 1e-3 * weight)
    return weight


def test_a_model_fitted_to_the_subset_is_nearer_to_the_best_than_one_fitted_to_random_examples() -> None:
    rows, labels = logistic()

    def value(weight: Tensor) -> float:
        losses = torch.nn.functional.binary_cross_entropy_with_logits(rows @ weight, labels.double())
        return float(losses + 5e-4 * weight.square().sum())

    best = value(fitted(rows, labels, torch.ones(len(rows))))
    for fraction in (0.02, 0.05, 0.1):
        ours = CRAIG(fraction).fit(rows, labels)
        gap = value(fitted(rows[ours.indices_], labels[ours.indices_], ours.weights_)) - best
        gaps = []
        for seed in range(7):
            drawn = RandomSubset(fraction, seed=seed).fit(rows, labels)
            gaps.append(value(fitted(rows[drawn.indices_], labels[drawn.indices_], drawn.weights_)) - best)
        assert -1e-12 < gap < 0.3 * float(np.median(gaps))


def test_a_random_subset_is_unbiased_and_takes_its_share_of_each_class() -> None:
    rows, labels = logistic()
    g = gradients(rows, labels, torch.ones(20, dtype=torch.float64))
    total = torch.zeros(20, dtype=torch.float64)
    for seed in range(300):
        chosen = RandomSubset(0.1, seed=seed).fit(rows, labels)
        total += chosen.weights_.double() @ g[chosen.indices_]
        assert len(set(chosen.indices_.tolist())) == len(chosen.indices_)
    assert torch.bincount(labels[chosen.indices_].long()).tolist() == [
        int(np.ceil(0.1 * float((labels == each).sum()))) for each in (0, 1)
    ]
    assert float((total / 300 - g.sum(0)).norm()) < 0.03 * float(g.norm(dim=1).sum())
    assert float((total / 300 - g.sum(0)).norm()) < 0.2 * float(g.sum(0).norm())
    equally = RandomSubset(0.1, per_class="equal", normalise=True).fit(rows, labels)
    assert torch.bincount(labels[equally.indices_].long()).tolist() == [100, 100]
    assert float(equally.weights_.sum()) == pytest.approx(200)


@pytest.mark.parametrize("greedy", ["lazy", "stochastic", "greedi"])
def test_weights_of_a_class_sum_to_its_size(greedy: str) -> None:
    rows, labels = logistic()
    chosen = CRAIG(0.03, greedy=greedy).fit(rows, labels)
    for label in (0.0, 1.0):
        own = labels[chosen.indices_] == label
        assert float(chosen.weights_[own].sum()) == float((labels == label).sum())
    assert float(CRAIG(0.03, normalise=True).fit(rows, labels).weights_.mean()) == pytest.approx(1.0)


def test_budgets_are_shared_by_class_and_every_class_has_one() -> None:
    rows = points(101, 6)
    labels = torch.tensor([0] * 70 + [1] * 30 + [2])
    count = lambda chosen: torch.bincount(labels[chosen.indices_]).tolist()  # noqa: E731
    assert count(CRAIG(budget=10).fit(rows, labels)) == [7, 3, 1]
    assert count(CRAIG(budget=9, per_class="equal").fit(rows, labels)) == [3, 3, 1]
    assert count(CRAIG(0.1).fit(rows, labels)) == [7, 3, 1]


def test_a_seed_gives_the_same_choice_and_the_global_generator_is_left_alone() -> None:
    rows = points(200, 9)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two = (CRAIG(0.1, greedy="stochastic", seed=5).fit(rows) for _ in range(2))
    assert torch.equal(one.indices_, two.indices_)
    assert torch.equal(torch.get_rng_state(), before)


def test_arrays_give_arrays_and_cosine_ignores_lengths() -> None:
    rows = points(60, 10)
    chosen = CRAIG(0.1).fit(rows.numpy(), np.zeros(60, dtype=int))
    assert isinstance(chosen.indices_, np.ndarray)
    assert isinstance(chosen.weights_, np.ndarray)
    scaled = rows * torch.linspace(0.5, 4.0, 60, dtype=torch.float64)[:, None]
    one, two = (CRAIG(0.1, metric="cosine").fit(given) for given in (rows, scaled))
    assert one.indices_.tolist() == two.indices_.tolist()


@pytest.mark.parametrize("options", [{"fraction": 0.0}, {"fraction": 1.1}, {"budget": 0}, {"radius": -1.0}, {"per_class": "x"},
                                     {"greedy": "x"}, {"metric": "x"}, {"delta": 1.0}, {"num_parts": 0},
                                     {"budget": 3, "radius": 1.0}])  # fmt: skip
def test_settings_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="CRAIG needs"):
        CRAIG(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        (torch.zeros(0, 3), None, r"features of shape \[n, d\]"),
        (torch.zeros(3, 2, 2), None, r"got \[3, 2, 2\]"),
        (torch.tensor([[1.0], [math.nan]]), None, "finite features"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), "one label an example is needed; got 2 for 3"),
    ],
)
def test_wrong_inputs_are_refused(rows: Tensor, labels: Tensor | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CRAIG().fit(rows, labels)


def test_a_weighted_subset_feeds_a_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))
    subset = WeightedSubset(data, [7, 2, 5], torch.tensor([1.0, 3.0, 2.0]))
    x, y, weight = next(iter(torch.utils.data.DataLoader(subset, batch_size=3)))
    assert y.tolist() == [7, 2, 5]
    assert x.flatten().tolist() == [7.0, 2.0, 5.0]
    assert weight.tolist() == [1.0, 3.0, 2.0]
    assert WeightedSubset([{"x": 1}], [0], [2.0])[0] == {"x": 1, "weight": torch.tensor(2.0)}
    assert WeightedSubset(["x"], [0], [2.0])[0] == ("x", torch.tensor(2.0))


@pytest.mark.parametrize(
    ("indices", "weights", "message"),
    [([0, 1], [1.0], "one weight an index"), ([3], [1.0], "indices from 0 to 2"), ([-1], [1.0], "indices from 0 to 2"),
     ([0], [-1.0], "weights of at least 0"), ([0], [math.inf], "weights of at least 0")],
)  # fmt: skip
def test_a_wrong_subset_is_refused(indices: list[int], weights: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        WeightedSubset(["a", "b", "c"], indices, weights)


def test_stochastic_greedy_chooses_no_point_twice() -> None:
    """Also where no point gains anything any more, as among copies of one."""
    chosen = stochastic_greedy(Distances(torch.ones(6, 2)), 6, seed=0, radius=-1.0)
    assert sorted(chosen.indices.tolist()) == list(range(6))


def test_cosines_do_not_see_how_long_examples_are() -> None:
    features = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lengths = torch.logspace(-2, 2, 30, dtype=torch.float64)[:, None]
    one, other = (CRAIG(0.2, metric="cosine").fit(rows) for rows in (features, lengths * features))
    assert torch.equal(one.indices_, other.indices_)
    assert torch.equal(one.weights_, other.weights_)
    assert one.objective_ == pytest.approx(other.objective_)


def test_equal_budgets_are_rounded_up_for_every_class() -> None:
    assert class_sizes([9, 9, 9], 0.1, 4, "equal") == [2, 2, 2]
    assert class_sizes([9, 1, 9], 0.1, 6, "equal") == [2, 1, 2]
