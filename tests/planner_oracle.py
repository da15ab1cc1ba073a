"""An oracle of the joint problem without any linear program: every fate of every value, added up one by one.

Seconds and bytes of the single options are the problem's own; what is checked is how they are put together, what may be
rederived from what, and that the solver finds the best of all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright.planner.model.offload import IN_FLIGHT, OFFLOAD_EPSILON_S
from trainwright.planner.model.offload_states import STATE_EPSILON_S, STATES_IN_WINDOW
from trainwright.planner.model.recompute import RERUN_EPSILON_S
from trainwright.planner.model.sharding import has_one_want
from trainwright.planner.problem.problem import Decision, Problem, Source, Stored, Use, Want, readers_end
from trainwright.program.layout import Layout
from trainwright.program.program import Tensor
from trainwright.program.transition import gradient_layout

Options = Mapping[Decision, int]
Kept = Stored | Decision | tuple[Use, Want]
"""What may be offloaded: a group's output, what it keeps inside, a converted copy."""


@dataclass
class Fate:
    """How many instances of what rerun, convert again, keep."""

    reruns: dict[Decision, int]
    converts: dict[tuple[Use, Want], int]
    copies: dict[tuple[Use, Want], int] = field(default_factory=dict)
    kept: dict[Stored, float] = field(default_factory=dict)
    leaves: dict[Kept, int] = field(default_factory=dict)
    """How many instances of what is kept are offloaded."""
    states: dict[Decision, int] = field(default_factory=dict)
    """Of how many instances of a parameter the optimizer's states are offloaded."""


@dataclass(frozen=True)
class Piece:
    """Memory that may be kept: by which instances, between which groups, how much of it, and one instance's need."""

    owner: Decision | Use
    members: Collection[int]
    made: Mapping[int, float]
    """From which group on how many bytes are there."""
    last: int
    needed_bytes: float
    passed_on: bool = False
    first: int = -1
    """The group whose backward is the first to need it."""
    away_bytes: float = 0.0
    """Of one instance's need, what comes back only then."""
    made_at: float = 0.0
    """The moment of the region's reruns at which it is made: that of group i is i, what is converted for it comes before."""
    read_until: float = 0.0
    """The last moment before whose end it is still to be read."""
    again_bytes: float = 0.0
    """What is made again, of one instance."""
    freed_by: tuple[Decision, int] | None = None
    """The group, and the op in it, whose backward is the last to need it."""

    @property
    def kept_bytes(self) -> float:
        return sum(self.made.values())

    def own_bytes(self, member: int, position: int, count: int) -> float:
        """Return what the instances of the class hold while `member` runs the backward of the group at `position`."""
        is_last, is_done = member == count - 1, self.last > position
        needed = max(0.0, self.needed_bytes - (self.away_bytes if self.first < position else 0.0))
        if member not in self.members:
            return self.kept_bytes if is_last else 0.0
        if is_last:
            return max(self.kept_bytes, needed) - (self.needed_bytes if is_done else 0.0)
        return 0.0 if is_done else needed

    def beside(self, moment: float, position: int, count: int, is_result: bool) -> float:
        """Return what the last instance has at a moment of its reruns, less what it has where the group at `position` begins."""
        if moment > self.read_until:
            return 0.0
        found = 0.0 if moment <= self.made_at or is_result else self.again_bytes
        if count - 1 in self.members and self.last <= position:
            found += self.kept_bytes - self.own_bytes(count - 1, position, count)
            found += 0.0 if self.first < position else self.away_bytes
        return found


