"""Stand-ins without memory: the user's model and batch as fake CPU tensors, the user's own objects untouched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from . import private

FakeMode = private.FakeTensorMode
_SMALL_BYTES = 16 * 2**20


def new_mode() -> FakeMode:
    """Return a fresh fake-tensor mode; real tensors may meet fakes in it (constants of a model)."""
    return private.FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: Tensor, mode: FakeMode) -> Tensor:
    """Return a fake CPU tensor of the same shape, strides and type; a parameter stays one."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def faked(model: nn.Module, mode: FakeMode) -> Iterator[nn.Module]:
    """Give a copy of `model` whose parameters and buffers are fakes; nothing of the user's is copied or changed.

    A model that cannot be copied (it holds a lock, a file) lends its own modules for the time, with fakes in place of
    the tensors, which come back afterwards.
    """
    check_devices(model)
    memo = _stand_ins(model, mode)
    try:
        copied = copy.deepcopy(model, dict(memo))
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        copied = None
    if copied is not None:
        yield copied
        return
    with _lent(model, memo):
        yield model


def check_devices(model: nn.Module) -> None:
    """Raise `UserError` where the model's tensors are on several devices; those on the meta device are on none.

    The batch may be elsewhere: a planned module takes it to its own device.
    """
    first: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "meta":
            first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in list(first.items())[:2])
        raise UserError(
            f"a model on one device is needed; {places}; move it as a whole, model.to(device), or build it on the cpu: "
            "a plan says what each device holds"
        )


def _stand_ins(model: nn.Module, mode: FakeMode) -> dict[int, Any]:
    """Return the memo of a deep copy: id of a tensor → what takes its place."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute in vars(module).values():
            # a plain attribute keeps its value: the export lifts it as a constant
            if isinstance(attribute, Tensor) and attribute.device.type != "meta":
                memo[id(attribute)] = _own(attribute)
            elif isinstance(attribute, Tensor):
                memo[id(attribute)] = fake_like(attribute, mode)
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = fake_like(tensor, mode)
    return memo


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor's values, cut off from the user's where a forward might count in them (`self.calls += 1`)."""
    is_small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
    return tensor.detach().clone() if is_small and tensor.layout is torch.strided else tensor.detach()


@contextmanager
def _lent(model: nn.Module, memo: dict[int, Any]) -> Iterator[None]:
    saved: list[tuple[dict[str, Any], str, Tensor]] = []
    modes = [(module, module.training) for module in model.modules()]
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            saved.extend((table, name, tensor) for name, tensor in table.items() if tensor is not None)
    try:
        for table, name, tensor in saved:
            table[name] = memo[id(tensor)]
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor
        for module, training in modes:
            module.training = training
