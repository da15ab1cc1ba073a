"""States the textbook ways to train on several devices as restrictions of the joint problem.

ddp         the batch split over all axes, parameters everywhere, everything kept
fsdp        the batch split over all axes, parameters sharded over all (ZeRO-3), recomputation chosen optimally
megatron    the last axis splits weights, heads and vocabulary with all-reduces, the others the batch; an op that the
            textbook has no rule for takes data parallelism, and a note says which
two-stage   first the fastest sharding whose parameters take a share of the budget, then recomputation for it
joint       nothing restricted
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...ops import find
from ...program.layout import PARTIAL, REPLICATE
from ...program.sampling import share_of
from ...program.transition import gradient_layout, transition
from .problem import Decision, Problem, Use, Want
from .strategies import batch_loop, is_busy, token_loops

RECIPES = ("ddp", "fsdp", "megatron", "two-stage", "joint")


@dataclass
class Restriction:
    """The options that a recipe, and pins, leave to choose from."""

    allowed: dict[Decision, frozenset[int]] = field(default_factory=dict)
    forbids: Callable[[Use, tuple[int, ...], Want], bool] | None = None
    """Returns True for a reshard that is forbidden as long as there is an answer without it; None forbids none."""
    recompute: bool = True
    share: bool = True
    """True if one gathered copy of a parameter may serve several regions."""
    offload: bool = False
    """True if anything may be offloaded; only `joint` and pins allow it."""
    leave: bool = True
    """True if what the backward needs is among that."""
    fates: dict[Decision, str] = field(default_factory=dict)
    """The fate of pinned decisions. All instances of a group `keep`, `recompute` or `offload` what they leave for the
    backward; a parameter's optimizer states stay on the device (`state-keep`) or do not (`state-offload`)."""
    notes: list[str] = field(default_factory=list, compare=False)


def restriction(problem: Problem, recipe: str) -> Restriction:
    """Return the restriction of `recipe`; `joint` and `two-stage` restrict no option."""
    if recipe == "ddp":
        return Restriction({**_data_parallel(problem), **_rest(problem, sharded=False)}, recompute=False)
    if recipe == "fsdp":
        return Restriction({**_data_parallel(problem), **_rest(problem, sharded=True)})
    if recipe == "megatron":
        return _megatron(problem)
    return Restriction(offload=True) if recipe == "joint" else Restriction(_exact(problem))


def _exact(problem: Problem) -> dict[Decision, frozenset[int]]:
    """Return the options of the groups that may be sampled in which they are not: only `joint` estimates gradients."""
    found = {}
    for decision in problem.groups:
        exact = [k for k, split in enumerate(decision.options) if not share_of(split)]
        if len(exact) < len(decision.options):
            found[decision] = frozenset(exact)
    return found


def _data_parallel(problem: Problem) -> dict[Decision, frozenset[int]]:
    """Return the option of every group that splits the samples over all axes; a group without them runs whole."""
    return {decision: frozenset([_batch_option(problem, decision)]) for decision in problem.groups}


def _batch_option(problem: Problem, decision: Decision) -> int:
    assert decision.group is not None
    loop = batch_loop(decision.group, problem.samples)
    return decision.options.index(tuple(loop if size > 1 else REPLICATE for size in problem.mesh))


def _rest(problem: Problem, sharded: bool) -> dict[Decision, frozenset[int]]:
    """Return the options of every parameter that replicate it at rest or, with `sharded`, hold the smallest shards."""
    allowed = {}
    for decision in problem.params:
        sizes = [size if sharded else -size for size in decision.rest_bytes]
        whole = [all(at == REPLICATE for at in option) for option in decision.options]
        chosen = [k for k, size in enumerate(sizes) if size == min(sizes)] if sharded else [whole.index(True)]
        allowed[decision] = frozenset(chosen)
    return allowed


def _megatron(problem: Problem) -> Restriction:
    found = Restriction(recompute=False)
    without_rule = []
    for decision in problem.groups:
        options = _tensor_parallel(problem, decision)
        if not options:
            options = [_batch_option(problem, decision)]
            without_rule.append(decision)
        found.allowed[decision] = frozenset(options)
    last = len(problem.mesh) - 1
    for decision in problem.params:
        rest = [k for k, layout in enumerate(decision.options) if all(at == REPLICATE for at in layout[:last])]
        found.allowed[decision] = frozenset(rest)
    if without_rule:
        _allow_samples_between(problem, found)
        keys = ", ".join(decision.key for decision in without_rule)
        found.notes.append(f"Megatron has no rule for these, which take data parallelism: {keys}")
    else:
        found.forbids = lambda use, native, want: not _all_reduces(use, native, want, last)
    return found


def _allow_samples_between(problem: Problem, found: Restriction) -> None:
    """Allow cheap groups to split the samples too, so that those between two ops that split them need no gather."""
    for decision in problem.groups:
        if not _is_busy(problem, decision):
            found.allowed[decision] |= {_batch_option(problem, decision)}


def _tensor_parallel(problem: Problem, decision: Decision) -> list[int]:
    """Return the options that split the samples over the outer axes and follow Megatron over the last, if any."""
    group, last = decision.group, len(problem.mesh) - 1
    assert group is not None
    batch, tokens = batch_loop(group, problem.samples), token_loops(group, problem.program)
    outer = tuple(batch if size > 1 else REPLICATE for size in problem.mesh[:last])
    exact = [(k, split) for k, split in enumerate(decision.options) if not share_of(split)]
    fitting = [k for k, split in exact if split[:last] == outer and split[last] not in tokens]
    if not _is_busy(problem, decision):
        return fitting
    records = problem.costs.records
    busy = [op for op in group.ops if any(call.flops for call in records[op].forward)]
    has_rule = all(find(op.name).tensor_parallel for op in busy)
    return [k for k in fitting if decision.options[k][last] >= 0] if has_rule else []


def _is_busy(problem: Problem, decision: Decision) -> bool:
    assert decision.group is not None
    return is_busy(decision.group, problem.costs.records)


def _all_reduces(use: Use, native: tuple[int, ...], want: Want, axis: int) -> bool:
    """Return True if an activation's reshard along `axis` consists of all-reduces alone, forward and backward."""
    if use.source.is_param or not use.tensor.requires_grad:
        return True
    steps = [*transition(native, want[0]), *transition(want[1], gradient_layout(native))]
    return all(step.kind == "all_reduce" for step in steps if step.axis == axis) and want[0][axis] != PARTIAL
