"""Applies the policy for steps in which experts of a rank got more rows than the plan allows for; none is silent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...artifacts import Refusal, UserError
from ...launch import emit, rank
from ...ops.expert_limits import Limit
from ..module import ParallelModule

_LIMITS = {"warn": Limit.NONE, "stop": Limit.NONE, "rerun": Limit.PIECES, "drop": Limit.DROP}
POLICIES = tuple(_LIMITS)
_WHAT_FOLLOWS = {
    "warn": "the peak may be above what was promised",
    "rerun": "such layers are computed in pieces, and again in the backward, so that the peak holds",
    "drop": "the rows of the smallest weights are dropped",
}


class OverPlanned(Refusal):
    """Raised before an update if experts had more rows than planned; the weights are those of the previous step."""


class ImbalanceGate:
    """Checks before each update that a step's routing was within the plan, with one answer for all ranks of the replica.

    The factor of a layer is the largest number of rows that any rank sends or computes, divided by the even share. It is
    known before the rows are allocated; the step is judged after its backward, so that no rank waits for another inside a layer.

    warn: continue without dropping tokens, and emit a note whenever a factor is higher than any before. stop: raise
    `OverPlanned` on all ranks. rerun: a layer with too many rows is computed in pieces of the planned size, keeps only its
    order for the backward and is recomputed there; the result is the same. drop: the excess rows, those of the smallest
    weights, are left out. Adds two all-reduces of two numbers to a step, only in plans whose experts' rows depend on the data.
    """

    def __init__(self, policy: str) -> None:
        check_policy(policy)
        self.policy = policy
        self.limit = _LIMITS[policy]
        """The treatment of excess rows that the policy asks of the experts."""
        self.factor: float | None = None
        """The last step's largest factor over layers and ranks; None if no rows of this plan depend on the data."""
        self.dropped: float | None = None
        """The share of the last step's rows that was dropped, over layers and ranks; None if the policy never drops any."""
        self._highest = 0.0

    @property
    def told(self) -> dict[str, float]:
        """Return the entries that are added to a step's event."""
        found = {"expert_imbalance": self.factor, "expert_dropped": self.dropped}
        return {key: value for key, value in found.items() if value is not None}

    def lets_pass(self, module: ParallelModule, step: int) -> bool:
        """Return True, or raise `OverPlanned` if the policy says so; a collective call."""
        routed = module.communicator.routed
        if not routed.ever:
            return True
        over = routed.over()
        factors = {key: each.factor for key, each in routed.seen.items()}
        own = [max(factors.values(), default=0.0), max((factors[key] for key in over), default=0.0)]
        self.factor, beyond = _reduced(module, own, dist.ReduceOp.MAX)
        if self.policy == "drop":
            num_dropped, num_rows = _reduced(module, [routed.num_excess, routed.num_rows], dist.ReduceOp.SUM)
            self.dropped = num_dropped / num_rows if num_rows else 0.0
        routed.clear()
        if beyond > 0.0:
            self._judge(step, beyond, sorted(over, key=lambda key: -factors[key]), module.plan.expert_imbalance)
        return True

    def _judge(self, step: int, factor: float, layers: list[str], planned: float | str) -> None:
        where = f", on this rank in {layers[0]}" if layers else ""
        what = f"experts got {factor:.3g} × their even share of rows at step {step}{where}; the plan allows for {planned} ×"
        advice = (
            f"plan with --expert-imbalance {factor:.2f}, or pin the experts' split to their inner features, shard(f), whose rows "
            "routing does not change"
        )
        if self.policy == "stop":
            raise OverPlanned(f"{what}; the weights are those of the step before; {advice}")
        if factor > self._highest and rank() == 0:
            share = f", {100 * self.dropped:.2g} % of all" if self.dropped is not None else ""
            emit({"kind": "note", "text": f"{what}: {_WHAT_FOLLOWS[self.policy]}{share}; {advice}"})
        self._highest = max(self._highest, factor)


def check_policy(policy: str) -> None:
    """Raise `UserError` unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise UserError(f"on_imbalance must be one of {', '.join(POLICIES)}; got {policy!r}; choose one of these")


def _reduced(module: ParallelModule, own: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Return the numbers reduced by `op` over the ranks of the replica."""
    numbers = torch.tensor(own, dtype=torch.float64)
    if module.replicas.size > 1:
        numbers = numbers.to(module.device)
        with module.communicator.activity.waiting("the exchange of what experts were sent"):
            dist.all_reduce(numbers, op, group=module.replicas.inside)
    found: list[float] = numbers.tolist()
    return found
