"""A plan of streamed blocks for the terminal."""

from __future__ import annotations

from ..artifacts import StreamPlan
from .units import format_bytes, format_s


def stream_table(plan: StreamPlan) -> str:
    """Return what rests where, what a step takes, and what binds it."""
    predicted = plan.predicted
    waits = {"they take": predicted.compute_s, "reads take": predicted.read_s, "writes take": predicted.written_s}
    binds = max(waits, key=lambda name: waits[name])
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    stored = "" if plan.storage is None else f" in {plan.storage}"
    forwards = f"two forwards and their directions take {format_s(predicted.compute_s)}; {binds} longest"
    rests = f"rest on the {plan.place}{stored}, {format_bytes(plan.block_bytes)} the largest; the others stay"
    held = "three blocks, what stays, activations of two forwards"
    rates = f"{format_s(predicted.read_s)} at the rate of the hardware file"
    rows = [
        ("step", format_s(predicted.step_s), forwards),
        ("peak of the device", f"{format_bytes(predicted.peak_bytes)}{budget}", held),
        ("blocks", f"{len(plan.blocks)} of {plan.num_blocks} stream", rests),
        ("come in", f"{format_bytes(predicted.read_bytes)} a step", rates),
        ("go out", f"{format_bytes(predicted.written_bytes)} a step", format_s(predicted.written_s)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{plan.model.name} · MeZO with streamed blocks · on {plan.hardware}", ""]
    lines += [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {text}".rstrip() for name, value, text in rows]
    return "\n".join(lines)
