"""What a step frees is there for the next: the system is not asked for it again."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys

import pytest

from tests.grids import slow_but
from trainwright.runtime import host_memory

STEPS = """
import resource, runpy, sys
import torch

if sys.argv[1] != "plan":
    keep_freed_memory = runpy.run_path(sys.argv[2])["keep_freed_memory"]  # alone: what it is part of takes seconds to import
else:
    import trainwright as tw
    from trainwright.runtime.host_memory import keep_freed_memory
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    loss = {"loss_fn": lambda out, _: out.mean()}
    tw.parallelize(model, tw.plan(model, (torch.ones(4, 256),), hardware="cpu:1", **loss), **loss)

def step():
    return [torch.zeros(2**18) for _ in range(64)]  # 64 MiB, 1 MiB each

for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, keep_freed_memory())
"""


TRIMMING = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}


@functools.cache
def with_trimming() -> tuple[int, bool]:
    """What a step without a plan asks for, where the user has let the C library return memory."""
    return faults_and_answer("alone", **TRIMMING)


def faults_and_answer(mode: str, **variables: str) -> tuple[int, bool]:
    """Pages asked for in four steps, and whether the setting was made."""
    own = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", STEPS, mode, host_memory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**own, **variables}, timeout=200)
    faults, answer = done.stdout.split()[-2:]
    return int(faults), answer == "True"


@pytest.mark.slow  # two processes that count page faults; what is set is asked below
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_a_planned_module_does_not_ask_for_its_memory_again() -> None:
    kept, made = faults_and_answer("plan")
    asked, _ = with_trimming()
    assert made
    assert asked > 10_000
    assert kept < 0.02 * asked


@pytest.mark.parametrize("setting", slow_but([TRIMMING], [{"MALLOC_TRIM_THRESHOLD_": "131072"}, TRIMMING]))
def test_what_the_user_has_set_stays(setting: dict[str, str]) -> None:
    faults, made = with_trimming() if setting == TRIMMING else faults_and_answer("alone", **setting)
    assert not made
    assert faults > 10_000


GAPS = """
import runpy, sys
from pathlib import Path

settings = runpy.run_path(sys.argv[1])  # alone: what it is part of takes seconds to import

def held():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) / 1024

def left():
    before = held()
    blocks = [bytearray(2**23) for _ in range(16)]
    blocks = blocks[1::2]
    return round(held() - before)

print(settings["give_freed_memory_back"](), left(), settings["keep_freed_memory"](), left())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_with_a_tier_gaps_between_what_stays_are_given_back() -> None:
    """After every second of 16 blocks of 128 MiB in all is freed, a heap that keeps what is freed still counts nearly all."""
    own = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", GAPS, host_memory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own, timeout=200)
    made, given_back, made_again, kept = done.stdout.split()[-4:]
    assert (made, made_again) == ("True", "True")
    assert int(given_back) <= 68
    assert int(kept) >= 116
