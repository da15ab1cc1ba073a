"""Lightning Fabric around a planned model: `PlannedStrategy(plan)` as its strategy.

setup(model, optimizer)     the model laid out by the plan, the optimizer on its parameters
setup_dataloaders(loader)   whole batches on every rank; a loader's batch size is per process, as with DDP
backward, clip_gradients    as they are: gradients are the plan's own
no_backward_sync            nothing to do: accumulating several backwards is enough
save, load                  weights and optimizer by `Checkpointer`, into a folder

With `sync`, the processes are replicas of the plan that exchange by a method of `tw.sync`: each takes batches of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..artifacts import Plan, UserError
from ..runtime import Checkpointer, ParallelModule, full_state_dict
from ..sync import Sync
from .planned import (
    check_precision,
    clipped,
    global_loader,
    graft,
    plan_of,
    planned,
    switch_parameters,
)
from .replicated import Replication, folder_of, restored, without_sync

try:
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
except ImportError as error:
    raise ImportError(
        f"lightning is needed for this integration ({error}); install it: pip install 'trainwright[lightning]'"
    ) from None

REST = "rest.pt"
"""Of a saved state: what is neither model nor optimizer."""
_PRECISIONS = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}


class PlannedStrategy(DDPStrategy):
    """Fabric's strategy for one planned model: `Fabric(strategy=PlannedStrategy(plan), …)`.

    plan: the plan, or the path of its file. weights, loss_fn, seed: as of `tw.parallelize`; with `loss_fn` the model returns
    `LossOutput`. sync, sync_options: a method by which replicas of the plan exchange (`trainwright sync` lists them), as many
    as the processes make up; call `finish()` after the last step. keywords: `DDPStrategy`'s own.

    `fabric.setup` takes the model as it was built (on the CPU, or on the meta device with `weights` and
    `move_to_device=False`). Precision is the plan's: leave Fabric's out, or say the same. `fabric.save` takes a state with the
    model, one optimizer and plain values, and writes a folder; `fabric.load` goes on bit for bit.

    Not for Lightning's `Trainer`, which wraps the module before the optimizer is made.

    Raises `UserError` where another number of processes, precision or batch is asked for than the plan's.

    >>> import trainwright as tw
    >>> from lightning.fabric import Fabric
    >>> model = nn.Linear(3, 1)
    >>> loss_fn = lambda output, batch: output.square().mean()
    >>> plan = tw.plan(model, (torch.ones(4, 3),), hardware="cpu:1", loss_fn=loss_fn)
    >>> fabric = Fabric(accelerator="cpu", devices=1, strategy=PlannedStrategy(plan, loss_fn=loss_fn))
    >>> fabric.launch()
    >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    >>> fabric.backward(model(torch.ones(4, 3)).loss)
    >>> optimizer.step()
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        *,
        weights: str | os.PathLike[str] | None = None,
        loss_fn: Any = None,
        seed: int | None = None,
        sync: str | None = None,
        sync_options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        self.plan = plan_of(plan)
        self.replication = Replication(self.plan, sync, sync_options)
        self._how = {"weights": weights, "loss_fn": loss_fn, "seed": seed}
        self._module: ParallelModule | None = None
        self._backward_sync_control: Any = _NothingToSync()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return what deals a dataset to replicas, and all of that to each of their ranks, as `DistributedSampler` draws."""
        return {"num_replicas": self.replication.number, "rank": self.replication.index(self.global_rank)}

    @property
    def sync(self) -> Sync:
        """The method between replicas, with its bytes and rounds; `UserError` before the optimizer was set up."""
        if self.replication.sync is None:
            raise UserError(
                "a method between replicas is needed; there is none; give sync= a name, and set model and optimizer up first"
            )
        return self.replication.sync

    def finish(self) -> None:
        """Give all replicas the same parameters, those to evaluate or keep; a collective call, after the last step."""
        self.replication.finish()

    def setup_environment(self) -> None:
        """Join the process group, and look whether processes and precision are the plan's."""
        precision = getattr(self.precision, "precision", "32-true")
        if precision != "32-true":
            check_precision(self.plan, _PRECISIONS.get(precision, precision) or "no", f"precision={precision!r}")
        super().setup_environment()
        self._how["replicas"] = self.replication.check(self.world_size, "Fabric")

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is: each rank takes its part of it to its device."""

    def setup_module(self, module: nn.Module) -> Any:
        """Lay the module out by the plan."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Lay the module out by the plan, and let the optimizers update it."""
        if self._module is not None:
            raise UserError("one model is needed, the plan's; a second was set up; call it without setup")
        self._module = planned(module, self.plan, **self._how)
        for optimizer in optimizers:
            switch_parameters(optimizer, module, self._module)
        if module is not self._module:
            graft(module, self._module)  # Fabric asks the user's own module for parameters and weights
        return self._module, [self.replication.joined(self._module, each) for each in optimizers], scheduler

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of global batches, the same on every rank of a replica."""
        return global_loader(dataloader, self.plan, self.plan.num_ranks)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradients as one vector over all ranks, and return its norm."""
        if self._module is not None and self._module.pipe is not None:
            return self._clipped_over_stages(optimizer, float(max_norm), norm_type, error_if_nonfinite)
        norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _clipped_over_stages(self, optimizer: Any, max_norm: float, norm_type: float, strict: bool) -> torch.Tensor:
        assert self._module is not None
        self.precision.unscale_gradients(optimizer)
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        norm = clipped(self._module, parameters, max_norm, norm_type)
        assert norm is not None
        if strict and not torch.isfinite(norm):
            raise RuntimeError(f"a finite norm of the gradients is needed to clip by; got {float(norm)}")
        return norm

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights on every rank; a collective call."""
        return full_state_dict(module) if isinstance(module, ParallelModule) else super().get_module_state_dict(module)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write model and optimizer in pieces, each rank its own, and the rest beside them; a collective call."""
        if storage_options is not None or filter is not None:
            raise UserError(
                "a whole state is saved of a planned model; got a filter or storage_options; leave them out"
            )
        checkpointer, rest = self._checkpointer(path, state)
        checkpointer.save(0)
        if self.is_global_zero:
            plain = {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in rest.items()}
            torch.save(plain, Path(path) / REST)
        dist.barrier()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        """Put model, optimizer and what else stands in `state` back; return what was saved beside it."""
        if not isinstance(state, dict):
            raise UserError('a state to load into is needed, {"model": …, "optimizer": …}; got ' + type(state).__name__)
        if not (Path(path) / REST).is_file():
            raise UserError(f"a state that fabric.save wrote is needed; {path} has none; save one, or check the path")
        checkpointer, rest = self._checkpointer(path, state)
        assert self._module is not None
        restored(checkpointer, Path(path), self._module.replicas)
        found: dict[str, Any] = torch.load(Path(path) / REST, weights_only=True)
        lacking = [name for name in rest if name not in found]
        if lacking and strict:
            raise UserError(f"a state with {lacking[0]} is needed; {path} has none; leave it out, or pass strict=False")
        for name in [name for name in rest if name in found]:
            if hasattr(rest[name], "load_state_dict"):
                rest[name].load_state_dict(found.pop(name))
            else:
                state[name] = found.pop(name)
        return found

    def _checkpointer(self, path: Any, state: dict[str, Any]) -> tuple[Checkpointer, dict[str, Any]]:
        """Return what writes the model and the optimizer of a state, and the rest of it."""
        modules = [each for each in state.values() if isinstance(each, nn.Module)]
        optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
        if len(modules) != 1 or len(optimizers) != 1:
            raise UserError(
                f"a state with the model and its optimizer is needed; got {len(modules)} models and {len(optimizers)} optimizers; "
                "give one of each (for the weights alone, tw.full_state_dict)"
            )
        assert self._module is not None
        rest = {name: each for name, each in state.items() if each not in (*modules, *optimizers)}
        here, optimizer = self._module.replicas, without_sync(optimizers[0])
        folder = folder_of(Path(path), here)
        how: dict[str, Any] = {"sync": self.replication.sync, "asynchronous": False, "keep": 1}
        return Checkpointer(folder, self._module, optimizer, **how), rest


class _NothingToSync(_BackwardSyncControl):
    """Each backward sums its gradients where the plan has it; summing a sum later gives the same."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
