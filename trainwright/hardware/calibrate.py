"""Measure this machine → `Cluster`: the file that `--hardware` takes, for predictions about the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from ..artifacts import Cluster, Device, Link, Overheads, Tier, UserError
from ..launch import run_processes
from ..launch.cores import num_cores
from . import machine
from .collectives import GLOO_FACTORS, KINDS, Collective, terms
from .host import host_rates
from .kernels import kernel_table, rounded
from .presets import DISK_LATENCY_S

Row = tuple[Collective, float, float]
"""A measured collective: kind, bytes as in `collectives.seconds`, seconds."""
_TIMEOUT_S = 1800


def calibrate(
    num_processes: int | None = None, quick: bool = False, progress: Callable[[str], None] | None = None
) -> Cluster:
    """Return what `num_processes` processes of this machine reach (`None`: as many as it has cores, four at most).

    They run at once, each with its share of the cores, since they will share the machine when they train. Takes some
    minutes, `quick` some seconds. `progress` is told what is being measured. `UserError` for less than one process.
    """
    num_ranks = min(num_cores(), 4) if num_processes is None else num_processes
    if num_ranks < 1:
        raise UserError(f"at least 1 process is needed to calibrate; got {num_ranks}; try 2")

    def tell(rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and progress is not None:
            progress(event["progress"])

    ranks = run_processes(
        "trainwright.hardware.measure:measure", {"quick": quick}, num_ranks, timeout_s=_TIMEOUT_S, on_event=tell
    )
    return _cluster(ranks, quick)


def fit_ring(rows: Sequence[Row], num_ranks: int) -> tuple[float, float, dict[str, float]]:
    """Return (latency in seconds, bandwidth in bytes/s, factors by kind) of the ring formulas that come nearest to `rows`.

    Nearest in ratio: the sum of squared log(predicted / measured), so that small messages count as much as large ones. Other
    kinds than the gather have a factor: two ranks that share memory meet once for an all-reduce, not twice.

    >>> rows = [("all_gather", 1e3, 1e-4 + 0.5e3 / 1e9), ("all_gather", 1e8, 1e-4 + 0.5e8 / 1e9)]
    >>> latency_s, bandwidth, factors = fit_ring([*rows, ("all_reduce", 1e8, 0.8 * (2e-4 + 1e8 / 1e9))], num_ranks=2)
    >>> round(latency_s, 9), round(bandwidth / 1e9, 6), factors
    (0.0001, 1.0, {'all_reduce': 0.8})
    """
    import numpy as np
    from scipy.optimize import least_squares

    found = [terms(kind, num_ranks) for kind, _, _ in rows]
    hops = np.array([num_hops for num_hops, _ in found])
    volumes = np.array([fraction * num_bytes for (_, fraction), (_, num_bytes, _) in zip(found, rows)])
    log_measured = np.log([measured_s for _, _, measured_s in rows])
    others = [kind for kind in KINDS if kind != "all_gather" and any(row[0] == kind for row in rows)]
    is_of = np.array([[float(row[0] == kind) for kind in others] for row in rows])

    def residuals(logs: Any) -> Any:
        return np.log(hops * np.exp(logs[0]) + volumes * np.exp(logs[1])) + is_of @ logs[2:] - log_measured

    start = [np.min(log_measured - np.log(hops)), np.min(log_measured - np.log(volumes)), *(0.0 for _ in others)]
    latency_s, seconds_per_byte, *factors = np.exp(least_squares(residuals, start).x)
    return float(latency_s), float(1 / seconds_per_byte), {k: rounded(float(f)) for k, f in zip(others, factors)}


def _fit_memory(rows: Sequence[Row], num_ranks: int) -> tuple[float, float, dict[str, float]]:
    """The same for ranks that share memory, but for the kind that is sent even so: a factor for its large messages alone."""
    from ..launch.shared_memory import LEAST_BYTES

    latency_s, bandwidth, factors = fit_ring([row for row in rows if row[0] != "all_to_all"], num_ranks)
    ratios = []
    for kind, num_bytes, measured_s in rows:
        if kind == "all_to_all" and num_bytes >= LEAST_BYTES:
            num_hops, fraction = terms(kind, num_ranks)
            ratios.append(measured_s / (num_hops * latency_s + fraction * num_bytes / bandwidth))
    return latency_s, bandwidth, {**factors, "all_to_all": rounded(max(1.0, statistics.median(ratios)))}


def _cluster(ranks: list[dict[str, Any]], quick: bool) -> Cluster:
    num_ranks = len(ranks)
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=machine.memory_bytes() // num_ranks,
        flops_per_s=_median_by_dtype(ranks, "matmul"),
        conv_flops_per_s=_median_by_dtype(ranks, "conv"),
        bandwidth_bytes_per_s=rounded(statistics.median(rank["bandwidth"] for rank in ranks)),
        launch_s=rounded(statistics.median(rank["launch_s"] for rank in ranks)),
        kernels=kernel_table([rank["kernels"] for rank in ranks]),
        overheads=Overheads(
            **{
                name: rounded(statistics.median(rank["overheads"][name] for rank in ranks))
                for name in ranks[0]["overheads"]
            }
        ),
    )
    rows = [row for rank in ranks for row in rank["collectives"]]
    latency_s, bandwidth, factors = 0.0, device.bandwidth_bytes_per_s, GLOO_FACTORS
    if rows:
        fit = _fit_memory if all(rank["shares_memory"] for rank in ranks) else fit_ring
        latency_s, bandwidth, factors = fit(rows, num_ranks)
    link = Link(
        name="cpu",
        size=num_ranks,
        bandwidth_bytes_per_s=rounded(bandwidth),
        latency_s=rounded(latency_s),
        factors=factors,
    )
    return Cluster(
        name=f"cpu:{num_ranks}",
        device=device,
        links=(link,),
        offload={
            **_tiers("host", [rank["host"] for rank in ranks]),
            **_tiers("disk", [rank["disk"] for rank in ranks]),
        },
        source=_source(num_ranks, quick),
        fingerprint=machine.fingerprint(),
    )


def _tiers(name: Literal["host", "disk"], found: list[dict[str, float]]) -> dict[Literal["host", "disk"], Tier]:
    """The tier as each rank found it while all used it; none where a rank could not write there."""
    if not all(found):
        return {}
    middle = {what: statistics.median(rank[what] for rank in found) for what in found[0]}
    tier = Tier(
        write_bytes_per_s=rounded(middle["written"]),
        read_bytes_per_s=rounded(middle["read"]),
        latency_s=rounded(middle["latency_s"]) if "latency_s" in middle else DISK_LATENCY_S,
        overlap=round(middle["overlap"], 3),
        commit_s=rounded(middle.get("commit_s", 0.0)),
    )
    return {name: tier}


def with_host(cluster: Cluster, quick: bool = False, device: str = "cuda") -> Cluster:
    """Return the cluster with the rates that copies between `device` and this machine's host reach; the rest stays as it is.

    >>> from trainwright.hardware import resolve
    >>> found = with_host(resolve("h100"), quick=True, device="cpu")
    >>> found.device == resolve("h100").device, found.tier("host").read_bytes_per_s > 1e6
    (True, True)

    On a machine with several GPUs one is measured, alone: those that share a link reach less together. `UserError` where the host
    has no room for the copies.
    """
    if not (rates := host_rates(quick, device)):
        raise UserError(
            "room for 64 MiB on the device and in the host's memory is needed to measure copies; there is none; free some"
        )
    source = f"{cluster.source}; host: calibrate --gpu, {datetime.now(UTC).date().isoformat()}"
    tiers = {**cluster.offload, **_tiers("host", [rates])}
    return cluster.model_copy(update={"offload": tiers, "source": source})


def _median_by_dtype(ranks: list[dict[str, Any]], what: str) -> dict[str, float]:
    return {dtype: rounded(statistics.median(rank[what][dtype] for rank in ranks)) for dtype in ranks[0][what]}


def _source(num_ranks: int, quick: bool) -> str:
    import torch

    how = "calibrate --quick" if quick else "calibrate"
    threads = max(1, num_cores() // num_ranks)
    date = datetime.now(UTC).date().isoformat()
    return f"{how}, {date}: {machine.cpu_name()}, {num_ranks} x {threads} threads, torch {torch.__version__}, gloo"
