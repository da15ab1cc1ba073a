"""Runs MeZO on a model whose blocks rest elsewhere and are loaded once a step.

step t     both forwards in lockstep, from part to part                         `Streamed.step`, `lockstep`
part i     is loaded; its pending update (of step t − 1) is applied and written back; one forward runs it at θ + εz, the other
           at θ − εz
reading    `model(x)` and `state_dict()` see every update: a part's are applied when it is entered, all in `flush`
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from ..numerics.normals import normals, uniform_bits
from ..optim.mezo import Draw, MeZO, descend, from_copy, place, random_states, set_random_states
from .blocks import Part, find_parts
from .lockstep import Side, current_side, run_together
from .resting import Resting
from .store import BlockStore, HostStore
from .watch import ReadElsewhere, Watch

ABOVE, BELOW = 0, 1
Source = Callable[[str, nn.Parameter], Tensor]


class Exchange(Protocol):
    """Protocol of an exchange of slopes between ranks; `stream` identifies this rank's directions in a step."""

    stream: tuple[int, ...]

    def __call__(self, slope: float) -> list[tuple[tuple[int, ...], float]]:
        """Return every rank's stream with its slope, divided by the number of ranks."""


@dataclass(frozen=True)
class _Behind:
    """An update that is still to be applied to a part: its directions, slopes and settings."""

    step: tuple[int, int]
    stream: tuple[int, ...]
    slopes: tuple[tuple[tuple[int, ...], float], ...]
    settings: dict[str, tuple[float, float]]


@dataclass(eq=False)
class _Trained:
    """The optimizer's group, number and mode of a parameter."""

    group: dict[str, Any]
    number: int
    exact: bool


@dataclass(eq=False)
class _Plain:
    """Stands for a forward outside a step, which sees the unperturbed θ."""

    which: int | None = None
    inside: Part | None = None
    depth: int = 0


@dataclass(eq=False)
class _State:
    """The state of a part: its offsets at rest and in use, its own tensors if it stays, and its pending updates."""

    key: str
    rest: tuple[dict[str, int], int]
    use: tuple[dict[str, int], int]
    own: dict[str, Tensor] = field(default_factory=dict)
    behind: list[_Behind] = field(default_factory=list)


