"""Products of runs of rows are priced by the rows of one run, from what was measured of them or of batched products."""

from __future__ import annotations

import pytest
import torch

from trainwright.ops.grouped import grouped_mm, grouped_outer
from trainwright.ops.kernel_table import KernelTable
from trainwright.ops.kernels import Kernel, kernel_of

ENDS = torch.tensor([3, 3, 20, 32], dtype=torch.int32)
MM, OUTER = torch.ops.trainwright.grouped_mm.default, torch.ops.trainwright.grouped_outer.default


def test_the_kernels_of_four_runs_of_thirty_two_rows() -> None:
    rows, matrices, other = torch.ones(32, 5), torch.ones(4, 5, 7), torch.ones(32, 7)
    forward = kernel_of(MM, (rows, matrices, ENDS), {}, grouped_mm(rows, matrices, ENDS))
    backward = kernel_of(OUTER, (rows, other, ENDS), {}, grouped_outer(rows, other, ENDS))
    assert forward == Kernel("grouped_mm", (4, 8, 5, 7), 2 * 32 * 5 * 7)
    assert backward == Kernel("grouped_outer", (4, 5, 8, 7), 2 * 32 * 5 * 7)
    assert forward.kind == backward.kind == "products"


@pytest.mark.parametrize(("measured", "rate"), [("grouped_mm", 3e9), ("bmm", 2e9)])
def test_what_stands_for_them(measured: str, rate: float) -> None:
    rates = {"mm fp32": [[32.0, 5.0, 7.0, 1e9]], "bmm fp32": [[4.0, 8.0, 5.0, 7.0, 2e9]]}
    table = KernelTable(rates | {f"{measured} fp32": [[4.0, 8.0, 5.0, 7.0, rate]]})
    assert table.seconds(Kernel("grouped_mm", (4, 8, 5, 7), 6), "fp32") == pytest.approx(6 / rate)
