"""Block-wise 8-bit codes: the code book's facts, the nearest code by search, and the errors of a round trip."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from trainwright.numerics.quantise import Codebook, dequantise, dynamic_codebook, num_blocks, quantise

LINEAR = Codebook(torch.arange(256, dtype=torch.float64) / 255)


def round_trip(x: Tensor, book: Codebook, block_size: int) -> Tensor:
    return dequantise(*quantise(x, book, block_size), book, block_size)


def draws(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def test_the_signed_map_by_its_facts() -> None:
    book = dynamic_codebook(signed=True)
    assert book.values.shape == (256,)
    assert book.values[0].item() == pytest.approx(-0.9929687, abs=1e-7)
    assert book.values[254].item() == pytest.approx(0.9929687, abs=1e-7)
    assert book.values[255] == 1
    assert book.values[book.values > 0][0].item() == pytest.approx(5.5e-7, rel=1e-6)
    assert book.zero == 127
    assert -1 not in book.values
    torch.testing.assert_close(-book.values[:127].flip(0), book.values[128:255], rtol=0, atol=0)


def test_the_unsigned_map_by_its_facts() -> None:
    book = dynamic_codebook(signed=False)
    assert book.values[0] == 0
    assert book.zero == 0
    assert book.values[1].item() == pytest.approx(3.25e-7, rel=1e-6)
    assert book.values[254].item() == pytest.approx(0.99648, abs=1e-5)
    assert book.values[255] == 1


@pytest.mark.parametrize("signed", [True, False])
def test_each_decade_is_the_midpoints_of_equal_intervals(signed: bool) -> None:
    expected = {0.0, 1.0}
    for i in range(7):
        num = 2 ** (i if signed else i + 1)
        own = [10 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / num) for k in range(num)]
        expected |= {*own, *(-value for value in own)} if signed else set(own)
    by_hand = torch.tensor(sorted(expected), dtype=torch.float64)
    torch.testing.assert_close(dynamic_codebook(signed).values.double(), by_hand, rtol=1e-7, atol=0)


@example([0.550000011920929], False)  # just above the middle of two values, which rounds up to it
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), st.booleans())
def test_the_code_is_that_of_the_nearest_value(values: list[float], signed: bool) -> None:
    book, x = dynamic_codebook(signed), torch.tensor(values)
    distances = (x[:, None].double() - book.values.double()).abs()
    found = distances.gather(1, book.nearest(x).long()[:, None])[:, 0]
    torch.testing.assert_close(found, distances.amin(1), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_exact_around_every_boundary(signed: bool) -> None:
    book = dynamic_codebook(signed)
    middles = ((book.values[1:].double() + book.values[:-1].double()) / 2).float()
    x = torch.cat([middles, *(middles.nextafter(torch.tensor(to)) for to in (-2.0, 2.0))])
    distances = (x[:, None].double() - book.values.double()).abs()
    assert torch.equal(distances.gather(1, book.nearest(x).long()[:, None])[:, 0], distances.amin(1))


def test_every_value_is_its_own_code() -> None:
    for book in (dynamic_codebook(signed=True), dynamic_codebook(signed=False), LINEAR):
        assert book.nearest(book.values).tolist() == list(range(256))


@pytest.mark.parametrize(("block_size", "error"), [(256, 0.0085), (2048, 0.0097), (1 << 20, 0.0116)])
def test_the_error_of_normal_numbers(block_size: int, error: float) -> None:
    x = draws(1 << 20)
    found = (round_trip(x, dynamic_codebook(signed=True), block_size) - x).abs().mean().item()
    assert found == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize(
    ("block_size", "error", "lost", "slack"), [(256, 0.027, 0.011, 0.05), (2048, 0.041, 0.021, 0.05), (1 << 20, 0.105, 0.092, 0.2)]
)  # fmt: skip
def test_the_error_of_numbers_of_many_sizes(block_size: int, error: float, lost: float, slack: float) -> None:
    """A whole tensor's one scale is its largest value, which varies with the draw: hence that slack."""
    x = draws(1 << 20) ** 2 * (2 * draws(1 << 20, seed=1)).exp()
    found = round_trip(x, dynamic_codebook(signed=False), block_size)
    assert ((found - x).abs() / x).median().item() == pytest.approx(error, rel=slack)
    assert (found == 0).float().mean().item() == pytest.approx(lost, rel=slack)
    assert (round_trip(x, LINEAR, block_size) == 0).float().mean().item() > 0.55


@given(st.integers(1, 200), st.integers(16, 64), st.floats(-30, 30), st.integers(0, 2**31))
def test_blocks_are_apart_and_scales_are_their_largest(num: int, block_size: int, power: float, seed: int) -> None:
    x, book = draws(num, seed) * 10**power, dynamic_codebook(signed=True)
    codes, scales = quantise(x, book, block_size)
    assert scales.shape == (num_blocks(num, block_size),)
    for index, block in enumerate(x.split(block_size)):
        own, scale = quantise(block.clone(), book, block_size)
        assert own.tolist() == codes[index * block_size :][: len(block)].tolist()
        assert scales[index] == scale[0] == block.abs().max()
    again = round_trip(x, book, block_size)
    worst = x.abs().split(block_size)
    assert all(float((a - b).abs().max()) <= 0.0081 * float(c.max()) for a, b, c in
               zip(again.split(block_size), x.split(block_size), worst))  # fmt: skip


def test_zeros_empty_tensors_and_shapes() -> None:
    book = dynamic_codebook(signed=True)
    codes, scales = quantise(torch.zeros(3, 100), book)
    assert codes.shape == (3, 100)
    assert scales.tolist() == [0.0, 0.0]
    assert round_trip(torch.zeros(3, 100), book, 256).count_nonzero() == 0
    assert dequantise(torch.zeros(300, dtype=torch.uint8), torch.zeros(2), book).count_nonzero() == 0
    assert [tensor.shape for tensor in quantise(torch.empty(0, 4), book)] == [(0, 4), (0,)]


def test_signs_are_kept_where_asked() -> None:
    x = torch.tensor([1.0, -1e-8, 1e-8, 0.0, -0.0])
    book = dynamic_codebook(signed=True)
    assert quantise(x, book)[0].tolist() == [255, 127, 127, 127, 127]
    assert quantise(x, book, keep_sign=True)[0].tolist() == [255, 126, 127, 127, 127]


def test_a_nan_spoils_its_own_block_only() -> None:
    x = torch.ones(512)
    x[3] = torch.nan
    found = round_trip(x, dynamic_codebook(signed=True), 256)
    assert found[:256].isnan().all()
    assert found[256:].tolist() == [1.0] * 256


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.linspace(0, 1, 255), r"needs 256 ascending values in \[-1, 1\]; got shape \(255,\)"),
        (torch.linspace(0, 2, 256), r"from 0 to 2"),
        (torch.zeros(256), "ascending"),
        (torch.linspace(0.5, 0.5001, 256, dtype=torch.float64), "16 bits tell apart"),
    ],
)
def test_other_code_books_are_refused(values: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Codebook(values)
