"""Artifacts made by hand for the tests of the reports and the command line; names in them try to break out of HTML."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.artifacts import (
    Alternative,
    BatchEntry,
    Cluster,
    Device,
    ExplainedDecision,
    Explanation,
    Fit,
    Link,
    MemoryPoint,
    ModelRef,
    ModuleCost,
    OpCost,
    OpPlan,
    ParamPlan,
    Plan,
    Predicted,
    Profile,
    Refusal,
    Remedy,
    Report,
    SolverInfo,
    SweepPoint,
)

MIB = 2**20
EVIL = '</script><img src=x onerror="window.hacked=1"><b>x</b>'


def profile(**changes: object) -> Profile:
    """Two blocks alike and one that differs; 100 MiB of parameters; a peak of 900 MiB at event 30."""
    block = {"type": "Block", "num_params": 10, "param_bytes": 40 * MIB, "saved_bytes": 100 * MIB, "num_ops": 5}
    inner = {"type": "Linear", "num_params": 8, "param_bytes": 30 * MIB, "saved_bytes": 40 * MIB, "num_ops": 2}
    block |= {"at_peak_bytes": {"param": 30 * MIB, "saved": 160 * MIB}, "forward_s": 0.01, "backward_s": 0.02}
    inner |= {"at_peak_bytes": {"param": 30 * MIB, "saved": 60 * MIB}, "forward_s": 0.004, "backward_s": 0.01}
    whole = {"param": 100 * MIB, "optimizer": 200 * MIB, "saved": 540 * MIB, "other": 60 * MIB}
    modules = [
        ModuleCost(
            path="",
            type="Net",
            num_params=30,
            param_bytes=100 * MIB,
            saved_bytes=350 * MIB,
            forward_flops=10**9,
            forward_s=0.04,
            backward_s=0.08,
            at_peak_bytes=whole,
        ),
        ModuleCost(
            path="h",
            type="ModuleList",
            num_params=25,
            param_bytes=95 * MIB,
            saved_bytes=250 * MIB,
            forward_s=0.03,
            backward_s=0.06,
            at_peak_bytes={"param": 90 * MIB, "saved": 480 * MIB},
        ),
        ModuleCost(path="h.0", **block),
        ModuleCost(path="h.0.fc", **inner),
        ModuleCost(path="h.1", **block),
        ModuleCost(path="h.1.fc", **inner),
        ModuleCost(path="h.2", **{**block, "saved_bytes": 50 * MIB}),
        ModuleCost(path="h.2.fc", **inner),
        ModuleCost(path="head", type=f"Head{EVIL}", num_params=5, param_bytes=5 * MIB, num_ops=1),
    ]
    fields = {
        "model": f"net {EVIL}",
        "num_params": 30,
        "param_bytes": 100 * MIB,
        "grad_bytes": 100 * MIB,
        "optimizer_bytes": 200 * MIB,
        "saved_bytes": 350 * MIB,
        "peak_bytes": 900 * MIB,
        "peak_at": "backward: aten.mm.default in head",
        "breakdown": whole,
        "forward_flops": 2 * 10**12,
        "backward_flops": 4 * 10**12,
        "other_flops": 10**9,
        "num_ops": 60,
        "capture_s": None,
        "profile_s": 0.5,
        "modules": tuple(modules),
        "ops": ops(),
        "timeline": tuple(timeline()),
        "notes": (f"autocast to {EVIL}",),
    }
    return Profile(**{**fields, **changes})


def asked_profile() -> Profile:
    """The profile with a predicted time, and with answers to `--fits 800MiB` and `--sweep batch-size`."""
    timed = tuple(point.model_copy(update={"time_s": 0.002}) for point in timeline())
    return profile(step_s=0.12, timeline=timed, fit=fit(), sweep=sweep())


def ops() -> tuple[OpCost, ...]:
    return (
        OpCost(op="aten.mm", path="h.*.fc", phase="backward", calls=6, flops=3 * 10**12, moved_bytes=MIB, time_s=0.05),
        OpCost(
            op="aten.mul", path=f"h.* {EVIL}", phase="forward", calls=90, flops=10, moved_bytes=9 * MIB, time_s=0.02
        ),
    )


def fit() -> Fit:
    """900 MiB do not fit into 800 MiB; a batch of 3 does."""
    return Fit(
        budget_bytes=800 * MIB,
        fits=False,
        remedies=(
            Remedy(name=f"autocast {EVIL}", peak_bytes=850 * MIB, saving_bytes=50 * MIB, fits=False, step_s=0.06),
            Remedy(
                name="batch size 3",
                peak_bytes=700 * MIB,
                saving_bytes=200 * MIB,
                fits=True,
                step_s=0.09,
                options=("--batch-size 3",),
            ),
        ),
        not_tried=(f"gradient checkpointing: {EVIL}",),
        largest_that_fits={"batch-size": 3},
    )


def sweep() -> tuple[SweepPoint, ...]:
    return tuple(
        SweepPoint(
            axis="batch-size",
            value=size,
            peak_bytes=(300 + 150 * size) * MIB,
            saved_bytes=90 * size * MIB,
            forward_flops=size * 10**11,
            backward_flops=size * 2 * 10**11,
            step_s=0.03 * size,
        )
        for size in (1, 2, 3, 4, 8)
    )


def timeline() -> list[MemoryPoint]:
    """60 events: up to 900 MiB at event 30, then down."""
    points = []
    for event in range(60):
        saved = (event if event <= 30 else 60 - event) * 18 * MIB
        phase = "forward" if event < 30 else "backward" if event < 50 else "update"
        points.append(
            MemoryPoint(
                phase=phase,
                op=f"aten.mm.default {EVIL}" if event == 40 else "aten.mm.default",
                path=f"h.{event % 3}",
                live_bytes=360 * MIB + saved,
                param_bytes=100 * MIB,
                optimizer_bytes=200 * MIB,
                saved_bytes=saved,
            )
        )
    return points


@dataclass(frozen=True)
class Simulation:
    """As the planner's."""

    timeline: list[MemoryPoint]
    breakdown: dict[str, int]
    peak_bytes: int


