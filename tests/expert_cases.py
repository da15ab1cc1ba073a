"""Functions that the tests of experts run on every rank; the process group is initialised."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from tests.models.experts import build
from tests.plans import plan_of, random_decisions
from trainwright.artifacts import Refusal
from trainwright.capture.cached import cached_capture
from trainwright.capture.export import as_batch
from trainwright.models import zoo
from trainwright.ops.expert_limits import Limit
from trainwright.ops.expert_routes import Holders
from trainwright.ops.expert_rows import run_experts
from trainwright.ops.experts import GATES, NAME
from trainwright.planner.costs.simulate import simulate
from trainwright.profiler.kernels.allocator import measure, static_bytes
from trainwright.program.groups import Group
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import Program, build_program
from trainwright.runtime.module import full_gradients, parallelize
from trainwright.runtime.training.train import train_loop, train_step
from trainwright.runtime.verification.verify import verify


def expert_groups(program: Program) -> list[Group]:
    """The groups that run experts."""
    return [g for c in program.classes for g in c.groups if any(op.name == NAME for op in g.ops)]


def forced(family: str, mesh: list[int], split: list[str], seed: int, **settings: Any) -> dict[str, Any]:
    """Verify a plan drawn from the whole space but for the experts' split, in float64; an unknown loop is an error."""
    model, batch = build(family, device="meta", **settings)
    program = build_program(cached_capture(model, batch))
    decisions = random_decisions(program, tuple(mesh), seed)
    for group in expert_groups(program):
        names = [loop.name for loop in group.loops]
        decisions.splits[group] = tuple(names.index(name) if name != "-" else -1 for name in split)
    return verify(lambda: build(family, **settings), plan_of(program, decisions), dtype="float64").model_dump()


def peaks(model: str, plan: str) -> dict[str, Any]:
    """Return the peak of a rank's allocator over two steps, the promised one, and the promise for the rows that it was sent."""
    parsed, make = tw.Plan.parse(plan), lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False)
    built, batch = zoo.build(model, device="cpu")
    module = parallelize(built, parsed).train()
    del built
    optimizer, part = make(module.parameters()), parsed.shard_batch(as_batch(batch))
    static, counts = static_bytes(module), []

    def step() -> None:
        train_step(module, optimizer, part)
        counts.append({key: seen.numbers for key, seen in module.communicator.routed.clear().items()})

    with module.communicator.settling():
        measured = static + measure(step, num_steps=2).peak_delta_bytes
    program = build_program(cached_capture(*zoo.build(model, device="meta")))
    chosen, coords = decisions_of(program, parsed), module.communicator.coords

    def simulated(rows: dict[str, list[int]] | None) -> int:
        unnamed = lambda named: make([param for _, param in named])  # noqa: E731
        return simulate(program, chosen, unnamed, coords=coords, num_threads=1, counts=rows).peak_bytes

    # the first step begins without optimizer states: the second one's rows are those of the peak
    return {"measured": measured, "promised": simulated(None), "known": simulated(counts[-1]), "counts": counts}


def reported(model: str, plan: str) -> dict[str, Any]:
    """The report of `verify`, whose peaks are predicted anew for the rows that were sent."""
    return tw.verify(lambda: zoo.build(model, device="cpu"), tw.Plan.parse(plan)).model_dump()


def trained(plan: str, metrics: str) -> None:
    """Train two steps, and write down what they saw."""
    model, batch = zoo.build("gpt-oss-tiny", device="cpu")
    tw.train(model, tw.Plan.parse(plan), [batch] * 2, steps=2, metrics=metrics)


def limited(plan: str, limit: str) -> dict[str, Any]:
    """Loss, gradients and peak of a step whose router sends every token to the first rank's experts, under a limit."""
    parsed = tw.Plan.parse(plan)
    module = parallelize(_skewed_model(), parsed).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, foreach=False)
    part, losses = parsed.shard_batch(as_batch(zoo.build("gpt-oss-tiny", device="cpu")[1])), []
    static, routed = static_bytes(module), module.communicator.routed
    with module.communicator.settling(), routed.limited(Limit(limit)):
        step = lambda: losses.append(float(train_step(module, optimizer, part)))  # noqa: E731
        peak = static + measure(step, num_steps=2).peak_delta_bytes
    gradients = {name: gradient.tolist() for name, gradient in full_gradients(module).items() if "experts" in name}
    factor = max(seen.factor for seen in routed.seen.values())
    rows = routed.num_rows, routed.num_excess
    return {"losses": losses, "peak": peak, "gradients": gradients, "factor": factor, "rows": rows}


