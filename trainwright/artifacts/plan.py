"""`Plan`: how every tensor is laid out over the devices, and what becomes of it until the backward needs it.

A plan is keyed by module paths, with repeated blocks written once: `transformer.h.{0-11}.attn:sdpa` is a path, the
range of blocks, and the op in that module. Per mesh axis, outermost first, an op names the loop it splits (`-`: none),
a parameter or batch entry its layout at rest (`R`: replicated; `S0`: split along dim 0; `S2.1/3.12.64`: split along the
second factor of dim 2, which is three matrices of 12 heads of 64).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_serializer, model_validator

from .cluster import Cluster
from .record import Artifact, Record, UserError, as_text

FORMAT_VERSION = 1
STAGED_VERSION = 2
"""Of plans with pipeline stages, which readers of the first version refuse."""
PIPE = "pipe"
"""The name of the mesh axis over which stages lie, always the outermost."""
DEFAULT_IMBALANCE = 1.25
"""By how much a rank's experts may get more rows than their even share, unless a plan is asked for another number."""
_SINCE_FIRST = (
    "loss_chunks",
    "expert_imbalance",
    "optimizer_options",
    "optimizer_form",
    "optimizer_groups",
    "optimizer_owned",
    "pipeline",
    "compile",
)
_NOT_DECIDED = {"predicted", "tier", "notes", "solver", "format_version", "torch_version"}
"""The fields that a plan's digest leaves out."""
EDITED = "edited"
"""The status of a plan whose decisions are not its planner's."""


class BatchEntry(Record):
    """One tensor of the batch: its global shape, and the layout in which each rank receives it."""

    shape: tuple[int, ...]
    dtype: str
    layout: tuple[str, ...] = ()


class ShapePlan(Record):
    """A further batch shape that a plan was made for, and what its step takes there under the same decisions."""

    batch: dict[str, tuple[int, ...]]
    """The global shape of every entry."""
    step_s: float
    peak_bytes: int


class ModelRef(Record):
    """Where the model came from, so that `check` can rebuild one of the zoo; never executed for any other."""

    name: str
    spec: str | None = None
    options: dict[str, Any] = {}


class ParamPlan(Record):
    """A parameter's layout at rest, per mesh axis.

    `offloaded` maps `state`, what the optimizer keeps for the parameter, to the blocks for which it is off the device: `0-5`,
    or `all`; where there are disks (`tier`), `param`, the parameter itself, too. `shared` lists the layouts (`R`, or `R S0` on
    two axes) in which one gathered copy serves all readers, as a tied embedding has several, and their gradients are summed
    before they are reduced; without, each reader gathers its own.
    """

    layout: tuple[str, ...]
    offloaded: dict[str, str] = {}
    shared: tuple[str, ...] = ()


class OpPlan(Record):
    """What one op (or a fused run of elementwise ops) splits, and the fate of what its backward needs.

    `recomputed` and `offloaded` map an output (`out`, `out1`), a kept internal (`internal`), or the converted copy of
    an operand (`in0`) to the blocks it holds for: `0-5`, or `all`. What is in neither is kept. `sampled` is the share of its
    operand's rows that a linear map keeps for the gradient of its weight, which is then an estimate; 0: exact.
    """

    split: tuple[str, ...]
    recomputed: dict[str, str] = {}
    offloaded: dict[str, str] = {}
    sampled: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: Any) -> dict[str, Any]:
        """Leave out what exact ops do not say, so that the digests of exact plans stay."""
        data: dict[str, Any] = handler(self)
        if not self.sampled:
            del data["sampled"]
        return data


class OptimizerGroup(Record):
    """Parameters, by name, for which an optimizer has settings of their own, or which are another optimizer's."""

    params: tuple[str, ...]
    options: dict[str, Any] = {}
    optimizer: str | None = None
    form: str | None = None
    """The form of that other optimizer's step; None where the group is not another's."""


class OffloadPlan(Record):
    """Where what is offloaded goes, and how many bytes of it each device may hold on the way, out and back."""

    tier: Literal["host", "disk"]
    in_flight_bytes: int = Field(ge=0)


