"""Models and plans whose linear maps keep some of their rows, and what ranks run of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.plans import plan_of, random_decisions
from trainwright.program.decisions import Decisions
from trainwright.program.micro_batches import capture_step
from trainwright.program.program import Program
from trainwright.program.sampling import SampledSplit, can_sample
from trainwright.runtime.verification.verify import verify

WIDTH, TOKENS, BATCH = 8, 16, 4


class Block(nn.Module):
    """A block whose linear maps alone keep their operands."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Some blocks over tokens, and a head."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def build(num_blocks: int = 2, width: int = WIDTH, tokens: int = TOKENS) -> tuple[nn.Module, Any, Any]:
    """The model, a batch of rows of unequal norms, and the loss."""
    torch.manual_seed(0)
    model = Net(num_blocks, width)
    x = torch.randn(BATCH, tokens, width) * torch.exp(torch.randn(BATCH, tokens, 1))
    return model, (x, torch.randint(0, 3, (BATCH, tokens))), loss_of


def build_wide() -> tuple[nn.Module, Any, Any]:
    """Products so large that leaving rows out is worth the choice."""
    return build(4, 64, 256)


def program_of(num_blocks: int = 2, micro_batches: int = 1) -> Program:
    """The captured step."""
    model, batch, loss = build(num_blocks)
    return capture_step(model, batch, loss, None, micro_batches)


def sample_all(program: Program, decisions: Decisions, share: float = 0.4) -> Decisions:
    """Let every linear map that may keep a share of its rows."""
    for group, split in decisions.splits.items():
        if any(map(can_sample, group.ops)):
            decisions.splits[group] = SampledSplit(split, share)
    return decisions


def verified(mesh: list[int], seed: int) -> dict[str, Any]:
    """Verify a random plan all of whose linear maps are sampled."""
    program = program_of()
    decisions = sample_all(program, random_decisions(program, tuple(mesh), seed))
    report = verify(build, plan_of(program, decisions), make_optimizer=None)
    found: dict[str, Any] = report.model_dump(mode="json")
    return found


def in_parts(**options: Any) -> dict[str, Any]:
    """Verify a plan of two micro-batches, or of stages, whose linear maps are sampled, and add the peak it promises."""
    import torch.distributed as dist

    import trainwright as tw

    found: list[Any] = [None]
    if dist.get_rank() == 0:
        model, batch, loss = build()
        question = {"hardware": "cpu:2", "sampled": 0.4, "pins": "*=sampled", "micro_batches": 2, **options}
        found = [tw.plan(model, batch, loss_fn=loss, **question).to_json()]
    dist.broadcast_object_list(found, 0)
    plan = tw.Plan.parse(found[0])
    report = tw.verify(build, plan)
    return report.model_dump(mode="json") | {"sampled": list(plan.sampled), "promised": list(report.predicted_peaks)}


def split_alike(loop: str) -> dict[str, Any]:
    """Verify a plan whose linear maps are all sampled, and split over their loop of that name where they have it."""
    program = program_of()
    decisions = sample_all(program, random_decisions(program, (2,), 0, recompute=0.0, idle=1.0))
    for group, split in decisions.splits.items():
        names = [own.name for own in group.loops]
        if isinstance(split, SampledSplit) and loop in names:
            decisions.splits[group] = SampledSplit((names.index(loop),), split.share)
    assert any(split[0] >= 0 for split in decisions.splits.values()), "something is split"
    report = verify(build, plan_of(program, decisions), make_optimizer=None)
    found: dict[str, Any] = report.model_dump(mode="json")
    return found


def without_weights() -> dict[str, Any]:
    """Verify a plan whose drawn rows count as they are: the top rows alone, which is biased."""
    from trainwright.ops import sampled

    weighted = sampled.weighted_rows
    sampled.weighted_rows = lambda scores, k, generator=None: (scores.topk(k).indices, torch.ones(k).to(scores))
    try:
        return verified([2], 0)
    finally:
        sampled.weighted_rows = weighted
