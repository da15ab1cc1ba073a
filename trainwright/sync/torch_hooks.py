"""Runs torch's own communication hooks as sync methods: PowerSGD, and post-local SGD with its averager.

torch's own state, hook and averager are called, on one bucket of all gradients in the order in which DistributedDataParallel
fills buckets, the last parameter first.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ..artifacts import UserError, check_range
from .blocking import AskingGroup, as_program
from .method import Method
from .network import Network
from .record import Message, Size, StateVector, SyncRecord, all_reduced
from .replica import Replica, Worker
from .requests import Form, Members, Steps
from .traffic import all_reduce_bytes


class Bucket:
    """All gradients of a replica as one bucket, with the interface that hooks use; the last parameter comes first."""

    def __init__(self, replica: Replica) -> None:
        self._dims = replica.dims[::-1]
        self._flat = torch.cat(list(replica.read_gradient().split(replica.shapes))[::-1])

    def index(self) -> int:
        """Return the bucket's index."""
        return 0

    def is_last(self) -> bool:
        """Return True, since it is the only bucket of a step."""
        return True

    def buffer(self) -> Tensor:
        """Return all gradients as one vector."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, one for each parameter."""
        parts = self._flat.split([math.prod(dims) for dims in self._dims])
        return [part.view(dims or (1,)) for part, dims in zip(parts, self._dims)]

    def in_order(self, flat: Tensor) -> Tensor:
        """Return a hook's result `flat` in the order of parameters."""
        return torch.cat(list(flat.split([math.prod(dims) for dims in self._dims]))[::-1])


