"""`Cluster`: what there is to train on. Devices, their memory and speed, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from .record import Artifact, Record, UserError

KernelRow = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=2)]
"""Sizes, then the work per second that was reached: FLOPs of a product, bytes of anything else."""


class Overheads(Record):
    """Seconds that a step takes beyond its kernels, for each call of a phase, views among them.

    On a GPU, what the host takes to issue a call that launches a kernel; the device runs beside the host and behind it.
    """

    forward_s: float = Field(default=0.0, ge=0)
    backward_s: float = Field(default=0.0, ge=0)
    update_s: float = Field(default=0.0, ge=0)
    view_s: float = Field(default=0.0, ge=0)
    """On a GPU's host: a call that launches none."""
    compiled_s: float = Field(default=0.0, ge=0)
    """A kernel that a graph of `torch.compile` launches."""
    graph_s: float = Field(default=0.0, ge=0)
    """The way into such a graph: guards, the function that autograd knows, the unpacking of its arguments."""


AttentionRate = Literal["forward", "backward", "cudnn forward", "cudnn backward"]


class Device(Record):
    """One accelerator or one process of a CPU machine."""

    name: str
    kind: Literal["cpu", "gpu"]
    memory_bytes: int = Field(gt=0)
    flops_per_s: dict[str, float]
    """Reached (not peak) matmul rate by dtype: fp64, fp32, bf16, fp16; tf32: of fp32 products that may be rounded so."""
    conv_flops_per_s: dict[str, float] = {}
    """Reached convolution rate by dtype; empty: as matmul."""
    bandwidth_bytes_per_s: float = Field(gt=0)
    """Device memory, reads and writes together."""
    launch_s: float = Field(ge=0)
    """Floor of one op."""
    num_units: int = Field(default=0, ge=0)
    """A GPU's multiprocessors, over which a product's tiles are spread; 0: products run at their rate in any shape."""
    attention: dict[AttentionRate, Annotated[float, Field(gt=0)]] = {}
    """The share of the rate of products that a GPU's fused attention of long sequences reaches; cuDNN's, else as the others."""
    reorder_bytes_per_s: float = Field(default=0.0, ge=0)
    """The rate at which a GPU turns 16-bit images into channels-last or back, reads and writes together, bandwidth permitting."""
    blas_workspace_bytes: int = Field(default=0, ge=0)
    """What the library of matrix products keeps for each thread that calls it."""
    kernels: dict[str, tuple[KernelRow, ...]] = {}
    """Measured kernels, `"mm fp32"`: rows; where there are any, they tell the time instead of the rates above."""
    overheads: Overheads = Overheads()
    factors: dict[Literal["compute", "update", "communication"], Annotated[float, Field(gt=0)]] = {}
    """By how much forward and backward (`compute`) or the optimizer's step (`update`) take longer than all this says."""

    def with_tf32(self) -> Device:
        """Return the device as torch uses it where `torch.set_float32_matmul_precision("high")` was called.

        Unchanged where it has no such units.
        """
        rate = self.flops_per_s.get("tf32")
        return self if rate is None else self.model_copy(update={"flops_per_s": {**self.flops_per_s, "fp32": rate}})


class Link(Record):
    """One level of the machine's interconnect; `size` devices (or groups of the next level) share it."""

    name: str
    size: int = Field(ge=1)
    bandwidth_bytes_per_s: float = Field(gt=0)
    """What one device sends over it, one direction, while all do."""
    latency_s: float = Field(ge=0)
    """Of one hop of a collective."""
    factors: dict[str, float] = {}
    """By how much a collective (`reduce_scatter`) takes longer here than its formula says."""


