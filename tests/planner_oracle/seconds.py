"""Seconds of a step: ops, changes of layout, reruns, and what transfers add."""

from __future__ import annotations

from tests.planner_oracle.fates import Fate
from tests.planner_oracle.sharding import Part, of_the_sharding
from trainwright.planner.model.offload import OFFLOAD_EPSILON_S
from trainwright.planner.model.offload_states import STATE_EPSILON_S
from trainwright.planner.model.recompute import RERUN_EPSILON_S
from trainwright.planner.problem.problem import Use, Want


class Seconds(Part):
    """Adds up the seconds of a step."""

    def of(self, fate: Fate) -> float:
        """Add up one step."""
        total = sum(decision.option_s(self.options[decision]) for decision in self.problem.decisions)
        for use in self.problem.uses:
            for want in self.wants[use]:
                total += self.sharding.num_paid(use, want) * sum(self._there_and_back_s(use, want))
                total += fate.converts.get((use, want), 0) * self._again_s(use, want)
        for decision, count in fate.reruns.items():
            total += count * (decision.rerun_s[self.options[decision]] + RERUN_EPSILON_S)
        return total + self._transfer_s(fate) + self._states_s(fate)

    @of_the_sharding
    def _there_and_back_s(self, use: Use, want: Want) -> tuple[float, float]:
        """Return the seconds of a change of layout in the forward and in the backward."""
        native = self.sharding.native(use)
        back = want[1] if use.tensor.requires_grad else native
        return self.costs.edge_s(use.source.tensor, native, want[0], back)

    @of_the_sharding
    def _again_s(self, use: Use, want: Want) -> float:
        return self.costs.move_s(use.source.tensor, self.sharding.native(use), want[0]) + RERUN_EPSILON_S

    def _states_s(self, fate: Fate) -> float:
        """Return the seconds that moving optimizer states in and out, one after the other, adds to the update."""
        tier = self.costs.tier
        if tier is None:
            return 0.0
        num = sum(fate.states.values())
        moved = sum(self.sharding.state_bytes(param) * count for param, count in fate.states.items())
        taken_s = moved / tier.write_bytes_per_s + moved / tier.read_bytes_per_s + 2 * num * tier.latency_s
        update_s = sum(param.count * param.backward_s[self.options[param]] for param in self.problem.params)
        return taken_s - tier.overlap * min(taken_s, update_s) + num * STATE_EPSILON_S

    def _transfer_s(self, fate: Fate) -> float:
        """Return the seconds that transfers add, out beside the forward and back beside the backward."""
        tier = self.costs.tier
        if tier is None:
            return 0.0
        forward_s = backward_s = 0.0
        for decision in self.problem.groups:
            option = self.options[decision]
            forward_s += decision.count * (decision.forward_s[option] + decision.inner_comm_s[option][0])
            backward_s += decision.count * (decision.backward_s[option] + decision.inner_comm_s[option][1])
            backward_s += fate.reruns.get(decision, 0) * (decision.rerun_s[option] + RERUN_EPSILON_S)
        for use in self.problem.uses:
            for want in self.wants[use]:
                there_s, back_s = self._there_and_back_s(use, want)
                again_s = fate.converts.get((use, want), 0) * self._again_s(use, want)
                forward_s += self.sharding.num_paid(use, want) * there_s
                backward_s += self.sharding.num_paid(use, want) * back_s + again_s
        num = sum(fate.leaves.values())
        moved = sum(self.sharding.leaving_bytes(key) * count for key, count in fate.leaves.items())
        out_s = moved / tier.write_bytes_per_s + num * tier.latency_s
        in_s = moved / tier.read_bytes_per_s + num * tier.latency_s
        hidden_s = tier.overlap * (min(out_s, forward_s) + min(in_s, backward_s))
        return out_s + in_s - hidden_s + num * OFFLOAD_EPSILON_S
