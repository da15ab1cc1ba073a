"""Builds the module that trains a planned model on this rank, with the user's parameter names and output object."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..artifacts import Plan, UserError
from ..capture.call import LossFn, check_same_loss
from ..capture.export import as_batch
from ..launch import Replicas, init, is_under_torchrun, replicas_of
from ..profiler.step import DTYPES
from ..program.decisions import Decisions
from ..program.layout import REPLICATE, Layout, Slot
from ..program.micro_batches import capture_step
from ..program.other_shapes import without_weights
from ..program.plan_text import decisions_of
from ..program.program import Program
from ..program.program import Tensor as ProgramTensor
from ..program.transition import transition
from ..rank.instructions import Ref
from ..rank.offload_states import StateOffload
from ..rank.randomness import derived_seed
from ..rank.reshard import Route, reshard
from ..rank.run_state import Finish, RunState
from ..tiers import release_pages
from .adapters import adapter_of
from .batch import planned_cut, planned_shapes, shapes_of
from .communicator import MeshCommunicator, make_mesh
from .entries import check_entries
from .extents import Extent, extent_of, whole_extent
from .host_memory import give_freed_memory_back, keep_freed_memory
from .offload import open_store
from .pipe import Pipe, check_stages
from .sharding import AtRest, as_dtensor, as_parameter, storage_of
from .steps import Capturing, ShapedStep, StepsByShape, batch_like
from .tiered import Tier, TierOptions
from .tiered.in_host import StatesInHost
from .tiered.tier import Leaving, resting
from .weights import Reader, reader


@dataclass
class LossOutput:
    """The output of a parallel module that was made with a `loss_fn`: the loss, and the model's own output."""

    loss: Tensor
    output: Any


def parallelize(
    model: nn.Module,
    plan: Plan,
    weights: str | os.PathLike[str] | None = None,
    *,
    loss_fn: LossFn | None = None,
    seed: int | None = None,
    replicas: int = 1,
    tier: TierOptions | None = None,
) -> ParallelModule:
    """Return `model` as `plan` lays it out, on this rank; torchrun's process group is joined where the script has not.

    The module is called with this rank's part of the batch (`plan.shard_batch(batch)`), what goes to the loss included, of the
    planned shape or smaller in any dim, and returns what the model returns; for a shape that it has not met the model is
    captured again, which takes about as long as this call. With `loss_fn` (the one the plan was made with) it returns
    `LossOutput(loss, output)`. Its parameters are `DTensor`s under the model's own names, so optimizers, `clip_grad_norm_`,
    `state_dict` and distributed checkpoints work. Of a plan with micro-batches, the call takes the whole batch's part, runs all
    forwards and backwards, and `loss.backward()` hands the gradients over; outputs beside the loss are `None` then, and whole
    tensors under `torch.no_grad()`.

    weights: a safetensors file or folder, or a distributed checkpoint (one of `Checkpointer`'s, or a folder of them), of
    which each rank reads its own part; `None` takes the model's own values, or, on the meta device, runs the model's
    own initialisation module by module, the same for any plan.
    seed: of dropout and of that initialisation; default rank 0's `torch.initial_seed()`.
    replicas: how many times the plan is run side by side, on `replicas` times its ranks, consecutive ones a replica. Gradients
    are not summed between replicas: a method of `tw.sync` exchanges there, and each is given batches of its own.
    tier: parameters, gradients and optimizer states rest on disks or in the host's memory (docs/tiers.md), which a plan for the
    host says itself; `module.tier.attach(optimizer)` comes before the first backward.

    Raises `UserError` when the plan is not this model's, or when the number of ranks is not the plan's.
    """
    check_stages(plan, replicas)
    tier = resting(plan, tier, replicas)
    _check_ranks(plan, replicas)
    check_same_loss(plan, loss_fn)
    program = planned_program(plan, model, loss_fn)
    decisions = decisions_of(program, plan)
    module = ParallelModule(
        model, plan, program, decisions, weights, _shared_seed(seed), loss_fn is not None, replicas_of(replicas), tier
    )
    module.take_other_shapes(model, loss_fn, autocast_of(plan))
    return module


