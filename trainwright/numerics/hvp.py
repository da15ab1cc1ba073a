r"""Second derivatives of a loss by `torch.autograd.grad` alone: nothing is written to `.grad`.

    ∇L with its graph                        `gradients`
    Hv = ∂/∂θ ⟨∇L, v⟩                        `hessian_vector`
    v ↦ Hv on flat vectors, for Lanczos, CG  `HessianOperator`
    H whole, for a few parameters            `hessian_matrix`
    probes u with E uuᵀ = I, hence E u⊙Hu = diag H (Hutchinson)   `rademacher`, `gaussian`

A complex parameter counts as its real and imaginary parts: ⟨a, b⟩ = Re Σ āb.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

_NO_SECOND = re.compile(r"derivative for '?([\w:]+)'? is not implemented")
_DELAYED_ERROR = "torch::autograd::Error"


def gradients(
    loss: Tensor, params: Sequence[Tensor], *, create_graph: bool = True, keep_graph: bool = False
) -> list[Tensor | None]:
    """Return ∂loss/∂p for each of `params`, with their graph; `None` for one that the loss does not use, or that is frozen.

    `keep_graph`: the loss will be differentiated again, as it also may with `create_graph`. Raises `ValueError` where
    `loss` is not one real number, has no graph, or its graph was already used up.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> gradients((weight**3).sum(), [weight])[0].tolist()
    [3.0, 12.0]
    """
    _check_loss(loss)
    try:
        found = _where_wanted(
            params,
            lambda wanted: torch.autograd.grad(
                loss, wanted, retain_graph=create_graph or keep_graph, create_graph=create_graph, allow_unused=True
            ),
        )
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise ValueError(
            "a loss with its graph is needed; got one whose graph was used up by backward(); "
            "return the loss from the closure without calling backward()"
        ) from error
    with torch.set_grad_enabled(create_graph):  # a redistribution belongs to the graph, also where the caller has none
        return [None if grad is None else placed_like(grad, param) for grad, param in zip(found, params, strict=True)]


def hessian_vector(
    grads: Sequence[Tensor], params: Sequence[Tensor], vectors: Sequence[Tensor], *, keep_graph: bool = False
) -> list[Tensor]:
    """Return Hv, shaped like `params`, from gradients with their graph (`gradients`); a cost of about two gradients.

    `keep_graph`: another product with the same `grads` follows. Raises `ValueError` where an op of the model has no
    second derivative, with its name and the way out. A ReLU network's curvature between its kinks is all that is seen.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> grads = gradients((weight**3).sum(), [weight])
    >>> hessian_vector(grads, [weight], [torch.ones(2)])[0].tolist()
    [6.0, 12.0]
    """
    curved = [(grad, vector) for grad, vector in zip(grads, vectors, strict=True) if grad.requires_grad]
    if not curved:
        return [torch.zeros_like(param) for param in params]
    outputs, weights = zip(*curved, strict=True)
    _check_twice_differentiable(outputs)
    try:
        found = _where_wanted(
            params,
            lambda wanted: torch.autograd.grad(
                outputs, wanted, weights, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
            ),
        )
    except RuntimeError as error:  # NotImplementedError is one
        raise _explained(error) from error
    return [
        torch.zeros_like(param) if product is None else placed_like(product.detach(), param)
        for product, param in zip(found, params, strict=True)
    ]


class HessianOperator:
    """The Hessian of `loss` as an operator on flat vectors of `num_dims` real numbers; frees its graph with itself.

    The graph is kept, so each product costs one backward through the gradients; it belongs to the parameters' values
    at which the loss was computed. Train-mode BatchNorm and dropout are part of the function that is differentiated.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> operator = HessianOperator((weight**3).sum(), [weight])
    >>> operator(torch.tensor([1.0, -1.0])).tolist()
    [6.0, -12.0]
    """

    def __init__(self, loss: Tensor, params: Sequence[Tensor]) -> None:
        grads = gradients(loss, params)
        self.params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
        self.grads = [grad for grad in grads if grad is not None]
        self.num_dims = sum(real_view(param).numel() for param in self.params)

    def __call__(self, vector: Tensor) -> Tensor:
        products = hessian_vector(self.grads, self.params, unflatten(vector, self.params), keep_graph=True)
        return flatten(products)

    def gradient(self) -> Tensor:
        """Return the flat gradient, without its graph."""
        return flatten([grad.detach() for grad in self.grads])


def hessian_matrix(grads: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Return the whole Hessian [d, d], d = all elements together; d backward passes and d² numbers, so for small d.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hessian_matrix(gradients(weight.prod() ** 2, [weight]), [weight]).tolist()
    [[8.0, 8.0], [8.0, 2.0]]
    """
    flat = flatten(list(params))
    rows = []
    for index in range(flat.numel()):
        unit = torch.zeros_like(flat)
        unit[index] = 1.0
        rows.append(flatten(hessian_vector(grads, params, unflatten(unit, params), keep_graph=True)))
    return torch.stack(rows)