class PowerSGD(Method):
    r"""Average gradients as products of two thin matrices, by torch's `powerSGD_hook`.

        steps ≤ start_step:   the mean of all gradients
        later, of each gradient matrix M ([n, m], and what the last step left out, e, added):
            P = orthogonal(Σ_i M_i Q),   Q = (1/n) Σ_i M_iᵀ P,   M ← P Qᵀ,   e ← M_i − P Qᵀ

    and the optimizer, any, steps with M on all workers alike. Vectors, and matrices for which (n + m) · rank ·
    min_compression_rate ≥ n · m, are averaged whole.

    rank: columns of P and Q. start_step: steps that average whole gradients, 2 at least with feedback or warm start; a tenth
    of all steps is a start. error_feedback, warm_start: keep e and Q. epsilon: added to norms, so that a matrix
    of zeros gives zeros; torch's own default, 0, gives NaN there. seed: of the first Q.

    It gains nothing on models whose parameters are mostly vectors or small, or on gradients without a few leading directions.

    Source: Vogels, Karimireddy & Jaggi 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization
    (arXiv:1905.13727); code: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
    """

    of_size = ("error",)
    needs_whole = "a low rank is that of a whole matrix, and its shards have others"

    def __init__(
        self, worker: Worker, *, rank: int = 1, start_step: int = 100, min_compression_rate: float = 2.0,
        error_feedback: bool = True, warm_start: bool = True, epsilon: float = 1e-8, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(worker)
        keeps = error_feedback or warm_start
        check_range(
            "powersgd",
            rank=(rank, "of at least 1", lambda value: value >= 1),
            start_step=(
                start_step,
                "of at least 2 with error_feedback or warm_start, else 0",
                lambda value: value >= (2 if keeps else 0),
            ),
            min_compression_rate=(min_compression_rate, "above 0", lambda value: value > 0),
            epsilon=(epsilon, "of at least 0", lambda value: value >= 0),
        )
        self.start_step, self.seed = int(start_step), int(seed)
        self._group = AskingGroup(worker.size)
        self.hook_state = PowerSGDState(
            self._group,
            matrix_approximation_rank=int(rank),
            start_powerSGD_iter=self.start_step,
            min_compression_rate=min_compression_rate,
            use_error_feedback=error_feedback,
            warm_start=warm_start,
            orthogonalization_epsilon=epsilon,
            random_seed=self.seed,
        )
        """torch's own state of the hook; between steps it equals `state`, which checkpoints save."""

    def start(self) -> Steps[None]:
        vector = self.replica.read()
        if self.hook_state.use_error_feedback:
            self.state["error"] = torch.zeros_like(vector)
        if self.hook_state.warm_start:
            lengths = thin(self.replica.dims, self.hook_state.matrix_approximation_rank, self._rate)
            self.state |= {name: vector.new_zeros(length) for name, length in zip("pq", lengths)}
        yield from ()

    @property
    def _rate(self) -> float:
        return float(self.hook_state.min_compression_rate)

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        bucket = Bucket(self.replica)
        self._give()
        flat = yield from as_program(lambda: powerSGD_hook(self.hook_state, cast(Any, bucket)).wait(), [self._group])
        self._take()
        self.replica.write_gradient(bucket.in_order(flat))
        self.replica.update()

    def _give(self) -> None:
        """Copy this method's state to torch's, from which it differs after a checkpoint was loaded."""
        held = self.hook_state
        if held.iter != self.num_steps - 1:
            held.iter = self.num_steps - 1
            held.rng.seed(self.seed)
            drawn = max(0, held.iter - self.start_step)
            for _ in range(min(drawn, 1) if held.warm_start else drawn):
                held.rng.randint(1_000_000_000)
        if held.use_error_feedback:
            held.error_dict = {0: self._kept("error")}
        if held.warm_start and held.iter > self.start_step:
            held.p_memory_dict, held.q_memory_dict = {0: self._kept("p")}, {0: self._kept("q")}

    def _take(self) -> None:
        held = self.hook_state
        if held.use_error_feedback:
            self.state["error"] = held.error_dict[0]
        if held.warm_start and held.iter > self.start_step:
            self.state |= {"p": held.p_memory_dict[0], "q": held.q_memory_dict[0]}

    def _kept(self, name: str) -> Tensor:
        kept = self.state[name]
        assert isinstance(kept, Tensor)
        return kept


class PostLocalSGD(Method):
    r"""Average gradients at first, later parameters now and then, by torch's `post_localSGD_hook` and `PeriodicModelAverager`.

        steps ≤ shared_steps:  the optimizer steps with the mean of all gradients
        later:                 … of those of the own subgroup;  x_i ← (1/n) Σ_j x_j every `period` steps, first at once

    subgroup: the number of consecutive ranks, such as those of one machine, that average gradients in every step; 1: none. It has
    to divide the number of workers. Any optimizer works; its state stays with each worker.

    `local-sgd` with `shared_steps` averages at the end of each period instead, continues when workers come and go, and has no
    subgroups. If data differ much between workers, keep the period short.

    Source: Lin, Stich, Patel & Jaggi 2020, Don't Use Large Mini-batches, Use Local SGD (arXiv:1808.07217); code:
    torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook, torch.distributed.algorithms.model_averaging.
    """

    def __init__(self, worker: Worker, *, period: int = 4, shared_steps: int = 100, subgroup: int = 1) -> None:
        super().__init__(worker)
        check_range(
            "post-local-sgd",
            period=(period, "of at least 1 step", lambda value: value >= 1),
            shared_steps=(shared_steps, "of at least 0", lambda value: value >= 0),
            subgroup=(subgroup, "of at least 1 worker", lambda value: value >= 1),
        )
        self.period, self.shared_steps = max(1, int(period)), int(shared_steps)
        self.groups = subgroups(worker.size, int(subgroup))
        own = next(members for members in self.groups if worker.rank in members)
        self._all, self._own = AskingGroup(worker.size), AskingGroup(len(own), own)
        self.hook_state = PostLocalSGDState(self._all, self._own, self.shared_steps, len(own) > 1)

    def start(self) -> Steps[None]:
        if self._own.size() > 1:
            yield Form(self.groups)

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        bucket = Bucket(self.replica)
        self.hook_state.iter = min(self.num_steps - 1, self.shared_steps)
        flat = yield from as_program(
            lambda: post_localSGD_hook(self.hook_state, cast(Any, bucket)).wait(), [self._all, self._own]
        )
        self.replica.write_gradient(bucket.in_order(flat))
        self.replica.update()
        yield from self._average()

    def _average(self) -> Steps[None]:
        """Average this rank's parameters by torch's averager, as one parameter, if the step is due."""
        held = nn.Parameter(self.replica.read())
        held.grad = held.detach().new_zeros(()).expand_as(held)  # parameters without a gradient are not averaged
        averager = _averager(self.period, self.shared_steps, self._all)
        averager.step = self.num_steps - 1
        yield from as_program(lambda: averager.average_parameters([held]), [self._all])
        self.replica.write(held.detach())


def _averager(period: int, warmup_steps: int, group: AskingGroup) -> PeriodicModelAverager:
    """Return a new averager, whose only state is the number of the step; a period of 1 is set later, to avoid its warning."""
    averager = PeriodicModelAverager(max(period, 2), warmup_steps, group)  # type: ignore[arg-type]
    averager.period = period
    return averager


def subgroups(num_workers: int, size: int) -> tuple[Members, ...]:
    """Return groups of `size` consecutive workers.

    >>> subgroups(4, 2)
    ((0, 1), (2, 3))
    """
    if num_workers % size:
        raise UserError(
            f"post-local-sgd needs a subgroup that divides the number of workers; got {size} of {num_workers}; change one of them"
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, num_workers, size))


