"""Replaces `DistributedDataParallel` in a simulated process group: the same buckets and all-reduces, without real values.

torch's own C++ reducer compares the ranks' parameters by value, which fake tensors do not have. The replacement makes the same
buckets in the same order (the last parameters first; 1 MiB in the first, `bucket_cap_mb` in the others), each a flat tensor that
lives as long as the model. Gradients are separate tensors unless `gradient_as_bucket_view` is set. The all-reduce of a full
bucket overlaps with the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_FIRST_BUCKET_BYTES = 2**20
_MIB = 2**20


@contextmanager
def stood_in() -> Iterator[None]:
    """Make `DistributedDataParallel(module, …)` construct the replacement while the context lasts."""
    names = {"__init__": _made, "forward": _forward}
    before = {name: getattr(DistributedDataParallel, name) for name in names}
    try:
        for name, function in names.items():
            setattr(DistributedDataParallel, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(DistributedDataParallel, name, function)


def bucket_of(params: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Return the parameters of each bucket, the last layers' first; a bucket is full when it has reached its cap.

    >>> layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]  # 1 MiB each
    >>> [len(bucket) for bucket in bucket_of([layer.weight for layer in layers], 2 * 2**20)]
    [1, 2, 1]
    """
    buckets: list[list[nn.Parameter]] = [[]]
    filled = 0
    for param in reversed(params):
        cap = _FIRST_BUCKET_BYTES if len(buckets) == 1 else cap_bytes
        if filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += param.numel() * param.element_size()
    return [bucket for bucket in buckets if bucket]


def _made(
    self: Any, module: nn.Module, *_: Any, bucket_cap_mb: float | None = None, gradient_as_bucket_view: bool = False,
    **__: Any,
) -> None:  # fmt: skip
    nn.Module.__init__(self)
    self.module, self.are_views = module, gradient_as_bucket_view
    self.require_backward_grad_sync = True
    params = [param for param in module.parameters() if param.requires_grad]
    buckets = bucket_of(params, int((bucket_cap_mb or 25) * _MIB))
    self.sizes = [[param.numel() for param in bucket] for bucket in buckets]
    for place, bucket in enumerate(buckets):
        first = bucket[0]
        flat = torch.zeros(sum(self.sizes[place]), dtype=first.dtype, device=first.device)
        self.register_buffer(f"bucket_{place}", flat, persistent=False)
    self.is_hooked = False


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped module; the first call registers the gradient hooks, since only now do parameters have their final form."""
    if not self.is_hooked:
        self.is_hooked = True
        _hook(self)
    return self.module(*args, **kwargs)


def _hook(self: Any) -> None:
    params = [param for param in self.module.parameters() if param.requires_grad]
    place = 0
    order = list(reversed(params))
    self.waiting = [len(sizes) for sizes in self.sizes]
    self.members = []
    for bucket, sizes in enumerate(self.sizes):
        members = order[place : place + len(sizes)]
        place += len(sizes)
        self.members.append(members)
        for param, part in zip(members, getattr(self, f"bucket_{bucket}").split(sizes)):
            param.register_post_accumulate_grad_hook(_Arrival(self, bucket, part))


class _Arrival:
    """Post-accumulate hook of one parameter: copies its gradient into its bucket and all-reduces the bucket once it is full."""

    def __init__(self, owner: Any, bucket: int, part: Tensor) -> None:
        self.owner, self.bucket, self.part = owner, bucket, part

    def __call__(self, param: Tensor) -> None:
        owner = self.owner
        if not owner.require_backward_grad_sync or param.grad is None:
            return
        part = self.part.view(param.shape)
        if param.grad.untyped_storage() is not part.untyped_storage():
            part.copy_(param.grad)
            if owner.are_views:
                param.grad = part
        owner.waiting[self.bucket] -= 1
        if owner.waiting[self.bucket] == 0:
            torch.distributed.all_reduce(getattr(owner, f"bucket_{self.bucket}"), async_op=True)
        if not any(owner.waiting):
            _finish(owner)


def _finish(owner: Any) -> None:
    """Copy the reduced buckets back into the gradients and reset the counts for the next backward."""
    for bucket, (members, sizes) in enumerate(zip(owner.members, owner.sizes)):
        owner.waiting[bucket] = len(sizes)
        for param, part in zip(members, getattr(owner, f"bucket_{bucket}").split(sizes)):
            if not owner.are_views and param.grad is not None:
                param.grad.copy_(part.view(param.shape))
