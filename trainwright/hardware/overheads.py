"""What a training step takes beyond its kernels: Python, the dispatcher and autograd, found on small networks of their own.

The networks are written as models are (modules in modules, projections, attention, normalisation, residuals) and so
narrow that their kernels hardly count. What a phase of their steps takes, less what the measured kernels say, is
shared by its calls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.flops import moves_nothing
from ..ops.kernel_table import KernelTable
from ..ops.kernels import Kernel, kernel_of
from ..torch_internals.private import TorchDispatchMode
from .kernels import Clock

_PHASES = ("forward", "backward", "update")


def overheads(table: KernelTable, clock: Clock) -> dict[str, float]:
    """Return the seconds that each call of a phase takes beyond its kernel, views and allocations counted as calls."""
    beyond_s: dict[str, float] = defaultdict(float)
    num_calls: dict[str, int] = defaultdict(int)
    for make in (_transformer, _convolutional):
        step = _Step(*make())
        for phase, kernel_s, count in step.kernels(table):
            beyond_s[phase] -= kernel_s
            num_calls[phase] += count
        for phase, taken_s in step.seconds(clock).items():
            beyond_s[phase] += taken_s
    return {f"{phase}_s": max(beyond_s[phase] / num_calls[phase], 0.0) for phase in _PHASES}


class _Step:
    """A training step of a small network, its phases apart."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        self._model, self._inputs, self._labels = model, inputs, labels
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False, fused=False)
        self._loss: Any = None
        for phase in _PHASES:
            self._run(phase)

    def _run(self, phase: str) -> None:
        if phase == "forward":
            self._optimizer.zero_grad()
            self._loss = functional.cross_entropy(self._model(self._inputs), self._labels)
        elif phase == "backward":
            self._loss.backward()
        else:
            self._optimizer.step()

    def kernels(self, table: KernelTable) -> list[tuple[str, float, int]]:
        """Return of each phase the seconds of its kernels and the number of its calls."""
        found = []
        for phase in _PHASES:
            with _Calls() as calls:
                self._run(phase)
            seconds = [table.seconds(kernel, "fp32") or 0.0 for kernel in calls.kernels]
            found.append((phase, sum(seconds), calls.num_calls))
        return found

    def seconds(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of each phase: its share, by this process's own clock, of whole steps by `clock`."""
        spent: dict[str, float] = defaultdict(float)

        def whole() -> None:
            for phase in _PHASES:
                begin = time.perf_counter()
                self._run(phase)
                spent[phase] += time.perf_counter() - begin

        step_s = clock(whole, 0.5)
        return {phase: step_s * spent[phase] / sum(spent.values()) for phase in _PHASES}


class _Calls(TorchDispatchMode):
    """The kernels of what runs inside, and the number of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_calls += 1
        if not moves_nothing(func):
            self.kernels.append(kernel_of(func, args, kwargs or {}, out))
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], self.num_heads, -1)
        query, key, value = (
            project(hidden).view(shape).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(hidden.shape))


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), _Attention(width, num_heads=2)
        self.between = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.before(hidden)))
        return hidden + self.dropout(self.feed_forward(self.between(hidden)))


class _Residual(nn.Module):
    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
            nn.ReLU(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
        )

    def forward(self, image: Tensor) -> Tensor:
        return functional.relu(image + self.branch(image))


def _transformer() -> tuple[nn.Module, Tensor, Tensor]:
    width, num_classes = 32, 16
    layers = [_Layer(width) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(num_classes, width), *layers, nn.LayerNorm(width), nn.Linear(width, num_classes))
    tokens = torch.arange(2 * 8).view(2, 8) % num_classes
    return nn.Sequential(model, nn.Flatten(0, 1)), tokens, tokens.flatten()


def _convolutional() -> tuple[nn.Module, Tensor, Tensor]:
    width, num_classes = 16, 16
    blocks = [_Residual(width) for _ in range(4)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)
    return model, torch.ones(4, 3, 8, 8), torch.arange(4)
