"""Names of hardware → `Cluster`: `cpu:4`, `h200`, `8xh200`, `2x8xh100`, or a JSON file from `calibrate` or by hand.

sheets.py holds what the vendors' data sheets state; what a program reaches is a fraction of it, stated once in
`_sheet_device`. A preset is a starting point: a file written for the machine at hand predicts better.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping

from ..artifacts import Cluster, Device, Link, Overheads, Tier, UserError
from ..artifacts.cluster import AttentionRate
from ..launch.cores import num_cores
from . import machine
from .collectives import GLOO_FACTORS
from .sheets import REORDER_BYTES_PER_CLOCK, SHEETS, UNITS, Kind, Sheet

GRAMMAR = "cpu:N, [[NODESx]Nx]DEVICE[@NETWORK] such as h200, 8xh200, 2x8xh100 or 2x8xh100@100Gbit, or a JSON file"
_TERA, _GIGA, _GIB = 1e12, 1e9, 2**30


def resolve(text: str) -> Cluster:
    """Return the cluster that `text` names.

    `cpu:N` is N processes on this machine; `h200`, `8xh200` and `2x8xh100` are one device, a node of 8, and 2 nodes of
    8; `2x8xh100@100Gbit` has nodes of which each is connected by 100 Gbit/s, all its adapters together, in place of those of the
    vendor's own nodes; anything that ends in `.json` or is a path is read as a file. Raises `UserError` for everything else.

    >>> cluster = resolve("2x8xh100")
    >>> cluster.num_devices, [link.name for link in cluster.links]
    (16, ['node', 'gpu'])
    >>> [resolve(f"2x8xh100{network}").links[0].bandwidth_bytes_per_s / 1e9 for network in ("", "@3200Gbit", "@100Gbit")]
    [45.0, 45.0, 1.40625]
    """
    spec = text.strip().lower()
    if match := re.fullmatch(r"cpu(?::(\d+))?", spec):
        return cpu_cluster(_positive(match[1] or "1", text))
    match = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([a-z][a-z0-9-]*)(?:@(\d+(?:\.\d+)?)gbit)?", spec)
    if match and match[3] in DEVICES:
        num_nodes = _positive(match[1], text) if match[1] else None
        return gpu_cluster(match[3], _positive(match[2] or "1", text), num_nodes, _network(match, text))
    if spec.endswith(".json") or "/" in spec or os.path.isfile(text):
        return Cluster.from_json(text)
    raise UserError(f"hardware is needed as {GRAMMAR}; got {text!r}; {_advice(match[3] if match else spec)}")


def preset_called(name: str, memory_bytes: int) -> str:
    """Return the preset of a GPU by the name that its driver gives it, and its memory, which tells apart those of one name.

    >>> preset_called("NVIDIA A100-SXM4-40GB", 42_000_000_000), preset_called("NVIDIA GeForce RTX 3090", 25_000_000_000)
    ('a100-40gb', 'rtx3090')
    """
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    found = [preset for preset in DEVICES if preset.split("-")[0] in words]
    if not found:
        raise UserError(
            f"a preset of {name} is needed to predict for it; there is none; {_advice(words)}; say --hardware"
        )
    longest = max(len(preset.split("-")[0]) for preset in found)
    alike = [preset for preset in found if len(preset.split("-")[0]) == longest]
    of_form = [preset for preset in alike if preset.endswith("pcie") == ("pcie" in words)] or alike
    return min(of_form, key=lambda preset: abs(DEVICES[preset].memory_bytes - memory_bytes))


def gpu_cluster(
    device: str, num_per_node: int = 1, num_nodes: int | None = None, node_gbit: float | None = None
) -> Cluster:
    """Return `num_nodes` nodes of `num_per_node` devices each; the links, hence the mesh axes, are `node` and `gpu`.

    node_gbit: Gbit/s by which a node is connected to the others; None: as the vendor's own nodes are.
    """
    sheet = SHEETS[device]
    share = sheet.network if node_gbit is None else _NETWORK_FRACTION * node_gbit / 8 / num_per_node
    links = [
        Link(name="gpu", size=num_per_node, bandwidth_bytes_per_s=sheet.link * _GIGA, latency_s=sheet.link_us / 1e6)
    ]
    if num_nodes is not None:
        network = Link(name="node", size=num_nodes, bandwidth_bytes_per_s=share * _GIGA, latency_s=_NETWORK_LATENCY_S)
        links.insert(0, network)
    counts = [str(link.size) for link in links] if any(link.size > 1 for link in links) else []
    return Cluster(
        name="x".join([*counts, device]) + (f"@{node_gbit:g}Gbit" if node_gbit is not None else ""),
        device=DEVICES[device],
        links=tuple(links),
        offload={
            "host": Tier(
                write_bytes_per_s=sheet.host * _GIGA, read_bytes_per_s=sheet.host * _GIGA, latency_s=_HOST_LATENCY_S
            )
        },
        source=f"preset: a fraction of a data sheet ({sheet.source}); not measured",
    )


def cpu_cluster(num_processes: int) -> Cluster:
    """Return `num_processes` processes on this machine, each with its share of the cores and of the memory.

    The rates are cautious guesses per core; `calibrate` measures the real ones.
    """
    cores_each = num_cores() / num_processes
    rates = {dtype: rate * cores_each for dtype, rate in _cpu_core_flops_per_s().items()}
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=machine.memory_bytes() // num_processes,
        flops_per_s=rates,
        conv_flops_per_s={dtype: rate for dtype, rate in rates.items() if dtype != "fp16"},
        bandwidth_bytes_per_s=_CPU_CORE_BANDWIDTH * min(max(cores_each, 1 / 4), _CORES_THAT_FILL_MEMORY),
        launch_s=_CPU_LAUNCH_S,
    )
    crowding = max(1.0, 1 / cores_each)
    link = Link(
        name="cpu",
        size=num_processes,
        bandwidth_bytes_per_s=_GLOO_BANDWIDTH / crowding,
        latency_s=_GLOO_LATENCY_S * crowding**2,
        factors=GLOO_FACTORS,
    )
    return Cluster(
        name=f"cpu:{num_processes}",
        device=device,
        links=(link,),
        offload={"disk": _cpu_disk(num_processes)},
        source="preset: cautious guesses for this machine; not measured, `calibrate` does",
        fingerprint=machine.fingerprint(),
    )


def _cpu_disk(num_processes: int) -> Tier:
    rate = _DISK_BANDWIDTH / num_processes
    return Tier(write_bytes_per_s=rate, read_bytes_per_s=rate, latency_s=DISK_LATENCY_S, overlap=_DISK_OVERLAP)


_BANDWIDTH_FRACTION = 0.88
_NETWORK_FRACTION = 0.9
_NETWORK_LATENCY_S = 6e-6
"""Of each hop of a ring that leaves the node. NCCL's own table (src/graph/tuning.cc, `Simple`) has 3.4 to 6 µs for hops within
a node, by what its processor takes to post to an adapter, and 14 for the one that leaves it: 4.7 to 7 a hop in nodes of 8."""
_HOST_LATENCY_S = 10e-6
"""A copy between device and pinned memory, from its launch to its event: a guess."""
_GPU_LAUNCH_S = 4e-6
"""A GPU's idle time from the end of one kernel to the beginning of the next, tail included."""
_HOST = Overheads(forward_s=27e-6, backward_s=16e-6, update_s=12e-6, view_s=5e-6, compiled_s=9e-6, graph_s=33e-6)
"""Seconds of Python, the dispatcher and autograd on a server's processor; fitted to transformers-bert, whose small batches are
bound by it (17 to 23 ms a step whatever the batch). Those of compiled graphs are measured by tritonbench (pull request 1017, of
2026-04, on a GB200's host): 9.1 µs a kernel of 19 arguments, 42.4 µs from the call of a compiled function of one."""

