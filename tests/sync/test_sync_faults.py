"""Workers that are killed, stopped, or join, while others train by a sync method: who goes on, and who says what."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.grids import slow_but
from tests.sync_cases import loss_of, net, plain
from trainwright import sync
from trainwright.artifacts import UserError
from trainwright.sync.elastic import _Connections

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
SILENCE_S = 3.0
"""Ample: a worker of a loaded machine may be silent for a second and live."""
BEAR = ("diloco", "lsgd-asynchronous", "decentlam", "just-one-byte")
"""Methods that promise to live with faults."""


@dataclass
class Worker:
    pid: int
    output: Path

    def lines(self, kind: str) -> list[list[str]]:
        whole, _, _ = self.said.rpartition("\n")  # a line that is being written is none yet
        return [line.split() for line in whole.splitlines() if line.startswith(kind)]

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def until(self, kind: str, number: int = 1) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.lines(kind)) < number:
            assert time.monotonic() < deadline, f"no {kind} {number}; it said:\n{self.said}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def longest_step_s(self) -> float:
        at = [float(line[2]) for line in self.lines("step")]
        return max(b - a for a, b in itertools.pairwise(at))


class Server:
    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.elastic_worker"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.folder, self.number, self.pids = folder, 0, list[int]()

    def start(self, *arguments: Any) -> Worker:
        self.number += 1
        output = self.folder / f"worker-{self.number}"
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(output), *arguments]) + "\n")
        self.process.stdin.flush()
        self.pids.append(int(self.process.stdout.readline()))
        return Worker(self.pids[-1], output)

    def close(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    held = Server(tmp_path_factory.mktemp("workers"))
    yield held
    held.close()


@pytest.fixture
def address() -> Iterator[str]:
    store, at = sync.host_meeting()
    yield at
    del store


def begun(
    server: Server,
    address: str,
    name: str,
    number: int = 3,
    steps: int = 40,
    silence_s: float = SILENCE_S,
    connect_s: float = 0.0,
) -> list[Worker]:
    return [server.start(address, number, name, steps, silence_s, connect_s) for _ in range(number)]


def end_alike(workers: list[Worker]) -> None:
    for worker in workers:
        worker.until("finished")
    assert len({worker.lines("finished")[0][1] for worker in workers}) == 1


@pytest.mark.parametrize("name", slow_but(["decentlam"], BEAR))
def test_the_others_go_on_without_one_that_is_killed(server: Server, address: str, name: str) -> None:
    workers = begun(server, address, name)
    gone = workers.pop(BEAR.index(name) % 3)
    gone.until("step", 5 + BEAR.index(name))
    gone.send(signal.SIGKILL)
    end_alike(workers)
    for worker in workers:
        sizes = [line[3] for line in worker.lines("step")]
        assert sizes[0] == "3"
        assert sizes[-1] == "2"
        assert name.endswith("asynchronous") or len(sizes) == 40


def test_one_that_is_stopped_is_left_behind_and_told_so_when_it_wakes(server: Server, address: str) -> None:
    workers = begun(server, address, "diloco")
    stopped = workers.pop()
    stopped.until("step", 6)
    stopped.send(signal.SIGSTOP)
    end_alike(workers)
    stopped.send(signal.SIGCONT)
    stopped.until("error")
    assert "was silent for longer, and the others went on without it; join anew" in stopped.said


@pytest.mark.parametrize("name", slow_but(["diloco"], ["diloco", "just-one-byte"]))
def test_one_that_joins_is_bit_identical_after_one_round(server: Server, address: str, name: str) -> None:
    """All of them end 60 steps after it has joined, however long that takes."""
    workers = [server.start(address, 2, name, 60, SILENCE_S, 0.0, 3) for _ in range(2)]
    workers[0].until("step", 9)
    late = server.start(address, 2, name, 60, SILENCE_S, 0.0, 3)
    end_alike([*workers, late])
    period = 4 if name == "diloco" else 1
    first = int(late.lines("step")[0][1])
    assert first > 5
    digests = [{int(line[1]): line[4] for line in worker.lines("step")} for worker in [*workers, late]]
    rounds = [step for step in digests[-1] if step % period == 0]
    assert len(rounds) == 60 / period
    assert all(len({each[step] for each in digests}) == 1 for step in rounds)


def test_methods_that_need_all_end_with_the_name_on_all(server: Server, address: str) -> None:
    workers = begun(server, address, "1-bit-adam", steps=400)
    gone = workers.pop(0)
    gone.until("step", 6)
    gone.send(signal.SIGKILL)
    for worker in workers:
        worker.until("error")
        assert (
            f"1-bit-adam needs all its workers; worker {gone.lines('joined')[0][1]} (process {gone.pid} on"
            in worker.said
        )
    late = server.start(address, 3, "1-bit-adam", 400, 1.0)
    late.until("error")
    assert "goes on with whoever is there is needed to join a run of 3 workers that has begun" in late.said


def test_a_meeting_where_nobody_answers_is_a_clear_error() -> None:
    with pytest.raises(
        UserError, match="the address of a store, host:port, is needed to meet; 'nowhere' does not answer"
    ):
        sync.Meeting("nowhere", 2).store()


def coded_without_faults(steps: int) -> str:
    """The digest of gradient coding over a master and two workers, to which all chunks are known: the bits hang on nobody."""

    def program() -> Any:
        model = net()
        joined = yield from sync.join("gradient-coding", model, plain(model.parameters()), stragglers=1)
        for step in range(steps):
            yield from joined.steps(functools.partial(_chunk, model, step))
        yield from joined.finishing()
        return joined.method.replica.digest().hex()[:12]

    (digest,) = {*sync.simulate([program() for _ in range(3)]).results}
    return digest


def _chunk(model: Any, step: int, chunk: int) -> Any:
    return loss_of(model, 0, 100 * step + chunk)


def by_place(workers: list[Worker]) -> list[Worker]:
    for worker in workers:
        worker.until("joined")
    return sorted(workers, key=lambda worker: int(worker.lines("joined")[0][1]))


@pytest.mark.slow  # the test above kills a worker of another method
@pytest.mark.parametrize("connect_s", [0.0, SILENCE_S])
def test_gradient_coding_goes_on_without_a_worker_and_gives_its_place_to_the_next(
    server: Server, address: str, one_thread: None, connect_s: float
) -> None:
    """The gradient stays the whole one, to the bit; with all but one gone, and then another in place of the first.

    The steps go on while the master connects to meet that one.
    """
    steps = 900
    master, first, second = by_place(begun(server, address, "gradient-coding", steps=steps, connect_s=connect_s))
    first.until("step", 6)
    first.send(signal.SIGKILL)
    master.until("step", 20)
    late = server.start(address, 3, "gradient-coding", steps, 1.0)
    late.until("step", 5)
    second.send(signal.SIGKILL)
    end_alike([master, late])
    assert master.lines("finished")[0][1] == coded_without_faults(steps)
    assert master.longest_step_s < 2
    assert int(late.lines("step")[0][1]) > 6


def test_gradient_coding_names_those_who_are_gone_where_the_rest_is_not_enough(server: Server, address: str) -> None:
    master, first, second = by_place(begun(server, address, "gradient-coding", steps=4000))
    master.until("step", 5)
    first.send(signal.SIGKILL)
    second.send(signal.SIGKILL)
    master.until("error")
    assert "gradient-coding needs more of its workers than are left: 0 of 2 answered" in master.said
    assert f"(process {first.pid} on" in master.said
    assert f"(process {second.pid} on" in master.said


def test_workers_of_gradient_coding_name_a_master_that_is_gone(server: Server, address: str) -> None:
    master, first, second = by_place(begun(server, address, "gradient-coding-cyclic", steps=4000))
    first.until("step", 5)
    master.send(signal.SIGKILL)
    for worker in (first, second):
        worker.until("error")
        assert f"gradient-coding needs its master; worker 0 (process {master.pid} on" in worker.said


@pytest.mark.slow  # on each change: one of those above that is stopped
def test_a_worker_of_gradient_coding_that_is_stopped_is_told_so_when_it_wakes(server: Server, address: str) -> None:
    master, first, second = by_place(begun(server, address, "gradient-coding", steps=60, silence_s=1.0))
    first.until("step", 5)
    first.send(signal.SIGSTOP)
    end_alike([master, second])
    assert master.longest_step_s < 2
    first.send(signal.SIGCONT)
    first.until("error")
    assert "was silent for longer, and the others went on without it; join anew" in first.said


@pytest.mark.slow
def test_sequential_codes_bear_one_that_is_gone_or_name_it(server: Server, address: str) -> None:
    workers = by_place(begun(server, address, "sr-sgc", number=5, steps=60))
    gone = workers.pop(2)
    gone.until("step", 6)
    gone.send(signal.SIGKILL)
    end_alike(workers)
    store, other = sync.host_meeting()
    workers = by_place(begun(server, other, "m-sgc", number=5, steps=4000))
    gone = workers.pop(2)
    gone.until("step", 6)
    gone.send(signal.SIGKILL)
    workers[0].until("error")
    assert "m-sgc needs more of its workers than are left" in workers[0].said
    assert f"(process {gone.pid} on" in workers[0].said
    late = server.start(other, 5, "m-sgc", 60, 1.0)
    late.until("error")
    assert "goes on with whoever is there is needed to join" in late.said
    del store


def test_groups_meet_in_one_connection_until_a_thread_is_left_in_it() -> None:
    """The first of the numbers is the one that was made first: the next one is made ahead."""
    connections = _Connections(SimpleNamespace(clone=functools.partial(next, itertools.count())))
    assert [connections.current(), connections.current()] == [0, 0]
    connections.leave()
    assert [connections.current(), connections.current()] == [1, 1]


def test_one_that_is_slow_to_connect_is_not_taken_for_silent(server: Server, address: str) -> None:
    """The others watch it from when it says its name, which is after its first heartbeat."""
    workers = [server.start(address, 2, "diloco", 40, SILENCE_S, connect_s) for connect_s in (0.0, 1.5 * SILENCE_S)]
    end_alike(workers)
    for worker in workers:
        assert {line[3] for line in worker.lines("step")} == {"2"}


@pytest.mark.parametrize("connect_s", [0.0, pytest.param(1.5 * SILENCE_S, marks=pytest.mark.slow)])
def test_one_that_asks_to_join_and_dies_holds_up_nobody(server: Server, address: str, connect_s: float) -> None:
    """It is let in, is silent, and is left out again: a step takes the silence, not the time-out of a store.

    Where it takes long to connect, it has been done ahead, or is while the others wait.
    """
    workers = begun(server, address, "diloco", number=2, steps=80, connect_s=connect_s)
    workers[0].until("step", 5)
    client = sync.Meeting(address, 2).store()
    number = client.add("tickets", 1) - 1
    client.append("asks", f"{number},")
    end_alike(workers)
    assert max(worker.longest_step_s for worker in workers) < 2.5 * SILENCE_S


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient-coding", "gradient-coding-cyclic"])
def test_gradient_coding_at_twenty_random_points(server: Server, name: str, one_thread: None) -> None:
    """A worker, not the master, killed or stopped anywhere; sometimes another joins in its place."""
    draw = random.Random(name)
    for point in range(20):
        store, address = sync.host_meeting()
        workers = by_place(begun(server, address, name, steps=60, silence_s=1.0))
        struck = workers.pop(1 + draw.randrange(2))
        time.sleep(draw.random() * 0.4)
        struck.send(draw.choice([signal.SIGKILL, signal.SIGSTOP]))
        if struck.lines("finished"):
            continue
        if draw.random() < 0.5:
            workers.append(server.start(address, 3, name, 60, 1.0))
        for worker in workers[:2]:
            worker.until("finished")
        end_alike(workers[:2])
        if name == "gradient-coding":
            assert workers[0].lines("finished")[0][1] == coded_without_faults(60), point
        assert max(worker.longest_step_s for worker in workers[:2]) < 2, point
        for worker in (struck, *workers[2:]):  # one that came when the run had ended waits for a place in vain
            with contextlib.suppress(ProcessLookupError):
                worker.send(signal.SIGKILL)
        del store


@pytest.mark.slow
@pytest.mark.parametrize("name", BEAR)
def test_twenty_random_points(server: Server, name: str) -> None:
    """Killed or stopped anywhere, at any worker; on a machine that runs nothing else, the others go on within two seconds."""
    draw = random.Random(name)
    for point in range(20):
        store, address = sync.host_meeting()
        workers = begun(server, address, name, steps=30, silence_s=1.0)
        struck = workers.pop(draw.randrange(3))
        struck.until("joined")
        time.sleep(draw.random() * 0.4)
        struck.send(draw.choice([signal.SIGKILL, signal.SIGSTOP]))
        if struck.lines("finished"):
            continue
        end_alike(workers)
        assert max(worker.longest_step_s for worker in workers) < 2, point
        with contextlib.suppress(ProcessLookupError):
            struck.send(signal.SIGKILL)
        del store
