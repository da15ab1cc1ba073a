"""`sinkhorn` with the arguments and results of POT's function of that name."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch import Tensor

from ...artifacts import UserError
from .result import TransportResult
from .sinkhorn import solve_sinkhorn
from .sns import SnsOptions, solve_sns


def sinkhorn(
    a: Any, b: Any, M: Any, reg: float, method: Literal["sns", "sinkhorn_log"] = "sns", numItermax: int = 1000,
    stopThr: float = 1e-9, verbose: bool = False, log: bool = False, warn: bool = True,
    options: SnsOptions | None = None,
) -> Any:  # fmt: skip
    """Return the plan (n, m) of min ⟨P, M⟩ + reg Σ P log P with marginals a and b, as POT's `ot.sinkhorn` does.

    `method="sns"`: Sinkhorn-Newton-Sparse; `"sinkhorn_log"`: Sinkhorn in the log domain. NumPy in, NumPy out; tensors in,
    tensors out on their device; of M's floating dtype, computed in float64, without a graph for autograd. With `log=True` a
    pair (plan, log): `log["log_u"]`, `log["log_v"]` logarithms of the scalings, `"u"`, `"v"` the scalings (they overflow
    for small reg), `"alpha"`, `"beta"` the potentials in the cost's units, `"err"` the error at each iteration, `"niter"`,
    and `"result"` the full `TransportResult`.

    Departures from POT: `stopThr` holds for the L1 error of both marginals at every iteration (POT: the L2 error of
    one, every ten); the marginals must sum to one (within 1e-6; they are
    divided by their sums), for POT takes any two of equal sums. Not reached within `numItermax`: a warning.

    >>> import numpy as np
    >>> cost = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> sinkhorn([0.5, 0.5], [0.3, 0.7], cost, 0.05).round(3)
    array([[0.3, 0.2], [0. , 0.5]])
    """
    if method == "sns":
        result = solve_sns(
            a, b, M, reg, atol=stopThr, max_iterations=numItermax, options=options, keep_history=log or verbose
        )
    elif method == "sinkhorn_log":
        result = solve_sinkhorn(a, b, M, reg, atol=stopThr, max_iterations=numItermax, keep_history=log or verbose)
    else:
        raise UserError(f"method 'sns' or 'sinkhorn_log' is needed; got {method!r}; for others use POT")
    if warn and not result.success:
        warnings.warn(f"{result.message}; marginal error {result.marginal_error:.3g}", stacklevel=2)
    if verbose:
        _print_errors(result)
    dtype = result.problem.cost.dtype

    def convert(tensor: Tensor) -> Any:
        return tensor.to(dtype) if isinstance(M, Tensor) else tensor.to(dtype).cpu().numpy()

    plan = convert(result.plan())
    return (plan, _log(result, convert)) if log else plan


def _log(result: TransportResult, convert: Any) -> dict[str, Any]:
    f, g = result.x
    reg = result.problem.reg
    values = {"log_u": f / reg, "log_v": g / reg, "u": (f / reg).exp(), "v": (g / reg).exp(), "alpha": f, "beta": g}
    return {
        **{name: convert(value) for name, value in values.items()},
        "err": result.history["residual"],
        "niter": result.nit,
        "warning": None if result.success else result.message,
        "result": result,
    }


def _print_errors(result: TransportResult) -> None:
    for iteration, error in zip(result.history["nit"], result.history["residual"]):
        print(f"{int(iteration):5d}|{error:8e}|")
