"""Leader SGD: workers are pulled towards the best of them, which alone sends its parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .method import Method
from .record import Message, Size, StateVector, SyncRecord
from .replica import Worker
from .requests import AllGather, Broadcast, Count, Form, Members, MembersChanged, Steps

_LOSS_BYTES, _NOBODY = 8, -1


class LSGD(Method):
    r"""Pull each worker to the leader of its group and to the leader of all: those with the smallest mean loss.

        x ← the optimizer's step
        x ← x − (p_g/g)(x − z_g),   x ← x − (p_l/l)(x − z_l)        each step, to the leaders as they last were
        x ← x − c_l (x − z_l)                                       every l steps, to the new leader of the group
        x ← x − c_g (x − z_g)                                       every g steps, to the new leader of all

    A leader is not pulled, so the stationary points are those of the loss. group_period: l. global_period: g, a multiple of l.
    num_groups: the number of groups, of consecutive ranks; with one, or l = g, there is only the leader of all. group_pull,
    global_pull: p_l, p_g. group_move, global_move: c_l, c_g.

    Losses are averaged over the l steps; a worker with NaN never leads, ties go to the lowest rank, and if all losses are NaN
    nobody leads. Momentum is not pulled. asynchronous: workers exchange once all together have taken n·l steps, so that slow
    ones take fewer; end such a loop by `method.num_rounds`, which all share, not by steps. The results then depend on the
    workers' speeds.

    Source: Teng et al. 2019, Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models
    (arXiv:1905.10395).
    """

    reads_loss = True
    bears_changes = True
    of_size = ("group_leader", "group_leader_rank", "global_leader", "global_leader_rank")

    def __init__(
        self, worker: Worker, *, group_period: int = 4, global_period: int = 16, num_groups: int = 1,
        group_pull: float = 0.1, global_pull: float = 0.1, group_move: float = 0.1, global_move: float = 0.1,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(worker)
        share = ("in [0, 1]", lambda value: 0 <= value <= 1)
        check_range(
            "lsgd",
            group_period=(group_period, "of at least 1 step", lambda value: value >= 1),
            global_period=(global_period, "of at least 1 step", lambda value: value >= 1),
            num_groups=(num_groups, "of at least 1", lambda value: value >= 1),
            group_pull=(group_pull, *share),
            global_pull=(global_pull, *share),
            group_move=(group_move, *share),
            global_move=(global_move, *share),
        )
        if asynchronous and worker.replica.is_sharded:
            raise UserError(
                "asynchronous lsgd needs a whole model on each worker, as the ranks of one replica would exchange at different "
                "steps; these are sharded by a plan; leave asynchronous out"
            )
        if worker.size % num_groups or global_period % group_period:
            raise UserError(
                f"lsgd needs groups of one size, and a global period that the group's divides; got {worker.size} workers in "
                f"{num_groups} groups, and periods {global_period} and {group_period}; change them"
            )
        self.global_period, self.asynchronous = int(global_period), asynchronous
        self.has_groups = has_groups(num_groups, group_period, global_period)
        self.period = int(group_period) if self.has_groups else self.global_period
        self.groups = groups_of(worker.size, num_groups)
        self.group_pull, self.global_pull = group_pull / self.period, global_pull / self.global_period
        self.group_move, self.global_move = group_move, global_move
        self.state |= {
            "loss": 0.0,
            "num_losses": 0,
            "num_rounds": 0,
            "group_leader_rank": _NOBODY,
            "global_leader_rank": _NOBODY,
        }

    @property
    def num_rounds(self) -> int:
        """Return the number of exchanges so far."""
        return int(self.state["num_rounds"])

    def start(self) -> Steps[None]:
        if self.has_groups:
            yield Form(self.groups)

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        self.state["loss"] += float(loss)
        self.state["num_losses"] += 1
        self.replica.update()
        x = self.replica.read()
        x = self._pulled(x, "global_leader", self.global_pull)
        x = self._pulled(x, "group_leader", self.group_pull)
        if (yield from self._is_due()):
            x = yield from self._follow(x)
        self.replica.write(x)

    def _is_due(self) -> Steps[bool]:
        if not self.asynchronous:
            return self.num_steps % self.period == 0
        taken = yield Count("lsgd")
        return bool(taken >= (self.num_rounds + 1) * self.worker.size * self.period)

    def resized(self) -> None:
        """Keep the leaders' last parameters, and forget their ranks until the next exchange."""
        if self.has_groups:
            raise UserError("lsgd needs one group where workers come and go; got several; leave num_groups out")
        self.groups = groups_of(self.worker.size, 1)
        self.state |= {"group_leader_rank": _NOBODY, "global_leader_rank": _NOBODY}

    def _follow(self, x: Tensor) -> Steps[Tensor]:
        """Find the leaders and return `x` moved towards them, the group's first; start again if a worker leaves meanwhile."""
        while True:
            counted = dict(self.state)
            try:
                return (yield from self._once(x))
            except MembersChanged:
                self.state |= {name: counted[name] for name in ("loss", "num_losses", "num_rounds")}

    def _once(self, x: Tensor) -> Steps[Tensor]:
        own = torch.tensor([self.state["loss"] / self.state["num_losses"]], dtype=torch.float64)
        losses = (yield AllGather(own)).flatten().tolist()
        self.state |= {"loss": 0.0, "num_losses": 0, "num_rounds": self.num_rounds + 1}
        if self.has_groups:
            members = next(group for group in self.groups if self.worker.rank in group)
            x = yield from self._move(x, "group_leader", leader(losses, members), members, self.group_move)
        if self.num_rounds % (self.global_period // self.period) == 0:
            best = leader(losses, tuple(range(self.worker.size)))
            x = yield from self._move(x, "global_leader", best, None, self.global_move)
        return x

    def _move(self, x: Tensor, name: str, who: int | None, members: Members | None, share: float) -> Steps[Tensor]:
        if who is None:
            return x
        theirs = yield Broadcast(x, who, members)
        self.state |= {name: theirs.clone(), f"{name}_rank": who}
        return x if who == self.worker.rank else x - share * (x - theirs)

    def _pulled(self, x: Tensor, name: str, share: float) -> Tensor:
        """Return `x` pulled towards a leader's last parameters; the leader itself is not pulled."""
        theirs = self.state.get(name)
        leads = self.state[f"{name}_rank"] == self.worker.rank
        return x if theirs is None or leads else x - share * (x - theirs)


def leader(losses: list[float], members: Members) -> int | None:
    """Return the member with the smallest loss, the lowest rank of equal ones; `None` if all losses are NaN.

    >>> leader([math.nan, 2.0, 1.0, 1.0], (0, 1, 2, 3)), leader([math.nan, 0.0], (0,))
    (2, None)
    """
    able = [rank for rank in members if not math.isnan(losses[rank])]
    return min(able, key=lambda rank: (losses[rank], rank)) if able else None


def groups_of(num_workers: int, num_groups: int) -> tuple[Members, ...]:
    """Return `num_groups` groups of consecutive ranks, of equal size.

    >>> groups_of(4, 2)
    ((0, 1), (2, 3))
    """
    size = num_workers // num_groups
    return tuple(tuple(range(begin, begin + size)) for begin in range(0, num_workers, size))


def has_groups(num_groups: int, group_period: int, global_period: int) -> bool:
    """Tell whether there are leaders of groups beside the global one."""
    return num_groups > 1 and group_period < global_period


def _grouped(size: Size) -> bool:
    return has_groups(*(size.options[name] for name in ("num_groups", "group_period", "global_period")))


def _rounds(size: Size, k: int) -> int:
    return k // (size.options["group_period"] if _grouped(size) else size.options["global_period"])


RECORD = SyncRecord(
    "lsgd",
    LSGD,
    "workers are pulled to the best of them",
    (
        Message(
            "losses", "all-gather", lambda size: size.num_workers * (size.num_workers - 1) * _LOSS_BYTES, _rounds, ""
        ),
        Message(
            "group leaders",
            "broadcast",
            lambda size: (size.num_workers - size.options["num_groups"]) * size.param_bytes,
            lambda size, k: _rounds(size, k) if _grouped(size) else 0,
            "P/l",
            lambda size: size.num_workers // size.options["num_groups"],
            follows=True,
        ),
        Message(
            "leader",
            "broadcast",
            lambda size: (size.num_workers - 1) * size.param_bytes,
            lambda size, k: k // size.options["global_period"],
            "P/g",
            follows=True,
        ),
    ),
    promises="another trajectory; the same stationary points",
    assumes="losses comparable between workers",
    states=(
        StateVector("group_leader", lambda size: size.num_params if _grouped(size) else 0),
        StateVector("global_leader"),
    ),
    faults="asynchronous: slow ones take fewer steps",
    paper="Teng et al. 2019, arXiv:1905.10395",
    departs="one loss is gathered in place of rank, rate and loss; a counter all share in place of a server thread",
)
