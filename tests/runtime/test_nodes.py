"""Several nodes, played by several torchruns on this machine: each starts one rank, and they meet at one endpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm.sh"
MODEL = f"{ROOT}/tests/models/micro.py:uneven_labels"  # needs no package that takes seconds to import
SRUN = """#!/bin/bash
# What srun does, with two nodes that are this machine.
"$@" & first=$!
"$@" & second=$!
wait $first && wait $second
"""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "plan.json"
    assert main(["plan", MODEL, "--hardware", "cpu:2", "--solver", "fsdp", "-o", str(path)]) == 0
    return path


def run_script(folder: Path, plan: Path, steps: int) -> subprocess.CompletedProcess[str]:
    """Run the script as SLURM would, with stand-ins for its two commands."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho localhost\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_NNODES": "2", "SLURM_JOB_ID": f"{steps}"}
    # as between machines: all is sent
    ours = {
        "TRAINWRIGHT_SHARED_MEMORY": "0",
        "MODEL": MODEL,
        "PLAN": str(plan),
        "RUN": str(folder / "run"),
        "PROCESSES": "1",
        "EVERY": "2",
    }
    paths = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | slurm | ours | {
        "PORT": str(port), "STEPS": str(steps), "PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_script_is_valid_and_asks_for_what_it_needs() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    bare = {key: value for key, value in os.environ.items() if key not in ("MODEL", "PLAN", "RUN")}
    done = subprocess.run(["bash", str(SCRIPT)], env=bare, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "a model is needed" in done.stderr


@pytest.mark.slow
def test_two_nodes_train_together(plan_path: Path, tmp_path: Path) -> None:
    first = run_script(tmp_path, plan_path, steps=4)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("4 steps on 2 ranks") == 1, "one rank speaks"
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == ["step-00000001", "step-00000003"]


@pytest.mark.slow
def test_they_go_on_when_the_job_comes_back(plan_path: Path, tmp_path: Path) -> None:
    first = run_script(tmp_path, plan_path, steps=4)
    assert first.returncode == 0, first.stderr
    again = run_script(tmp_path, plan_path, steps=6)
    assert again.returncode == 0, again.stderr
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6)), "each step once: it went on"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000003", "step-00000005"]
