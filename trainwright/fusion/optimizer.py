"""Optimizers of a fused model: an ordinary one a model, over that model's row of all parameters.

An elementwise update does not see where a parameter ends. So the parameters of all models are laid out as one array [B, N],
the fused parameters are views of its columns, and model b's optimizer updates row b: B updates of N elements, where B runs
take B·P of parts of it. It is the class of the run alone, with its own settings, state and schedule, to the bit. What needs
a parameter's shape (Adafactor, Muon, 8-bit blocks …) gets model b's slice of each.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import optim
from ..artifacts import UserError
from .model import FusedModel

_LARGE = 1 << 15
"""Elements of one model's parameter from which on it is updated by a call of its own, and stays contiguous for the forward."""


def optimizer(
    name: str, model: FusedModel, *, groups: Sequence[dict[str, Any]] = (), clip: Any = None, on_nan: str = "skip", **settings: Any
) -> FusedOptimizer:  # fmt: skip
    """Return an optimizer of a fused model: for each of the B models, what `trainwright.optim.create` makes of the model alone.

    name: of any optimizer that `trainwright optimizers` lists, but for those that take the loss itself. settings: its own; a
    list of B values gives each model its own, as `lr=[0.1, 0.01]`; tuples are values (`betas=(0.9, 0.99)`).
    groups: settings of some parameters, by names or patterns: `[{"params": ["*.bias"], "weight_decay": 0.0}]`; the others
    have `settings`. clip: the largest gradient norm of a model, one for all or a list; models do not touch one another.
    on_nan: of a model whose gradient is not finite: `skip` its update of this step, `stop` it for good, or `keep`, which
    updates it all the same.

    Raises `UserError` for an unknown name or setting, a list of another length, and patterns that match nothing.

    >>> from trainwright.fusion import fuse
    >>> fused = fuse([nn.Linear(3, 1), nn.Linear(3, 1)])
    >>> both = optimizer("adamw", fused, lr=[1e-2, 1e-3], clip=1.0)
    >>> fused.loss((torch.ones(4, 3), torch.ones(4, 1)), nn.MSELoss()).sum().backward()
    >>> both.step().tolist(), both.lrs
    ([True, True], [0.01, 0.001])
    """
    entry = optim.record(name)
    if entry.needs_loss:
        raise UserError(
            f"an optimizer that steps on gradients is needed for a fused model; {entry.name} takes the loss itself; take adamw, or "
            "train the models apart"
        )
    if on_nan not in ("skip", "stop", "keep"):
        raise UserError(f"on_nan is skip, stop or keep; got {on_nan!r}; choose one of these")
    clips = None if clip is None else [float(each) for each in per_model(clip, model.num_models, "clip")]
    parts = _parts_of(model, groups, by_rows=entry.reads == "element" and not entry.by_tensor)
    optimizers = []
    for at in range(model.num_models):
        given = [{"params": [piece.own[at] for piece in pieces], **_chosen(own, at, model)} for own, pieces in parts]
        optimizers.append(optim.create(entry.name, given, **_chosen(settings, at, model)))
    return FusedOptimizer(model, [pieces for _, pieces in parts], optimizers, clips, on_nan)


def per_model(value: Any, num: int, name: str) -> list[Any]:
    """Return a value for each model: of a list its own, of anything else the same.

    >>> per_model([1, 2], 2, "lr"), per_model((0.9, 0.99), 2, "betas")
    ([1, 2], [(0.9, 0.99), (0.9, 0.99)])
    """
    if not isinstance(value, list):
        return [value] * num
    if len(value) != num:
        raise UserError(
            f"{name} needs a value for each of {num} models, or one for all; got a list of {len(value)}; give {num}"
        )
    return value


