"""Flower as separate processes on the loopback: a SuperLink, SuperNodes, `flwr run`, and how a run ended.

`flwr run` ends with status 0 where the run was only accepted: `finished` asks the SuperLink how it ended. Telemetry, update checks,
Ray's statistics and installations at run time are off; every port is a free one of the loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
APP = ROOT / "examples" / "federated"
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@dataclass
class Link:
    """A SuperLink of this test, and what runs beside it."""

    home: Path
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | ENVIRONMENT | {"FLWR_HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def start(self, name: str, *arguments: str) -> None:
        """Start one of Flower's programs, its output in a file of its name."""
        log = self.home / f"{name}-{len(self.processes)}.log"
        with open(log, "wb") as output:
            self.processes.append(
                subprocess.Popen(
                    [str(BIN / name), "--insecure", *arguments],
                    env=self.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip

    def flwr(self, *arguments: str, timeout: float = 120) -> str:
        """Run `flwr` to its end and return what it wrote."""
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, app: Path, config: str, *arguments: str) -> int:
        """Hand in an app and return the run's id."""
        written = self.flwr("run", str(app), "--format", "json", "--run-config", config, *arguments)
        return int(json.loads(written[written.index("{") :])["run-id"])

    def finished(self, run_id: int, timeout_s: float = 240) -> str:
        """Wait until the run has ended and return how, as `finished:completed`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status(run_id)
            if status.startswith("finished"):
                return status
            time.sleep(1.0)
        raise AssertionError(f"the run has not ended: {status}\n{self.logs()}")

    def status(self, run_id: int) -> str:
        written = self.flwr("ls", "--format", "json")
        runs: list[dict[str, Any]] = json.loads(written[written.index("{") :])["runs"]
        return next(str(run["status"]) for run in runs if int(run["run-id"]) == run_id)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.home.glob("*.log")))


@contextlib.contextmanager
def superlink(home: Path, *arguments: str) -> Iterator[Link]:
    """A SuperLink on a free port; with `--simulation` it runs its nodes itself. Everything is ended afterwards."""
    link = Link(home)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "own"\n[superlink.own]\naddress = "127.0.0.1:{link.port}"\ninsecure = true\n'
    )
    link.start("flower-superlink", "--host", "127.0.0.1", "--port", str(link.port), *arguments)
    try:
        _wait_for(link)
        yield link
    finally:
        for process in reversed(link.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
        for process in link.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def _wait_for(link: Link, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", link.port), timeout=1):
            return
        assert link.processes[0].poll() is None, link.logs()
        time.sleep(0.2)
    raise AssertionError(link.logs())


def add_nodes(link: Link, count: int) -> None:
    """Start SuperNodes, one process each, with their partitions."""
    for partition in range(count):
        link.start(
            "flower-supernode", "--superlink", f"127.0.0.1:{link.port}",
            "--node-config", f"partition-id={partition} num-partitions={count}", "--port", str(free_port()),
        )  # fmt: skip