def _of_the_sharding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method whose result depends on the sharding alone; each oracle calls it once for the same arguments."""
    method.is_of_the_sharding = True  # type: ignore[attr-defined]
    return method


class Oracle:
    """All plans of one sharding of a small problem."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        may_leave: Collection[Kept] = (),
        states_may_leave: Collection[Decision] = (),
        shared: Collection[tuple[Source, Want]] = (),
    ) -> None:
        self.problem, self.options, self.may_leave = problem, options, may_leave
        self.states_may_leave = [d for d in states_may_leave if d.leaving_state_bytes[options[d]]]
        self.stored_of = {use: stored for stored in problem.stored for use in stored.uses}
        self.wants = {use: self._wants(use) for use in problem.uses}
        self.shared = {*shared, *(key for key in self.read_twice() if self._native(self._uses(key[0])[0]) == key[1][0])}
        self.changed = [(use, want) for use in problem.uses for want in self.wants[use] if self._native(use) != want[0]]
        for name, member in vars(Oracle).items():
            if getattr(member, "is_of_the_sharding", False):
                setattr(self, name, functools.cache(getattr(self, name)))

    def plans(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds, peak bytes) of every way to keep and rederive."""
        if not all(self._is_possible(use, want) for use in self.problem.uses for want in self.wants[use]):
            return
        able = [d for d in self.problem.groups if d.group is not None and any(op.requires_grad for op in d.group.ops)]
        for counts in itertools.product(*(range(decision.count + 1) for decision in able)):
            reruns = dict(zip(able, counts))
            asked = [key for key in self.changed if self._needed(*key, reruns) > 0]
            for converts in itertools.product(*(range(math.ceil(self._needed(*key, reruns)) + 1) for key in asked)):
                fate = self._completed(Fate(reruns, dict(zip(asked, converts))))
                if fate is not None:
                    for leaving in self._offloads(fate):
                        yield self.seconds(leaving), self.peak_bytes(leaving)

    def _offloads(self, fate: Fate) -> Iterator[Fate]:
        """Every way to offload, of what may leave, some of the instances that are not rederived."""
        open_ones = [key for key in self.may_leave if not isinstance(key, tuple) or key in self.changed]
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
        again = 0 if isinstance(key, Stored) and self._is_passed_on(key) else fate.reruns.get(maker, 0)
        return maker.count - again

    # What several regions read

    def read_twice(self) -> list[tuple[Source, Want]]:
        """Return the parameters, with what is wanted of them, that one copy may serve for several regions."""
        sources = dict.fromkeys(use.source for use in self.problem.uses if use.source.is_param)
        asked = [
            (source, want)
            for source in sources
            for want in dict.fromkeys(want for use in self._uses(source) for want in self.wants[use])
        ]
        return [key for key in asked if key[0].decision.count == 1 and len(self._regions(*key)) > 1]

    def may_share(self) -> list[tuple[Source, Want]]:
        """Return those that it costs a gathered copy to share; the others are."""
        return [key for key in self.read_twice() if key not in self.shared]

    def _uses(self, source: Source) -> list[Use]:
        return [use for use in self.problem.uses if use.source is source]

    def _readings(self, source: Source) -> list[tuple[int, int]]:
        """The regions and groups that read `source`, whatever they want of it."""
        return [
            (use.region_class.members[member].index, demand.position)
            for use in self._uses(source)
            for member in use.members
            for demand in use.demands
        ]

    def _regions(self, source: Source, want: Want) -> set[int]:
        asking = [use for use in self._uses(source) if want in self.wants[use]]
        return {use.region_class.members[member].index for use in asking for member in use.members}

    @_of_the_sharding
    def _num_paid(self, use: Use, want: Want) -> int:
        """How often a use pays for a want: of what is shared, the first reader alone, once."""
        if (use.source, want) not in self.shared:
            return use.count
        first = min(self._regions(use.source, want))
        return int(any(use.region_class.members[member].index == first for member in use.members))

    @_of_the_sharding
    def _copies_bytes(self, decision: Decision) -> float:
        """What shared copies hold while the group runs forward, in whichever instance."""
        costs, total = self.problem.costs, 0.0
        for source, want in self.shared:
            native, readings = self._native(self._uses(source)[0]), self._readings(source)
            places = [(member.index, decision.group.index) for member in decision.region_class.members]
            if min(readings) in places:
                total += costs.change_bytes(source.tensor, native, want[0])
            elif native != want[0] and any(min(readings) < place <= max(readings) for place in places):
                total += costs.block_bytes(source.tensor, want[0])
        return total

    @_of_the_sharding
    def _summed_bytes(self, region: int, position: int) -> float:
        """What sums of gradients that wait for another reader take, in place of gradients at rest."""
        costs, total = self.problem.costs, 0.0
        for source, want in self.shared:
            readings, rest = self._readings(source), self._native(self._uses(source)[0])
            if source.tensor.requires_grad and min(readings) <= (region, position) < max(readings):
                total += costs.block_bytes(source.tensor, want[1]) - costs.block_bytes(source.tensor, rest)
        return total

    @_of_the_sharding
    def _brought_back_bytes(self, decision: Decision, place: int) -> int:
        """The most that bringing back a gradient holds, of those that the backward of the group's op at `place` completes."""
        most = 0
        for member in (0, decision.count - 1):
            waiting = 0
            for use in reversed([use for use in self._brought_by(decision, place) if member in use.members]):
                if back := self._back_bytes(use):
                    most = max(most, back + waiting)
                if use.demands[0].decision is decision:
                    waiting += sum(more if has_one_want(use) else max(0, more) for more in self._brought_bytes(use))
        for source, want in self.shared if place == decision.backwards[-1].place else ():
            first = min(self._readings(source))
            here = any(first == (member.index, decision.group.index) for member in decision.region_class.members)
            if here and source.tensor.requires_grad:
                due = gradient_layout(self._native(self._uses(source)[0]))
                most = max(most, self.problem.costs.change_bytes(source.tensor, want[1], due))
        return most

    def _brought_by(self, decision: Decision, place: int) -> list[Use]:
        """Return what the group reads of which no op of a later group, or before `place` in it, still gives a part."""
        found = []
        for use in self._read_by(decision):
            [own] = [demand for demand in use.demands if demand.decision is decision]
            if own.place == place and (own is use.demands[0] or not has_one_want(use)):
                found.append(use)
        return found

    @_of_the_sharding
    def _brought_before(self, decision: Decision, place: int) -> int:
        """Return what gradients that ops behind `place` made hold more since they were brought back."""
        total, ends = 0, {0, decision.count - 1}
        for use in self._read_by(decision):
            [own] = [demand for demand in use.demands if demand.decision is decision]
            if own.place > place and own is use.demands[0]:
                is_known = has_one_want(use) and ends <= {*use.members}
                total += sum(more if is_known else max(0, more) for more in self._brought_bytes(use))
        return total

    def _brought_bytes(self, use: Use) -> Iterator[int]:
        """Yield, for each want, the bytes that a gradient takes, once brought back, beyond those that the backward made of it."""
        due, costs, first = gradient_layout(self._native(use)), self.problem.costs, use.demands[0]
        stays = any(use.tensor in op.shares for op in first.decision.backwards if op.place == first.place)
        for want in self.wants[use] if use.tensor.requires_grad else ():
            if want[1] != due and (use.source, want) not in self.shared:
                own = 0 if stays else costs.block_bytes(use.source.tensor, want[1])
                yield costs.copy_bytes(use.source.tensor, want[1], due) - own

    # What is asked for

    def _native(self, use: Use):
        return use.source.natives[self.options[use.source.decision]]

    def _wants(self, use: Use) -> dict[Want, None]:
        return {want: None for demand in use.demands for want in demand.wants[self.options[demand.decision]]}

    def _is_possible(self, use: Use, want: Want) -> bool:
        native = self._native(use)
        back = want[1] if use.tensor.requires_grad else native
        return self.problem.costs.edge_s(use.source.tensor, native, want[0], back) is not None

    def _needed(self, use: Use, want: Want, reruns: Mapping[Decision, int]) -> float:
        """In how many regions the backward needs the tensor as it is wanted."""
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
        for use, want in self.changed:
            needed = self._needed(use, want, fate.reruns)
            if needed:
                fate.copies[use, want] = math.ceil(needed - fate.converts[use, want])
        for stored in self.problem.stored:
            count, maker = stored.source.decision.count, stored.source.decision
            if self._is_passed_on(stored):
                rederived = 0
            else:
                rederived = fate.reruns.get(maker, 0)
            least = float(count) if stored.is_result(self._native_of(stored)) else 0.0
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
            if want[0] == self._native(use):
                yield self._needed(use, want, fate.reruns)
            else:
                yield fate.converts.get((use, want), 0)

    def _is_passed_on(self, stored: Stored) -> bool:
        return stored.boundary or stored.held

    # Seconds

    def seconds(self, fate: Fate) -> float:
        """Add up one step."""
        total = sum(decision.option_s(self.options[decision]) for decision in self.problem.decisions)
        for use in self.problem.uses:
            for want in self.wants[use]:
                total += self._num_paid(use, want) * sum(self._there_and_back_s(use, want))
                total += fate.converts.get((use, want), 0) * self._again_s(use, want)
        for decision, count in fate.reruns.items():
            total += count * (decision.rerun_s[self.options[decision]] + RERUN_EPSILON_S)
        return total + self._transfer_s(fate) + self._states_s(fate)

    @_of_the_sharding
    def _there_and_back_s(self, use: Use, want: Want) -> tuple[float, float]:
        """Return the seconds of a change of layout in the forward and in the backward."""
        native = self._native(use)
        back = want[1] if use.tensor.requires_grad else native
        return self.problem.costs.edge_s(use.source.tensor, native, want[0], back)

    @_of_the_sharding
    def _again_s(self, use: Use, want: Want) -> float:
        return self.problem.costs.move_s(use.source.tensor, self._native(use), want[0]) + RERUN_EPSILON_S

    def _states_s(self, fate: Fate) -> float:
        """What moving optimizer states in and out, one after the other, adds to the update."""
        tier = self.problem.costs.tier
        if tier is None:
            return 0.0
        num = sum(fate.states.values())
        moved = sum(self._state_bytes(param) * count for param, count in fate.states.items())
        taken_s = moved / tier.write_bytes_per_s + moved / tier.read_bytes_per_s + 2 * num * tier.latency_s
        update_s = sum(param.count * param.backward_s[self.options[param]] for param in self.problem.params)
        return taken_s - tier.overlap * min(taken_s, update_s) + num * STATE_EPSILON_S

    def _state_bytes(self, param: Decision) -> int:
        return param.leaving_state_bytes[self.options[param]]

    def _transfer_s(self, fate: Fate) -> float:
        """What moving things out beside the forward, and back beside the backward, adds."""
        tier = self.problem.costs.tier
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
                forward_s += self._num_paid(use, want) * there_s
                backward_s += self._num_paid(use, want) * back_s + again_s
        num = sum(fate.leaves.values())
        moved = sum(self._leaving_bytes(key) * count for key, count in fate.leaves.items())
        out_s = moved / tier.write_bytes_per_s + num * tier.latency_s
        in_s = moved / tier.read_bytes_per_s + num * tier.latency_s
        hidden_s = tier.overlap * (min(out_s, forward_s) + min(in_s, backward_s))
        return out_s + in_s - hidden_s + num * OFFLOAD_EPSILON_S

    def _leaving_bytes(self, key: Kept) -> int:
        """One instance's."""
        if isinstance(key, tuple):
            return self.problem.costs.block_bytes(key[0].source.tensor, key[1][0])
        return self._size(key) if isinstance(key, Stored) else key.inner_bytes[self.options[key]]

    def _in_flight_bytes(self, fate: Fate, decision: Decision) -> float:
        """What may be on its way while the class of a group runs."""
        most = 0.0
        for key, num in fate.leaves.items():
            owner = key[0] if isinstance(key, tuple) else key.source.decision if isinstance(key, Stored) else key
            if owner.region_class is decision.region_class:
                most = max(most, IN_FLIGHT * self._leaving_bytes(key) * num / owner.count)
        return most

    # Bytes

    def peak_bytes(self, fate: Fate) -> float:
        """Return the largest of all moments of a step."""
        params = self.problem.params
        at = self.options
        static = self.problem.static_bytes + sum(d.count * (d.rest_bytes[at[d]] + d.state_bytes[at[d]]) for d in params)
        static -= sum(self._state_bytes(param) * num for param, num in fate.states.items())
        pieces = list(self._pieces(fate))
        moments = [self._update_bytes(fate) + self._window_bytes(fate), self._summing_bytes(fate, pieces)]
        for decision in self.problem.groups:
            moments.append(self._forward_bytes(fate, pieces, decision))
            moments += [self._backward_bytes(fate, pieces, decision, member) for member in range(decision.count)]
        return static + max(moments)

    def _update_bytes(self, fate: Fate) -> float:
        at = self.options
        trained = [decision for decision in self.problem.params if decision.tied[0].requires_grad]
        gradients = sum(decision.count * decision.rest_bytes[at[decision]] for decision in trained)
        results = [stored for stored in self.problem.stored if stored.is_result(self._native_of(stored))]
        held = sum(self._size(stored) * fate.kept[stored] for stored in results) + self._sums_bytes()
        return gradients + held + max((decision.step_bytes[at[decision]] for decision in trained), default=0)

    def _window_bytes(self, fate: Fate) -> float:
        sizes = [self._state_bytes(param) * num / param.count for param, num in fate.states.items()]
        return STATES_IN_WINDOW * max(sizes, default=0.0)

    @_of_the_sharding
    def _sums_bytes(self) -> int:
        """Return what the caller holds beside outputs that are partial."""
        return sum(decision.result_bytes[self.options[decision]] for decision in self.problem.groups)

    def _summing_bytes(self, fate: Fate, pieces: list[Piece]) -> float:
        """Return the most that there is while one of these sums is made; 0 without any."""
        most = max(decision.summing_bytes[self.options[decision]] for decision in self.problem.groups)
        summed = [stored for stored in self.problem.stored if stored.held]
        most += sum(self._size(s) * (1 - fate.kept[s] / s.source.decision.count) for s in summed) if most else 0
        return most + sum(piece.kept_bytes for piece in pieces) if most else 0.0

    def _native_of(self, stored: Stored) -> Layout:
        return stored.source.natives[self.options[stored.source.decision]]

    @_of_the_sharding
    def _size(self, stored: Stored) -> int:
        source = stored.source
        return self.problem.costs.block_bytes(source.tensor, source.natives[self.options[source.decision]])

    def _pieces(self, fate: Fate) -> Iterator[Piece]:
        """Yield all that is kept, and what a backward waits for."""
        for stored, count in fate.kept.items():
            decision = stored.source.decision
            last = -1 if stored.is_result(self._native_of(stored)) else stored.position
            away = self._size(stored) * fate.leaves.get(stored, 0)
            made = {decision.group.index: self._size(stored) * count - away}
            needed, passed_on = self._present_bytes(stored), self._is_passed_on(stored)
            if (
                decision.count == 1
            ):  # what is only derived from is released too; of several, others may still need theirs
                needed = max(needed, *made.values())
            first = self._first_reader(stored)
            members = range(decision.count)
            again = self._size(stored) * fate.reruns.get(decision, 0) / decision.count
            yield Piece(
                decision, members, made, last, needed, passed_on, first, away / decision.count,
                *self._when_remade(stored), again, stored.freed_by,
            )  # fmt: skip
        for decision in self.problem.groups:
            inner = decision.inner_bytes[self.options[decision]]
            if inner:
                here, away = decision.group.index, fate.leaves.get(decision, 0)
                num = decision.count - fate.reruns.get(decision, 0) - away
                members = range(decision.count)
                moments = [decision.inner_until, *(_moment(decision, tensor) for tensor in decision.inner_tensors)]
                share, when = inner * away / len(members), _before(min(moments), 1)
                yield Piece(decision, members, {here: inner * num}, here, inner, False, here, share, when, when)
        for use in dict.fromkeys(use for use, _ in self.changed):
            yield self._copies(fate, use)

    def _copies(self, fate: Fate, use: Use) -> Piece:
        converted = self._converted(use)
        made: dict[int, float] = {}
        away = 0.0
        for want, (size, first) in converted.items():
            leaving = fate.leaves.get((use, want), 0)
            made[first] = made.get(first, 0.0) + size * (fate.copies.get((use, want), 0) - leaving)
            away += size * leaving / use.count
        readers = [d.position for d in use.demands if any(d.saves)] or [0]
        needed = sum(size for want, (size, _) in converted.items() if _is_saved(use, want))
        again = sum(size * fate.converts.get((use, want), 0) / use.count for want, (size, _) in converted.items())
        when = _before(min(d.until for d in use.demands), 3), max(d.position for d in use.demands) - 0.5
        end = readers_end([d for d in use.demands if any(d.saves)] or use.demands)
        return Piece(use, use.members, made, min(readers), needed, False, max(readers), away, *when, again, end)

    @_of_the_sharding
    def _when_remade(self, stored: Stored) -> tuple[float, float]:
        """Return the moment of the reruns that makes an output again, and until when it is still to be read."""
        own = _moment(stored.source.decision, stored.source.tensor)
        readers = [demand.position for use in stored.uses if use.inside for demand in use.demands]
        return own, max([own, *(position - 0.5 for position in readers)])

    @_of_the_sharding
    def _converted(self, use: Use) -> dict[Want, tuple[int, int]]:
        """Return each want that asks for another layout, with the size of a copy and from which group on it is there."""
        return {
            want: (
                self.problem.costs.block_bytes(use.source.tensor, want[0]),
                min(d.position for d in use.demands if any(want in found for found in d.wants)) + 1,
            )
            for other, want in self.changed
            if other is use
        }

    @_of_the_sharding
    def _first_reader(self, stored: Stored) -> int:
        inside = [d.position for use in stored.uses if use.inside for d in use.demands if any(d.saves)]
        own = [stored.source.decision.group.index] if stored.own_saved else []
        return max([*inside, *own], default=stored.position)

    @_of_the_sharding
    def _present_bytes(self, stored: Stored) -> int:
        """What one instance takes where the backward needs it as it was made."""
        needed = self._size(stored) if stored.own_saved else 0
        for use in stored.uses:
            native = self._native(use)
            if any(want[0] == native and _is_saved(use, want) for want in self.wants[use]):
                needed = max(needed, self._size_of(use))
        return needed

    def _backward_bytes(self, fate: Fate, pieces: list[Piece], decision: Decision, member: int) -> float:
        position, own = decision.group.index, decision.region_class
        region = own.members[member].index
        total = self._momentary_bytes(fate, pieces, decision, member) + self._sums_bytes()
        for piece in pieces:
            if piece.owner.region_class is own and not piece.passed_on:
                total += piece.own_bytes(member, position, own.multiplicity)
            else:
                members = piece.owner.region_class.members
                num = sum(other.index <= region for other in members)
                num -= piece.owner.region_class is own and piece.last > position
                num = len(members) if piece.last < 0 else num
                total += piece.kept_bytes * num / len(members)
        total += self._in_flight_bytes(fate, decision) + self._back_again_bytes(fate, decision, region)
        total += sum(self._size_of(use) for use in self._waiting(decision))
        total += self._summed_bytes(region, position)
        loss = self.problem.program.loss
        if not any(loss in op.outputs for op in decision.group.ops):
            total += loss.dtype.itemsize  # the gradient at which the backward begins
        return total + self._grads_in(region, position)

    @_of_the_sharding
    def _grads_in(self, region: int, position: int) -> float:
        """Return the bytes of the parameters' gradients that are there already."""
        total = 0.0
        for param in self.problem.params:
            if param.tied[0].requires_grad:
                readers = [use for use in self.problem.uses if use.source.decision is param]
                places = [
                    (use.region_class.members[index].index, max(demand.position for demand in use.demands))
                    for use in readers
                    for index in use.members
                ]
                num = min(param.count, sum(place > (region, position) for place in places))
                total += num * param.rest_bytes[self.options[param]]
        return total

    def _momentary_bytes(self, fate: Fate, pieces: list[Piece], decision: Decision, member: int) -> float:
        """The most that kernels, changes of their gradients' layouts, or the reruns before them hold."""
        option = self.options[decision]
        moments = [0.0]
        for op in decision.backwards:
            before = self._brought_before(decision, op.place)
            running = op.running_bytes[option] + before - self._given_too(decision, op.place)
            moments.append(running - self._released_bytes(pieces, decision, op.place + 1))
            if brought_back := self._brought_back_bytes(decision, op.place):
                released = self._released_bytes(pieces, decision, op.place)
                moments.append(op.made_bytes[option] + before + brought_back - released)
        of_class = [other for other in self.problem.groups if other.region_class is decision.region_class]
        if decision is of_class[-1]:
            is_last = member == decision.count - 1
            for moment, held, use in self._rerun_bytes(fate, of_class, is_last):
                beside = self._beside if is_last else self._not_yet_made
                moments.append(decision.given_bytes[option] + held + beside(fate, pieces, decision, moment, use))
        return float(max(moments))

    @_of_the_sharding
    def _given_too(self, decision: Decision, place: int) -> float:
        """Return what the group is given that waits for another one in the same memory, handed to both by a sum."""
        sources = [
            source for source in dict.fromkeys(use.source for use in self._gradients()) if source.decision is decision
        ]
        if len(sources) != 1 or sources[0].tensor not in decision.group.ops[place].outputs:
            return 0.0
        uses: list[Use] = []
        for member in (decision.region_class.members[0], decision.region_class.members[-1]):
            own = self._reads(sources[0], member.index)
            if len(own) != 1:
                return 0.0
            here, (at, use) = (member.index, decision.group.index), own[0]
            reader = next(demand.decision for demand in use.demands if demand.position == at[1])
            shares = next((op.shares for op in reader.backwards if use.tensor in op.shares), frozenset())
            others = [
                reads[-1][1]
                for other in self._gradients()
                for made, _ in other.reaches()
                if (made, other.source.decision.group.index) < here and other.tensor in shares - {use.tensor}
                if (reads := self._reads(other.source, made))[-1][0] == at
                and all(seen <= here for seen, _ in reads[:-1])
            ]
            if not others:
                return 0.0
            uses += [use, others[0]]
        if not all(map(has_one_want, uses)):
            return 0.0
        kept = [all(want[1] == gradient_layout(self._native(use)) for want in self.wants[use]) for use in uses]
        return min(self._size_of(use) * is_kept for use, is_kept in zip(uses, kept))

    def _gradients(self) -> list[Use]:
        return [use for use in self.problem.uses if not use.source.is_param and use.tensor.requires_grad]

    def _reads(self, source: Source, made: int) -> list[tuple[tuple[int, int], Use]]:
        """Return where the instance of a tensor that a region made is read, in order, and by which use."""
        found = [
            ((region, demand.position), use)
            for use in self._gradients()
            for by, region in use.reaches()
            if use.source is source and by == made
            for demand in use.demands
        ]
        return sorted(found, key=lambda read: read[0])

    def _not_yet_made(
        self, fate: Fate, pieces: list[Piece], decision: Decision, moment: float, use: Use | None
    ) -> float:
        """Return the negative bytes of what the first instance makes again at a moment of its reruns, or later."""
        if use is not None and not has_one_want(use):
            return 0.0
        total, position = 0.0, decision.group.index
        for piece in pieces:
            is_own = piece.owner.region_class is decision.region_class and not piece.passed_on and 0 in piece.members
            if is_own and piece.last <= position and (moment <= piece.made_at or piece.owner is use):
                again = self._num_again(fate, piece.owner)
                total -= piece.own_bytes(0, position, decision.count) if again else 0.0
        return total

    def _num_again(self, fate: Fate, owner: Decision | Use) -> float:
        if isinstance(owner, Decision):
            return fate.reruns.get(owner, 0)
        return sum(num for (use, _), num in fate.converts.items() if use is owner)

    def _beside(self, _: Fate, pieces: list[Piece], decision: Decision, moment: float, use: Use | None) -> float:
        """Return what the last instance has beside a rerun, less what the last group's backward begins with."""
        own = [piece for piece in pieces if piece.owner.region_class is decision.region_class and not piece.passed_on]
        position, count = decision.group.index, decision.count
        return sum(piece.beside(moment, position, count, piece.owner is use) for piece in own)

    def _rerun_bytes(
        self, fate: Fate, of_class: list[Decision], is_last: bool
    ) -> Iterator[tuple[float, float, Use | None]]:
        """Yield (moment of a rerun, bytes that it holds for a moment, what it converts).

        The first of several instances is rerun if any is. Of it a tensor that is converted counts too if nothing keeps it.
        """
        for other in of_class:
            sizes = other.remade_bytes if is_last else other.rerun_bytes
            num = fate.reruns.get(other, 0)
            share = num / other.count if is_last else min(1, num)
            if share or is_last:
                yield other.group.index, share * sizes[self.options[other]], None
        held: dict[Use, float] = {}
        for (use, want), num in fate.converts.items():
            is_here = use.region_class is of_class[-1].region_class and (is_last or 0 in use.members)
            if is_here:
                share = num / use.count if is_last or not has_one_want(use) else min(1, num)
                held[use] = held.get(use, 0.0) + share * self._converted_bytes(use, want, is_last)
        for use, size in held.items():
            if size or is_last:
                yield _before(min(demand.until for demand in use.demands), 2), size, use

    @_of_the_sharding
    def _converted_bytes(self, use: Use, want: Want, is_last: bool) -> float:
        stored = self.stored_of.get(use)
        size = self.problem.costs.change_bytes(use.source.tensor, self._native(use), want[0])
        is_kept = is_last or stored is None or not use.inside or stored.own_saved or stored.boundary or stored.held
        return size if is_kept else size + self._size_of(use)

    def _released_bytes(self, pieces: list[Piece], decision: Decision, place: int) -> float:
        """Return the bytes that a group saved and has released once its ops from `place` on have run backward."""
        ends = {0, decision.region_class.multiplicity - 1}
        option = self.options[decision]
        total = sum(sizes[option] for at, sizes in decision.inner_freed.items() if at >= place)
        return total + sum(
            piece.needed_bytes
            for piece in pieces
            if piece.owner.region_class is decision.region_class and not piece.passed_on and piece.freed_by is not None
            if piece.freed_by[0] is decision and piece.freed_by[1] >= place and ends <= {*piece.members}
        )

    def _back_again_bytes(self, fate: Fate, decision: Decision, region: int) -> float:
        """Of what other regions read and is offloaded: what this region's backward needs is there."""
        total = 0.0
        for stored, num in fate.leaves.items():
            if not isinstance(stored, Stored) or not stored.boundary:
                continue
            maker = stored.source.decision
            for member in maker.region_class.members:
                needing = [member.index] if stored.own_saved else []
                needing += [
                    reader for use in stored.uses for made, reader in self._made_and_read(use) if made == member.index
                ]
                released = member.index == region and stored.position > decision.group.index
                there = min(needing, default=member.index) <= region <= max(needing, default=member.index)
                if member.index <= region and there and not released:
                    total += self._size(stored) * num / maker.count
        return total

    def _made_and_read(self, use: Use) -> Iterator[tuple[int, int]]:
        """Which region's tensor each reading region reads."""
        for place in use.members:
            reader = use.region_class.members[place]
            found = dict(zip(use.region_class.representative.externals, reader.externals)).get(use.tensor)
            yield (reader.index if use.inside else found.producer.region.index), reader.index

    @_of_the_sharding
    def _waiting(self, decision: Decision) -> list[Use]:
        """Uses whose tensor has part of its gradient and waits for the rest, each tensor once."""
        found: dict[object, Use] = {}
        for use in self.problem.uses:
            if use.region_class is decision.region_class and not use.source.is_param and use.tensor.requires_grad:
                made = use.source.decision.group.index if use.inside else -1
                later = any(demand.position > decision.group.index for demand in use.demands)
                if made < decision.group.index and later:
                    found.setdefault(use.tensor, use)
        return list(found.values())

    @_of_the_sharding
    def _size_of(self, use: Use) -> int:
        return self.problem.costs.block_bytes(use.source.tensor, self._native(use))

    @_of_the_sharding
    def _read_by(self, decision: Decision) -> list[Use]:
        return [use for use in self.problem.uses if any(demand.decision is decision for demand in use.demands)]

    def _back_bytes(self, use: Use) -> int:
        if not use.tensor.requires_grad:
            return 0
        due = gradient_layout(self._native(use))
        own = [want for want in self.wants[use] if (use.source, want) not in self.shared]
        return sum(self.problem.costs.change_bytes(use.source.tensor, want[1], due) for want in own)

    def _forward_bytes(self, fate: Fate, pieces: list[Piece], decision: Decision) -> float:
        own, position = decision.region_class, decision.group.index
        region = own.members[-1].index
        total = 0.0
        for piece in pieces:
            members = piece.owner.region_class.members
            num = sum(member.index < region for member in members)
            here = piece.owner.region_class is own
            total += sum((num + (here and first <= position)) * size for first, size in piece.made.items()) / len(
                members
            )
        for stored in self._passing(decision):
            staying = fate.kept[stored] - fate.leaves.get(stored, 0)
            total += self._size(stored) * (1 - staying / stored.source.decision.count)
        total += self._in_flight_bytes(fate, decision)
        return total + self._asked_bytes(decision) + self._copies_bytes(decision)

    @_of_the_sharding
    def _asked_bytes(self, decision: Decision) -> float:
        """Return the most that the group holds while what it reads is brought to other layouts, one after the other, or runs."""
        costs, most = self.problem.costs, 0.0
        for member in (0, decision.count - 1):
            made = 0.0
            for use in sorted(self._read_by(decision), key=lambda use: _first_read(use, decision)):
                native = self._native(use)
                own = [w for w in self.wants[use] if (use.source, w) not in self.shared and w[0] != native]
                if own and member in use.members:
                    most = max(most, made + sum(costs.change_bytes(use.source.tensor, native, w[0]) for w in own))
                    made += sum(costs.copy_bytes(use.source.tensor, native, w[0]) for w in own)
            most = max(most, made + decision.workspace_bytes[self.options[decision]])
        return most

    @_of_the_sharding
    def _passing(self, decision: Decision) -> set[Stored]:
        """What is made by the group or before it and still to be read in the forward, or to be summed for the caller."""
        own, position = decision.region_class, decision.group.index
        found = set()
        for stored in self.problem.stored:
            maker = stored.source.decision
            made = maker.group.index if maker.region_class is own else math.inf
            if made == position or (made < position and (stored.boundary or stored.held)):
                found.add(stored)
            for use in stored.uses:
                here = use.region_class is own and any(demand.position >= position for demand in use.demands)
                if here and (not use.inside or made <= position):
                    found.add(stored)
        return found


def _first_read(use: Use, decision: Decision) -> tuple[float, int]:
    return min((demand.until, demand.place) for demand in use.demands if demand.decision is decision)


def _moment(decision: Decision, tensor: Tensor) -> float:
    """Return when, among the groups of its region, the op of a group that makes a tensor runs."""
    return decision.group.moment(tensor.producer, decision.region_class.groups)


def _before(moment: float, num: int) -> float:
    """Return what comes `num` steps before ops that run at a moment: half as long ones before those that run between two groups."""
    return moment - num * (0.25 if moment % 1 == 0 else 0.125)


def _is_saved(use: Use, want: Want) -> bool:
    return any(want in saves for demand in use.demands for saves in demand.saves)
