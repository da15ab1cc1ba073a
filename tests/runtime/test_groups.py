"""Process groups are made once, and end with the default group."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import torch.distributed as dist

from trainwright.launch.group import process_group
from trainwright.runtime import groups
from trainwright.runtime.groups import made_once


def test_a_group_is_made_once_and_kept_no_longer_than_the_default_group() -> None:
    """Gloo's threads go with the last reference to their group."""
    made: list[weakref.ref[dist.ProcessGroup]] = []

    def make() -> dist.ProcessGroup:
        group = dist.new_group([0])
        made.append(weakref.ref(group))
        return group

    for num_worlds in (1, 2):
        with process_group():
            world = weakref.ref(dist.group.WORLD)
            assert made_once("own", make) is made_once("own", make)
            assert len(made) == num_worlds
        gc.collect()
        assert world() is None
        assert made[-1]() is None
        assert not groups._kept


LEAVES = """
import os
import torch
from trainwright.launch import init

init("cpu")
import torch.distributed.nn  # as torch's compiler does when a script first uses it

torch.distributed.destroy_process_group()
print([name for task in os.listdir("/proc/self/task") if "gloo" in (name := open(f"/proc/self/task/{task}/comm").read())])
"""


def test_no_thread_of_gloo_outlives_the_default_group() -> None:
    found = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr
