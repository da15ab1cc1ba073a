"""`Offers`: what training takes on each of several kinds of hardware, in rates, hours and money, each with its plan."""

from __future__ import annotations

import os
from typing import ClassVar

from .plan import Plan, names_of_batch
from .record import Artifact, Record


class Offer(Record):
    """One kind of hardware: the plan for it and what follows from that, or why there is none."""

    hardware: str
    num_devices: int
    plan: Plan | None = None
    refusal: str = ""
    """Why there is no plan."""
    samples_per_s: float | None = None
    """Examples that all devices together train on in a second."""
    tokens_per_s: float | None = None
    """The same in tokens; None where the batch has none."""
    price_per_hour: float | None = None
    """The price of all devices together."""
    samples_per_price: float | None = None
    """Examples for one unit of the currency."""
    tokens_per_price: float | None = None
    hours: float | None = None
    """To train on as much as was asked for."""
    cost: float | None = None
    """The price of those hours."""


class Offers(Artifact):
    """The offers in the order in which they were asked for."""

    has_summary: ClassVar[bool] = False
    model: str
    optimizer: str
    currency: str = ""
    """Empty where no prices were given."""
    tokens: float | None = None
    """The number of tokens to train on."""
    samples: float | None = None
    """The number of examples to train on, where that was asked for."""
    offers: tuple[Offer, ...]

    @property
    def fastest(self) -> Offer | None:
        """The offer of the most examples a second; None where nothing fits anywhere."""
        return max(self._fitting, key=lambda offer: offer.samples_per_s or 0.0, default=None)

    @property
    def cheapest(self) -> Offer | None:
        """The offer of the most examples for the money; None without prices."""
        priced = [offer for offer in self._fitting if offer.samples_per_price is not None]
        return max(priced, key=lambda offer: offer.samples_per_price or 0.0, default=None)

    @property
    def _fitting(self) -> list[Offer]:
        return [offer for offer in self.offers if offer.plan is not None]

    def table(self) -> str:
        """Return the offers for the terminal."""
        from ..reports.offers import offers_table

        return offers_table(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same as a page that stands alone."""
        from ..reports.offers import write_offers

        write_offers(self, path)


def num_examples(plan: Plan) -> int:
    """Return how many examples the batch of a plan holds, all devices together."""
    return next((entry.shape[0] for entry in plan.batch.values() if entry.shape), 1)


def num_tokens(plan: Plan) -> int | None:
    """Return how many tokens it holds: rows times columns of its first entry of whole numbers with a row an example.

    None where there is no such entry.
    """
    own = names_of_batch({name: entry.shape for name, entry in plan.batch.items()})
    found = (
        entry.shape[0] * entry.shape[1]
        for name, entry in plan.batch.items()
        if name in own and len(entry.shape) == 2 and entry.dtype.removeprefix("torch.") in ("int64", "int32")
    )
    return next(found, None)
