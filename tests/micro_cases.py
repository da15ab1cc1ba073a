"""Training in micro-batches on real ranks, called by `tests/program/test_micro_batches.py`; each returns "ok" or what is wrong."""

from __future__ import annotations

from typing import Any

import torch

import trainwright as tw
from tests.models import micro
from trainwright.artifacts import Plan, UserError
from trainwright.runtime.checkpoint.checkpoint import Checkpointer
from trainwright.runtime.module import ParallelModule, full_gradients
from trainwright.runtime.training.train import train_step


def _module(plan: str, name: str, seed: int = 5) -> tuple[ParallelModule, Plan, Any]:
    parsed = Plan.parse(plan)
    model, batch = getattr(micro, name)()
    return tw.parallelize(model, parsed, seed=seed), parsed, batch


def _gradients(plan: str, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    module, parsed, batch = _module(plan, "with_dropout", seed)
    loss = module(*parsed.shard_batch(batch))
    loss.backward()
    return float(loss), dict(full_gradients(module))


def dropout(plan: str, folder: str) -> str:
    """One seed gives one loss, another another; micro-batches of equal rows have masks of their own."""
    first, again, other = (_gradients(plan, seed) for seed in (5, 5, 6))
    if first[0] != again[0] or any(not torch.equal(first[1][key], again[1][key]) for key in first[1]):
        return "the same seed gave something else"
    if first[0] == other[0]:
        return "another seed gave the same"
    module, parsed, batch = _module(plan, "with_dropout")
    alike = tuple(entry[:1].expand_as(entry) for entry in batch)
    step, parts, state = module._begin(parsed.shard_batch(alike), {})
    assert step.accumulator is not None
    losses = [float(flat[0]) for flat in step.accumulator.evaluate(step.sources(state.rest), parts, state)]
    return "ok" if len(set(losses)) == len(losses) else f"equal masks: {losses}"


def resumes(plan: str, folder: str) -> str:
    """Stopped after two steps and resumed, training ends bit for bit where it ends otherwise."""
    final = []
    for stop in (None, 2):
        module, parsed, batch = _module(plan, "with_dropout")
        part = parsed.shard_batch(batch)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for step in range(4):
            if step == stop:
                with Checkpointer(folder, module, optimizer) as kept:
                    kept.save(step)
                module, _, _ = _module(plan, "with_dropout", seed=77)
                optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
                Checkpointer(folder, module, optimizer).load_latest()
            train_step(module, optimizer, part)
        final.append(tw.full_state_dict(module))
    same = all(torch.equal(final[0][key], final[1][key]) for key in final[0])
    return "ok" if same else "a resumed run ended elsewhere"


def evaluates(plan: str, folder: str) -> str:
    """Without gradients, the loss of the whole batch."""
    module, parsed, batch = _module(plan, "uneven_labels")
    alone, _ = micro.uneven_labels()
    with torch.no_grad():
        found, wanted = float(module(*parsed.shard_batch(batch))), float(alone(*batch))
    return "ok" if abs(found - wanted) < 1e-6 else f"{found} against {wanted}"


def second_backward(plan: str, folder: str) -> str:
    """A second backward through one loss is refused, with what to do."""
    module, parsed, batch = _module(plan, "uneven_labels")
    loss = module(*parsed.shard_batch(batch))
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except UserError as error:
        return "ok" if "one backward a step" in str(error) else str(error)
    return "not refused"


def accumulates_by_hand(plan: str, folder: str) -> str:
    """Two scaled backwards add up in `.grad`, as they do without a plan."""
    module, parsed, batch = _module(plan, "uneven_labels")
    alone, _ = micro.uneven_labels()
    for scale in (0.25, 3.0):
        (module(*parsed.shard_batch(batch)) * scale).backward()
        (alone(*batch) * scale).backward()
    found = full_gradients(module)
    worst = max(float((found[name] - p.grad).abs().max()) for name, p in alone.named_parameters() if p.grad is not None)
    return "ok" if worst < 1e-5 else f"gradients differ by {worst}"