class Tier(Record):
    """Memory beside the device's, of what one device reaches while all do: the host's, or a disk."""

    write_bytes_per_s: float = Field(gt=0)
    """From the device."""
    read_bytes_per_s: float = Field(gt=0)
    """To the device."""
    latency_s: float = Field(default=0.0, ge=0)
    """Of one transfer."""
    capacity_bytes: int | None = Field(default=None, gt=0)
    """For each device; None: more than can be asked for."""
    overlap: float = Field(default=1.0, ge=0, le=1)
    """The share of a transfer's time that a computation hides which goes on beside it."""
    commit_s: float = Field(default=0.0, ge=0)
    """The seconds until a step that was written to a disk is sure to outlast the process (`fsync`, and a small file replaced)."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: Any) -> dict[str, Any]:
        """Leave out what files of before it do not say, so that the digests of their plans stay."""
        data: dict[str, Any] = handler(self)
        if not self.commit_s:
            del data["commit_s"]
        return data

    def transfers_s(self, num_bytes: float, num_transfers: int) -> tuple[float, float]:
        """Return the seconds in which so many transfers of so many bytes in all are written, and in which they are read.

        >>> Tier(write_bytes_per_s=1e9, read_bytes_per_s=2e9, latency_s=0.5).transfers_s(4e9, 2)
        (5.0, 3.0)
        """
        begin_s = num_transfers * self.latency_s
        return num_bytes / self.write_bytes_per_s + begin_s, num_bytes / self.read_bytes_per_s + begin_s

    def exposed_s(self, transfer_s: float, compute_s: float) -> float:
        """Return what transfers add to computations of `compute_s` that go on beside them.

        >>> tier = Tier(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
        >>> tier.exposed_s(3.0, 2.0), tier.exposed_s(1.0, 2.0)
        (1.0, 0.0)
        """
        return transfer_s - self.overlap * min(transfer_s, compute_s)


class MeshAxis(Record):
    """One axis of the `DeviceMesh` of a plan, or any group of devices that exchange."""

    name: str
    size: int = Field(ge=1)
    bandwidth_bytes_per_s: float = Field(gt=0)
    """What one device sends of a ring over the axis, one direction, while all do."""
    latency_s: float = Field(ge=0)
    factors: dict[str, float] = {}
    rates: dict[str, Annotated[float, Field(gt=0)]] = {}
    """The same of kinds of collectives that are no rings."""
    crossed: str = ""
    """The outermost link that the axis uses; axes of one link share it."""


def axis_over(links: tuple[Link, ...], ranks: Collection[int], name: str | None = None) -> MeshAxis:
    """Return the axis of a group of `ranks` among devices that fill the `links` innermost first, as all such groups use them.

    A group within one node has its link. One over several nodes runs as rings, each of which leaves a node by another of its
    members, so that the shares of the network of all members are used: the lesser of that and the link within. Each hop is as
    late as the outermost link's. An all-to-all is no ring: a device sends over each link what goes to other groups there.

    >>> links = (Link(name="node", size=2, bandwidth_bytes_per_s=1e9, latency_s=0), Link(name="gpu", size=4,
    ...          bandwidth_bytes_per_s=3e9, latency_s=0))
    >>> [axis_over(links, ranks).bandwidth_bytes_per_s / 1e9 for ranks in ([0, 1], [0, 4], [0, 1, 4, 5], range(8))]
    [3.0, 1.0, 2.0, 3.0]
    >>> axis_over(links, range(8)).rates["all_to_all"] / 1e9  # of 7 parts, 4 leave the node
    1.75
    """
    crossed = [(link, here, above) for link, here, above in _levels(links, ranks) if above < here]
    outermost = crossed[-1][0] if crossed else links[-1]
    shares = [len(ranks) / here * link.bandwidth_bytes_per_s for link, here, _ in crossed]
    parts = [
        len(ranks) * (1 / above - 1 / here) / link.bandwidth_bytes_per_s for link, here, above in crossed
    ]  # seconds for each byte that goes to one rank
    return MeshAxis(
        name=name or outermost.name,
        size=len(ranks),
        bandwidth_bytes_per_s=min(shares, default=outermost.bandwidth_bytes_per_s),
        latency_s=outermost.latency_s,
        factors=outermost.factors,
        rates={"all_to_all": (len(ranks) - 1) / max(parts)} if len(crossed) > 1 else {},
        crossed=outermost.name,
    )


def _levels(links: tuple[Link, ...], ranks: Collection[int]) -> Iterator[tuple[Link, int, int]]:
    """Yield each link, innermost first, with the number of its parts that hold any of the ranks, and of the groups of them."""
    units = set(ranks)
    for link in reversed(links):
        above = {unit // link.size for unit in units}
        yield link, len(units), len(above)
        units = above


class Learned(Record):
    """A run that a file was corrected by: seconds a step, predicted and measured, by category."""

    model: str
    optimizer: str
    num_ranks: int
    num_steps: int
    fingerprint: str | None
    predicted_s: dict[str, float]
    measured_s: dict[str, float]


class Cluster(Artifact):
    """Devices of one kind and the links between them, outermost (slowest) first."""

    has_summary: ClassVar[bool] = True
    name: str
    device: Device
    links: tuple[Link, ...]
    offload: dict[Literal["host", "disk"], Tier] = {}
    """Where a plan may keep what the backward, or the optimizer, needs later."""
    source: str = ""
    fingerprint: str | None = None
    learned: tuple[Learned, ...] = ()
    """The runs by which `calibrate --learn` has set the device's factors."""

    @model_validator(mode="before")
    @classmethod
    def _with_tiers(cls, data: Any) -> Any:
        """Files of before there were tiers state the host's bandwidth alone."""
        if isinstance(data, dict) and "host_bandwidth_bytes_per_s" in data:
            data = dict(data)
            rate = data.pop("host_bandwidth_bytes_per_s")
            if rate:
                data.setdefault("offload", {"host": {"write_bytes_per_s": rate, "read_bytes_per_s": rate}})
        return data

    @property
    def num_devices(self) -> int:
        return math.prod(link.size for link in self.links)

    def tier(self, name: str) -> Tier:
        """Return the tier `name`; `UserError` where there is none."""
        if name not in self.offload:
            known = " and ".join(self.offload) or "none"
            raise UserError(
                f"hardware with a {name} tier is needed to offload there; {self.name} has {known}; "
                "calibrate, or add `offload` to the hardware file, or plan with --offload none"
            )
        return self.offload[name]  # type: ignore[index]

    def mesh(self, shape: tuple[int, ...] | None = None) -> tuple[MeshAxis, ...]:
        """Lay a mesh of `shape` (outermost axis first) over the devices; `None`: one axis per link.

        `axis_over` says what an axis that spans several links reaches. `UserError` when the sizes do not multiply to the number
        of devices.
        """
        if shape is None:
            shape = tuple(link.size for link in self.links if link.size > 1) or (1,)
        if math.prod(shape) != self.num_devices or min(shape) < 1:
            raise UserError(
                f"a mesh of {self.num_devices} devices is needed for {self.name}; "
                f"{'x'.join(map(str, shape))} has {math.prod(shape)}; choose sizes whose product is {self.num_devices}"
            )
        as_links = shape == tuple(link.size for link in self.links if link.size > 1)
        names = (
            [link.name for link in self.links if link.size > 1] if as_links else [f"a{i}" for i in range(len(shape))]
        )
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        return tuple(
            axis_over(self.links, range(0, size * stride, stride), name)
            for name, size, stride in zip(names, shape, strides)
        )

    def of_stage(self, num_stages: int) -> Cluster:
        """Return the devices of one of `num_stages` pipeline stages, which lie over the outermost links.

        `UserError` where the stages would not be alike: stages take whole groups of the outer links, or equal parts of one.
        """
        left, links = num_stages, []
        for link in self.links:
            shared = math.gcd(left, link.size)
            if left > 1 and shared not in (left, link.size):
                break
            left //= shared
            links.append(link.model_copy(update={"size": link.size // shared}))
        if left > 1:
            raise UserError(
                f"a number of stages that cuts {self.name} into equal parts is needed; got {num_stages}; try one of "
                f"{', '.join(map(str, self.stage_numbers))}"
            )
        kept = [link for link in links if link.size > 1] or links[-1:]
        return self if num_stages == 1 else self.model_copy(update={"links": tuple(kept)})

    @property
    def stage_numbers(self) -> list[int]:
        """The numbers of pipeline stages above 1 that the devices can be cut into."""
        found, outer = [], 1
        for link in self.links:
            found += [outer * part for part in range(2, link.size + 1) if link.size % part == 0]
            outer *= link.size
        return found

    def between_stages(self, num_stages: int) -> tuple[Link, ...]:
        """Return the link from each stage to the next, over which every device sends to its like."""
        inner = self.num_devices // num_stages
        found = []
        for stage in range(num_stages - 1):
            here, there = stage * inner, (stage + 1) * inner
            found.append(next(link for link, stride, _ in self._strides() if here // stride != there // stride))
        return tuple(found)

    def _strides(self) -> list[tuple[Link, int, int]]:
        """Each link of more than one device with its stride and its span, both in devices."""
        rows, span = [], self.num_devices
        for link in self.links:
            if link.size > 1:
                rows.append((link, span // link.size, span))
            span //= link.size
        return rows