class _Piece:
    """Parameters that each optimizer sees as one: `values` [B, …], and of each model its own part."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.params, self.names = list(params), list(names)
        self.values = _laid_out(self.params)
        self.own = [nn.Parameter(values) for values in self.values]

    def gradient(self) -> Tensor | None:
        """Return [B, …] of this step; `None` where no parameter has one."""
        grads = [param.grad for param in self.params]
        if len(grads) == 1:
            return grads[0]
        if all(grad is None for grad in grads):
            return None
        if any(grad is None for grad in grads):
            missing = next(name for name, grad in zip(self.names, grads) if grad is None)
            raise UserError(
                f"a gradient of every parameter is needed, or of none; {missing} has none; put what a step may leave out in "
                f"a group of its own: groups=[{{'params': [{missing!r}]}}], or set requires_grad=False before fuse"
            )
        return torch.cat([grad.flatten(1) for grad in grads if grad is not None], dim=1)

    def hand_to(self, own: Sequence[nn.Parameter]) -> None:
        """Let the parameters that optimizers know already stand for these values."""
        for param, values in zip(own, self.values, strict=True):
            param.data = values
        self.own = list(own)


def _laid_out(params: list[nn.Parameter]) -> Tensor:
    """Return the values of the parameters, of several as rows [B, N] of which they become views."""
    if len(params) == 1:
        return params[0].detach()
    rows = torch.cat([param.detach().flatten(1) for param in params], dim=1)
    begin = 0
    for param in params:
        end = begin + param[0].numel()
        param.data = rows[:, begin:end].view(param.shape)
        begin = end
    return rows


class FusedOptimizer:
    """One ordinary torch optimizer a model, made by `optimizer`: `optimizers[b]` is model b's; change its groups as ever."""

    def __init__(
        self, fused: FusedModel, pieces: Sequence[Sequence[_Piece]], optimizers: list[Any], clips: list[float] | None, on_nan: str
    ) -> None:  # fmt: skip
        self.fused, self.optimizers, self.clips, self.on_nan = fused, optimizers, clips, on_nan
        self._groups = [list(each) for each in pieces]
        self.running = [True] * fused.num_models
        """True for each model that is still trained; see `stop`."""

    @property
    def lrs(self) -> list[float]:
        """The models' learning rates, of their first groups."""
        return [float(each.param_groups[0]["lr"]) for each in self.optimizers]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for piece in self._pieces():
            for param in piece.params:
                param.grad = None

    def stop(self, models: Iterable[int]) -> None:
        """Train these models no further: their parameters stay, statistics of batch norms still move (see `keep`)."""
        for model in models:
            self.running[model] = False

    @torch.no_grad()
    def step(self, norms: Tensor | None = None) -> Tensor:
        """Update every model that runs; returns which were updated, bools [B].

        norms: the models' gradient norms [B], if `grad_norms()` has been called anyway.
        """
        pieces = [(piece, grad) for piece in self._pieces() if (grad := piece.gradient()) is not None]
        takes, factors = torch.tensor(self.running), None
        if self.clips is not None or self.on_nan != "keep":
            found = _norms([grad for _, grad in pieces], len(self.running)) if norms is None else norms
            takes = self._finite(found.cpu(), takes)
            factors = self._factors(found)
        for piece, grad in pieces:
            if factors is not None:
                grad = grad * factors.to(grad.dtype).view(-1, *(1,) * (grad.dim() - 1))
            for own, row, taken in zip(piece.own, grad, takes.tolist()):
                own.grad = row if taken else None
        for each, taken in zip(self.optimizers, takes.tolist()):
            if taken:
                each.step()
        for piece, _ in pieces:
            for own in piece.own:
                own.grad = None
        return takes

    @torch.no_grad()
    def grad_norms(self) -> Tensor:
        """Return the norm of each model's gradient [B]."""
        grads = [grad for piece in self._pieces() if (grad := piece.gradient()) is not None]
        return _norms(grads, len(self.running))

    def keep(self, models: Sequence[int], fused: FusedModel) -> FusedOptimizer:
        """Return the optimizer of `fused`, which is `self.fused.keep(models)`: the same optimizers go on over its parameters."""
        parts = [[(piece.names, piece.own) for piece in group] for group in self._groups]
        params = dict(fused.model.named_parameters())
        groups = []
        for group in parts:
            pieces = []
            for names, own in group:
                piece = _Piece([params[name] for name in names], names)
                piece.hand_to([own[model] for model in models])
                pieces.append(piece)
            groups.append(pieces)
        clips = None if self.clips is None else [self.clips[model] for model in models]
        found = FusedOptimizer(fused, groups, [self.optimizers[model] for model in models], clips, self.on_nan)
        found.running = [self.running[model] for model in models]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return each optimizer's state, and which models run."""
        return {"optimizers": [each.state_dict() for each in self.optimizers], "running": list(self.running)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        if len(state["optimizers"]) != len(self.optimizers):
            raise UserError(
                f"the state of {len(self.optimizers)} models is needed; got {len(state['optimizers'])}; load it into as many"
            )
        for each, own in zip(self.optimizers, state["optimizers"]):
            each.load_state_dict(own)
        self.running = list(state["running"])

    def _pieces(self) -> Iterable[_Piece]:
        return (piece for group in self._groups for piece in group)

    def _finite(self, norms: Tensor, takes: Tensor) -> Tensor:
        if self.on_nan == "keep":
            return takes
        finite = norms.isfinite()
        if self.on_nan == "stop":
            self.stop(torch.nonzero(~finite).flatten().tolist())
        return takes & finite

    def _factors(self, norms: Tensor) -> Tensor | None:
        if self.clips is None:
            return None
        return (torch.tensor(self.clips, dtype=norms.dtype, device=norms.device) / (norms + 1e-6)).clamp(max=1.0)


def _norms(grads: list[Tensor], num: int) -> Tensor:
    if not grads:
        return torch.zeros(num)
    return torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads]).norm(dim=0)


