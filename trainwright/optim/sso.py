r"""SSO: many parameter updates from one gradient with respect to the model's targets (outputs).

z_t = z(θ_t), d_t = ∇_z ℓ(z_t)                                          once a step, `SSO._surrogate`
q(θ) = ℓ(z_t) + ⟨d_t, z(θ) - z_t⟩ + D(z(θ), z_t)/η                       `Surrogate`, D: `target_proximal`
θ_{t+1} ≈ argmin q, by gradient steps from θ_t                           `SSO._descend`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..artifacts import UserError
from ..numerics.hvp import gradients, real_view
from ..numerics.linesearch import armijo
from ..numerics.shards import sum_over_shards
from .base import Method, check_common, check_range, plain
from .record import STEP, ExtraPass, OptimizerRecord, Options, Shape, StateTensor
from .target_proximal import PROXIMALS, Proximal, target_proximal

Closure = Callable[[], Any]
Loss = Callable[[Tensor], Any]
_FLAT = 1e-6
_EXPAND, _BACKTRACK = 1.8, 0.9
_FORM_STATES = (
    StateTensor(
        "squares", lambda shape, options: () if options.get("proximal") == "adagrad" else None, torch.float64, once=True
    ),
    StateTensor("table", lambda shape, options: options.get("table"), torch.float64, once=True),
    StateTensor(
        "target_lr", lambda shape, options: () if options.get("target_search") else None, torch.float64, once=True
    ),
)
_MIN_STEP = 1e-6
_MAX_TRIALS = 100
_PIECE = 2**14


class Surrogate:
    """q at the parameters' present values, for one z_t and d_t; it never asks for ℓ or its gradient again."""

    def __init__(self, targets: Callable[[], Tensor], params: list[Tensor], first: Tensor, value: float,
                 slope: Tensor, lr: float, proximal: Proximal | None = None) -> None:  # fmt: skip
        """proximal: D(z, z_t) of the targets and those at the start; `None` is ½‖z − z_t‖²."""
        self._targets, self._params, self._lr, self._proximal = targets, params, lr, proximal
        self._anchor, self._value, self._slope = first.detach(), value, slope
        self._fresh: Tensor | None = first

    @property
    def minimiser(self) -> Tensor:
        """The targets z_t - η d_t at which q of D = ½‖z − z_t‖², taken over all z, is least."""
        return self._anchor - self._lr * self._slope

    @torch.no_grad()
    def value(self) -> float:
        """Return q; one forward of the model, without a graph."""
        return self._value_at(self._targets())

    def gradients(self) -> tuple[float, list[Tensor | None]]:
        """Return q and ∇q; one forward and backward of the model, the first time none but the backward."""
        if self._fresh is None:
            with torch.enable_grad():
                self._fresh = self._targets()
        targets, self._fresh = self._fresh, None
        value = self._value_at(targets.detach())  # before `outer` is there: both are as large as the targets
        outer = self._slope + self._proximal_slope(targets.detach()) / self._lr
        with torch.enable_grad():
            along = (outer * targets).sum()
        return value, gradients(along, self._params, create_graph=False)

    def _value_at(self, targets: Tensor) -> float:
        change = targets - self._anchor
        if self._proximal is None:
            bend = (self._slope * change).sum() + (change * change).sum() / (2 * self._lr)
        else:
            bend = (self._slope * change).sum() + self._proximal(targets, self._anchor) / self._lr
        return self._value + _number(bend)

    def _proximal_slope(self, targets: Tensor) -> Tensor:
        if self._proximal is None:
            return targets - self._anchor
        with torch.enable_grad():
            free = targets.detach().requires_grad_()
            return torch.autograd.grad(self._proximal(free, self._anchor), free)[0]


