"""Problems for `trainwright solve`: each function returns a dict with `solver`, `arguments` and `options`.

trainwright solve examples/solvers/problem.py:saddle --html saddle.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.solvers.minimax import SpiderGDA


def saddle(num: int = 300, step: float = 0.05, seed: int = 0) -> dict[str, Any]:
    """A line fitted to `num` points, against an adversary who shifts them at a price."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 2, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.tensor([1.0, -0.7], dtype=torch.float64)

    def fun(x: Tensor, y: Tensor, indices: Tensor) -> Tensor:
        errors = (inputs[indices] + y) @ x - targets[indices]
        return (errors**2).mean() / 2 + 0.05 * x @ x - 2.0 * y @ y

    start = torch.tensor([-1.5, 1.5], dtype=torch.float64)
    method = SpiderGDA(step, step / 2, batch_size=8, period=40, output_rule="last", batches="shared")
    return {
        "solver": "minimax",
        "arguments": [fun, start, 0 * start, num],
        "options": {"method": method, "max_iterations": 4000, "rtol": 1e-6, "seed": seed},
    }


def transport(size: int = 200, reg: float = 0.005, seed: int = 0) -> dict[str, Any]:
    """Two clouds of points, matched at the least squared distance."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    other = 0.5 * torch.randn(size + 20, 2, generator=generator, dtype=torch.float64) + 1.0
    cost = torch.cdist(one, other) ** 2
    return {"solver": "transport", "arguments": [[], [], cost / cost.max(), reg], "options": {"atol": 1e-9}}
