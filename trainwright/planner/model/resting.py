"""Parameters and optimizer states on disks or the host: of each class of parameters, in how many instances either rests there.

    A[d, k] ∈ 0..M     instances of a parameter in layout k whose values rest on disks      A + R = M · x[d, k],  R stay
    S[d, k] ∈ 0..M     instances whose optimizer states do (`recompute.states`)             S + R = M · x[d, k]
    U ∈ {0, 1}         whether any values do                                                A ≤ M · U
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

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...artifacts import Tier
from ...program.program import Tensor
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
    return _Builder(model, problem, sharding, recompute, policy, tier).build()


class _Builder:
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
        """Count what was read: half of the window and what is needed beside it, or all that rests on disks if that is less."""
        sizes = {decision: max(decision.rest_bytes) for decision in self.problem.params}
        own = {tensor: size for decision, size in sizes.items() for tensor in decision.tied}
        single = set(single_region(self.problem.program, own))
        beside = self._read_by_a_region({tensor: size for tensor, size in own.items() if tensor in single})
        most = max(self.policy.window_bytes // 2, max(own.values(), default=0)) + beside
        away = [(column, d.rest_bytes[k] / MIB) for (d, k), column in self.recompute.params.items()]
        if sum(own.values()) <= most:
            self.recompute.values_held = away
            return
        uses = self.model.column(1.0, STATE_EPSILON_S, integer=True)
        for (decision, _), column in self.recompute.params.items():
            self.model.row(HELD, [(column, 1.0), (uses, -float(decision.count))], upper=0.0)
        tied = [
            (column, decision.rest_bytes[option] / MIB)
            for (decision, option), column in self.recompute.params.items()
            if decision.tied[0] not in single
        ]
        self.recompute.values_held = [(uses, most / MIB), *tied]

    @staticmethod
    def _read_by_a_region(sizes: dict[Tensor, int]) -> int:
        """Return the most bytes that one region reads: a backward that runs all of it again has them at once."""
        found: Counter[object] = Counter()
        for tensor, size in sizes.items():
            found.update({tensor.consumers[0].region if tensor.consumers else None: size})
        return max(found.values(), default=0)

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