# One core of a server of the last years and gloo over the loopback interface, on the low side of what `calibrate` found
# (100 GFLOP/s in fp32 and 210 in bf16 on one core of a Zen 4; 0.25 ms and 1.1 GB/s between 2 processes on 2 cores, and
# 0.9 ms and 0.56 GB/s between 4: processes that outnumber the cores wait for one another).
_CPU_LAUNCH_S = 4e-6
_CPU_CORE_BANDWIDTH = 12e9
_CORES_THAT_FILL_MEMORY = 16
_GLOO_BANDWIDTH = 1e9
_GLOO_LATENCY_S = 250e-6
# A disk that is not the fastest, through the system's file cache, whose copies take processor time from the computation.
_DISK_BANDWIDTH = 0.5e9
DISK_LATENCY_S = 100e-6
"""Of handing one transfer to the thread that makes it, and of waiting for it."""
_DISK_OVERLAP = 0.5


def _cpu_core_flops_per_s() -> dict[str, float]:
    """Guess one core's rates from its vector units."""
    flags = machine.cpu_flags()
    single = 80e9 if "avx512f" in flags else 40e9
    half = 2 * single if flags & {"avx512_bf16", "amx_bf16"} else single / 2
    return {"fp64": single / 2, "fp32": single, "bf16": half, "fp16": single / 16}


