"""Decides which examples each batch of a run has, for loaders and for `train` alike.

The order depends on (seed, index of the batch) alone, so that a resumed run sees the same batches as an uninterrupted one,
and a script with `plan.sampler` the same as `trainwright train` with the same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...artifacts import UserError
from ...rank.randomness import derived_seed

LAST = ("drop", "short", "pad")


class ExampleOrder:
    """Gives, for each batch of a run, the positions of its examples in a list of `num_examples`; epochs are whole batches.

    shuffle: whether each epoch has another order, drawn from `seed`. last: the treatment of the examples that do not fill a
    batch: `drop` leaves them out of this epoch (other ones each time, if shuffled), `short` makes a smaller batch of them, `pad`
    fills the batch with the position `num_examples`, which is no example's. since: the index of the first epoch's first batch.

    Raises `UserError` for an unknown `last`, and for fewer examples than a batch with `last="drop"`.

    >>> order = ExampleOrder(10, 4, shuffle=False)
    >>> order.num_batches, order.batch(1), order.batch(2)
    (2, [4, 5, 6, 7], [0, 1, 2, 3])
    >>> ExampleOrder(5, 4, shuffle=False, last="pad").batch(1)
    [4, 5, 5, 5]
    >>> ExampleOrder(6, 4, shuffle=False, last="short").batch(1)
    [4, 5]
    """

    def __init__(
        self, num_examples: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, last: str = "drop",
        since: int = 0,
    ) -> None:  # fmt: skip
        if last not in LAST:
            raise UserError(f"last must be one of {', '.join(LAST)}; got {last!r}; choose one of these")
        self.num_examples, self.batch_size, self.seed, self.shuffle, self.since = (
            num_examples, batch_size, seed, shuffle, since
        )  # fmt: skip
        self.num_batches = num_examples // batch_size if last == "drop" else -(-num_examples // batch_size)
        rest = num_examples - (self.num_batches - 1) * batch_size
        self.num_last = rest if last == "short" else batch_size
        """The number of positions in the last batch of an epoch."""
        self._check()
        self._known: tuple[int, Tensor] | None = None

    def _check(self) -> None:
        if self.num_batches == 0:
            raise UserError(
                f"at least {self.batch_size} examples are needed for a batch of this plan; the dataset has "
                f"{self.num_examples}; take last='short', or plan for a smaller batch"
            )

    def epoch_of(self, step: int) -> int:
        """Return the index of the epoch to which the batch `step` belongs."""
        return (step - self.since) // self.num_batches

    def batch(self, step: int) -> list[int]:
        """Return the positions of batch `step`'s examples."""
        epoch, number = divmod(step - self.since, self.num_batches)
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self._epoch(epoch)
        return self._known[1][number * self.batch_size : (number + 1) * self.batch_size].tolist()

    def _epoch(self, epoch: int) -> Tensor:
        """Return the positions of all batches of an epoch, concatenated."""
        size = (self.num_batches - 1) * self.batch_size + self.num_last
        order = self._permutation(epoch) if self.shuffle else torch.arange(self.num_examples)
        return torch.cat([order, torch.full((max(size - len(order), 0),), self.num_examples)])[:size]

    def _permutation(self, epoch: int) -> Tensor:
        return torch.randperm(self.num_examples, generator=self._generator(epoch))

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, f"epoch {epoch} since {self.since}"))


class SubsetOrder(ExampleOrder):
    """The order of a subset of any size: always shuffled, never padded, with at least one batch an epoch.

    weights: without them, each example occurs once in an epoch (unless `drop` leaves it out; more often if the subset is
    smaller than a batch). With weights w, batches are sampled: of an epoch's m rows example j gets m·w_j / Σw, rounded down or
    up, and exactly that on average (systematic sampling).

    >>> order = SubsetOrder(2, 4, weights=torch.tensor([3.0, 1.0]))
    >>> sorted(order.batch(0))
    [0, 0, 0, 1]

    Source of the sampling: Madow 1944, On the Theory of Systematic Sampling.
    """

    def __init__(
        self, num_examples: int, batch_size: int, *, seed: int = 0, weights: Tensor | None = None, since: int = 0
    ) -> None:
        super().__init__(num_examples, batch_size, seed=seed, since=since)
        self._edges = None if weights is None else weights.double().cumsum(0)

    def _check(self) -> None:
        self.num_batches = max(self.num_batches, 1)

    def _epoch(self, epoch: int) -> Tensor:
        size, generator = self.num_batches * self.batch_size, self._generator(epoch)
        if self._edges is None:
            rounds = -(-size // self.num_examples)
            return torch.cat([torch.randperm(self.num_examples, generator=generator) for _ in range(rounds)])[:size]
        shift = torch.rand((), generator=generator, dtype=torch.float64)
        points = (shift + torch.arange(size)) / size * self._edges[-1]
        drawn = torch.searchsorted(self._edges, points, right=True).clamp_max(self.num_examples - 1)
        return drawn[torch.randperm(size, generator=generator)]
