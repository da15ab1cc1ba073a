"""SR-SGC and M-SGC: gradient codes over overlapping jobs, which tolerate stragglers over time with less work."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..artifacts import UserError, check_range
from .coded import Coded
from .options import options_of
from .record import Message, Size, StateVector, SyncRecord, each_step
from .replica import Replica, Worker
from .requests import Compute, Steps
from .sequential_codes import MSGC, SRSGC, Task


class SequentialCoding(Coded):
    r"""Start a job in each step, and end the one that started T steps before with its whole gradient.

        step t:  workers do parts of jobs t − T … t, each at the parameters of its job's first step
        master:  g = Σ own sums + Σ_groups Σ_i a_i (coded sums of workers i),  aᵀ B_S = 1ᵀ;  the optimizer's step with g / scale

    `sync.step(closure)` calls closure(chunk, job), which returns the summed loss of one of `method.num_chunks` chunks of the data
    of that job (from 1), the same whenever it is called. Rank 0 is the master and computes nothing.

    burst, window, most: the stragglers that are tolerated without waiting, (B, W, λ): in any W steps at most λ of the workers are
    late, each within B consecutive steps. If more are late, or a job would not end in time, the master waits for more answers.
    patience: a step lasts (1 + patience) times as long as its fastest worker took. models: 1, whose gradients are then T steps
    old when they are applied; or at least T + 1 (`method.delay` is T), all alike, in an `nn.ModuleList`: job j trains model
    (j − 1) mod models, and each is trained as if alone. jobs: the number of jobs to start, after which T more steps end the
    last ones; 0: no limit. scale: the divisor of gradients.

    At a meeting, a worker that is gone counts as late for ever. None can join, since it would not know the jobs in progress.
    It does not pay off if all workers are equally fast. Dropout and batch norm would differ between the copies of a chunk.

    Source: Krishnan, Ebrahimi & Khisti 2023, Sequential Gradient Coding For Straggler Mitigation (ICLR).
    """

    scheme_of: ClassVar[Any]
    needs_whole = (
        "the master decodes what workers answer in time, and the ranks of a replica would decode from different workers"
    )
    needs_loop = "its jobs end steps after they began, and data of all jobs under way have to be at hand"

    def __init__(
        self, worker: Worker, *, burst: int = 1, window: int = 2, most: int = 1, patience: float = 1.0, scale: float = 1.0,
        models: int = 1, jobs: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(worker, patience)
        self.scheme = self.scheme_of(worker.size - 1, int(burst), int(window), int(most))
        check_range(
            self.name,
            scale=(scale, "above 0", lambda value: value > 0),
            models=(
                models,
                f"1, or of at least {self.delay + 1}, one more than the steps that a job may take longer",
                lambda value: value == 1 or value > self.delay,
            ),
            jobs=(jobs, "of at least 0", lambda value: value >= 0),
        )
        self.scale, self.jobs = float(scale), int(jobs) or math.inf
        self.models = _models(self.name, worker.replica, int(models))
        self._tasks: list[list[Task]] = []
        self._own: list[Task] = []
        self._extra: dict[int, tuple[Task, Tensor]] = {}
        """By worker: a task that it repeated in this round, and its answer."""

    @property
    def delay(self) -> int:
        """Return T, the number of steps after its first in which a job may still end."""
        return int(self.scheme.delay)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks of a job's data."""
        return int(self.scheme.num_units)

    @property
    def down_length(self) -> int:
        return 2 * int(self.scheme.num_slots) + self.models[0].num_params

    @property
    def up_length(self) -> int:
        return int(self.scheme.num_slots) * self.models[0].num_params

    def start(self) -> Steps[None]:
        length, ring = self.models[0].num_params, self.delay + 1
        zeros = functools.partial(torch.zeros, dtype=torch.float64)
        if self.worker.rank:
            self.state["params"] = zeros(ring, length)
        else:
            scheme = self.scheme
            self.state |= {
                "sums": zeros(ring, length),
                "coded": zeros(ring, scheme.num_groups, scheme.num_workers, length),
                "known": torch.zeros(ring, len(scheme.flags(0)), dtype=torch.uint8),
                "late": torch.zeros(scheme.window, scheme.num_workers, dtype=torch.uint8),
            }
        yield from ()

    def begin(self) -> None:
        """Set the scheme's knowledge of finished parts from the state, and choose each worker's tasks."""
        turn, known = self.num_steps, self._kept("known")
        for job in range(max(1, turn - self.delay), turn):
            self.scheme.set_flags(job, known[job % len(known)].bool().tolist())
        self.scheme.set_flags(turn, [])
        if isinstance(self.scheme, SRSGC):
            self.scheme.gone = frozenset(rank - 1 for rank in self.gone)
        self._tasks, self._extra = self.scheme.tasks(turn), {}

    def down(self, worker: int) -> Tensor:
        """Return a worker's tasks as (job, part), own parts from 0 up and coded ones from −1 down, and the newest parameters."""
        return self._message(self._tasks[worker])

    def _message(self, tasks: list[Task]) -> Tensor:
        numbers = [
            (task.job, task.part if task.kind == "own" else -1 - task.part) if self._is_real(task) else (0, 0)
            for task in tasks
        ]
        header = torch.tensor(numbers, dtype=torch.float64).flatten()
        return torch.cat([header, self._model(self.num_steps).read().double().cpu()])

    def _is_real(self, task: Task) -> bool:
        return 1 <= task.job <= self.jobs

    def told(self, turn: int, message: Tensor) -> None:
        slots, ring = int(self.scheme.num_slots), self._kept("params")
        header = message[: 2 * slots].view(slots, 2).long().tolist()
        self._own = [
            Task(job, "own" if part >= 0 else "coded", part if part >= 0 else -1 - part) for job, part in header
        ]
        ring[turn % len(ring)] = message[2 * slots :]

    def answer(self, closure: Any) -> Steps[Tensor]:
        """Return one vector for each task, zeros for an idle one."""
        worker, length = self.worker.rank - 1, self.models[0].num_params
        found = torch.zeros(len(self._own), length, dtype=torch.float64)
        ring = self._kept("params")
        for row, task in zip(found, self._own):
            if not self._is_real(task):
                continue
            model = self._model(task.job)
            model.write(ring[task.job % len(ring)])
            for chunk, weight in self.scheme.units(worker, task).items():
                model.gradients_by(functools.partial(closure, chunk, task.job))
                row += weight * model.read_gradient().double().cpu()
        yield Compute(amount=float(self.scheme.load))
        return found.flatten()

    def enough(self, answers: dict[int, Tensor]) -> bool:
        """Tell whether the pattern of late workers is tolerated and the due job is done."""
        late = self._late_of(answers)
        scheme = self._scheme_with(answers)
        due = self._due()
        if due is not None and not scheme.is_done(due):
            return False
        rows = self._kept("late")[: self.scheme.window - 1].tolist()
        before = [frozenset(worker for worker, flag in enumerate(row) if flag) for row in rows][::-1]
        is_all = not set(late) - {rank - 1 for rank in self.gone}
        return is_all or bool(self.scheme.tolerates([*before, late]))

    def _scheme_with(self, answers: dict[int, Tensor]) -> Any:
        """Return a copy of the scheme as if the round had ended with these answers."""
        scheme = copy.deepcopy(self.scheme)
        scheme.receive(self.num_steps, self._tasks, self._late_of(answers))
        scheme.receive(self.num_steps, self._extra_tasks(), frozenset())
        return scheme

    def _extra_tasks(self) -> list[list[Task]]:
        return [[self._extra[worker][0]] if worker in self._extra else [] for worker in range(self.scheme.num_workers)]

    def once_more(self, answers: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return messages that ask late workers of the due job to repeat it, in place of workers that are gone."""
        due = self._due()
        if due is None or not isinstance(self.scheme, SRSGC):
            return {}
        scheme = self._scheme_with(answers)
        scheme.gone = frozenset(rank - 1 for rank in self.gone)
        return {worker: self._message([Task(due, "coded", 0)]) for worker in scheme.still_needed(due)}

    def repeated(self, worker: int, answer: Tensor) -> None:
        due = self._due()
        assert due is not None
        self._extra[worker] = Task(due, "coded", 0), answer

    def _late_of(self, answers: dict[int, Tensor]) -> frozenset[int]:
        return frozenset(set(range(self.scheme.num_workers)) - set(answers))

    def _due(self) -> int | None:
        due = self.num_steps - self.delay
        return due if 1 <= due <= self.jobs else None

    def use(self, answers: dict[int, Tensor]) -> None:
        """Add the answers to their jobs, record who was late, and end the due job."""
        turn, known, late = self.num_steps, self._kept("known"), self._kept("late")
        ring, length = len(known), self.models[0].num_params
        for kept in (self._kept("sums"), self._kept("coded")):
            kept[turn % ring] = 0  # of the job that ended in the last step
        for worker, vectors in answers.items():
            for task, vector in zip(self._tasks[worker], vectors.view(-1, length)):
                if not self._is_real(task):
                    continue
                if task.kind == "own":
                    self._kept("sums")[task.job % ring] += vector
                else:
                    self._kept("coded")[task.job % ring, task.part, worker] = vector
        for worker, (task, vector) in self._extra.items():
            self._kept("coded")[task.job % ring, task.part, worker] = vector
        absent = self._late_of(answers)
        self.scheme.receive(turn, self._tasks, absent)
        self.scheme.receive(turn, self._extra_tasks(), frozenset())
        late[1:] = late[:-1].clone()
        late[0] = torch.tensor([worker in absent for worker in range(self.scheme.num_workers)])
        for job in range(max(1, turn - self.delay), turn + 1):
            known[job % ring] = torch.tensor(self.scheme.flags(job))
        due = self._due()
        if due is not None:
            self._end(due)

    def _end(self, job: int) -> None:
        """Run the optimizer's step with the whole gradient of a job."""
        total = self._kept("sums")[job % len(self._kept("sums"))].clone()
        coded = self._kept("coded")[job % len(self._kept("coded"))]
        for group, vectors in enumerate(coded):
            there = self.scheme.in_group(job, group)
            for worker, weight in enumerate(self.scheme.code.decoding(there)):
                if weight:
                    total += float(weight) * vectors[worker]
        model = self._model(job)
        model.write_gradient((total / self.scale).to(model.read().device))
        model.update()
        for param in model.params:
            param.grad = None

    def _model(self, job: int) -> Replica:
        return self.models[(job - 1) % len(self.models)]

    def _kept(self, name: str) -> Tensor:
        kept = self.state[name]
        assert isinstance(kept, Tensor)
        return kept


class SRSGCTraining(SequentialCoding):
    """Selective repetition, `SRSGC`: a coded sum of s + 1 chunks a worker and step; if too few arrive, some repeat B steps later.

    It also tolerates any s = ⌈Bλ/(W − 1 + B)⌉ late workers in each step, and as many that are gone. B has to divide W − 1.
    """

    name = "sr-sgc"
    scheme_of = SRSGC


class MSGCTraining(SequentialCoding):
    """Multiplexing, `MSGC`: small parts of each of T + 1 jobs a worker and step, first of its own data, then of coded data.

    It takes the least work and sends the most bytes: W − 1 + B vectors an answer. A worker that is gone for good has data that
    no other has, so the run ends with its name.
    """

    name = "m-sgc"
    scheme_of = MSGC


def _models(owner: str, replica: Replica, number: int) -> list[Replica]:
    """Return the models that are trained in turn, each as a replica."""
    if number == 1:
        return [replica]
    children = list(replica.model.children()) if isinstance(replica.model, torch.nn.ModuleList) else []
    alike = {tuple(tuple(param.shape) for param in child.parameters() if param.requires_grad) for child in children}
    if len(children) != number or len(alike) != 1:
        raise UserError(
            f"{owner} with models={number} needs an nn.ModuleList of {number} models with parameters of the same shapes; got "
            f"{type(replica.model).__name__} of {len(children)}; give nn.ModuleList([…])"
        )
    return [Replica(child, replica.optimizer) for child in children]


def _scheme(cls: type[SequentialCoding], size: Size) -> Any:
    own = {name: size.options.get(name, value) for name, value in options_of(cls).items()}
    return cls.scheme_of(size.num_workers - 1, own["burst"], own["window"], own["most"])


def _length(size: Size) -> int:
    return size.num_params // int(size.options["models"])


def _record(cls: type[SequentialCoding], summary: str, sends: str, faults: str) -> SyncRecord:
    def down(size: Size) -> int:
        return (size.num_workers - 1) * 8 * (1 + 2 * int(_scheme(cls, size).num_slots) + _length(size))

    def up(size: Size) -> int:
        return (size.num_workers - 1) * 8 * (1 + int(_scheme(cls, size).num_slots) * _length(size))

    def kept(size: Size) -> int:
        scheme = _scheme(cls, size)
        return int((scheme.delay + 1) * (1 + scheme.num_groups * scheme.num_workers) * _length(size))

    def flags(size: Size) -> int:
        scheme = _scheme(cls, size)
        return int((scheme.delay + 1) * len(scheme.flags(0)) + scheme.window * scheme.num_workers)

    return SyncRecord(
        cls.name,
        cls,
        summary,
        (
            Message(
                "tasks and parameters", "edge", down, each_step, "P from the master",
                seconds=lambda size, network, _: network.message_s(down(size)),
            ),
            Message(
                "sums", "edge", up, each_step, sends,
                seconds=lambda size, network, _: network.message_s(up(size) / (size.num_workers - 1)),
            ),
        ),
        promises="T + 1 models, each as one worker with all data; one model: gradients T steps old",
        assumes="bursts of stragglers; data held more than once; sums, not means",
        states=(StateVector("sums and coded sums, of the master", kept, 8), StateVector("flags", flags, 1)),
        takes="closure",
        extra_passes="n·load − 1",
        gradients=lambda size: (size.num_workers - 1) * float(_scheme(cls, size).load),
        faults=faults,
        paper="Krishnan, Ebrahimi & Khisti 2023, ICLR",
        departs="messages are float64; rank 0 is the master and computes nothing; a job's gradient is applied when it is due",
    )  # fmt: skip


RECORDS = (
    _record(SRSGCTraining, "codes over jobs in turn, some repeated", "P", "bursts, or s a step, are not waited for"),
    _record(MSGCTraining, "codes over jobs in turn, in small parts", "(W−1+B)·P", "bursts are not waited for"),
)
