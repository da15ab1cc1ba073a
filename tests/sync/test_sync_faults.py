"""Workers that are killed, stopped, or join, while others train by a sync method: who goes on, and who says what."""

from __future__ import annotations

import contextlib
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
from typing import Any

import pytest

from trainwright import sync
from trainwright.artifacts import UserError

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
BEAR = ("diloco", "lsgd-asynchronous", "decentlam", "just-one-byte")
"""Methods that promise to live with faults."""


@dataclass
class Worker:
    pid: int
    output: Path

    def lines(self, kind: str) -> list[list[str]]:
        text = self.output.read_text() if self.output.exists() else ""
        return [line.split() for line in text.splitlines() if line.startswith(kind)]

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
    server: Server, address: str, name: str, number: int = 3, steps: int = 40, silence_s: float = 1.0
) -> list[Worker]:
    return [server.start(address, number, name, steps, silence_s) for _ in range(number)]


def end_alike(workers: list[Worker]) -> None:
    for worker in workers:
        worker.until("finished")
    assert len({worker.lines("finished")[0][1] for worker in workers}) == 1


@pytest.mark.parametrize("name", BEAR)
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


@pytest.mark.parametrize("name", ["diloco", "just-one-byte"])
def test_one_that_joins_is_bit_identical_after_one_round(server: Server, address: str, name: str) -> None:
    workers = begun(server, address, name, number=2, steps=200)
    workers[0].until("step", 9)
    late = server.start(address, 2, name, 200, 1.0)
    late.until("step", 20)
    end_alike([*workers, late])
    period = 4 if name == "diloco" else 1
    first = int(late.lines("step")[0][1])
    assert first > 5
    digests = [{int(line[1]): line[4] for line in worker.lines("step")} for worker in [*workers, late]]
    rounds = [step for step in range(first, 201) if step % period == 0]
    assert rounds
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


@pytest.mark.slow
@pytest.mark.parametrize("name", BEAR)
def test_twenty_random_points(server: Server, name: str) -> None:
    """Killed or stopped anywhere, at any worker; on a machine that runs nothing else, the others go on within two seconds."""
    draw = random.Random(name)
    for point in range(20):
        store, address = sync.host_meeting()
        workers = begun(server, address, name, steps=30)
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
