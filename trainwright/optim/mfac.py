r"""M-FAC: descent along F⁻¹g, F = λI + (1/m) Σ g_i g_iᵀ over a sliding window of the last m gradients.

    G [m, d] the window, a row a step, S = GGᵀ        `MFAC._push`
    F⁻¹x = (x - Gᵀ(mλI + S)⁻¹Gx) / λ                  `MFAC.inverse_product`
    F⁻¹g = m Gᵀ(mλI + S)⁻¹e, g the row that e selects   `MFAC._prepare`, `MFAC._update`

The second line is the Woodbury identity; the third is what remains of it for a g that stands in the window, without
the cancellation of two near-equal vectors. The matrix is m×m, kept and solved in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, zeros

from ..artifacts import UserError
from ..numerics.hvp import placed_like, real_view
from ..numerics.shards import sum_over_shards
from .base import Lists, Method, check_common, check_range, plain, working_dtype
from .record import STEP, OptimizerRecord, Options, Shape, StateTensor

_PART_ELEMENTS = 1 << 16


class MFAC(Method):
    r"""Natural-gradient descent with the Fisher matrix of the last `num_gradients` minibatch gradients.

    g ← ∇L + weight_decay·θ (L2: enters the window too);  u ← momentum·u + (1 - momentum)·F⁻¹g;  θ ← θ - lr·u.
    All parameters of all groups form one vector; lr, momentum and weight_decay may differ by group.

    damping: λ, in the unit of squared gradients. divisor: `"window"` divides the sum of outer products by m from the
    first step on, as published, so that early directions are up to g/λ long: warm the learning rate up over m steps;
    `"filled"` divides by the gradients seen so far. State: 4·num_gradients bytes a parameter (1024: 4 KiB) and one
    8·num_gradients² matrix; a step reads the window twice and factors that matrix. Raises `UserError` for settings out
    of range and, with nothing changed, for gradients that are not finite. Not for models whose window does not fit:
    that is nearly always what limits it.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = MFAC([weight], lr=1.0, num_gradients=2, damping=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()  # g/λ · m/(m + gᵀg/λ) = g · 2/27
    >>> [round(value, 4) for value in weight.tolist()]
    [2.7778, 3.7037]

    Source: Frantar, Kurtic & Alistarh 2021, M-FAC: Efficient Matrix-Free Approximations of Second-Order Information,
    and the authors' code. Departs: the authors' LU recursion is replaced by the equivalent above; groups keep their
    learning rates; a parameter without a gradient counts as zeros in that row.
    """

    forms = ("loop",)
    _coefficients: Tensor | None = None
    """Of the window's rows in the direction, while a step lasts."""

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
        num_gradients: int = 1024, damping: float = 1e-5, divisor: str = "window", **how: Any,
    ) -> None:  # fmt: skip
        own = {"num_gradients": num_gradients, "damping": damping, "divisor": divisor}
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **own}
        super().__init__(params, defaults, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("MFAC", settings["lr"], weight_decay=settings["weight_decay"])
        check_range(
            "MFAC",
            momentum=(settings["momentum"], "in [0, 1)", lambda value: 0.0 <= value < 1.0),
            num_gradients=(settings["num_gradients"], "of at least 1", lambda value: value >= 1),
            damping=(settings["damping"], "above 0", lambda value: value > 0.0),
            divisor=(settings["divisor"], "'window' or 'filled'", lambda value: value in ("window", "filled")),
            fused=(settings["fused"], "False, for its step is two matrix products", lambda value: not value),
            capturable=(settings["capturable"], "False, for its step reads numbers back", lambda value: not value),
        )
        for name in ("num_gradients", "damping", "divisor"):
            if settings[name] != self.defaults[name]:
                raise UserError(
                    f"MFAC needs one {name} for all groups; got {self.defaults[name]} and {settings[name]}; set it for the "
                    "optimizer"
                )

    @torch.no_grad()
    def inverse_product(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return F⁻¹x for x given as a tensor a parameter, in the order of the groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        damping, known = self._damping, [self.state.get(param, {}).get("window") for param in params]
        pairs = [(plain(window), plain(x)) for window, x in zip(known, vectors, strict=True) if window is not None]
        if not pairs:
            return [vector / damping for vector in vectors]
        products = self._summed(
            [(param, window) for param, window in zip(params, known, strict=True) if window is not None],
            [real_view(x) for _, x in pairs],
        )
        weights = self._solve(products[:, None])[:, 0]
        combined = iter([_combination(weights, real_view(window)) for window, _ in pairs])
        results = []
        for window, vector in zip(known, vectors, strict=True):
            result = vector / damping
            if window is not None:
                real_view(plain(result)).sub_(next(combined), alpha=1 / damping)
            results.append(result)
        return results

    def _prepare(self) -> None:
        """Put the gradient in the window and find its coefficients; nothing is kept of a gradient with NaN."""
        rows = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows[param] = _row(param, group)
        if not rows:
            return
        if not math.isfinite(
            float(sum_over_shards([(row.abs().sum().double(), param) for param, row in rows.items()]))
        ):
            raise UserError(
                "MFAC needs finite gradients, for one would stay in its window; got NaN or infinity; skip such a step, "
                "or scale the loss (torch.amp.GradScaler)"
            )
        holder, index = self._push(rows)
        unit = torch.zeros(self.state[holder]["gram"].shape[0], 1, dtype=torch.float64, device=holder.device)
        unit[index] = self._divisor()
        self._coefficients = self._solve(unit)[:, 0]

    def _push(self, rows: dict[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Overwrite the oldest row of the window and its row and column of GGᵀ; return who holds GGᵀ, and which."""
        for group in self.param_groups:
            for param in group["params"]:
                if param in rows:
                    self._state_of(param, group)
        holder = self._holder()
        if holder is None:
            holder = self._make_holder(next(iter(rows)))
        gram, pushes = self.state[holder]["gram"], self.state[holder]["pushes"]
        index = int(pushes) % len(gram)
        known = [(param, state["window"]) for param, state in self.state.items() if "window" in state]
        for param, window in known:
            row = real_view(plain(window))[index]
            row.copy_(rows[param]) if param in rows else row.zero_()
        inner = self._summed(known, [real_view(plain(window))[index] for _, window in known])
        gram[index] = gram[:, index] = inner
        pushes += 1
        return holder, index

    def _summed(self, known: Sequence[tuple[Tensor, Tensor]], vectors: Sequence[Tensor]) -> Tensor:
        """Return G x in float64 [m] for x given by the local parts of each parameter."""
        pairs = zip(known, vectors, strict=True)
        return sum_over_shards(
            [(_products(real_view(plain(window)), vector), param) for (param, window), vector in pairs]
        )

    def _solve(self, right: Tensor) -> Tensor:
        """Return (mλI + S)⁻¹ right, [m, 1]; rows that are still empty have no part in it."""
        holder = self._holder()
        assert holder is not None
        gram = self.state[holder]["gram"]
        filled = min(int(self.state[holder]["pushes"]), len(gram))
        shifted = gram[:filled, :filled].clone()
        shifted.diagonal().add_(self._divisor() * self._damping)
        solution = torch.zeros_like(right)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if failed:  # S has no negative eigenvalue but by rounding, here of more than mλ
            values, vectors = torch.linalg.eigh(shifted)
            values.clamp_(min=self._divisor() * self._damping)
            solution[:filled] = vectors @ ((vectors.mT @ right[:filled]) / values[:, None])
        else:
            solution[:filled] = torch.cholesky_solve(right[:filled], factor)
        return solution

    @property
    def _damping(self) -> float:
        return float(self.param_groups[0]["damping"])

    def _divisor(self) -> int:
        size, holder = int(self.param_groups[0]["num_gradients"]), self._holder()
        if self.param_groups[0]["divisor"] == "window" or holder is None:
            return size
        return min(int(self.state[holder]["pushes"]), size)

    def _holder(self) -> Tensor | None:
        """The parameter in whose state GGᵀ stands: the first that had a gradient."""
        return next((param for param, state in self.state.items() if "gram" in state), None)

    def _make_holder(self, param: Tensor) -> Tensor:
        size = int(self.param_groups[0]["num_gradients"])
        self.state[param]["gram"] = torch.zeros(size, size, dtype=torch.float64, device=param.device)
        self.state[param]["pushes"] = torch.zeros((), dtype=torch.int64)
        return param

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = {"window": _window(param, int(group["num_gradients"]))}
        if group["momentum"]:
            state["velocity"] = torch.zeros_like(param, dtype=working_dtype(param.dtype))
        return state

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("window", "velocity") if group["momentum"] else ("window",)

    def _state_keys(self) -> tuple[str, ...]:
        return ("window", "velocity", "gram", "pushes")

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**super()._options(group), "coefficients": self._coefficients}

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        directions = [_combination(options["coefficients"], window) for window in states["window"]]
        if options["momentum"]:
            torch._foreach_lerp_(states["velocity"], directions, 1 - options["momentum"])
            directions = list(torch._foreach_mul(states["velocity"], -lr))
        else:
            torch._foreach_mul_(directions, -lr)
        torch._foreach_add_(params, directions)


def _products(window: Tensor, vector: Tensor) -> Tensor:
    """Return the products of a window's rows with a vector in float64, part by part: S has to be what fp32 would round."""
    rows, flat = window.reshape(len(window), -1), vector.reshape(-1)
    length = max(1, _PART_ELEMENTS // len(rows))
    total = torch.zeros(len(rows), dtype=torch.float64, device=window.device)
    for start in range(0, rows.shape[1], length):
        part = slice(start, start + length)
        total += rows[:, part].double() @ flat[part].double()
    return total


def _combination(coefficients: Tensor, window: Tensor) -> Tensor:
    """Return Σ_i c_i G_i in the parameter's shape."""
    weights = coefficients.to(window.device, window.dtype)
    return (weights @ window.reshape(len(window), -1)).view(window.shape[1:])


def _row(param: Tensor, group: dict[str, Any]) -> Tensor:
    """Return this rank's part of the gradient with its L2 term, real and of the working dtype."""
    assert param.grad is not None
    grad, weight = (real_view(plain(tensor)) for tensor in (placed_like(param.grad, param), param))
    row = grad.to(working_dtype(weight.dtype), copy=True)
    if group["maximize"]:
        row.neg_()
    return row.add_(weight, alpha=group["weight_decay"]) if group["weight_decay"] else row


def _window(param: Tensor, num_gradients: int) -> Tensor:
    shape, dtype = (num_gradients, *param.shape), working_dtype(param.dtype)
    if not isinstance(param, DTensor):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    placements = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in param.placements]
    return zeros(shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


def _temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """Beside the rows of all parameters, the largest of the m×m factorisation, a part of the window and the direction."""
    size, num_gradients = math.prod(shape) * max(element_bytes, 4), int(options["num_gradients"])
    part = 8 * min(_PART_ELEMENTS // num_gradients + 1, math.prod(shape)) * (num_gradients + 1)
    return max(3 * 8 * num_gradients**2, part, size) + 8 * 8 * num_gradients


RECORD = OptimizerRecord(
    name="mfac",
    cls=MFAC,
    summary="Natural gradient from the last m gradients by their m×m Gram matrix",
    states=(
        STEP,
        StateTensor("window", lambda shape, options: (options["num_gradients"], *shape), wide=True),
        StateTensor("velocity", lambda shape, options: shape if options.get("momentum") else None, wide=True),
        StateTensor("gram", lambda shape, options: (options["num_gradients"],) * 2, dtype=torch.float64, once=True),
        StateTensor("pushes", lambda shape, options: (), dtype=torch.int64, once=True),
    ),
    temporaries=_temporaries,
    model_copies=1,
    defaults={"num_gradients": 1024},
    reads="model",
    paper="Frantar, Kurtic & Alistarh 2021, M-FAC",
    departs="Woodbury with a Cholesky factor for the LU recursion",
)
