"""The rules of Fourier transforms: what they keep whole is what is transformed, and parts of the rest give parts of the result."""

from __future__ import annotations

import pytest
import torch

from trainwright.ops import Call, TensorSpec, signature_of

REAL = torch.randn(4, 6, 8, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
COMPLEX = torch.complex(REAL, REAL.flip(0))
FORWARD, BACK = ("rfft", "ihfft"), ("fft", "ifft", "irfft", "hfft")
DEFAULTS = {"": {3}, "2": {2, 3}, "n": {0, 1, 2, 3}}
CASES = [(kind + end, (), dims) for kind in (*FORWARD, *BACK) for end, dims in DEFAULTS.items()]
CASES += [
    ("fft", (None, 1), {1}),
    ("rfft", (5, -2), {2}),
    ("fft2", (None, (0, 2)), {0, 2}),
    ("irfftn", ((6, 12),), {2, 3}),
    ("fftn", (None, (1,)), {1}),
]


@pytest.mark.parametrize(("name", "arguments", "dims"), CASES)
def test_what_is_transformed_stays_whole_and_the_rest_may_be_split(name: str, arguments: tuple, dims: set[int]) -> None:
    value = REAL if name.startswith(FORWARD) else COMPLEX
    transform = getattr(torch.fft, name)
    whole = transform(value, *arguments)
    specs = [TensorSpec(tuple(each.shape), each.dtype) for each in (value, whole)]
    signature = signature_of(Call(f"fft_{name}", (specs[0], *arguments), {}, (specs[1],)))
    assert signature.known
    (given,), (made,) = signature.inputs, signature.outputs
    for dim in range(4):
        assert (given[dim][0] in signature.whole) == (dim in dims)
        if dim not in dims:
            assert given[dim] == made[dim]
            parts = [transform(part, *arguments) for part in value.tensor_split(2, dim)]
            torch.testing.assert_close(torch.cat(parts, dim), whole)
