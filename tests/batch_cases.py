"""Batches that a plan does not know, given to a planned module; called by `tests/runtime/test_batch.py` on its ranks."""

from __future__ import annotations

from typing import Any

import torch

import trainwright as tw
from tests.models import batches
from trainwright.artifacts import Plan, UserError


def what_is_refused(plan: str) -> dict[str, str]:
    """Give the module every wrong batch of `batches.WRONG`; what it says of each, nothing where it takes it."""
    parsed = Plan.parse(plan)
    model, batch = batches.masked()
    module = tw.parallelize(model, parsed)
    part = parsed.shard_batch(batch)
    found = {}
    for name, change in batches.WRONG.items():
        wrong = change(dict(part))
        try:
            module(*wrong) if isinstance(wrong, tuple) else module(**wrong)
        except UserError as error:
            found[name] = str(error)
    assert torch.isfinite(module(**part))
    return found


def literal_values(plan: str) -> list[Any]:
    """The loss with the plan's literal given, left out, and one that differs (its refusal)."""
    parsed = Plan.parse(plan)
    model, batch = batches.masked()
    module = tw.parallelize(model, parsed)
    part = parsed.shard_batch(batch)
    given = float(module(**part))
    part.pop("scale")
    return [given, float(module(**part))]
