"""The policies for a step in which a rank was sent more rows of experts than the plan allows for: none is silent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...artifacts import Refusal, UserError
from ...launch import emit, rank
from ..module import ParallelModule

POLICIES = ("warn", "stop")


class OverPlanned(Refusal):
    """Training stopped before an update, for experts had more rows than planned; the weights are those of the step before."""


class ImbalanceGate:
    """Says before each update whether a step's routing was within the plan, the same on every rank of the replica.

    The factor of a layer is the most rows that any rank's experts get, divided by their even share. It is known before the
    rows are allocated; whether a step goes over is judged after its backward, where no rank waits for another inside a layer.

    warn: go on, no token is dropped, and say so whenever a factor is higher than any before. stop: raise `OverPlanned` on all
    ranks. Adds an all-reduce of two numbers to a step, of plans alone whose experts' rows depend on the data.
    """

    def __init__(self, policy: str) -> None:
        check_policy(policy)
        self.policy = policy
        self.factor: float | None = None
        """The last step's, the largest of all layers and ranks; None: no rows of this plan depend on the data."""
        self._highest = 0.0

    def lets_pass(self, module: ParallelModule, step: int) -> bool:
        """Return True, or raise as the policy says; a collective call."""
        if not module.communicator.routed.ever:
            return True
        seen, over = module.communicator.routed.seen, module.communicator.routed.over()
        factors = {key: each.factor for key, each in seen.items()}
        own = torch.tensor(
            [max(factors.values(), default=0.0), max((factors[key] for key in over), default=0.0)], dtype=torch.float64
        )
        self.factor, beyond = _largest(module, own)
        module.communicator.routed.clear()
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
            emit({"kind": "note", "text": f"{what}: the peak may be above what was promised; {advice}"})
        self._highest = max(self._highest, factor)


def check_policy(policy: str) -> None:
    """Raise `UserError` for what is no policy."""
    if policy not in POLICIES:
        raise UserError(f"on_imbalance must be {' or '.join(POLICIES)}; got {policy!r}; choose one of these")


def _largest(module: ParallelModule, own: torch.Tensor) -> tuple[float, float]:
    if module.replicas.size > 1:
        own = own.to(module.device)
        with module.communicator.activity.waiting("the exchange of what experts were sent"):
            dist.all_reduce(own, dist.ReduceOp.MAX, group=module.replicas.inside)
    factor, beyond = own.tolist()
    return factor, beyond
