"""A planned module on disks: parameters park there, gradients go to the update, and every step is kept whole.

load        each parameter is written as it is made, and emptied          park
forward     instructions find what they read here                         watch (→ residence)
backward    a gradient that arrives is taken, and its update begins       attach (→ updates)
step        what is under way ends; that step is the last whole one       finish, commit
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ...artifacts import Plan, UserError
from ...rank.execute import Executor
from ...rank.offload_states import check_updates_alone, with_groups
from ...tiers import DIRECTIONS, Layer, Moved, Policy, StepTraffic, now, traffic
from ..regions import Region
from .gone import gone_like
from .options import TierOptions
from .places import check_room_for_all, open_store
from .plain_states import as_notes, from_notes
from .residence import Parked, Reads, Residence
from .updates import Updates, local_of, state_key

SAID_EVERY_S = 20.0
"""Between two words on how far a long step is."""


class Tier:
    """What a planned module has on its rank's disks. Made by `parallelize(…, tier=TierOptions(…))`.

    `attach(optimizer)` comes before the first backward, which then updates; the optimizer's `step()` waits for the rest and
    keeps the step, so that it is the last whole one.
    """

    def __init__(self, options: TierOptions, rank: int = 0, num_ranks: int = 1) -> None:
        self.options, self.num_ranks = options, num_ranks
        self.store = open_store(options, rank, num_ranks)
        self.residence = Residence(self.store, options.window_bytes)
        self.parked: dict[str, Parked] = {}
        self.updates: Updates | None = None
        self.commits = True
        """False where the one who trains calls `commit`, with notes of its own."""
        self.step = self.store.step
        """The last step that was taken, of earlier runs too; -1 before the first."""
        self.norm = 0.0
        """Of this rank's gradients of the last step."""
        self._squares = self._extremes = 0.0
        self._on_disk: dict[str, Tensor] = {}
        """Gradients that wait on the disk for an update after the backward, without their contents."""
        self._scale = 1.0
        self._kept_bytes = 0
        self.num_forwards: Callable[[], int] = lambda: 0
        """Of the module, on which its random numbers depend."""
        self.notice: Callable[[str], None] = lambda text: None
        """Told, in words, how far a long step is."""
        self._buffers: dict[str, Tensor] = {}
        self._said_at_s, self._num_taken = time.monotonic(), 0
        self._told: dict[str, Moved] = {}
        self._told_s, self._told_at = 0.0, now()
        self._is_open = False
        """True from the first gradient of a step until it is finished or taken back."""

    # Parameters

    def make_room(self, sizes: Mapping[str, int], state_bytes: int) -> None:
        """Take room for all parameters before the first is written; `UserError` where these, their states and gradients have none.

        state_bytes: of the optimizer that the plan was made for; another's are known when it is attached. A collective call.
        """
        if self.options.resume:
            return
        param_bytes = sum(sizes.values())
        grad_bytes = param_bytes if self.options.update == "after" else 0
        try:
            check_room_for_all(self.store.paths, param_bytes + state_bytes + grad_bytes, self.num_ranks)
        except UserError:
            self.store.remove()  # the folders are as they were found
            for path in self.store.paths if self.num_ranks > 1 else ():
                path.rmdir()
            raise
        self.store.add({f"param.{name}": num_bytes for name, num_bytes in sizes.items() if num_bytes})

    def value(self, name: str, dtype: torch.dtype, region: Region, read: Callable[[str, Region], Tensor]) -> Tensor:
        """Return this rank's part of a new parameter, in memory of its own; in a run that goes on, room for it."""
        if self.options.resume:
            return torch.empty(region.local_shape, dtype=dtype)
        local = read(name, region).to(dtype).contiguous()
        alone = local.untyped_storage().nbytes() == local.numel() * local.element_size()
        return local if alone else local.clone()

    def park(self, name: str, param: nn.Parameter) -> None:
        """Write a new parameter to the disk, and empty it; in a run that goes on, empty it alone."""
        key, local = f"param.{name}", local_of(param.data)
        num_bytes = local.numel() * local.element_size()
        if num_bytes == 0:
            return
        assert local.untyped_storage().nbytes() == num_bytes, name  # else something else would go with it
        parked = self.parked[name] = Parked(name, param, local, num_bytes)
        if not self.options.resume:
            self.store.write(key, local.detach()).wait()
        self.residence.add(parked)
        self.residence.let_go(parked)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self._taker(parked))
        self._say(f"{len(self.parked)} parameters are on the disk")

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said_at_s >= SAID_EVERY_S:
            self._said_at_s = time.monotonic()
            self.notice(text)

    def watch(self, executor: Executor, names: Mapping[int, str], direct: Container[int]) -> None:
        """Let the instructions of a program find what they read; names: of its parameters, by their value's index.

        direct: those of them that instructions read as a rank's part; a bucket takes the others as they rest.
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
        """Have every parameter in memory inside the `with` block, for `state_dict` and the like; what is changed there is lost."""
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
        """Write these with every step that is kept: they are few, and stay in memory; in a run that goes on, read them first."""
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
        """Let `optimizer` update what is parked: during the backward, or after it, as the options say."""
        check_updates_alone(optimizer)
        if self.updates is not None:
            raise UserError(
                "one optimizer is needed for a tier; this is a second one; make one with groups of parameters"
            )
        options = self.options
        self.updates = Updates(
            self.store, optimizer, options.window_bytes // 2, options.num_workers, options.worker_cores
        )
        trained = [parked for parked in self.parked.values() if parked.param in self.updates.group_of]
        for parked in trained:
            parked.is_trained = True
        if options.resume:
            self.updates.forms = from_notes(self.store.notes["optimizer"], optimizer, self.parked)
            self.norm = float(self.store.notes["norm"])
        else:
            self._reserve(optimizer, trained)
        self._keep(trained)
        if not options.resume:
            self.commit()  # so that the first step, too, can be taken back
        own = weakref.ref(self)

        def before_step(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tier = own()
            if tier is None or stepped is not optimizer:
                return None
            return tier._step_of(optimizer, args, kwargs)

        hook = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, hook.remove)

    def _reserve(self, optimizer: Optimizer, trained: list[Parked]) -> None:
        """Make room for the states before anything is trained: a step without values says how large they are."""
        assert self.updates is not None
        sizes = {}
        expected = self.updates.expected_bytes
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
                return  # it reads values: room is made with its first step
            for name, value in trial.state.get(stand_in, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    size = sizes[state_key(parked, name)] = value.numel() * value.element_size()
                    expected[parked.name] = expected.get(parked.name, 0) + size
            if self.options.update == "after":
                sizes[f"grad.{parked.name}"] = parked.num_bytes
        self.store.add(sizes)

    def _keep(self, trained: list[Parked]) -> None:
        """Let stay in memory what `keep_bytes` has room for, the last of the forward first: it is updated first."""
        assert self.updates is not None
        for parked in [each for each in reversed(self.residence.order) if each in trained]:
            prefix = state_key(parked, "")
            size = parked.num_bytes + sum(
                item.num_bytes for key, item in self.store.items.items() if key.startswith(prefix)
            )
            if self._kept_bytes + size <= self.options.keep_bytes:
                self._kept_bytes += size
                self.residence.need([parked])
                self.residence.keep(parked)
                self.updates.keep(parked)

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
        """Take a gradient that is complete."""
        updates = self._ready()
        if parked.param not in updates.group_of:
            return  # nobody updates it
        if not self._is_open:
            self._is_open, self._squares, self._extremes, self._num_taken = True, 0.0, 0.0, 0
            self._scale = self._scale_now()
        if parked.is_updating or parked.name in self._on_disk:
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
            self._extremes += float(low.abs()) + float(high.abs())
        if self._scale != 1.0:
            local.mul_(self._scale)
        if self.options.update == "during":
            updates.begin(parked, grad)
            return
        key = f"grad.{parked.name}"
        if key not in self.store:
            self.store.add({key: parked.num_bytes})
        held = local.contiguous()
        self.store.write(key, held).wait()
        local.untyped_storage().resize_(0)
        self._on_disk[parked.name] = grad
        if not self.residence.wanted_first(parked, by_backward=False):
            self.residence.let_go(parked)

    def _scale_now(self) -> float:
        clip = self.options.clip_previous_norm
        return 1.0 if clip is None or self.norm == 0.0 else min(1.0, clip / self.norm)

    def layers(self) -> list[Layer]:
        """Return every parameter in the order of first use, for `tiers.traffic` and `tiers.simulate`."""
        states: dict[str, list[int]] = defaultdict(list)
        for key, item in self.store.items.items():
            if key.startswith("state."):
                states[key.removeprefix("state.").rpartition(".")[0]].append(item.num_bytes)
        return [
            Layer(each.num_bytes, tuple(states[each.name]), each.num_bytes, is_trained=each.is_trained)
            for each in self.residence.order
        ]

    def planned(self) -> StepTraffic:
        """Return the bytes that a step moves, the first one aside."""
        options = self.options
        policy = Policy(options.window_bytes, options.keep_bytes, options.update, options.commit_every)
        return traffic(self.layers(), policy)

    def told(self) -> dict[str, Any]:
        """Return what moved since the last call, for the events of a run: bytes, those a second over the time, seconds waited."""
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

    def extremes(self) -> float:
        """Return a number that is finite only if every entry of this rank's gradients of the step is."""
        return self._extremes

    def _ready(self) -> Updates:
        if self.updates is None:
            raise UserError(
                "an optimizer is needed before the first backward with a tier; none is attached; call tier.attach(optimizer)"
            )
        return self.updates

    def _step_of(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of the optimizer's step: end what the backward has begun."""
        if len(args) > 1 or kwargs:
            raise UserError("a step without a closure is needed with a tier; got one; run the backward before the step")
        self.finish()
        return (with_groups(optimizer, []),), {}

    def finish(self) -> None:
        """Return when every parameter is updated and on its way to the disk; `commit` unless the one who trains does."""
        updates = self._ready()
        for name, grad in self._on_disk.items():
            local = local_of(grad)
            local.untyped_storage().resize_(local.numel() * local.element_size())
            updates.begin(self.parked[name], grad, from_store=True)
        self._on_disk = {}
        updates.finish()
        self.residence.end_backward()
        self.norm = self._total(self._squares) ** 0.5
        self._close_step()
        self.step += 1
        if self.commits:
            self.commit()

    def commit(self, notes: Mapping[str, Any] | None = None, force: bool = False) -> None:
        """Keep the step that was finished, if it is due; the ranks do so together."""
        updates = self._ready()
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
        updates.is_committing = (self.step + 2) % self.options.commit_every == 0

    def take_back(self) -> None:
        """Leave the step out whose updates the backward has begun: parameters and states are those of the last whole step."""
        updates = self._ready()
        updates.finish()
        self.store.roll_back()
        updates.forms = from_notes(self.store.notes["optimizer"], updates.optimizer, self.parked)
        for parked in self.parked.values():
            if parked.is_kept:
                self.store.read(parked.key, parked.local.detach()).wait()
                updates.keep(parked)
            self.residence.let_go(parked)
        self._on_disk = {}
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
        """End threads and files; the disks keep the last whole step."""
        if self.updates is not None:
            self.updates.close()
        self.store.close()


def _share(parked: Parked) -> float:
    """Return the share of a rank's part in a sum over all ranks: those that hold the same count once."""
    param = parked.param
    if not isinstance(param, DTensor):
        return 1.0
    sizes = [
        size
        for size, place in zip(param.device_mesh.shape, param.placements, strict=True)
        if isinstance(place, Replicate)
    ]
    return 1.0 / math.prod(sizes)


def check_plan(plan: Plan, options: TierOptions, replicas: int = 1) -> None:
    """Raise `UserError` for a plan that cannot rest on disks."""
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
    if plan.offloads_states:
        raise UserError(
            "a plan that leaves optimizer states to the tier is needed; this one offloads them; plan with --pin '*=state-keep'"
        )
    if plan.cluster.device.kind != "cpu":
        raise UserError(
            f"a plan for CPUs is needed with a tier; this one is for a {plan.cluster.device.kind}; plan with --hardware cpu:N"
        )
    if options.clip_previous_norm is not None and not math.isfinite(options.clip_previous_norm):
        raise UserError(f"a finite norm is needed to clip to; got {options.clip_previous_norm}; try 1.0")