def _check_ranks(plan: Plan, replicas: int = 1) -> None:
    """Raise `UserError` unless there are as many ranks as the plan needs; join torchrun's group if the script has not."""
    if not isinstance(replicas, int) or replicas < 1:
        raise UserError(f"a number of replicas is needed, 1 or more; got {replicas!r}; try 2")
    needed = plan.num_ranks * replicas
    by = (
        f"by this plan (mesh {plan.mesh})"
        if replicas == 1
        else f"by {replicas} replicas of this plan (mesh {plan.mesh})"
    )
    if not dist.is_initialized():
        if needed != 1 and not is_under_torchrun():
            raise UserError(
                f"{needed} ranks are needed {by}; this process is alone; start it with "
                f"torchrun --nproc-per-node {needed} SCRIPT, or plan for one device"
            )
        init("cuda" if plan.cluster.device.kind == "gpu" and torch.cuda.is_available() else "cpu")
    if dist.get_world_size() != needed:
        raise UserError(
            f"{needed} ranks are needed {by}; there are {dist.get_world_size()}; "
            f"start {needed}, or plan for {dist.get_world_size()}"
        )


def _shared_seed(seed: int | None) -> int:
    if seed is not None:
        return seed
    held = torch.tensor([torch.initial_seed() & (2**62 - 1)], dtype=torch.int64)
    if dist.get_world_size() > 1:
        dist.broadcast(held, 0)
    return int(held.item())


def _tier_of(options: TierOptions, plan: Plan, decisions: Decisions, replicas: Replicas, device: torch.device) -> Tier:
    """Return the tier of this rank, with what the plan lets rest there."""
    leaving = None
    if plan.tier is not None:
        leaving = Leaving(
            *(frozenset(t.key for t in own) for own in (decisions.offloaded_params, decisions.offloaded_states))
        )
    moved_bytes = 0 if plan.offload is None else plan.predicted.moved_bytes
    return Tier(options, replicas.rank, replicas.size, leaving, moved_bytes, device)


def plan_batch(plan: Plan) -> Any:
    """Return a batch of the plan's shapes on the meta device, as the model is called."""
    return batch_like(plan, planned_shapes(plan))


def planned_program(plan: Plan, model: nn.Module, loss_fn: Any) -> Program:
    """Return the program that the plan runs: of one micro-batch, with its corrections, and its loss in the plan's chunks."""
    batch, chunks = plan_batch(plan), plan.loss_chunks
    return capture_step(
        model, batch, loss_fn, autocast_of(plan), plan.micro_batches, plan.corrections, loss_chunks=chunks
    )


def autocast_of(plan: Plan) -> torch.dtype | None:
    """Return the dtype of the plan's autocast; None where it has none."""
    return DTYPES[plan.autocast] if plan.autocast else None