def simulation() -> Simulation:
    return Simulation(timeline(), {"param": 100 * MIB}, 900 * MIB)


def explanation() -> Explanation:
    def row(op: str, comm_s: float, size: int, other: Alternative | None) -> ExplainedDecision:
        return ExplainedDecision(op, False, ("b", "-"), 0.1, comm_s, size * MIB, "", "", other)

    rows = (
        row("h.{0-2}.fc:linear", 0.02, 18, Alternative(("b", "i"), 0.004)),
        row("h.{0-2}.fc:gelu", 0.0, 9, Alternative(("-", "-"), -0.002)),
        row("head:linear", 0.0, 9, None),
    )
    return Explanation(plan(), rows)


def cluster(num_devices: int = 4) -> Cluster:
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=2**34,
        flops_per_s={"fp32": 5e10},
        bandwidth_bytes_per_s=1e10,
        launch_s=4e-6,
    )
    links = (Link(name="cpu", size=num_devices, bandwidth_bytes_per_s=1e9, latency_s=1e-4),)
    return Cluster(name=f"cpu:{num_devices}", device=device, links=links, source="by hand")


def plan(solver: str = "joint", step_s: float = 0.2, peak_bytes: int = 900 * MIB, **changes: object) -> Plan:
    """A plan on 2 × 2 ranks with a budget of 1000 MiB."""
    fields = {
        "model": ModelRef(name="net", spec="zoo:gpt2-tiny", options={"batch_size": 8}),
        "fingerprint": "f00",
        "torch_version": "2.13.0",
        "batch": {"x": BatchEntry(shape=(8, 16), dtype="int64", layout=("S0", "R"))},
        "cluster": cluster(),
        "budget_bytes": 1000 * MIB,
        "mesh": {"node": 2, "gpu": 2},
        "predicted": Predicted(
            step_s=step_s,
            compute_s=0.6 * step_s,
            comm_s=0.4 * step_s,
            exposed_comm_s=0.3 * step_s,
            recompute_s=0.1 * step_s,
            peak_bytes=peak_bytes,
            fits_in_bytes=peak_bytes + MIB,
            breakdown={"param": 100 * MIB, "saved": 540 * MIB},
            comm_bytes={"all_reduce": 50 * MIB},
        ),
        "solver": SolverInfo(name=solver, status="optimal", gap=0.0008, solve_s=0.3, plan_s=1.25),
        "params": {
            "h.{0-2}.fc.weight": ParamPlan(layout=("R", "S0")),
            "wte.weight": ParamPlan(layout=("S1.1/3.12.64", "S0")),
        },
        "modules": {
            "emb:embedding": OpPlan(split=("b", "-")),
            "h.{0-2}.fc:linear": OpPlan(split=("b", "o"), recomputed={"out": "0-1"}),
            "h.{0-2}.fc:gelu": OpPlan(split=("b", "o"), recomputed={"out": "all"}, offloaded={"internal": "all"}),
            "head:linear": OpPlan(split=("-", "-")),
        },
        "notes": (f"a note {EVIL}",),
    }
    return Plan(**{**fields, **changes})


def comparison() -> dict[str, Plan | Refusal]:
    return {
        "ddp": Refusal("1200 MiB are needed; 1000 MiB are there; give 200 MiB more"),
        "fsdp": plan("fsdp", step_s=0.25),
        "megatron": plan("megatron", step_s=0.4),
        "two-stage": plan("two-stage", step_s=0.22),
        "joint": plan(),
    }


def frontier() -> list[Plan]:
    """Three plans, the smallest first; the last is `plan()`."""
    return [plan(step_s=0.3, peak_bytes=500 * MIB), plan(step_s=0.25, peak_bytes=700 * MIB), plan()]


def report(passed: bool = True) -> Report:
    error = 2e-13 if passed else 3e-4
    return Report(
        num_ranks=4,
        dtype="float64",
        max_relative_error_loss=1e-16,
        max_relative_error_gradient=error,
        worst_gradient="h.1.fc.weight",
        bar_loss=1e-9,
        bar_gradient=1e-9,
        passed=passed,
        predicted_peak_bytes=900 * MIB,
        peak_bytes=(890 * MIB, 880 * MIB, 885 * MIB, 870 * MIB),
        budget_bytes=1000 * MIB,
        step_s=0.21,
        predicted_step_s=0.2,
    )
