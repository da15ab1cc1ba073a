"""`parallelize`: model + plan → a module that trains on this rank, with the user's parameter names and output object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..artifacts import Plan, UserError
from ..capture.accumulate import Accumulator
from ..capture.decide import decisions_of
from ..capture.execute import Executor, RunState
from ..capture.export import as_batch
from ..capture.late_loss import Finish
from ..capture.layout import REPLICATE
from ..capture.local import Decisions, LocalProgram, Ref, build_local
from ..capture.micro_batches import capture_step
from ..capture.offload_states import StateOffload
from ..capture.program import Program
from ..capture.program import Tensor as ProgramTensor
from ..capture.reshard import Route
from ..capture.transition import transition
from ..profiler.step import DTYPES
from .adapters import adapter_of
from .batch import check_part, global_batch_size, micro_parts
from .communicator import MeshCommunicator, make_mesh
from .entries import check_entries
from .host_memory import keep_freed_memory
from .offload import open_store
from .regions import Region, region_of, whole_region
from .sharding import AtRest, as_dtensor, as_parameter, storage_of
from .weights import Reader, reader

LossFn = Callable[[Any, Any], Tensor]


@dataclass
class LossOutput:
    """What a module returns whose loss is a function of the user's: the loss beside the model's own output."""

    loss: Tensor
    output: Any


def parallelize(
    model: nn.Module,
    plan: Plan,
    weights: str | os.PathLike[str] | None = None,
    *,
    loss_fn: LossFn | None = None,
    seed: int | None = None,
) -> ParallelModule:
    """Return `model` as `plan` lays it out, on this rank of an initialised process group.

    The module is called with this rank's part of the batch (`plan.shard_batch(batch)`) and returns what the model
    returns; with `loss_fn` (the one the plan was made with) it returns `LossOutput`. Its parameters are `DTensor`s under
    the model's own names, so optimizers, `clip_grad_norm_`, `state_dict` and distributed checkpoints work. Of a plan with
    micro-batches, the call takes the whole batch's part, runs all forwards and backwards, and `loss.backward()` hands the
    gradients over; outputs beside the loss are `None` then, and whole tensors under `torch.no_grad()`.

    weights: a safetensors file or folder, or a distributed checkpoint (one of `Checkpointer`'s, or a folder of them), of
    which each rank reads its own part; `None` takes the model's own values, or, on the meta device, runs the model's
    own initialisation module by module, the same for any plan.
    seed: of dropout and of that initialisation; default rank 0's `torch.initial_seed()`.

    Raises `UserError` when the plan is not this model's, or when the number of ranks is not the plan's.
    """
    _check_ranks(plan)
    autocast = DTYPES[plan.autocast] if plan.autocast else None
    program = capture_step(model, plan_batch(plan), loss_fn, autocast, plan.micro_batches, plan.corrections)
    decisions = decisions_of(program, plan)
    return ParallelModule(model, plan, program, decisions, weights, _shared_seed(seed), loss_fn is not None)


def _check_ranks(plan: Plan) -> None:
    if not dist.is_initialized():
        if plan.num_ranks != 1:
            raise UserError(
                f"{plan.num_ranks} ranks are needed by this plan; no process group is initialised; "
                "run under torchrun and call torch.distributed.init_process_group() first"
            )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != plan.num_ranks:
        raise UserError(
            f"{plan.num_ranks} ranks are needed by this plan (mesh {plan.mesh}); there are {dist.get_world_size()}; "
            f"start {plan.num_ranks}, or plan for {dist.get_world_size()}"
        )


def _shared_seed(seed: int | None) -> int:
    if seed is not None:
        return seed
    held = torch.tensor([torch.initial_seed() & (2**62 - 1)], dtype=torch.int64)
    if dist.get_world_size() > 1:
        dist.broadcast(held, 0)
    return int(held.item())


def plan_batch(plan: Plan) -> Any:
    """Return a batch of the plan's shapes on the meta device, as the model is called."""
    entries: dict[str, Any] = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        for name, entry in plan.batch.items()
    }
    tree: dict[str, Any] = {}
    for name, value in {**entries, **plan.literals}.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return _as_sequences(tree)