class Streamed:
    r"""Runs MeZO's steps on a model whose blocks rest in a store and are loaded one after another, once a step.

        block i at step t:  θ ← θ − lr (g z + λ θ) of step t − 1,   forward at θ + εz,   forward at θ − εz

    model: any module with a list of blocks; blocks: their paths (`h.*`), if it has no list. optimizer: a `MeZO` of its
    parameters, with groups, decay and schedules as usual; from now on its `step` calls this one. store: the store of the
    blocks; default: `HostStore()`. storage: the dtype at rest: 16-bit ones are rounded stochastically, fp32 for a bf16 model
    are master weights; default: the model's dtype. standing: parameters to keep on the device. exchange: the exchange of slopes
    between ranks. source: returns the values of parameters by name, for a model that is too large to build
    (`without_values`). in_turns: whether both forwards run in lockstep, so that a block is loaded once for both; default:
    decided by the first step. on_part(index, number): called when a part is loaded. draws: functions for directions and
    rounding bits, replaced in predictions.

    Steps equal the optimizer's own bit for bit, random numbers included. The device holds two blocks at rest, the largest part
    once more in the model's dtype, the parameters outside the blocks, and the activations of two forwards; `predicted_peak`
    gives the sum. `model(x)` and `model.state_dict()` see all updates; `close()` restores the whole model.

    The first step runs both in lockstep and one by one, to prove that lockstep changes nothing. If a model passes values from
    block to block outside of its calls, its forwards run one by one, and each block is loaded twice a step. A parameter that is
    read outside its own module becomes a standing one, which stays on the device from then on. For models that fit, MeZO alone
    is faster. Raises `UserError` if there are no blocks, or for another optimizer.

    >>> from trainwright.optim import MeZO
    >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    >>> streamed = Streamed(model, MeZO(model.parameters(), lr=1e-2))
    >>> loss = streamed.step(lambda: model(torch.ones(2, 4)).square().mean())
    >>> [round(x, 3) for x in streamed.close().state_dict()["0.bias"].tolist()] != [0.0] * 4
    True

    Source: Wang et al. 2025, ZO2 (arXiv:2503.12668). Departs: steps of any model that runs, found by its calls; flushed before
    anyone looks; tied weights, groups and dropout; directions from counters; disks.
    """

    def __init__(
        self, model: nn.Module, optimizer: MeZO, store: BlockStore | None = None, *, storage: torch.dtype | None = None,
        blocks: Sequence[str] | None = None, standing: Sequence[str] = (), exchange: Exchange | None = None,
        source: Source | None = None, in_turns: bool | None = None, on_part: Callable[[int, int], None] | None = None,
        draws: tuple[Draw, Draw] = (normals, uniform_bits),
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, MeZO):
            raise UserError(
                f"MeZO is needed to stream blocks, whose step wants no gradients; got {type(optimizer).__name__}; take "
                "trainwright.optim.MeZO, or plan offloading"
            )
        if storage is not None and storage not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise UserError(f"bf16, fp16, fp32 or fp64 is needed as storage; got {storage}; choose one")
        self.model, self.optimizer, self.exchange, self.on_part = model, optimizer, exchange, on_part
        found = find_parts(model, blocks, standing)
        self.parts = found.parts
        self._draw, self._draw_bits = draws
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._params = dict(model.named_parameters())
        self._rests_as = {name: storage or param.dtype for name, param in model.named_parameters()}
        self._used_as = {name: param.dtype for name, param in model.named_parameters()}
        self._trained = self._numbers()
        self._source = source or _own_values
        self._plain = _Plain()
        self._order: list[Part] = []
        self._visited: list[Part] = []
        self._together = in_turns
        self._standing: dict[str, Tensor] = {}
        self._moved: dict[int | None, dict[str, Tensor]] = {}
        self._stands_at: int | None = None
        self._states: dict[Part, _State] = {}
        self._hooks: list[Any] = []
        self.loading: Callable[[Part, int], AbstractContextManager[None]] = lambda part, num_bytes: nullcontext()
        """The context in which a part is loaded, whose bytes rest in the store, and catches up; predictions follow it."""
        self.away: set[int] = set()
        """The ids of the parameters whose values are not loaded now."""
        self._rest(store or HostStore(), found.standing)
        self._hook()
        optimizer.streamed = self.step

    # Where values are

    def _numbers(self) -> dict[str, _Trained]:
        known = {}
        for group, param, number in self.optimizer.numbered():
            name = self._names.get(id(param))  # type: ignore[arg-type]
            if name is None:
                raise UserError(
                    "an optimizer of the model's own parameters is needed; got one with others; make it of model.parameters()"
                )
            exact = from_copy(param.dtype, group) or self._rests_as[name] != param.dtype
            known[name] = _Trained(group, number, exact)
        return known

    def _rest(self, store: BlockStore, standing: dict[str, nn.Parameter]) -> None:
        """Put the blocks into the store, and the staying parameters into tensors of their dtype at rest."""
        device = next(iter(self.model.parameters())).device
        for part in self.parts:
            self._states[part] = _State(part.name, part.layout(self._rests_as), part.layout(self._used_as))
        sizes = {state.key: state.rest[1] for part, state in self._states.items() if not part.stays}
        self.resting = Resting(store, sizes, device)
        most = max(state.use[1] for state in self._states.values())
        self._in_use = torch.empty(most, dtype=torch.uint8, device=device)
        for name, param in standing.items():
            self._standing[name] = self._source(name, param).detach().to(self._rests_as[name]).contiguous()
            param.data = self._standing[name].to(param.dtype)
        for part in self.parts:
            state = self._states[part]
            for name, param in part.params.items():
                value = self._source(name, param).detach()
                if part.stays:
                    state.own[name] = value.to(self._rests_as[name]).contiguous()
                else:
                    self._view(self._in_use_for(state), state.rest[0], name, self._rests_as, param).copy_(value)
                self._put_away(name, param)
            if not part.stays:
                self.resting.add(state.key, self._in_use_for(state)[: state.rest[1]])

    def _in_use_for(self, state: _State) -> Tensor:
        """Return a buffer in which a block is prepared at the beginning; master weights may need the larger one."""
        return self._in_use if state.rest[1] <= self._in_use.numel() else self.resting.spare()

    def _view(
        self, data: Tensor, places: dict[str, int], name: str, types: dict[str, torch.dtype], param: nn.Parameter
    ) -> Tensor:
        size = param.numel() * types[name].itemsize
        return data[places[name] : places[name] + size].view(types[name]).view(param.shape)

    def _put_away(self, name: str, param: nn.Parameter) -> None:
        """Replace a parameter's values by NaNs of its shape, which take no memory."""
        param.data = torch.full((), math.nan, dtype=self._used_as[name], device=self._in_use.device).expand(param.shape)
        self.away.add(id(param))

    def _at_rest(self, part: Part, arrived: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Load a part, apply its pending updates, and return its parameters at rest.

        arrived: called between the two; what is fetched there comes in beside the update.
        """
        state = self._states[part]
        with self.loading(part, 0 if part.stays else state.rest[1]):
            if part.stays:
                own = state.own
            else:
                data = self.resting.use(state.key)
                own = {
                    name: self._view(data, state.rest[0], name, self._rests_as, param)
                    for name, param in part.params.items()
                }
            arrived()
            if state.behind:
                self._apply_pending(part, own)
        return own

    def _apply_pending(self, part: Part, own: dict[str, Tensor]) -> None:
        state = self._states[part]
        if not part.stays:
            self.resting.changing()
        for behind in state.behind:
            for name, tensor in own.items():
                self._catch_up(name, tensor, behind)
        state.behind.clear()
        if not part.stays:
            self.resting.write()

    def _catch_up(self, name: str, own: Tensor, behind: _Behind) -> None:
        known = self._trained.get(name)
        if known is None:
            return
        key = (*behind.step, known.number)
        epsilon = known.group["epsilon"]
        if not known.exact:  # as MeZO leaves it: moved and moved back
            place(own, own, (*key, *behind.stream), [epsilon, -epsilon - epsilon, epsilon], self._draw)
        if behind.slopes:
            slopes = [((*key, *stream), slope) for stream, slope in behind.slopes]
            descend(own, slopes, *behind.settings[name], (*key, 1), self._draw, self._draw_bits)

    @property
    def blocks(self) -> list[Part]:
        """Return the parts that rest in the store."""
        return [part for part in self.parts if not part.stays]

    def device_tensors(self) -> list[Tensor]:
        """Return the tensors that stay on the device all the time."""
        own = [tensor for state in self._states.values() for tensor in state.own.values()]
        return [self._in_use, *self.resting.data, *own, *self._standing.values()]

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> float:
        """Run one step and return the mean of the losses at θ ± εz; the closure is called in threads, one at a time."""
        if closure is None:
            raise UserError(
                "MeZO needs a closure that returns the loss; got none; call streamed.step(lambda: loss of the batch)"
            )
        above, below = self._reading_what_it_needs(lambda: self._losses(closure))
        first = self.optimizer.param_groups[0]
        slope = (above - below) / (2 * first["epsilon"])
        self.optimizer.slope = slope
        if self.exchange is not None:
            slopes = tuple(self.exchange(slope))
        else:
            slopes = (((), slope),) if math.isfinite(slope) else ()
        settings = {name: (known.group["lr"], known.group["weight_decay"]) for name, known in self._trained.items()}
        behind = _Behind((first["seed"], first["num_steps"]), self._stream, slopes, settings)
        for state in self._states.values():
            state.behind.append(behind)
        for name, own in self._standing.items():
            self._catch_up(name, own, behind)
        self._stand(None)
        for group in self.optimizer.param_groups:
            group["num_steps"] += 1
        return (above + below) / 2

    @property
    def _stream(self) -> tuple[int, ...]:
        return () if self.exchange is None else self.exchange.stream

    @torch.no_grad()
    def evaluate(self, closure: Callable[[], Any]) -> float:
        """Return the loss of `closure` at θ, with all updates applied."""
        return self._reading_what_it_needs(lambda: self._pass([None], closure)[0])

    def _reading_what_it_needs(self, run: Callable[[], Any]) -> Any:
        """Call `run`; if a parameter is read outside its part, make it a standing one and start again."""
        found, buffers = random_states(), self._buffers() if self._together is None else None
        while True:
            try:
                return run()
            except ReadElsewhere as error:
                set_random_states(found)
                self._restore(buffers)
                self._make_stand(error.param)

    def _losses(self, closure: Callable[[], Any]) -> tuple[float, float]:
        if self._together is None:
            above, below = self._compared(closure)
        else:
            above, below = self._pass([ABOVE, BELOW], closure) if self._together else self._one_by_one(closure)
        return above, below

    def _compared(self, closure: Callable[[], Any]) -> list[float]:
        """Return the losses of the forwards run one by one, and note whether lockstep gives the same."""
        random, buffers = random_states(), self._buffers()
        in_turns = self._pass([ABOVE, BELOW], closure)
        set_random_states(random)
        self._restore(buffers)
        alone = self._one_by_one(closure)
        self._together = all(one == other or (one != one and other != other) for one, other in zip(in_turns, alone))
        if not self._together:
            warnings.warn(
                f"the two forwards of {type(self.model).__name__} cannot take turns (losses of {in_turns}, {alone} one by one): "
                "it hands values on past its calls, or draws other numbers; each block comes in twice a step",
                stacklevel=5,
            )
        return alone

    def _one_by_one(self, closure: Callable[[], Any]) -> list[float]:
        random = random_states()
        above = self._pass([ABOVE], closure)
        set_random_states(random)
        return above + self._pass([BELOW], closure)

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.model.buffers()]

    def _restore(self, buffers: list[Tensor] | None) -> None:
        for buffer, value in zip(self.model.buffers(), buffers or []):
            buffer.copy_(value)

    def _pass(self, sides: Sequence[int | None], closure: Callable[[], Any]) -> list[float]:
        """Run forwards in lockstep, at θ + εz, θ − εz or (None) θ; leave torch's generators in the last one's state."""
        self._visited = []
        try:
            for which in sides:
                self._moved[which] = {
                    name: self._placed(name, own, which, torch.empty_like(own, dtype=self._used_as[name]))
                    for name, own in self._standing.items()
                }
            running = [Side(which, closure, lambda: Watch(self)) for which in sides]
            run_together(running, self._serve, lambda side: self._stand(side.which))
        finally:
            self._stand(None)
            self._moved.clear()
            for part in self.parts:
                self._leave_now(part)
        self._order = self._visited
        set_random_states(running[-1].random)
        values = [side.value for side in running]
        return [value for value in values if value is not None]

    def _placed(self, name: str, own: Tensor, which: int | None, into: Tensor) -> Tensor:
        known = self._trained.get(name)
        if known is None or which is None:
            into.copy_(own)
            return into
        epsilon = known.group["epsilon"]
        far = [-epsilon] if known.exact else [epsilon, -epsilon - epsilon]
        key = (*self.optimizer.key(known.number), *self._stream)
        place(into, own, key, [epsilon] if which == ABOVE else far, self._draw)
        return into

    def _stand(self, which: int | None) -> None:
        """Set the standing parameters to a side's perturbation; None: to θ."""
        for name, own in self._standing.items():
            moved = self._moved.get(which)
            self._params[name].data = moved[name] if moved is not None else own.to(self._used_as[name])

    def _serve(self, part: Part, side: Any) -> None:
        """Load a part and set its parameters to a side's perturbation."""
        rests = self._at_rest(part, lambda: self._visit(part))
        state = self._states[part]
        for name, param in part.params.items():
            target = self._view(self._in_use, state.use[0], name, self._used_as, param)
            param.data = self._placed(name, rests[name], side.which, target)
            self.away.discard(id(param))

    def _visit(self, part: Part) -> None:
        """Note that a part is there, and prefetch the next one."""
        if not self._visited or self._visited[-1] is not part:
            self._visited.append(part)
            if self.on_part is not None:
                self.on_part(len(self._visited), len(self.parts))
        self._fetch_after(part)

    def _fetch_after(self, part: Part) -> None:
        """Prefetch the block that came next in the last pass."""
        order = [each for each in self._order or self.parts if not each.stays]
        at = sum(not each.stays for each in self._visited)
        if order and not part.stays:
            self.resting.fetch(self._states[order[at % len(order)]].key)
        elif order and at == 0:
            self.resting.fetch(self._states[order[0]].key)

    def _make_stand(self, param: nn.Parameter) -> None:
        """Move a parameter from its part to the standing ones, since it is read elsewhere too."""
        name = self._names[id(param)]
        part = next(each for each in self.parts if name in each.params)
        values = {each: tensor.clone() for each, tensor in self._at_rest(part).items()}
        del part.params[name]
        self.away.discard(id(param))
        self._standing[name] = values.pop(name)
        old = self._states[part]
        self._states[part] = _State(f"{old.key}'", part.layout(self._rests_as), part.layout(self._used_as), values)
        self._stand(None)
        if not part.params:
            self.parts.remove(part)
            del self._states[part]
        if part.stays or not part.params:
            return
        data = torch.empty(self._states[part].rest[1], dtype=torch.uint8, device=self._in_use.device)
        for each, value in values.items():
            self._view(data, self._states[part].rest[0], each, self._rests_as, part.params[each]).copy_(value)
        self._states[part].own = {}
        self.resting.settle()
        self.resting.add(self._states[part].key, data)

    # The model's calls

    def _hook(self) -> None:
        for part in self.parts:
            for root in part.modules:
                for module in root.modules():
                    self._hooks.append(module.register_forward_pre_hook(lambda *_, part=part: self._enter(part)))
                    self._hooks.append(
                        module.register_forward_hook(lambda *_, part=part: self._leave(part), always_call=True)
                    )
                self._hooks.append(root.register_state_dict_post_hook(self._filled_in(part, root)))

    def _enter(self, part: Part) -> None:
        side: Any = current_side() or self._plain
        if side.inside is None and part.params:
            if side is self._plain:
                self._enter_plainly(part)
            else:
                side.stop(part)
            side.inside = part
        elif side.inside is not part and part.params:  # a part within a part: both are needed at once
            raise ReadElsewhere(next(iter(part.params.values())))
        side.depth += side.inside is part

    def _enter_plainly(self, part: Part) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                "a streamed model has no gradients; it was called with gradients on; call it in torch.no_grad()"
            )
        self._serve(part, self._plain)

    def _leave(self, part: Part) -> None:
        side: Any = current_side() or self._plain
        if side.inside is part:
            side.depth -= 1
            if side.depth <= 0:
                side.inside, side.depth = None, 0
                self._leave_now(part)

    def _leave_now(self, part: Part) -> None:
        for name, param in part.params.items():
            if id(param) not in self.away:
                self._put_away(name, param)

    def _filled_in(self, part: Part, root: nn.Module) -> Callable[..., None]:
        own = {id(param): name for name, param in root.named_parameters(remove_duplicate=False)}

        def fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            if not part.params:
                return
            rests = {id(part.params[name]): tensor for name, tensor in self._at_rest(part).items()}
            for name, param in module.named_parameters(remove_duplicate=False):
                if id(param) in own and id(param) in rests and f"{prefix}{name}" in state_dict:
                    state_dict[f"{prefix}{name}"] = rests[id(param)].to(param.dtype, copy=True)

        return fill

    # Who looks

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all pending updates, and flush the store."""
        for part in self.parts:
            if self._states[part].behind:
                self._at_rest(part)
        self.resting.settle()
        self.resting.store.flush()

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each part's name and its parameters at rest, with all updates applied; they are valid until the next item."""
        if self._standing:
            yield "", dict(self._standing)
        for part in self.parts:
            yield part.name, self._at_rest(part)

    @torch.no_grad()
    def load(self, values: Callable[[str], Tensor]) -> None:
        """Set every parameter to `values(name)`."""
        for state in self._states.values():
            state.behind.clear()
        for _, tensors in self.tensors():
            part = next((each for each in self.parts if each.params.keys() == tensors.keys()), None)
            streams = part is not None and not part.stays
            if streams:
                self.resting.changing()
            for name, tensor in tensors.items():
                tensor.copy_(values(name))
            if streams:
                self.resting.write()
        self._stand(None)
        self.flush()

    @torch.no_grad()
    def close(self) -> nn.Module:
        """Restore the whole model with all updates applied, and return it; the optimizer's step is its own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for part in self.parts:
            for name, tensor in self._at_rest(part).items():
                part.params[name].data = tensor.to(self._used_as[name], copy=True)
        self.away.clear()
        self.flush()
        self.resting.close()
        self.optimizer.streamed = None
        return self.model


def _own_values(name: str, param: nn.Parameter) -> Tensor:
    if param.is_meta:
        raise UserError(
            f"a value of {name} is needed, which is on the meta device; build the model on the cpu, or in without_values() and "
            "give source="
        )
    return param.data