class SSO(Method):
    r"""Surrogate optimisation in target space, for losses whose gradient is dear: a simulator, an expert, an adversary.

    `step(closure, loss)`: the closure returns the targets z with their graph, on one fixed batch; `loss(z)` returns
    ℓ(z), or (ℓ(z), ∇ℓ(z)) where autograd cannot see through it, and is called once a step whatever num_inner_steps. Or
    `step(closure)` with a closure that returns (loss, targets). A third argument `inner(surrogate)` may minimise the
    surrogate in place by any other deterministic method.

    lr: η, the step in target space: up to 1/L, L the smoothness of ℓ in z (½-squared loss 1, logistic 1/4, softmax
    cross-entropy 1/2 with reduction="sum"; a mean over n makes it 1/n of that), q then bounds ℓ from above and a full
    batch descends; decay it with a scheduler for small batches. num_inner_steps: m. search: `"armijo"` finds each inner
    step (from growth times the last one, at first inner_step, shrunk by `shrink` until `sufficient` decrease; growth is
    the code's expand^(1/batches an epoch)), `"fixed"` takes inner_step as it is. reset: start every search anew from
    inner_step (the code's reset_lr_on_step, with 10).

    proximal: D, what keeps the targets near, in place of ½‖z − z_t‖²:
        "newton"    ½ ⟨z − z_t, ∇²ℓ(z_t) (z − z_t)⟩, by products with the loss's own Hessian; ℓ must be convex
        "adagrad"   ½ √(Σ ‖d‖²) ‖z − z_t‖², summed over the steps so far: a rate that falls by itself
        "diagonal"  ½ ⟨z − z_t, √(Σ d²) ⊙ (z − z_t)⟩, with a sum for each example and output: `table` is their shape, and
                    step(…, rows=…) says which examples the batch has
        "kl"        Σ KL(softmax(z_t) ‖ softmax(z)) over the last dimension, for logits: lr up to 1 for cross-entropy
    target_search: find η each step: from 1.8 times the last one (at first lr) shrunk by 0.9 until
        ℓ(z_t − η d_t) ≤ ℓ(z_t) − `sufficient` · η ‖d_t‖². Costs values of ℓ, no gradients; needs `loss`.

    Costs m forwards and backwards of the model a step, with "armijo" some forwards more; no state but a number. With
    m = 1 and "fixed" it is plain gradient descent at inner_step. Dropout and BatchNorm must be frozen, or z(θ_t) ≠ z_t.
    Raises `UserError` for settings out of range, several groups, missing closure or loss, and a NaN loss. Not where
    the loss is as cheap as the model, which then does m times the work for one sample of data.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> inputs, wanted = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 5.0])
    >>> optimizer = SSO([weight], lr=1.0, num_inner_steps=100)
    >>> loss = optimizer.step(lambda: inputs @ weight, lambda z: 0.5 * ((z - wanted) ** 2).sum())
    >>> [round(value, 2) for value in weight.tolist()]
    [1.0, 2.0]

    Source: Lavington, Vaswani, Babanezhad, Schmidt & Le Roux 2023, Target-based Surrogates for Stochastic Optimization,
    and the authors' code. Departs: the code's surrogate lacks the ½ and is multiplied by its η: its η is twice this lr.
    """

    forms = ("loop",)

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1.0, num_inner_steps: int = 5, search: str = "armijo",
        inner_step: float = 10.0, sufficient: float = 0.1, shrink: float = 0.9, growth: float = 2.0,
        reset: bool = False, proximal: str = "euclidean", table: tuple[int, ...] | None = None, target_search: bool = False,
        **how: Any,
    ) -> None:  # fmt: skip
        form = {"proximal": proximal, "table": table, "target_search": target_search}
        own = {**form, "num_inner_steps": num_inner_steps, "search": search, "inner_step": inner_step, "reset": reset}
        defaults = {"lr": lr, **own, "sufficient": sufficient, "shrink": shrink, "growth": growth}
        super().__init__(params, defaults, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("SSO", settings["lr"])
        check_range(
            "SSO",
            num_inner_steps=(settings["num_inner_steps"], "of at least 1", lambda value: value >= 1),
            search=(settings["search"], "'armijo' or 'fixed'", lambda value: value in ("armijo", "fixed")),
            inner_step=(settings["inner_step"], "above 0", lambda value: value > 0.0),
            sufficient=(settings["sufficient"], "in (0, 1)", lambda value: 0.0 < value < 1.0),
            proximal=(settings["proximal"], "among " + ", ".join(PROXIMALS), lambda value: value in PROXIMALS),
            shrink=(settings["shrink"], "in (0, 1)", lambda value: 0.0 < value < 1.0),
            growth=(settings["growth"], "of at least 1", lambda value: value >= 1.0),
            fused=(settings["fused"], "False, for its step runs the model", lambda value: not value),
            capturable=(settings["capturable"], "False, for its step reads numbers back", lambda value: not value),
        )
        if (settings["proximal"] == "diagonal") != (settings["table"] is not None):
            raise UserError(
                "proximal='diagonal' needs the shape of its sums, and no other does; "
                f"got proximal={settings['proximal']!r} and table={settings['table']}; give table=(num_examples, num_outputs)"
            )
        if self.param_groups:
            raise UserError("SSO needs one group, for all parameters share the targets; got several; give one")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, loss: Loss | None = None, inner: Callable[[Surrogate], Any] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Minimise one surrogate; returns ℓ(z_t), the loss before. rows: the examples of the batch, of `diagonal`."""
        group = self.param_groups[0]
        if closure is None and not float(
            group["lr"]
        ):  # so torch.distributed.checkpoint makes the state that it loads into
            self._count(group, 0)
            return None
        if closure is None:
            raise UserError(
                "SSO needs a closure and a loss of its targets; got none; give step(closure, loss), the closure "
                "returning the model's outputs with their graph"
            )
        value, surrogate = self._surrogate(closure, loss, rows, group)
        if not float(group["lr"]):
            return value
        if inner is not None:
            with torch.enable_grad():
                inner(surrogate)
        else:
            self._descend(surrogate, self.state[group["params"][0]]["inner_step"], group)
        return value

    def _surrogate(
        self, closure: Closure, loss: Loss | None, rows: Tensor | None, group: dict[str, Any]
    ) -> tuple[Tensor, Surrogate]:
        """Ask for the loss's gradient, once, and count the step."""
        with torch.enable_grad():
            result = closure()
        value, targets, slope = _first(result, loss)
        sign = -1.0 if group["maximize"] else 1.0
        if not math.isfinite(_number(value)):
            raise UserError(f"SSO needs a finite loss; got {_number(value)}; change the batch, nothing was done")

        def again() -> Tensor:
            repeated = closure()
            return repeated[1] if isinstance(repeated, tuple) else repeated

        def whole_loss(z: Tensor) -> Tensor:
            if loss is None:
                raise UserError(
                    f"target_search={group['target_search']} with proximal={group['proximal']!r} needs the loss of the "
                    "targets; the closure returned (loss, targets); give step(closure, loss)"
                )
            answer = loss(z)
            return sign * torch.as_tensor(answer[0] if isinstance(answer, tuple) else answer)

        slope = sign * slope.detach()
        proximal, remember = target_proximal(group, self.state[group["params"][0]], slope, whole_loss, targets, rows)
        lr = float(group["lr"])
        if group["target_search"]:
            lr = self._target_lr(group, lambda eta: _number(whole_loss(targets.detach() - eta * slope)), value, slope)
        self._count(group, 1)
        remember(self.state[group["params"][0]])
        if group["target_search"]:
            self.state[group["params"][0]]["target_lr"].fill_(lr)
        surrogate = Surrogate(again, group["params"], targets, sign * _number(value), slope, lr, proximal)
        # A copy, for torch's mean of squares leaves its number in the storage of all the squares.
        return value.detach().clone(), surrogate

    def _target_lr(
        self, group: dict[str, Any], value_at: Callable[[float], float], value: Tensor, slope: Tensor
    ) -> float:
        """Return the η of this step: the first of a falling sequence under which ℓ itself falls enough along -d."""
        last = self.state[group["params"][0]].get("target_lr")
        first = float(group["lr"]) if last is None or not float(last) else _EXPAND * float(last)
        square = _number((slope * slope).sum())
        if not square > _FLAT**2:
            return first
        start = -_number(value) if group["maximize"] else _number(value)
        how = {"sufficient": group["sufficient"], "shrink": _BACKTRACK}
        return armijo(value_at, start, -square, step=first, max_trials=_MAX_TRIALS, min_step=_MIN_STEP, **how).step

    def _descend(self, surrogate: Surrogate, last: Tensor, group: dict[str, Any]) -> None:
        for count in range(int(group["num_inner_steps"])):
            value, grads = surrogate.gradients()
            used = [(p, g) for p, g in zip(group["params"], grads, strict=True) if g is not None]
            if not used:
                return
            if group["search"] == "fixed":
                _move(used, float(group["inner_step"]))
                continue
            first = group["inner_step"] if not count and group["reset"] else group["growth"] * float(last)
            if not self._search(surrogate, value, used, float(first), last, group):
                return
            del grads, used  # before the next ones are made

    def _search(
        self, surrogate: Surrogate, value: float, used: list[tuple[Tensor, Tensor]], step: float, last: Tensor,
        group: dict[str, Any],
    ) -> bool:  # fmt: skip
        """Take one inner step that decreases q enough; leave the parameters and return false where none does."""
        parts = [(_square(plain(grad)), param) for param, grad in used]
        square = float(sum_over_shards(parts))
        if not square > _FLAT**2:
            return False
        before = [param.detach().clone() for param, _ in used]

        def restored() -> None:
            for (param, _), old in zip(used, before, strict=True):
                param.copy_(old)

        def value_at(length: float) -> float:
            restored()
            _move(used, length)
            return surrogate.value()

        how = {"sufficient": group["sufficient"], "shrink": group["shrink"]}
        found = armijo(value_at, value, -square, step=step, max_trials=_MAX_TRIALS, min_step=_MIN_STEP, **how)
        if not found.accepted:
            restored()
            return False
        last.fill_(found.step)
        return True

    def _count(self, group: dict[str, Any], num_steps: int) -> None:
        """Count in every parameter's state, for torch.distributed.checkpoint wants one of each."""
        for param in group["params"]:
            self._state_of(param, group)["step"] += num_steps

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if param is not group["params"][0]:
            return {}
        first = float(group["inner_step"]) / float(group["growth"])  # so that the first search starts at inner_step
        kept = {"inner_step": torch.tensor(first, dtype=torch.float64)}
        for state in _FORM_STATES:
            if (shape := state.shape((), group)) is not None:
                device = param.device if shape else "cpu"
                kept[state.name] = torch.zeros(shape, dtype=torch.float64, device=device)
        return kept

    def _state_keys(self) -> tuple[str, ...]:
        return ("inner_step", *(state.name for state in _FORM_STATES))


def _first(result: Any, loss: Loss | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ℓ(z_t), z_t with its graph, and d_t."""
    if isinstance(result, tuple):
        value, targets = result
        _check_targets(targets)
        return value, targets, torch.autograd.grad(value, targets, retain_graph=True)[0]
    _check_targets(result)
    if loss is None:
        raise UserError(
            "SSO needs the loss of the targets; the closure returned targets alone; give step(closure, loss), or a "
            "closure that returns (loss, targets)"
        )
    with torch.enable_grad():
        free = result.detach().requires_grad_()
        answer = loss(free)
        if isinstance(answer, tuple):
            return torch.as_tensor(answer[0]), result, answer[1]
        return answer, result, torch.autograd.grad(answer, free)[0]


def _check_targets(targets: Any) -> None:
    if not isinstance(targets, Tensor) or not targets.requires_grad:
        found = "a tensor without a graph" if isinstance(targets, Tensor) else type(targets).__name__
        raise UserError(
            f"SSO needs a closure that returns the model's targets with their graph; got {found}; return the outputs "
            "undetached, computed with gradients enabled"
        )


def _square(grad: Tensor) -> Tensor:
    """Return ‖grad‖² in float64, by pieces: each is copied to float64 while it is summed up."""
    pieces = real_view(grad).reshape(-1).split(_PIECE)
    return torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]).square().sum()


def _number(value: Any) -> float:
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _move(used: list[tuple[Tensor, Tensor]], length: float) -> None:
    for param, grad in used:
        param.add_(grad, alpha=-length)


def _temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """A piece of the surrogate's gradient in float64; beside it, of all parameters, where the search started."""
    return 8 * min(math.prod(shape), _PIECE)


RECORD = OptimizerRecord(
    name="sso",
    cls=SSO,
    summary="Several updates from one gradient of the loss in its targets, through a quadratic surrogate",
    states=(STEP, StateTensor("inner_step", lambda shape, options: (), dtype=torch.float64, once=True), *_FORM_STATES),
    temporaries=_temporaries,
    model_copies=1,
    output_copies=5,  # z_t, d_t, the targets now, what q is taken along, and its product with these
    reads="model",
    extra_passes=(ExtraPass("gradient", count=4), ExtraPass("forward", count=10)),
    paper="Lavington, Vaswani, Babanezhad, Schmidt & Le Roux 2023, Target-based Surrogates",
    departs="lr is half of the authors' η; the passes named are those of num_inner_steps=5 with about two trials each",
)
