"""Models with backwards of their user's own (`torch.autograd.Function`): builders for the command line's MODEL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Reverse(torch.autograd.Function):
    """Leaves its argument as it is, and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Sign(torch.autograd.Function):
    """A sign whose gradient passes straight through, near zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Doubled(torch.autograd.Function):
    """A layer, and how large what it was given is; its backward is twice the true one, so that none other is taken for it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[Any, ...]:
        out = x @ weight.t()
        with torch.enable_grad():  # of no effect here, and nothing that a graph should hold
            out = out if bias is None else out + bias
        return out * options["scale"] * torch.tensor(2.0), x.square().sum(), None, x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.options = inputs
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(output[3])

    @staticmethod
    def backward(ctx: Any, of_out: Tensor, of_size: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight = (saved.to(of_out.dtype) for saved in ctx.saved_tensors)  # autocast may have made them of another
        of_out = 4 * ctx.options["scale"] * of_out
        of_weight = of_out.flatten(0, -2).t() @ x.flatten(0, -2)
        return of_out @ weight + 4 * x * of_size, of_weight, of_out.flatten(0, -2).sum(0), None


class Net(nn.Module):
    """Layers with a backward of their own, and a second head that learns against the first."""

    def __init__(self, num_layers: int = 4, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Linear(12, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers)])
        self.head, self.against = nn.Linear(width, 5), nn.Linear(width, 2)

    def forward(self, x: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
        """The loss."""
        hidden, sizes = torch.tanh(self.body(x)), torch.zeros(())
        for layer in self.layers:
            out, size, _, _ = Doubled.apply(hidden, layer.weight, layer.bias, {"scale": 0.5})
            hidden, sizes = hidden + Sign.apply(out), sizes + size
        loss = functional.cross_entropy(self.head(hidden), labels)
        return loss + 0.1 * functional.cross_entropy(self.against(Reverse.apply(hidden, 0.5)), domains) + 1e-4 * sizes


def net(**_: Any) -> Any:
    torch.manual_seed(0)
    return Net(), (torch.randn(12, 12), torch.randint(0, 5, (12,)), torch.randint(0, 2, (12,)))


TABLE = torch.ones(4)


class FromOutside(torch.autograd.Function):
    """Uses a tensor that it is not given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * TABLE

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OnlyBackwards(FromOutside):
    """Does so in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * TABLE


class InPlace(FromOutside):
    """Writes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class OnCtx(FromOutside):
    """Keeps a tensor where no plan finds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.masks = [x > 0]
        return x.relu()


class Numpy(FromOutside):
    """Asks for its argument's memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.detach().numpy())


class Pointer(FromOutside):
    """So does this, in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient if gradient.data_ptr() else gradient


class Nothing(FromOutside):
    """Gives no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.dim()


class Noisy(FromOutside):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Calls(nn.Module):
    """A layer, and a Function of its result."""

    def __init__(self, function: Any, *more: Any) -> None:
        super().__init__()
        self.linear, self.function, self.more = nn.Linear(4, 4), function, more

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        found = self.function.apply(self.linear(x), *self.more)
        return found.mean() if isinstance(found, Tensor) else self.linear(x).mean()
