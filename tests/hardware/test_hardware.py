"""Names and files become clusters, collectives cost what a ring takes, and `calibrate` measures this machine."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import trainwright as tw
from trainwright.artifacts import Cluster, MeshAxis, UserError
from trainwright.artifacts.cluster import axis_over
from trainwright.cli.app import app
from trainwright.hardware import measure
from trainwright.hardware.calibrate import _fit_memory, fit_ring, with_host
from trainwright.hardware.collectives import KINDS, terms
from trainwright.launch.cores import num_cores
from trainwright.tiers import Policy

hardware = importlib.import_module("trainwright.hardware")  # the facade's verb has the same name

# Names.


@pytest.mark.parametrize(
    ("text", "name", "links"),
    [
        ("h200", "h200", [("gpu", 1)]),
        ("1xh200", "h200", [("gpu", 1)]),
        ("8xh200", "8xh200", [("gpu", 8)]),
        (" 8xH200 ", "8xh200", [("gpu", 8)]),
        ("2x4xa100-40gb", "2x4xa100-40gb", [("node", 2), ("gpu", 4)]),
        ("16x1xl40s", "16x1xl40s", [("node", 16), ("gpu", 1)]),
        ("2x8xH100@100Gbit", "2x8xh100@100Gbit", [("node", 2), ("gpu", 8)]),
        ("cpu:3", "cpu:3", [("cpu", 3)]),
        ("cpu", "cpu:1", [("cpu", 1)]),
    ],
)
def test_names(text: str, name: str, links: list[tuple[str, int]]) -> None:
    cluster = hardware.resolve(text)
    assert cluster.name == name
    assert [(link.name, link.size) for link in cluster.links] == links
    assert cluster.num_devices == math.prod(size for _, size in links)


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from(sorted(hardware.DEVICES)),
)
def test_every_shape_of_every_device_resolves_and_survives_json(num_nodes: int, num_gpus: int, device: str) -> None:
    cluster = hardware.resolve(f"{num_nodes}x{num_gpus}x{device}")
    assert cluster.num_devices == num_nodes * num_gpus
    assert math.prod(axis.size for axis in cluster.mesh()) == num_nodes * num_gpus
    assert Cluster.parse(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xh20", "did you mean h200"),
        ("8xRTX-4090", "did you mean rtx4090"),
        ("tpu-v5p", "devices with a preset: .*h100"),
        ("", "hardware is needed as cpu:N"),
        ("0xh100", "between 1 and .*got 0"),
        ("cpu:0", "between 1 and .*got 0"),
        ("cpu:-1", r"cpu:N, such as cpu:2"),
        ("4xcpu", r"cpu:N, such as cpu:2"),
        ("2x2x2xh100", "hardware is needed as"),
        ("99999999xh100", "between 1 and .*got 99999999"),
        ("8xh100@100Gbit", "a network of more than 0 Gbit/s between nodes is needed after @"),
        ("2x8xh100@0Gbit", "a network of more than 0 Gbit/s"),
        ("2x8xh100@100Gbps", "2x8xh100@100Gbit"),
        ("no/such/file", "cannot be read"),
        ("missing.json", "cannot be read"),
    ],
)
def test_mistakes_are_the_users(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hardware.resolve(text)


def test_a_file_is_read_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = hardware.resolve("2x8xh100").model_copy(update={"name": "ours"})
    cluster.to_json(tmp_path / "ours.json")
    cluster.to_json(tmp_path / "ours")
    monkeypatch.chdir(tmp_path)
    for text in (str(tmp_path / "ours.json"), "ours.json", "ours"):
        assert hardware.resolve(text) == cluster


def test_presets_stay_below_their_data_sheets() -> None:
    sheets = {
        "a100": (312e12, 2.039e12),
        "h100": (989.5e12, 3.35e12),
        "h200": (989.5e12, 4.8e12),
        "b200": (2.25e15, 8e12),
    }
    for name, (flops_per_s, bandwidth) in sheets.items():
        device = hardware.DEVICES[name]
        assert 0.5 * flops_per_s < device.flops_per_s["bf16"] < flops_per_s
        assert 0.7 * bandwidth < device.bandwidth_bytes_per_s < bandwidth
        assert device.flops_per_s["fp32"] < 0.2 * device.flops_per_s["bf16"]
    assert 139e9 < hardware.DEVICES["h200"].memory_bytes * 1.0 < 151e9


@pytest.mark.parametrize("name", sorted(hardware.DEVICES))
def test_a_preset_names_the_document_that_it_is_from(name: str) -> None:
    cluster = hardware.resolve(name)
    assert re.search(r"\((NVIDIA|AMD) .* 20\d\d", cluster.source), cluster.source
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf8")
    rates = cluster.device.flops_per_s
    assert rates["fp64"] <= rates["fp32"] <= rates["bf16"] <= rates["fp16"], "a device's narrower types are no slower"


def test_a_cpu_clusters_processes_share_the_machine() -> None:
    one, four = hardware.resolve("cpu:1"), hardware.resolve("cpu:4")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < four.device.memory_bytes * 4 <= one.device.memory_bytes <= total
    assert four.device.flops_per_s["fp32"] * 4 == pytest.approx(one.device.flops_per_s["fp32"])
    assert one.fingerprint == four.fingerprint


# Collectives.


def simulate_ring(num_ranks: int, num_bytes: float, latency_s: float, bandwidth: float, passes: int) -> float:
    """Count a ring's steps one by one: in each, every rank sends one n-th of the tensor to its neighbour."""
    elapsed_s = 0.0
    for _ in range(passes):
        for _ in range(num_ranks - 1):
            elapsed_s += latency_s + num_bytes / num_ranks / bandwidth
    return elapsed_s


