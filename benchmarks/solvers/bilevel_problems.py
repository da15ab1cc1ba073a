"""Two-level problems whose true hypergradient can be computed, by a closed form or by solving the lower level exactly."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus


class Problem(Protocol):
    """Both levels with the noise of a step's batch, a start, and the exact answer, which is not counted."""

    x0: Tensor
    y0: Tensor

    def upper(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor: ...

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor: ...

    def sample(self, blocks: Tensor, generator: torch.Generator) -> Any: ...

    def grad_norm(self, x: Tensor) -> float: ...


class Quadratics:
    """gᵢ = y'Aᵢy/2 - y'Bᵢx, fᵢ = |y - cᵢ|²/2 + .05 |x|², with additive noise of one size on every gradient and product."""

    def __init__(self, num_blocks: int, noise: float = 0.3, dx: int = 5, dy: int = 6) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        roots = draw(num_blocks, dy, dy)
        self.A = 0.1 * roots @ roots.mT + 0.6 * torch.eye(dy, dtype=torch.float64)
        self.B, self.c, self.noise = draw(num_blocks, dy, dx) / 2, draw(num_blocks, dy) + 1.0, noise
        self.x0, self.y0 = 2.0 + draw(dx), draw(num_blocks, dy)

    def sample(self, blocks: Tensor, generator: torch.Generator) -> Any:
        num, dy, dx = len(blocks), self.c.shape[1], len(self.x0)
        shapes = ((num, dy), (num, dy), (num, dx), (num, dy, dy), (num, dy, dx))
        return [self.noise * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        A, B, near_y, near_x = self.A[blocks], self.B[blocks], y - y.detach(), x - x.detach()
        value = torch.einsum("ia,iab,ib->i", y, A, y) / 2 - torch.einsum("ia,iax,x->i", y, B, x)
        # the last two vanish at (x, y) with their gradients: they are noise on second derivatives alone
        value = value + (y * batch[0]).sum(1) + torch.einsum("ia,iab,ib->i", near_y, batch[3], near_y) / 2
        return value - torch.einsum("ia,iax,x->i", near_y, batch[4], near_x)

    def upper(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        value = (y - self.c[blocks]).square().sum(1) / 2 + 0.05 * x.square().sum()
        return value + (y * batch[1]).sum(1) + (x * batch[2]).sum(1)

    def grad_norm(self, x: Tensor) -> float:
        y = torch.linalg.solve(self.A, torch.einsum("iax,x->ia", self.B, x))
        v = torch.linalg.solve(self.A, y - self.c)
        return float((torch.einsum("iax,ia->ix", self.B, v).mean(0) + 0.1 * x).norm())


class DigitPairs:
    """A penalty exp(xⱼ) for each of 65 features, shared by the 45 logistic regressions that tell two digits apart.

    gᵢ: logistic loss of a pair on its 120 training images + Σⱼ exp(xⱼ) yⱼ²/2; fᵢ: its loss on 80 others. Batches of 32.
    """

    def __init__(self, batch_size: int = 32) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels = torch.from_numpy(digits.data) / 16, torch.from_numpy(digits.target)
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        of_digit = torch.stack([pixels[labels == digit][:100] for digit in range(10)])
        self.pairs = torch.combinations(torch.arange(10))
        self.train, self.held = self._sides(of_digit[:, :60]), self._sides(of_digit[:, 60:])
        self.batch_size = batch_size
        self.x0 = torch.full((65,), -1.0, dtype=torch.float64)
        self.y0 = torch.zeros(len(self.pairs), 65, dtype=torch.float64)

    def _sides(self, of_digit: Tensor) -> Tensor:
        """[pairs, images, 65]: one digit's images and the other's with the sign turned, so that all margins are to be > 0."""
        return torch.cat([of_digit[self.pairs[:, 0]], -of_digit[self.pairs[:, 1]]], 1)

    def sample(self, blocks: Tensor, generator: torch.Generator) -> Any:
        return [
            torch.randint(images.shape[1], (len(blocks), self.batch_size), generator=generator)
            for images in (self.train, self.held)
        ]

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        margins = torch.einsum("ibj,ij->ib", self.train[blocks[:, None], batch[0]], y)
        return softplus(-margins).mean(1) + (x.exp() * y.square()).sum(1) / 2

    def upper(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        margins = torch.einsum("ibj,ij->ib", self.held[blocks[:, None], batch[1]], y)
        return softplus(-margins).mean(1)

    def solve(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The exact lower solutions by Newton's method, and the Hessians there."""
        y, penalty = self.y0, x.exp()
        for _ in range(20):
            share = torch.sigmoid(-torch.einsum("ibj,ij->ib", self.train, y))
            slope = -torch.einsum("ib,ibj->ij", share, self.train) / share.shape[1] + penalty * y
            hessian = torch.einsum("ib,ibj,ibk->ijk", share * (1 - share), self.train, self.train) / share.shape[1]
            hessian = hessian + penalty.diag()
            y = y - torch.linalg.solve(hessian, slope)
            if float(slope.norm()) < 1e-10:
                break
        return y, hessian

    def value(self, x: Tensor) -> float:
        """F(x), the mean loss on held-out images at the exact lower solutions."""
        margins = torch.einsum("ibj,ij->ib", self.held, self.solve(x)[0])
        return float(softplus(-margins).mean())

    def grad_norm(self, x: Tensor) -> float:
        y, hessian = self.solve(x)
        share = torch.sigmoid(-torch.einsum("ibj,ij->ib", self.held, y))
        slope = -torch.einsum("ib,ibj->ij", share, self.held) / share.shape[1]
        v = torch.linalg.solve(hessian, slope)
        return float((x.exp() * y * v).mean(0).norm())


class Steep:
    """g = y'Ay/2 - y'Bx, f = Σ cosh(y - s) + .02 Σ cosh(x), far from the minimum; noise of a tenth on ∇ᵧf: one block."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.A = torch.diag(torch.linspace(1.0, 3.0, 8, dtype=torch.float64))
        self.B = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
        self.s = 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)
        self.x0, self.y0 = torch.full((8,), 6.0, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64)

    def sample(self, blocks: Tensor, generator: torch.Generator) -> Tensor:
        return 1 + 0.1 * torch.randn(8, generator=generator, dtype=torch.float64)

    def lower(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        return torch.einsum("ia,ab,ib->i", y, self.A, y) / 2 - torch.einsum("ia,ab,b->i", y, self.B, x)

    def upper(self, x: Tensor, y: Tensor, blocks: Tensor, batch: Any) -> Tensor:
        return ((y - self.s).cosh() * batch).sum(1) + 0.02 * x.cosh().sum()

    def grad_norm(self, x: Tensor) -> float:
        y = torch.linalg.solve(self.A, self.B @ x)
        return float((self.B.T @ torch.linalg.solve(self.A, (y - self.s).sinh()) + 0.02 * x.sinh()).norm())