class TierPlan(Record):
    """The use of the disks, or of the host's memory, where parameters, gradients and optimizer states rest, and what a step moves.

    Drives wear out by what is written to them. Which parameters and states rest there is said by `offloaded` of `params`.
    Bytes are a rank's, of a step in the middle of a run, activations included. `step_s`: what a step takes, by the plan's
    schedule and by the rates that the hardware file declares for the tier; `written_a_day`: what a day of such steps writes to
    disks.
    """

    place: Literal["disk", "host"] = "disk"
    window_bytes: int
    keep_bytes: int
    """The bytes of parameters and states that stay in memory."""
    held_bytes: int
    """The most bytes in memory, beside those, of what comes and goes; they are part of the peak."""
    state_bytes: int
    """The bytes of all optimizer states; disks have those that stay in memory, too."""
    update: Literal["during", "after"]
    commit_every: int
    read_bytes: int
    written_bytes: int
    written_a_day: int
    step_s: float
    disk_bytes: int = 0
    """The size of the files: both versions of everything."""
    host_bytes: int = 0
    """The bytes in the host's memory: what does not stay, activations not included."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: Any) -> dict[str, Any]:
        """Leave out what plans for disks do not say, so that they stay as they were written."""
        data: dict[str, Any] = handler(self)
        if self.place == "disk":
            del data["place"], data["host_bytes"]
        return data


class Pipeline(Record):
    """How the blocks of a model are cut into stages, each on ranks of its own, and how deep each stage warms up.

    `begins` names the blocks at which stages 1 … P-1 begin, as in plan keys (`transformer.h.7`). `in_flight` has a number a
    stage: so many forwards may wait for their backward there, at most. 1F1B warms stage s up by P-s; the number of
    micro-batches on all stages is GPipe.

    With `virtual` v above 1 stages are interleaved: stage s has the pieces s, s + P … of the P·v that `begins` cuts, and
    `in_flight` counts forwards of pieces. With `split_backward` the gradients of weights are made apart from the rest of the
    backward, in what would be waiting; `in_flight` then counts forwards that wait for those.
    """

    begins: tuple[str, ...] = Field(min_length=1)
    in_flight: tuple[Annotated[int, Field(ge=1)], ...]
    virtual: int = Field(default=1, ge=1)
    split_backward: bool = False

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: Any) -> dict[str, Any]:
        """Leave out what plans without it do not say, so that their digests stay."""
        data: dict[str, Any] = handler(self)
        if self.virtual == 1:
            del data["virtual"]
        if not self.split_backward:
            del data["split_backward"]
        return data

    @property
    def num_stages(self) -> int:
        return self.num_pieces // self.virtual

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces that `begins` cuts, of which each stage has `virtual`."""
        return len(self.begins) + 1

    @model_validator(mode="after")
    def _is_whole(self) -> Pipeline:
        if len(set(self.begins)) < len(self.begins):
            raise ValueError("each stage begins at a block of its own")
        if self.num_pieces % self.virtual or self.num_stages < 2:
            raise ValueError(
                f"as many pieces on each of two stages or more are needed; got {self.num_pieces} for {self.virtual} a stage"
            )
        if self.virtual > 1 and self.split_backward:
            raise ValueError("several pieces a stage or a split backward are needed, not both")
        if len(self.in_flight) != self.num_stages:
            raise ValueError(
                f"in_flight needs a number for each of {self.num_stages} stages; got {len(self.in_flight)}"
            )
        if any(later > earlier for earlier, later in zip(self.in_flight, self.in_flight[1:])):
            raise ValueError(
                "in_flight may not rise from a stage to the next, which would wait for one another for ever"
            )
        return self


class PiecePrediction(Record):
    """What one of several pieces of a stage takes, for a micro-batch."""

    forward_s: float
    backward_s: float
    hand_s: float = 0.0
    return_s: float = 0.0


