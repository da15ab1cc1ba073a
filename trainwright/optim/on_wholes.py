"""torch's optimizers that read whole parameters (Adafactor's factored moments, Muon's matrices) on the shards of a plan.

gathered    every rank gathers gradient and parameter, takes the same step, and keeps its part; its state is whole everywhere
owned       one rank takes the step, keeps the state, and sends the parameter: the work is shared out, for one more message

Which of the two is the plan's choice, by price. Of parameters that no rank holds a part of alone, nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ..numerics.hvp import placed_like
from .on_parts import OnParts, local


class OnWholes(OnParts):
    """Mixed into an optimizer of torch's that reads whole parameters. Made by `on_parts`; `own` names those of one owner."""

    updates_alone = False
    owners: Mapping[Tensor, int] = {}
    """The rank that steps on a parameter, where it is one."""

    def own(self, owned: set[Tensor]) -> None:
        """Say which parameters have one owner: the largest first, each goes to the rank with the least."""
        owners: dict[Tensor, int] = {}
        load = [0] * (dist.get_world_size() if dist.is_initialized() else 1)
        for param in sorted(owned, key=lambda each: -each.numel()):
            rank = load.index(min(load))
            owners[param] = rank
            load[rank] += param.numel()
        self.owners = owners

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "owners"}

    def _step_on_parts(self) -> None:
        for owned in self._rounds():
            self._step_on(owned)

    def _rounds(self) -> Iterator[list[tuple[dict[str, Any], Tensor]]]:
        """The parameters that are held whole at once: one, or one of each owner, so that all have something to do."""
        waiting: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param in self.owners:
                    waiting.setdefault(self.owners[param], []).append((group, param))
                else:
                    yield [(group, param)]
        while any(waiting.values()):
            yield [pairs.pop(0) for pairs in waiting.values() if pairs]

    def _step_on(self, pairs: list[tuple[dict[str, Any], Tensor]]) -> None:
        wholes = {param: self._whole(param) for _, param in pairs}
        own = dist.get_rank() if dist.is_initialized() else 0
        mine = [(group, param) for group, param in pairs if self.owners.get(param, own) == own]
        if mine:
            groups = [{**group, "params": [wholes[param]]} for group, param in mine]
            self._run(groups, {param: wholes[param] for _, param in mine})
        for _, param in pairs:
            if param in self.owners:
                dist.broadcast(wholes[param], self.owners[param])
            _take_back(param, wholes[param])

    def _whole(self, param: Tensor) -> Tensor:
        """The parameter with its gradient, in the user's shape, as a tensor that may be written to."""
        shape = getattr(param, "user_shape", tuple(param.shape))
        assert param.grad is not None
        whole = _gathered(param).detach().reshape(shape)
        whole.grad = _gathered(placed_like(param.grad, param)).reshape(shape)
        return whole

    def _keep(self, param: Tensor, part: Tensor, found: dict[str, Any]) -> None:
        self.state[param].update(found)


def _gathered(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    is_cut = any(place.is_shard() for place in tensor.placements)
    return tensor.full_tensor() if is_cut else tensor.to_local()


def _take_back(param: Tensor, whole: Tensor) -> None:
    """Write this rank's part of `whole` into the parameter, where it is not the parameter's own memory."""
    if local(param).data_ptr() == whole.data_ptr() and local(param).numel() == whole.numel():
        return
    assert isinstance(param, DTensor)
    placed = distribute_tensor(whole.reshape(param.shape), param.device_mesh, param.placements, src_data_rank=None)
    param.to_local().copy_(placed.to_local())


class Together(torch.optim.Optimizer):
    """Several optimizers as one, each for its own parameters: Muon for matrices, AdamW for the rest.

    >>> one, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> both = Together([torch.optim.SGD([one], lr=0.5), torch.optim.SGD([other], lr=0.25)])
    >>> one.grad = other.grad = torch.ones(1)
    >>> both.step()
    >>> one.item(), other.item(), len(both.param_groups)
    (0.5, 0.75, 2)
    """

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for member in members for group in member.param_groups], {})
        self.members = members

    @property
    def updates_alone(self) -> bool:
        """Whether each parameter's update reads nothing of any other."""
        return False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss, or `None`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for member in self.members:
            last = first + len(member.param_groups)
            member.param_groups, member.state = self.param_groups[first:last], self.state
            member.step()
            first = last
        return loss
