"""Plans with stages on real ranks: what the distributed tests of pipelines run on every rank."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import trainwright as tw
from tests.plans import cluster, draw_offloaded, plan_of, random_decisions
from trainwright.artifacts import PIPE, STAGED_VERSION, Pipeline, Plan
from trainwright.models import zoo
from trainwright.program.decisions import Decisions
from trainwright.program.micro_batches import capture_step
from trainwright.program.program import Program
from trainwright.program.stages import boundaries, cut
from trainwright.rank.accumulate import Accumulator
from trainwright.rank.execute import Executor
from trainwright.rank.local import build_local
from trainwright.rank.reshard import SimulatedCommunicator
from trainwright.rank.run_state import RunState
from trainwright.rank.stage_actions import Action, Schedule, interleaved_in_flight
from trainwright.runtime.module import full_gradients
from trainwright.runtime.training.train import train_step
from trainwright.runtime.training.watchdog import Watchdog
from trainwright.runtime.verification.comparison import gradient_errors
from trainwright.runtime.verification.reference import unsplit
from trainwright.runtime.verification.verify import verify

LAYERS = {
    "gpt2-tiny": "n_layer",
    "llama-tiny": "num_hidden_layers",
    "bert-tiny": "num_hidden_layers",
    "vit-tiny": "num_hidden_layers",
    "mixtral-tiny": "num_hidden_layers",
    "t5-tiny": "num_layers",
}


def built(name: str, layers: int, device: str = "cpu", batch_size: int = 8, **options: Any) -> tuple[Any, Any]:
    """A model and a batch whose labels have more holes in some rows than in others, so that means are to be weighted."""
    model, batch = zoo.build(name, batch_size=batch_size, device=device, seed=0, **{LAYERS[name]: layers}, **options)
    if device == "cpu" and batch["labels"].dim() == 2:
        generator = torch.Generator().manual_seed(1)
        share = torch.linspace(0.1, 0.8, batch_size)[:, None]
        holes = torch.rand(batch["labels"].shape, generator=generator) < share
        batch["labels"] = batch["labels"].masked_fill(holes, -100)
    return model, batch


def staged(plan: Plan, begins: Sequence[str], in_flight: Sequence[int], **more: Any) -> Plan:
    """The same plan with stages."""
    fields = {name: getattr(plan, name) for name in type(plan).model_fields}
    pipeline = Pipeline(begins=tuple(begins), in_flight=tuple(in_flight), **more)
    num = pipeline.num_stages
    return Plan(
        **fields
        | {
            "format_version": STAGED_VERSION,
            "pipeline": pipeline,
            "mesh": {PIPE: num, **plan.mesh},
            "cluster": cluster(num * plan.num_ranks),
        }
    )


def recomputed_keys(program: Program) -> set[str]:
    """Everything inside every second block but what leaves it."""
    found = set()
    for region in program.regions:
        for op in region.ops if region.path is not None and region.member % 2 == 0 else ():
            if op.requires_grad:
                if op.kind != "view" and all(c.region is region for t in op.outputs for c in t.consumers):
                    found |= {t.key for t in op.outputs}
                found.add(f"{op.key}.internal")
    return found


def plan_with_stages(
    name: str, layers: int, num_stages: int, num_micro: int, depth: str, seed: int, recompute: bool, inner: Sequence[int],
    begins: Sequence[str] = (), offload: float = 0.0, **options: Any,
) -> Plan:  # fmt: skip
    """A plan whose cuts are drawn; depth: `1f1b`, `deeper`, `gpipe`, `zero-bubble`, or `interleaved2` with 2 pieces a stage.

    `inner` of more than one rank: layouts are drawn too. offload: the share of what is kept that leaves the device."""
    model, batch = built(name, layers, "meta", **options)
    program = capture_step(model, batch, None, None, num_micro)
    draw = random.Random(seed)
    names = boundaries(program)
    virtual = int(depth.removeprefix("interleaved")) if depth.startswith("interleaved") else 1
    begins = begins or sorted(draw.sample(names, virtual * num_stages - 1), key=names.index)
    decisions: Decisions = unsplit(program, len(inner))
    if max(inner) > 1:
        decisions = random_decisions(program, tuple(inner), seed, 0.5 if recompute else 0.0)
        decisions.overlap = "none"
    elif recompute:
        decisions.recomputed = recomputed_keys(program)
    if offload:
        draw_offloaded(program, decisions, draw, offload)
    depths = {
        "1f1b": [num_stages - s for s in range(num_stages)],
        "deeper": [num_stages - s + 1 for s in range(num_stages)],
        "gpipe": [num_micro] * num_stages,
        "zero-bubble": [num_stages] * num_stages,
    }.get(depth) or list(interleaved_in_flight(num_stages, virtual, num_micro))
    literals = {key: value for key, value in batch.items() if not isinstance(value, torch.Tensor)}
    plan = plan_of(program, decisions, literals)
    corrected = plan.model_copy(update={"micro_batches": num_micro, "corrections": dict(program.corrections)})
    if num_stages == 1:
        return corrected
    more = {"virtual": virtual} if virtual > 1 else {"split_backward": True} if depth == "zero-bubble" else {}
    return staged(corrected, begins, [min(w, virtual * num_micro) for w in depths], **more)


def verified(options: dict[str, Any], update: bool = False) -> dict[str, Any]:
    """Verify a plan with stages against one process of the whole batch."""
    plan = plan_with_stages(**options)
    make = (lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)) if update else None
    found = verify(lambda: built(options["name"], options["layers"]), plan, make_optimizer=make)
    return found.model_dump()


def verified_plan(text: str, layers: int = 4, **options: Any) -> dict[str, Any]:
    """Verify a plan of gpt2-tiny against one process, and its peak by the allocator's records."""
    make = lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)  # noqa: E731
    return verify(lambda: built("gpt2-tiny", layers, **options), Plan.parse(text), make_optimizer=make).model_dump()