def _chosen(settings: dict[str, Any], at: int, model: FusedModel) -> dict[str, Any]:
    return {key: per_model(value, model.num_models, key)[at] for key, value in settings.items()}


def _parts_of(
    fused: FusedModel, groups: Sequence[dict[str, Any]], by_rows: bool
) -> list[tuple[dict[str, Any], list[_Piece]]]:
    """Return the groups' settings with the parameters that each has, in pieces."""
    left = {name: param for name, param in fused.model.named_parameters() if param.requires_grad}
    found: list[tuple[dict[str, Any], list[_Piece]]] = []
    for group in groups:
        patterns = group["params"]
        names = [name for name in left if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if not names:
            raise UserError(
                f"parameters that are left are needed for the group {patterns}; it matches none; see named_parameters()"
            )
        own = {key: value for key, value in group.items() if key != "params"}
        found.append((own, _pieces_of({name: left.pop(name) for name in names}, by_rows)))
    return [*([({}, _pieces_of(left, by_rows))] if left else []), *found]


def _pieces_of(params: dict[str, nn.Parameter], by_rows: bool) -> list[_Piece]:
    rows: dict[Any, list[str]] = {}
    for name, param in params.items():
        large = not by_rows or param[0].numel() > _LARGE
        rows.setdefault((param.device, param.dtype, name if large else ""), []).append(name)
    return [_Piece([params[name] for name in names], names) for names in rows.values()]


class FusedSchedule:
    """A scheduler a model; see `schedule`."""

    def __init__(self, fused_optimizer: FusedOptimizer, schedulers: list[Any]) -> None:
        self.optimizer, self.schedulers = fused_optimizer, schedulers

    def step(self, metrics: Sequence[float] | Tensor | None = None) -> None:
        """Go on to the next step's rates, of the models that run. metrics: a number a model, for `ReduceLROnPlateau`."""
        for model, (scheduler, runs) in enumerate(zip(self.schedulers, self.optimizer.running)):
            if runs:
                scheduler.step() if metrics is None else scheduler.step(float(metrics[model]))

    def keep(self, models: Sequence[int], fused_optimizer: FusedOptimizer) -> FusedSchedule:
        """Return the schedule of the models that are kept; see `FusedOptimizer.keep`."""
        return FusedSchedule(fused_optimizer, [self.schedulers[model] for model in models])

    def state_dict(self) -> dict[str, Any]:
        """Return where each scheduler stands."""
        return {"schedulers": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        for each, own in zip(self.schedulers, state["schedulers"], strict=True):
            each.load_state_dict(own)


def schedule(kind: Callable[..., Any], fused_optimizer: FusedOptimizer, **settings: Any) -> FusedSchedule:
    """Return a scheduler a model: `kind` of torch's or of `trainwright.schedules`; a list gives each its own setting.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> from trainwright.fusion import fuse
    >>> both = optimizer("sgd", fuse([nn.Linear(2, 1), nn.Linear(2, 1)]), lr=1.0)
    >>> rates = schedule(StepLR, both, step_size=[1, 2], gamma=0.5)
    >>> rates.step(), both.lrs
    (None, [0.5, 1.0])
    """
    num = len(fused_optimizer.optimizers)
    own = [{key: per_model(value, num, key)[model] for key, value in settings.items()} for model in range(num)]
    try:
        return FusedSchedule(
            fused_optimizer, [kind(each, **given) for each, given in zip(fused_optimizer.optimizers, own)]
        )
    except TypeError as error:
        raise UserError(f"{kind.__name__} does not accept these settings: {error}; change them") from error
