"""Hugging Face Accelerate around a planned model: `PlannedAccelerator` in place of `Accelerator`.

prepare(model, optimizer, loader, scheduler)   the model laid out by the plan, the optimizer on its parameters
accumulate, backward, clip_grad_norm_          as they are: gradients are the plan's own
gather, gather_for_metrics, reduce             nothing to do: every rank sees the whole batch's outputs
save_state, load_state                         weights and optimizer by `Checkpointer`, the rest by Accelerate
save_model, get_state_dict, unwrap_model       the whole weights; the user's class, for `save_pretrained`

With `sync`, the processes are replicas of the plan that exchange by a method of `tw.sync`: each takes batches of its own, the
optimizer's step exchanges, `gather` and its like join what the replicas have, and each saves its own state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..artifacts import Plan, UserError
from ..launch.group import wait_for_others
from ..runtime import Checkpointer, ParallelModule, full_state_dict
from ..sync import Sync
from ..torch_internals.private import flatten
from .planned import (
    check_precision,
    clipped,
    global_loader,
    plan_of,
    planned,
    skeleton,
    switch_parameters,
)
from .replicated import Replication, folder_of, joined_rows, restored, summed, without_sync

try:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import recursively_apply
except ImportError as error:
    raise ImportError(
        f"accelerate is needed for this integration ({error}); install it: pip install 'trainwright[accelerate]'"
    ) from None

REFUSED_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config")
STATE = "planned"
"""The folder, in a state that Accelerate saves, of weights and optimizer."""


class PlannedAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator` for one planned model.

    plan: the plan, or the path of its file. weights, loss_fn, seed: as of `tw.parallelize`; with `loss_fn` the model returns
    `LossOutput`. sync, sync_options: a method by which replicas of the plan exchange (`trainwright sync` lists them), as many
    as the processes make up. Everything else is `Accelerator`'s own; mixed precision, if given, has to be the plan's.

    `prepare` takes the model as it was built (on the CPU, or on the meta device with `weights`), and an optimizer of its
    parameters. A loader's batch size counts as in Accelerate: per process, or over all of them with `split_batches`; over
    all it is the plan's, once for each replica. Batches of a prepared loader are whole on every rank of a replica, and so are
    outputs under `torch.no_grad()`. Call `finish()` after the last step: between rounds replicas have parameters of their own.

    Raises `UserError` where another number of processes, precision, batch or way of sharding is asked for than the plan's.

    >>> import trainwright as tw
    >>> model = nn.Linear(3, 1)
    >>> loss_fn = lambda output, batch: output.square().mean()
    >>> plan = tw.plan(model, (torch.ones(4, 3),), hardware="cpu:1", loss_fn=loss_fn)
    >>> accelerator = PlannedAccelerator(plan, loss_fn=loss_fn, cpu=True)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 3)), batch_size=4)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> for batch in loader:
    ...     accelerator.backward(model(*batch).loss)
    ...     optimizer.step()
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
        self.plan = plan_of(plan)
        self.replication = Replication(self.plan, sync, sync_options)
        self._how = {"weights": weights, "loss_fn": loss_fn, "seed": seed}
        self._adopted: ParallelModule | None = None
        self._skeleton: nn.Module | None = None
        self._checkpointer: Checkpointer | None = None
        for name in REFUSED_PLUGINS:
            if keywords.get(name) is not None:
                raise UserError(f"no {name} is needed beside a plan, which lays the model out; got one; leave it out")
        if keywords.get("mixed_precision") is not None:
            check_precision(
                self.plan, str(keywords["mixed_precision"]), f"mixed_precision={keywords['mixed_precision']!r}"
            )
        super().__init__(**keywords)
        self._how["replicas"] = self.replication.check(self.num_processes, "Accelerate")
        if self.mixed_precision != "no":  # from a configuration file, too
            check_precision(self.plan, self.mixed_precision, f"mixed_precision={self.mixed_precision!r}")
        if str(self.distributed_type).rpartition(".")[2] not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise UserError(
                f"plain processes are needed, as the plan lays the model out; Accelerate is set to {self.distributed_type}; "
                "start with torchrun, or take that out of accelerate's configuration"
            )

    @property
    def module(self) -> ParallelModule:
        """The planned model; `UserError` before it was prepared."""
        found = [model for model in self._models if isinstance(model, ParallelModule)]
        if not found:
            raise UserError("a prepared model is needed; there is none; call accelerator.prepare(model, …) first")
        return found[0]

    @property
    def sync(self) -> Sync:
        """The method between replicas, with its bytes and rounds; `UserError` before the optimizer was prepared."""
        if self.replication.sync is None:
            raise UserError(
                "a method between replicas is needed; there is none; give sync= a name, and prepare model and optimizer first"
            )
        return self.replication.sync

    def finish(self) -> None:
        """Give all replicas the same parameters, those to evaluate or keep; a collective call, after the last step."""
        self.replication.finish()

    def end_training(self) -> None:
        """End trackers and the process group, once every rank has come here: one that is late would find its peers gone."""
        if self.num_processes > 1:
            wait_for_others()
        super().end_training()

    def adopt(self, module: ParallelModule, like: nn.Module) -> None:
        """Take a planned module as prepared; `like` is the user's model that it was made of, or a `skeleton`."""
        self._adopted, self._skeleton = module, like
        self._models.append(module)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as `Accelerator.prepare` does; the model comes back laid out by the plan."""
        models = [each for each in args if isinstance(each, nn.Module) and each not in self._models]
        if len(models) + len(self._models) > 1:
            raise UserError(
                f"one model is needed, the plan's; prepare got {len(models) + len(self._models)}; call the others unprepared"
            )
        if models:
            args = self._with_planned(models[0], args)
        return super().prepare(*args, device_placement=device_placement)

    def _with_planned(self, model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if model is self._adopted:  # as the Trainer does after `free_memory`
            self._models.append(model)
            return args
        like = model if isinstance(model, ParallelModule) else skeleton(model)
        module = planned(model, self.plan, **self._how)
        for each in args:
            if isinstance(each, torch.optim.Optimizer):
                switch_parameters(each, model, module)
        self.adopt(module, like)
        return tuple(module if each is model else each for each in args)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Return the planned model as it is: it is on its device, and computes in the plan's precision."""
        return model if model in self._models else self.prepare(model)

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Prepare an optimizer; with a sync method, it is one whose step exchanges. The model is prepared before, or beside it."""
        if self.replication.chosen is not None and not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = self.replication.joined(self.module, optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of global batches, the same on every rank of a replica; replicas take turns."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        replicas = self.replication.number
        loader = self._of_a_replica(data_loader, replicas)
        prepared = prepare_data_loader(
            loader,
            self.device,
            num_processes=replicas,
            process_index=self.replication.index(self.process_index),
            even_batches=self.even_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=list(self.rng_types) if self.rng_types is not None else None,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def _of_a_replica(self, data_loader: Any, replicas: int) -> Any:
        if not self.split_batches or replicas == 1:
            return global_loader(data_loader, self.plan, 1 if self.split_batches else self.plan.num_ranks)
        raise UserError(
            f"batches of one process are needed where {replicas} replicas take their own; got split_batches=True; leave it out, "
            "and give the loader the batch of one process"
        )

    def gather(self, tensor: Any) -> Any:
        """Return `tensor`: every rank has the whole batch's; of replicas, the rows of all, one after the other."""
        here = self.module.replicas if self.replication.number > 1 else None
        return tensor if here is None else recursively_apply(lambda each: joined_rows(each, here), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return `input_data`: every rank has the whole batch's, and no example twice; of replicas, those of all."""
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in flatten(input_data)[0]):
            if self.replication.number > 1:
                raise UserError(
                    "tensors are needed to be gathered from replicas; got other objects; make tensors of them, or gather them "
                    "with torch.distributed over module.replicas.across"
                )
            return input_data
        return super().gather_for_metrics(
            input_data
        )  # of what was repeated for a full batch, the rows that the last has

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return `tensor` times `scale`: every rank has the whole batch's; of replicas, the sum or the mean of theirs."""
        if self.replication.number > 1:
            here = self.module.replicas
            scale = scale / here.number if reduction == "mean" else scale
            tensor = tensor if reduction == "none" else recursively_apply(lambda each: summed(each, here), tensor)
        return tensor if scale == 1.0 else recursively_apply(lambda each: each * scale, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return `tensor`: it has one shape on all ranks of a replica, and `gather` takes replicas' unequal ones."""
        return tensor

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients as one vector over all ranks, and return its norm."""
        self.unscale_gradients()
        parameters = list(parameters)
        over_stages = clipped(self.module, parameters, max_norm, norm_type) if self.plan.pipeline is not None else None
        if over_stages is not None:
            return over_stages
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the user's own class without its weights, on the meta device, for its configuration and `save_pretrained`.

        Give the weights beside: `unwrap_model(model).save_pretrained(folder, state_dict=accelerator.get_state_dict(model))`.
        """
        if isinstance(model, ParallelModule):
            return self._skeleton
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the whole weights on the first rank and nothing on the others; a collective call."""
        if not isinstance(model, ParallelModule):
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model, only_rank=0)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **keywords: Any) -> Any:
        """Save as `Accelerator.save_state` does; weights and optimizer in pieces, each rank its own; a collective call."""
        with self._without_model():
            location = super().save_state(output_dir, safe_serialization, **keywords)
        self.wait_for_everyone()
        self.checkpointer(location).save(0)
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **keywords: Any
    ) -> None:
        """Load as `Accelerator.load_state` does; a collective call."""
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest_state()
        if not (folder / STATE).is_dir() or not self.restored(folder):
            raise UserError(
                f"a state that PlannedAccelerator.save_state wrote is needed; {folder} has none; save one, or check the path"
            )
        with self._without_model():
            super().load_state(str(folder), load_kwargs, **keywords)

    def restored(self, folder: Any) -> bool:
        """Restore weights, optimizer and method from a saved state; `False` where it has none; a collective call.

        Of another number of replicas, a new one begins with the state of one that was there.
        """
        return restored(self.checkpointer(folder), Path(folder) / STATE, self.module.replicas)

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        """Leave model and optimizer out of what Accelerate itself saves or loads."""
        held = [(each, list(each)) for each in (self._models, self._optimizers)]
        for each, _ in held:
            each.clear()
        try:
            yield
        finally:
            for each, contents in held:
                each.extend(contents)

    def _newest_state(self) -> Path:
        folder = Path(self.project_dir or ".") / "checkpoints"
        found = sorted(folder.glob("checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        if not self.project_configuration.automatic_checkpoint_naming or not found:
            raise UserError("a folder to load from is needed; none was given; pass input_dir=")
        return found[-1]

    def checkpointer(self, folder: Any) -> Checkpointer:
        """Return what saves and loads the module and the prepared optimizer under `folder`; a collective call."""
        if len(self._optimizers) != 1:
            raise UserError(
                f"one prepared optimizer is needed to save or load a state; there are {len(self._optimizers)}; prepare it with the "
                "model, and put the parameters of several into groups of one"
            )
        optimizer = without_sync(self._optimizers[0].optimizer)
        if self._checkpointer is None or self._checkpointer.optimizer is not optimizer:
            self._checkpointer = Checkpointer(
                self._folder(folder), self.module, optimizer, sync=self.replication.sync, asynchronous=False, keep=1
            )
        else:
            self._checkpointer.move_to(self._folder(folder))
        return self._checkpointer

    def _folder(self, folder: Any) -> Path:
        """The folder of weights and optimizer; of replicas, each its own."""
        here, found = self.module.replicas, Path(folder) / STATE
        return folder_of(found, here)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the whole weights under the user's names, as `Accelerator.save_model` does; a collective call."""
        super().save_model(model, save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()
