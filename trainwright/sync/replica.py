"""Reads and writes a worker's copy of the model as one flat vector, and calls its optimizer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..artifacts import UserError


class Replica:
    """Gives access to the trainable parameters of `model`, in its order, as one vector; buffers stay each worker's own.

    For a planned module, the vector has this rank's part of each parameter. Vectors are in fp32 for bf16 and fp16 parameters,
    else in the parameters' dtype. Raises `UserError` for a model without trainable parameters, for parameters that are sharded
    in another way, and for parameters of several wide dtypes.

    >>> net = nn.Linear(2, 1)
    >>> replica = Replica(net, torch.optim.SGD(net.parameters(), lr=0.1))
    >>> replica.write(torch.tensor([1.0, 2.0, 3.0]))
    >>> net.bias.item(), replica.read().tolist()
    (3.0, [1.0, 2.0, 3.0])
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.is_sharded = getattr(getattr(model, "replicas", None), "size", 1) > 1
        """True if this worker is several ranks, each of which holds a part."""
        _check(self.params, hasattr(model, "replicas"))
        self.dims = tuple(tuple(local(param).shape) for param in self.params)
        """The shape of this rank's part of each parameter; `shapes` has its number of elements."""
        self.shapes = tuple(local(param).numel() for param in self.params)
        self.dtype = self.params[0].dtype if self.params[0].dtype.itemsize >= 4 else torch.float32

    @property
    def num_params(self) -> int:
        return sum(self.shapes)

    def read(self) -> Tensor:
        """Return a copy of the parameters ([num_params])."""
        return torch.cat([local(param).detach().reshape(-1).to(self.dtype) for param in self.params])

    def write(self, vector: Tensor) -> None:
        """Set the parameters from a vector."""
        for param, part in zip(self.params, vector.split(self.shapes)):
            own = local(param).detach()
            own.copy_(part.view(own.shape))

    def read_gradient(self) -> Tensor:
        """Return a copy of the gradients, zeros where one is missing; raise `UserError` if all are missing."""
        if all(param.grad is None for param in self.params):
            raise UserError("gradients are needed; no parameter has one; call loss.backward() before sync.step(loss)")
        grads = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.params]
        return torch.cat([grad.detach().reshape(-1).to(self.dtype) for grad in grads])

    def write_gradient(self, vector: Tensor) -> None:
        """Set the gradients from a vector."""
        for param, part in zip(self.params, vector.split(self.shapes)):
            part = part.view(local(param).shape).to(param.dtype)
            if param.grad is None:
                param.grad = _like(param, part)
            else:
                local(param.grad).copy_(part)

    def gradients_by(self, closure: Callable[[], Tensor]) -> Tensor:
        """Compute a loss and its gradients, which replace the old ones, and return the loss."""
        for param in self.params:
            param.grad = None
        with torch.enable_grad():
            loss = closure()
            loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Run the optimizer's step."""
        assert self.optimizer is not None
        self.optimizer.step()

    def settings(self, name: str, default: Any = 0.0) -> Tensor | float:
        """Return a setting of the optimizer's groups (`lr`): a number if all are equal, else a vector of each element's value."""
        assert self.optimizer is not None
        by_param = {
            id(param): float(group.get(name, default))
            for group in self.optimizer.param_groups
            for param in group["params"]
        }
        values = [by_param.get(id(param), float(default)) for param in self.params]
        if len(set(values)) == 1:
            return values[0]
        return torch.cat([torch.full((size,), value, dtype=self.dtype) for value, size in zip(values, self.shapes)])

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Set a setting of the optimizer's groups to 0 while the context lasts."""
        assert self.optimizer is not None
        groups = [group for group in self.optimizer.param_groups if name in group]
        before = [group[name] for group in groups]
        for group in groups:
            group[name] = 0.0
        try:
            yield
        finally:
            for group, value in zip(groups, before):
                group[name] = value

    def count_step(self) -> None:
        """Call the optimizer's step without gradients, so that schedulers count the step of a method that updates by itself."""
        assert self.optimizer is not None
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        self.optimizer.step()
        for param, grad in zip(self.params, grads):
            param.grad = grad

    def digest(self) -> bytes:
        """Return a digest of the parameters, of 32 bytes."""
        return digest(self.read())


@dataclass(frozen=True)
class Worker:
    """The worker on which a method runs: its rank, the number of workers, and its replica."""

    rank: int
    size: int
    replica: Replica


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the local shard of a `DTensor`, or the whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(param: Tensor, part: Tensor) -> Tensor:
    """Return a part in its parameter's memory order, as torch's fused optimizers need it, and layout, if that is a `DTensor`."""
    part = torch.empty_like(local(param)).copy_(part)
    if not isinstance(param, DTensor):
        return part
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).digest()


def _check(params: list[nn.Parameter], is_planned: bool) -> None:
    if not params:
        raise UserError("a model with trained parameters is needed; all are frozen; set requires_grad on some")
    if not is_planned and any(isinstance(param, DTensor) for param in params):
        raise UserError(
            "whole parameters, or those of a planned module, are needed on each worker; these are sharded otherwise; give the "
            "model itself, or what tw.parallelize(model, plan, replicas=N) returns"
        )
    wide = {param.dtype if param.dtype.itemsize >= 4 else torch.float32 for param in params}
    if len(wide) > 1:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in wide))
        raise UserError(f"parameters of one type are needed; got {names}; convert the model to one")