def rademacher(like: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return probes of ±1 for each tensor of `like`, in its dtype, device and sharding.

    Drawn on the CPU in order, so that one seed gives the same probes on every rank and kind of device; a `DTensor`
    gets its shard of the whole probe. Variance of u⊙Hu: Σ_{j≠i} H_ij².
    """

    def draw(shape: torch.Size) -> Tensor:
        return torch.randint(2, shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)

    return [_probe(tensor, draw) for tensor in like]


def gaussian(like: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return standard normal probes, otherwise as `rademacher`; variance of u⊙Hu larger by 2H_ii²."""

    def draw(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [_probe(tensor, draw) for tensor in like]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements as one real vector; `DTensor`s whole.

    >>> flatten([torch.ones(2), torch.tensor([3 + 4j])]).tolist()
    [1.0, 1.0, 3.0, 4.0]
    """
    if not tensors:
        return torch.zeros(0)
    return torch.cat([real_view(_whole(tensor.detach())).reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `flatten`: parts of `vector` in the shapes, dtypes and shardings of `like`."""
    parts = vector.split([real_view(tensor).numel() for tensor in like])
    return [_shaped(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals, sharing its memory; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def placed_like(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient in its parameter's sharding: autograd may leave another, or sums over ranks still to be taken."""
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor) or grad.placements == param.placements:
        return grad
    return grad.redistribute(placements=param.placements)


def _where_wanted(
    params: Sequence[Tensor], derivative: Callable[[list[Tensor]], Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Return the derivatives in those of `params` that are not frozen, and `None` for the others."""
    wanted = [param for param in params if param.requires_grad]
    found = iter(derivative(wanted) if wanted else ())
    return [next(found) if param.requires_grad else None for param in params]


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        part = torch.view_as_complex(part.reshape(*like.shape, 2).to(like.real.dtype).contiguous())
    return _sharded_like(part.reshape(like.shape).to(like.dtype), like)


def _probe(like: Tensor, draw: Callable[[torch.Size], Tensor]) -> Tensor:
    shape = torch.Size((*like.shape, 2)) if like.is_complex() else like.shape
    return _shaped(draw(shape).to(like.device), like)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        found = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"a loss of one real number, with its graph, is needed; got {found}; return such a tensor")
    if not loss.requires_grad:
        raise ValueError(
            "a loss with its graph is needed; got one without; compute it with gradients enabled, from the "
            "optimizer's parameters, and return it undetached"
        )


def _check_twice_differentiable(grads: Sequence[Tensor]) -> None:
    """Refuse what autograd would pass over in silence: behind `once_differentiable` it sees a constant."""
    seen: set[object] = set()
    waiting = [grad.grad_fn for grad in grads if grad.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node.name() == _DELAYED_ERROR:
            raise _no_second_derivative("an autograd.Function marked once_differentiable")
        following = {below for below, _ in node.next_functions if below is not None} - seen
        seen |= following
        waiting += following


def _explained(error: RuntimeError) -> Exception:
    found = _NO_SECOND.search(str(error))
    return error if found is None else _no_second_derivative(found.group(1))


def _no_second_derivative(op: str) -> ValueError:
    if "scaled_dot_product" in op:
        remedy = "run the forward under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    elif "cudnn" in op:
        remedy = "run the forward under torch.backends.cudnn.flags(enabled=False)"
    else:
        remedy = "replace this op in the model, or choose an optimizer without Hessian-vector products"
    return ValueError(f"a loss that can be differentiated twice is needed; {op} has no second derivative; {remedy}")
