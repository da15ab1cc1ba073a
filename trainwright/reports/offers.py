"""Offers, hardware by hardware: a table for the terminal, and the same as a page."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from rich.text import Text

from ..artifacts import Offer, Offers
from ..artifacts.offers import num_examples
from ..artifacts.record import write_atomically
from .decisions import micro_batches_text
from .page import Page, best_mark, folded, table
from .sections import notes_section
from .text import plain_table, rendered, title_line
from .units import format_bytes, format_count, format_s

__all__ = ["format_hours", "offers_table", "write_offers"]
_DASH = "–"


def offers_table(offers: Offers) -> str:
    """Return the offers for the terminal, in the order asked for, the fastest and the cheapest marked."""
    columns = _columns(offers)
    grid = plain_table(*columns, right=columns[1:-1], drop=("mesh", "peak", "step"))
    for offer in offers.offers:
        grid.add_row(*_cells(offers, offer), _mark(offers, offer))
    return rendered(_title(offers), grid, *(Text(text) for text in _refusals(offers)))


def write_offers(offers: Offers, path: str | os.PathLike[str]) -> None:
    """Write the offers as a page: the table, and each plan's prediction under it."""
    page = Page(offers.model, _title(offers).plain.partition(" · ")[2])
    columns = _columns(offers)
    rows = [[escape(cell) for cell in _cells(offers, offer)] + [_badge(offers, offer)] for offer in offers.offers]
    card = f'<div class="card">{table(columns, rows, numbers=range(1, len(columns) - 1))}</div>'
    page.section("Where to train", card, lead="All devices of a row together; predicted, one plan a row.")
    plans = [folded(f"<code>{escape(offer.hardware)}</code>", _plan_details(offer)) for offer in offers.offers]
    page.section("The plans", *plans)
    notes_section(page, _refusals(offers))
    write_atomically(Path(path), page.html())


def format_hours(hours: float | None) -> str:
    """Return a long duration.

    >>> format_hours(0.5), format_hours(30.0), format_hours(1000.0), format_hours(None)
    ('30.0 min', '30.0 h', '41.7 days', '–')
    """
    if hours is None:
        return _DASH
    for unit, size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600)):
        if hours >= size * (3 if unit == "days" else 1):
            return f"{hours / size:,.3g} {unit}" if hours / size >= 1000 else f"{hours / size:.1f} {unit}"
    return f"{hours * 3600:.2g} s"


def _title(offers: Offers) -> Text:
    asked = [f"{format_count(offers.tokens)} tokens"] if offers.tokens is not None else []
    asked += [f"{format_count(offers.samples)} examples"] if offers.samples is not None else []
    return title_line(offers.model, offers.optimizer, f"{len(offers.offers)} kinds of hardware", *asked)


def _in_tokens(offers: Offers) -> bool:
    return any(offer.tokens_per_s is not None for offer in offers.offers)


def _unit(offers: Offers) -> str:
    return "tokens" if _in_tokens(offers) else "examples"


def _columns(offers: Offers) -> list[str]:
    columns = ["hardware", "batch", f"{_unit(offers)}/s", "step", "peak", "mesh"]
    if offers.currency:
        columns.append(f"{_unit(offers)}/{offers.currency}")
    if offers.tokens is not None or offers.samples is not None:
        columns += ["time"] + ([offers.currency] if offers.currency else [])
    return [*columns, ""]


def _cells(offers: Offers, offer: Offer) -> list[str]:
    """The cells of a row but for the last."""
    plan = offer.plan
    if plan is None:
        return [offer.hardware, *[_DASH] * (len(_columns(offers)) - 2)]
    rate, per_price = (
        (offer.tokens_per_s, offer.tokens_per_price)
        if _in_tokens(offers)
        else (offer.samples_per_s, offer.samples_per_price)
    )
    size = num_examples(plan)
    batch = f"{size // plan.micro_batches}×{plan.micro_batches}" if plan.micro_batches > 1 else str(size)
    cells = [offer.hardware, batch, format_count(rate), format_s(plan.predicted.step_s)]
    cells += [format_bytes(plan.predicted.peak_bytes), "×".join(map(str, plan.mesh.values()))]
    if offers.currency:
        cells.append(format_count(per_price))
    if offers.tokens is not None or offers.samples is not None:
        cells += [format_hours(offer.hours)] + ([_money(offer.cost)] if offers.currency else [])
    return cells


def _money(amount: float | None) -> str:
    return _DASH if amount is None else f"{amount:,.2f}" if amount < 1000 else f"{amount:,.0f}"


def _words(offers: Offers, offer: Offer) -> str:
    words = ["fastest"] if offer is offers.fastest else []
    return ", ".join([*words, *(["cheapest"] if offer is offers.cheapest else [])])


def _mark(offers: Offers, offer: Offer) -> Text:
    return Text("does not fit", style="red") if offer.plan is None else Text(_words(offers, offer), style="green")


def _badge(offers: Offers, offer: Offer) -> str:
    if offer.plan is None:
        return '<span class="wrong">does not fit</span>'
    words = _words(offers, offer)
    return best_mark(words) if words else ""


def _refusals(offers: Offers) -> list[str]:
    return [f"{offer.hardware}: {offer.refusal}" for offer in offers.offers if offer.plan is None]


def _plan_details(offer: Offer) -> str:
    if offer.plan is None:
        return f"<p>{escape(offer.refusal)}</p>"
    plan, predicted = offer.plan, offer.plan.predicted
    rows = [
        ("mesh", " × ".join(f"{name} {size}" for name, size in plan.mesh.items())),
        ("batch", ", ".join((f"{num_examples(plan)} examples", *micro_batches_text(plan)))),
        ("step", format_s(predicted.step_s)),
        ("compute", format_s(predicted.compute_s)),
        ("communication exposed", format_s(predicted.exposed_comm_s)),
        ("recomputation", format_s(predicted.recompute_s)),
        ("peak per device", format_bytes(predicted.peak_bytes)),
        ("found", plan.verdict),
        *(("note", note) for note in plan.notes),
    ]
    return table(("", ""), [(escape(name), escape(value)) for name, value in rows])
