"""The options of `plan` that ask where to train: several kinds of hardware, their prices, and how much is to be trained on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts import Cluster, Offers, Plan, UserError, parse_count
from ..hardware import resolve
from ..offering import check_tokens, offers_of
from ..prices import Prices

PANEL = "Where to train"
PriceOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", rich_help_panel=PANEL,
        help="Your prices of an hour, TOML or JSON: device_hour by device, hour by hardware, currency.",
    ),
]  # fmt: skip
TokensOption = Annotated[
    str | None,
    typer.Option(metavar="N", rich_help_panel=PANEL, help="How long, and for how much: 300B, 1.5e9 tokens."),
]
SamplesOption = Annotated[
    str | None, typer.Option(metavar="N", rich_help_panel=PANEL, help="The same in examples."),
]  # fmt: skip


@dataclass(frozen=True)
class OffersQuestion:
    """The kinds of hardware, as they were written, and what is asked of them."""

    hardware: tuple[tuple[str, Cluster], ...]
    prices: Prices | None
    tokens: float | None
    samples: float | None

    @property
    def first(self) -> Cluster:
        """The hardware that was named first."""
        return self.hardware[0][1]

    @property
    def is_asked(self) -> bool:
        """True where more is asked than one plan."""
        return len(self.hardware) > 1 or any(each is not None for each in (self.prices, self.tokens, self.samples))

    def check(self, batch: Any) -> None:
        """Raise `UserError` for what can be told before planning: a price that is missing, tokens that are none."""
        check_tokens(self.tokens, batch)
        if self.prices is not None:
            self.prices.check(self.hardware)

    def offers(self, plan_of: Callable[[Cluster], Plan]) -> Offers:
        """Return the offers."""
        return offers_of(plan_of, self.hardware, self.prices, self.tokens, self.samples)


def ask_for_offers(hardware: str, price: str | None, tokens: str | None, samples: str | None) -> OffersQuestion:
    """Return what is asked of the hardware in `hardware`, names with commas between them; the same name twice counts once."""
    names = list(dict.fromkeys(name.strip() for name in hardware.split(",") if name.strip()))
    if not names:
        raise UserError("hardware is needed; got none; name some, such as 8xh100 or 8xa100,8xh100")
    if tokens is not None and samples is not None:
        raise UserError("one of --tokens and --samples is needed; got both; leave one out")
    return OffersQuestion(
        tuple((name, resolve(name)) for name in names),
        None if price is None else Prices.read(price),
        None if tokens is None else parse_count(tokens),
        None if samples is None else parse_count(samples),
    )


def write_plans(offers: Offers, path: str) -> list[str]:
    """Write each plan into the folder `path`, named by its hardware, and return the files."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"a folder for the plans is needed; {path} is none ({error.strerror}); name another") from None
    files = []
    for offer in offers.offers:
        if offer.plan is not None:
            name = re.sub(r"[^\w.-]+", "-", offer.hardware.removesuffix(".json")).strip("-.")
            files.append(f"{path}/{name}.json")
            offer.plan.to_json(files[-1])
    return files