def _sheet_device(name: str, sheet: Sheet) -> Device:
    units = UNITS[name]
    kind = units.kind
    sheet_rates = dict(sheet.tflops) | ({"tf32": units.tf32} if units.tf32 else {})
    wide = {"fp64", "fp32"} | ({"bf16"} if sheet.tflops["bf16"] == sheet.tflops["fp32"] else set())
    rates = {
        dtype: (kind.wide_products if dtype in wide else kind.products) * rate * _TERA
        for dtype, rate in sheet_rates.items()
    }
    return Device(
        name=name,
        kind="gpu",
        memory_bytes=int(sheet.memory_gib * _GIB),
        flops_per_s=rates,
        conv_flops_per_s=_convolutions(kind, sheet_rates, wide),
        bandwidth_bytes_per_s=_BANDWIDTH_FRACTION * sheet.bandwidth * _GIGA,
        launch_s=_GPU_LAUNCH_S,
        num_units=units.count,
        attention=_attention(kind),
        reorder_bytes_per_s=REORDER_BYTES_PER_CLOCK * units.count * kind.clock * _GIGA,
        overheads=_HOST,
        blas_workspace_bytes=sheet.blas_workspace,
    )


def _attention(kind: Kind) -> dict[AttentionRate, float]:
    flash, cudnn = kind.attention, kind.cudnn or kind.attention
    names: tuple[AttentionRate, ...] = ("forward", "backward", "cudnn forward", "cudnn backward")
    return {name: share / kind.products for name, share in zip(names, (*flash, *cudnn))}


def _convolutions(kind: Kind, sheet_rates: Mapping[str, float], wide: set[str]) -> dict[str, float]:
    """fp32 convolutions round to TF32 where there are units for it: cuDNN's default in torch, unlike that of products."""
    rates = {
        dtype: (kind.wide_products if dtype in wide else kind.convolutions) * rate * _TERA
        for dtype, rate in sheet_rates.items()
    }
    return rates | ({"fp32": rates["tf32"]} if "tf32" in rates else {})


DEVICES: dict[str, Device] = {name: _sheet_device(name, sheet) for name, sheet in SHEETS.items()}
"""Every device that has a preset, by name."""


def _positive(digits: str, text: str) -> int:
    if not 1 <= (count := int(digits)) <= 10**6:
        raise UserError(f"{text!r} needs between 1 and a million devices; got {digits}; write it as {GRAMMAR}")
    return count


def _network(match: re.Match[str], text: str) -> float | None:
    """Return the Gbit/s that a name of hardware ends in."""
    if match[4] is None:
        return None
    if match[1] is None or not float(match[4]):
        raise UserError(
            f"a network of more than 0 Gbit/s between nodes is needed after @; got {text!r}; write it as 2x8xh100@100Gbit"
        )
    return float(match[4])


def _advice(name: str) -> str:
    if re.fullmatch(r"(\d+x)*cpu(:.*)?", name.lower()):
        return "processes on this machine are written cpu:N, such as cpu:2"
    near = difflib.get_close_matches(re.sub(r"^[\dx]*x", "", name.lower()), DEVICES, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"devices with a preset: {', '.join(DEVICES)}"
