"""Kernels by name and size, and their seconds from those that were measured."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.artifacts import Cluster, Device, Link, Overheads, UserError
from trainwright.ops.kernel_table import KernelTable
from trainwright.ops.kernels import Kernel, family, kernel_of
from trainwright.profiler import op_seconds, profile

aten = torch.ops.aten


def device(kernels: dict[str, list[list[float]]]) -> Device:
    return Device(name="x", kind="cpu", memory_bytes=1, flops_per_s={"fp32": 1e9}, bandwidth_bytes_per_s=1e9, launch_s=1e-6,
                  kernels=kernels)  # fmt: skip


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


@pytest.mark.parametrize(
    ("func", "args", "out", "name", "dims", "work"),
    [
        (aten.mm.default, (empty(3, 5), empty(5, 7)), empty(3, 7), "mm", (3, 5, 7), 210),
        (aten.addmm.default, (empty(7), empty(3, 5), empty(5, 7)), empty(3, 7), "addmm", (3, 5, 7), 210),
        (aten.bmm.default, (empty(2, 3, 5), empty(2, 5, 7)), empty(2, 3, 7), "bmm", (2, 3, 5, 7), 420),
        (aten.baddbmm.default, (empty(2, 3, 7), empty(2, 3, 5), empty(2, 5, 7)), empty(2, 3, 7), "baddbmm", (2, 3, 5, 7), 420),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (empty(2, 4, 8, 16), empty(2, 4, 9, 16), empty(2, 4, 9, 16), 0.0, True),
            (empty(2, 4, 8, 16), empty(2, 4, 8)),
            "attention_causal",
            (8, 8, 9, 16),
            4 * 8 * 8 * 9 * 16,
        ),
        (
            aten.convolution.default,
            (empty(2, 6, 9, 9), empty(8, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
            empty(2, 8, 9, 9),
            "convolution",
            (162, 6, 8, 9),
            2 * 27 * 2 * 8 * 81,
        ),
        (
            aten.convolution_backward.default,
            (empty(2, 6, 9, 9), empty(2, 6, 9, 9), empty(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 6,
             [False, True, False]),
            (None, empty(6, 1, 3, 3), None),
            "depthwise_backward_weight",
            (162, 6, 6, 9),
            2 * 9 * 2 * 6 * 81,
        ),
        (aten.gelu.default, (empty(10),), empty(10), "gelu", (80,), 80),
        (aten.clone.default, (empty(4, 6).t(),), empty(6, 4), "clone_strided", (192,), 192),
        (aten.mul.Tensor, (empty(4, 6).t(), empty(6, 4)), empty(6, 4), "mul_strided", (288,), 288),
        (aten.mul.Tensor, (empty(4, 6).t(), empty(4, 6).t()), empty(4, 6).t(), "mul", (288,), 288),
        (aten._softmax.default, (empty(2, 4, 6), -1, False), empty(2, 4, 6), "_softmax", (8, 6), 384),
        (aten._softmax_backward_data.default, (empty(4, 6), empty(4, 6), 0, torch.float32), empty(4, 6),
         "_softmax_backward_data", (6, 4), 288),
        (aten.native_layer_norm.default, (empty(5, 2, 3), [2, 3], None, None, 1e-5), (empty(5, 2, 3), empty(5), empty(5)),
         "native_layer_norm", (5, 6), 280),
        (aten.clone.default, (empty(4, 6),), empty(4, 6), "clone", (192,), 192),
        (aten.embedding_dense_backward.default, (empty(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64, device="meta"), 7, -1, False),
         empty(7, 3), "embedding_dense_backward", (10, 3, 7), 284),
    ],
)  # fmt: skip
def test_a_call_is_its_kernel(func, args, out, name, dims, work) -> None:
    assert kernel_of(func, args, {}, out) == Kernel(name, dims, work)


def test_gelu_by_tanh_is_a_kernel_of_its_own_and_has_the_exact_one_as_stand_in() -> None:
    by_tanh = kernel_of(aten.gelu_backward.default, (empty(10), empty(10)), {"approximate": "tanh"}, empty(10))
    assert by_tanh == Kernel("gelu_backward_tanh", (120,), 120)
    rows = {"gelu_backward fp32": [[120.0, 1e9]], "mul fp32": [[120.0, 1e8]]}
    assert KernelTable(rows).seconds(by_tanh, "fp32") == pytest.approx(120 / 1e9)
    rows["gelu_backward_tanh fp32"] = [[120.0, 4e8]]
    assert KernelTable(rows).seconds(by_tanh, "fp32") == pytest.approx(120 / 4e8)


@pytest.mark.parametrize(("name", "stand_in"), [("sub", "mul"), ("_foreach_add_", "mul_"), ("mean", "sum"),
                                                 ("copy__strided", "clone_strided")])  # fmt: skip
def test_a_kernel_that_was_not_measured_has_a_family(name: str, stand_in: str) -> None:
    assert family(name) == stand_in


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.floats(1e6, 1e12)), min_size=1, max_size=8,
                unique_by=lambda row: (row[0], row[1])))  # fmt: skip
def test_a_measured_size_gives_back_its_rate_and_others_stay_near(rows: list[tuple[int, int, float]]) -> None:
    table = KernelTable({"k fp32": [list(row) for row in rows]})
    rates = [row[2] for row in rows]
    for one, other, rate in rows:
        near = [row for row in rows if math.log(row[0] / one) ** 2 + math.log(row[1] / other) ** 2 < 0.05]
        if len(near) == 1:
            assert table.seconds(Kernel("k", (one, other), 10**6), "fp32") == pytest.approx(1e6 / rate, rel=0.2)
    elsewhere = 1e6 / table.seconds(Kernel("k", (77, 3), 10**6), "fp32")
    assert min(rates) / 8 * (1 - 1e-9) <= elsewhere <= max(rates) * 1.25 * (1 + 1e-9)


def test_a_sibling_dtype_and_a_family_stand_in_and_nothing_else_does() -> None:
    table = KernelTable({"mul fp32": [[8.0, 1e9]], "mm bf16": [[1.0, 1.0, 1.0, 1e10]]})
    assert table.seconds(Kernel("sub", (100,), 1000), "bf16") == pytest.approx(1e-6)
    assert table.seconds(Kernel("mm", (1, 1, 1), 1000), "fp16") == pytest.approx(1e-7)
    assert table.seconds(Kernel("mm", (1, 1, 1), 1000), "fp32") is None


def test_time_comes_from_the_table_where_there_is_one() -> None:
    a, b = torch.empty(30, 50, device="meta"), torch.empty(50, 70, device="meta")
    measured = device({"mm fp32": [[30.0, 50.0, 70.0, 1e6]]})
    assert op_seconds(measured, aten.mm.default, (a, b), {}, a @ b) == pytest.approx(0.21)
    assert op_seconds(device({}), aten.mm.default, (a, b), {}, a @ b) == pytest.approx(2.11e-4)
    assert op_seconds(measured, aten.exp.default, (a,), {}, a) == pytest.approx(12000 / 1e9 + 1e-6)


def test_a_step_adds_what_stands_between_its_kernels() -> None:
    here = Cluster(name="x", device=device({}), links=(Link(name="l", size=1, bandwidth_bytes_per_s=1, latency_s=0),))
    slower = here.device.model_copy(update={"overheads": Overheads(forward_s=1.0, backward_s=0.01, update_s=1e-4)})
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Tanh())
    ask = {
        "loss_fn": lambda out, batch: out.sum(),
        "make_optimizer": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    }
    plain, added = (profile(model, (torch.ones(2, 4),), hardware=cluster, **ask)
                    for cluster in (here, here.model_copy(update={"device": slower})))  # fmt: skip
    extra = added.step_s - plain.step_s
    assert 4 <= math.floor(extra) <= 6  # a view of the weight, product, tanh, detached; sum
    assert 4 <= round(extra * 100) % 100 <= 10  # one filled, expanded, tanh, product, views, accumulated
    assert 1 <= round(extra * 10000) % 100 <= 4
    assert added.step_s == pytest.approx(sum(op.time_s for op in added.ops), rel=1e-3)


@pytest.mark.parametrize("rows", [[[1.0]], [[-1.0, 2.0]], [["x", 1.0]]])
def test_a_table_that_makes_no_sense_is_refused(rows: list[list[float]]) -> None:
    good = Cluster(name="x", device=device({"mm fp32": [[1.0, 1.0, 1.0, 1.0]]}),
                   links=(Link(name="l", size=1, bandwidth_bytes_per_s=1, latency_s=0),))  # fmt: skip
    text = good.to_json().replace("[\n     1.0,\n     1.0,\n     1.0,\n     1.0\n    ]", json.dumps(rows[0]))
    assert json.dumps(rows[0]) in text
    with pytest.raises(UserError, match="kernels"):
        Cluster.parse(text)


def test_between_measured_sizes_a_rate_follows_the_line_through_them() -> None:
    """A launch floor, then a bandwidth: sizes between and beyond follow their neighbours, not the mean of all."""
    rows = [[float(size), size / (1e-6 + size / 1e10)] for size in (1e2, 1e3, 1e4, 1e5, 1e6, 1e7)]
    table = KernelTable({"mul fp32": rows})
    for size in (30, 300, 3000, 30_000, 300_000, 3_000_000, 30_000_000):
        assert table.seconds(Kernel("mul", (size,), size), "fp32") == pytest.approx(1e-6 + size / 1e10, rel=0.2)


def test_a_product_with_an_addition_is_told_by_the_plain_one_where_only_that_was_measured() -> None:
    table = KernelTable({"mm fp32": [[8.0, 8.0, 8.0, 1e9]]})
    assert table.seconds(Kernel("addmm", (8, 8, 8), 1024), "fp32") == pytest.approx(1.024e-6)
