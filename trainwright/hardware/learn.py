"""Runs → a corrected `Cluster`: by how much each category of a step took longer than it was predicted to.

    factor of a category = geometric mean over the runs of  (the factor that it was predicted with) · measured / predicted

*compute* multiplies forward, backward and reruns, *update* the optimizer's step, *communication* every change of layout, with
what it copies on the device. The peak is no matter of speed and is left alone: it is simulated, not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..artifacts import Cluster, Learned, Run, UserError

MIN_STEPS = 3
"""Fewer steps of a run than this tell little: the first ones are slower."""
BOUNDS = (1e-3, 1e3)
"""Beyond these it is not the same machine, or not the same work."""


def learn(runs: Sequence[Run]) -> Cluster:
    """Return the cluster that the runs' plans were made for, with factors under which their predictions would have held.

    runs: of `train --json`, at least one, all planned for the same hardware (with or without factors learned before).

    Raises `UserError` when they were planned for different hardware, ran on another machine, or were too short.

    >>> from trainwright.artifacts import Compared, Device, Link
    >>> device = Device(name="x", kind="cpu", memory_bytes=1, flops_per_s={"fp32": 1.0}, bandwidth_bytes_per_s=1.0, launch_s=0)
    >>> cluster = Cluster(name="x", device=device, links=())
    >>> run = Run(model="m", optimizer="sgd", num_ranks=1, num_steps=5, cluster=cluster, fingerprint=None,
    ...           step_s=Compared(predicted=1, measured=2), compute_s=Compared(predicted=1, measured=2))
    >>> learn([run]).device.factors
    {'compute': 2.0, 'update': 2.0}
    """
    if not runs:
        raise UserError(
            "--learn needs a training run; got none; give a file that `trainwright train --json FILE` wrote"
        )
    base = _common(runs)
    for run in runs:
        _check(run)
    compute = _factor([_corrected(run.cluster.device.factors.get("compute", 1.0), run, "compute_s") for run in runs])
    if all(run.update_s is None for run in runs):
        update: float | None = compute  # measured together
    else:
        update = _factor([_corrected(run.cluster.device.factors.get("update", 1.0), run, "update_s") for run in runs])
    comm = _factor([_corrected(run.cluster.device.factors.get("communication", 1.0), run, "comm_s") for run in runs])
    found = {"compute": compute, "update": update, "communication": comm}
    factors = {name: value for name, value in found.items() if value is not None}
    device = base.device.model_copy(update={"factors": factors})
    return base.model_copy(update={"device": device, "learned": tuple(_record(run) for run in runs)})


@dataclass(frozen=True)
class LeftOut:
    """One run, predicted with what the others teach: predicted over measured step, less 1, before and after."""

    model: str
    error_before: float
    error_after: float


def left_out(runs: Sequence[Run]) -> list[LeftOut]:
    """Hold what is learned against runs that it was not learned from: each of `runs` in turn, by the factors of the others.

    The predicted step is scaled as its categories are together. Empty for fewer than two runs.
    """
    if len(runs) < 2:
        return []
    return [_without(run, learn([other for other in runs if other is not run])) for run in runs]


def _without(run: Run, others: Cluster) -> LeftOut:
    parts = {"compute": run.compute_s, "update": run.update_s, "communication": run.comm_s}
    predicted = {name: part.predicted for name, part in parts.items() if part is not None}
    own, now = ({str(name): by for name, by in each.device.factors.items()} for each in (run.cluster, others))
    scaled = sum(seconds * now.get(name, 1.0) / own.get(name, 1.0) for name, seconds in predicted.items())
    whole = sum(predicted.values())
    before, measured = run.step_s.predicted, run.step_s.measured
    after = before * scaled / whole if whole else before
    return LeftOut(run.model, before / measured - 1, after / measured - 1)


def _common(runs: Sequence[Run]) -> Cluster:
    """The hardware of all runs, as it is without what was learned."""
    bases = [unlearned(run.cluster) for run in runs]
    other = next((run for run, base in zip(runs, bases) if base != bases[0]), None)
    if other is not None:
        names = [
            f"{run.model} was for {run.cluster.name} ({run.cluster.source or 'by hand'})" for run in (runs[0], other)
        ]
        raise UserError(
            f"runs that were planned for the same hardware are needed; {', '.join(names)}; learn from each alone"
        )
    return bases[0]


def unlearned(cluster: Cluster) -> Cluster:
    """Return the cluster as it was before anything was learned."""
    device = cluster.device.model_copy(update={"factors": {}})
    return cluster.model_copy(update={"device": device, "learned": ()})


def _check(run: Run) -> None:
    if run.num_steps < MIN_STEPS:
        raise UserError(
            f"at least {MIN_STEPS} measured steps are needed to learn from; {run.model} has {run.num_steps}; train longer"
        )
    own = run.cluster.fingerprint
    if own is not None and run.fingerprint is not None and own != run.fingerprint:
        raise UserError(
            f"a run of the machine that the hardware file describes is needed ({own}); that of {run.model} was on another "
            f"({run.fingerprint}); calibrate there, plan for that file, and train again"
        )
    ratios = {name: _ratio(run, name) for name in ("compute_s", "comm_s", "update_s")}
    for name, ratio in ratios.items():
        if ratio is not None and not BOUNDS[0] <= ratio <= BOUNDS[1]:
            raise UserError(
                f"predictions within {BOUNDS[1]:g} times of what was measured are needed to be corrected; {name} of {run.model} "
                f"was {ratio:.3g} times the predicted; run `trainwright calibrate` on this machine, and plan for its file"
            )


def _ratio(run: Run, name: str) -> float | None:
    found = getattr(run, name)
    return (
        found.measured / found.predicted if found is not None and found.predicted > 0 and found.measured > 0 else None
    )


def _corrected(before: float, run: Run, name: str) -> float:
    """The factor that this run calls for; NaN where it says nothing of the category."""
    ratio = _ratio(run, name)
    return before * ratio if ratio is not None else math.nan


def _factor(found: Sequence[float]) -> float | None:
    known = [value for value in found if not math.isnan(value)]
    return float(f"{math.exp(sum(map(math.log, known)) / len(known)):.4g}") if known else None


def _record(run: Run) -> Learned:
    parts = {"step": run.step_s, "compute": run.compute_s, "communication": run.comm_s, "update": run.update_s}
    known = {name: part for name, part in parts.items() if part is not None}
    return Learned(
        model=run.model,
        optimizer=run.optimizer,
        num_ranks=run.num_ranks,
        num_steps=run.num_steps,
        fingerprint=run.fingerprint,
        predicted_s={name: part.predicted for name, part in known.items()},
        measured_s={name: part.measured for name, part in known.items()},
    )