def thin(dims: tuple[tuple[int, ...], ...], rank: int, rate: float) -> tuple[int, int, int]:
    """Return the numbers of elements of all P, of all Q, and of the gradients that are sent whole.

    >>> thin(((100, 50), (100,)), rank=1, rate=2.0)
    (100, 50, 100)
    """
    rows = columns = whole = 0
    for shape in dims:
        n, m = (shape or (1,))[0], math.prod(shape[1:])
        own = min(n, m, rank)
        if (n + m) * own * rate < n * m:
            rows, columns = rows + n * own, columns + m * own
        else:
            whole += n * m
    return rows, columns, whole


def _thin(size: Size) -> tuple[int, int, int]:
    return thin(size.dims, int(size.options["rank"]), float(size.options["min_compression_rate"]))


def _compressed(index: int) -> Message:
    """Return the message of the all-reduce of all P (index 0), all Q (1), or the gradients that are sent whole (2)."""

    def total(size: Size) -> int:
        return all_reduce_bytes(_thin(size)[index], size.itemsize, size.num_workers)

    return Message(
        ("P", "Q", "small gradients")[index],
        "all-reduce",
        total,
        lambda size, k: max(0, k - size.options["start_step"]),
        "2r(n+m)" if index == 0 else "",
        follows=index < 2,  # the small ones go first
    )


def _kept(index: int) -> Any:
    return lambda size: _thin(size)[index] if size.options["warm_start"] else 0


def _whole(size: Size, k: int) -> int:
    return min(k, int(size.options["start_step"]))


def _shared(size: Size, k: int) -> int:
    return min(k, size.options["shared_steps"])


def _in_groups(size: Size) -> int:
    own = size.options["subgroup"]
    return size.num_workers // own * all_reduce_bytes(size.num_params, size.itemsize, own)


def _in_groups_s(size: Size, network: Network, compute_s: float) -> float:
    own = size.options["subgroup"]
    part = -(-size.num_params // own) * size.itemsize
    return network.collective_s([("all_to_all", part), ("all_gather", part)], tuple(range(own)))


RECORDS = (
    SyncRecord(
        "powersgd",
        PowerSGD,
        "gradients as thin matrices (torch's hook)",
        (
            *(_compressed(index) for index in (2, 0, 1)),
            Message("gradients at first", "all-reduce", all_reduced, _whole, "2P at first"),
        ),
        promises="close to the trajectory of data-parallel",
        assumes="gradients of low rank",
        states=(
            StateVector("error", lambda size: size.num_params if size.options["error_feedback"] else 0),
            StateVector("p", _kept(0)),
            StateVector("q", _kept(1)),
        ),
        paper="Vogels et al. 2019, arXiv:1905.13727",
        departs="all gradients are one bucket; sums are in the order of ranks; epsilon is 1e-8 unless given",
    ),
    SyncRecord(
        "post-local-sgd",
        PostLocalSGD,
        "gradients first, then parameters every H steps (torch's hook)",
        (
            Message(
                "parameters",
                "all-reduce",
                all_reduced,
                lambda size, k: -(-(k - _shared(size, k)) // size.options["period"]),
                "2P/H",
            ),
            Message("gradients at first", "all-reduce", all_reduced, _shared, "2P at first"),
            Message(
                "gradients in subgroups", "all-reduce", _in_groups, lambda size, k: k - _shared(size, k), "", seconds=_in_groups_s
            ),
        ),
        promises="another trajectory; exact before it is local",
        assumes="data alike, or a short period",
        paper="Lin et al. 2020, arXiv:1808.07217",
        departs="torch's averager steps first right after the shared steps, then every H",
    ),
)  # fmt: skip
