"""Causal attention of each rank's rows gives what one process gets, in float64, and every rank has as much work."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.planner_ranks import ThreadCommunicator, _Board
from trainwright.ops.attention import _localize
from trainwright.ops.attention_rows import Swap, causal_rows
from trainwright.ops.kernels import skips_half
from trainwright.profiler.saved import CallCounter
from trainwright.program.layout import slot_range
from trainwright.rank.reshard import Axes


def swap_of(mesh: tuple[int, ...], coords: tuple[int, ...], rows: int, board: _Board) -> Swap:
    """The swap of the rank at `coords`, over all axes of the mesh."""
    own = ThreadCommunicator(mesh, coords, board)
    at, ranges = list(coords), [slot_range(rows, zip(mesh, coords))]
    for axis, size in enumerate(mesh):
        at[axis] = size - 1 - coords[axis]
        ranges.append(slot_range(rows, zip(mesh, at)))
    return Swap(tuple(Axes(own, [axis]) for axis in range(len(mesh))), tuple(ranges))


def on_ranks(mesh: tuple[int, ...], rows: int, run: Any) -> dict[tuple[int, ...], Any]:
    """Return what `run(swap)` gives on each rank, each a thread."""
    board, found, errors = _Board(mesh), {}, []

    def rank(coords: tuple[int, ...]) -> None:
        try:
            found[coords] = run(swap_of(mesh, coords, rows, board))
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=rank, args=(coords,)) for coords in board.coords]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return dict(sorted(found.items()))


def operands(rows: int, groups: int, repeats: int, dims: tuple[int, int], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = [(2, groups * repeats, rows, dims[0]), (2, groups, rows, dims[0]), (2, groups, rows, dims[1])]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@settings(max_examples=25)
@given(
    mesh=st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)]), rows=st.integers(2, 13), groups=st.integers(1, 2),
    repeats=st.integers(1, 3), dims=st.sampled_from([(8, 8), (6, 4), (4, 6)]), scale=st.sampled_from([None, 0.3]),
    fused=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_is_attention_of_one_process(
    mesh: tuple[int, ...], rows: int, groups: int, repeats: int, dims: tuple[int, int], scale: float | None, fused: bool,
    seed: int,
) -> None:  # fmt: skip
    query, key, value = operands(rows, groups, repeats, dims, seed)
    named = {"scale": scale, "enable_gqa": repeats > 1}
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, **named)
    grad = torch.randn_like(whole)
    wanted = torch.autograd.grad(whole, [query, key, value], grad)

    def run(swap: Swap) -> list[Tensor]:
        own = slice(*swap.ranges[0])
        leaves = [x.detach().requires_grad_() for x in (query[:, :, own], key, value)]
        out = causal_rows(*leaves, swap=swap, **named)
        return [out, *torch.autograd.grad(out, leaves, grad[:, :, own])]

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else SDPBackend.MATH):
        parts = list(zip(*on_ranks(mesh, rows, run).values(), strict=True))
    found = [torch.cat(parts[0], 2), torch.cat(parts[1], 2), sum(parts[2]), sum(parts[3])]
    for one, other in zip(found, [whole, *wanted], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_gradients_are_differentiated_again() -> None:
    """Hessian-vector products go by torch's own op, as they do without a plan."""
    query, key, value = operands(6, 1, 1, (4, 4), 0)
    leaves = [query, key, value]

    def second(out: Tensor, own: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        return list(torch.autograd.grad(first[0].square().sum(), own))

    with sdpa_kernel(SDPBackend.MATH):
        wanted = second(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves)

        def run(swap: Swap) -> list[Tensor]:
            own = [query[:, :, slice(*swap.ranges[0])].detach().requires_grad_(), *leaves[1:]]
            return second(causal_rows(*own, swap=swap), own)

        parts = list(on_ranks((2,), 6, run).values())
    assert torch.allclose(torch.cat([part[0] for part in parts], 2), wanted[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mesh", [(4,), (3,), (2, 2)])
def test_every_rank_has_as_much_work(mesh: tuple[int, ...]) -> None:
    """All count the same scores, of those under a mask one half; consecutive rows would have 7 times as many on the last of 4."""
    rows = 16 * math.prod(mesh)
    query, key, value = operands(rows, 1, 1, (8, 8), 0)

    def run(swap: Swap) -> tuple[float, float]:
        leaves = [x.detach().requires_grad_() for x in (query[:, :, slice(*swap.ranges[0])], key, value)]
        forward, backward = CallCounter("cpu"), CallCounter("cpu")
        with forward.tracker:
            out = causal_rows(*leaves, swap=swap)
        with backward.tracker:
            out.backward(torch.ones_like(out))
        return scores(forward), scores(backward)

    def scores(counter: CallCounter) -> float:
        kernels = [call.kernel for call in counter.calls if call.flops]
        return sum(kernel.work / (1 + skips_half(kernel)) for kernel in kernels if kernel)

    forward = 2 * 2 * (8 + 8) * rows * rows / 2 / math.prod(mesh)
    assert set(on_ranks(mesh, rows, run).values()) == {(forward, 2.5 * forward)}


def test_no_rank_has_more_than_its_rows_of_scores() -> None:
    """Nothing is as large as the rows times the keys: the peak grows with the rows alone."""
    peaks = []
    for rows in (512, 1024):
        query, key, value = operands(rows, 1, 1, (8, 8), 0)

        def run(swap: Swap, query: Tensor = query, key: Tensor = key, value: Tensor = value) -> int:
            leaves = [x.detach().requires_grad_() for x in (query[:, :, slice(*swap.ranges[0])], key, value)]
            counter = CallCounter("cpu")
            with counter.tracker:
                causal_rows(*leaves, swap=swap).sum().backward()
            return counter.tracker.peak_bytes

        peaks.append(max(on_ranks((2,), rows, run).values()))
    assert peaks[1] < 2.2 * peaks[0], peaks


def test_meshes_are_walked_in_order() -> None:
    """Ranks in order of their places have consecutive rows."""
    starts = [slot_range(12, zip((2, 3), coords))[0] for coords in itertools.product(range(2), range(3))]
    assert starts == [0, 2, 4, 6, 8, 10]


class NoHead:
    """A rank to which none of two heads falls."""

    def in_shape(self, index: int) -> tuple[int, ...]:
        return (3, 0, 5, 4)


@pytest.mark.parametrize("heads_of_mask", [0, 1])
def test_a_rank_without_a_head_meets_the_others_in_every_backward(heads_of_mask: int) -> None:
    """Whatever is differentiated has a gradient, if of zeros: the exchange behind it has to run on all ranks."""
    query, key, value = (torch.randn(3, 0, 5, 4, requires_grad=True) for _ in range(3))
    mask = torch.randn(heads_of_mask, 5, 5, requires_grad=True)
    local, args, kwargs = _localize(NoHead(), None, (query, key, value, mask, 0.0, False), {})  # type: ignore[arg-type]
    found = local(*args, **kwargs, dropout_p=0.1)
    assert found.shape == (3, 0, 5, 4)
    found.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in (query, key, value, mask))