def _trained(plan: Plan, options: dict[str, Any], steps: int, clip: float = 0.0, optimizer: str = "AdamW") -> Any:
    model, batch = built(options["name"], options["layers"])
    module = tw.parallelize(model, plan, seed=3).train()
    module.use_dropout = False
    stepping = getattr(torch.optim, optimizer)(module.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        stepping.zero_grad()
        loss = module(**plan.shard_batch(batch)).loss
        loss.backward()
        if clip:
            found.append(float(tw.runtime.clip_grad_norm_(module, clip)))
        stepping.step()
        found.append(float(loss.detach()))
    return module, stepping, batch, found


def _on_one_process(options: dict[str, Any], steps: int, clip: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, batch = built(options["name"], options["layers"])
    stepping, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    model.eval()  # the zoo's tiny models drop nothing in training; evaluation makes sure
    for _ in range(steps):
        stepping.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if clip:
            found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepping.step()
        found.append(float(loss.detach()))
    return found, {name: param.detach() for name, param in model.named_parameters()}


def training(options: dict[str, Any], clip: float) -> dict[str, Any]:
    """Three steps of the user's loop, norms clipped; the losses and weights of one process beside."""
    plan = plan_with_stages(**options)
    module, _, batch, losses = _trained(plan, options, 3, clip)
    weights = tw.full_state_dict(module)
    expected, one = _on_one_process(options, 3, clip)
    module.eval()
    with torch.no_grad():
        output = module(**plan.shard_batch(batch))
    only = tw.runtime.full_state_dict(module, only_rank=0)
    return {
        "losses": losses,
        "expected": expected,
        "weights": max(float((weights[name] - value).abs().max()) for name, value in one.items()),
        "num_own": len(dict(module.named_parameters())),
        "num_all": len(one),
        "names": sorted(set(weights)),
        "on_rank_0": len(only),
        "evaluated": float(output.loss),
        "has_logits": isinstance(output.logits, torch.Tensor),
    }


def resumed(options: dict[str, Any], folder: str, others: list[dict[str, Any]]) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; then the last two again from the checkpoint, under this plan and others."""
    plan = plan_with_stages(**options)
    module, stepping, batch, _ = _trained(plan, options, 2)
    with tw.runtime.Checkpointer(folder, module, stepping) as kept:
        kept.save(1)
    found: dict[str, Any] = {"uninterrupted": _more(module, stepping, plan, batch)}
    for place, other in enumerate([options, *others]):
        again = plan_with_stages(**other)
        model, _ = built(options["name"], options["layers"])
        for param in model.parameters():
            torch.nn.init.normal_(param)
        module = tw.parallelize(model, again, seed=9).train()
        module.use_dropout = False
        stepping = torch.optim.AdamW(module.parameters(), lr=1e-2)
        step = tw.runtime.Checkpointer(folder, module, stepping).load_latest()
        found[f"plan {place}"] = _more(module, stepping, again, batch)
        found["step"] = step
    return found


def _more(module: Any, stepping: Any, plan: Plan, batch: Any) -> list[float]:
    losses = []
    for _ in range(2):
        stepping.zero_grad()
        loss = module(**plan.shard_batch(batch)).loss
        loss.backward()
        stepping.step()
        losses.append(float(loss.detach()))
    return losses


def peaks(options: dict[str, Any]) -> list[dict[str, int]]:
    """The peak of each stage: simulated, and by the allocator's records."""
    from trainwright.planner.costs.simulate import simulate_stage
    from trainwright.program.plan_text import decisions_of
    from trainwright.program.stages import stages_of, tied
    from trainwright.runtime.verification.verify import _measured

    def make(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for _, param in named], lr=1e-3)

    plan = plan_with_stages(**options)
    assert plan.pipeline is not None
    model, batch = built(options["name"], options["layers"], "meta")
    program = capture_step(model, batch, None, None, plan.micro_batches, plan.corrections)
    stages = cut(program, plan.pipeline.begins)
    inner = plan.num_ranks // plan.num_stages
    here = dist.get_rank() // inner
    found = simulate_stage(
        stages[here :: plan.num_stages], decisions_of(program, plan), make,
        schedule=Schedule.of(plan.pipeline, plan.micro_batches), tied=list(stages_of(tied(stages), plan.num_stages)),
        coords=(dist.get_rank() % inner,) if len(plan.inner_mesh) == 1 else None,
    )  # fmt: skip
    measured = _measured(plan, lambda: built(options["name"], options["layers"]), make, 0, None)["peak_bytes"]
    return [{"simulated": found.peak_bytes, "measured": measured[dist.get_rank()]}]


def dropout(options: dict[str, Any]) -> dict[str, float]:
    """A step with dropout, and the same micro-batches on one process without stages: the numbers drawn are the same."""
    plan = plan_with_stages(**options)
    model, batch = built(options["name"], options["layers"], dtype="fp32")
    module = tw.parallelize(model, plan, seed=7).train()
    loss = module(**plan.shard_batch(batch)).loss
    loss.backward()
    found = full_gradients(module)
    program = capture_step(model, batch, None, None, plan.micro_batches, plan.corrections)
    alone = Accumulator(Executor(build_local(program, unsplit(program, 1), SimulatedCommunicator((1,)))))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sources = {
        t: t.value if t.role == "const" else tensors[t.key] for t in program.tensors if t.role not in ("op", "input")
    }
    parts = [{t: batch[t.key].chunk(plan.micro_batches)[k] for t in program.inputs} for k in range(plan.micro_batches)]
    expected = alone.run(sources, parts, RunState(seed=7))[program.captured.loss_index]
    expected.backward()
    own = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    errors = gradient_errors(found, own)
    with torch.no_grad():
        module.eval()
        without = module(**plan.shard_batch(batch)).loss
    return {"gradient": max(errors.values()), "loss": abs(float(loss - expected)), "effect": abs(float(loss - without))}


def fault(options: dict[str, Any], kind: str, limit_s: float) -> None:
    """A step in which rank 0 does something wrong: it drops a send, swaps two actions, is far too slow, or dies."""
    plan = plan_with_stages(**options)
    model, batch = built(options["name"], options["layers"])
    module = tw.parallelize(model, plan, seed=3).train()
    runner = module.steps.planned.runner
    assert runner is not None
    link, here = runner.link, dist.get_rank()
    send = link.send

    def wrong_send(action: Any, tensors: Any) -> Any:
        if action.micro != 1:
            return send(action, tensors)
        if kind == "slow":
            time.sleep(20 * limit_s)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return []

    if here == 0 and kind == "swapped":
        first, second = (runner.actions.index(Action("send", 0, micro, "activation")) for micro in (0, 1))
        forward = runner.actions.index(Action("forward", 0, 1))
        actions = [a for a in runner.actions if a.kind != "forward" or a.micro > 1]
        place = actions.index(Action("send", 0, 0, "activation"))
        swapped = [Action("forward", 0, 0), Action("forward", 0, 1), Action("send", 0, 1, "activation")]
        rest = [a for a in actions[place:] if a != Action("send", 0, 1, "activation")]
        assert first < forward < second
        runner.actions = [*actions[:place], *swapped, Action("sent", 0, 1, "activation"), *rest]
    elif here == 0:
        link.send = wrong_send  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Watchdog(module.communicator.activity, limit_s):
        train_step(module, optimizer, plan.shard_batch(batch))


class Block(torch.nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(width), torch.nn.Linear(width, 9), torch.nn.Linear(9, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def mean_square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def against_torch(num_micro: int) -> dict[str, float]:
    """Gradients of two stages, by this package and by torch's own 1F1B over the same two ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(4)
    model = torch.nn.Sequential(*(Block(6) for _ in range(4))).double()
    x = torch.randn(8, 3, 6, dtype=torch.float64)
    here = dist.get_rank()
    half = copy.deepcopy(model[2 * here : 2 * here + 2])
    stage = PipelineStage(half, here, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_micro, loss_fn=lambda output, target: output.square().mean(), scale_grads=True)
    schedule.step(x) if here == 0 else schedule.step(target=torch.zeros_like(x))
    theirs = {name: param.grad for name, param in half.named_parameters()}
    plan = tw.plan(model, (x,), loss_fn=mean_square, hardware="cpu:1", micro_batches=num_micro, optimizer="sgd")
    module = tw.parallelize(model, staged(plan, ["2"], [2, 1]), loss_fn=mean_square)
    module(*module.plan.shard_batch((x,), rows="all")).loss.backward()
    own = {name: param.grad.full_tensor() for name, param in module.named_parameters()}
    errors = [float((own[name] - grad).norm() / grad.norm()) for name, grad in theirs.items() if grad is not None]
    return {"error": max(errors), "num": len(errors), "own": len(own)}