def routes(limit: str, imbalance: float) -> dict[str, Any]:
    """The experts of two ranks under skewed routing and a limit, against the op on one process given the rows that stay."""
    group = _Group()
    case = [each.requires_grad_(each.is_floating_point()) for each in _skewed_case()]
    tokens, ids, weights, w_in, w_out = case
    place = dist.get_rank()
    own, held = slice(12 * place, 12 * place + 12), slice(3 * place, 3 * place + 3)
    kept: list[Any] = []

    def count(numbers: torch.Tensor, rows: Any) -> list[int]:
        kept.append((rows.excess(numbers.tolist()), sum(rows.planned[2:])))
        return numbers.tolist()

    holders = Holders(6, ((0, 3), (3, 6)), place, group, count, imbalance, lambda: Limit(limit))
    leaves = [
        x[part].detach().requires_grad_() for x, part in zip((tokens, weights, w_in, w_out), (own, own, held, held))
    ]
    found = run_experts(
        leaves[0], ids[own], leaves[1], leaves[2], leaves[3], None, None, GATES["silu_glu"].run, False, holders
    )
    wanted_grad = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float64).view_as(tokens)
    grads = torch.autograd.grad(found, leaves, wanted_grad[own])
    stays = torch.ones_like(weights)
    if limit == Limit.DROP:  # a choice that is dropped has no gradient of its weight
        parts = [torch.empty(12, 2, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(parts, (grads[1] != 0).double())
        stays = torch.cat(parts)
    whole = tw.experts(tokens, ids, weights * stays, w_in, w_out)
    wanted = torch.autograd.grad(whole, [tokens, weights, w_in, w_out], wanted_grad)
    pairs = [(found, whole[own]), *zip(grads, (w[part] for w, part in zip(wanted, (own, own, held, held))))]
    errors = [float((a - b).abs().max()) for a, b in pairs]
    heavy = _heaviest_stay(ids, weights.detach(), stays, place)
    return {
        "errors": errors,
        "dropped": int((1 - stays).sum()),
        "counted": kept,
        "heaviest": heavy,
        "largest": max(group.received),
    }


def _heaviest_stay(ids: torch.Tensor, weights: torch.Tensor, stays: torch.Tensor, place: int) -> bool:
    """Whether, of each expert and sender, no choice that went is heavier than one that stayed."""
    own = slice(12 * place, 12 * place + 12)
    for expert in range(6):
        chosen = ids[own] == expert
        stayed, went = (weights[own][chosen & (stays[own] == flag)] for flag in (1.0, 0.0))
        if len(stayed) and len(went) and float(went.max()) > float(stayed.min()):
            return False
    return True


def _skewed_case() -> list[torch.Tensor]:
    torch.manual_seed(4)
    scores = torch.rand(24, 6)
    scores[:, :2] += 0.6  # most tokens choose the first rank's experts
    ids = scores.topk(2).indices
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return [random(24, 5), ids, random(24, 2).abs() + 0.1, random(6, 8, 5), random(6, 5, 4)]


class _Group:
    """Both ranks, and how many numbers each exchange of rows brought."""

    size = 2

    def __init__(self) -> None:
        self.received: list[int] = []

    def all_to_all(self, flat: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        result = flat.new_empty(sum(receive))
        dist.all_to_all_single(result, flat.detach(), receive, send)
        if flat.is_floating_point():
            self.received.append(sum(receive))
        return result


def _skewed_model() -> Any:
    model, _ = zoo.build("gpt-oss-tiny", device="cpu")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias[:2] += 50.0
    return model


def skewed(plan: str, policy: str) -> dict[str, Any]:
    """Train three steps with a router that sends every token to the first rank's experts; what was told, or refused."""
    parsed = tw.Plan.parse(plan)
    module, batch = parallelize(_skewed_model(), parsed).train(), zoo.build("gpt-oss-tiny", device="cpu")[1]
    before = {name: param.to_local().clone() for name, param in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    told: list[dict[str, Any]] = []
    try:
        train_loop(module, optimizer, [batch] * 3, steps=3, on_step=told.append, on_imbalance=policy)
    except Refusal as refusal:
        same = all(torch.equal(param.to_local(), before[name]) for name, param in module.named_parameters())
        return {"refused": str(refusal), "same": same, "rank": dist.get_rank()}
    dropped = [event.get("expert_dropped") for event in told]
    return {"factors": [event["expert_imbalance"] for event in told], "dropped": dropped}
