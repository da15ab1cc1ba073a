"""What all integrations need: a planned module that is called with whole batches, and the objects around it that follow.

batches in, whole outputs out          `planned`, `global_loader`
the user's class, without its memory   `skeleton`
the user's optimizer                   `switch_parameters`
whole weights, to files and back       `load_weights`
gradients clipped over stages          `clipped`
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..artifacts import Plan, UserError
from ..capture.export import as_batch
from ..runtime import ParallelModule, parallelize, shard_batch
from ..runtime.batch import global_batch_size
from ..runtime.checkpoint.training_state import saved_buffers
from ..runtime.clipping import clip_grad_norm_
from ..runtime.extents import whole_extent
from ..runtime.weights import reader
from ..torch_internals.private import flatten, unflatten
from .same_batches import SameBatches

PRECISIONS = {None: "no", "bf16": "bf16", "fp16": "fp16"}
"""What a plan's autocast is called by Accelerate and its like."""


def plan_of(plan: Plan | str | os.PathLike[str]) -> Plan:
    """Return a plan, which may be given as the path of its file."""
    return plan if isinstance(plan, Plan) else Plan.from_json(plan)


def planned(
    model: nn.Module,
    plan: Plan,
    weights: str | os.PathLike[str] | None = None,
    loss_fn: Any = None,
    seed: int | None = None,
    replicas: int = 1,
) -> ParallelModule:
    """Return `model` as `plan` lays it out, called with the whole batch on every rank, of replicas with the whole of their own.

    Each rank takes its own part of the batch. Under `torch.no_grad()` outputs are whole tensors on every rank. A module that
    `tw.parallelize` made already is taken as it is.
    """
    module = (
        model
        if isinstance(model, ParallelModule)
        else parallelize(model, plan, weights, loss_fn=loss_fn, seed=seed, replicas=replicas)
    )
    if module.pipe is not None:
        module.pipe.shares_outputs = True
    same = SameBatches(module.device, module.replicas.inside, module.replicas.size)

    def take_part(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        batch = as_batch(kwargs if kwargs else args)
        same.see(batch)
        part = shard_batch(plan, batch, rows="all")
        return ((), part) if isinstance(part, Mapping) else (tuple(part), {})

    def make_whole(module: nn.Module, args: Any, output: Any) -> Any:
        return output if torch.is_grad_enabled() else whole(output, in_fp32=plan.autocast is not None)

    module.register_forward_pre_hook(take_part, with_kwargs=True)
    module.register_forward_hook(make_whole)
    return module


def whole(tree: Any, in_fp32: bool = False) -> Any:
    """Return `tree` with whole tensors in place of `DTensor`s, those of lower precision `in_fp32`; a collective call."""
    leaves, form = flatten(tree)
    found = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    low = (torch.bfloat16, torch.float16)
    return unflatten(
        [leaf.float() if in_fp32 and isinstance(leaf, Tensor) and leaf.dtype in low else leaf for leaf in found], form
    )


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on the meta device: its class, its names, its configuration, and no weights.

    >>> copied = skeleton(nn.Linear(2, 3))
    >>> copied, copied.weight.device
    (Linear(in_features=2, out_features=3, bias=True), device(type='meta'))
    """
    memo: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    return copy.deepcopy(model, memo)


def switch_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, module: ParallelModule) -> None:
    """Let an optimizer that was made of `model`'s parameters update those of `module`, group by group.

    Of a plan with pipeline stages, each keeps those that it has in its groups, some of which may be empty. Raises `UserError`
    when it holds a parameter of neither, or has made steps already.
    """
    theirs = {id(param): name for name, param in model.named_parameters()}
    ours = dict(module.named_parameters())
    held = {id(param) for param in ours.values()}
    if all(id(param) in held for group in optimizer.param_groups for param in group["params"]):
        return
    if optimizer.state:
        raise UserError(
            "an optimizer that has made no step is needed to go over to the planned model's parameters; this one has state; "
            "prepare it right after it is made, and load its state from a checkpoint"
        )
    for group in optimizer.param_groups:
        unknown = [param for param in group["params"] if id(param) not in theirs]
        if unknown:
            raise UserError(
                "an optimizer of the model's own parameters is needed; it holds one of shape "
                f"{list(unknown[0].shape)} that the model has not; make it from model.parameters()"
            )
        names = [theirs[id(param)] for param in group["params"]]
        group["params"] = [ours[name] for name in names if name in ours or module.pipe is None]


def graft(model: nn.Module, module: ParallelModule) -> None:
    """Put `module`'s parameters and buffers in the place of `model`'s, so that its own are let go and both name the same.

    What another pipeline stage has is on the meta device.
    """
    ours: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    theirs = [*model.named_parameters(), *model.named_buffers()]
    place = {id(tensor): ours[name] if name in ours else _on_meta(tensor) for name, tensor in theirs}
    for part in model.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = place[id(tensor)]


def _on_meta(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def clipped(
    module: ParallelModule, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Tensor | None:
    """Clip as `tw.clip_grad_norm_` does where the plan has pipeline stages, and return the norm; None: torch's own does it.

    Raises `UserError` for some of the parameters, or for another norm than the Euclidean: of those no stage knows the others'.
    """
    if module.pipe is None:
        return None
    theirs = {id(param) for param in parameters if param.device.type != "meta"}
    missing = [name for name, param in module.named_parameters() if id(param) not in theirs]
    if missing or float(norm_type) != 2.0:
        found = f"norm_type {norm_type}" if not missing else f"parameters without {missing[0]}"
        raise UserError(
            f"the Euclidean norm of all parameters is needed to clip over pipeline stages; got {found}; clip by "
            "model.parameters() and norm_type 2"
        )
    return clip_grad_norm_(module, max_norm)


def load_weights(module: ParallelModule, like: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put the weights in `path` (safetensors files, or a checkpoint) in place; each rank reads its own part.

    like: the user's model, which may be a `skeleton`.
    """
    read = reader(like, path, module.program.captured.aliases, module.seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(read(name, module.extents[name]).view(local.shape))
        for name, buffer in saved_buffers(module).items():
            buffer.copy_(read(name, whole_extent(buffer.shape)))


class JoinedBatches:
    """The batches of a batch sampler, `count` of them joined into one: what so many processes would take together.

    >>> list(JoinedBatches([[0, 1], [2, 3], [4]], 2))
    [[0, 1, 2, 3], [4]]
    """

    def __init__(self, batches: Any, count: int) -> None:
        self.batches, self.count = batches, count
        self.batch_size = getattr(batches, "batch_size", 0) * count
        self.drop_last = getattr(batches, "drop_last", False)

    def __iter__(self) -> Iterator[list[int]]:
        held: list[list[int]] = []
        for batch in self.batches:
            held.append(list(batch))
            if len(held) == self.count:
                yield list(chain.from_iterable(held))
                held = []
        if held and not self.drop_last:
            yield list(chain.from_iterable(held))

    def __len__(self) -> int:
        return len(self.batches) // self.count if self.drop_last else -(-len(self.batches) // self.count)

    def set_epoch(self, epoch: int) -> None:
        """Hand the number of the epoch on."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)


_SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


def global_loader(loader: DataLoader[Any], plan: Plan, num_processes: int) -> DataLoader[Any]:
    """Return `loader` with the batches of `num_processes` processes joined, so that each batch is a global one.

    Raises `UserError` where its batches are larger than the plan's.
    """
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UserError(
            "a loader that makes batches is needed; this one has batch_size=None; give it a batch size or a batch_sampler"
        )
    sampler = loader.batch_sampler
    _check_batches(loader, plan, num_processes)
    _seed_workers_alike(loader)
    if num_processes == 1:
        return loader
    settings = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        assert loader.batch_size is not None
        return DataLoader(
            loader.dataset, batch_size=loader.batch_size * num_processes, drop_last=loader.drop_last, **settings
        )
    joined: Any = JoinedBatches(sampler, num_processes)
    if type(sampler) is BatchSampler:
        joined = BatchSampler(sampler.sampler, sampler.batch_size * num_processes, sampler.drop_last)
    return DataLoader(loader.dataset, batch_sampler=joined, **settings)


def _check_batches(loader: DataLoader[Any], plan: Plan, num_processes: int) -> None:
    wanted = global_batch_size(plan)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int) and size * num_processes > wanted:
        raise UserError(
            f"a loader of batches of at most {wanted / num_processes:g} is needed, the plan's {wanted} over {num_processes} "
            f"processes; got {size}; change the loader, or plan with --batch-size {size * num_processes}"
        )


def _seed_workers_alike(loader: DataLoader[Any]) -> None:
    """Let a loader's processes draw the same numbers on every rank; libraries around seed them by rank."""
    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
        loader.worker_init_fn = functools.partial(seeding, rank=0)


def check_precision(plan: Plan, asked: str | None, argument: str) -> None:
    """Raise `UserError` unless mixed precision `asked` ("no", "bf16", …) is the plan's."""
    own = PRECISIONS.get(plan.autocast, str(plan.autocast))
    if asked is None or asked == own:
        return
    computes = (
        f"computes in {plan.autocast} on weights in {plan.dtype}" if plan.autocast else f"computes in {plan.dtype}"
    )
    remedy = "plan with --autocast " + asked if asked in PRECISIONS and asked != "no" else "plan without --autocast"
    raise UserError(
        f"the precision that the plan was made for is needed: it {computes}; got {argument}; leave it out or say the same, or "
        f"{remedy}"
    )


def check_num_processes(plan: Plan, found: int, by: str, replicated: bool = False) -> int:
    """Return how many replicas of the plan the processes make that `by`, the library around, sees.

    Raises `UserError` unless there are as many as the plan has ranks; `replicated`: or some times as many.
    """
    if replicated and found % plan.num_ranks:
        raise UserError(
            f"{plan.num_ranks} processes a replica are needed by this plan (mesh {plan.mesh}); {by} sees {found}; start the script "
            f"with torchrun --nproc-per-node {plan.num_ranks * max(2, -(-found // plan.num_ranks))}, or make another plan"
        )
    if not replicated and found != plan.num_ranks:
        raise UserError(
            f"{plan.num_ranks} processes are needed by this plan (mesh {plan.mesh}); {by} sees {found}; start the script with "
            f"torchrun --nproc-per-node {plan.num_ranks}, or plan for {found}; for replicas of the plan give sync="
        )
    return found // plan.num_ranks
