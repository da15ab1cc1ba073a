"""Parameters and optimizer states on disks or the host: of each class of parameters, in how many instances either rests there.

    A[d, k] ∈ 0..M     instances of a parameter in layout k whose values rest on disks      A + R = M · x[d, k],  R stay
    S[d, k] ∈ 0..M     instances whose optimizer states do (`recompute.states`)             S + R = M · x[d, k]
    F ∈ {0, 1}         whether as much is read as may be held at once, or less
    H ≥ 0              MiB of values that were read                     H ≥ Σ p · A − (all) · F
                       H ≥ F · window / 2 + what a region reads         for each region: of the parameters in it, those away
    D ≤ quarter        MiB that are still there from the last update or forward, for each phase     D ≤ Σ bytes · A

    bytes     every row has what stays; beside it what was read (`values_held`); in the backward, updates too (`memory`)
    stays     Σ bytes · R ≤ what may be kept
    room      of disks: two versions of all; of the host: Σ p · A + Σ s · S, and gradients for an update after the backward
    seconds   of the phases and directions, as terms that `offload` puts beside computation and activations:
              forward   in   Σ p · A − D
              backward  in   Σ p · A − D + Σ s · S          out  Σ (p · A + s · S) + Σ (p · R + s · R) / steps between commits
              with the update after the backward its gradients go out and come back, and values come once more

Gradients rest nowhere: each goes to its update as soon as it is there, or to the tier where the update comes after. The host has
nothing to commit: what stays is never written, and transfers are of the bytes themselves, not of whole pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...artifacts import Tier
from ...tiers import Policy
from ..costs.resting import NUM_VERSIONS, single_region
from ..problem.problem import Decision, Problem
from .milp import MIB, Model, Terms
from .offload_states import STATE_EPSILON_S, add_away
from .recompute import Recompute
from .sharding import Sharding

PARAM_LEAVES = "a parameter stays or rests on disks"
KEPT = "what stays in memory is no more than may be kept"
HELD = "what is read from disks is held in memory"


@dataclass(eq=False)
class Moved:
    """The terms, in seconds, of what disks read and write in each phase, and of what follows the backward."""

    forward_read: Terms = field(default_factory=list)
    backward_read: Terms = field(default_factory=list)
    backward_written: Terms = field(default_factory=list)
    after_read: Terms = field(default_factory=list)
    after_written: Terms = field(default_factory=list)


def add_resting(
    model: Model, problem: Problem, sharding: Sharding, recompute: Recompute, policy: Policy, tier: Tier
) -> Moved:
    """Add the columns and rows of what may rest on disks, and return what they move."""
    return _RestingBuilder(model, problem, sharding, recompute, policy, tier).build()


class _RestingBuilder:
    def __init__(
        self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute, policy: Policy, tier: Tier
    ) -> None:
        self.model, self.problem, self.sharding, self.recompute = model, problem, sharding, recompute
        self.policy, self.tier = policy, tier

    def build(self) -> Moved:
        self._add_columns()
        if self.policy.keep_bytes is not None:
            self.model.row(KEPT, self._stays(), upper=self.policy.keep_bytes / MIB)
        self._hold_values()
        return self._moved()

    def _options(self) -> Iterator[tuple[Decision, int, int]]:
        for decision in self.problem.params:
            for option, chosen in enumerate(self.sharding.choice[decision]):
                yield decision, option, chosen

    def _add_columns(self) -> None:
        columns = self.recompute
        for decision, option, chosen in self._options():
            if decision.rest_bytes[option]:
                away, stay = add_away(self.model, decision, chosen, PARAM_LEAVES)
                columns.params[decision, option], columns.params_stay[decision, option] = away, stay

    def _stays(self) -> Terms:
        columns = self.recompute
        terms = [(stay, d.rest_bytes[k] / MIB) for (d, k), stay in columns.params_stay.items()]
        return terms + [(stay, d.leaving_state_bytes[k] / MIB) for (d, k), stay in columns.states_stay.items()]

    # Bytes

    def _hold_values(self) -> None:
        """Count what was read: a window and what one region needs beside it, or all that rests on disks if that is less."""
        columns, window = self.recompute, self.policy.window_bytes // 2
        sizes = {decision: max(decision.rest_bytes) for decision in self.problem.params}
        away = [(column, decision.rest_bytes[k] / MIB) for (decision, k), column in columns.params.items()]
        all_mib = sum(decision.count * size for decision, size in sizes.items()) / MIB
        if all_mib * MIB <= window:
            columns.values_held = away
            return
        is_full = self.model.column(1.0, STATE_EPSILON_S, integer=True)
        held = self.model.column(all_mib)
        columns.values_held = [(held, 1.0)]
        self.model.row(HELD, [*away, (held, -1.0), (is_full, -all_mib)], upper=0.0)
        # values of one parameter may be more than what is read ahead
        beyond = self.model.column(max(0, max(sizes.values()) - window) / MIB)
        for (decision, k), column in self._chosen_away():
            if (size := decision.rest_bytes[k] - window) > 0:
                self.model.row(HELD, [(column, size / MIB), (beyond, -1.0)], upper=0.0)
        for beside in self._beside():
            most = min(
                all_mib, self.model.upper[beyond] + sum(size * self.model.upper[column] for column, size in beside)
            )
            terms = [*beside, (beyond, 1.0), (held, -1.0), (is_full, window / MIB + most)]
            self.model.row(HELD, terms, upper=most)

    def _chosen_away(self) -> Iterator[tuple[tuple[Decision, int], int]]:
        """Yield for each parameter and option a column of 0 or 1, which is 1 if the values of an instance are away."""
        for (decision, option), column in self.recompute.params.items():
            yield (decision, option), column if decision.count == 1 else self.sharding.choice[decision][option]

    def _beside(self) -> list[Terms]:
        """Return for each region what it needs at once: a backward that runs all of it again has all of its parameters.

        Those that several regions read are there from the first of them to the last, so they count beside each.
        """
        single = set(single_region(self.problem.program, [t for d in self.problem.params for t in d.tied]))
        terms: dict[Decision, Terms] = defaultdict(list)
        for (decision, option), column in self._chosen_away():
            terms[decision].append((column, decision.rest_bytes[option] / MIB))
        several: Terms = []
        for (decision, option), column in self.recompute.params.items():
            if decision.tied[0] not in single:
                several.append((column, decision.rest_bytes[option] / MIB))
        read: dict[object, list[Decision]] = defaultdict(list)
        for decision in terms:
            for tensor in decision.tied:
                if tensor in single:
                    read[tensor.consumers[0].region if tensor.consumers else None].append(decision)
        kinds = dict.fromkeys(map(tuple, read.values()))
        return [[*several, *(term for decision in kind for term in terms[decision])] for kind in kinds or [()]]

    # Seconds

    def _moved(self) -> Moved:
        columns, moved, is_after = self.recompute, Moved(), self.policy.update == "after"
        for (decision, option), away in columns.params.items():
            size = self.policy.moved(decision.rest_bytes[option])
            moved.forward_read.append((away, self._read_s(size)))
            moved.backward_read.append((away, self._read_s(size)))
            if decision.tied[0].requires_grad:
                self._write(moved, away, columns.params_stay[decision, option], size)
                if is_after:
                    moved.after_read.append((away, self._read_s(size)))
        for (decision, option), away in columns.states.items():
            size = sum(map(self.policy.moved, _parts(decision, option)))
            (moved.after_read if is_after else moved.backward_read).append((away, self._read_s(size)))
            self._write(moved, away, columns.states_stay[decision, option], size)
        for decision, option, chosen in self._options() if is_after else ():
            if decision.tied[0].requires_grad:
                size = self.policy.moved(decision.rest_bytes[option])
                moved.backward_written.append((chosen, decision.count * size / self.tier.write_bytes_per_s))
                moved.after_read.append((chosen, decision.count * self._read_s(size)))
        moved.forward_read.append(self._still_there())
        moved.backward_read.append(self._still_there())
        return moved

    def _write(self, moved: Moved, away: int, stay: int, size: int) -> None:
        seconds = size / self.tier.write_bytes_per_s
        terms = moved.after_written if self.policy.update == "after" else moved.backward_written
        terms += [(away, seconds), (stay, seconds * self.policy.committed_share)]

    def _read_s(self, num_bytes: int) -> float:
        return num_bytes / self.tier.read_bytes_per_s

    def _still_there(self) -> tuple[int, float]:
        """Return the term of what a phase need not read, since it is there from the one before."""
        column = self.model.column(self.policy.window_bytes // 4 / MIB)
        away = [(each, -d.rest_bytes[k] / MIB) for (d, k), each in self.recompute.params.items()]
        self.model.row(HELD, [(column, 1.0), *away], upper=0.0)
        return column, -MIB / self.tier.read_bytes_per_s


def _parts(decision: Decision, option: int) -> list[int]:
    """Return the bytes of each of a parameter's states: as many as it has of the parameter's own size, and the rest."""
    size, states = decision.rest_bytes[option], decision.leaving_state_bytes[option]
    number, rest = divmod(states, size) if size else (0, states)
    return [size] * number + ([rest] if rest else [])


def taken_there(problem: Problem, sharding: Sharding, recompute: Recompute, policy: Policy) -> Terms:
    """Return the MiB that parameters, states and gradients that wait take on the tier."""
    if policy.place == "host":
        values = [(away, d.rest_bytes[k] / MIB) for (d, k), away in recompute.params.items()]
        states = [(away, d.leaving_state_bytes[k] / MIB) for (d, k), away in recompute.states.items()]
        return values + states + (_gradients(problem, sharding) if policy.update == "after" else [])
    return _both_versions(problem, sharding)


def _gradients(problem: Problem, sharding: Sharding) -> Terms:
    """Return the MiB of all gradients at rest."""
    return [
        (column, decision.count * decision.rest_bytes[k] / MIB)
        for decision in problem.params
        if decision.tied[0].requires_grad
        for k, column in enumerate(sharding.choice[decision])
    ]


def _both_versions(problem: Problem, sharding: Sharding) -> Terms:
    """Return the MiB of two versions of all parameters and states: disks have those that stay in memory, too."""
    return [
        (column, NUM_VERSIONS * decision.count * (decision.rest_bytes[k] + decision.leaving_state_bytes[k]) / MIB)
        for decision in problem.params
        for k, column in enumerate(sharding.choice[decision])
    ]
