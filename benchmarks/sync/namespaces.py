"""Network namespaces of this machine, joined by a bridge, whose links are limited: a slow network without a second machine.

A worker's own link carries `mbit` megabits a second each way: `tc tbf` on what it sends and on what is sent to it. TCP is
`CONTROL`'s, whatever the machine's own is. Needs root.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from types import TracebackType
from typing import Self

BURST_BYTES, _QUEUE, CONTROL = 16 * 1024, "400ms", "reno"
"""The bytes that an idle link lets through at once, and the longest that a packet waits for its turn; how TCP finds its rate."""

_NUMBERS = itertools.count()
"""The kernel takes its time to forget the links of a namespace that is gone, so names are not used twice."""


class Namespaces:
    """A context manager: `num` namespaces with addresses 10.77.0.1 …; `command(k)` is what runs a program in one."""

    def __init__(self, num: int, mbit: float) -> None:
        self.num, self.mbit = num, mbit
        self._tag = f"tw{os.getpid() % 10_000}n{next(_NUMBERS)}"

    def command(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(index)]

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def __enter__(self) -> Self:
        _run(f"ip link add {self._tag} type bridge")
        _run(f"ip link set {self._tag} up")
        for index in range(self.num):
            name, outer = self._name(index), f"{self._tag}v{index}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {outer} type veth peer name eth0 netns {name}")
            _run(f"ip link set {outer} master {self._tag}")
            _run(f"ip link set {outer} up")
            inside = f"ip netns exec {name}"
            _run(f"{inside} ip link set lo up")
            _run(f"{inside} ip addr add {self.address(index)}/24 dev eth0")
            _run(f"{inside} ip link set eth0 up")
            _run(f"{inside} sysctl -qw net.ipv4.tcp_congestion_control={CONTROL}")
            limit = f"root tbf rate {self.mbit}mbit burst {BURST_BYTES} latency {_QUEUE}"
            _run(f"{inside} tc qdisc add dev eth0 {limit}")
            _run(f"tc qdisc add dev {outer} {limit}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in range(self.num):
            subprocess.run(["ip", "netns", "del", self._name(index)], check=False)
        subprocess.run(["ip", "link", "del", self._tag], check=False)

    def _name(self, index: int) -> str:
        return f"{self._tag}-{index}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
