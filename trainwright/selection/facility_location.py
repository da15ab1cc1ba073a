r"""Facility location: k representatives of n points, by greedy choice with a proven share of 1 - 1/e of the best.

    L(S) = Σ_i min over j in S of d_ij, to be made small; greedy takes the point that lowers L most    `_Greedy`
    lazy greedy        gains only fall, so the best stale gain is looked at first (same choice)       `lazy_greedy`
    stochastic greedy  the best of (n/k) log(1/δ) candidates drawn at random                          `stochastic_greedy`
    GreeDi             each part of the points by itself, then among what the parts chose             `greedi`

Distances are made in blocks of columns when they are asked for: memory is O(n · block), never n².
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import UserError
from .inputs import drawn_from

_BLOCK_BYTES = 64 << 20
_LAZY_BLOCK = 16


@dataclass(frozen=True)
class Chosen:
    """What greedy chose, in its order."""

    indices: Tensor
    """[k], into the points."""
    gains: Tensor
    """[k]: by how much each lowered L; the first, from the sum of the largest distances seen."""
    nearest: Tensor
    """[n]: the place in `indices` of each point's representative."""
    total_distance: float
    """L(S)."""
    num_evaluations: int
    """Candidates whose gain was computed."""


class Distances:
    """d_ij between points [n, d], a block of columns at a time: `euclidean`, or `cosine` (1 - cosine)."""

    def __init__(self, points: Tensor, metric: str = "euclidean") -> None:
        self.metric = metric
        if metric == "cosine":
            points = torch.nn.functional.normalize(points, dim=1)
        else:
            points = points - points.mean(0)  # less cancellation in |x|² + |y|² - 2xy
        self.points = points
        self.squares = points.square().sum(1)

    def __len__(self) -> int:
        return len(self.points)

    @property
    def block(self) -> int:
        """How many columns are made at once."""
        return max(1, min(len(self), _BLOCK_BYTES // max(1, len(self) * self.points.element_size())))

    def columns(self, candidates: Tensor) -> Tensor:
        """Return [n, c]: every point's distance to each candidate [c]."""
        chosen = self.points[candidates].T
        if self.metric == "cosine":
            return (self.points @ chosen).neg_().add_(1.0).clamp_min_(0.0)
        squares = torch.addmm(self.squares[:, None], self.points, chosen, alpha=-2.0).add_(self.squares[candidates])
        return _exactly_zero(squares.clamp_min_(0.0).sqrt_(), candidates)

    def part(self, places: Tensor) -> Distances:
        """Return the distances among some of the points."""
        found = object.__new__(Distances)
        found.metric, found.points, found.squares = self.metric, self.points[places], self.squares[places]
        return found


def lazy_greedy(distances: Distances, num_chosen: int, radius: float = 0.0) -> Chosen:
    """Choose `num_chosen` points, or fewer once L(S) ≤ `radius`, exactly as plain greedy would.

    >>> points = torch.tensor([0.0, 1, 3, 4, 10, 11, 14], dtype=torch.float64)[:, None]
    >>> found = lazy_greedy(Distances(points), 2)
    >>> found.indices.tolist(), round(found.total_distance, 6)
    ([3, 5], 12.0)
    """
    _check_budget(distances, num_chosen)
    greedy = _Greedy(distances)
    heap = [(-gain, index, 0) for index, gain in enumerate(greedy.all_gains().tolist())]
    heapq.heapify(heap)
    while len(greedy.indices) < num_chosen and heap and not greedy.within(radius):
        if heap[0][2] == len(greedy.indices):
            gain, index, _ = heapq.heappop(heap)
            greedy.take(index, -gain)
            continue
        stale = [heapq.heappop(heap)]
        while heap and len(stale) < _LAZY_BLOCK and heap[0][2] < len(greedy.indices):
            stale.append(heapq.heappop(heap))
        places = [index for _, index, _ in stale]
        for index, gain in zip(places, greedy.gains(torch.tensor(places)).tolist()):
            heapq.heappush(heap, (-gain, index, len(greedy.indices)))
    return greedy.chosen()


def stochastic_greedy(
    distances: Distances, num_chosen: int, seed: int | torch.Generator = 0, delta: float = 0.1, radius: float = 0.0
) -> Chosen:
    """Choose `num_chosen` points, each the best of ⌈(n/k) log(1/δ)⌉ drawn at random: 1 - 1/e - δ of the best, on average."""
    _check_budget(distances, num_chosen)
    greedy, num_points, generator = _Greedy(distances), len(distances), drawn_from(seed)
    sample = max(1, math.ceil(num_points / num_chosen * math.log(1 / delta)))
    left = torch.ones(num_points, dtype=torch.bool)
    for _ in range(num_chosen):
        if greedy.within(radius):
            break
        free = left.nonzero().flatten()
        drawn = free[torch.randperm(len(free), generator=generator)[:sample]]
        gains = torch.cat([greedy.gains(part) for part in drawn.split(distances.block)])
        best = int(gains.argmax())
        left[drawn[best]] = False
        greedy.take(int(drawn[best]), float(gains[best]))
    return greedy.chosen()


def greedi(
    distances: Distances, num_chosen: int, seed: int | torch.Generator = 0, num_parts: int = 4, radius: float = 0.0
) -> Chosen:
    """Choose `num_chosen` points among those that greedy chooses in each of `num_parts` random parts of the points.

    What is chosen in the end is the best of the merged choice and of each part's own, over all points.
    """
    _check_budget(distances, num_chosen)
    order = torch.randperm(len(distances), generator=drawn_from(seed))
    parts = [part for part in order.chunk(num_parts) if len(part)]
    local = [part[lazy_greedy(distances.part(part), min(num_chosen, len(part))).indices] for part in parts]
    merged = _greedy_among(distances, torch.cat(local), num_chosen, radius)
    candidates = [merged, *(_greedy_among(distances, chosen, num_chosen, radius) for chosen in local)]
    return min(candidates, key=lambda found: found.total_distance)


def _check_budget(distances: Distances, num_chosen: int) -> None:
    if not 1 <= num_chosen <= len(distances):
        raise UserError(
            f"num_chosen from 1 to the {len(distances)} points is needed; got {num_chosen}; choose fewer, or take all"
        )


def _greedy_among(distances: Distances, candidates: Tensor, num_chosen: int, radius: float) -> Chosen:
    """Plain greedy over few candidates, for the sake of all points."""
    greedy, left = _Greedy(distances), candidates.clone()
    while len(greedy.indices) < num_chosen and len(left) and not greedy.within(radius):
        gains = torch.cat([greedy.gains(part) for part in left.split(distances.block)])
        best = int(gains.argmax())
        greedy.take(int(left[best]), float(gains[best]))
        left = torch.cat([left[:best], left[best + 1 :]])
    return greedy.chosen()


class _Greedy:
    """The points chosen so far and every point's distance to the nearest of them."""

    def __init__(self, distances: Distances) -> None:
        self.distances = distances
        self.indices: list[int] = []
        self._gains: list[float] = []
        self.num_evaluations = 0
        points = distances.points
        self._distance = points.new_full((len(distances),), math.inf)
        self._nearest = torch.zeros(len(distances), dtype=torch.long, device=points.device)
        # Before the first choice every point counts as far as any can be: the order does not depend on the number.
        self._far = 2 * float(distances.squares.max().sqrt()) if distances.metric == "euclidean" else 2.0

    def all_gains(self) -> Tensor:
        everyone = torch.arange(len(self.distances))
        return torch.cat([self.gains(part) for part in everyone.split(self.distances.block)])

    def gains(self, candidates: Tensor) -> Tensor:
        """Return by how much each candidate would lower L."""
        self.num_evaluations += len(candidates)
        now = self._distance.clamp_max(self._far)[:, None]
        columns = self.distances.columns(candidates)
        return torch.sub(now, columns, out=columns).clamp_min_(0.0).sum(0)

    def take(self, index: int, gain: float) -> None:
        column = self.distances.columns(torch.tensor([index])).flatten()
        closer = column < self._distance
        self._nearest[closer] = len(self.indices)
        self._distance = torch.where(closer, column, self._distance)
        self.indices.append(index)
        self._gains.append(gain)

    def within(self, radius: float) -> bool:
        return bool(self.indices) and self.total() <= radius

    def total(self) -> float:
        return float(self._distance.sum(dtype=torch.float64))

    def chosen(self) -> Chosen:
        gains = torch.tensor(self._gains, dtype=torch.float64)
        return Chosen(torch.tensor(self.indices), gains, self._nearest, self.total(), self.num_evaluations)


def _exactly_zero(distances: Tensor, candidates: Tensor) -> Tensor:
    """A point's distance to itself, which rounding would leave at some 1e-4 in fp32."""
    distances[candidates, torch.arange(len(candidates))] = 0.0
    return distances


Greedy = Callable[[Distances, int], Chosen]


def merged(parts: Sequence[tuple[Tensor, Chosen]]) -> tuple[Tensor, Tensor]:
    """Join choices made in parts of the points: (their indices in all points, how many points each stands for).

    >>> part = torch.tensor([5, 7, 9])
    >>> merged([(part, lazy_greedy(Distances(torch.tensor([[0.0], [0.1], [4.0]])), 2))])
    (tensor([7, 9]), tensor([2., 1.]))
    """
    indices = [places[chosen.indices] for places, chosen in parts]
    counts = [torch.bincount(chosen.nearest, minlength=len(chosen.indices)) for _, chosen in parts]
    return torch.cat(indices), torch.cat(counts).to(torch.get_default_dtype())
