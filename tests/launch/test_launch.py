"""Ranks start together, answer in order, and end together, whatever happens to one of them or to their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grids import slow_but
from tests.pool import Pool
from tests.process_tree import assert_ended, is_alive
from trainwright import launch
from trainwright.artifacts import Refusal, UserError
from trainwright.launch import WorkerError, Workers, emit, run_processes

HERE = "tests.launch.test_launch"


# What the ranks run.


def sum_of_ranks(scale: int = 1) -> list[int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(scale * (dist.get_rank() + 1)))
    dist.all_reduce(value)
    return [dist.get_rank(), int(value)]


def sums_along_a_mesh() -> list[int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    sums = []
    for name in ("outer", "inner"):
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value, group=mesh.get_group(name))
        sums.append(int(value))
    return sums


def length_of(text: str) -> list[object]:
    return [len(text), text]


def return_a_tensor() -> object:
    import torch

    return torch.ones(2)


def setting() -> dict[str, Any]:
    import torch

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = {name: int(os.environ[name]) for name in names}
    return {**numbers, "threads": torch.get_num_threads(), "rank": launch.rank(), "size": launch.world_size()}


def raise_on_last(kind: str, text: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        raise {"user": UserError, "refusal": Refusal, "value": ValueError}[kind](text)
    dist.barrier()


def die_on_last(number: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)
    dist.barrier()


def wait_for_nobody() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.barrier()


def answer_then_die_on_last() -> None:
    import threading

    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        dist.barrier()


def lose_the_connection_before_its_other_end_dies() -> None:
    """What sockets that close long before their process counts as ended look like from outside."""
    import threading

    import torch.distributed as dist

    if dist.get_rank() < dist.get_world_size() - 1:
        raise RuntimeError("Connection closed by peer")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()


def ignore_sigterm_and_sleep() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def tell(count: int) -> str:
    print("this must not reach standard output")
    for step in range(count):
        emit({"step": step})
    return "a result of two lines\nwith é"


def fork_and_die() -> None:
    if os.fork() == 0:
        time.sleep(600)
    if launch.rank() == 0:
        emit({"forked": True})
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_the_check_for_survivors_sees_one() -> None:
    survivor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with pytest.raises(AssertionError):
        assert_ended([survivor.pid], within_s=0.2)
    survivor.kill()
    survivor.wait()
    assert_ended([survivor.pid])


# Answers.


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_results_come_in_order_of_ranks(num_ranks: int) -> None:
    results = run_processes(f"{HERE}:sum_of_ranks", {"scale": 2}, num_processes=num_ranks)
    total = num_ranks * (num_ranks + 1)
    assert results == [[rank, total] for rank in range(num_ranks)]


def test_the_pool_serves_many_calls_with_the_same_processes(pool2: Pool) -> None:
    assert pool2.run(f"{HERE}:sum_of_ranks") == [[0, 3], [1, 3]]
    pids = pool2.pids
    assert pool2.run(f"{HERE}:sum_of_ranks", scale=10) == [[0, 30], [1, 30]]
    assert pool2.pids == pids


def test_a_mesh_of_four_ranks_has_groups_along_each_axis(pool4: Pool) -> None:
    assert pool4.run(f"{HERE}:sums_along_a_mesh") == [[2, 1], [4, 1], [2, 5], [4, 5]]


def test_payloads_and_results_larger_than_a_pipe_pass(pool2: Pool) -> None:
    assert pool2.run(f"{HERE}:length_of", text="é" * 300_000) == [[300_000, "é" * 300_000]] * 2


def test_ranks_see_what_torchrun_sets_and_share_the_cores(pool2: Pool) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank, seen in enumerate(pool2.run(f"{HERE}:setting")):
        assert seen["RANK"] == seen["LOCAL_RANK"] == seen["rank"] == rank
        assert seen["WORLD_SIZE"] == seen["LOCAL_WORLD_SIZE"] == seen["size"] == 2
        assert 1 <= seen["threads"] <= share


def test_events_arrive_in_order_and_prints_do_not_touch_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    events: list[tuple[int, int]] = []
    results = run_processes(
        f"{HERE}:tell", {"count": 3}, num_processes=2, on_event=lambda rank, event: events.append((rank, event["step"]))
    )
    assert results == ["a result of two lines\nwith é"] * 2
    assert [step for rank, step in events if rank == 1] == [0, 1, 2]
    assert len(events) == 6
    out, err = capfd.readouterr()
    assert out == ""
    assert "[rank 1] this must not reach standard output" in err


def test_emit_outside_a_rank_does_nothing() -> None:
    emit({"step": 1})


# Faults.


@pytest.mark.slow
def test_ranks_leave_without_aborting(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(12):
        assert run_processes(f"{HERE}:sum_of_ranks", num_processes=2) == [[0, 3], [1, 3]]
    assert "terminate called" not in capfd.readouterr().err


def test_a_ranks_exception_names_the_rank_and_the_cause() -> None:
    with Workers(3) as workers:
        pids = workers.pids
        with pytest.raises(WorkerError, match=r"rank 2 of 3 raised ValueError: seven is no answer") as caught:
            workers.call(f"{HERE}:raise_on_last", {"kind": "value", "text": "seven is no answer"})
        assert caught.value.rank == 2
        assert "raise_on_last" in str(caught.value)
        assert workers.closed
        with pytest.raises(WorkerError, match="closed"):
            workers.call(f"{HERE}:setting")
    assert_ended(pids)


@pytest.mark.parametrize(("kind", "expected"), [("user", UserError), ("refusal", Refusal)])
def test_the_packages_own_exceptions_stay_what_they_are(kind: str, expected: type[Exception]) -> None:
    text = "a dtype is needed; got 'fp7'; try fp32"
    with pytest.raises(expected) as caught:
        run_processes(f"{HERE}:raise_on_last", {"kind": kind, "text": text}, num_processes=1)
    assert str(caught.value) == text


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGABRT, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_all_and_is_named(number: signal.Signals) -> None:
    with Workers(3) as workers:
        pids = workers.pids
        started = time.monotonic()
        with pytest.raises(WorkerError, match=f"rank 2 of 3 was ended by {number.name}(.|\n)*about to die"):
            workers.call(f"{HERE}:die_on_last", {"number": int(number)})
    assert time.monotonic() - started < 20
    assert_ended(pids)


@pytest.mark.parametrize("worker", [answer_then_die_on_last, lose_the_connection_before_its_other_end_dies])
def test_a_death_after_the_answer_is_named_too_not_its_echo(worker: Callable[[], None]) -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2 was ended by SIGKILL"):
        run_processes(f"{HERE}:{worker.__name__}", num_processes=2)


def test_what_a_rank_forked_ends_with_it() -> None:
    with Workers(2, on_event=lambda rank, event: None) as workers:
        pids = workers.pids
        with pytest.raises(WorkerError, match="rank 0 of 2 was ended by SIGKILL"):
            workers.call(f"{HERE}:fork_and_die")
    assert_ended(pids)


def test_a_hung_call_times_out_and_says_where() -> None:
    with Workers(2) as workers:
        workers.call(f"{HERE}:setting")
        pids = workers.pids
        with pytest.raises(WorkerError, match=r"within 1 s; of 2 ranks, 0 did not(.|\n)*wait_for_nobody"):
            workers.call(f"{HERE}:wait_for_nobody", timeout_s=1)
    assert_ended(pids)


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    with Workers(1) as workers:
        workers.call(f"{HERE}:setting")
        pids = workers.pids
        with pytest.raises(WorkerError, match=r"within 0\.5 s"):
            workers.call(f"{HERE}:ignore_sigterm_and_sleep", timeout_s=0.5)
    assert_ended(pids)


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(WorkerError, match="no_such_function"):
        run_processes(f"{HERE}:no_such_function", num_processes=1)


def test_a_result_that_is_not_json_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 of 1 raised TypeError: .*Tensor is not JSON serializable"):
        run_processes(f"{HERE}:return_a_tensor", num_processes=1)


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(WorkerError, match="a GPU for local rank 0 is needed; this machine has 0"):
        run_processes(f"{HERE}:setting", num_processes=1, device="cuda")


def test_less_than_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 process is needed; got 0"):
        run_processes(f"{HERE}:setting", num_processes=0)


def test_the_pool_starts_anew_after_a_failure(pool2: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2 raised ValueError: once"):
        pool2.run(f"{HERE}:raise_on_last", kind="value", text="once")
    assert pool2.run(f"{HERE}:sum_of_ranks") == [[0, 3], [1, 3]]


# The parent's own end.

PARENT = f"""
import sys
from trainwright.launch import Workers
with Workers(2) as workers:
    workers.call("{HERE}:setting")
    print(*workers.pids, flush=True)
    workers.call("{HERE}:ignore_sigterm_and_sleep")
"""


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL], [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
def test_no_rank_outlives_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    time.sleep(0.3)
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(number)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode != 0
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert_ended(pids)


# Under torchrun, and alone.

TORCHRUN = """
import torch, torch.distributed as dist
from trainwright import launch
with launch.process_group():
    value = torch.ones(()) * (launch.rank() + 1)
    dist.all_reduce(value)
    print(f"sum {int(value)} of {launch.world_size()}\\n", end="", flush=True)
    with launch.process_group():
        pass
    assert dist.is_initialized()
assert not dist.is_initialized()
"""


@pytest.mark.slow  # tests/runtime/test_own_model.py joins them on each change
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_process_group_joins_torchruns_ranks(num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        str(script),
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count(f"sum {num_ranks * (num_ranks + 1) // 2} of {num_ranks}") == num_ranks


def test_process_group_alone_is_a_group_of_one() -> None:
    out = subprocess.run([sys.executable, "-c", TORCHRUN], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "sum 1 of 1"
