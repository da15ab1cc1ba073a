"""Second derivatives through plans on real ranks, called by the tests; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Plan
from trainwright.capture.cached import cached_capture
from trainwright.capture.call import find_loss
from trainwright.models import zoo
from trainwright.numerics import hvp
from trainwright.program.program import build_program
from trainwright.runtime.verification.reference import Exact
from trainwright.runtime.verification.verify import _Parallel


class Normed(nn.Module):
    """A network with batch normalisation, whose loss compares the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))).mean((2, 3)))


def build(model: str) -> tuple[nn.Module, Any, Any]:
    if model != "normed":
        return (*zoo.build(model, device="cpu"), None)
    torch.manual_seed(1)
    return Normed(), (torch.randn(8, 3, 6, 6), torch.arange(8) % 6), nn.CrossEntropyLoss()


def drawn(model: str, mesh: list[int], seed: int) -> tuple[Plan, Any]:
    """A plan from the whole space of layouts in which everything is kept and every parameter travels by itself."""
    net, batch, loss_fn = build(model) if model == "normed" else (*zoo.build(model, device="meta"), None)
    program = build_program(cached_capture(net.to("meta"), batch, loss_fn))
    decisions = random_decisions(program, tuple(mesh), seed, recompute=0.0)
    decisions.overlap = "none"
    literals = {} if isinstance(batch, tuple) else {k: v for k, v in batch.items() if not isinstance(v, Tensor)}
    plan = plan_of(program, decisions, literals)
    return plan.model_copy(update={"loss_fn": "CrossEntropyLoss" if loss_fn else ""}), {}


def products(model: str, mesh: list[int], seed: int) -> dict[str, Any]:
    """The largest relative difference of a gradient and of a Hessian-vector product from one process's."""
    plan, _ = drawn(model, mesh, seed)
    parallel = _Parallel(plan, *build(model), lifted=True, seed=0)
    alone = Exact(plan, *build(model))
    with sdpa_kernel(SDPBackend.MATH):
        found = _products(find_loss(parallel._output()), dict(parallel.module.named_parameters()))
        wanted = _products(alone._loss(), dict(alone.model.named_parameters()))
    worst = {"gradient": 0.0, "product": 0.0}
    scale = {kind: max(float(v.norm()) for v in wanted[kind].values()) for kind in worst}
    for kind in worst:
        for name, value in wanted[kind].items():
            own = found[kind][name].reshape(value.shape)
            worst[kind] = max(worst[kind], float((own - value).norm()) / max(float(value.norm()), 1e-3 * scale[kind]))
    return {**worst, "size": scale["product"]}


def _products(loss: Tensor, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    used = list(params.values())
    grads = hvp.gradients(loss, used)
    kept = [(name, param, grad) for (name, param), grad in zip(params.items(), grads, strict=True) if grad is not None]
    probes = [_probe(name, param) for name, param, _ in kept]
    found = hvp.hessian_vector([grad for *_, grad in kept], [param for _, param, _ in kept], probes)
    names = [name for name, *_ in kept]
    return {
        "gradient": dict(zip(names, [_whole(grad.detach()) for *_, grad in kept], strict=True)),
        "product": dict(zip(names, [_whole(product) for product in found], strict=True)),
    }


def _probe(name: str, param: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    return hvp.gaussian([param], draw)[0]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Words(nn.Module):
    """Embedding, two layers, a norm and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.norm = nn.Embedding(12, 8), nn.Linear(8, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(self.embed(x).mean(1)))))


def words() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(2)
    return Words().double(), (torch.randint(12, (8, 5)), torch.arange(8) % 6), nn.CrossEntropyLoss()


def trains_like_one_process(plan: str, lr: float, steps: int = 3) -> dict[str, float]:
    """Train as `train` does beside a loop that anybody would write; the largest difference of a weight, and how far they went."""
    import trainwright as tw
    from trainwright.training import made, optimizer_of, step_of

    parsed = Plan.parse(plan)
    (model, batch, loss_fn), (alone, _, _) = words(), words()
    module = tw.parallelize(model, parsed, loss_fn=loss_fn).train()
    chosen, _ = optimizer_of(parsed)
    optimizer, single = made(chosen, module, lr), chosen.make(alone.named_parameters(), lr)
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    take, part = step_of(chosen, model, loss_fn), parsed.shard_batch(batch, rows="all")
    worst = 0.0
    for _ in range(steps):
        if take is None:
            from trainwright.runtime.training.train import train_step

            loss = train_step(module, optimizer, part)
        else:
            loss = take(module, optimizer, part, None, batch)
        worst = max(worst, abs(float(loss) - _step_alone(chosen.name, single, alone, batch, loss_fn)))
    weights = tw.full_state_dict(module)
    found = {name: float((weights[name] - value).abs().max()) for name, value in alone.state_dict().items()}
    moved = max(float((value - before[name]).abs().max()) for name, value in alone.state_dict().items())
    return {"worst": max(worst, *found.values()), "moved": moved, "num_steps": module.num_steps}


def _step_alone(name: str, optimizer: Any, model: nn.Module, batch: Any, loss_fn: Any) -> float:
    x, y = batch
    optimizer.zero_grad()
    if name == "sso":
        return float(optimizer.step(lambda: model(x), lambda logits: loss_fn(logits, y)))
    if name in ("sophiah", "adahessian", "gradnormsmoothnewton"):
        return float(optimizer.step(lambda: loss_fn(model(x), y)))
    if name == "sophiag":

        def closure() -> tuple[Tensor, Tensor]:
            logits = model(x)
            return loss_fn(logits, y), logits

        return float(optimizer.step(closure))
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def wide(width: int, outputs: int, rows: int, squares: bool) -> tuple[nn.Module, Any, Any]:
    """A perceptron whose outputs outweigh it, with a loss that is a number in the storage of all its terms where `squares`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))
    wanted = torch.randn(rows, outputs) if squares else torch.arange(rows) % outputs
    return model, (torch.randn(rows, width), wanted), nn.MSELoss() if squares else nn.CrossEntropyLoss()


def peak_of_target_steps(plan: str, lr: float, **sizes: Any) -> int:
    """The bytes at the peak of two steps of SSO on this rank; what other threads free is seen."""
    import trainwright as tw
    from trainwright.profiler.kernels.allocator import measure, static_bytes
    from trainwright.training import optimizer_of, step_of

    parsed, (model, batch, loss_fn) = Plan.parse(plan), wide(**sizes)
    module = tw.parallelize(model, parsed, loss_fn=loss_fn)
    chosen, _ = optimizer_of(parsed)
    optimizer, step = chosen.make(module.named_parameters(), lr=lr), step_of(chosen, model, loss_fn)
    assert step is not None
    static, part = static_bytes(module), parsed.shard_batch(batch)
    with module.communicator.settling():
        return static + measure(lambda: step(module, optimizer, part, batch=batch), num_steps=2).peak_delta_bytes