class StagePrediction(Record):
    """What one stage of a pipeline takes. Seconds are of one micro-batch, but for those of once a step."""

    peak_bytes: int
    peak_at: str = ""
    breakdown: dict[str, int] = {}
    """Bytes alive at the stage's peak, by category."""
    forward_s: float
    backward_s: float
    """Reruns included, and in both what transfers add."""
    recompute_s: float = 0.0
    """What of `backward_s` is spent on reruns."""
    transfer_s: float = 0.0
    """The part of `forward_s` and `backward_s` that waits for transfers of offloaded values, hidden by no computation."""
    moved_bytes: int = 0
    """The bytes that each device of the stage offloads in a step; as many come back."""
    comm_s: float = 0.0
    """What of `forward_s` and `backward_s` is spent on collectives within the stage."""
    begin_s: float = 0.0
    """Once a step, before the first forward: gathers that serve all micro-batches."""
    update_s: float = 0.0
    """Once a step: the optimizer's step."""
    reduce_s: float = 0.0
    """Once a step, after the last backward: sums of gradients over the stage's own ranks."""
    tied: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Sums of tied parameters' gradients over the stages that read them, this one the first: those stages, and the seconds."""
    hand_bytes: int = 0
    """What a rank sends to the next stage for a micro-batch; gradients of most of it come back."""
    hand_s: float = 0.0
    return_s: float = 0.0
    """Seconds in which the gradients of what was handed over come back from the next stage."""
    comm_bytes: dict[str, int] = {}
    """Bytes that each rank of the stage contributes per step, by collective."""
    weight_s: float = 0.0
    """What of `backward_s` makes gradients of weights that may wait, where the backward is split."""
    pieces: tuple[PiecePrediction, ...] = ()
    """Where a stage has several; seconds and bytes above are those of all of them."""

    def busy_s(self, num_micro_batches: int) -> float:
        """Return the seconds of a step in which the stage computes or communicates within itself."""
        once_s = self.begin_s + self.reduce_s + self.update_s
        return num_micro_batches * (self.forward_s + self.backward_s) + once_s


class Predicted(Record):
    """What the plan will take per step, by the cost model; the peak is simulated, parameters and states included.

    A budget has to be a little larger than the peak, for what no simulation sees (`planner/budget.py`): `fits_in_bytes`.

    Of a plan with stages, `step_s` is that of the simulated schedule, `peak_bytes` and `breakdown` are those of the fullest
    stage, and all other seconds and bytes those of the busiest, which waits for `bubble_s`.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    recompute_s: float
    update_s: float = 0.0
    """What of `compute_s` is the optimizer's step."""
    transfer_s: float = 0.0
    """What transfers of offloaded values add to the step: what no computation hides."""
    moved_bytes: int = 0
    """What each device offloads in a step; as much comes back."""
    moved_state_bytes: int = 0
    """What each device brings back of the optimizer's states in a step; as much leaves again."""
    peak_bytes: int
    fits_in_bytes: int = 0
    """The smallest budget (`--memory`) that holds this plan; 0 in plans of before it was said."""
    breakdown: dict[str, int] = {}
    """Bytes alive at the peak, by category."""
    comm_bytes: dict[str, int] = {}
    """Bytes that each rank contributes per step, by collective."""
    bubble_s: float = 0.0
    """What of a step the busiest stage waits for others."""
    stages: tuple[StagePrediction, ...] = ()


class SolverInfo(Record):
    """How the plan was found. `gap`: proven distance from the optimum of the cost model, as a fraction."""

    name: str
    status: str
    """`optimal`: proven to a thousandth; `feasible`: the best that was found; `edited`: somebody else's decisions."""
    gap: float | None = None
    unseen_meshes: tuple[str, ...] = ()
    """Meshes that were not searched: what is proven does not speak of them."""
    digest: str = ""
    """Of the question and the decisions as they were found: a plan that was edited since has another one."""
    solve_s: float
    plan_s: float
    notes: tuple[str, ...] = ()


