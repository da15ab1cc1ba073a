"""FRUGAL: Adam on a part of each matrix that changes now and then, the gradient's sign on the rest.

which part            `Subspace` of each matrix, or whole matrices (`block`)      `FRUGAL._choose`
in it                 AdamW or momentum with their own step count                 `_direction`
outside               sign, gradient or nothing                                   `_outside_`
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..artifacts import UserError
from ..numerics.seeds import seeded
from .base import Method, check_common, check_range, plain, working_dtype
from .fused_8bit import check_on_cpu
from .fused_subspace import step_in_subspace
from .heads import EMBEDDINGS, HEADS, embeddings_and_heads
from .projection import Subspace

Order = Literal["random", "ascending", "descending", "mirror"]


class FRUGAL(Method):
    r"""Keep Adam's state for a share of each matrix only, and step by the sign of the gradient everywhere else.

    Every `update_gap` steps a part is chosen anew and its moments start from zero. Each step, with g↓ the gradient's part
    and r the rest of it:

        θ ← θ (1 − lr·λ) − s·lr · up(Adam(g↓)) − s·i·lr · sign(r)

    where Adam(g↓) is m̂ / (√v̂ + ε) with both bias corrections counted from the choice, s = `projected_scale` and
    i = `inactive_scale`. It takes 8·density bytes a parameter where Adam takes 8, at a little of its quality; where the
    memory is there, Adam is better. Meant for the weights of linear layers: see `FRUGAL.groups`.

    projection: `columns` (default), `rows` or single `entries` at random; `svd`, `random` (orthonormal) or `randperm`
        (coordinates) directions of the short side; or `block`: whole tensors of the group, round(density · count) of
        them at a time. Tensors of more dimensions are taken as [first, all others].
    density: the share with state. update_gap: T, steps between choices; 200 for pre-training, 500 for fine-tuning.
    inactive: what the rest gets: `sign`, `sgd` (the gradient itself) or `none` (GaLore).
    inactive_scale: 1.0 for pre-training, 0.1 for fine-tuning. projected_scale: of the whole step of such tensors.
    active: `adam`, or `sgdm`: m ← β₁m + (1 − β₁)g↓; with inactive="sgd" that is the variant with a convergence proof.
    projected: `True` or `False` for the tensors of a group; `None`: those of at least two dimensions. All others get
        AdamW in full, with the unscaled learning rate.
    block_order: of `block`: `random`, `ascending`, `descending`, or `mirror` (from both ends to the middle).
    tolerance: of `svd` and `random`, the share of the largest gradient below which the rest counts as rounding.
    reset_moments: whether the moments and their count start anew with each choice. `False` leaves them as they are, and the
        new part goes on with them; of `block`, those of tensors that stay in.
    seed: of all choices, which depend on it, the parameter's place in its group and its step alone.

    The choice is made by each tensor's own step. Shards (`DTensor`) keep their rows where columns are projected;
    otherwise the gradient is gathered, and the state is whole on every rank. `foreach` changes nothing: tensors go one by
    one. A NaN gradient makes its element NaN for good within the part, and moves nothing outside it,
    where its sign counts as 0. `fused` is one pass over memory in C++, on CPUs and for coordinates: not for `svd` and
    `random`, whose step is two matrix products. Raises `UserError` for settings out of range, and for `capturable`, which
    it lacks.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
    >>> weight.grad = torch.full((2, 4), -2.0)
    >>> optimizer = FRUGAL([weight], lr=0.1, density=0.5, inactive_scale=0.5)
    >>> optimizer.step()
    >>> weight.detach()[0].sort().values
    tensor([0.0500, 0.0500, 0.1000, 0.1000])
    >>> optimizer.state[weight]["exp_avg"].shape
    torch.Size([2, 2])

    Source: Zmushko, Beznosikov, Takáč, Horváth, *FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for
    Scalable Training*, 2024. It departs in its default projection (theirs is `block`; of columns the bytes of each tensor
    are known beforehand), in counting steps by tensor, and in the tolerance.
    """

    forms = ("fused", "loop")
    calls = 20.0
    fused_flops = 55.0
    _fused_in_torch = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        projection: str = "columns",
        density: float = 0.25,
        update_gap: int = 200,
        inactive: Literal["sign", "sgd", "none"] = "sign",
        inactive_scale: float = 1.0,
        projected_scale: float = 1.0,
        active: Literal["adam", "sgdm"] = "adam",
        projected: bool | None = None,
        block_order: Order = "random",
        tolerance: float = 1e-5,
        reset_moments: bool = True,
        seed: int = 0,
        **how: Any,
    ) -> None:
        own = {
            "projection": projection, "density": density, "update_gap": update_gap, "inactive": inactive,
            "inactive_scale": inactive_scale, "projected_scale": projected_scale, "active": active,
            "projected": projected, "block_order": block_order, "tolerance": tolerance,
            "reset_moments": reset_moments, "seed": seed,
        }  # fmt: skip
        common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**common, **own}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("FRUGAL", *(settings[name] for name in ("lr", "betas", "eps", "weight_decay")))
        _check(settings)

    def _prepare(self) -> None:
        check_on_cpu(self)

    @staticmethod
    def groups(model: nn.Module, full: Iterable[str] = HEADS) -> list[dict[str, Any]]:
        """Return two groups of a model's parameters: the weights of its linear layers to project, and all others.

        A linear layer is any whose `weight` is a matrix and that is no embedding (transformers' `Conv1D`, say) and no output
        head. full: last names of layers that are heads, see `heads.embeddings_and_heads`. Plans and runs take these groups by
        themselves.
        """
        apart = embeddings_and_heads(model, full)
        linear = {id(module.weight) for module in model.modules() if _is_linear(module)} - apart
        params = [param for param in model.parameters() if param.requires_grad]
        inside = [param for param in params if id(param) in linear]
        outside = [param for param in params if id(param) not in linear]
        groups = [{"params": inside, "projected": True}, {"params": outside, "projected": False}]
        return [group for group in groups if group["params"]]

    def _state_keys(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "projector")

    def _check_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        super()._check_state(param, group, saved)
        part = _subspace(param, group) if "projector" in saved else None
        if part is not None and not part.is_projector(saved["projector"]):
            raise UserError(
                f"{type(self).__name__} needs a projector of a matrix {list(part.shape)}; got one of shape "
                f"{list(saved['projector'].shape)} for another; load a state saved for parameters of the same shapes"
            )

    def _needed(self, param: Tensor, group: dict[str, Any]) -> Iterable[str]:
        return () if _is_projected(param, group) else _moments("adam")

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if _is_projected(param, group):
            return {}
        return {name: torch.zeros_like(param, dtype=working_dtype(param.dtype)) for name in _moments("adam")}

    def _step_group(self, group: dict[str, Any]) -> None:
        for index, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            step = int(self._advance(param, group))
            if _is_projected(param, group):
                self._update_projected(param, index, step, group)
            elif not (group["fused"] and self._in_one_pass(param, param.grad, None, step, group, "adam")):
                grad = _turned(param.grad, param, group)
                change = _direction(_real(grad), _reals(self.state[param]), step, group, "adam").mul_(-group["lr"])
                _move(param, change, group)

    def _in_one_pass(
        self, param: Tensor, grad: Tensor, part: Subspace | None, since: int, group: dict[str, Any], active: str
    ) -> bool:
        """Take the fused step; false where the memory does not lie as that needs."""
        projected, scales = _is_projected(param, group), (1.0, 0.0)
        if projected:
            scales = (group["projected_scale"], group["projected_scale"] * group["inactive_scale"])
        return step_in_subspace(param, grad, part, self.state[param], since, group, scales, active)

    def _update_projected(self, param: Tensor, index: int, step: int, group: dict[str, Any]) -> None:
        assert param.grad is not None
        state, turn = self.state[param], (step - 1) // group["update_gap"]
        part = _subspace(param, group)
        raw = _gathered(param.grad, rows_stay=group["projection"] == "columns")
        if (step - 1) % group["update_gap"] == 0:
            self._choose(param, raw, part, (index, turn), group)
        since = self._count_since(index, step, group)
        if group["fused"] and self._in_one_pass(param, raw, part, since, group, group["active"]):
            return
        placed = _turned(raw, param, group)
        matrix = _matrix(plain(placed))
        lr = group["lr"] * group["projected_scale"]
        if "exp_avg" not in state:
            change = _outside_(matrix.clone(), group["inactive"]).mul_(-lr * group["inactive_scale"])
        elif part is None:
            change = _direction(matrix, _moments_of(state), since, group, group["active"]).mul_(-lr)
        else:
            projector = state["projector"]
            low = part.down(matrix, projector)
            direction = _direction(low, _moments_of(state), since, group, group["active"])
            rest = _outside_(part.rest(matrix, low, projector, group["tolerance"]), group["inactive"])
            del low
            change = part.add_up(rest.mul_(-lr * group["inactive_scale"]), direction.mul_(-lr), projector)
            del direction
        _move(param, _placed_like(change, placed, param), group)

    def _count_since(self, index: int, step: int, group: dict[str, Any]) -> int:
        """Return how many gradients the moments have taken with this step's."""
        if group["reset_moments"]:
            return (step - 1) % group["update_gap"] + 1
        if group["projection"] != "block":
            return step
        turn = (step - 1) // group["update_gap"]
        first = turn
        while first and index in _active_tensors(group, first - 1):
            first -= 1
        return step - first * group["update_gap"]

    def _choose(
        self, param: Tensor, grad: Tensor, part: Subspace | None, place: tuple[int, int], group: dict[str, Any]
    ) -> None:
        """Choose the part of `param` with state from now on, and start its moments at zero."""
        state, local = self.state[param], _matrix(plain(grad))
        if part is None:
            if place[0] in _active_tensors(group, place[1]):
                _restart(state, local.shape, grad, group)
            else:
                _forget(state)
        elif part.kept:
            directions = _turned(local, param, group) if part.dense else local
            projector = part.choose(directions, seeded(group["seed"], *place))
            state["projector"] = state["projector"].copy_(projector) if "projector" in state else projector
            shape = (local.shape[0], part.kept) if part.side == 1 else part.low_shape
            _restart(state, shape, grad, group)


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 2 and not isinstance(module, EMBEDDINGS)


def _restart(state: dict[str, Any], shape: tuple[int, ...], grad: Tensor, group: dict[str, Any]) -> None:
    """Make the moments, of zeros; those that are there already become zero, in place, if they are to."""
    for name in _moments(group["active"]):
        if name not in state:
            state[name] = _zeros(shape, grad)
        elif group["reset_moments"]:
            state[name].zero_()


def _turned(grad: Tensor, param: Tensor, group: dict[str, Any]) -> Tensor:
    grad = grad.to(working_dtype(param.dtype))
    return -grad if group["maximize"] else grad


def _forget(state: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        state.pop(name, None)


def _is_projected(param: Tensor, group: dict[str, Any]) -> bool:
    chosen = group["projected"]
    if param.ndim < 1 or param.is_complex():
        return False
    return param.ndim >= 2 if chosen is None else chosen


def _subspace(param: Tensor, group: dict[str, Any]) -> Subspace | None:
    """The part of a whole tensor; `None` where tensors are chosen whole."""
    if group["projection"] == "block":
        return None
    num_rows = param.shape[0] if param.ndim else 1
    return Subspace.of(group["projection"], (num_rows, param[:1].numel() if num_rows else 0), group["density"])


def _active_tensors(group: dict[str, Any], turn: int) -> set[int]:
    """The places in the group of the tensors that have state in this turn of `update_gap` steps."""
    places = [index for index, param in enumerate(group["params"]) if _is_projected(param, group)]
    num_active = round(group["density"] * len(places))
    if group["block_order"] == "random":
        return set(random.Random(seeded(group["seed"], -1, turn).initial_seed()).sample(places, num_active))
    ordered = places[::-1] if group["block_order"] == "descending" else places
    if group["block_order"] == "mirror":
        ordered = [places[index // 2 if index % 2 == 0 else -1 - index // 2] for index in range(len(places))]
    return {ordered[(turn * num_active + offset) % len(ordered)] for offset in range(num_active)}


def _direction(grad: Tensor, state: dict[str, Tensor], step: int, group: dict[str, Any], active: str) -> Tensor:
    """Update the moments in place and return the direction to subtract."""
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    if active == "sgdm":
        return state["exp_avg"].clone()
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    roots = state["exp_avg_sq"].sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    return torch.div(state["exp_avg"], roots, out=roots).div_(1 - beta1**step)


def _outside_(rest: Tensor, rule: str) -> Tensor:
    if rule == "none":
        return rest.zero_()
    return rest.sign_() if rule == "sign" else rest


def _move(param: Tensor, change: Tensor, group: dict[str, Any]) -> None:
    """θ ← θ (1 − lr·λ) + change, in the dtype of the change."""
    own = _real(plain(param))
    working = own.to(change.dtype)
    if group["weight_decay"]:
        working.mul_(1 - group["lr"] * group["weight_decay"])
    working.add_(change.view(working.shape))
    if working is not own:
        own.copy_(working)


def _moments(active: str) -> tuple[str, ...]:
    return ("exp_avg",) if active == "sgdm" else ("exp_avg", "exp_avg_sq")


def _moments_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: plain(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state}


def _reals(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: _real(value) for name, value in _moments_of(state).items()}


def _real(tensor: Tensor) -> Tensor:
    own = plain(tensor)
    return torch.view_as_real(own) if own.is_complex() else own


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.numel() else tensor.reshape(tensor.shape[0], 0)


def _gathered(grad: Tensor, rows_stay: bool) -> Tensor:
    """The gradient with whole rows on each rank, or whole altogether."""
    if not isinstance(grad, DTensor):
        return grad
    kept = [
        placement if rows_stay and isinstance(placement, Shard) and placement.dim == 0 else Replicate()
        for placement in grad.placements
    ]
    return grad.redistribute(placements=kept)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Moments [local rows, …], as a `DTensor` sharded like the gradient's rows where that is one."""
    local = torch.zeros(shape, dtype=working_dtype(like.dtype), device=like.device)
    if not isinstance(like, DTensor):
        return local
    whole = (like.shape[0], *shape[1:]) if any(isinstance(each, Shard) for each in like.placements) else tuple(shape)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(whole), stride=stride
    )


def _placed_like(change: Tensor, grad: Tensor, param: Tensor) -> Tensor:
    """The rank's own part of a change that was computed where `grad` is placed."""
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return change
    whole = DTensor.from_local(
        change.reshape(grad.to_local().shape), grad.device_mesh, grad.placements, run_check=False,
        shape=param.shape, stride=torch.empty(param.shape, device="meta").stride(),
    )  # fmt: skip
    return whole.redistribute(placements=param.placements).to_local()


def _check(own: dict[str, Any]) -> None:
    check_range(
        "FRUGAL",
        density=(own["density"], "in [0, 1]", lambda value: 0 <= value <= 1),
        update_gap=(own["update_gap"], "of at least 1", lambda value: value >= 1),
        inactive=(own["inactive"], "sign, sgd or none", lambda value: value in ("sign", "sgd", "none")),
        inactive_scale=(own["inactive_scale"], "of at least 0", lambda value: value >= 0),
        projected_scale=(own["projected_scale"], "of at least 0", lambda value: value >= 0),
        active=(own["active"], "adam or sgdm", lambda value: value in ("adam", "sgdm")),
        block_order=(
            own["block_order"],
            "random, ascending, descending or mirror",
            lambda value: value in ("random", "ascending", "descending", "mirror"),
        ),
        tolerance=(own["tolerance"], "of at least 0", lambda value: value >= 0),
    )
    if own["projection"] != "block":
        Subspace.of(own["projection"], (1, 1), own["density"])
    if own["capturable"]:
        raise UserError("FRUGAL needs capturable=False: each tensor has its own part and step; got True; leave it out")
    if own["fused"] and own["projection"] in ("svd", "random"):
        raise UserError(
            f"FRUGAL has one pass over memory for coordinates alone; got fused=True and projection={own['projection']!r}, "
            "whose step is two matrix products; leave one out"
        )
