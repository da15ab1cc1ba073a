"""FLOPs and bytes of single calls, against torch's own counter and against sums by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from profiler_models import cnn, gru, mlp, tied
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.grids import slow_but
from trainwright.hardware import resolve
from trainwright.models import zoo
from trainwright.ops.flops import bytes_moved, flops, is_convolution, is_heavy, moves_nothing
from trainwright.profiler import profile
from trainwright.profiler.gpu import GpuForms
from trainwright.profiler.step import reference_step
from trainwright.torch_internals.fakes import fake_like, faked, new_mode

aten = torch.ops.aten
H200 = resolve("h200")


class Sum(TorchDispatchMode):
    """Adds up what the functions under test say of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy = self.other = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        heavy, other = flops(func, args, kwargs or {}, out)
        self.heavy, self.other = self.heavy + heavy, self.other + other
        self.moved += bytes_moved(func, args, out)
        return out


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


CASES = {
    "linear": lambda: F.linear(leaf(3, 5, 7), leaf(11, 7), leaf(11)),
    "bmm": lambda: leaf(3, 5, 7) @ leaf(3, 7, 2),
    "baddbmm": lambda: torch.baddbmm(leaf(3, 5, 2), leaf(3, 5, 7), leaf(3, 7, 2)),
    "einsum": lambda: torch.einsum("bhqd,bhkd->bhqk", leaf(2, 3, 4, 5), leaf(2, 3, 6, 5)),
    "conv1d": lambda: F.conv1d(leaf(2, 6, 17), leaf(4, 6, 3), leaf(4), stride=2, padding=1),
    "conv2d": lambda: F.conv2d(leaf(2, 6, 9, 11), leaf(4, 6, 3, 2), stride=2, dilation=2),
    "conv3d": lambda: F.conv3d(leaf(2, 6, 5, 6, 7), leaf(4, 6, 3, 2, 1)),
    "transposed": lambda: F.conv_transpose2d(leaf(2, 6, 5, 4), leaf(6, 3, 2, 3), stride=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_and_convolutions_count_as_in_torch(case):
    with FlopCounterMode(display=False) as expected:
        case().sum().backward()
    with Sum() as found:
        case().sum().backward()
    assert found.heavy == expected.get_total_flops() > 0


@pytest.mark.parametrize("groups", [2, 6])
def test_grouped_convolution_counts_its_groups_alone(groups):
    x, weight = leaf(2, 6, 9, 9), leaf(12, 6 // groups, 3, 3)
    with Sum() as forward:
        out = F.conv2d(x, weight, groups=groups)
    assert forward.heavy == 2 * (6 // groups) * 9 * out.numel()
    with Sum() as backward:
        out.sum().backward()
    assert backward.heavy == 2 * forward.heavy


def test_a_convolution_whose_input_needs_no_gradient_costs_half_in_backward():
    out = F.conv2d(torch.randn(2, 3, 9, 9), leaf(4, 3, 3, 3))
    with Sum() as backward:
        out.sum().backward()
    assert backward.heavy == 2 * 3 * 9 * out.numel()


def test_attention_is_the_full_square_causal_or_not():
    """b 2, h 4, s_q 6, s_k 6, d 8: two products forward; five backward."""
    for is_causal in (False, True):
        query, key, value = leaf(2, 4, 6, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8)
        with Sum() as forward:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        assert forward.heavy == 2 * 2 * (2 * 4 * 6 * 6 * 8)
        with Sum() as backward:
            out.sum().backward()
        assert backward.heavy == 5 * 2 * (2 * 4 * 6 * 6 * 8)


def test_attention_counts_as_torch_counts_its_gpu_kernel():
    args = [torch.empty(2, 4, 6, 8, device="meta") for _ in range(3)]
    out = torch.empty(2, 4, 6, 8, device="meta")
    with FlopCounterMode(display=False) as expected:
        torch.ops.aten._scaled_dot_product_efficient_attention(*args, None, False)
    found, _ = flops(aten._scaled_dot_product_flash_attention_for_cpu.default, tuple(args), {}, (out, None))
    assert found == expected.get_total_flops() > 0


def test_an_lstm_layer_counts_all_four_gates():
    """s 5, b 3, i 7, h 4: [3, 7] · [7, 16] and [3, 4] · [4, 16] at each step."""
    layer = torch.nn.LSTM(7, 4)
    with Sum() as forward:
        out, _ = layer(torch.randn(5, 3, 7))
    assert forward.heavy == 2 * 5 * 3 * (7 + 4) * 16
    with Sum() as backward:
        out.sum().backward()
    assert backward.heavy == 2 * forward.heavy


@pytest.mark.parametrize(
    ("call", "other", "moved"),
    [
        (lambda x: x + x, 60, 3 * 240),
        (lambda x: x * 2.0, 60, 2 * 240),
        (lambda x: x.sum(), 60, 240 + 4),
        (lambda x: x.t().reshape(5, 12).contiguous(), 0, 2 * 240),
        (lambda x: x.view(6, 10)[2:], 0, 0),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: torch.zeros_like(x), 0, 240),
        (lambda x: x.clone(), 0, 2 * 240),
        (lambda x: x.add_(1.0), 60, 2 * 240),
        (lambda x: x + x[:1], 60, 240 + 240 + 20),
        (lambda x: x[:1].expand(12, 5) + 0.0, 60, 20 + 240),
        (lambda x: torch.cat([x, x]), 0, 240 * 4),
    ],
)
def test_everything_else_counts_elements_and_the_bytes_it_touches(call, other, moved):
    x = torch.randn(12, 5)
    with Sum() as found:
        call(x)
    assert (found.heavy, found.other) == (0, other)
    assert found.moved == moved


def test_a_lookup_reads_as_many_rows_as_it_writes():
    table, rows = torch.randn(1000, 8), torch.tensor([1, 2, 3])
    with Sum() as found:
        F.embedding(rows, table)
    assert found.moved == 2 * 3 * 8 * 4


def test_kinds():
    assert is_heavy(aten.mm.default)
    assert is_heavy(aten.convolution_backward.default)
    assert not is_heavy(aten.add.Tensor)
    assert is_convolution(aten.convolution.default)
    assert not is_convolution(aten.mm.default)
    assert moves_nothing(aten.transpose.int)
    assert moves_nothing(aten.detach.default)
    assert not moves_nothing(aten.add_.Tensor)
    assert not moves_nothing(aten.relu_.default)


def zoo_model(name):
    def build():
        model, batch = zoo.build(name)
        return model, batch, None

    build.__name__ = name
    return build


TINY = [zoo_model(name) for name in zoo.names() if name.endswith("-tiny")]
FEW = [build for build in TINY if build.__name__ in ("gpt2-tiny", "resnet-tiny", "mixtral-tiny", "mamba-2-tiny")]


def counted_by_torch(model, batch, loss_fn) -> int:
    """The FLOPs of a step on fakes, in the kernels of a GPU, by torch's own counter."""
    mode = new_mode()
    with faked(model, mode) as copy:
        optimizer = torch.optim.SGD(copy.train().parameters(), lr=0.1, foreach=False)
        given = batch.values() if isinstance(batch, dict) else batch
        fakes = [fake_like(value, mode) if isinstance(value, torch.Tensor) else value for value in given]
        faked_batch = dict(zip(batch, fakes)) if isinstance(batch, dict) else tuple(fakes)
        with mode, FlopCounterMode(display=False) as counter, GpuForms():
            reference_step(copy, optimizer, faked_batch, loss_fn)
    return counter.get_total_flops() - too_many_of_grouped(copy, counter)


def too_many_of_grouped(model, counter) -> int:
    """torch's counter takes the backward of a depthwise convolution for a whole one's; it is twice the forward."""
    if not any(getattr(module, "groups", 1) > 1 for module in model.modules()):
        return 0
    counts = {str(op).removeprefix("aten."): number for op, number in counter.flop_counts["Global"].items()}
    return counts["convolution_backward"] - 2 * counts["convolution"]


@pytest.mark.parametrize(
    "build", slow_but([*FEW, mlp, cnn, tied], [*TINY, mlp, cnn, gru, tied]), ids=lambda build: build.__name__
)
def test_whole_models_count_as_in_torch_attention_included(build):
    model, batch, loss_fn = build()
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        model = model.bfloat16()  # torch follows grouped products on fakes in bf16 alone
    found = profile(model, batch, loss_fn=loss_fn, hardware=H200, timeline=False)
    assert found.forward_flops + found.backward_flops == counted_by_torch(model, batch, loss_fn) > 0


def test_a_layer_of_gpt2_by_hand():
    """b 4, s 32, d 48, 2 layers, vocabulary 331: 24 d² + 4 s d FLOPs a token and layer, 2 d v for the head."""
    model, batch = zoo.build("gpt2-tiny")
    tokens, width, length, vocabulary = 4 * 32, 48, 32, 331
    per_token = 2 * (24 * width**2 + 4 * length * width) + 2 * width * vocabulary
    found = profile(model, batch, hardware=H200)
    assert found.forward_flops == tokens * per_token
    attention = 2 * 4 * length * width
    assert found.backward_flops == tokens * (2 * (per_token - attention) + attention * 5 // 2)


BYTES = {
    "mm": (lambda x: x @ torch.empty(5, 7), 4 * (12 * 5 + 5 * 7 + 12 * 7)),
    "addmm": (lambda x: torch.addmm(torch.empty(7), x, torch.empty(5, 7)), 4 * (7 + 12 * 5 + 5 * 7 + 12 * 7)),
    "transposed operand": (lambda x: x.t() @ x, 4 * (60 + 60 + 25)),
    "softmax": (lambda x: x.softmax(-1), 4 * (60 + 60)),
    "to bf16": (lambda x: x.to(torch.bfloat16), 4 * 60 + 2 * 60),
    "layer norm": (lambda x: F.layer_norm(x, (5,)), 4 * (60 + 60 + 12 + 12)),
    "mean of rows": (lambda x: x.mean(0), 4 * (60 + 5)),
    "comparison": (lambda x: x > 0, 4 * 60 + 60),
    "where": (lambda x: torch.where(torch.ones(12, 5, dtype=torch.bool), x, x), 60 + 60 + 4 * 60 * 3),
    "gathered columns": (lambda x: x.index_select(1, torch.tensor([0, 2])), 4 * (24 + 24)),
    "gathered entries": (lambda x: x.gather(0, torch.zeros(2, 5, dtype=torch.long)), 8 * 10 + 4 * (10 + 10)),
    "indexed rows": (lambda x: aten._unsafe_index(x, [torch.tensor([0, 2])]), 4 * (10 + 10)),
    "convolution": (lambda x: F.conv1d(x[None], torch.empty(3, 12, 2)), 4 * (60 + 72 + 12)),
    "cross entropy": (
        lambda x: F.cross_entropy(x, torch.zeros(12, dtype=torch.long)),
        4 * (60 + 60) + (4 * 60 + 8 * 12 + 4 + 4) + 8 * 12,
    ),
}


@pytest.mark.parametrize(("call", "moved"), BYTES.values(), ids=BYTES)
def test_bytes_read_and_written_by_hand(call, moved):
    x = torch.randn(12, 5)
    with Sum() as found:
        call(x)
    assert found.moved == moved


@pytest.mark.parametrize(
    ("call", "moved"),
    [
        (lambda x, row: aten.zeros_like.default(x), 240),  # the argument lends its shape
        (lambda x, row: aten.fill_.Scalar(x, 1.0), 240),
        (lambda x, row: aten.bernoulli_.float(x, 0.5), 240),
        (lambda x, row: aten.copy_.default(x, row), 240 + 20),  # what it overwrites is not read
        (lambda x, row: aten.mul_.Tensor(x, x), 3 * 240),  # this one is
    ],
)
def test_what_is_only_written_is_not_counted_as_read(call, moved):
    x, row = torch.randn(12, 5), torch.ones(5)
    with Sum() as found:
        call(x, row)
    assert found.moved == moved
