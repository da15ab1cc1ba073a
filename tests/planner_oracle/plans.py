"""Enumerates the plans of one sharding of a small problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from tests.planner_oracle.backward import Backward
from tests.planner_oracle.fates import Fate, Kept
from tests.planner_oracle.forward import Forward
from tests.planner_oracle.pieces import Piece, Pieces
from tests.planner_oracle.seconds import Seconds
from tests.planner_oracle.sharding import Options, Part, Sharding, of_the_sharding
from trainwright.planner.model.offload_states import STATES_IN_WINDOW
from trainwright.planner.problem.problem import Decision, Problem, Source, Stored, Use, Want


class Oracle(Part):
    """Enumerates all plans of one sharding, each with its seconds and its peak."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        may_leave: Collection[Kept] = (),
        states_may_leave: Collection[Decision] = (),
        shared: Collection[tuple[Source, Want]] = (),
    ) -> None:
        super().__init__(Sharding(problem, options, shared))
        self.may_leave = may_leave
        self.states_may_leave = [d for d in states_may_leave if d.leaving_state_bytes[options[d]]]
        self.seconds, self.pieces = Seconds(self.sharding), Pieces(self.sharding)
        self.forward, self.backward = Forward(self.sharding), Backward(self.sharding)

    def plans(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds, peak bytes) of every way to keep and rederive."""
        if not all(self.sharding.is_possible(use, want) for use in self.problem.uses for want in self.wants[use]):
            return
        able = [d for d in self.problem.groups if d.group is not None and any(op.requires_grad for op in d.group.ops)]
        for counts in itertools.product(*(range(decision.count + 1) for decision in able)):
            reruns = dict(zip(able, counts))
            asked = [key for key in self.sharding.changed if self._needed(*key, reruns) > 0]
            for converts in itertools.product(*(range(math.ceil(self._needed(*key, reruns)) + 1) for key in asked)):
                fate = self._completed(Fate(reruns, dict(zip(asked, converts))))
                if fate is not None:
                    for leaving in self._offloads(fate):
                        yield self.seconds.of(leaving), self.peak_bytes(leaving)

    def may_share(self) -> list[tuple[Source, Want]]:
        """Return the parameters, with what is wanted of them, that it costs a gathered copy to share."""
        return self.sharding.may_share()

    def _offloads(self, fate: Fate) -> Iterator[Fate]:
        """Yield every way to offload, of what may leave, some of the instances that are not rederived."""
        open_ones = [key for key in self.may_leave if not isinstance(key, tuple) or key in self.sharding.changed]
        for counts in itertools.product(*(range(self._most_leaving(fate, key) + 1) for key in open_ones)):
            leaves = dict(zip(open_ones, counts))
            kept, copies = dict(fate.kept), dict(fate.copies)
            for key, num in leaves.items():
                if isinstance(key, Stored):
                    kept[key] = max(kept[key], num)
                elif isinstance(key, tuple):
                    copies[key] = max(copies.get(key, 0), num)
            for away in itertools.product(*(range(param.count + 1) for param in self.states_may_leave)):
                states = dict(zip(self.states_may_leave, away))
                yield Fate(fate.reruns, fate.converts, copies, kept, leaves, states)

    def _most_leaving(self, fate: Fate, key: Kept) -> int:
        if isinstance(key, tuple):
            return math.floor(key[0].count - fate.converts.get(key, 0))
        maker = key.source.decision if isinstance(key, Stored) else key
        again = 0 if isinstance(key, Stored) and self.sharding.is_passed_on(key) else fate.reruns.get(maker, 0)
        return maker.count - again

    def _needed(self, use: Use, want: Want, reruns: Mapping[Decision, int]) -> float:
        """Return in how many regions the backward needs the tensor as it is wanted."""
        most = 0.0
        for demand in use.demands:
            option = self.options[demand.decision]
            if want in demand.saves[option]:
                most = max(most, use.count)
            if want in demand.wants[option]:
                most = max(most, reruns.get(demand.decision, 0) * use.count / demand.decision.count)
        return most

    def _completed(self, fate: Fate) -> Fate | None:
        """Keep what is needed and not rederived, no more; None where something cannot be had."""
        for use, want in self.sharding.changed:
            needed = self._needed(use, want, fate.reruns)
            if needed:
                fate.copies[use, want] = math.ceil(needed - fate.converts[use, want])
        for stored in self.problem.stored:
            count, maker = stored.source.decision.count, stored.source.decision
            rederived = 0 if self.sharding.is_passed_on(stored) else fate.reruns.get(maker, 0)
            least = float(count) if stored.is_result(self.sharding.native_of(stored)) else 0.0
            if stored.own_saved:
                least = max(least, count - rederived)
            for use in stored.uses:
                made_again = rederived if use.inside else 0
                for needed in self._asked_of_native(use, fate):
                    least = max(least, (needed - made_again) * count / use.count)
            if least > count:
                return None
            fate.kept[stored] = least if stored.boundary else math.ceil(least)
        return fate

    def _asked_of_native(self, use: Use, fate: Fate) -> Iterator[float]:
        for want in self.wants[use]:
            if want[0] == self.sharding.native(use):
                yield self._needed(use, want, fate.reruns)
            else:
                yield fate.converts.get((use, want), 0)

    def peak_bytes(self, fate: Fate) -> float:
        """Return the largest of all moments of a step."""
        params = self.problem.params
        at = self.options
        static = self.problem.static_bytes + sum(d.count * (d.rest_bytes[at[d]] + d.state_bytes[at[d]]) for d in params)
        static -= sum(self.sharding.state_bytes(param) * num for param, num in fate.states.items())
        pieces = list(self.pieces.of(fate))
        moments = [self._update_bytes(fate) + self._window_bytes(fate), self._summing_bytes(fate, pieces)]
        for decision in self.problem.groups:
            moments.append(self.forward.moment_bytes(fate, pieces, decision))
            moments += [self.backward.moment_bytes(fate, pieces, decision, member) for member in range(decision.count)]
        return static + max(moments)

    def _update_bytes(self, fate: Fate) -> float:
        at = self.options
        trained = [decision for decision in self.problem.params if decision.tied[0].requires_grad]
        gradients = sum(decision.count * decision.rest_bytes[at[decision]] for decision in trained)
        results = [stored for stored in self.problem.stored if stored.is_result(self.sharding.native_of(stored))]
        held = sum(self.sharding.size(stored) * fate.kept[stored] for stored in results) + self.sharding.sums_bytes()
        return gradients + held + self._steps_bytes()

    @of_the_sharding
    def _steps_bytes(self) -> int:
        """Return the most that the optimizer holds: of one parameter, with what is left of the one before it."""
        owner = {tensor: decision for decision in self.problem.params for tensor in decision.tied}
        most = left = 0
        for tensor in self.problem.program.params:
            if tensor.is_trained:
                decision = owner[tensor]
                most = max(most, left + decision.step_bytes[self.options[decision]])
                left = decision.left_bytes[self.options[decision]]
        return most

    def _window_bytes(self, fate: Fate) -> float:
        sizes = [self.sharding.state_bytes(param) * num / param.count for param, num in fate.states.items()]
        return STATES_IN_WINDOW * max(sizes, default=0.0)

    def _summing_bytes(self, fate: Fate, pieces: list[Piece]) -> float:
        """Return the most that there is while a sum that the caller holds is made; 0 without any."""
        most = max(decision.summing_bytes[self.options[decision]] for decision in self.problem.groups)
        summed = [stored for stored in self.problem.stored if stored.held]
        most += sum(self.sharding.size(s) * (1 - fate.kept[s] / s.source.decision.count) for s in summed) if most else 0
        return most + sum(piece.kept_bytes for piece in pieces) if most else 0.0
