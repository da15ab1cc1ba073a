"""Second derivatives on real ranks, called by the tests; the process group is initialised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.numerics import hvp
from trainwright.numerics.seeds import seeded
from trainwright.optim.adahessian import AdaHessian
from trainwright.optim.grad_norm_newton import GradNormSmoothNewton
from trainwright.optim.mfac import MFAC
from trainwright.optim.sophia import SophiaG, SophiaH, sampled_cross_entropy
from trainwright.optim.sso import SSO

METHODS: dict[str, Any] = {"sophia_h": SophiaH, "sophia_g": SophiaG, "adahessian": AdaHessian}


def _mesh() -> object:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _loss(matrix: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
    return torch.tanh(inputs @ matrix + bias).pow(2).sum()


def hvp_on_shards() -> dict[str, float]:
    """The largest difference of a probe, gradient or product from the same on one rank, for every sharding."""
    mesh = _mesh()
    draw = seeded(3)
    matrix = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    bias = torch.randn(3, generator=draw, dtype=torch.float64)
    inputs = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    alone = _products([matrix.requires_grad_(), bias.requires_grad_()], inputs)
    worst = 0.0
    for placement in (Shard(0), Shard(1), Replicate()):
        own = [placement], [Shard(0) if isinstance(placement, Shard) else placement]
        params = [
            distribute_tensor(tensor.detach().clone(), mesh, placed).requires_grad_()
            for tensor, placed in zip((matrix, bias), own, strict=True)
        ]
        sharded = _products(params, distribute_tensor(inputs, mesh, [Replicate()]))
        for found, expected in zip(sharded, alone, strict=True):
            assert isinstance(found, DTensor)
            worst = max(worst, float((found.full_tensor() - expected).abs().max()))
    return {"worst": worst}


def _products(params: list[Tensor], inputs: Tensor) -> list[Tensor]:
    loss = _loss(params[0], params[1], inputs)
    grads = hvp.gradients(loss, params)
    assert all(grad is not None for grad in grads)
    probes = hvp.rademacher(params, seeded(1))
    products = hvp.hessian_vector(grads, params, probes)  # type: ignore[arg-type]
    return [*probes, *(grad.detach() for grad in grads if grad is not None), *products]


def make(name: str, params: Sequence[Tensor], **options: Any) -> Any:
    """The optimizer with settings under which a step of a few per cent is neither all clipped nor all unclipped."""
    own = {"lr": 0.05, "update_period": 3, "weight_decay": 0.1, "seed": 11}
    return METHODS[name](list(params), **own, **({"gamma": 0.5} if "sophia" in name else {}), **options)


@dataclass
class Problem:
    """A two-layer classifier in float64 on a fixed batch, or on the part of it that `rows` names."""

    params: list[Tensor]
    inputs: Tensor
    labels: Tensor

    def logits(self) -> Tensor:
        first, bias, second = self.params
        return torch.tanh(self.inputs @ first + bias) @ second

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.logits(), self.labels)

    def step(self, name: str, optimizer: Any) -> None:
        """One step by a closure."""
        optimizer.step(self._with_logits if name == "sophia_g" else self.loss)

    def _with_logits(self) -> tuple[Tensor, Tensor]:
        logits = self.logits()
        return nn.functional.cross_entropy(logits, self.labels), logits

    def step_explicitly(self, name: str, optimizer: Any) -> None:
        """The same step by hand: refresh where due, backward, step."""
        if optimizer.hessian_due and name == "sophia_g":
            taken = max((int(state["hessian_step"]) for state in optimizer.state.values()), default=0)
            draw = seeded(11, taken, 0)
            optimizer.update_hessian(lambda: sampled_cross_entropy(self.logits(), draw), len(self.labels))
        elif optimizer.hessian_due:
            optimizer.update_hessian(self.loss)
        optimizer.zero_grad()
        self.loss().backward()
        optimizer.step()


def cross_entropy_problem(params: Sequence[Tensor] | None = None, rows: slice = slice(None)) -> Problem:
    draw = seeded(5)
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) + 0.3 for shape in ((5, 4), (4,), (4, 3))]
    inputs = torch.randn(16, 5, generator=draw, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0, 1.0, 1.0])
    labels = torch.randint(3, (16,), generator=draw)
    own = [nn.Parameter(tensor) for tensor in made] if params is None else list(params)
    return Problem(own, inputs[rows], labels[rows])


def parts_of_a_batch(name: str) -> dict[str, float]:
    """Steps on half the batch a rank, averaged over the group, against steps on the whole batch."""
    rank = dist.get_rank()
    part, whole = cross_entropy_problem(rows=slice(8 * rank, 8 * rank + 8)), cross_entropy_problem()
    group = dist.new_group()
    optimizers = make(name, part.params, process_group=group), make(name, whole.params)
    for _ in range(7 if name != "sophia_g" else 3):  # until labels are drawn
        part.step(name, optimizers[0])
        whole.step(name, optimizers[1])
    worst = _distance(part.params, whole.params)
    if name == "sophia_g":
        part.step(name, optimizers[0])
        curvature = optimizers[0].state[part.params[0]]["hessian"]
        copies = [torch.empty_like(curvature) for _ in range(2)]
        dist.all_gather(copies, curvature)
        assert torch.equal(*copies)
    return {"worst": worst}


def steps_on_shards(name: str) -> dict[str, float]:
    """Eight steps, by closure and by hand, with sharded parameters (unequally too) against the same with whole ones."""
    worst = 0.0
    for dim in (0, 1):
        alone = cross_entropy_problem()
        params = [
            nn.Parameter(distribute_tensor(param.detach().clone(), _mesh(), [Shard(min(dim, param.dim() - 1))]))
            for param in alone.params
        ]
        sharded = cross_entropy_problem(params)
        sharded.inputs = distribute_tensor(sharded.inputs, _mesh(), [Replicate()])
        sharded.labels = distribute_tensor(sharded.labels, _mesh(), [Replicate()])
        optimizers = make(name, alone.params), make(name, params)
        for step in range(8):
            for problem, optimizer in zip((alone, sharded), optimizers, strict=True):
                if step % 2 or name == "sophia_g":
                    problem.step_explicitly(name, optimizer)
                else:
                    problem.step(name, optimizer)
        whole = [param.full_tensor() for param in params]
        worst = max(worst, _distance(whole, alone.params))
    return {"worst": worst}


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def mfac_on_shards() -> dict[str, float]:
    """Nine steps with a sharded and a replicated parameter against the same whole, decay and momentum on."""
    options = {"lr": 0.1, "num_gradients": 4, "damping": 0.1, "momentum": 0.3, "weight_decay": 0.1}
    worst = 0.0
    for dim in (0, 1):
        alone = [nn.Parameter(torch.ones(5, 3, dtype=torch.float64)), nn.Parameter(torch.ones(4, dtype=torch.float64))]
        places = [[Shard(dim)], [Replicate()]]
        sharded = [
            nn.Parameter(distribute_tensor(param.detach().clone(), _mesh(), place))
            for param, place in zip(alone, places, strict=True)
        ]
        optimizers = MFAC(alone, **options), MFAC(sharded, **options)
        for step in range(9):
            for param, shard, place in zip(alone, sharded, places, strict=True):
                param.grad = 0.2 + torch.randn(param.shape, generator=seeded(step, param.dim()), dtype=torch.float64)
                shard.grad = distribute_tensor(param.grad, _mesh(), place)
            for optimizer in optimizers:
                optimizer.step()
        window = optimizers[1].state[sharded[0]]["window"]
        assert window.shape == (4, 5, 3)
        assert window.placements == (Shard(dim + 1),)
        worst = max(worst, _distance([param.full_tensor() for param in sharded], alone))
        found = optimizers[1].inverse_product([param.detach() for param in sharded])
        expected = optimizers[0].inverse_product([param.detach() for param in alone])
        worst = max(worst, _distance([part.full_tensor() for part in found], expected))
    return {"worst": worst}


def newton_on_shards() -> dict[str, float]:
    """Some steps of every solver that needs no Hessian, on sharded and on whole parameters."""
    worst = 0.0
    for solver, num_steps in (("dense", 1), ("cg", 2), ("gradient", 6)):
        alone = cross_entropy_problem()
        params = [
            nn.Parameter(distribute_tensor(param.detach().clone(), _mesh(), [Shard(param.dim() - 1)]))
            for param in alone.params
        ]
        sharded = cross_entropy_problem(params)
        sharded.inputs = distribute_tensor(sharded.inputs, _mesh(), [Replicate()])
        sharded.labels = distribute_tensor(sharded.labels, _mesh(), [Replicate()])
        for problem in (alone, sharded):
            optimizer = GradNormSmoothNewton(problem.params, solver=solver, cg_rtol=1e-10)
            for _ in range(num_steps):
                optimizer.step(problem.loss)
        worst = max(worst, _distance([param.full_tensor() for param in params], alone.params))
    return {"worst": worst}


def surrogates_on_shards() -> dict[str, float]:
    """Four searched steps with sharded parameters against the same with whole ones."""
    alone = cross_entropy_problem()
    params = [
        nn.Parameter(distribute_tensor(param.detach().clone(), _mesh(), [Shard(param.dim() - 1)]))
        for param in alone.params
    ]
    sharded = cross_entropy_problem(params)
    sharded.inputs = distribute_tensor(sharded.inputs, _mesh(), [Replicate()])
    sharded.labels = distribute_tensor(sharded.labels, _mesh(), [Replicate()])
    for problem in (alone, sharded):
        optimizer = SSO(problem.params, lr=1.0, num_inner_steps=3)
        for _ in range(4):
            optimizer.step(
                problem.logits,
                lambda z, problem=problem: nn.functional.cross_entropy(z, problem.labels, reduction="sum"),
            )
    return {"worst": _distance([param.full_tensor() for param in params], alone.params)}