class ParallelModule(nn.Module):
    """One rank's part of a planned model, as a module; made by `parallelize`."""

    # What Hugging Face's Accelerate and Trainer ask a model: is it placed and are its gradients summed already (else they
    # wrap it in DDP), and does its forward take the number of items that the loss is to be divided by?
    _is_accelerate_prepared = True
    accepts_loss_kwargs = False

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        program: Program,
        decisions: Decisions,
        weights: str | os.PathLike[str] | None,
        seed: int,
        has_loss_fn: bool,
        replicas: Replicas | None = None,
        tier: TierOptions | None = None,
    ) -> None:
        super().__init__()
        self.replicas = replicas or replicas_of(1)
        """This rank's place among the replicas of the plan."""
        own_seed = derived_seed(seed, self.replicas.index) if self.replicas.index else seed
        self.plan, self.seed, self.num_steps = plan, own_seed, 0
        self.use_dropout = True
        self.use_sampling = True
        """False: linear maps that the plan samples are computed exactly, for comparisons."""
        self._has_loss_fn = has_loss_fn
        self._late: list[Finish] | None = None
        gpu = plan.cluster.device.kind == "gpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        if tier is not None:
            give_freed_memory_back()
        elif not gpu:
            keep_freed_memory()
        whole = make_mesh(plan.mesh, self.device.type, self.replicas.number)
        self.pipe = None if plan.pipeline is None else Pipe(plan, program, whole)
        """This rank's place among the plan's stages; None where it has none."""
        self.device_mesh: DeviceMesh = whole if self.pipe is None else whole[tuple(plan.inner_mesh)]
        """The mesh over which parameters are laid out: that of this rank's stage."""
        self.communicator = MeshCommunicator(self.device_mesh, self.device)
        self.tier = None if tier is None else _tier_of(tier, plan, decisions, self.replicas, self.device)
        """The tier on which this rank's parameters, gradients and optimizer states rest; None where they stay in memory."""
        store = open_store(plan, self.device, None if self.tier is None else self.tier.store)
        planned = ShapedStep(planned_cut(plan), program, decisions, self.communicator, store, self.device, self.pipe)
        self.steps = StepsByShape(planned, store)
        """The rank's step for each batch shape that it has met."""
        self._params: dict[ProgramTensor, nn.Parameter] = {}
        self._local_shapes: dict[Tensor, tuple[int, ...]] = {}
        self._user_shapes = {tensor.key: tensor.shape for tensor in program.params}
        self.names = [name for name, _ in model.named_parameters()]
        """The names of all parameters of the model, those of other stages too."""
        self.extents: dict[str, Extent] = {}
        """The extent of each parameter that this rank holds, by the parameter's first name."""
        self._load(model, reader(model, weights, program.captured.aliases, seed))
        self._complete(planned)
        if self.tier is not None:
            self._rest_on(self.tier)
        away = [self._params[tensor] for tensor in decisions.offloaded_states]
        self.offloaded_states: StateOffload | StatesInHost | None = None
        """Keeps optimizer states off the device; None if the plan offloads none, or lets them rest on disks."""
        if self.tier is not None and self.tier.policy.place == "host":
            self.offloaded_states = StatesInHost(self.tier)
        elif store is not None and away and self.tier is None:
            self.offloaded_states = StateOffload(store, away)
        if hasattr(model, "config"):
            self.config = model.config
        self.adapter = adapter_of(model)
        self.train(model.training)

    @property
    def program(self) -> Program:
        """Return the whole program for batches of the planned shape, of which this module runs its rank's part."""
        return self.steps.planned.program

    def take_other_shapes(self, model: nn.Module, loss_fn: LossFn | None, autocast: torch.dtype | None) -> None:
        """Keep a copy of `model` without weights, so that it can be captured again for batches of other shapes."""
        buffers = {name: buffer for name, buffer in self.named_buffers() if buffer.device.type == "cpu"}
        copied = without_weights(model, buffers)
        self.steps.capturing = Capturing(copied, loss_fn, autocast) if copied is not None else None

    def _complete(self, step: ShapedStep) -> None:
        """Connect a new step to the parameters and buffers that it reads, and to the tier, if there is one."""
        step.read(dict(self.named_parameters()), dict(self.named_buffers()))
        if self.tier is not None:
            names = {value: tensor.key for tensor, value in step.local.sources.items() if tensor.role == "param"}
            self.tier.watch(step.executor, names, step.local_params)

    def _rest_on(self, tier: Tier) -> None:
        """Make the tier save, beside the parameters, the buffers and the number of steps that seeds the random numbers."""
        kept, buffers = self.state_dict(keep_vars=True), dict(self.named_buffers())
        tier.keep_buffers({name: buffer for name, buffer in buffers.items() if name in kept})
        if tier.options.resume:
            self.num_steps = int(tier.store.notes["num_forwards"])
        own = weakref.ref(self)
        tier.num_forwards = lambda: 0 if (module := own()) is None else module.num_steps

    def _load(self, model: nn.Module, read: Reader) -> None:
        """Load this rank's part of every parameter, and all buffers, in the order of the model's modules.

        A pipeline stage loads those that it reads; the first stage also loads those that no step reads.
        """
        mesh, coords = self.communicator.mesh, self.communicator.coords
        params = self.steps.planned.local.decisions.params
        known = {t.key: t for t in self.steps.planned.tensors if t.role in ("param", "buffer")}
        elsewhere = {t.key for t in self.program.tensors if t.role in ("param", "buffer") and t.key not in known}
        made: dict[str, nn.Parameter | Tensor] = {}
        is_first = self.pipe is None or self.pipe.index == 0
        if self.tier is not None:
            self._make_room(self.tier, {n: p.dtype for n, p in model.named_parameters() if n in known}, known)
        for name, original in model.named_parameters():
            if name in elsewhere or (name not in known and not is_first):
                continue
            tensor = known.get(name)
            if tensor is None:  # the step never reads it
                self.extents[name] = whole_extent(original.shape)
                value = read(name, self.extents[name]).to(self.device, original.dtype)
                made[name] = nn.Parameter(value, requires_grad=original.requires_grad)
                continue
            layout = params[tensor]
            self.extents[name] = extent_of(tensor.shape, tensor.slots, layout, mesh, coords)
            if self.tier is None:
                local = read(name, self.extents[name]).to(self.device, original.dtype)
            else:
                local = self.tier.made(name, original.dtype, self.extents[name], read)
            made[name] = self._params[tensor] = as_parameter(tensor, layout, local, self.device_mesh)
            if self.tier is not None:
                self.tier.park(name, made[name])  # type: ignore[arg-type]
                release_pages(original)
            made[name].user_shape = tuple(tensor.shape)  # type: ignore[union-attr]  # a shard may have a dim taken apart
            self._local_shapes[made[name]] = storage_of(tensor.shape, tensor.slots, layout, mesh, coords).local_shape
        for name, buffer in model.named_buffers():
            if name in elsewhere or (name not in known and not is_first):
                continue
            made[name] = read(name, whole_extent(buffer.shape)).to(self.device, buffer.dtype)
        names = made | {alias: made[name] for alias, name in self.program.captured.aliases.items() if name in made}
        self._adopt(_tree(names, set(model.state_dict(keep_vars=True))))

    def _make_room(self, tier: Tier, dtypes: Mapping[str, torch.dtype], known: Mapping[str, ProgramTensor]) -> None:
        """Let the tier see, before anything is written, that there is room for this rank's part of every parameter and state."""
        mesh, coords = self.communicator.mesh, self.communicator.coords
        params = self.steps.planned.local.decisions.params
        sizes = {
            name: dtype.itemsize
            * math.prod(extent_of(known[name].shape, known[name].slots, params[known[name]], mesh, coords).local_shape)
            for name, dtype in dtypes.items()
        }
        planned = self.plan.tier
        states = self.plan.predicted.breakdown.get("optimizer", 0) if planned is None else planned.state_bytes
        if planned is not None and planned.place == "host":  # states that stay are not there
            waiting = sum(sizes.values()) if planned.update == "after" else 0
            values = sum(size for name, size in sizes.items() if tier.holds(name))
            states = max(0, planned.host_bytes - values - waiting)
        tier.make_room(sizes, states)

    def _adopt(self, tree: nn.Module) -> None:
        """Register the model's tensors and modules; where names collide (`steps`, `plan`), the attribute of this class is read."""
        self._parameters.update(tree._parameters)
        self._buffers.update(tree._buffers)
        self._modules.update(tree._modules)
        self._non_persistent_buffers_set.update(tree._non_persistent_buffers_set)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a plain one does not replace a parameter, buffer or module of the same name."""
        if isinstance(value, Tensor | nn.Module):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rank's part of the step on its part of the batch, and return the model's output."""
        if torch.compiler.is_compiling() and self.plan.compile is not None:
            raise UserError(
                "a module that torch.compile has not taken is needed; this plan compiles its blocks itself; call "
                "the module as it is"
            )
        if torch.compiler.is_compiling() and self.plan.micro_batches == 1 and self.pipe is None:
            from . import compiled

            return compiled.forward(self, args, kwargs)
        step, parts, state = self._begin(args, kwargs)
        sources = step.sources(state.rest)
        if step.accumulator is None and step.runner is None:
            late = self._late if torch.is_grad_enabled() else None
            return self._end(step, step.executor.run({**sources, **parts[0]}, replace(state, late=late)))
        if torch.is_grad_enabled():
            return self._count(step, step.trained(parts, state, sources))
        return self._count(step, step.evaluated(parts, state, sources))

    @contextmanager
    def late_loss(self) -> Iterator[None]:
        """Postpone the loss's all-reduce to the end of the `with` block, so that no rank waits for another after the forward.

        Inside, `backward()` may be called on the loss (or on a multiple of it), and nothing else: its value is this rank's
        partial sum until the block ends, when it becomes the whole batch's, in place. Gradients are unaffected. It helps
        where processes wait on the CPU; a GPU's queue does not wait. It has no effect on a compiled module or on micro-batches.

        >>> import trainwright as tw
        >>> model, loss_fn = nn.Linear(3, 1), lambda output, batch: output.square().mean()
        >>> plan = tw.plan(model, (torch.ones(2, 3),), loss_fn=loss_fn, hardware="cpu:1")
        >>> module = tw.parallelize(model, plan, loss_fn=loss_fn)
        >>> with module.late_loss():
        ...     loss = module(torch.ones(2, 3)).loss
        ...     loss.backward()
        >>> bool(loss > 0)
        True
        """
        late: list[Finish] = []
        outer, self._late = self._late, late
        try:
            yield
            for finish in late:
                finish()
        finally:
            self._late = outer
            late.clear()  # what the backward would have rederived holds the run, and so this

    def _begin(self, args: Any, kwargs: Any) -> tuple[ShapedStep, list[dict[ProgramTensor, Tensor]], RunState]:
        """Return the step for a batch of this shape, the rank's part of each of its micro-batches, and the run's state."""
        part = check_entries(self.plan, as_batch(kwargs if kwargs else args))
        step = self.steps.of(shapes_of(self.plan, part), self._complete)
        return step, step.parts(part), self._state()

    def _state(self) -> RunState:
        rest = AtRest(self._local_shapes)
        return RunState(self.seed, self.num_steps, self.training, self.use_dropout, self.use_sampling, rest=rest)

    def _end(self, step: ShapedStep, flat: list[Any]) -> Any:
        """Count the step, and return the model's own output object, rebuilt from a run's flat outputs."""
        return self._count(step, [self._wrap(step, place, value) for place, value in zip(step.local.outputs, flat)])

    def _count(self, step: ShapedStep, wrapped: list[Any]) -> Any:
        if self.training and torch.is_grad_enabled():
            self.num_steps += 1
        captured = step.program.captured
        output = captured.rebuild(wrapped)
        return LossOutput(wrapped[captured.loss_index], output) if self._has_loss_fn else output

    def _wrap(self, step: ShapedStep, place: Any, value: Any) -> Any:
        """Return an output in the whole model's shape: as a `DTensor` if it is split over ranks."""
        if not isinstance(place, Ref) or not isinstance(value, Tensor):
            return value
        held = step.local.values[place.value]
        if all(at == REPLICATE for at in held.layout):
            return value
        tensor, communicator = held.tensor, self.communicator
        storage = storage_of(tensor.shape, tensor.slots, held.layout, communicator.mesh, communicator.coords)
        if storage.shape == tensor.shape:
            return as_dtensor(value, storage, self.device_mesh, communicator.mesh, communicator.coords)
        return self._gathered(value, held.layout, tensor.shape, tensor.slots)

    def whole(self, output: DTensor) -> Tensor:
        """Return a split output of this module as a whole tensor on every rank, with its graph; a collective call.

        `full_tensor` gives the same, but by collectives of the backend that make copies.
        """
        layout = tuple(at.dim if isinstance(at, Shard) else REPLICATE for at in output.placements)
        slots = [Slot(dim, size) for dim, size in enumerate(output.shape)]
        return self._gathered(output.to_local(), layout, output.shape, slots)

    def _gathered(self, part: Tensor, layout: Layout, shape: Sequence[int], slots: Sequence[Slot]) -> Tensor:
        whole = (REPLICATE,) * len(layout)
        there, back = (
            Route(transition(*pair), shape, slots, self.communicator) for pair in ((layout, whole), (whole, layout))
        )
        return reshard(part, there, back)

    def extra_repr(self) -> str:
        return f"plan={self.plan.solver.name}, mesh={self.plan.mesh}"