@pytest.mark.parametrize(
    ("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("all_to_all", 1)]
)
def test_a_collective_costs_what_its_ring_takes(kind: hardware.Collective, passes: int) -> None:
    for num_ranks, num_bytes in itertools.product((1, 2, 3, 8, 64), (0, 4, 10**6)):
        axis = MeshAxis(name="a", size=num_ranks, bandwidth_bytes_per_s=3e9, latency_s=7e-6)
        expected = simulate_ring(num_ranks, num_bytes, 7e-6, 3e9, passes)
        assert hardware.seconds(kind, axis, num_bytes) == pytest.approx(expected, rel=1e-12)


_GROUPS = [range(32), range(0, 32, 2), range(0, 32, 4), range(0, 32, 8), range(8), range(0, 8, 2), range(16)]
"""Groups of ranks of 4 nodes of 8, as axes of meshes have them."""


def _loads(nodes: Cluster, sent: dict[tuple[int, int], float]) -> float:
    """Return the seconds for which the busiest link of a device, or network of a node, is used, by bytes from rank to rank.

    Of a node's network the group has the shares of its members: groups beside it use the rest.
    """
    network, gpu = nodes.links
    within, leaving = [0.0] * nodes.num_devices, [0.0] * network.size
    for (source, to), num_bytes in sent.items():
        if source // gpu.size == to // gpu.size:
            within[source] += num_bytes
        else:
            leaving[source // gpu.size] += num_bytes
    per_node = len({source for source, _ in sent if source < gpu.size})
    return max(max(within) / gpu.bandwidth_bytes_per_s, max(leaving) / per_node / network.bandwidth_bytes_per_s)


@pytest.mark.parametrize("ranks", _GROUPS, ids=str)
def test_rings_leave_a_node_by_each_of_its_members(ranks: range) -> None:
    nodes, num_bytes = hardware.resolve("4x8xa100"), 1e9
    axis = axis_over(nodes.links, ranks).model_copy(update={"latency_s": 0.0})
    members = [rank for rank in ranks if rank < 8]
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for turn in range(len(members)):  # one ring for each member of a node, which is the last there
        order = [(rank // 8, (members.index(rank % 8) - turn - 1) % len(members), rank) for rank in ranks]
        ring = [rank for _, _, rank in sorted(order)]
        for place, rank in enumerate(ring):
            sent[rank, ring[(place + 1) % len(ring)]] += num_bytes / len(members) * (len(ring) - 1) / len(ring)
    least = _loads(nodes, sent)
    # what leaves the node is not sent within it: where the link within binds, a ring's formula is that much too long
    longest = least * len(members) / max(len(members) - 1, 1) if len(ranks) > len(members) else least
    assert least * (1 - 1e-9) <= hardware.seconds("all_gather", axis, num_bytes) <= longest * (1 + 1e-9)


@pytest.mark.parametrize("ranks", _GROUPS, ids=str)
def test_an_all_to_all_is_bound_by_what_leaves_the_node(ranks: range) -> None:
    nodes, num_bytes = hardware.resolve("4x8xa100"), 1e9
    axis = axis_over(nodes.links, ranks).model_copy(update={"latency_s": 0.0})
    sent = {(source, to): num_bytes / len(ranks) for source in ranks for to in ranks if source != to}
    assert hardware.seconds("all_to_all", axis, num_bytes) == pytest.approx(_loads(nodes, sent))


def test_an_axis_over_both_links_shares_the_network_with_the_axis_between_nodes() -> None:
    nodes = hardware.resolve("4x8xh100")
    between, over_both = nodes.mesh((2, 16))
    assert (between.crossed, over_both.crossed) == ("node", "node")
    assert [axis.crossed for axis in nodes.mesh()] == ["node", "gpu"]
    assert [axis.bandwidth_bytes_per_s / 1e9 for axis in (between, over_both)] == [45.0, 360.0]
    assert nodes.mesh() == tuple(axis_over(nodes.links, ranks) for ranks in (range(0, 32, 8), range(8)))


def test_an_axis_of_one_rank_costs_nothing() -> None:
    axis = MeshAxis(name="a", size=1, bandwidth_bytes_per_s=1.0, latency_s=1.0)
    assert [hardware.seconds(cast(Any, kind), axis, 10**9) for kind in hardware.KINDS] == [0.0] * 4


def test_wrong_collectives_are_refused() -> None:
    axis = MeshAxis(name="a", size=2, bandwidth_bytes_per_s=1.0, latency_s=1.0)
    with pytest.raises(ValueError, match="got 'broadcast'"):
        hardware.seconds(cast(Any, "broadcast"), axis, 1)
    with pytest.raises(ValueError, match="at least 0 bytes; got -1"):
        hardware.seconds("all_gather", axis, -1)


# Measurements.


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12), st.integers(2, 64), st.floats(0.25, 4.0))
def test_the_fit_finds_the_ring_that_made_the_rows(
    latency_s: float, bandwidth: float, num_ranks: int, factor: float
) -> None:
    turn = latency_s * bandwidth  # where both terms weigh the same
    rows = []
    for kind, num_bytes in itertools.product(("all_gather", "all_reduce"), (turn / 300, turn, turn * 300)):
        hops, volume = terms(cast(Any, kind), num_ranks)
        times = factor if kind == "all_reduce" else 1.0
        rows.append((kind, num_bytes, times * (hops * latency_s + volume * num_bytes / bandwidth)))
    found_latency_s, found_bandwidth, factors = fit_ring(rows, num_ranks)
    assert found_latency_s == pytest.approx(latency_s, rel=1e-3)
    assert found_bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert factors == {"all_reduce": pytest.approx(factor, rel=2e-3)}


def test_what_is_sent_beside_shared_memory_takes_its_own_factor() -> None:
    """Latency and bandwidth are of what goes through memory; `all_to_all`, which does not, is so many times slower."""
    times = {"all_to_all": 3.0, "all_reduce": 0.7, "reduce_scatter": 1.2}
    rows = [
        (
            kind,
            float(num_bytes),
            times.get(kind, 1.0) * (num_hops * 2e-4 + fraction * num_bytes / 5e9),
        )
        for kind in KINDS
        for num_bytes in (2**12, 2**16, 2**20, 2**24)
        for num_hops, fraction in [terms(cast(Any, kind), 2)]
    ]
    latency_s, bandwidth, factors = _fit_memory(rows, 2)
    assert latency_s == pytest.approx(2e-4, rel=1e-6)
    assert bandwidth == pytest.approx(5e9, rel=1e-6)
    assert factors == times


@pytest.mark.slow  # the demo calibrates on each change
def test_calibrate_quick_measures_and_its_file_is_hardware(tmp_path: Path) -> None:
    told: list[str] = []
    cluster = hardware.calibrate(2, quick=True, progress=told.append)
    assert told[:4] == ["matrix products", "convolutions", "memory", "kernels"]
    *kernels, disk, host, collectives = told[4:]
    assert kernels[:1] == ["kernels, 100 measured"]
    assert kernels == [f"kernels, {100 * place} measured" for place in range(1, len(kernels) + 1)]
    assert (disk, host, collectives) == ("disk", "host", "collectives")
    cluster.to_json(tmp_path / "here.json")
    assert hardware.resolve(str(tmp_path / "here.json")) == cluster
    assert cluster.num_devices == 2
    assert cluster.fingerprint == hardware.resolve("cpu:2").fingerprint
    device = cluster.device
    assert {"mm fp32", "bmm fp32", "convolution fp32", "attention_causal fp32", "gelu fp32", "mul_ fp32"} <= set(
        device.kernels
    )
    assert all(row[-1] > 1e6 for rows in device.kernels.values() for row in rows)
    assert device.overheads.forward_s > 0
    assert cluster.tier("disk").write_bytes_per_s > 0
    assert 1e7 < cluster.tier("host").read_bytes_per_s < 1e12
    assert set(device.flops_per_s) == {"fp64", "fp32", "bf16", "fp16"}
    assert 1e8 < device.flops_per_s["fp64"] < device.flops_per_s["fp32"] < 1e13
    assert 1e8 < device.bandwidth_bytes_per_s < 1e12
    assert 1e-7 < device.launch_s < 1e-3
    assert 1e-6 < cluster.links[0].latency_s < 0.1
    assert 1e6 < cluster.links[0].bandwidth_bytes_per_s < 1e11


def test_a_measured_host_is_where_plans_rest() -> None:
    """On CPUs a budget within the machine's memory, so only where it is asked for; on a GPU's preset in place of its guess."""
    measured = with_host(hardware.resolve("cpu:1"), quick=True, device="cpu")
    host = measured.tier("host")
    assert 1e7 < host.write_bytes_per_s < 1e12
    assert 1e7 < host.read_bytes_per_s < 1e12
    assert 0 < host.latency_s < 0.1
    assert 0 <= host.overlap <= 1
    assert measured.tier("disk") == hardware.resolve("cpu:1").tier("disk")
    model, batch = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))), (torch.ones(4, 64),)
    asked = {"loss_fn": lambda output: output.square().mean(), "tier": Policy(40_000, 0, place="host")}
    plan = tw.plan(model, batch, hardware=measured, **asked)
    assert plan.tier is not None
    assert plan.tier.host_bytes > 0
    slower = host.model_copy(update={"read_bytes_per_s": 1e4, "write_bytes_per_s": 1e4})
    other = tw.plan(model, batch, hardware=measured.model_copy(update={"offload": {"host": slower}}), **asked)
    assert other.predicted.step_s > 2 * plan.predicted.step_s
    preset = hardware.resolve("h100")
    assert with_host(preset, quick=True, device="cpu").tier("host") != preset.tier("host")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_measuring_a_gpus_copies_needs_one() -> None:
    with pytest.raises(UserError, match="a GPU is needed with --gpu"):
        CliRunner().invoke(app, ["calibrate", "--gpu"], catch_exceptions=False)


def test_what_others_take_of_the_processors_lengthens_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is kept from its core for longer than it computes; where processes outnumber cores, that counts."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)

    def kept_waiting() -> None:
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass
        time.sleep(5e-3)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert 1e-3 <= measure._seconds(kept_waiting, 0.01) < 3e-3
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_cores() + 1)
    assert measure._seconds(kept_waiting, 0.01) >= 6e-3


def test_calibrate_needs_a_process() -> None:
    with pytest.raises(UserError, match="at least 1 process is needed to calibrate; got 0"):
        hardware.calibrate(0)


@pytest.mark.slow
def test_calibrate_of_one_process_has_no_collectives_to_fit() -> None:
    cluster = hardware.calibrate(1, quick=True)
    assert cluster.num_devices == 1
    assert hardware.seconds("all_reduce", cluster.mesh()[0], 10**6) == 0.0
