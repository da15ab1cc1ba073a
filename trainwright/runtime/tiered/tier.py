"""Keeps a planned module's state on disks or the host: parameters rest there, gradients start updates.

load        each parameter is written when it is made, and its memory freed   park
forward     instructions wait for the parameters that they read               watch (→ residence)
backward    each gradient, once complete, starts its parameter's update       attach (→ updates)
step        waits for all updates; on disks it is then the last committed one finish, commit
host        has what does not stay, once; checkpoints read and write it there  `in_host`
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer

from ...artifacts import Plan, UserError
from ...rank.execute import Executor
from ...rank.offload_states import check_updates_alone, with_groups
from ...rank.step_hooks import before_each_step
from ...tiers import DIRECTIONS, Layer, MemoryStore, Moved, StepTraffic, TierStore, now, placed, traffic
from ..extents import Extent
from .gone import gone_like
from .lane import Lane
from .options import TierOptions
from .places import check_room_for_all, open_store
from .plain_states import as_notes, from_notes
from .residence import Parked, Reads, Residence
from .updates import Updates, alone, local_of, state_key


@dataclass(frozen=True)
class Leaving:
    """The names of the parameters whose values a plan lets rest on the tier, and of those whose states."""

    values: frozenset[str]
    states: frozenset[str]


SAID_EVERY_S = 20.0
"""The seconds between two progress messages of a long step."""


class Tier:
    """Manages the part of a planned module on its rank's tier; made by `parallelize(…, tier=TierOptions(…))`.

    Call `attach(optimizer)` before the first backward, which then runs the updates; the optimizer's `step()` waits for the
    remaining ones and, on disks, commits the step.
    """

    def __init__(
        self,
        options: TierOptions,
        rank: int = 0,
        num_ranks: int = 1,
        leaving: Leaving | None = None,
        moved_bytes: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`leaving` is what a plan says; None: everything but `keep_bytes` rests there. moved_bytes: of activations, a step."""
        self.options, self.num_ranks, self.leaving, self.moved_bytes = options, num_ranks, leaving, moved_bytes
        self.policy = options.policy()
        self.device = device or torch.device("cpu")
        self.store: TierStore | MemoryStore = open_store(options, rank, num_ranks, self.device)
        self.residence = Residence(self.store, self.policy.window_bytes)
        self.parked: dict[str, Parked] = {}
        self.updates: Updates | None = None
        self.commits = True
        """False if the training loop calls `commit` itself, with its own notes."""
        self.step = self.store.step
        """The index of the last finished step, earlier runs included; -1 before the first."""
        self.norm = 0.0
        """The norm of the last step's gradients, measured only with `clip_previous_norm`."""
        self._squares = 0.0
        self._extremes: Tensor | float = 0.0
        self._state_sizes: dict[str, dict[str, int]] = {}
        """By parameter, the bytes of the states that its first step makes by key in the store, where known."""
        self._waiting: dict[str, Tensor] = {}
        """Gradients whose values wait on the tier for an update after the backward; their storages are empty."""
        self._scale = 1.0
        self.num_forwards: Callable[[], int] = lambda: 0
        """Returns the module's number of steps, on which its random numbers depend."""
        self.notice: Callable[[str], None] = lambda text: None
        """Called with a message on the progress of a long step."""
        self._buffers: dict[str, Tensor] = {}
        self._said_at_s, self._num_taken = time.monotonic(), 0
        self._told: dict[str, Moved] = {}
        self._told_s, self._told_at = 0.0, now()
        self._is_open = False
        """True from the first gradient of a step until it is finished or rolled back."""

    # Parameters

    def make_room(self, sizes: Mapping[str, int], state_bytes: int) -> None:
        """Take room for parameters before the first is written; `UserError` where these, their states and gradients have none.

        state_bytes: of the optimizer that the plan was made for; another's are known when it is attached. A collective call.
        """
        if self.options.resume:
            return
        grad_bytes = sum(sizes.values()) if self.policy.update == "after" else 0
        sizes = {name: num_bytes for name, num_bytes in sizes.items() if self.holds(name)}
        param_bytes = sum(sizes.values())
        try:
            check_room_for_all(self.store.paths, param_bytes + state_bytes + grad_bytes, self.num_ranks)
        except UserError:
            self.store.remove()  # the folders are as they were found
            for path in self.store.paths if self.num_ranks > 1 else ():
                path.rmdir()
            raise
        self.store.add({f"param.{name}": num_bytes for name, num_bytes in sizes.items() if num_bytes})

    def holds(self, name: str) -> bool:
        """Tell whether the tier has the values of a parameter; the host has none that stay in memory."""
        return self.policy.commits or self.leaving is None or name in self.leaving.values

    def made(self, name: str, dtype: torch.dtype, extent: Extent, read: Callable[[str, Extent], Tensor]) -> Tensor:
        """Return this rank's part of a new parameter in memory of its own; in a resumed run, uninitialised memory for it."""
        if self.options.resume:
            return torch.empty(extent.local_shape, dtype=dtype)
        local = read(name, extent).to(self.device, dtype).contiguous()
        storage = local.untyped_storage()
        is_own = storage.resizable() and storage.nbytes() == local.numel() * local.element_size()
        return local if is_own else local.clone()

    def park(self, name: str, param: nn.Parameter) -> None:
        """Write a new parameter to the tier and free its memory, unless the plan keeps it; in a resumed run, read what is kept."""
        key, local = f"param.{name}", local_of(param.data)
        num_bytes = local.numel() * local.element_size()
        if num_bytes == 0:
            return
        assert local.untyped_storage().nbytes() == num_bytes, name  # else something else would go with it
        parked = self.parked[name] = Parked(name, param, local, num_bytes)
        if not self.options.resume and self.holds(name):
            self.store.write(key, local.detach()).finish()
        self.residence.add(parked)
        if self.leaving is None or name in self.leaving.values:
            self.residence.let_go(parked)
        else:
            self.residence.keep(parked)
            if self.options.resume:
                self.store.read(key, local.detach()).wait()
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self._taker(parked))
        self._say(f"{len(self.parked)} parameters are on the {self.policy.place}")

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said_at_s >= SAID_EVERY_S:
            self._said_at_s = time.monotonic()
            self.notice(text)

    def watch(self, executor: Executor, names: Mapping[int, str], direct: Container[int]) -> None:
        """Make a program's executor wait for the parameters that its instructions read.

        names: the program's parameters, by value index. direct: the values that instructions read as local parts; buckets take
        the others at rest.
        """
        parked = {value: self.parked[name] for value, name in names.items() if name in self.parked}
        reads = Reads(self.residence, executor, parked, direct)
        if not self.residence.order:
            self.residence.order = list(dict.fromkeys(each for own in reads.by_instruction for each in own))
            for place, each in enumerate(self.residence.order):
                each.place = place
        executor.elsewhere = reads

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have every parameter in memory inside the `with` block, for `state_dict` and the like; changes there are lost."""
        peak_bytes = self.residence.peak_bytes  # that of steps
        for parked in self.parked.values():
            self.residence.send_for(parked)
        for parked in self.parked.values():
            parked.arrived()
        try:
            yield
        finally:
            for parked in self.parked.values():
                self.residence.let_go(parked)
            self.residence.peak_bytes = peak_bytes

    def keep_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Keep `buffers` in memory and write them with every committed step; in a resumed run, read them first."""
        if not self.policy.commits:
            return
        self._buffers = {f"buffer.{name}": buffer for name, buffer in buffers.items() if buffer.numel()}
        for key, buffer in self._buffers.items():
            if key not in self.store:
                self.store.add({key: buffer.numel() * buffer.element_size()})
                continue
            held = torch.empty(buffer.shape, dtype=buffer.dtype)
            self.store.read(key, held).wait()
            buffer.copy_(held)

    # The update

    def attach(self, optimizer: Optimizer) -> None:
        """Make `optimizer` update the parameters, during or after the backward, as the options say."""
        check_updates_alone(optimizer)
        if self.updates is not None:
            raise UserError(
                "one optimizer is needed for a tier; this is a second one; make one with groups of parameters"
            )
        options = self.options
        self.updates = Updates(
            self.store,
            optimizer,
            self.policy.window_bytes // 2,
            options.num_workers,
            options.worker_cores,
            Lane(self.device),
        )
        trained = [parked for parked in self.parked.values() if parked.param in self.updates.group_of]
        for parked in trained:
            parked.is_trained = True
        if options.resume:
            self.updates.forms = from_notes(self.store.notes["optimizer"], optimizer, self.parked)
            self.norm = float(self.store.notes["norm"])
        else:
            self._state_sizes = self._trial_sizes(optimizer, trained)
        self._keep(trained)
        if not options.resume:
            self._reserve(trained)
            self.commit()  # so that the first step, too, can be taken back
        before_each_step(self._step_of)

    def _reserve(self, trained: list[Parked]) -> None:
        """Reserve space, before the training, for states, and for gradients that wait; the host has none for what stays."""
        sizes = {}
        for parked in trained:
            if self.policy.commits or not parked.keeps_states:
                sizes.update(self._state_sizes.get(parked.name, {}))
            if self.policy.update == "after":
                sizes[f"grad.{parked.name}"] = parked.num_bytes
        self.store.add(sizes)

    def _trial_sizes(self, optimizer: Optimizer, trained: list[Parked]) -> dict[str, dict[str, int]]:
        """Return by parameter the sizes of its states by key in the store, from a trial step on the meta device, if that works."""
        assert self.updates is not None
        sizes: dict[str, dict[str, int]] = {}
        for parked in trained:
            stand_in = nn.Parameter(torch.empty(parked.local.shape, dtype=parked.local.dtype, device="meta"))
            stand_in.grad = torch.empty_like(stand_in)
            group = self.updates.group_of[parked.param]
            loop: dict[str, Any] = {
                name: False for name in ("fused", "foreach") if name in group
            }  # what computes on no values
            trial = with_groups(optimizer, [{**group, **loop, "params": [stand_in]}])
            trial.state = defaultdict(dict)
            try:
                self.updates.step_of(trial)
            except (RuntimeError, NotImplementedError):
                return {}  # it reads values: room is made with its first step
            sizes[parked.name] = {
                state_key(parked, name): value.numel() * value.element_size()
                for name, value in trial.state.get(stand_in, {}).items()
                if isinstance(value, Tensor) and value.dim() > 0
            }
        self.updates.expected_bytes = {name: sum(own.values()) for name, own in sizes.items()}
        return sizes

    def _keep(self, trained: list[Parked]) -> None:
        """Keep in memory what the plan says; without one the last parameters of the forward with states, which update first."""
        assert self.updates is not None
        if self.leaving is not None:
            for parked in trained:
                if parked.name not in self.leaving.states:
                    self.updates.keep(parked)
            return
        order = self.residence.order
        for parked, layer in zip(order, placed(self.layers(), self.policy), strict=True):
            if layer.param_stays:
                self.residence.need([parked])
                self.residence.keep(parked)
                self.updates.keep(parked)
                if isinstance(self.store, MemoryStore):
                    self.store.drop([parked.key])

    def _taker(self, parked: Parked) -> Callable[[Tensor], None]:
        own = weakref.ref(self)

        def take(param: Tensor) -> None:
            tier = own()
            if tier is not None and param.grad is not None:
                grad, param.grad = param.grad, None
                tier._take(parked, grad)
                param.grad = gone_like(param)

        return take

    def _take(self, parked: Parked, grad: Tensor) -> None:
        """Start the update from a complete gradient, or write the gradient to the tier for an update after the backward."""
        updates = self._ready()
        if parked.param not in updates.group_of:
            return  # nobody updates it
        if not self._is_open:
            self._is_open, self._num_taken, self._squares = True, 0, 0.0
            self._extremes = torch.zeros((), dtype=torch.float64, device=self.device)
            self._scale = self._scale_now()
        if parked.is_updating or parked.name in self._waiting:
            raise UserError(
                f"one backward between two steps of the optimizer is needed with a tier; {parked.name} has had its gradient; call "
                "step(), or plan with a larger batch"
            )
        self._num_taken += 1
        self._say(
            f"step {self.step + 2}, backward: {self._num_taken} of {len(updates.group_of)} parameters have their gradient"
        )
        local = local_of(grad)
        if local.numel():
            if self.options.clip_previous_norm is not None:
                self._squares += _share(parked) * float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2
            low, high = torch.aminmax(local)
            self._extremes = self._extremes + low.abs().double() + high.abs().double()
        if self._scale != 1.0:
            local.mul_(self._scale)
        if self.policy.update == "during":
            updates.begin(parked, grad)
            return
        key = f"grad.{parked.name}"
        if key not in self.store:
            self.store.add({key: parked.num_bytes})
        grad = alone(parked, grad)
        local = local_of(grad)
        self.store.write(key, local.contiguous()).wait()
        local.untyped_storage().resize_(0)
        self._waiting[parked.name] = grad
        if not self.residence.wanted_first(parked, by_backward=False):
            self.residence.let_go(parked)

    def _scale_now(self) -> float:
        clip = self.options.clip_previous_norm
        return 1.0 if clip is None or self.norm == 0.0 else min(1.0, clip / self.norm)

    def layers(self) -> list[Layer]:
        """Return the sizes of every parameter in the order of first use, for `tiers.traffic` and `tiers.simulate`."""
        sizes: dict[str, dict[str, int]] = defaultdict(
            dict, {name: dict(own) for name, own in self._state_sizes.items()}
        )
        for key, item in self.store.items.items():
            if key.startswith("state."):
                sizes[key.removeprefix("state.").rpartition(".")[0]][key] = item.num_bytes
        return [
            Layer(
                each.num_bytes,
                tuple(sizes[each.name].values()),
                each.num_bytes,
                is_trained=each.is_trained,
                param_stays=each.is_kept,
                states_stay=each.keeps_states,
            )
            for each in self.residence.order
        ]

    def planned(self) -> StepTraffic:
        """Return the predicted bytes that a step after the first one reads and writes."""
        moved = traffic(self.layers(), self.policy)
        return replace(moved, forward_written=self.moved_bytes, backward_read=moved.backward_read + self.moved_bytes)

    def told(self) -> dict[str, Any]:
        """Return the bytes moved, in all and a second, and the seconds waited since the last call, for the events of a run."""
        updates = self._ready()
        found: dict[str, Any] = {}
        for direction in DIRECTIONS:
            total = self.store.traffic.total(direction)
            moved = total.since(self._told.get(direction, Moved()))
            self._told[direction] = total
            found[f"tier_{direction}_bytes"] = float(moved.num_bytes)
        begun, self._told_at = self._told_at, now()
        found["tier_rates"] = {each: self.store.traffic.rates(each, begun, self._told_at) for each in DIRECTIONS}
        waited_s = self.residence.waited_s + updates.waited_s
        planned = self.planned()
        found["tier_planned_read_bytes"], found["tier_planned_write_bytes"] = planned.read_bytes, planned.written_bytes
        found["tier_waited_s"], self._told_s = waited_s - self._told_s, waited_s
        return found

    def extremes(self) -> Tensor | float:
        """Return a number that is finite if and only if every entry of this rank's gradients of the step is."""
        return self._extremes

    def _ready(self) -> Updates:
        if self.updates is None:
            raise UserError(
                "an optimizer is needed before the first backward with a tier; none is attached; call tier.attach(optimizer)"
            )
        return self.updates

    def _step_of(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Finish the updates instead of running the optimizer's step; return arguments with which that step does nothing.

        Other optimizers step as usual.
        """
        if self.updates is None or self.updates.optimizer is not optimizer:
            return None
        if len(args) > 1 or kwargs:
            raise UserError("a step without a closure is needed with a tier; got one; run the backward before the step")
        self.finish()
        return (with_groups(optimizer, []),), {}

    def finish(self) -> None:
        """Wait until every parameter is updated and written; then commit to disks, unless the training loop does."""
        updates = self._ready()
        while self._waiting:
            self._begin_waiting(next(iter(self._waiting)))
        updates.finish()
        self.residence.end_backward()
        self.norm = self._total(self._squares) ** 0.5
        self._close_step()
        self.step += 1
        if self.commits:
            self.commit()

    def _begin_waiting(self, name: str) -> None:
        """Start the update from a gradient that waits on the tier; from here on only the update holds it."""
        grad = self._waiting.pop(name)
        local = local_of(grad)
        local.untyped_storage().resize_(local.numel() * local.element_size())
        self._ready().begin(self.parked[name], grad, from_store=True)

    def commit(self, notes: Mapping[str, Any] | None = None, force: bool = False) -> None:
        """Commit the finished step, if it is due or `force` is set; a collective call. `notes` are saved with it.

        In the host's memory there is nothing to commit.
        """
        updates = self._ready()
        if not self.policy.commits:
            updates.is_committing = False
            return
        assert isinstance(self.store, TierStore)
        if updates.is_committing or force:
            if force and not updates.is_committing:
                updates.write_kept(self.parked.values())
            told = as_notes(updates.optimizer, self.parked, updates.forms)
            for key, buffer in self._buffers.items():
                self.store.write(key, buffer.detach().cpu().contiguous().clone())
            own = {"optimizer": told, "norm": self.norm, "num_forwards": self.num_forwards()}
            self.store.commit(self.step, {**own, **(notes or {})})
            if self.num_ranks > 1:
                dist.barrier()  # no rank writes over the step before this one until all have this one
        updates.is_committing = (self.step + 2) % self.policy.commit_every == 0

    @property
    def can_take_back(self) -> bool:
        """Tell whether a step whose backward is over can be taken back: disks have the last one; else no update may have begun."""
        return self.policy.commits or self.policy.update == "after"

    def take_back(self) -> None:
        """Take back the step whose backward is over: parameters and states are again those before it.

        Disks have those of the last committed step; in the host's memory, no update may have begun.
        """
        updates = self._ready()
        if not self.can_take_back:
            raise UserError(
                "a tier on disks, or the update after the backward, is needed to take a step back; in the host's memory its "
                "updates are made; plan with --tier-update after, or go on from a checkpoint"
            )
        updates.finish()
        if isinstance(self.store, MemoryStore):
            self._waiting = {}
            self._close_step()
            return
        self.store.roll_back()
        updates.forms = from_notes(self.store.notes["optimizer"], updates.optimizer, self.parked)
        for parked in self.parked.values():
            if parked.is_kept:
                self.store.read(parked.key, parked.local.detach()).wait()
            if parked.keeps_states:
                updates.keep(parked)
            self.residence.let_go(parked)
        self._waiting = {}
        self._close_step()

    def _close_step(self) -> None:
        for parked in self.parked.values():
            parked.is_updating, parked.param.grad = False, None
        self._is_open = False

    def _total(self, value: float) -> float:
        if self.num_ranks == 1 or self.options.clip_previous_norm is None:
            return value
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held)
        return float(held.item())

    def close(self) -> None:
        """Stop the threads and close the store; disks keep the last committed step, the host's memory nothing."""
        if self.updates is not None:
            self.updates.close()
        self.store.close()


def _share(parked: Parked) -> float:
    """Return the weight of a rank's part in a sum over all ranks: 1 / the number of ranks that hold the same part."""
    param = parked.param
    if not isinstance(param, DTensor):
        return 1.0
    sizes = [
        size
        for size, place in zip(param.device_mesh.shape, param.placements, strict=True)
        if isinstance(place, Replicate)
    ]
    return 1.0 / math.prod(sizes)


def resting(plan: Plan, options: TierOptions | None, replicas: int = 1) -> TierOptions | None:
    """Return the options of a run of `plan`, the plan's own included; `UserError` where the two do not go together."""
    if options is None:
        if plan.tier is not None and plan.tier.place == "host":
            return resting(plan, TierOptions(host=True), replicas)
        if plan.tier is not None:
            raise UserError(
                "folders on disks are needed, where parameters and states of this plan rest; got none; name some "
                "(TierOptions([...]), --tier DIR), or plan without --tier"
            )
        return None
    options = options.under(plan)
    check_plan(plan, options, replicas)
    return options


def check_plan(plan: Plan, options: TierOptions, replicas: int = 1) -> None:
    """Raise `UserError` for a plan that a tier does not support."""
    if replicas > 1:
        raise UserError(f"one replica of the plan is needed with a tier; got {replicas}; plan for all ranks together")
    if plan.micro_batches > 1:
        raise UserError(
            f"a plan of one batch a step is needed with a tier; this one has {plan.micro_batches} micro-batches, whose "
            "gradients add up in memory; plan with --micro-batches 1"
        )
    if plan.pipeline is not None:
        raise UserError(
            "a plan without pipeline stages is needed with a tier; this one has some; plan without --pipeline"
        )
    if plan.offloads_states and plan.tier is None:
        raise UserError(
            "a plan that leaves optimizer states to the tier is needed; this one offloads them; plan with --pin '*=state-keep'"
        )
    if plan.cluster.device.kind != "cpu" and not options.host:
        raise UserError(
            f"a plan for CPUs is needed with disks; this one is for a {plan.cluster.device.kind}; plan with --hardware cpu:N, or "
            "take its host (--tier host)"
        )
    if plan.offload is not None and plan.offload.tier != options.place:
        raise UserError(
            f"a plan whose activations go to the same tier is needed, {options.place}; this one's go to the {plan.offload.tier}; "
            f"plan with --offload {options.place} or none"
        )
    if options.clip_previous_norm is not None and not math.isfinite(options.clip_previous_norm):
        raise UserError(f"a finite norm is needed to clip to; got {options.clip_previous_norm}; try 1.0")