def _tree(tensors: Mapping[str, Tensor], persistent: set[str]) -> nn.Module:
    """Return bare modules that hold `tensors` under their dotted names."""
    root = nn.Module()
    for name, value in tensors.items():
        *parents, leaf = name.split(".")
        module = root
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module._modules[parent]  # type: ignore[assignment]
        if isinstance(value, nn.Parameter):
            module.register_parameter(leaf, value)
        else:
            module.register_buffer(leaf, value, persistent=name in persistent)
    return root


def full_state_dict(
    model: ParallelModule, *, trainable: bool = False, only_rank: int | None = None
) -> dict[str, Tensor]:
    """Return the whole weights and buffers in the user's names and shapes, on every rank; a collective call.

    trainable: whether to return trainable weights only, so that saving an adapter gathers no frozen base.
    only_rank: the rank within its replica that gets the weights, gathered one by one to its CPU memory; the other ranks
    return `{}`. Tied weights are then one tensor under all their names.
    """
    found: dict[str, Tensor] = {}
    first_of: dict[int, str] = {}
    keep = only_rank is None or model.replicas.rank == only_rank
    for name, value in model.state_dict(keep_vars=True).items():
        if trainable and not value.requires_grad:
            continue
        if only_rank is not None:
            first = first_of.setdefault(id(value), name)
            if first != name:
                if first in found:
                    found[name] = found[first]
                continue
        whole = _user_tensor(model, name, value)
        if only_rank is None:
            found[name] = whole.clone()
        elif keep or model.pipe is not None:
            found[name] = whole.to("cpu", copy=True)
    if model.pipe is None:
        return found
    merged = model.pipe.merged(found, model.device, keep)
    return merged if only_rank is None else {name: value.cpu() for name, value in merged.items()}


def _user_tensor(model: ParallelModule, name: str, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        first = model.program.captured.aliases.get(name, name)
        value = value.full_tensor().reshape(model._user_shapes.get(first, value.shape))
    return value.detach()


def full_gradients(model: ParallelModule) -> Mapping[str, Tensor]:
    """Return the whole gradient of every parameter that has one, in the user's shapes; a collective call."""
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            found[name] = grad.reshape(model._user_shapes.get(name, grad.shape))
    return found if model.pipe is None else model.pipe.merged(found, model.device)
