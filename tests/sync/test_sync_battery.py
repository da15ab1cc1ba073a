"""One battery for every sync method: its record against what is sent and kept, resume, real ranks against simulated."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import sync_cases
from tests.pool import Pool
from tests.sync_cases import CASES, digest, program
from trainwright import launch, sync
from trainwright.artifacts import UserError
from trainwright.launch import run_processes
from trainwright.sync import Simulation, simulate
from trainwright.sync.outbox import Outbox

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
every = pytest.mark.parametrize("name", tuple(CASES))


def simulated(name: str, size: int, **keywords: Any) -> Simulation[Any]:
    return simulate([program(name, **keywords) for _ in range(size)])


def largest(name: str) -> int:
    return max(size for size in CASES[name].sizes if size <= 4)


@functools.cache
def uninterrupted(name: str) -> Simulation[Any]:
    """A whole run of as many workers as four allow, which nobody changes."""
    return simulated(name, largest(name))


def expected(names: list[str], size: int) -> dict[str, list[Any]]:
    """Return what `sync_cases.on_ranks` has to find: each worker's digest, and the bytes of all together."""
    runs = {name: simulated(name, size) for name in names}
    return {name: [[digest(joined) for joined, _ in run.results], run.sent_bytes] for name, run in runs.items()}


def test_every_method_has_a_case() -> None:
    assert set(CASES) == set(sync.names())


@every
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_sent_are_those_declared(name: str, size: int) -> None:
    if size not in CASES[name].sizes and size != 3:
        pytest.skip("not a number of workers of the battery's case")
    for num_steps in (5, CASES[name].num_steps):
        try:
            run = simulated(name, size, num_steps=num_steps)
        except UserError as error:  # three workers of one-peer, say
            assert "worker" in str(error)  # noqa: PT017
            return
        joined = run.results[0][0]
        assert run.sent_bytes == joined.record.sent_bytes(joined.size, joined.method.num_steps)
        assert (size == 1) == (run.sent_bytes == 0)


@every
def test_the_state_kept_is_the_state_declared(name: str) -> None:
    """By each worker; of a master and its workers, by the master, who keeps most."""
    kept = []
    for _, held in (run := uninterrupted(name)).results:
        vectors = [value for value in held["sync"]["state"].values() if isinstance(value, torch.Tensor)]
        kept.append(sum(value.numel() * value.element_size() for value in vectors if value.numel() > 1))
    joined = run.results[0][0]
    assert max(kept) == joined.record.state_bytes(joined.size)
    assert len(set(kept)) == 1 or joined.method.keeps_places


@every
def test_resume_equals_uninterrupted_to_the_bit(name: str) -> None:
    case = CASES[name]
    size = largest(name)
    for stop in {1, case.num_steps // 2 + 1}:
        halves = [copy.deepcopy(held) for _, held in simulated(name, size, num_steps=stop).results]
        run = simulate([program(name, begin=half) for half in halves])
        assert [digest(joined) for joined, _ in run.results] == [
            digest(joined) for joined, _ in uninterrupted(name).results
        ]


@every
def test_workers_are_equal_when_they_should_be(name: str) -> None:
    case = CASES[name]
    run = uninterrupted(name)
    for step, digests in enumerate(zip(*(held["digests"] for _, held in run.results)), start=1):
        should = case.equal_every > 0 and step % case.equal_every == 0
        assert len(set(digests)) == 1 or not should


def equals_simulated(pool: Any, size: int) -> None:
    names = [name for name, case in CASES.items() if size in case.sizes]
    want, found = expected(names, size), pool("tests.sync_cases:on_ranks", names=names)
    for name in names:
        assert [rank[name][0] for rank in found] == want[name][0], name
        sent, declared = sum(rank[name][1] for rank in found), found[0][name][2]
        assert sent == declared == want[name][1], name


def test_one_and_two_ranks_equal_the_simulator_to_the_bit(pool2: Pool) -> None:
    launch.init("cpu")
    equals_simulated(lambda function, names: [sync_cases.on_ranks(names)], 1)
    equals_simulated(pool2.run, 2)


def test_messages_that_nobody_takes_are_settled_at_the_end(pool2: Pool) -> None:
    assert pool2.run("tests.sync_cases:left_over", timeout_s=60) == [[0.0, 0.0], [-1.0, -1.0]]


@pytest.mark.slow  # three processes import torch anew
def test_a_script_ends_after_finish_whatever_was_under_way() -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*run, "tests/sync_cases.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    digests = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("finished")]
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_a_failed_send_is_raised_by_the_next_call() -> None:
    def fails() -> None:
        raise RuntimeError("the peer is gone")

    outbox = Outbox("worker 1")
    outbox.put(fails)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        outbox.close()


@pytest.mark.slow  # two ranks are tested on each change
def test_four_ranks_equal_the_simulator_to_the_bit(pool4: Pool) -> None:
    equals_simulated(pool4.run, 4)


@pytest.mark.slow
def test_eight_ranks_equal_the_simulator_to_the_bit() -> None:
    names = [name for name, case in CASES.items() if 8 in case.sizes]
    want, found = expected(names, 8), run_processes("tests.sync_cases:on_ranks", {"names": names}, 8)
    for name in names:
        assert [rank[name][0] for rank in found] == want[name][0], name
        assert sum(rank[name][1] for rank in found) == found[0][name][2] == want[name][1], name