class Plan(Artifact):
    """The answer of `trainwright.plan`; runs in a process that has no solver installed."""

    has_summary: ClassVar[bool] = True
    format_version: int = FORMAT_VERSION
    model: ModelRef
    fingerprint: str
    """Of the captured program; another model, batch shape or library version has another one."""
    torch_version: str
    batch: dict[str, BatchEntry]
    literals: dict[str, Any] = {}
    """What in the batch is no tensor (`use_cache=False`), passed on as it is."""
    loss_fn: str | None = None
    """The name of the loss function that it was made with; empty for the loss that the model returns, `None` if unknown."""
    shapes: tuple[ShapePlan, ...] = ()
    """Further shapes within the same budget. Batches that are nowhere larger than one of the planned need no entry."""
    dtype: str = "fp32"
    autocast: str | None = None
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] = {}
    """What differs from its defaults, but for the learning rate; text stands for numbers that are not finite."""
    optimizer_form: Literal["fused", "foreach", "loop"] = "loop"
    """How its step runs: one pass over memory, lists of all parameters at once, or one parameter after the other."""
    optimizer_groups: tuple[OptimizerGroup, ...] = ()
    """The parameters for which it has settings of their own; all others have `optimizer_options`."""
    optimizer_owned: tuple[str, ...] = ()
    """The parameters that it reads whole and that one rank steps on, for all; other such ones, every rank does."""
    cluster: Cluster
    budget_bytes: int | None
    mesh: dict[str, int] = Field(min_length=1)
    """Sizes by axis, the outermost first; `pipe` is one of them where there are stages, and no layout names it."""
    pipeline: Pipeline | None = None
    offload: OffloadPlan | None = None
    """Where anything is offloaded."""
    tier: TierPlan | None = None
    """The traffic of the disks on which parameters, gradients and optimizer states rest, where that was asked for."""
    compile: dict[str, dict[str, str]] | None = None
    """Where torch compiles the blocks: what share of its partitioner's choice they keep, by blocks, where that is below 1."""
    micro_batches: int = Field(default=1, ge=1)
    """Into how many parts a step cuts the batch, one forward and backward after the other."""
    corrections: dict[str, float | str] = {}
    """By op, what makes the mean over micro-batches exact: a factor, `weighted` (by what counts), `whole-sum` …"""
    loss_chunks: int = Field(default=0, ge=0)
    """Into how many chunks each rank cuts its rows to take head and loss together; 0: logits stand whole."""
    expert_imbalance: Annotated[float, Field(ge=1)] | Literal["worst"] = DEFAULT_IMBALANCE
    """By how much a rank's experts may get more rows than their even share, in any layer, for the promised peak to hold."""
    predicted: Predicted
    solver: SolverInfo
    params: dict[str, ParamPlan]
    modules: dict[str, OpPlan]
    overlap: Literal["none", "buckets", "ahead"] = "none"
    """Whether gradients are reduced together, and parameters gathered ahead of their use."""
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _compiled_is_alone(self) -> Plan:
        """Blocks are compiled on one device, in one run a step."""
        if self.compile is not None and (self.num_ranks > 1 or self.micro_batches > 1 or self.pipeline is not None):
            raise ValueError("a plan with `compile` is of one device, one micro-batch and no stages")
        return self

    @model_validator(mode="after")
    def _stages_are_whole(self) -> Plan:
        """The stages, their axis and the version belong together."""
        pipeline = self.pipeline
        if pipeline is None:
            if self.predicted.stages:
                raise ValueError("predicted stages need a `pipeline`")
            return self
        if self.format_version != STAGED_VERSION:
            raise ValueError(f"a plan with a `pipeline` is of format version {STAGED_VERSION}")
        if next(iter(self.mesh.items())) != (PIPE, pipeline.num_stages):
            raise ValueError(f"mesh needs `{PIPE}` of {pipeline.num_stages}, a rank or more a stage, as its first axis")
        if len(self.mesh) < 2:
            raise ValueError(f"mesh needs an axis of one stage's ranks beside `{PIPE}`, of size 1 at least")
        if pipeline.in_flight[0] > self.micro_batches * pipeline.virtual:
            raise ValueError(
                f"in_flight is at most the number of micro-batches, {self.micro_batches}, for each piece of a stage"
            )
        if len(self.predicted.stages) not in (0, pipeline.num_stages):
            raise ValueError(f"predicted stages need to be {pipeline.num_stages}, one for each")
        return self

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        return 1 if self.pipeline is None else self.pipeline.num_stages

    @property
    def inner_mesh(self) -> dict[str, int]:
        """The axes of one stage's ranks, which every layout lists; all of the mesh without a pipeline."""
        return {name: size for name, size in self.mesh.items() if self.pipeline is None or name != PIPE}

    @property
    def inner_cluster(self) -> Cluster:
        """The hardware of one stage; all of it without a pipeline."""
        return self.cluster.of_stage(self.num_stages)

    @property
    def imbalance(self) -> float:
        """Return `expert_imbalance` as a number, infinite for the worst that can be."""
        return math.inf if self.expert_imbalance == "worst" else float(self.expert_imbalance)

    @property
    def fits_device(self) -> bool:
        """Whether a device has the memory that is predicted; a plan without a budget may need more."""
        return self.predicted.peak_bytes <= self.cluster.device.memory_bytes

    @property
    def sampled(self) -> dict[str, float]:
        """Return the linear maps whose weights' gradients are estimates, with the share of rows that each keeps."""
        return {key: op.sampled for key, op in self.modules.items() if op.sampled}

    def in_memory(self) -> Plan:
        """Return the plan with everything in memory that it lets rest on disks; its peak is not that of a run of this one.

        What its activations do stays, so that loss and gradients are computed as on disks.
        """
        if self.tier is None:
            return self
        params = {key: param.model_copy(update={"offloaded": {}}) for key, param in self.params.items()}
        return self.model_copy(update={"tier": None, "params": params})

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states of any parameter are off the device between steps."""
        return any(param.offloaded for param in self.params.values())

    def digest(self) -> str:
        """Return a hash of the question and the decisions; predictions, notes and how the plan was found do not count."""
        data = self.model_dump(mode="json", exclude=_NOT_DECIDED)
        for name in _SINCE_FIRST:  # of plans that were signed before there were these
            if getattr(self, name) == type(self).model_fields[name].default:
                del data[name]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def signed(self) -> Plan:
        """Return the plan with its own digest, as its planner leaves it."""
        return self.model_copy(update={"solver": self.solver.model_copy(update={"digest": self.digest()})})

    @property
    def is_edited(self) -> bool:
        """Whether the decisions, or what they answer, are others than those that the planner wrote."""
        return self.solver.status == EDITED or self.solver.digest not in ("", self.digest())

    @property
    def verdict(self) -> str:
        """What is known of how good the plan is, in words."""
        solver = self.solver
        if self.is_edited:
            return "edited by hand; nothing is known of how far from the optimum it is"
        where = "" if solver.name == "joint" else f" for {solver.name}"
        if solver.gap is None:
            return "best found; nothing is proven"
        if solver.status == "optimal":
            found = f"optimal{where}, to within {max(0.01, 100 * solver.gap):.2g} %"
        else:
            found = f"best found; within {100 * solver.gap:.2g} % of the optimum{where} (proven)"
        return found + (" on this mesh" if solver.unseen_meshes else "")

    def micro_batch(self) -> dict[str, BatchEntry]:
        """Return the entries of one micro-batch, over all ranks: `fingerprint` and layouts are of these shapes."""
        own = names_of_batch({name: entry.shape for name, entry in self.batch.items()})
        return {
            name: entry.model_copy(update={"shape": (entry.shape[0] // self.micro_batches, *entry.shape[1:])})
            if name in own
            else entry
            for name, entry in self.batch.items()
        }

    def shard_batch(self, batch: Mapping[str, Any] | tuple[Any, ...], rows: Literal["all", "own"] | None = None) -> Any:
        """Return this rank's part of a global `batch`, under `torch.distributed`.

        The batch may be smaller than planned in any dim. rows: `all`: it is the whole global batch, the same on every rank;
        `own`: this rank's rows of one of the planned shape. By default the batches of a loader with `plan.sampler` are known
        for what they are, others by their number of rows; where it could be either, `UserError` is raised.
        """
        from ..runtime.batch import shard_batch

        return shard_batch(self, batch, rows=rows)

    def sampler(
        self, dataset: Any, *, shuffle: bool = True, seed: int = 0, last: str = "drop", whole: bool = False
    ) -> Any:
        """Return a `batch_sampler` for a `DataLoader`: this rank's rows of each global batch; see `PlanSampler`."""
        from ..runtime.training.sampler import PlanSampler

        return PlanSampler(self, dataset, shuffle=shuffle, seed=seed, last=last, whole=whole)

    def padded(self, dataset: Any) -> Any:
        """Return `dataset` with an example that has no weight in the loss, for `sampler(last="pad")`; see `PaddedDataset`."""
        from ..runtime.training.padding import PaddedDataset

        return PaddedDataset(self, dataset)

    def table(self) -> str:
        """Return the decisions and the prediction for the terminal."""
        from ..reports.terminal import plan_table

        return plan_table(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML file that stands alone."""
        from ..reports.html import write_plan

        write_plan(self, path)

    def _render(self) -> str:
        """One line an entry, so that a plan reads well and its difference to another one does too."""
        data = self.model_dump(mode="json", exclude_defaults=False)
        if self.pipeline is None:  # as the first version has it
            del data["pipeline"], data["predicted"]["stages"], data["predicted"]["bubble_s"]
        if self.compile is None:
            del data["compile"]
        lines = []
        for key, value in data.items():
            if key in ("params", "modules", "batch") and value:
                rows = [_wrapped(f"  {as_text(name)}: {as_text(_compact(entry))}") for name, entry in value.items()]
                lines.append(f' "{key}": {{\n' + ",\n".join(rows) + "\n }")
            elif key in ("cluster", "predicted", "solver"):
                value, tables = _without_tables(value)
                text = json.dumps(value, ensure_ascii=False, indent=1).replace("\n", "\n ")
                lines.append(f' "{key}": {text.replace(_TABLES, tables)}')
            else:
                lines.append(_wrapped(f' "{key}": {as_text(value)}'))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def parse(cls, text: str, where: str = "the text") -> Plan:
        try:
            data = json.loads(text, object_pairs_hook=lambda pairs: _once_each(pairs, where))
        except json.JSONDecodeError as error:
            raise UserError(
                f"a plan in JSON is needed; {where} is not JSON (line {error.lineno}: {error.msg})"
            ) from None
        version = data.get("format_version") if isinstance(data, dict) else None
        if version not in (FORMAT_VERSION, STAGED_VERSION):
            raise UserError(
                f"a plan of format version {FORMAT_VERSION} or {STAGED_VERSION} is needed; {where} has {version!r}; make it "
                "again with `plan`"
            )
        for key in ("params", "modules", "batch"):
            if isinstance(data.get(key), dict):
                data[key] = {name: _expand(entry) for name, entry in data[key].items()}
        try:
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise UserError(
                f"a valid plan is needed; {where} is not one: {place}: {problem['msg']}; mend that entry, or, where another "
                "version of trainwright wrote it, make the plan again with `plan`"
            ) from None


def names_of_batch(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """Return the entries that hold a row for every example: those as long as the first entry that has a dim.

    >>> sorted(names_of_batch({"ids": (8, 128), "positions": (1, 128), "labels": (8,)}))
    ['ids', 'labels']
    """
    size = next((shape[0] for shape in shapes.values() if len(shape)), None)
    return frozenset(name for name, shape in shapes.items() if len(shape) and shape[0] == size)


def _once_each(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return the entries of a JSON object; `UserError` where one stands twice, of which only the last would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1)
        raise UserError(f"each entry of a plan may stand once; {where} has {twice!r} twice; take one of them out")
    return found


_TABLES = '"(tables)"'
_MAX_LINE = 150


def _without_tables(value: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Put a mark in place of a cluster's measured kernels, and return them as text, a line a kernel."""
    device = value.get("device", {})
    if not device.get("kernels"):
        return value, ""
    rows = [f"   {as_text(name)}: {as_text(table)}" for name, table in device["kernels"].items()]
    marked = {**value, "device": {**device, "kernels": _TABLES.strip('"')}}
    return marked, "{\n" + ",\n".join(rows) + "\n  }"


def _wrapped(line: str) -> str:
    """Break a line that is too long to review where JSON may be broken: after the comma that ends a string or a number."""
    lines, current = [], ""
    for part in re.split(r"(?<=[\"\d\]}],) ", line):
        if current and len(current) + len(part) >= _MAX_LINE:
            lines.append(current)
            current = f"    {part}"
        else:
            current = f"{current} {part}" if current else part
    lines.append(current)
    text = "\n".join(lines)
    return text if len(lines) == 1 or _same_json(text, line) else line


def _same_json(text: str, line: str) -> bool:
    """Whether a break fell into no string."""
    try:
        return bool(json.loads("{" + text + "}") == json.loads("{" + line + "}"))
    except json.JSONDecodeError:
        return False


def _compact(entry: dict[str, Any]) -> dict[str, Any]:
    """Drop what is empty and write a tuple of axes as one string."""
    short = {key: value for key, value in entry.items() if value not in ({}, [], ())}
    return {key: " ".join(value) if key in ("layout", "split") else value for key, value in short.items()}


def _expand(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {
        key: value.split() if key in ("layout", "split") and isinstance(value, str) else value
        for key, value in entry.items()
    }
