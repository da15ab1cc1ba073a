"""Where to train: plans for several kinds of hardware, and what they come to in rates, hours and money.

offers_of(plan_of, hardware)   a plan for each, or why there is none → `Offers`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .artifacts import Cluster, Offer, Offers, Plan, Refusal, UserError
from .artifacts.offers import num_examples, num_tokens

if TYPE_CHECKING:
    from .prices import Prices

_SECONDS = 3600.0


def offers_of(
    plan_of: Callable[[Cluster], Plan],
    hardware: Sequence[tuple[str, Cluster]],
    prices: Prices | None = None,
    tokens: float | None = None,
    samples: float | None = None,
) -> Offers:
    """Return what `plan_of` finds for each of `hardware`, names as they were given with their clusters.

    tokens or samples: how much is to be trained on, for hours and cost. Raises `UserError` where a price is missing, before
    anything is planned; `Refusal` where nothing fits anywhere, with the reasons.
    """
    if tokens is not None and samples is not None:
        raise UserError("one of tokens and samples is needed; got both; leave one out")
    if not hardware:
        raise UserError("hardware is needed to plan for; got none; name some, such as 8xa100 and 8xh100")
    if prices is not None:
        prices.check(hardware)
    found = [_offer(plan_of, text, cluster) for text, cluster in hardware]
    plan = next((offer.plan for offer in found if offer.plan is not None), None)
    if plan is None:
        raise Refusal("; ".join(f"{offer.hardware}: {offer.refusal}" for offer in found))
    finished = [
        _priced(offer, cluster, text, prices, tokens, samples) for offer, (text, cluster) in zip(found, hardware)
    ]
    return Offers(
        model=plan.model.name,
        optimizer=plan.optimizer,
        currency="" if prices is None else prices.currency,
        tokens=tokens,
        samples=samples,
        offers=tuple(finished),
    )


def check_tokens(tokens: float | None, batch: Any) -> None:
    """Raise `UserError` where tokens are to be counted and the batch has none."""
    from .models.batches import num_tokens

    if tokens is not None and num_tokens(batch) is None:
        raise UserError(
            "a batch of token numbers, rows by length, is needed to count tokens; this has none; say samples"
        )


def _offer(plan_of: Callable[[Cluster], Plan], text: str, cluster: Cluster) -> Offer:
    try:
        return Offer(hardware=text, num_devices=cluster.num_devices, plan=plan_of(cluster))
    except Refusal as refusal:
        return Offer(hardware=text, num_devices=cluster.num_devices, refusal=str(refusal))


def _priced(
    offer: Offer, cluster: Cluster, text: str, prices: Prices | None, tokens: float | None, samples: float | None
) -> Offer:
    """Return the offer with its rates, and with prices its money; one without a plan has its price alone."""
    price = None if prices is None else prices.of(cluster, text)
    if offer.plan is None:
        return offer.model_copy(update={"price_per_hour": price})
    step_s, in_tokens = offer.plan.predicted.step_s, num_tokens(offer.plan)
    samples_per_s = num_examples(offer.plan) / step_s
    tokens_per_s = None if in_tokens is None else in_tokens / step_s
    hours = None
    if samples is not None:
        hours = samples / samples_per_s / _SECONDS
    elif tokens is not None and tokens_per_s is not None:
        hours = tokens / tokens_per_s / _SECONDS
    return offer.model_copy(
        update={
            "samples_per_s": samples_per_s,
            "tokens_per_s": tokens_per_s,
            "price_per_hour": price,
            "samples_per_price": None if price is None else samples_per_s * _SECONDS / price,
            "tokens_per_price": None if price is None or tokens_per_s is None else tokens_per_s * _SECONDS / price,
            "hours": hours,
            "cost": None if hours is None or price is None else hours * price,
        }
    )