def _as_sequences(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    built = {key: _as_sequences(value) for key, value in tree.items()}
    if built and all(key.isdigit() for key in built):
        return tuple(built[key] for key in sorted(built, key=int))
    return built


class ParallelModule(nn.Module):
    """One rank of a planned model. Made by `parallelize`."""

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
    ) -> None:
        super().__init__()
        self.plan, self.seed, self.num_steps = plan, seed, 0
        self.use_dropout = True
        self._has_loss_fn = has_loss_fn
        self._late: list[Finish] | None = None
        gpu = plan.cluster.device.kind == "gpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        if not gpu:
            keep_freed_memory()
        self.device_mesh: DeviceMesh = make_mesh(plan.mesh, self.device.type)
        self.communicator = MeshCommunicator(self.device_mesh)
        self._local: LocalProgram = build_local(program, decisions, self.communicator)
        store = open_store(plan, self.device)
        self._executor = Executor(self._local, store)
        self._accumulator = Accumulator(self._executor) if program.num_runs > 1 else None
        self._evaluator: Accumulator | None = None
        self._inputs = {tensor.key: tensor for tensor in program.inputs}
        self._params: dict[ProgramTensor, nn.Parameter] = {}
        self._local_shapes: dict[Tensor, tuple[int, ...]] = {}
        self._travelling = self._local.travelling()
        self._buffers_of: dict[ProgramTensor, Tensor] = {}
        self._constants = {t: t.value.to(self.device) for t in program.tensors if t.role == "const"}
        self._user_shapes = {tensor.key: tensor.shape for tensor in program.params}
        self.regions: dict[str, Region] = {}
        """Of every parameter, under its first name: which entries of it this rank holds."""
        self._load(model, reader(model, weights, program.captured.aliases, seed))
        away = [self._params[tensor] for tensor in decisions.offloaded_states]
        self.offloaded_states = StateOffload(store, away) if store is not None and away else None
        """What keeps optimizer states off the device, where the plan does."""
        if hasattr(model, "config"):
            self.config = model.config
        self.adapter = adapter_of(model)
        self.train(model.training)

    @property
    def program(self) -> Program:
        """The program that this module runs a part of."""
        return self._local.program

    def _load(self, model: nn.Module, read: Reader) -> None:
        """Take this rank's part of every parameter and all buffers, in the order of the model's modules."""
        mesh, coords = self._local.communicator.mesh, self._local.communicator.coords
        known = {tensor.key: tensor for tensor in self.program.tensors if tensor.role in ("param", "buffer")}
        made: dict[str, nn.Parameter | Tensor] = {}
        for name, original in model.named_parameters():
            tensor = known.get(name)
            if tensor is None:  # the step never reads it
                self.regions[name] = whole_region(original.shape)
                value = read(name, self.regions[name]).to(self.device, original.dtype)
                made[name] = nn.Parameter(value, requires_grad=original.requires_grad)
                continue
            layout = self._local.decisions.params[tensor]
            self.regions[name] = region_of(tensor.shape, tensor.slots, layout, mesh, coords)
            local = read(name, self.regions[name]).to(self.device, original.dtype)
            made[name] = self._params[tensor] = as_parameter(tensor, layout, local, self.device_mesh)
            self._local_shapes[made[name]] = storage_of(tensor.shape, tensor.slots, layout, mesh, coords).local_shape
        for name, buffer in model.named_buffers():
            made[name] = read(name, whole_region(buffer.shape)).to(self.device, buffer.dtype)
            if name in known:
                self._buffers_of[known[name]] = made[name]
        persistent = set(model.state_dict(keep_vars=True))
        for name, value in made.items():
            self._register(name, value, name in persistent)
        for alias, name in self.program.captured.aliases.items():
            if name in made:
                self._register(alias, made[name], alias in persistent)

    def _register(self, name: str, value: Tensor, persistent: bool) -> None:
        *parents, leaf = name.split(".")
        module: nn.Module = self
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module._modules[parent]  # type: ignore[assignment]
        if isinstance(value, nn.Parameter):
            module.register_parameter(leaf, value)
        else:
            module.register_buffer(leaf, value, persistent=persistent)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rank's part of the step on the rank's part of the batch."""
        if torch.compiler.is_compiling() and self._accumulator is None:
            from . import compiled

            return compiled.forward(self, args, kwargs)
        if self._accumulator is None:
            sources, state = self._begin(args, kwargs)
            late = self._late if torch.is_grad_enabled() else None
            return self._end(self._executor.run(sources, replace(state, late=late)))
        parts, state = self._parts(as_batch(kwargs if kwargs else args)), self._state()
        if torch.is_grad_enabled():
            return self._count(self._accumulator.run(self._sources(state), parts, state))
        return self._count(self._evaluated(parts, state))

    @contextmanager
    def late_loss(self) -> Iterator[None]:
        """Leave the loss's value open inside the `with` block, so that no rank waits for another where the forward ends.

        Inside, `backward()` may be called on the loss (or on a multiple of it), and nothing else: its value is this
        rank's part until the block ends, when it is the whole batch's, in place. Gradients are the same. Of use where
        processes wait on the CPU; a GPU's queue does not wait. A compiled module and one of micro-batches wait as ever.

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

    def _begin(self, args: Any, kwargs: Any) -> tuple[dict[ProgramTensor, Tensor], RunState]:
        """What a run is given."""
        (part,) = self._parts(as_batch(kwargs if kwargs else args))
        state = self._state()
        return {**self._sources(state), **part}, state

    def _state(self) -> RunState:
        rest = AtRest(self._local_shapes)
        return RunState(self.seed, self.num_steps, self.training, self.use_dropout, rest=rest)

    def _end(self, flat: list[Any]) -> Any:
        """Count the step, and make the model's own output of a run's flat outputs."""
        return self._count([self._wrap(place, value) for place, value in zip(self._local.outputs, flat)])

    def _count(self, wrapped: list[Any]) -> Any:
        if self.training and torch.is_grad_enabled():
            self.num_steps += 1
        loss_index = self.program.captured.loss_index
        output = self.program.captured.rebuild(wrapped)
        return LossOutput(wrapped[loss_index], output) if self._has_loss_fn else output

    def _evaluated(self, parts: list[dict[ProgramTensor, Tensor]], state: RunState) -> list[Any]:
        """The outputs of all micro-batches as those of one batch: rows one after the other, whole on every rank."""
        if self._evaluator is None:
            everything = build_local(self.program, self._local.decisions, self.communicator, all_outputs=True)
            self._evaluator = Accumulator(Executor(everything))
        local = self._evaluator.local
        found = self._evaluator.evaluate(self._sources(state), parts, state)
        whole = [[self._whole(local, place, value) for place, value in zip(local.outputs, flat)] for flat in found]
        size = global_batch_size(self.plan) // self.plan.micro_batches
        return [_joined(values, size) for values in zip(*whole)]

    def _whole(self, local: LocalProgram, place: Any, value: Any) -> Any:
        if not isinstance(place, Ref) or not isinstance(value, Tensor):
            return value
        held = local.values[place.value]
        replicated = (REPLICATE,) * len(held.layout)
        route = Route(transition(held.layout, replicated), held.tensor.shape, held.tensor.slots, self.communicator)
        return route.run(value)

    def _sources(self, state: RunState) -> dict[ProgramTensor, Tensor]:
        sources: dict[ProgramTensor, Tensor] = dict(self._constants)
        sources.update(self._buffers_of)
        assert isinstance(state.rest, AtRest)
        for tensor, param in self._params.items():
            # A bucket takes parameters as they rest: one autograd function for all of them.
            travels = tensor in self._travelling
            sources[tensor] = param if travels else state.rest.part(param)  # type: ignore[arg-type]
        return sources

    def _parts(self, batch: Any) -> list[dict[ProgramTensor, Tensor]]:
        """Return the rank's part of the entries of each micro-batch."""
        found: list[dict[ProgramTensor, Tensor]] = [{} for _ in range(self.plan.micro_batches)]
        for tensor, leaf in self._batch_sources(batch):
            for part, piece in zip(found, micro_parts(self.plan, leaf, tensor.key)):
                part[tensor] = piece
        return found

    def _batch_sources(self, batch: Any) -> Iterator[tuple[ProgramTensor, Tensor]]:
        named = check_entries(self.plan, batch)
        mesh, coords = self._local.communicator.mesh, self._local.communicator.coords
        for name, tensor in self._inputs.items():
            layout = self._local.decisions.inputs.get(tensor, (REPLICATE,) * len(mesh))
            check_part(self.plan, tensor.shape, tensor.slots, layout, named[name], name, mesh, coords)
            yield tensor, named[name].to(self.device)

    def _wrap(self, place: Any, value: Any) -> Any:
        """Return an output as the whole model would: a `DTensor` where ranks hold parts of it."""
        if not isinstance(place, Ref) or not isinstance(value, Tensor):
            return value
        held = self._local.values[place.value]
        if all(at == REPLICATE for at in held.layout):
            return value
        tensor, communicator = held.tensor, self._local.communicator
        storage = storage_of(tensor.shape, tensor.slots, held.layout, communicator.mesh, communicator.coords)
        if storage.shape == tensor.shape:
            return as_dtensor(value, storage, self.device_mesh, communicator.mesh, communicator.coords)
        whole = (REPLICATE,) * len(communicator.mesh)
        return Route(transition(held.layout, whole), tensor.shape, tensor.slots, communicator).run(value.detach())

    def extra_repr(self) -> str:
        return f"plan={self.plan.solver.name}, mesh={self.plan.mesh}"


def _joined(values: Sequence[Any], size: int) -> Any:
    """One output of several micro-batches of `size`: rows below one another, the mean of what is no row of any example."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim() and first.shape[0] == size:
        return torch.cat(list(values))
    return torch.stack(list(values)).mean(0) if first.is_floating_point() else first


def full_state_dict(model: ParallelModule, *, trainable: bool = False) -> dict[str, Tensor]:
    """Return the whole weights and buffers in the user's names and shapes, on every rank; a collective call.

    trainable: those alone that are trained, so that a frozen base is not gathered to save an adapter.
    """
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if trainable and not value.requires_grad:
            continue
        if isinstance(value, DTensor):
            first = model.program.captured.aliases.get(name, name)
            value = value.full_tensor().reshape(model._user_shapes.get(first, value.shape))
        found[name] = value.detach().clone()
    return found


def full_gradients(model: ParallelModule) -> Mapping[str, Tensor]:
    """Return the whole gradient of every parameter that has one, in the user's shapes; a collective call."""
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            found[name] = grad.reshape(model._user_shapes.get(name, grad.shape))
    return found
